"""Streams as bytes: a header of 64 bytes that names what follows, and a payload written by a codec (thesis section 4.1.1).

A message is one frame or several, one stream each. Layout of the header, little-endian:

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
40     8     bytes of the payload, a multiple of 8
48     4     width of a row, 0 for a plain vector
52     8     reserved, zero
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

__all__ = ["CODECS", "HEADER_BYTES", "VERSION", "Codec", "Header", "decode", "encode", "message_bytes", "read_header"]

MAGIC = b"SARS"
VERSION = 1
HEADER_BYTES = 64
SPARSE, DENSE, DENSE_MASKED = 0, 1, 2
_LAYOUT = struct.Struct("<4sBBBBQQQQQI8x")
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


class Codec(Protocol):
    """How the arrays of a stream are laid out as payload. A codec loses nothing, and writes a multiple of 8 bytes."""

    number: int

    def nbytes(self, stream: SparseStream) -> int:
        """Bytes of the payload of ``stream``."""

    def write(self, stream: SparseStream, payload: Bytes) -> None:
        """Fill ``payload``, of :meth:`nbytes` bytes."""

    def read(self, header: Header, payload: Bytes) -> SparseStream:
        """The stream, on arrays that may be views of ``payload``."""


class Plain:
    """The arrays as they are: indices, then values, each padded to 8 bytes (COO); or the values alone, if dense."""

    number = 0

    def nbytes(self, stream: SparseStream) -> int:
        total = _padded(stream._stored.nbytes)
        if not stream.is_dense:
            return total + _padded(stream.stored * index_dtype(stream.size).itemsize)
        return total if stream._present is None else total + _padded((stream.extent + 7) // 8)

    def write(self, stream: SparseStream, payload: Bytes) -> None:
        if not stream.is_dense:
            indices, values = stream._entries()
            _put(payload, 0, indices)
            _put(payload, _padded(indices.nbytes), values)
            return
        _put(payload, 0, stream._stored)
        if stream._present is not None:
            _put(payload, _padded(stream._stored.nbytes), np.packbits(stream._present))

    def read(self, header: Header, payload: Bytes) -> SparseStream:
        shape = (header.stored,) if header.width is None else (header.stored, header.width)
        nbytes = int(np.prod(shape)) * header.dtype.itemsize
        indices, present = index_dtype(header.size), None
        at = _padded(header.stored * indices.itemsize) if header.form == SPARSE else 0
        expected = at + _padded(nbytes) + (_padded((header.stored + 7) // 8) if header.form == DENSE_MASKED else 0)
        if expected != header.payload:
            raise WireError(f"a frame of {header.stored} entries has a payload of {header.payload} bytes instead of {expected}")
        values = payload[at : at + nbytes].view(header.dtype).reshape(shape)
        if header.form == SPARSE:
            positions = payload[: header.stored * indices.itemsize].view(indices)
            return SparseStream._sparse_form(positions, values, header.size, header.lo, header.hi)
        if header.form == DENSE_MASKED:
            present = np.unpackbits(payload[_padded(nbytes) :], count=header.stored).astype(np.bool_)
        return SparseStream._dense_form(values, header.size, header.lo, header.hi, present)


CODECS: dict[int, Codec] = {Plain.number: Plain()}


def message_bytes(streams: Sequence[SparseStream], codec: Codec = CODECS[0]) -> int:
    """Bytes of the message that carries ``streams``, headers included."""
    return sum(HEADER_BYTES + codec.nbytes(stream) for stream in streams)


def encode(streams: Sequence[SparseStream], codec: Codec = CODECS[0]) -> Bytes:
    """The message that carries ``streams``, a new array.

    >>> streams = decode(encode([SparseStream([3], [1.5], 4)]))
    >>> streams[0].to_dense()
    array([0. , 0. , 0. , 1.5])
    """
    payloads = [codec.nbytes(stream) for stream in streams]
    message = np.empty(HEADER_BYTES * len(streams) + sum(payloads), np.uint8)
    at = 0
    for stream, payload in zip(streams, payloads, strict=True):
        _write_header(message, at, stream, payload, codec)
        at += HEADER_BYTES
        codec.write(stream, message[at : at + payload])
        at += payload
    return message


def decode(message: Bytes) -> list[SparseStream]:
    """The streams of a message, on views of its bytes.

    Raises
    ------
    WireError
        If the message is foreign, truncated, altered in a header, of another version, or of no frame at all.
    """
    streams: list[SparseStream] = []
    at = 0
    while at < len(message) or not streams:
        header = read_header(message[at : at + HEADER_BYTES])
        at += HEADER_BYTES
        if at + header.payload > len(message):
            raise WireError(f"a frame announces a payload of {header.payload} bytes, but {len(message) - at} follow: it was truncated")
        streams.append(CODECS[header.codec].read(header, message[at : at + header.payload]))
        at += header.payload
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
    magic, version, dtype, form, codec, size, lo, hi, stored, payload, width = _LAYOUT.unpack_from(raw)
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
    return Header(DTYPES[dtype], form, codec, size, lo, hi, stored, payload, width or None)


def _write_header(message: Bytes, at: int, stream: SparseStream, payload: int, codec: Codec) -> None:
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
    )
    message[at : at + HEADER_BYTES] = np.frombuffer(raw + _CRC.pack(zlib.crc32(raw)), np.uint8)


def _padded(nbytes: int) -> int:
    return (nbytes + 7) // 8 * 8


def _put(payload: Bytes, at: int, array: NDArray[Any]) -> None:
    end = at + array.nbytes
    payload[at:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    payload[end : _padded(end)] = 0
