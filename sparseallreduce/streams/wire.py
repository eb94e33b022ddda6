"""Streams as bytes: a header of 64 bytes that names what follows, and a payload written by a codec (thesis section 4.1.1).

A message is the headers of one stream or several, and then their payloads. Layout of a header, little-endian:

====== ===== ==========================================================================
offset bytes field
====== ===== ==========================================================================
0      4     magic, ``b"SARS"``
4      1     version of this layout
5      1     dtype of the values (position in :data:`~sparseallreduce.streams.stream.DTYPES`)
6      1     form: 0 sparse, 1 dense, 2 dense with a mask of the positions present
7      1     codec of the payload
8      8     dimension of the whole vector
16     16    index range covered, lo and hi
32     8     entries stored
40     8     bytes of the payload
48     4     width of a row, 0 for a plain vector
52     1     1 in the last header of a message, 0 in those before it
53     7     reserved, zero
60     4     CRC-32 of the 60 bytes before
====== ===== ==========================================================================
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import WireError
from sparseallreduce.streams.stream import DTYPES, SparseStream, index_dtype

__all__ = [
    "CODECS",
    "HEADER_BYTES",
    "VERSION",
    "Codec",
    "Header",
    "decode",
    "enclose",
    "encode",
    "join",
    "message_bytes",
    "part_lengths",
    "read_header",
    "read_headers",
]

MAGIC = b"SARS"
VERSION = 1
HEADER_BYTES = 64
SPARSE, DENSE, DENSE_MASKED = 0, 1, 2
_LAYOUT = struct.Struct("<4sBBBBQQQQQIB7x")
_CRC = struct.Struct("<I")

Bytes = NDArray[np.uint8]


class Header(NamedTuple):
    """What a frame says of its stream."""

    dtype: np.dtype[Any]
    form: int
    codec: int
    size: int
    lo: int
    hi: int
    stored: int
    payload: int  # bytes
    width: int | None
    last: bool  # of its message


class Codec(Protocol):
    """How the arrays of a stream are laid out as payload. A codec loses nothing."""

    number: int

    def nbytes(self, stream: SparseStream) -> int:
        """Bytes of the payload of ``stream``."""

    def parts(self, stream: SparseStream) -> list[Bytes]:
        """The payload, in parts that need not be copied together; views of the stream's arrays where they travel as they are."""

    def lengths(self, header: Header) -> list[int]:
        """The bytes of each part."""

    def read(self, header: Header, parts: Sequence[Bytes]) -> SparseStream:
        """The stream, on arrays that may be views of the parts."""


