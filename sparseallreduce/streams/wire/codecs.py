"""The codecs of positions and of values by number and by name, and which of them a message takes.

A codec of positions loses nothing, and is chosen for every part of every message. One of values is the user's choice, since it does.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire.bitmap import Bitmap, nonzero_share
from sparseallreduce.streams.wire.gaps import Gaps
from sparseallreduce.streams.wire.header import HEADER_BYTES, Bytes
from sparseallreduce.streams.wire.plain import Plain
from sparseallreduce.streams.wire.values import BIASED, VALUE_CODECS, CodedStream, quantised

__all__ = ["BITMAP", "GAPS", "INDEX_CODECS", "INDEX_NAMES", "PLAIN", "VALUE_NAMES", "Encoding", "IndexCodec", "estimated_bytes"]


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


PLAIN, BITMAP, GAPS = Plain(), Bitmap(), Gaps()
INDEX_CODECS: dict[int, IndexCodec] = {codec.number: codec for codec in (PLAIN, BITMAP, GAPS)}
_LEAST_GAIN = 0.9  # of the bytes of a dense stream that its non-zeros and a bitmap may take
INDEX_NAMES = (*(codec.name for codec in INDEX_CODECS.values()), "auto")
VALUE_NAMES = ("exact", *(codec.name for codec in VALUE_CODECS.values() if codec.name not in BIASED))  # of sums
_BY_NAME = {codec.name: codec for codec in INDEX_CODECS.values()}


class Encoding(NamedTuple):
    """How the messages of an operation are written."""

    index_codec: str = "auto"  # plain, bitmap, gaps, or auto: for each part of a message that which takes the least time
    value_codec: str = "exact"
    seed: int = 0  # of what a value codec draws

    @property
    def is_exact(self) -> bool:
        """Whether nothing is lost."""
        return self.value_codec == "exact"

    def value_bytes(self, itemsize: int) -> float:
        """What a value of so many bytes takes on its way."""
        for codec in VALUE_CODECS.values():
            if codec.name == self.value_codec:
                return sum(codec.lengths(1 << 16)) / (1 << 16)
        return itemsize

    def quantised(self, stream: SparseStream, *drawn_by: int) -> SparseStream:
        """``stream`` as its receivers will know it; what is drawn is that of the seed and these numbers.

        Raises
        ------
        StreamError
            If a value is beyond what the value codec can hold.
        """
        if self.value_codec == "exact":
            return stream
        digest = hashlib.blake2b(repr((self.seed, *drawn_by)).encode(), digest_size=8).digest()
        return quantised(stream, self.value_codec, int.from_bytes(digest, "little"))

    def index_codec_for(self, stream: SparseStream, byte_seconds: float) -> IndexCodec:
        """The codec for a stream on a link on which a byte takes so long."""
        if not stream.stored or stream._present is not None or (stream.is_dense and isinstance(stream, CodedStream)):
            return PLAIN
        if stream.is_dense:
            return self._dense_codec_for(stream, byte_seconds)
        return self.index_codec_at(stream.stored / stream.extent, index_bytes_of(stream), byte_seconds)

    def index_codec_at(self, density: float, index_bytes: int, byte_seconds: float) -> IndexCodec:
        """The codec for many indices at a density; indices as they are where those of the codec that was asked for are longer."""
        if self.index_codec == "auto":
            return min(INDEX_CODECS.values(), key=lambda codec: codec.bytes_each(density, index_bytes) * byte_seconds + codec.seconds)
        codec = _BY_NAME[self.index_codec]
        return PLAIN if codec.bytes_each(density, index_bytes) > index_bytes else codec


    def _dense_codec_for(self, stream: SparseStream, byte_seconds: float) -> IndexCodec:
        """A bitmap where enough values are zero."""
        width = stream.width or 1
        if self.index_codec == "plain" or (self.index_codec == "auto" and byte_seconds * stream.dtype.itemsize * width < BITMAP.seconds):
            return PLAIN
        share = nonzero_share(stream._stored) + 1 / (8 * stream.dtype.itemsize * width)
        return BITMAP if share < _LEAST_GAIN else PLAIN


def index_bytes_of(stream: SparseStream) -> int:
    return index_dtype(stream.size).itemsize


def estimated_bytes(stream: SparseStream, codec: IndexCodec) -> float:
    """Of the message that carries a stream."""
    nbytes: float = HEADER_BYTES + stream.stored * stream.dtype.itemsize * (stream.width or 1)
    if isinstance(stream, CodedStream):
        nbytes = HEADER_BYTES + sum(map(len, stream.coded))
    if stream.is_dense:
        return nbytes if codec is PLAIN else HEADER_BYTES + nonzero_share(stream._stored) * stream._stored.nbytes + stream.stored / 8
    return nbytes + stream.stored * codec.bytes_each(stream.stored / max(stream.extent, 1), index_bytes_of(stream))
