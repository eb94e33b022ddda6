"""Memory in which the ranks of one host add up dense vectors: Rabenseifner's algorithm (thesis figure 3.8) without messages.

It has three steps:

1. Each rank writes its vector where all can read it.
2. Once all have, parts of all vectors are added up: the reduce-scatter. There are as many parts as cores, but no more than ranks. Who
   comes first adds up what no rank has begun to: a rank that waits for a core need not be waited for.
3. Once all parts are added up, each rank copies them: the allgather.

The first wait is that of the handshake.
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

AREAS = 2  # that operations take in turn: who has a sum may write the next vector while others still copy
# Most bytes of a vector with a core for each rank, and where they share cores, and of all vectors. Beyond, MPI's sum takes no longer: Open
# MPI's at P = 2 and 1 MiB 0.8 of the time, at P = 4 on 2 cores and 4 MiB 1.5 times as long.
_CAPACITY, _CAPACITY_OVERSUBSCRIBED, _ALL = 1 << 18, 1 << 22, 1 << 25
# Words of a row: the last operation whose part of the sum lies there, the last of which the rank has all and, of the first row alone, what
# the ranks claim parts by.
_SUMMED, _LEFT, _CLAIMED = range(3)
_TOGETHER = 16  # values, a cache line of the shortest, of which no two ranks write some
U: Any = np.uint64


def nbytes(ranks: int, cores: int) -> int:
    """Bytes of memory that the areas take."""
    return AREAS * ranks * _row(ranks, cores)


def reserved(ranks: int, cores: int) -> list[tuple[int, int]]:
    """The pieces of it, each a place and bytes, that are used from the first operation on: all but the vectors."""
    return [(row * _row(ranks, cores), LINE) for row in range(AREAS * ranks)]


def areas_in(memory: NDArray[np.uint8], rank: int, ranks: int, cores: int, reserve: Callable[[int, int], bool]) -> list[Area]:
    """The areas as one rank sees them.

    Parameters
    ----------
    memory : ndarray of uint8
        The same for all ranks, zeros at first; of :func:`nbytes`.
    rank, ranks : int
    cores : int
        Of the host, as all ranks know.
    reserve : callable
        Takes memory for so many bytes from a place on, as far as there is enough.
    """
    _, yield_core = spinning(ranks > cores)
    areas, row = [], _row(ranks, cores)
    for number, rows in enumerate(memory.reshape(AREAS, ranks, -1)):
        ours = (number * ranks + rank) * row
        areas.append(Area(rows, rank, min(ranks, cores), yield_core, functools.partial(_reserve_from, reserve, ours)))
    return areas


class Area:
    """Rows of bytes, one for each rank, on which the ranks add up dense vectors, in some of the operations.

    A rank writes a vector to its own row once all ranks have left the area after the sum before. Then parts of the sum come into the
    first rows, each from who has claimed it.

    Parameters
    ----------
    rows : ndarray of uint8, shape (ranks, start + capacity)
    rank : int
    parts : int
        In which a sum is made.
    yield_core : int
        The address of a function to call while we wait, or 0.
    reserve : callable
        Takes memory for some bytes of our row from a place in it on, as far as there is enough.
    """

    start = LINE  # bytes of a row before the vector

    def __init__(self, rows: NDArray[np.uint8], rank: int, parts: int, yield_core: int, reserve: Callable[[int, int], bool]) -> None:
        self.rows, self.rank, self.ranks, self.parts = rows, rank, len(rows), parts
        self.capacity = rows.shape[1] - self.start
        self._words = rows.reshape(-1).view(np.uint64)
        self._step = rows.shape[1] // 8
        self.terms = self._words, self._step, rank, parts, yield_core  # what compiled code is given of us
        self._last = 0  # the last operation in which others may have read what we wrote, unless it is known that none did
        self._reserve, self._reserved = reserve, self.start  # bytes of our row
        self._have_come, self._store = word_kernels()

    def reserve(self, nbytes: int) -> bool:
        """Whether there is memory for vectors of so many bytes.

        The parts of a sum lie no further in a row than the vector of the rank whose row it is, so that each rank sees to its own.
        """
        end = self.start + nbytes
        if end > self._reserved and self._reserve(self._reserved, end - self._reserved):
            self._reserved = end
        return end <= self._reserved

    def is_free(self) -> bool:
        """Whether all ranks have left it."""
        free: bool = self._have_come(self._words, _LEFT, self._step, self.ranks, self._last, 1, 0)
        return free

    def enter(self, sequence: int) -> None:
        """Others may read what we have written, as long as they have not left after this operation; 0 if no rank does."""
        self._last = sequence

    def leave(self, sequence: int) -> None:
        """We have the whole sum, or take no part in it."""
        self._store(self._words, self.rank * self._step + _LEFT, sequence)


class VectorSum:
    """Sums of vectors of one shape and dtype on an area.

    Parameters
    ----------
    area : Area
    shape : tuple of int
        Of the dense form; its bytes fit into the area.
    dtype : numpy dtype
    """

    def __init__(self, area: Area, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        count = math.prod(shape)
        self.area = area
        self.shape, self.dtype = shape, dtype
        self._rows = area.rows.view(dtype)
        self._ours = self._rows[area.rank, area.start // dtype.itemsize :][:count].reshape(shape)
        self.nbytes = self._ours.nbytes
        part = -(-count // (area.parts * _TOGETHER)) * _TOGETHER  # values in each but the last
        self._sum = functools.partial(_sum_kernel(dtype), *area.terms, self._rows, area.start, part)

    def write(self, stream: SparseStream) -> None:
        """Write our vector, into an area that is free."""
        if stream._array is not None:
            np.copyto(self._ours, stream._array)
        else:
            self._ours.fill(0)
            kernels.scatter_set(*stream._entries(), 0, self._ours)

    def sum_into(self, sequence: int, total: NDArray[Any], spins: int) -> bool:
        """Add up parts that no rank has begun to, and fill in the sum if all are there, or will be while we look so many times."""
        summed = self._sum(sequence, spins, total.reshape(-1))
        if summed < 0:
            raise StreamError(f"rows of {self._rows[:1].nbytes} bytes do not hold a vector of {total.size} values")
        return bool(summed)


def _reserve_from(reserve: Callable[[int, int], bool], row: int, place: int, nbytes: int) -> bool:
    return reserve(row + place, nbytes)


def _row(ranks: int, cores: int) -> int:
    """Bytes of a row of an area."""
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
    """Add up some columns of a part at a time, row after row, and leave the part in the row of its number."""
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
