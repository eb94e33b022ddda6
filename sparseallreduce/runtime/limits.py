"""How much memory the limits of this process's control groups leave, and the machine.

The kernel counts memory that ranks share against the control group of who touches it first, and kills a process of a group that has come to
its limit. Pages of files that it can drop at once do not count here, although it has counted them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["memory_left"]

_ROOT = Path("/")
# Where groups are, and the files of one: its limit, what it takes, and what can be dropped, as its statistics call it.
_VERSION_2 = "memory.max", "memory.current", ("inactive_file", "active_file")
_VERSION_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")


def memory_left(root: Path | None = None) -> float:
    """Bytes that this process can still take, as far as the system tells; infinity if it tells nothing.

    Parameters
    ----------
    root : Path, optional
        Where the files of the system are, "/" by default.
    """
    root = _ROOT if root is None else root
    left = [_left_in(folder, *files) for folder, files in _groups(root)]
    machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
    return min(left, default=math.inf) if machine is None else min([1024 * machine, *left])


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Folders of the groups that this process is in, and of those that they are in.

    In a container the paths may be those of the host, and not there: then its own group is where the groups begin.
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
    """Bytes that a group's limit leaves, infinity if it has none."""
    with suppress(OSError, ValueError):
        most, taken = int((group / limit).read_text()), int((group / usage).read_text())
        statistics = _numbers(group / "memory.stat")
        return most - taken + sum(statistics.get(name, 0) for name in droppable)
    return math.inf


def _numbers(file: Path) -> dict[str, int]:
    """The number behind the first word of each line."""
    words = (line.split() for line in _lines(file))
    return {first: int(number) for first, number, *_ in (each for each in words if len(each) > 1) if number.isdigit()}


def _lines(file: Path) -> list[str]:
    with suppress(OSError, ValueError):
        return file.read_text().splitlines()
    return []
