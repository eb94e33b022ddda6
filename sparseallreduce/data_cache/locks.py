"""Locks between processes by number, which the system drops when their holder ends, however it does.

They are locks on bytes of one file, none of which has to exist, of the kind that belongs to an open file rather than to a process: so they
also keep threads apart. A process that is forked while a lock is held does not keep it.
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

#: What comes of asking for a lock: it is ours; others have kept it for too long; the file system has none.
HELD, BUSY, NONE = "held", "busy", "none"

_RECORD = struct.Struct("@hhqqi4x")  # flock of fcntl(2) on Linux: type, whence, start, length, process
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a device in its place is not waited for
_PAUSE, _LONGEST_PAUSE = 2e-4, 2e-2  # seconds between two tries
_open: set[int] = set()  # descriptors of locks that threads of this process hold or wait for


class Locks:
    """The locks of one file.

    Parameters
    ----------
    path : path
        In a folder that exists; made when it is first needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self, number: int, patience: float) -> Iterator[str]:
        """Hold a lock while the block runs: ``HELD``, or why it does not.

        Parameters
        ----------
        number : int
            Below 2**62.
        patience : float
            Seconds to wait for other holders; they may have stopped without having ended.
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
            if os.getpid() == process:  # the number may be that of another file in a process forked meanwhile
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
    """A forked process has copies of the descriptors, by which locks would outlive their holder."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_closed_in_child)
