"""The steps of :mod:`~sparseallreduce.runtime.memory.sparse` in compiled code: claim a part, add it, and wait for the other ranks.

Between two operations a program uses the caches for other data, and the interpreter then has to load everything that it touches again: a
sum of 34,000 entries on two ranks takes 40 microseconds in a loop, and 250 to 300 after a dense sum of 64 MiB. The most frequent steps are
therefore a single call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.runtime.memory.words import LINE, Words, claim, wait_for
from sparseallreduce.streams.kernels import PIECE
from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.compiled import ADD, array_type, cut, sum_cut
from sparseallreduce.streams.kernels.intrinsics import store_release

__all__ = ["ADDED", "ENTRIES", "FIRST", "LEFT", "WORDS", "WRITTEN", "sum_parts_kernel"]

# Words of a part: the last operation in which it was added, its number of entries and start, and the last operation in which it was
# written to the result. Word of a rank, in the same row: the last operation in which it has finished reading the rows of the others.
ADDED, ENTRIES, FIRST, WRITTEN, LEFT = range(5)
WORDS = LINE // 8  # words of a row
_ALL = np.uint64(2**64 - 1)
U: Any = np.uint64


@functools.lru_cache(maxsize=32)
def sum_parts_kernel(index_dtype: DTypeLike, value_dtype: DTypeLike) -> Callable[..., Any]:
    """Return the compiled ``sum_parts`` for streams of these dtypes, which adds unclaimed parts in place until none is left.

    Its arguments are ``words, rank, yield_core, rows, values, bounds, inner_indices, inner_values, indices, results, sequence, parts,
    spins, counts, size, block``: ``rows`` to ``inner_values`` and ``counts`` as for :func:`~sparseallreduce.streams.kernels.sum_cut_rows`,
    ``indices`` and ``results`` the blocks as numbers of either type. It returns 1 if all parts are complete, polling up to ``spins`` times,
    0 if not, and -1 if the arguments are inconsistent.
    """
    words, word, counts = types.Array(types.uint64, 1, "C"), types.uint64, array_type(np.int64, 1, False)
    tables = array_type(index_dtype, 2, False), array_type(value_dtype, 2, False)
    given = (words, word, word, *tables, array_type(np.uint64, 2, False), *tables, *tables)
    signature = (*given, *(word,) * 3, counts, word, word)
    literal = types.literal(ADD)  # type: ignore[no-untyped-call]
    return functools.partial(compiled_entry(_sum_parts, (literal, *signature)), ADD)


@inlined
def behind_values(entries: Any, itemsize: Any) -> Any:
    """Return the offset in a block, in bytes, of the indices of a result, which follow the largest possible number of values."""
    return (entries * U(itemsize) + U(LINE - 1)) & ~U(LINE - 1)


@kernel
def _sum_parts(
    op: int,
    words: Words,
    rank: Any,
    yield_core: Any,
    rows: NDArray[Any],
    values: NDArray[Any],
    bounds: NDArray[np.uint64],
    inner_indices: NDArray[Any],
    inner_values: NDArray[Any],
    indices: NDArray[Any],
    results: NDArray[Any],
    sequence: Any,
    parts: Any,
    spins: Any,
    counts: NDArray[np.int64],
    size: Any,
    block: Any,
) -> Any:
    """Add claimed parts. The first part ends at their common border and the second starts there, so that the result has no gap."""
    ranks, width, most = U(counts.shape[0]), U(WORDS), U(0)
    for r in range(ranks):
        most += U(counts[r])
    start = behind_values(most, values.itemsize) // U(rows.itemsize)
    blocks, rooms = min(indices.shape[0], results.shape[0]), min(indices.shape[1], results.shape[1])
    if block >= U(blocks) or most > U(rooms) or start + most > U(indices.shape[1]):
        return np.int64(-1)
    if parts > ranks or rank >= ranks or (ranks + U(1)) * width > U(words.shape[0]):
        return np.int64(-1)
    iout, vout = indices[block, start : start + most], results[block, :most]
    while True:
        claimed = claim(words, ranks * width, sequence, parts)
        if claimed < 0:
            break
        part = U(claimed)
        total = cut(rows, U(values.itemsize), counts, size, part, parts, bounds)
        before = U(bounds[2, ranks])
        if total < 0 or before + U(total) > most:
            return np.int64(-1)
        end, at_end = before + U(total), part + U(1) < parts
        places = iout[before:end].reshape((1, total)), vout[before:end].reshape((1, total))
        n = sum_cut(op, rows, values, U(0), counts, bounds, False, at_end, _ALL, U(PIECE), inner_indices, inner_values, *places)
        if n < 0:
            return np.int64(-1)
        words[part * width + U(ENTRIES)] = n
        words[part * width + U(FIRST)] = end - U(n) if at_end else before
        store_release(words, part * width + U(WRITTEN), sequence)
    store_release(words, rank * width + U(LEFT), sequence)
    return np.int64(wait_for(words, U(WRITTEN), width, parts, sequence, spins, yield_core))
