"""Check whether a process of this machine is running, so that ranks do not wait for one that has ended."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_alive", "started_at"]


def is_alive(process: int, start: int) -> bool:
    """Return True if the process that started at ``start``, as returned by :func:`started_at`, is running. A zombie is not."""
    fields = _fields(process)
    return not fields or (fields[0] not in "ZX" and int(fields[19]) == start)


def started_at(process: int) -> int:
    """Return when a process started, in clock ticks since the machine booted; 0 if unknown.

    It distinguishes the process from a later one with the same id.
    """
    fields = _fields(process)
    return int(fields[19]) if fields else 0


def _fields(process: int) -> list[str]:
    """Return the fields of ``/proc/PROCESS/stat`` from the state on.

    They are empty if the system has no ``/proc``, and describe a dead process if it has ended.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return ["X", *["0"] * 19] if Path("/proc/self/stat").exists() else []
    except OSError:
        return []
