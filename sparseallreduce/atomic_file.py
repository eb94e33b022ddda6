"""Files that appear under their names when they are whole and on the disk, or not at all.

What is written lies beside the result under a name of its own, is forced to the disk, and renamed; then the folder, which holds the
name, is forced to the disk. So a name is always that of a whole file, the old or the new one, also after a crash of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["PathLike", "atomic_file", "atomic_path", "is_special", "publish"]

PathLike = str | os.PathLike[str]

# What file systems say that cannot force a folder to the disk, and of a folder that may be written to but not read.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}
_KEPT = 60  # characters at the end of a name, its suffix among them, that the name of the part has, too: with four bytes each it fits


@contextlib.contextmanager
def atomic_file(path: PathLike, mode: str = "wb") -> Iterator[IO[Any]]:
    """A file to write, which gets its name ``path``, in the place of one that is there, when the block ends.

    If the block raises, the file goes, and what was under the name stays. Permissions are those that the process gives new files.
    Of several writers at once, whoever ends last is the one whose file stays. A link stays, and what it points to is written. What is no
    regular file, as ``/dev/null`` or a pipe, stays what it is, and is written to as it stands.

    Parameters
    ----------
    path : path
        In a folder that exists.
    mode : {"wb", "w"}
        Text is UTF-8.

    Raises
    ------
    OSError

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_file(f"{folder}/greeting.txt", "w") as file:
    ...         _ = file.write("hello")
    ...     Path(f"{folder}/greeting.txt").read_text()
    'hello'
    """
    path = _target(path)
    if is_special(path):
        with open(path, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        return
    descriptor, part = _new_part(path)
    with _removed_on_failure(part):
        with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        _rename(part, path)


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """As :func:`atomic_file`, for who opens files by name: the name of an empty file to write to, with the suffix of ``path``."""
    path = _target(path)
    if is_special(path):
        yield path
        return
    descriptor, part = _new_part(path)
    os.close(descriptor)
    with _removed_on_failure(part):
        yield part
        publish(part, path)


def publish(part: Path, path: Path) -> None:
    """Force a file that is written and closed to the disk, and rename it; both names are on one file system.

    Raises
    ------
    OSError
        ``path`` is then what it was before, unless only the folder could not be forced to the disk. So where something is there that is
        neither a file nor a folder.
    """
    path = _target(path)
    if is_special(path):
        raise OSError(errno.EINVAL, f"{path} is no regular file")
    _force(part)  # a disk on the network may say only now that it is full
    _rename(part, path)


def _target(path: PathLike) -> Path:
    """The path, or what it points to if it is a link."""
    path = Path(path)
    return path.resolve() if path.is_symlink() else path


def is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _new_part(path: Path) -> tuple[int, Path]:
    """A new file beside ``path``, open, under a name that no other writer has."""
    while True:
        part = path.with_name(f".{secrets.token_hex(6)}-{path.name[-_KEPT:]}")
        with contextlib.suppress(FileExistsError):
            return os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), part


@contextlib.contextmanager
def _removed_on_failure(part: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # what was raised first says more
            part.unlink()
        raise


def _rename(part: Path, path: Path) -> None:
    os.replace(part, path)
    try:
        _force(path.parent)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _force(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
