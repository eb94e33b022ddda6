"""Messages as frames: one stream or several, in pieces that are encoded, sent and decoded one after another.

A frame is a header and a piece of a stream: the values of some entries, followed by their positions. A packet is what is sent in one call:
the headers of one or more frames, then their payloads. A rank thus encodes the next piece while the last is in transit, and decodes one
while the next arrives, and only these pieces of a message are in memory as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import WireError
from sparseallreduce.streams import memory
from sparseallreduce.streams.kernels.contract import LONG_FLOATS, QSGD_BLOCK
from sparseallreduce.streams.staged import StagedStream
from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire.bitmap import read_nonzero, write_nonzero
from sparseallreduce.streams.wire.codecs import BITMAP, INDEX_CODECS, PLAIN, IndexCodec, estimated_bytes
from sparseallreduce.streams.wire.header import (
    DENSE,
    DENSE_MASKED,
    HEADER_BYTES,
    SPARSE,
    Bytes,
    Header,
    check_room,
    header_of,
    memory_bytes,
    pack_header,
    read_header,
)
from sparseallreduce.streams.wire.values import EXACT, VALUE_CODECS, CodedStream

__all__ = ["Assembly", "Growing", "packets", "piece_bytes", "read_headers"]

_SHORTEST, _LONGEST, _PIECES = 1 << 14, 1 << 17, 4  # smallest and largest piece in bytes, and pieces of a message in between
_MUCH = 1 << 30  # a header that announces more bytes than this is suspicious if there is no memory
_GRAIN = 512  # all pieces except the last have a multiple of this many entries, so that blocks of value codecs are whole


def piece_bytes(nbytes: float) -> int:
    """Return the size of the pieces of a message of ``nbytes`` bytes for which encoding, sending and decoding overlap.

    Examples
    --------
    >>> piece_bytes(1000), piece_bytes(1 << 18), piece_bytes(1 << 30)
    (16384, 65536, 131072)
    """
    return min(max(int(nbytes) // _PIECES, _SHORTEST), _LONGEST)


def packets(streams: Sequence[SparseStream], codecs: Sequence[IndexCodec], nbytes: int) -> Iterator[Bytes]:
    """Yield the packets of the message that carries ``streams``, each of at most about ``nbytes`` bytes, with these index codecs."""
    batch: list[Bytes] = []
    size = 0
    for position, stream in enumerate(streams):
        codec, last = codecs[position], position == len(streams) - 1
        step = _entries_of(stream, codec, nbytes)
        for first in range(0, max(stream.stored, 1), step):
            frame = _frame(stream, first, min(step, stream.stored - first), codec, last)
            if batch and size + len(frame) > nbytes:
                yield _packet(batch)
                batch, size = [], 0
            batch.append(frame)
            size += len(frame)
    yield _packet(batch)


def _entries_of(stream: SparseStream, codec: IndexCodec, nbytes: int) -> int:
    """Return the number of entries in a piece."""
    each = estimated_bytes(stream, codec) / max(stream.stored, 1)
    return max(int(nbytes / each) // _GRAIN, 1) * _GRAIN


def _packet(frames: list[Bytes]) -> Bytes:
    if len(frames) == 1:
        return frames[0]
    headers = [read_header(frame)._replace(more=number < len(frames) - 1) for number, frame in enumerate(frames)]
    packed = np.frombuffer(b"".join(map(pack_header, headers)), np.uint8)
    return np.concatenate([packed, *(frame[HEADER_BYTES:] for frame in frames)])


def _frame(stream: SparseStream, first: int, count: int, codec: IndexCodec, last: bool) -> Bytes:
    if isinstance(stream, StagedStream):
        stream = stream.upto(first + count)
    stored = stream._stored[first : first + count]
    if isinstance(stream, CodedStream):
        width = stream.width or 1
        coded = stream.codec.cut(stream.coded, first * width, count * width)
        values = np.concatenate(coded) if len(coded) > 1 else coded[0]
    elif stream.is_dense and stream._present is None and codec is BITMAP:
        frame = memory.empty(HEADER_BYTES + stored.nbytes + (count + 7) // 8, np.uint8)
        return _sealed(stream, first, count, write_nonzero(stored, frame[HEADER_BYTES:]), codec, last, frame)
    else:
        values = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    if stream.is_dense:
        mask = np.empty(0, np.uint8) if stream._present is None else np.packbits(stream._present[first : first + count])
        frame = memory.empty(HEADER_BYTES + len(values) + len(mask), np.uint8)
        frame[HEADER_BYTES + len(values) :] = mask
        length, codec = len(mask), PLAIN
    else:
        indices = stream._entries()[0]
        lo = int(indices[first - 1]) + 1 if first else stream.lo
        piece = indices[first : first + count]
        if codec is BITMAP and BITMAP.bound(piece, lo) > piece.nbytes:
            codec = PLAIN
        frame = memory.empty(HEADER_BYTES + len(values) + codec.bound(piece, lo), np.uint8)
        length = codec.write(piece, lo, frame[HEADER_BYTES + len(values) :])
    frame[HEADER_BYTES : HEADER_BYTES + len(values)] = values
    return _sealed(stream, first, count, len(values) + length, codec, last, frame)


def _sealed(stream: SparseStream, first: int, count: int, payload: int, codec: IndexCodec, last: bool, frame: Bytes) -> Bytes:
    """Return the frame with its header filled in."""
    value_codec = stream.codec.number if isinstance(stream, CodedStream) else EXACT
    header = header_of(stream, first, count, payload, (codec.number, value_codec), last, more=False)
    frame[:HEADER_BYTES] = np.frombuffer(pack_header(header), np.uint8)
    return frame[: HEADER_BYTES + payload]


def read_headers(packet: Bytes) -> list[Header]:
    """Return the checked headers at the start of a packet.

    Raises
    ------
    WireError
        As for :func:`~sparseallreduce.streams.wire.header.read_header`.
    """
    headers = [read_header(packet)]
    while headers[-1].more:
        headers.append(read_header(packet[len(headers) * HEADER_BYTES :]))
    return headers


class Assembly:
    """The streams of a message whose packets arrive in order.

    Attributes
    ----------
    streams : list of SparseStream
        The complete streams.
    growing : Growing or None
        The incomplete stream.
    complete : bool
        Whether the message is complete.
    """

    def __init__(self) -> None:
        self.streams: list[SparseStream] = []
        self.growing: Growing | None = None
        self.complete: bool = False

    def take(self, packet: Bytes) -> None:
        """Decode a packet.

        Raises
        ------
        WireError
            If the packet is truncated, altered, not of this library, or does not follow the previous packet.
        """
        headers = read_headers(packet)
        at = HEADER_BYTES * len(headers)
        announced = sum(header.payload for header in headers)
        if at + announced != len(packet):
            raise WireError(f"a message announces {announced} bytes of payload, but {len(packet) - at} follow: it was truncated or altered")
        for header in headers:
            self.add(header, packet[at : at + header.payload])
            at += header.payload

    def add(self, header: Header, payload: Bytes) -> None:
        """Decode a frame."""
        if self.complete:
            raise WireError("a piece of a message arrived after its end: it was altered")
        growing = self.growing
        if growing is None:
            growing = Growing(header)
        growing.add(header, payload)
        self.growing = growing
        if growing.arrived == header.stored:
            self.streams.append(growing.stream())
            self.growing = None
            self.complete = header.last


class Growing:
    """A stream that has been received in part.

    Attributes
    ----------
    arrived : int
        Number of leading entries received.
    stored : int
        Total number of entries.
    """

    stored: int
    arrived: int

    def __init__(self, header: Header) -> None:
        self._header = header
        self.arrived, self.stored = 0, header.stored
        self._codec = VALUE_CODECS.get(header.value_codec)
        if self._codec is None and header.value_codec != EXACT:
            raise WireError(f"a message has values in form {header.value_codec}, which is unknown: install the same release on all ranks")
        if self._codec is not None and header.dtype not in LONG_FLOATS:
            raise WireError(f"a message has values of {header.dtype} in form {header.value_codec}, which is impossible: it was altered")
        check_room(header)
        try:
            self._make_room(header)
        except MemoryError as error:
            if memory_bytes(header) < _MUCH:
                raise
            raise WireError(f"there is no room for the {header.stored} entries of a message: it was altered, or is too long") from error

    def _make_room(self, header: Header) -> None:
        self._values = memory.empty((header.stored, *header.shape), header.dtype)
        self._indices = memory.empty(header.stored, index_dtype(header.size)) if header.form == SPARSE else None
        self._present = np.empty(header.stored, np.bool_) if header.form == DENSE_MASKED else None
        self._coded = () if self._codec is None else self._codec.empty(self._values.size)

    def add(self, header: Header, payload: Bytes) -> None:
        """Decode the next piece."""
        ours = self._header
        if header.first != self.arrived or _kind(header) != _kind(ours):
            raise WireError(f"a piece with entries from {header.first} on does not follow {self.arrived} entries: the message was altered")
        if header.count == 0 and header.stored:
            raise WireError("a piece of a message is empty: it was altered")
        first, end = header.first, header.first + header.count
        values = self._values[first:end]
        if ours.form == DENSE and header.index_codec == BITMAP.number and self._codec is None:
            if not read_nonzero(payload, values):
                raise WireError(f"{len(payload)} bytes are no {header.count} dense values with a bitmap: the message was altered")
            self.arrived = end
            return
        self._place(header, self._take_values(payload, values, first), first, end)
        self.arrived = end

    def _take_values(self, payload: Bytes, values: NDArray[Any], first: int) -> Bytes:
        """Decode the values of a piece; return the rest of the payload."""
        if self._codec is None:
            nbytes = values.nbytes
        else:
            place = first * (self._header.width or 1)
            coded = self._codec.cut(self._coded, place, values.size)
            nbytes = sum(map(len, coded))
        if len(payload) < nbytes:
            raise WireError(f"{len(values)} values take {nbytes} bytes, but {len(payload)} arrived: the message was altered")
        if self._codec is None:
            values.reshape(-1).view(np.uint8)[:] = payload[:nbytes]
            return payload[nbytes:]
        at = 0
        for part in coded:
            part[:] = payload[at : at + len(part)]
            at += len(part)
        if place % QSGD_BLOCK or not self._codec.decode(coded, values.reshape(-1)):
            raise WireError(f"{len(values)} values make no sense in form {self._header.value_codec}: the message was altered")
        return payload[nbytes:]

    def _place(self, header: Header, payload: Bytes, first: int, end: int) -> None:
        """Decode the positions of a piece's entries."""
        if self._indices is not None:
            lo = int(self._indices[first - 1]) + 1 if first else header.lo
            codec = INDEX_CODECS.get(header.index_codec)
            if codec is None:
                raise WireError(f"a message has positions in unknown form {header.index_codec}: install the same release on all ranks")
            if not codec.read(payload, lo, header.hi, self._indices[first:end]):
                raise WireError(f"the positions of {header.count} entries from {lo} on are invalid: the message was altered")
            return
        expected = 0 if self._present is None else (header.count + 7) // 8
        if len(payload) != expected:
            raise WireError(f"{len(payload)} bytes follow {header.count} dense values instead of {expected}: the message was altered")
        if self._present is not None:
            self._present[first:end] = np.unpackbits(payload, count=header.count)

    @property
    def masked(self) -> bool:
        """True if it is dense with a mask of the present positions."""
        return self._present is not None

    def prefix(self) -> tuple[NDArray[Any] | None, NDArray[Any]]:
        """Return the indices received so far, None for a dense stream, and the values."""
        indices = None if self._indices is None else self._indices[: self.arrived]
        return indices, self._values[: self.arrived]

    def stream(self) -> SparseStream:
        """Return the complete stream."""
        header = self._header
        if self._indices is not None:
            stream = SparseStream._sparse_form(self._indices, self._values, header.size, header.lo, header.hi)
        else:
            stream = SparseStream._dense_form(self._values, header.size, header.lo, header.hi, self._present, owned=True)
        return stream if self._codec is None else CodedStream.of(stream, self._values, self._codec, self._coded)


def _kind(header: Header) -> tuple[object, ...]:
    """Return the header fields that must be equal in all pieces of a stream."""
    return header.dtype, header.form, header.value_codec, header.size, header.lo, header.hi, header.stored, header.width, header.last
