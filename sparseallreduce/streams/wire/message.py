"""Messages as a whole: headers, then the arrays, which need not be copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparseallreduce.errors import WireError
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire.codecs import PLAIN
from sparseallreduce.streams.wire.frames import read_headers
from sparseallreduce.streams.wire.header import DENSE, DENSE_MASKED, HEADER_BYTES, SPARSE, Bytes, Header, check_room, header_of, pack_header
from sparseallreduce.streams.wire.plain import is_increasing

__all__ = ["decode", "enclose", "encode", "join", "message_bytes", "part_lengths"]


def message_bytes(streams: Sequence[SparseStream]) -> int:
    """Return the size in bytes of the message that carries ``streams`` uncompressed, including headers."""
    return sum(HEADER_BYTES + _nbytes(stream) for stream in streams)


def encode(streams: Sequence[SparseStream]) -> Bytes:
    """Return the message that carries ``streams`` as one new array: the headers, then the payloads.

    Examples
    --------
    >>> streams = decode(encode([SparseStream([3], [1.5], 4)]))
    >>> streams[0].to_dense()
    array([0. , 0. , 0. , 1.5])
    """
    envelope, parts = enclose(streams)
    return np.concatenate([envelope, *parts])


def decode(message: Bytes, copy: bool = False) -> list[SparseStream]:
    """Return the streams of a whole message as views of its bytes, or with ``copy`` as streams that own their arrays.

    Raises
    ------
    WireError
        If the message is foreign, truncated, altered in a header or in its indices, or of another version.
    """
    headers = read_headers(message)
    at, lengths = len(headers) * HEADER_BYTES, part_lengths(headers)
    if at + sum(lengths) != len(message):
        raise WireError(f"a message announces {sum(lengths)} bytes of payload, but {len(message) - at} follow: it was truncated or altered")
    parts = []
    for length in lengths:
        part = message[at : at + length]
        parts.append(part.copy() if copy else part)
        at += length
    return join(headers, parts, owned=copy)


def enclose(streams: Sequence[SparseStream]) -> tuple[Bytes, list[Bytes]]:
    """Return the headers of ``streams`` as one array of bytes, and the parts of their payloads without copies."""
    envelope, parts = [], []
    for position, stream in enumerate(streams):
        last = position == len(streams) - 1
        payload = _parts(stream)
        header = header_of(stream, 0, stream.stored, sum(map(len, payload)), (PLAIN.number, 0), last, more=not last)
        envelope.append(pack_header(header))
        parts += payload
    return np.frombuffer(b"".join(envelope), np.uint8), parts


def part_lengths(headers: Sequence[Header]) -> list[int]:
    """Return the size in bytes of each payload part that follows ``headers``.

    Raises
    ------
    WireError
        If a header announces a different payload.
    """
    lengths: list[int] = []
    for header in headers:
        of_this = _lengths(header)
        if (header.index_codec, header.value_codec, header.count) != (0, 0, header.stored):
            raise WireError("a complete message has entries in an unexpected layout: it was altered")
        if header.payload != sum(of_this):
            raise WireError(
                f"the header of a message announces a payload of {header.payload} bytes for {header.stored} entries, "
                f"which take {sum(of_this)}"
            )
        check_room(header)
        lengths += of_this
    return lengths


def join(headers: Sequence[Header], parts: Sequence[Bytes], owned: bool = True) -> list[SparseStream]:
    """Return the streams with these headers and parts. They are views of the parts, and own them if ``owned``.

    Raises
    ------
    WireError
        If indices are not increasing, or out of range.
    """
    streams, at = [], 0
    for header in headers:
        count = len(_lengths(header))
        streams.append(_joined(header, parts[at : at + count], owned))
        at += count
    return streams


def _nbytes(stream: SparseStream) -> int:
    if not stream.is_dense:
        return stream._stored.nbytes + stream.stored * index_dtype(stream.size).itemsize
    return stream._stored.nbytes + (0 if stream._present is None else (stream.extent + 7) // 8)


def _parts(stream: SparseStream) -> list[Bytes]:
    parts = [stream._stored]
    if not stream.is_dense:
        parts.append(stream._entries()[0])
    elif stream._present is not None:
        parts.append(array_module(stream._present).packbits(stream._present))
    xp = array_module(stream._stored)
    return [xp.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]


def _lengths(header: Header) -> list[int]:
    values = header.stored * header.dtype.itemsize * (header.width or 1)
    if header.form == SPARSE:
        return [values, header.stored * header.index_bytes]
    return [values] if header.form == DENSE else [values, (header.stored + 7) // 8]


def _joined(header: Header, parts: Sequence[Bytes], owned: bool) -> SparseStream:
    values = parts[0].view(header.dtype).reshape(header.stored, *header.shape)
    if header.form == SPARSE:
        indices = parts[1].view(index_dtype(header.size))
        if not is_increasing(indices, header.lo, header.hi):
            raise WireError(f"the positions of {header.stored} entries are invalid: the message was altered")
        return SparseStream._sparse_form(indices, values, header.size, header.lo, header.hi)
    present = None
    if header.form == DENSE_MASKED:
        present = array_module(parts[1]).unpackbits(parts[1])[: header.stored].astype(np.bool_)
    return SparseStream._dense_form(values, header.size, header.lo, header.hi, present, owned=owned)
