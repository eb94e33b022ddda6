"""Folders in shared memory that exist as long as a process uses them.

Every process that uses a folder holds a shared lock on a file in it, which the system releases when the process ends. The last process to
leave gets the lock exclusively and removes the folder. A folder whose processes were all killed is removed by the next process that opens
any folder.

The folders of a user are in one that no other user can read or write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import time
import weakref
from pathlib import Path

__all__ = ["SHARED_MEMORY", "SharedFolder"]

#: Where Linux has a file system in memory.
SHARED_MEMORY = Path("/dev/shm")

_USERS = "users"
_TRIES, _PAUSE = 1000, 2e-3  # seconds


class SharedFolder:
    """A named folder in shared memory that this process uses.

    Parameters
    ----------
    name : str
        The same for all processes that share it.
    memory : path
        On a file system in memory.

    Raises
    ------
    OSError
        If there is no such file system, or the path belongs to another user.
    """

    path: Path
    process: int

    def __init__(self, name: str, memory: Path = SHARED_MEMORY) -> None:
        own = memory / f"sparseallreduce-{os.geteuid()}"
        with contextlib.suppress(FileExistsError):
            own.mkdir(mode=0o700)
        status = own.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(errno.EPERM, f"{own} is not a folder of this user's alone")
        for left in own.iterdir():
            _remove_unused(left)
        self.path, self.process = own / name, os.getpid()
        self._file = _entered(self.path)
        self._finalizer = weakref.finalize(self, _left, self.path, self._file, self.process)

    def leave(self) -> None:
        """Stop using the folder in this process. In a forked process the parent's use continues."""
        self._finalizer()


def _entered(folder: Path) -> int:
    """Return the descriptor that holds the shared lock."""
    for _ in range(_TRIES):
        file = -1
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            file = os.open(folder / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), os.stat(folder / _USERS)):
                return file
        except (FileNotFoundError, FileExistsError, BlockingIOError):  # another process is removing it
            pass
        except BaseException:
            if file >= 0:
                os.close(file)
            raise
        if file >= 0:
            os.close(file)
        time.sleep(_PAUSE)
    raise OSError(errno.EBUSY, f"{folder} is being removed")


def _left(folder: Path, file: int, process: int) -> None:
    if os.getpid() == process:
        _remove_if_alone(folder, file)
    os.close(file)  # the parent process keeps the lock


def _remove_unused(folder: Path) -> None:
    """Remove a folder that no process uses."""
    try:
        file = os.open(folder / _USERS, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it is empty, a process was killed while opening or removing it
        return
    try:
        _remove_if_alone(folder, file)
    finally:
        os.close(file)


def _remove_if_alone(folder: Path, file: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.stat(folder / _USERS)):
            return
        for each in folder.iterdir():
            if each.name != _USERS:
                shutil.rmtree(each, ignore_errors=True) if each.is_dir() else each.unlink()
        (folder / _USERS).unlink()  # last, since its absence marks the folder as removed
        folder.rmdir()
