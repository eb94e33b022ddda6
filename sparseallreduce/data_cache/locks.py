"""Numbered locks between processes, which the system releases when their holder ends for any reason.

They are locks on bytes of one file, which need not exist, and belong to an open file rather than to a process, so that they also exclude
threads. A process forked while a lock is held does not keep it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["BUSY", "HELD", "NONE", "Locks"]

#: Results of a lock request: acquired; held by others for too long; not supported by the file system.
HELD, BUSY, NONE = "held", "busy", "none"

_RECORD = struct.Struct("@hhqqi4x")  # flock of fcntl(2) on Linux: type, whence, start, length, process
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # does not block on a device
_PAUSE, _LONGEST_PAUSE = 2e-4, 2e-2  # seconds between attempts: first and longest
_open: set[int] = set()  # descriptors of locks that threads of this process hold or wait for


class Locks:
    """Numbered locks between processes, each on one byte of the same file.

    Parameters
    ----------
    path : path
        In an existing folder; the file is created when needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self, number: int, patience: float) -> Iterator[str]:
        """Hold a lock during the block, and yield ``HELD``, or the reason why it is not held.

        Parameters
        ----------
        number : int
            Below 2**62.
        patience : float
            Seconds to wait for other holders, which may have been stopped.
        """
        command = getattr(fcntl, "F_OFD_SETLK", None)  # of Linux
        try:
            file = os.open(self._path, _FLAGS, 0o666) if command is not None else -1
        except OSError:
            file = -1
        if file < 0 or command is None:
            yield NONE
            return
        _open.add(file)
        process = os.getpid()
        try:
            yield _taken(file, command, number, time.monotonic() + patience)
        finally:
            if os.getpid() == process:  # in a process forked meanwhile, the number may belong to another file
                _open.discard(file)
                os.close(file)


def _taken(file: int, command: int, number: int, until: float) -> str:
    pause = _PAUSE
    record = _RECORD.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
    while True:
        try:
            fcntl.fcntl(file, command, record)
            return HELD
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return NONE
        if time.monotonic() + pause > until:
            return BUSY
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _closed_in_child() -> None:
    """Close inherited descriptors in a forked process, by which locks would outlive their holder."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_closed_in_child)
