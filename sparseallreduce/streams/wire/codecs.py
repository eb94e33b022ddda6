"""The codecs of positions and of values, by number and name, and the choice between them for a message.

Index codecs are lossless, and one is chosen for every part of every message. Value codecs are lossy, so the user chooses them.
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
    """A codec for the increasing indices of a sparse stream."""

    number: int
    name: str
    seconds: float  # seconds to encode and decode an index

    def bytes_each(self, density: float, index_bytes: int) -> float:
        """Return the expected bytes per index for many indices at uniformly random positions."""

    def bound(self, indices: NDArray[Any], lo: int) -> int:
        """Return an upper bound on the encoded size in bytes."""

    def write(self, indices: NDArray[Any], lo: int, out: Bytes) -> int:
        """Encode indices, all at least ``lo``, and return the encoded size in bytes."""

    def read(self, payload: Bytes, lo: int, hi: int, out: NDArray[Any]) -> bool:
        """Decode into ``out``; return True if the payload encodes exactly ``len(out)`` increasing indices in ``[lo, hi)``."""


PLAIN, BITMAP, GAPS = Plain(), Bitmap(), Gaps()
INDEX_CODECS: dict[int, IndexCodec] = {codec.number: codec for codec in (PLAIN, BITMAP, GAPS)}
_LEAST_GAIN = 0.9  # non-zeros and a bitmap are used if they take at most this fraction of a dense stream's bytes
INDEX_NAMES = [*(codec.name for codec in INDEX_CODECS.values()), "auto"]
VALUE_NAMES = ["exact", *(codec.name for codec in VALUE_CODECS.values() if codec.name not in BIASED)]  # of sums


class Encoding(NamedTuple):
    """How the messages of an operation are encoded."""

    index_codec: str = "auto"  # plain, bitmap, gaps, or auto: the fastest for each part of a message
    value_codec: str = "exact"
    seed: int = 0  # seed of a value codec's random numbers

    @property
    def is_exact(self) -> bool:
        """True if the encoding is lossless."""
        return self.value_codec == "exact"

    def value_bytes(self, itemsize: int) -> float:
        """Return the encoded size of a value of ``itemsize`` bytes."""
        for codec in VALUE_CODECS.values():
            if codec.name == self.value_codec:
                return sum(codec.lengths(1 << 16)) / (1 << 16)
        return itemsize

    def quantised(self, stream: SparseStream, *drawn_by: int) -> SparseStream:
        """Return ``stream`` with the values that its receivers will decode; random numbers depend on the seed and ``drawn_by``.

        Raises
        ------
        StreamError
            If a value is out of range for the value codec.
        """
        if self.value_codec == "exact":
            return stream
        digest = hashlib.blake2b(repr((self.seed, *drawn_by)).encode(), digest_size=8).digest()
        return quantised(stream, self.value_codec, int.from_bytes(digest, "little"))

    def index_codec_for(self, stream: SparseStream, byte_seconds: float) -> IndexCodec:
        """Return the index codec for a stream on a link with this time per byte."""
        if not stream.stored or stream._present is not None or (stream.is_dense and isinstance(stream, CodedStream)):
            return PLAIN
        if stream.is_dense:
            return self._dense_codec_for(stream, byte_seconds)
        return self.index_codec_at(stream.stored / stream.extent, index_bytes_of(stream), byte_seconds)

    def index_codec_at(self, density: float, index_bytes: int, byte_seconds: float) -> IndexCodec:
        """Return the index codec for many indices at a density; plain indices if the requested codec would take more bytes."""
        if self.index_codec == "auto":
            return min(INDEX_CODECS.values(), key=lambda codec: codec.bytes_each(density, index_bytes) * byte_seconds + codec.seconds)
        codec = next(codec for codec in INDEX_CODECS.values() if codec.name == self.index_codec)
        return PLAIN if codec.bytes_each(density, index_bytes) > index_bytes else codec

    def _dense_codec_for(self, stream: SparseStream, byte_seconds: float) -> IndexCodec:
        """Return the bitmap codec if enough values are zero, else plain."""
        width = stream.width or 1
        if self.index_codec == "plain" or (self.index_codec == "auto" and byte_seconds * stream.dtype.itemsize * width < BITMAP.seconds):
            return PLAIN
        share = nonzero_share(stream._stored) + 1 / (8 * stream.dtype.itemsize * width)
        return BITMAP if share < _LEAST_GAIN else PLAIN


def index_bytes_of(stream: SparseStream) -> int:
    return index_dtype(stream.size).itemsize


def estimated_bytes(stream: SparseStream, codec: IndexCodec) -> float:
    """Return the estimated size in bytes of the message that carries a stream."""
    nbytes: float = HEADER_BYTES + stream.stored * stream.dtype.itemsize * (stream.width or 1)
    if isinstance(stream, CodedStream):
        nbytes = HEADER_BYTES + sum(map(len, stream.coded))
    if stream.is_dense:
        return nbytes if codec is PLAIN else HEADER_BYTES + nonzero_share(stream._stored) * stream._stored.nbytes + stream.stored / 8
    return nbytes + stream.stored * codec.bytes_each(stream.stored / max(stream.extent, 1), index_bytes_of(stream))
