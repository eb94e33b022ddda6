"""Shared memory in which the ranks of one host add dense vectors: Rabenseifner's algorithm (thesis figure 3.8) without messages.

It has three steps:

1. Each rank writes its vector where all can read it.
2. Once all have, parts of all vectors are added: the reduce-scatter. There are as many parts as cores, but no more than ranks. Each rank
   takes the next part that no rank has started, so that no rank waits for one that has no core at the moment.
3. Once all parts are added, each rank copies them: the allgather.

The wait between steps 1 and 2 is the handshake.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.memory.words import LINE, Words, claim, spinning, wait_for, word_kernels
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.compilation import compiled_entry, kernel
from sparseallreduce.streams.kernels.compiled import BLOCK, MALFORMED, array_type
from sparseallreduce.streams.kernels.intrinsics import store_release
from sparseallreduce.streams.stream import SparseStream

__all__ = ["AREAS", "Area", "VectorSum", "areas_in", "nbytes", "reserved"]

AREAS = 2  # used by operations in turn, so that a rank can write its next vector while others still copy a sum
# Largest vector in bytes if each rank has a core, and if ranks share cores; and of all vectors. Beyond, MPI's sum is as fast: Open MPI's
# takes 0.8 of the time at P = 2 and 1 MiB, and 1.5 times as long at P = 4 on 2 cores and 4 MiB.
_CAPACITY, _CAPACITY_OVERSUBSCRIBED, _ALL = 1 << 18, 1 << 22, 1 << 25
# Words of a row: the last operation whose part of the sum is in the row, the last operation that the rank has completed and, in the first
# row only, the counter by which ranks claim parts.
_SUMMED, _LEFT, _CLAIMED = range(3)
_TOGETHER = 16  # values, at least a cache line, which only one rank writes
U: Any = np.uint64


def nbytes(ranks: int, cores: int) -> int:
    """Return the size of the areas in bytes."""
    return AREAS * ranks * _row(ranks, cores)


def reserved(ranks: int, cores: int) -> list[tuple[int, int]]:
    """Return the pieces (offset and size in bytes) that are used from the first operation on: all except the vectors."""
    return [(row * _row(ranks, cores), LINE) for row in range(AREAS * ranks)]


def areas_in(memory: NDArray[np.uint8], rank: int, ranks: int, cores: int, reserve: Callable[[int, int], bool]) -> list[Area]:
    """Return the areas as one rank sees them.

    Parameters
    ----------
    memory : ndarray of uint8
        The same memory on all ranks, initially zero, of size :func:`nbytes`.
    rank, ranks : int
    cores : int
        Cores of the host, the same on all ranks.
    reserve : callable
        Takes an offset and a size in bytes; allocates that memory and returns True, or False if there is not enough.
    """
    _, yield_core = spinning(ranks > cores)
    areas, row = [], _row(ranks, cores)
    for number, rows in enumerate(memory.reshape(AREAS, ranks, -1)):
        ours = (number * ranks + rank) * row
        areas.append(Area(rows, rank, min(ranks, cores), yield_core, functools.partial(_reserve_from, reserve, ours)))
    return areas


class Area:
    """Rows of bytes, one for each rank, on which the ranks add the dense vectors of one operation at a time.

    A rank writes its vector to its own row once all ranks have left the area after the previous sum. The parts of the sum are then written
    to the first rows, each by the rank that has claimed it.

    Parameters
    ----------
    rows : ndarray of uint8, shape (ranks, start + capacity)
    rank : int
    parts : int
        Number of parts of a sum.
    yield_core : int
        Address of a function to call while waiting, or 0.
    reserve : callable
        Takes an offset in this rank's row and a size in bytes; allocates that memory, or returns False if there is not enough.
    """

    rows: NDArray[Any]
    rank: int
    ranks: int
    parts: int

    start = LINE  # offset of the vector in a row, in bytes

    def __init__(self, rows: NDArray[np.uint8], rank: int, parts: int, yield_core: int, reserve: Callable[[int, int], bool]) -> None:
        self.rows, self.rank, self.ranks, self.parts = rows, rank, len(rows), parts
        self.capacity: Any = rows.shape[1] - self.start
        self._words = rows.reshape(-1).view(np.uint64)
        self._step = rows.shape[1] // 8
        self.terms: tuple[Any, ...] = self._words, self._step, rank, parts, yield_core  # arguments of the compiled code
        self._last = 0  # the last operation in which others may have read this rank's row
        self._reserve, self._reserved = reserve, self.start  # bytes allocated in this rank's row
        self._all_reached, self._store = word_kernels()

    def reserve(self, nbytes: int) -> bool:
        """Return True if there is memory for vectors of ``nbytes`` bytes, allocating it if needed.

        The parts of a sum extend no further in a row than the vector of the row's rank, so each rank needs to allocate only its own row.
        """
        end = self.start + nbytes
        if end > self._reserved and self._reserve(self._reserved, end - self._reserved):
            self._reserved = end
        return end <= self._reserved

    def is_free(self) -> bool:
        """Return True if all ranks have left the area."""
        free: bool = self._all_reached(self._words, _LEFT, self._step, self.ranks, self._last, 1, 0)
        return free

    def enter(self, sequence: int) -> None:
        """Record that other ranks may read this rank's row until they leave operation ``sequence``; 0 if no rank does."""
        self._last = sequence

    def leave(self, sequence: int) -> None:
        """Publish that this rank has the whole sum, or takes no part in it."""
        self._store(self._words, self.rank * self._step + _LEFT, sequence)


