"""Determine how much memory this process may still use, given the limits of its control groups and of the machine.

The kernel charges shared memory to the control group of the process that touches it first, and kills a process of a group that reaches its
limit. File pages that the kernel can drop immediately are subtracted from the usage here, although the kernel counts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["memory_left"]

_ROOT = Path("/")
# Files of a control group: its limit, its usage, and the entries of memory.stat that can be dropped.
_VERSION_2 = "memory.max", "memory.current", ("inactive_file", "active_file")
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")


def memory_left(root: Path | None = None) -> float:
    """Return the bytes that this process may still allocate, as far as the system reports; infinity if it reports nothing.

    Parameters
    ----------
    root : Path, optional
        Root of the file system that contains /proc and /sys, "/" by default.
    """
    root = _ROOT if root is None else root
    left = [_left_in(folder, *files) for folder, files in _groups(root)]
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
    return min(left, default=math.inf) if machine is None else min([1024 * machine, *left])


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Yield the folders of this process's control groups and of their parents.

    In a container the paths may be those of the host and not exist; the container's own group is then at the root of the hierarchy.
    """
    mounted = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            hierarchies, files = [mounted, mounted / "unified"], _VERSION_2
        elif "memory" in names.split(","):
            hierarchies, files = [mounted / "memory"], _VERSION_1
        else:
            continue
        for hierarchy in hierarchies:
            folder = hierarchy / path.strip("/")
            for group in (folder, *folder.parents):
                yield group, files
                if group == hierarchy:
                    break


def _left_in(group: Path, limit: str, usage: str, droppable: tuple[str, str]) -> float:
    """Return the bytes that a group's limit leaves, infinity if it has none."""
    with suppress(OSError, ValueError):
        most, taken = int((group / limit).read_text()), int((group / usage).read_text())
        statistics = _numbers(group / "memory.stat")
        return most - taken + sum(statistics.get(name, 0) for name in droppable)
    return math.inf


def _numbers(file: Path) -> dict[str, int]:
    """Return the number after the first word of each line, by that word."""
    words = (line.split() for line in _lines(file))
    return {first: int(number) for first, number, *_ in (each for each in words if len(each) > 1) if number.isdigit()}


def _lines(file: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return file.read_text().splitlines()
    return []
