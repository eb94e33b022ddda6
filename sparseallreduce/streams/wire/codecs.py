"""The codecs of positions and of values by number and by name, and which of them a message takes.

A codec of positions loses nothing, and is chosen for every part of every message. One of values is the user's choice, since it does.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire.header import HEADER_BYTES, Bytes
from sparseallreduce.streams.wire.plain import Plain

__all__ = ["INDEX_CODECS", "PLAIN", "Encoding", "IndexCodec", "estimated_bytes"]


class IndexCodec(Protocol):
    """How the increasing indices of a sparse stream are written."""

    number: int
    name: str
    seconds: float  # an index, to write and to read it

    def bytes_each(self, density: float, index_bytes: int) -> float:
        """Expected bytes of one of many indices at uniformly random positions."""

    def bound(self, indices: NDArray[Any], lo: int) -> int:
        """Bytes that are enough for them."""

    def write(self, indices: NDArray[Any], lo: int, out: Bytes) -> int:
        """Write indices, all at ``lo`` or above, and return the bytes that they take."""

    def read(self, payload: Bytes, lo: int, hi: int, out: NDArray[Any]) -> bool:
        """Fill ``out``; whether the payload is that of so many increasing indices within ``[lo, hi)``, and of nothing else."""


PLAIN = Plain()
INDEX_CODECS: dict[int, IndexCodec] = {codec.number: codec for codec in (PLAIN,)}
_BY_NAME = {codec.name: codec for codec in INDEX_CODECS.values()}


class Encoding(NamedTuple):
    """How the messages of an operation are written."""

    index_codec: str = "auto"  # plain, bitmap, gaps, or auto: for each part of a message that which takes the least time
    value_codec: str = "exact"
    seed: int = 0  # of what a value codec draws

    def index_codec_for(self, stream: SparseStream, byte_seconds: float) -> IndexCodec:
        """The codec for a stream on a link on which a byte takes so long."""
        if stream.is_dense or not stream.stored:
            return PLAIN
        if self.index_codec != "auto":
            return _BY_NAME[self.index_codec]
        density, index_bytes = stream.stored / stream.extent, index_bytes_of(stream)
        return min(
            INDEX_CODECS.values(), key=lambda codec: codec.bytes_each(density, index_bytes) * byte_seconds + codec.seconds
        )


def index_bytes_of(stream: SparseStream) -> int:
    return stream._entries()[0].itemsize


def estimated_bytes(stream: SparseStream, codec: IndexCodec) -> float:
    """Of the message that carries a stream."""
    nbytes = HEADER_BYTES + stream._stored.nbytes
    if stream.is_dense:
        return nbytes
    return nbytes + stream.stored * codec.bytes_each(stream.stored / max(stream.extent, 1), index_bytes_of(stream))
