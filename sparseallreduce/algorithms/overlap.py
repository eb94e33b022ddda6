"""Estimate how the index sets of the ranks overlap and where their entries are, from a sample of each that is sent with the agreement.

A sample holds the indices whose hash is below a threshold, about 128 of them: the same fraction of all indices, wherever they are. Since
the hash is the same on all ranks, shared indices are in all of their samples (a KMV sketch, Beyer et al. 2007). The smallest threshold
gives the size of the union of any of the sets, with a standard error below 10 %. Quantiles of the indices show where they are
(:mod:`~sparseallreduce.algorithms.boundaries`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.boundaries import MOST_POSITIONS, QUANTILES, UNIT, Spread, quantile_places
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Overlap", "estimated", "sample_bytes", "sample_of", "share_records"]

_SAMPLE, _SHARE = 128, 256  # sampled indices of a rank: this number, or one in _SHARE of its entries if that is more
_LARGEST, _IN_ALL = 512, 1 << 13  # limits: of a rank, and of all ranks together unless one has many entries
_MOST = 640  # limit of the indices sent, in case of an uneven hash
_BLOCK = 64  # consecutive sampled positions from which the local overlap is estimated
_HASH = 1 << 32
_FACTOR, _FACTOR_64 = np.uint32(2654435761), np.uint64(11400714819323198485)  # of Fibonacci hashing
_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<QQ")  # the threshold, which is zero for a dense stream, and the number of entries


class Overlap(NamedTuple):
    """The estimated overlap of the ranks' index sets, and the distribution of their entries over positions."""

    union: tuple[tuple[int, float], ...]  # (m, entries of the union of m ranks' sets per input entry)
    spread: Spread | None  # None if the vector has too many positions

    @property
    def digest(self) -> bytes:
        """A digest of eight bytes."""
        return hashlib.blake2b(repr(self.union).encode() + (b"" if self.spread is None else self.spread.digest), digest_size=8).digest()


def sample_bytes(size: int) -> int:
    """Return the largest size in bytes of a sample of a stream of this size."""
    return _HEADER.size + (QUANTILES + _MOST) * index_dtype(size).itemsize


