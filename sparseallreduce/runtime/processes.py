"""Whether a process of this machine is there, for ranks that would otherwise wait for one that has ended."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_alive", "started_at"]


def is_alive(process: int, start: int) -> bool:
    """Whether a process that started at a time, as :func:`started_at` gives it, is running; a zombie is not."""
    fields = _fields(process)
    return not fields or (fields[0] not in "ZX" and int(fields[19]) == start)


def started_at(process: int) -> int:
    """When a process started, in clock ticks since the machine did, which tells it from a later one of the same number; 0 if unknown."""
    fields = _fields(process)
    return int(fields[19]) if fields else 0


def _fields(process: int) -> list[str]:
    """What the system tells of a process, from its state on; nothing where it tells nothing of any, and a dead state if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return ["X", *["0"] * 19] if Path("/proc/self/stat").exists() else []
    except OSError:
        return []