class VectorSum:
    """Sums of vectors of one shape and dtype on an area.

    Parameters
    ----------
    area : Area
    shape : tuple of int
        Shape of the dense form, which must fit into the area.
    dtype : numpy dtype
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __init__(self, area: Area, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        count = math.prod(shape)
        self.area = area
        self.shape, self.dtype = shape, dtype
        self._rows = area.rows.view(dtype)
        self._ours = self._rows[area.rank, area.start // dtype.itemsize :][:count].reshape(shape)
        self.nbytes: int = self._ours.nbytes
        part = -(-count // (area.parts * _TOGETHER)) * _TOGETHER  # values in each part but the last
        self._sum = functools.partial(_sum_kernel(dtype), *area.terms, self._rows, area.start, part)

    def write(self, stream: SparseStream) -> None:
        """Write this rank's vector to a free area."""
        if stream._array is not None:
            np.copyto(self._ours, stream._array)
        else:
            self._ours.fill(0)
            kernels.scatter_set(*stream._entries(), 0, self._ours)

    def sum_into(self, sequence: int, total: NDArray[Any], spins: int) -> bool:
        """Add parts that no rank has started, and copy the whole sum to ``total`` if all parts are complete, polling up to ``spins`` times.

        Return True if ``total`` is filled.
        """
        summed = self._sum(sequence, spins, total.reshape(-1))
        if summed < 0:
            raise StreamError(f"rows of {self._rows[:1].nbytes} bytes do not hold a vector of {total.size} values")
        return bool(summed)


def _reserve_from(reserve: Callable[[int, int], bool], row: int, place: int, nbytes: int) -> bool:
    return reserve(row + place, nbytes)


def _row(ranks: int, cores: int) -> int:
    """Return the size of a row of an area in bytes."""
    capacity = min(_CAPACITY_OVERSUBSCRIBED if ranks > cores else _CAPACITY, _ALL // (AREAS * ranks))
    return LINE + capacity // LINE * LINE


@functools.lru_cache(maxsize=8)
def _sum_kernel(dtype: np.dtype[Any]) -> Callable[..., Any]:
    words, word, values = types.Array(types.uint64, 1, "C"), types.uint64, array_type(dtype, 2, False)
    return compiled_entry(_sum_vectors, (words, *(word,) * 4, values, *(word,) * 4, array_type(dtype, 1, False)))


@kernel
def _sum_vectors(
    words: Words,
    step: Any,
    rank: Any,
    parts: Any,
    yield_core: Any,
    values: NDArray[Any],
    start: Any,
    size: Any,
    sequence: Any,
    spins: Any,
    out: NDArray[Any],
) -> Any:
    """Add claimed parts block by block, row after row, and store part i in row i; then copy all parts to ``out``."""
    first, length = start // U(values.itemsize), U(out.shape[0])
    if first + length > U(values.shape[1]) or parts * size < length:
        return np.int64(MALFORMED)
    if max(parts, rank + U(1)) > U(values.shape[0]) or U(values.shape[0]) * step > U(words.shape[0]):
        return np.int64(MALFORMED)
    while True:
        claimed = claim(words, U(_CLAIMED), sequence, parts)
        if claimed < 0:
            break
        part = U(claimed)
        lo, hi = min(length, part * size), min(length, (part + U(1)) * size)
        for begin in range(lo, hi, U(BLOCK)):
            end = min(hi, begin + U(BLOCK))
            for j in range(begin, end):
                out[j] = values[U(0), first + j]
            for r in range(U(1), U(values.shape[0])):
                for j in range(begin, end):
                    out[j] += values[r, first + j]
            for j in range(begin, end):
                values[part, first + j] = out[j]
        store_release(words, part * step + U(_SUMMED), sequence)
    if not wait_for(words, U(_SUMMED), step, parts, sequence, spins, yield_core):
        return np.int64(False)
    for part in range(parts):
        for j in range(min(length, part * size), min(length, (part + U(1)) * size)):
            out[j] = values[part, first + j]
    store_release(words, rank * step + U(_LEFT), sequence)
    return np.int64(True)
