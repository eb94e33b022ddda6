"""How much the index sets of the ranks overlap, from a sample of each that travels with the agreement.

A sample holds the indices whose hash is below a threshold, about 128 of them: of all indices, wherever they are, the same share. As the
hash is the same on all ranks, what they have in common is in all of their samples (a KMV sketch, Beyer et al. 2007). From the smallest
threshold follows the size of the union of any of them, with a standard error below 10 %.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["SAMPLE_BYTES", "Overlap", "estimated", "sample_of"]

_SAMPLE = 128  # indices
_MOST = 256  # that are sent, should a hash bring so many together
SAMPLE_BYTES = 8 + 8 * _MOST  # at most
_HASH = 1 << 32
_FACTOR, _FACTOR_64 = np.uint32(2654435761), np.uint64(11400714819323198485)  # of Fibonacci hashing
_THRESHOLD = struct.Struct("<Q")
_SHARE = struct.Struct("<Id")


class Overlap(NamedTuple):
    """What the ranks' sets have in common."""

    union: tuple[tuple[int, float], ...]  # (m, entries of the union of m ranks' sets for each that they put in)
    imbalance: float  # entries in the fullest of P equal parts of the index space for each in a part of mean size

    def pack(self) -> bytes:
        """Its bytes."""
        return b"".join(_SHARE.pack(*pair) for pair in (*self.union, (0, self.imbalance)))

    @classmethod
    def unpack(cls, packed: bytes) -> Overlap:
        """The overlap of these bytes."""
        *union, (_, imbalance) = _SHARE.iter_unpack(packed)
        return cls(tuple(union), imbalance)


def sample_of(stream: SparseStream) -> bytes:
    """A sample of the indices of a sparse stream, which takes a pass over them.

    >>> len(sample_of(SparseStream([1, 5, 7], [1.0, 1.0, 1.0], 100)))
    20
    """
    indices = stream._entries()[0]
    threshold = min(_HASH - 1, _HASH * _SAMPLE // max(len(indices), 1))
    chosen = indices[_hashes(indices) < threshold][:_MOST]
    return _THRESHOLD.pack(threshold) + chosen.tobytes()


def estimated(samples: Sequence[bytes], size: int) -> Overlap | None:
    """The overlap of the sets of which these are the samples, in the order of the ranks; None if there is nothing in them.

    Every rank computes the same: of counts, and IEEE 754's quotients.
    """
    dtype, ranks = index_dtype(size), len(samples)
    threshold = min(_THRESHOLD.unpack_from(sample)[0] for sample in samples)
    sets = [np.frombuffer(sample, dtype, offset=_THRESHOLD.size) for sample in samples]
    sets = [chosen[_hashes(chosen) < threshold] for chosen in sets]
    positions, place = np.unique(np.concatenate(sets), return_inverse=True)
    if not len(positions):
        return None
    holds = np.zeros((ranks, len(positions)), np.bool_)
    holds[np.repeat(np.arange(ranks), [len(chosen) for chosen in sets]), place] = True
    widths = [1 << bit for bit in range(ranks.bit_length())]
    if widths[-1] != ranks:
        widths.append(ranks)
    return Overlap(tuple((width, _union(holds, width)) for width in widths), _imbalance(holds, positions, size))


def _union(holds: NDArray[np.bool_], width: int) -> float:
    """Of groups of so many ranks next to each other."""
    groups = len(holds) // width
    grouped = holds[: groups * width].reshape(groups, width, -1)
    put_in = int(grouped.sum())
    return int(grouped.any(axis=1).sum()) / put_in if put_in else 1.0


def _imbalance(holds: NDArray[np.bool_], positions: NDArray[Any], size: int) -> float:
    """As far as chance alone does not make it."""
    ranks = len(holds)
    inner = np.array(boundaries(size, ranks)[1:-1], positions.dtype)
    part = np.searchsorted(inner, positions, side="right")
    counts = np.bincount(part, weights=holds.sum(axis=0), minlength=ranks)
    fullest, mean = float(counts.max()), float(counts.sum()) / ranks
    return max(1.0, (fullest - 2.5 * float(np.sqrt(fullest))) / mean)


def _hashes(indices: NDArray[Any]) -> NDArray[Any]:
    """Numbers below 2**32."""
    return indices * _FACTOR if indices.dtype == np.uint32 else (indices * _FACTOR_64) >> np.uint64(32)
