"""What a command does on SIGTERM."""

from __future__ import annotations

import signal

__all__ = ["stop_as_interrupted"]


def stop_as_interrupted() -> None:
    """From now on SIGTERM interrupts the command as SIGINT does, so that it takes away its unfinished files before it ends."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
