"""Wait for the launcher to read the output of a rank, which it would discard if the rank aborted first."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from contextlib import suppress

__all__ = ["flush_to_launcher"]

_COUNT = struct.Struct("i")


def flush_to_launcher(patience: float = 10.0, afterwards: float = 0.2) -> None:
    """Flush the standard streams, and wait until the launcher has read what is in their pipes.

    Call it before ``MPI_Abort``: launchers discard the output that they have not read by then, such as the traceback of the error, as they
    do on a busy machine. A stream that is not a pipe is not waited for.

    Parameters
    ----------
    patience : float
        Longest wait in seconds, for a launcher that does not read.
    afterwards : float
        Seconds to wait after the last byte was read, for the launcher to pass it on.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    deadline = time.monotonic() + patience
    while any(map(_unread, (1, 2))) and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(afterwards)


def _unread(descriptor: int) -> int:
    """Return the number of bytes in a pipe, or 0 if the descriptor is none."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        count: int = _COUNT.unpack(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(_COUNT.size)))[0]
    except OSError:
        return 0
    return count
