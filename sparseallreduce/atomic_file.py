"""Files that appear under their names when they are whole and on the disk, or not at all.

What is written lies beside the result under a name of its own, is forced to the disk, and renamed; then the folder, which holds the
name, is forced to the disk. So a name is always that of a whole file, the old or the new one, also after a crash of the machine.

Whatever fails, the error names the file that was to be written, not the one beside it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["PathLike", "atomic_file", "atomic_path", "clear_special", "is_special", "naming", "publish"]

PathLike = str | os.PathLike[str]

# What file systems say that cannot force a folder to the disk, and of a folder that may be written to but not read.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}
_KEPT = 60  # characters at the end of a name, its suffix among them, that the name of the part has, too: with four bytes each it fits
_PART = re.compile(r"\.[0-9a-f]{12}-")  # how that begins


@contextlib.contextmanager
def atomic_file(path: PathLike, mode: str = "wb", *, own: bool = False) -> Iterator[IO[Any]]:
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
    own : bool
        Whether the name is the library's, and none that a user has chosen: then a pipe or a device, or a link to one, is replaced.

    Raises
    ------
    OSError
        With the name of the file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_file(f"{folder}/greeting.txt", "w") as file:
    ...         _ = file.write("hello")
    ...     Path(f"{folder}/greeting.txt").read_text()
    'hello'
    """
    encoding = None if "b" in mode else "utf-8"
    with naming(path):
        target = _target(path)
        if is_special(target):
            if not own:
                with open(target, mode, encoding=encoding) as file:
                    yield file
                return
            target = Path(path)  # the link itself
        descriptor, part = _new_part(target)
        with _removed_on_failure(part):
            with open(descriptor, mode, encoding=encoding) as file:
                yield file
                file.flush()
                os.fsync(descriptor)
            _rename(part, target)


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """As :func:`atomic_file`, for who opens files by name: the name of an empty file to write to, with the suffix of ``path``."""
    with naming(path):
        target = _target(path)
        if is_special(target):
            yield target
            return
        descriptor, part = _new_part(target)
        os.close(descriptor)
        with _removed_on_failure(part):
            yield part
            publish(part, target)


def publish(part: Path, path: Path) -> None:
    """Force a file that is written and closed to the disk, and rename it; both names are on one file system.

    Raises
    ------
    OSError
        ``path`` is then what it was before, unless only the folder could not be forced to the disk. So where something is there that is
        neither a file nor a folder.
    """
    with naming(path):
        target = _target(path)
        if is_special(target):
            raise OSError(errno.EINVAL, "it is no regular file")
        _force(part)  # a disk on the network may say only now that it is full
        _rename(part, target)


@contextlib.contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Have errors of the system in the block name this file, if they name none, or one beside it that was to become it.

    Raises
    ------
    OSError
    """
    try:
        yield
    except OSError as error:
        named = error.filename
        beside = isinstance(named, str | os.PathLike) and _PART.match(os.path.basename(named))
        if error.errno is not None and (named is None or beside or error.filename2 is not None):
            error.filename = os.fspath(path)
            del error.filename2  # None would be shown
        raise


def _target(path: PathLike) -> Path:
    """The path, or what it points to if it is a link."""
    path = Path(path)
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError:  # what Python up to 3.12 says of a link that leads to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def clear_special(path: PathLike) -> None:
    """Remove what lies under a name of the library's, if it is a pipe or a device, or a link to one.

    Raises
    ------
    OSError
    """
    if is_special(_target(path)):
        Path(path).unlink()


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
