"""Handling of SIGTERM in commands."""

from __future__ import annotations

import signal

__all__ = ["stop_as_interrupted"]


def stop_as_interrupted() -> None:
    """Let SIGTERM interrupt the command as SIGINT does, so that it removes its unfinished files before it ends."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
