"""Compilation of the training loops before training begins."""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numpy.typing import DTypeLike

from sparseallreduce.linear.kernels.bands import collect
from sparseallreduce.linear.kernels.compacting import compact, marked, move_marks, renumber, take_rows, unmark
from sparseallreduce.linear.kernels.dealing import deal
from sparseallreduce.linear.kernels.gradients import accumulate, compact_accumulate
from sparseallreduce.linear.kernels.rows import extents
from sparseallreduce.linear.kernels.scores import compact_scores, scores
from sparseallreduce.linear.kernels.updates import descend, descend_dense, gather
from sparseallreduce.streams.kernels.compilation import compiled_entry

__all__ = ["warm_up"]


def warm_up(index_dtype: DTypeLike, value_dtype: DTypeLike = np.float32) -> None:
    """Compile the training loops for dtypes, or load them from the cache on disk. If several processes call it, one compiles."""
    index, value = numba.from_dtype(np.dtype(index_dtype))[::1], numba.from_dtype(np.dtype(value_dtype))[::1]
    int64, uint64, float64 = types.int64[::1], types.uint64[::1], types.float64[::1]
    rows = (*(types.Array(array.dtype, 1, "C", readonly=True) for array in (int64, index, value)), int64)  # as in a Dataset
    given = tuple(types.Array(array.dtype, 1, "C", readonly=True) for array in (index, value))
    compiled_entry(deal, (types.int64, types.int64, types.int64, uint64, int64, int64))
    compiled_entry(scores, (*rows, value, float64))
    compiled_entry(accumulate, (*rows, value, types.int64, types.int64, value))
    compiled_entry(compact_scores, (*rows[:3], rows[0], value, float64))
    compiled_entry(compact_accumulate, (*rows[:3], rows[0], value, types.int64, value))
    compiled_entry(collect, (*given, int64, int64, value, types.int64, types.int64, types.int64, index, value))
    compiled_entry(extents, (rows[0], int64, int64, int64))
    compiled_entry(take_rows, (*rows[1:3], int64, int64, uint64, uint64, index, value))
    compiled_entry(move_marks, (uint64, uint64, uint64, uint64))
    compiled_entry(marked, (uint64, uint64, index, index))
    compiled_entry(renumber, (int64, index, uint64, index))
    compiled_entry(unmark, (index, uint64))
    compiled_entry(compact, (*rows[1:3], int64, int64, uint64, uint64, index, index, value, index))
    compiled_entry(gather, (value, index, value))
    compiled_entry(gather, (types.Array(types.float64, 1, "C", readonly=True), int64, float64))
    compiled_entry(descend, (value, *given, value.dtype, types.int64, types.int64))
    compiled_entry(descend_dense, (value, value, value.dtype))
