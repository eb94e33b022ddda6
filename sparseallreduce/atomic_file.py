"""Write files that appear under their names only when they are complete and on the disk.

Data is written to a temporary file in the same folder, synchronised to the disk, and renamed; then the folder is synchronised. A name thus
always refers to a complete file, the old or the new one, even after a crash of the machine. Errors name the file that was to be written,
not the temporary one.
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

# Errors of file systems that cannot synchronise a folder, and of folders that are writeable but not readable.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EACCES}
_KEPT = 60  # characters from the end of the name, with its suffix, that a temporary name includes; fits even with four bytes each
_PART = re.compile(r"\.[0-9a-f]{12}-")  # start of a temporary name


@contextlib.contextmanager
def atomic_file(path: PathLike, mode: str = "wb", *, own: bool = False) -> Iterator[IO[Any]]:
    """Open a temporary file for writing, and rename it to ``path``, replacing an existing file, at the end of the block.

    If the block raises, the temporary file is removed, and ``path`` is unchanged. Permissions are the process's defaults for new files.
    Among concurrent writers, the last to finish wins. A symbolic link is followed. Special files such as ``/dev/null`` or a pipe are
    written to directly.

    Parameters
    ----------
    path : path
        In an existing folder.
    mode : {"wb", "w"}
        Text is encoded as UTF-8.
    own : bool
        Whether the library has chosen the name, not the user: a pipe or a device, or a link to one, is then replaced.

    Raises
    ------
    OSError
        It names the file.

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
    """Yield the path of an empty temporary file with the same suffix, as :func:`atomic_file` for code that opens files by name."""
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
    """Synchronise a written and closed file to the disk, and rename it; both names must be on one file system.

    Raises
    ------
    OSError
        ``path`` is then unchanged, unless only the folder could not be synchronised. Also raised if ``path`` is neither a file nor a
        folder.
    """
    with naming(path):
        target = _target(path)
        if is_special(target):
            raise OSError(errno.EINVAL, "it is no regular file")
        _force(part)  # a network disk may report only now that it is full
        _rename(part, target)


@contextlib.contextmanager
def naming(path: PathLike) -> Iterator[None]:
    """Make system errors in the block name this file, if they name none or its temporary file.

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
    """Return the path, or the target of a symbolic link."""
    path = Path(path)
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError:  # raised by Python up to 3.12 for a link to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None


def clear_special(path: PathLike) -> None:
    """Remove a pipe or a device, or a link to one, under a name that belongs to the library.

    Raises
    ------
    OSError
    """
    if is_special(_target(path)):
        Path(path).unlink()


def is_special(path: Path) -> bool:
    """Return True if the path exists and is neither a file nor a folder."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _new_part(path: Path) -> tuple[int, Path]:
    """Create and open a temporary file in the folder of ``path``, with a unique name."""
    while True:
        part = path.with_name(f".{secrets.token_hex(6)}-{path.name[-_KEPT:]}")
        with contextlib.suppress(FileExistsError):
            return os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666), part


@contextlib.contextmanager
def _removed_on_failure(part: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the first exception is more informative
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
    """Synchronise a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
