"""The header of a frame: 80 bytes that describe the stream, the entries that follow, and their encoding (thesis section 4.1.1).

Layout, little-endian:

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
0      4     magic, ``b"SARS"``
4      1     version of this layout
5      1     dtype of the values (position in :data:`~sparseallreduce.streams.stream.DTYPES`)
6      1     form: 0 sparse, 1 dense, 2 dense with a mask of the positions present
7      1     index codec: encoding of the positions
8      1     value codec: encoding of the values
9      1     1 for the last stream of a message, otherwise 0
10     1     1 if another header follows this one, 0 if the payloads do
11     5     reserved, zero
16     8     dimension of the whole vector
24     16    index range covered, lo and hi
40     8     entries stored
48     8     index of the first entry in this frame
56     8     number of entries in this frame
64     8     size of the payload in bytes
72     4     width of a row, 0 for a vector
76     4     CRC-32 of the preceding 76 bytes
====== ===== ==========================================================================
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import WireError
from sparseallreduce.streams import memory
from sparseallreduce.streams.stream import DTYPES, SparseStream, index_dtype

__all__ = [
    "DENSE",
    "DENSE_MASKED",
    "HEADER_BYTES",
    "SPARSE",
    "VERSION",
    "Bytes",
    "Header",
    "check_room",
    "header_of",
    "memory_bytes",
    "pack_header",
    "read_header",
]

MAGIC = b"SARS"
VERSION = 2
HEADER_BYTES = 80
SPARSE, DENSE, DENSE_MASKED = 0, 1, 2
_LAYOUT = struct.Struct("<4sBBBBBBB5xQQQQQQQI")
_CRC = struct.Struct("<I")

Bytes = NDArray[np.uint8]


class Header(NamedTuple):
    """The fields of a frame's header."""

    dtype: np.dtype[Any]
    form: int
    index_codec: int
    value_codec: int
    size: int
    lo: int
    hi: int
    stored: int  # entries of the stream
    first: int  # of which this one is the first in the frame
    count: int  # type: ignore[assignment]  # and so many are in it
    payload: int  # bytes
    width: int | None
    last: bool  # the last stream of its message
    more: bool  # whether another header follows

    @property
    def index_bytes(self) -> int:
        """The size of a decoded index in bytes."""
        return index_dtype(self.size).itemsize

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of an entry."""
        return () if self.width is None else (self.width,)


def memory_bytes(header: Header) -> int:
    """Return the size in bytes of the arrays of the stream that a header announces."""
    place = header.index_bytes if header.form == SPARSE else header.form == DENSE_MASKED
    return header.stored * (header.dtype.itemsize * (header.width or 1) + place)


def check_room(header: Header) -> None:
    """Raise an error if a header announces more memory than the machine has, since it must have been altered.

    Raises
    ------
    WireError
        If the size exceeds the installed memory.
    """
    if memory_bytes(header) > memory.INSTALLED:
        raise WireError(f"a message announces {header.stored} entries, which take more memory than this machine has: it was altered")


def header_of(stream: SparseStream, first: int, count: int, payload: int, codecs: tuple[int, int], last: bool, more: bool) -> Header:
    """Return the header of a frame with ``count`` entries of a stream, encoded by an index codec and a value codec."""
    form = SPARSE if not stream.is_dense else DENSE if stream._present is None else DENSE_MASKED
    index_codec, value_codec = codecs
    return Header(
        stream.dtype,
        form,
        index_codec,
        value_codec,
        stream.size,
        stream.lo,
        stream.hi,
        stream.stored,
        first,
        count,
        payload,
        stream.width,
        last,
        more,
    )


def pack_header(header: Header) -> bytes:
    """Return a header as bytes."""
    dtype, form, index_codec, value_codec, size, lo, hi, stored, first, count, payload, width, last, more = header
    raw = _LAYOUT.pack(
        MAGIC,
        VERSION,
        DTYPES.index(dtype),
        form,
        index_codec,
        value_codec,
        last,
        more,
        size,
        lo,
        hi,
        stored,
        first,
        count,
        payload,
        width or 0,
    )
    return raw + _CRC.pack(zlib.crc32(raw))


def read_header(frame: Bytes) -> Header:
    """Return the header at the start of ``frame``, checked except for its codecs and its payload.

    Raises
    ------
    WireError
        If the bytes are not a valid header of this version.
    """
    if len(frame) < HEADER_BYTES:
        raise WireError(f"a message of {len(frame)} bytes is shorter than a header of {HEADER_BYTES}: it was truncated or is foreign")
    raw = frame[:HEADER_BYTES].tobytes()
    fields = _LAYOUT.unpack_from(raw)
    magic, version, dtype, form, index_codec, value_codec, last, more, size, lo, hi, stored, first, count, payload, width = fields
    if magic != MAGIC:
        raise WireError(f"a message starts with {magic!r} instead of {MAGIC!r}: it does not come from this library")
    if version != VERSION:
        raise WireError(f"a message has layout version {version}, this library reads {VERSION}: install the same release on all ranks")
    if _CRC.unpack_from(raw, _LAYOUT.size)[0] != zlib.crc32(raw[: _LAYOUT.size]):
        raise WireError("the header of a message does not match its checksum: it was altered on the way")
    if (
        dtype >= len(DTYPES)
        or form > DENSE_MASKED
        or not lo <= hi <= size < 2**63
        or (stored > hi - lo if form == SPARSE else stored != hi - lo)
        or first + count > stored
    ):
        raise WireError(
            f"the header of a message makes no sense: {dtype=}, {form=}, {size=}, range [{lo}, {hi}), {stored=}, {first=}, {count=}"
        )
    return Header(
        DTYPES[dtype], form, index_codec, value_codec, size, lo, hi, stored, first, count, payload, width or None, last == 1, more == 1
    )