def sample_of(stream: SparseStream, rank: int, ranks: int) -> bytes:
    """Return quantiles and a sample of the indices of a stream, which takes a pass over them if it is sparse.

    Examples
    --------
    >>> len(sample_of(SparseStream([1, 5, 7], [1.0, 1.0, 1.0], 100), 0, 2))
    284
    """
    if stream.is_dense:
        return _HEADER.pack(0, stream.stored)
    indices = stream._entries()[0]
    wanted = max(1, min(_SAMPLE, _IN_ALL // ranks), min(_LARGEST, len(indices) // _SHARE))
    threshold = max(1, min(_HASH - 1, _HASH * wanted // max(len(indices), 1)))
    chosen = indices[_hashes(indices) < threshold][:_MOST]
    quantiles = indices[quantile_places(len(indices), rank, ranks)] if len(indices) else indices
    return _HEADER.pack(threshold, len(indices)) + quantiles.tobytes() + chosen.tobytes()


def share_records(record: bytes, most: int) -> Generator[Step, Any, list[bytes]]:
    """Exchange the records of all ranks, of different lengths up to ``most`` bytes."""
    records: list[bytes] = yield Share(_LENGTH.pack(len(record)) + record.ljust(most, b"\0"))
    return [each[_LENGTH.size : _LENGTH.size + _LENGTH.unpack_from(each)[0]] for each in records]


def estimated(samples: Sequence[bytes], size: int) -> Overlap | None:
    """Return the overlap estimated from the samples of all ranks, in the order of ranks; None if nothing is known.

    Every rank computes the same, from counts and IEEE 754 quotients.
    """
    dtype, ranks = index_dtype(size), len(samples)
    thresholds, counts = zip(*map(_HEADER.unpack_from, samples), strict=True)
    sparse = [rank for rank in range(ranks) if thresholds[rank] and counts[rank]]
    if not sparse:
        return None
    threshold = min(thresholds[rank] for rank in sparse)
    found = {rank: np.frombuffer(samples[rank], dtype, offset=_HEADER.size) for rank in sparse}
    sets = [found[rank][QUANTILES:] if rank in found else np.empty(0, dtype) for rank in range(ranks)]
    sets = [chosen[_hashes(chosen) < threshold] for chosen in sets]
    positions, place = np.unique(np.concatenate(sets), return_inverse=True)
    if not len(positions):
        return None
    holds = np.zeros((ranks, len(positions)), np.bool_)
    holds[np.repeat(np.arange(ranks), [len(chosen) for chosen in sets]), place] = True
    dense = np.array([not each for each in thresholds])
    widths = [1 << bit for bit in range(ranks.bit_length())]
    if widths[-1] != ranks:
        widths.append(ranks)
    every = size * threshold // _HASH  # number of positions that would be sampled in a dense stream
    union = tuple((width, _union(holds, dense, every, width)) for width in widths)
    return Overlap(union, None if size > MOST_POSITIONS else _spread(found, counts, holds, positions, size))


def _union(holds: NDArray[np.bool_], dense: NDArray[np.bool_], every: int, width: int) -> float:
    """Return the entries of the union per input entry, for groups of ``width`` consecutive ranks."""
    groups = len(holds) // width
    grouped, full = holds[: groups * width].reshape(groups, width, -1), dense[: groups * width].reshape(groups, width)
    put_in = int(grouped.sum()) + every * int(full.sum())
    left = int(grouped[~full.any(axis=1)].any(axis=1).sum()) + every * int(full.any(axis=1).sum())
    return left / put_in if put_in else 1.0


def _spread(found: dict[int, NDArray[Any]], counts: Sequence[int], holds: NDArray[np.bool_], positions: NDArray[Any], size: int) -> Spread:
    """Return the distribution of the entries of all ranks; dense streams have entries everywhere."""
    everywhere = size * np.arange(1, 2 * QUANTILES, 2, dtype=np.int64) // (2 * QUANTILES)
    of_ranks = [found[rank][:QUANTILES].astype(np.int64) if rank in found else everywhere for rank in range(len(counts)) if counts[rank]]
    places, weights = np.concatenate(of_ranks), np.repeat([count for count in counts if count], QUANTILES)
    owners = np.repeat([rank for rank, count in enumerate(counts) if count], QUANTILES)
    if len(found) < len(of_ranks):
        return Spread(size, places, weights, None, max(counts), owners)
    weights = weights.astype(np.int64)
    blocks = max(1, len(positions) // _BLOCK)
    edges = np.arange(blocks + 1) * len(positions) // blocks
    block = np.searchsorted(positions[edges[1:-1]], places, side="right")
    # The fraction of a block's entries that remain in the sum is estimated from the sample: positions per entry. If some positions are held
    # by far more ranks than others, the estimate depends on whether they are sampled; quantiles then give the block's number of entries.
    count, held = np.diff(edges), holds.sum(axis=0, dtype=np.int64)
    entries, squares = np.add.reduceat(held, edges[:-1]), np.add.reduceat(held * held, edges[:-1])
    put_in = np.zeros(blocks, np.int64)
    np.add.at(put_in, block, weights)
    total, all_held = int(weights.sum()), int(held.sum())
    weighted = [max(1, all_held * weight // total) for weight in put_in.tolist()]
    entries = np.where(count * squares <= 2 * entries * entries, entries, np.maximum(weighted, count))
    shares = count * UNIT // entries
    return Spread(size, places, weights, shares[block], max(counts), owners)


def _hashes(indices: NDArray[Any]) -> NDArray[Any]:
    """Return hashes below 2**32."""
    return indices * _FACTOR if indices.dtype == np.uint32 else (indices * _FACTOR_64) >> np.uint64(32)