class Plain:
    """The arrays as they are: values, then indices (COO); or the values alone if dense, then the mask if there is one."""

    number = 0

    def nbytes(self, stream: SparseStream) -> int:
        if not stream.is_dense:
            return stream._stored.nbytes + stream.stored * index_dtype(stream.size).itemsize
        return stream._stored.nbytes + (0 if stream._present is None else (stream.extent + 7) // 8)

    def parts(self, stream: SparseStream) -> list[Bytes]:
        parts = [stream._stored]
        if not stream.is_dense:
            parts.append(stream._entries()[0])
        elif stream._present is not None:
            parts.append(np.packbits(stream._present))
        return [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]

    def lengths(self, header: Header) -> list[int]:
        values = header.stored * header.dtype.itemsize * (header.width or 1)
        if header.form == SPARSE:
            return [values, header.stored * index_dtype(header.size).itemsize]
        return [values] if header.form == DENSE else [values, (header.stored + 7) // 8]

    def read(self, header: Header, parts: Sequence[Bytes]) -> SparseStream:
        shape = (header.stored,) if header.width is None else (header.stored, header.width)
        values = parts[0].view(header.dtype).reshape(shape)
        if header.form == SPARSE:
            return SparseStream._sparse_form(parts[1].view(index_dtype(header.size)), values, header.size, header.lo, header.hi)
        present = np.unpackbits(parts[1], count=header.stored).astype(np.bool_) if header.form == DENSE_MASKED else None
        return SparseStream._dense_form(values, header.size, header.lo, header.hi, present)


CODECS: dict[int, Codec] = {Plain.number: Plain()}


def message_bytes(streams: Sequence[SparseStream], codec: Codec = CODECS[0]) -> int:
    """Bytes of the message that carries ``streams``, headers included."""
    return sum(HEADER_BYTES + codec.nbytes(stream) for stream in streams)


def encode(streams: Sequence[SparseStream], codec: Codec = CODECS[0]) -> Bytes:
    """The message that carries ``streams`` in one piece, a new array: the headers, then the payloads.

    >>> streams = decode(encode([SparseStream([3], [1.5], 4)]))
    >>> streams[0].to_dense()
    array([0. , 0. , 0. , 1.5])
    """
    envelope, parts = enclose(streams, codec)
    return np.concatenate([envelope, *parts])


def decode(message: Bytes) -> list[SparseStream]:
    """The streams of a message in one piece, on views of its bytes.

    Raises
    ------
    WireError
        If the message is foreign, truncated, altered in a header, of another version, or of no frame at all.
    """
    headers = read_headers(message)
    at = len(headers) * HEADER_BYTES
    announced = sum(header.payload for header in headers)
    if at + announced != len(message):
        raise WireError(f"a message announces a payload of {announced} bytes, but {len(message) - at} follow: it was truncated or altered")
    parts = []
    for length in part_lengths(headers):
        parts.append(message[at : at + length])
        at += length
    return join(headers, parts)


def enclose(streams: Sequence[SparseStream], codec: Codec = CODECS[0]) -> tuple[Bytes, list[Bytes]]:
    """The headers of ``streams`` as one array of bytes, and the parts of their payloads, uncopied."""
    envelope, parts = [], []
    for position, stream in enumerate(streams):
        payload = codec.parts(stream)
        envelope.append(_header(stream, sum(map(len, payload)), codec, last=position == len(streams) - 1))
        parts += payload
    return np.frombuffer(b"".join(envelope), np.uint8), parts


def read_headers(message: Bytes) -> list[Header]:
    """The headers that a message starts with, checked.

    Raises
    ------
    WireError
        As for :func:`read_header`.
    """
    headers = [read_header(message)]
    while not headers[-1].last:
        headers.append(read_header(message[len(headers) * HEADER_BYTES :]))
    return headers


def part_lengths(headers: Sequence[Header]) -> list[int]:
    """The bytes of each part of the payloads that follow ``headers``."""
    return [length for header in headers for length in CODECS[header.codec].lengths(header)]


def join(headers: Sequence[Header], parts: Sequence[Bytes]) -> list[SparseStream]:
    """The streams whose headers and parts these are, on the memory of the parts."""
    streams, at = [], 0
    for header in headers:
        codec = CODECS[header.codec]
        count = len(codec.lengths(header))
        streams.append(codec.read(header, parts[at : at + count]))
        at += count
    return streams


def read_header(frame: Bytes) -> Header:
    """The header at the start of ``frame``, checked.

    Raises
    ------
    WireError
        If the bytes are no header, or not one of this version, or make no sense.
    """
    if len(frame) < HEADER_BYTES:
        raise WireError(f"a message of {len(frame)} bytes is shorter than a header of {HEADER_BYTES}: it was truncated or is foreign")
    raw = frame[:HEADER_BYTES].tobytes()
    magic, version, dtype, form, codec, size, lo, hi, stored, payload, width, last = _LAYOUT.unpack_from(raw)
    if magic != MAGIC:
        raise WireError(f"a message starts with {magic!r} instead of {MAGIC!r}: it does not come from this library")
    if version != VERSION:
        raise WireError(f"a message has layout version {version}, this library reads {VERSION}: install the same release on all ranks")
    if _CRC.unpack_from(raw, _LAYOUT.size)[0] != zlib.crc32(raw[: _LAYOUT.size]):
        raise WireError("the header of a message does not match its checksum: it was altered on the way")
    sparse = form == SPARSE
    if (
        dtype >= len(DTYPES)
        or form > DENSE_MASKED
        or codec not in CODECS
        or not lo <= hi <= size
        or (stored > hi - lo if sparse else stored != hi - lo)
    ):
        raise WireError(f"the header of a message makes no sense: {dtype=}, {form=}, {codec=}, {size=}, range [{lo}, {hi}), {stored=}")
    header = Header(DTYPES[dtype], form, codec, size, lo, hi, stored, payload, width or None, last == 1)
    expected = sum(CODECS[codec].lengths(header))
    if payload != expected:
        raise WireError(f"the header of a message announces a payload of {payload} bytes for {stored} entries, which take {expected}")
    return header


def _header(stream: SparseStream, payload: int, codec: Codec, last: bool) -> bytes:
    form = SPARSE if not stream.is_dense else DENSE if stream._present is None else DENSE_MASKED
    raw = _LAYOUT.pack(
        MAGIC,
        VERSION,
        DTYPES.index(stream.dtype),
        form,
        codec.number,
        stream.size,
        stream.lo,
        stream.hi,
        stream.stored,
        payload,
        stream.width or 0,
        last,
    )
    return raw + _CRC.pack(zlib.crc32(raw))
