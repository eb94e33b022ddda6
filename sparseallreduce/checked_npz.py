"""Read arrays in NumPy's formats ``.npy`` and ``.npz``, whose sizes are checked against the file before memory is allocated.

A header may claim any number of items, and compressed bytes may expand a thousandfold. Here an array must have as many bytes as its file,
or its member of an archive, has after the header; a member must be stored or deflated, as NumPy writes it, and claim no more than deflated
bytes can expand to; and the directory of the archive must be short. Headers are matched, not evaluated, and pickles are not supported.
Every member has a checksum, which is verified when the member has been read to its end.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.checked_file import Damaged
from sparseallreduce.runtime.limits import memory_left

__all__ = ["ArrayHeader", "Npz", "damage", "has_characters", "read_header"]

Array = NDArray[Any]

_MAGIC = b"\x93NUMPY"
_LENGTHS = {(1, 0): 2, (2, 0): 4}  # size of the header's length field, by version of the format; 3.0 is only for named fields
_LONGEST_HEADER = 1 << 16  # bytes
_MOST_DIMENSIONS = 32
_ENTRY = r"""['"](?:descr['"]\s*:\s*['"](?P<descr{0}>[^'"]*)['"]|fortran_order['"]\s*:\s*(?P<order{0}>True|False)"""
_ENTRY += r"""|shape['"]\s*:\s*\((?P<shape{0}>[0-9L,\s]*)\))\s*"""
_HEADER = re.compile(r"\{\s*" + r",\s*".join(_ENTRY.format(number) for number in range(3)) + r",?\s*\}\s*")
_DTYPE = re.compile(r"[<>=|]?[biufcSU][0-9]{1,9}")
_LENGTH = re.compile(r"([0-9]{1,19})L?")  # one dimension; Python 2 wrote the L

_LONGEST_DIRECTORY = 1 << 20  # bytes, enough for some ten thousand members
_DEFLATED = 1032  # largest expansion of a byte: a match of 258 bytes takes at least two bits
_SMALL, _GROWTH = 1 << 26, 32  # an archive may expand in memory to this many bytes, or this many times the file's size
_PIECE = 1 << 20  # bytes read at once
_LAST_CHARACTER = 0x10FFFF


class ArrayHeader(NamedTuple):
    """The header of an array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # as stored; numbers, booleans, or strings of a fixed length
    fortran_order: bool

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.items * self.dtype.itemsize


def read_header(file: IO[bytes], length: int, name: str) -> ArrayHeader:
    """Read the header of an ``.npy`` file of ``length`` bytes from its start, and advance to the first item.

    Parameters
    ----------
    file : binary file
    length : int
    name : str
        Name of the array, for errors.

    Raises
    ------
    Damaged
        If there is no valid header, or it does not match the size of the file.
    """
    begin = file.read(len(_MAGIC) + 2)
    width = _LENGTHS.get((begin[-2], begin[-1])) if len(begin) == len(_MAGIC) + 2 and begin.startswith(_MAGIC) else None
    if width is None:
        raise Damaged(f"the array {name} does not begin as one")
    text_length = int.from_bytes(file.read(width), "little")
    if text_length > _LONGEST_HEADER:
        raise Damaged(f"the array {name} has a header of {text_length:,} bytes")
    text = file.read(text_length)
    header = _parsed(text.decode("latin-1"), name)
    behind = length - len(begin) - width - text_length
    if len(text) < text_length or header.nbytes != behind:
        what = f"the array {name} of shape {header.shape} and dtype {header.dtype}"
        raise Damaged(f"{what} would take {header.nbytes:,} bytes, and there are {behind:,}")
    return header


def _parsed(text: str, name: str) -> ArrayHeader:
    match = _HEADER.fullmatch(text)
    found = {} if match is None else {key[:-1]: value for key, value in match.groupdict().items() if value is not None}
    lengths = [part.strip() for part in found.get("shape", "").split(",")]
    if lengths[-1] == "":  # after a trailing comma
        lengths.pop()
    matches = [_LENGTH.fullmatch(each) for each in lengths]
    whole = len(found) == 3 and len(lengths) <= _MOST_DIMENSIONS and all(matches) and _DTYPE.fullmatch(found["descr"])
    if not whole:
        if found.get("descr") == "|O":
            raise Damaged(f"the array {name} is object, not numbers or strings")
        raise Damaged(f"the array {name} has the header {text[:80].strip()!r}, which is none of numbers or strings")
    try:
        dtype = np.dtype(found["descr"])
    except (TypeError, ValueError) as error:
        raise Damaged(f"the array {name} has items of no known kind: {error}") from None
    shape = tuple(int(each[1]) for each in matches if each is not None)
    if dtype.itemsize == 0 and 0 not in shape:
        raise Damaged(f"the array {name} has items without bytes")
    return ArrayHeader(shape, dtype, found["order"] == "True")


@contextmanager
def damage() -> Iterator[None]:
    """Convert exceptions of libraries for unreadable bytes to :class:`Damaged`; system errors propagate."""
    try:
        yield
    except (OSError, Damaged):
        raise
    except MemoryError:
        raise Damaged("there is not the memory that it claims to need") from None
    except (
        ArithmeticError,
        AttributeError,
        EOFError,
        LookupError,
        RuntimeError,  # of zipfile: passwords, and unsupported features
        TypeError,
        ValueError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise Damaged(" ".join(str(error).split()).rstrip(".") or type(error).__name__) from None


def has_characters(items: Array) -> bool:
    """Return True unless the items of a flat array are strings with invalid characters."""
    if items.dtype.kind != "U" or not items.size:
        return True
    return bool((items.view(np.dtype(np.uint32).newbyteorder(items.dtype.byteorder)) <= _LAST_CHARACTER).all())


class Npz:
    """The arrays of an ``.npz`` file.

    Parameters
    ----------
    file : binary file
        Open for reading; keep it open while arrays are read.
    in_memory : bool
        Whether everything will be read into memory. It then must not expand to much more than the file's size, nor to more than the memory.

    Raises
    ------
    Damaged
        If the file is not valid or claims impossible sizes. Methods raise it for invalid arrays.
    OSError
    """

    def __init__(self, file: BinaryIO, in_memory: bool = True) -> None:
        length = file.seek(0, os.SEEK_END)
        with damage():
            source = _Directory(file)
            archive = zipfile.ZipFile(source)
            source.most = None
        self._archive = archive
        members = archive.infolist()
        self._members = {member.filename.removesuffix(".npy"): member for member in members}
        if len(self._members) < len(members):
            raise Damaged("two of its arrays have one name")
        for member in members:
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise Damaged(f"the array {member.filename} is neither stored nor deflated")
            most = member.compress_size * (_DEFLATED if member.compress_type == zipfile.ZIP_DEFLATED else 1)
            if member.file_size > most or member.compress_size > length:
                raise Damaged(f"the array {member.filename} claims {member.file_size:,} bytes, and the file has {length:,}")
        total = sum(member.file_size for member in members)
        if in_memory and total > _SMALL + _GROWTH * length:
            raise Damaged(f"its {length:,} bytes would unpack to {total:,}")
        if in_memory and total > _SMALL and total > memory_left():
            raise Damaged(f"it has arrays of {total:,} bytes, and there is not so much memory")

    @property
    def names(self) -> list[str]:
        """The names of the arrays, in the order of the file."""
        return list(self._members)

    def open(self, name: str) -> tuple[IO[bytes], ArrayHeader]:
        """Return the items of an array as a file, to be closed by the caller, and its header."""
        if name not in self._members:
            raise Damaged(f"it lacks {name!r}")
        with damage():
            member = self._archive.open(self._members[name])
            try:
                return member, read_header(member, self._members[name].file_size, name)
            except BaseException:
                member.close()
                raise

    def array(self, name: str, most: int | None = None) -> Array:
        """Return an array of at most ``most`` bytes in native byte order, after verifying its checksum."""
        member, header = self.open(name)
        with member, damage():
            if most is not None and header.nbytes > most:
                raise Damaged(f"{name!r} has {header.nbytes:,} bytes, and no file of its kind has more than {most:,} there")
            content = np.empty(header.nbytes, np.uint8)
            done = 0
            while done < len(content):
                piece = member.read(min(_PIECE, len(content) - done))
                if not piece:
                    raise Damaged(f"{name!r} ends too early")
                content[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
                done += len(piece)
            if member.read(1):  # zipfile verifies the checksum at the end
                raise Damaged(f"{name!r} is longer than its header says")
        items = content.view(header.dtype) if header.nbytes else np.empty(header.items, header.dtype)
        if not has_characters(items):
            raise Damaged(f"the array {name} has strings of what are no characters")
        shaped = items.reshape(header.shape, order="F" if header.fortran_order else "C")
        return shaped.astype(header.dtype.newbyteorder("="), copy=False)


class _Directory:
    """A file that refuses long reads while the directory of an archive in it is located."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.most: int | None = _LONGEST_DIRECTORY
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, count: int = -1) -> bytes:
        if self.most is not None and count > self.most:
            raise zipfile.BadZipFile(f"its directory has {count:,} bytes")
        return self._file.read(count)
