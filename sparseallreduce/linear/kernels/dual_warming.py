"""Compilation of the loops of dual coordinate ascent before training begins."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import DTypeLike

from sparseallreduce.linear.kernels import dual, dual_classes, feature_numbers, magnitudes, truncated_newton, weight_changes
from sparseallreduce.streams.kernels.compilation import compiled_entry

__all__ = ["warm_up", "warm_up_classes", "warm_up_gathering", "warm_up_truncated_newton"]


def warm_up(index_dtype: DTypeLike, value_dtype: DTypeLike, place_dtype: DTypeLike, sum_dtype: DTypeLike | None) -> None:
    """Compile the loops for dtypes, or load them from the cache on disk. If several processes call it, one compiles.

    Parameters
    ----------
    index_dtype, value_dtype : dtype
        Dtypes of the data set's indices and values.
    place_dtype : dtype
        Dtype of feature numbers.
    sum_dtype : dtype, optional
        Dtype of the sums of changes over ranks. Leave it out for a single rank, because loading a loop takes 6 ms.
    """
    index, value, place = (numba.from_dtype(np.dtype(dtype)) for dtype in (index_dtype, value_dtype, place_dtype))
    int64, uint64, float64, places, whole = types.int64[::1], types.uint64[::1], types.float64[::1], place[::1], types.int64
    rows = _fixed(whole), _fixed(place), _fixed(value), float64, _fixed(types.float64)
    _warm_up_numbering(index, place)
    compiled_entry(dual.squared_norms, (*rows[:4], float64, whole, float64))
    compiled_entry(magnitudes.column_sums, (*rows[:3], float64, float64))
    compiled_entry(dual.margins, (*rows, float64, whole, float64))
    state = float64, float64, float64, float64, whole, float64, int64, whole, float64, uint64
    compiled_entry(dual.ascend, (whole, *rows, *state))
    compiled_entry(dual.certify, (whole, float64, float64, float64, float64, int64, float64))
    compiled_entry(dual.conjugates, (whole, float64, float64))
    compiled_entry(weight_changes.squared_length, (float64,))
    if sum_dtype is not None:
        summed = numba.from_dtype(np.dtype(sum_dtype))
        _warm_up_sharing(index, place)
        compiled_entry(weight_changes.change, (float64, float64, float64, whole, summed[::1]))
        compiled_entry(weight_changes.settle, (summed[::1], types.float64, places, float64, float64, float64))
        compiled_entry(weight_changes.move, (_fixed(summed), places, float64, float64))
        compiled_entry(weight_changes.step_back, (float64, float64, types.float64))
        compiled_entry(weight_changes.along, (float64, float64))
        compiled_entry(weight_changes.slope_and_square, (float64, summed[::1]))


def warm_up_gathering(index_dtype: DTypeLike, value_dtype: DTypeLike, place_dtype: DTypeLike) -> None:
    """Compile or load the loops that hand samples over to the first rank, as :func:`warm_up` does."""
    index, value, place = (numba.from_dtype(np.dtype(dtype)) for dtype in (index_dtype, value_dtype, place_dtype))
    int64, float64 = types.int64[::1], types.float64[::1]
    compiled_entry(weight_changes.occurring, (_fixed(types.int64), _fixed(place), int64, types.boolean[::1]))
    compiled_entry(weight_changes.take_rows, (_fixed(types.int64), _fixed(index), _fixed(value), int64, index[::1], value[::1]))
    compiled_entry(weight_changes.assign, (index[::1], place[::1], index[::1], float64, float64))


def warm_up_classes(place_dtype: DTypeLike, value_dtype: DTypeLike) -> None:
    """Compile the loops for multinomial logistic regression, like :func:`warm_up`."""
    place, value = (numba.from_dtype(np.dtype(dtype)) for dtype in (place_dtype, value_dtype))
    whole, number, matrix = types.int64, types.float64, types.float64[:, ::1]
    rows = _fixed(whole), _fixed(place), _fixed(value), number[::1], _fixed(number)
    state = number[::1], number[::1], matrix, number[::1], whole, number[::1], whole[::1], whole, types.uint64[::1]
    compiled_entry(dual_classes.ascend_classes, (*rows, *state))
    compiled_entry(dual_classes.certify_classes, (*rows, number[::1], number[::1], whole, matrix))
    compiled_entry(dual_classes.entropies, (number[::1], matrix))


def warm_up_truncated_newton(index_dtype: DTypeLike, value_dtype: DTypeLike, place_dtype: DTypeLike) -> None:
    """Compile the loops of Newton's method for many features, like :func:`warm_up`."""
    index, value, place = (numba.from_dtype(np.dtype(dtype)) for dtype in (index_dtype, value_dtype, place_dtype))
    float64, fixed, whole = types.float64[::1], _fixed(types.float64), types.int64
    rows = _fixed(whole), _fixed(place), _fixed(value), float64
    _warm_up_numbering(index, place)
    compiled_entry(magnitudes.column_sums, (*rows[:3], float64, float64))
    compiled_entry(truncated_newton.derivatives, (whole, float64, fixed, float64, float64, float64))
    compiled_entry(truncated_newton.line_derivatives, (whole, float64, float64, fixed, float64, types.float64))
    compiled_entry(truncated_newton.transposed_products, (*rows, float64, float64, whole, float64, float64))
    compiled_entry(truncated_newton.hessian_product, (*rows, float64, float64, whole, float64, float64))
    compiled_entry(truncated_newton.dot, (float64, float64, whole, whole))


def _warm_up_numbering(index: Any, place: Any) -> None:
    int64, uint64, places, whole = types.int64[::1], types.uint64[::1], place[::1], types.int64
    compiled_entry(feature_numbers.mark, (_fixed(index), whole, whole, uint64))
    compiled_entry(feature_numbers.marked, (uint64, int64, index[::1]))
    compiled_entry(feature_numbers.number, (_fixed(index), whole, whole, uint64, int64, places))
    compiled_entry(feature_numbers.count_some, (places, places))
    compiled_entry(feature_numbers.order_by_count, (places, places, whole, places))
    compiled_entry(feature_numbers.renumber, (places, places))


def _warm_up_sharing(index: Any, place: Any) -> None:
    indices, places, fixed, held = index[::1], place[::1], _fixed(index), types.int32[::1]
    compiled_entry(feature_numbers.held_by_several, (fixed, _fixed(types.int32), types.int64, indices, held, places))
    compiled_entry(feature_numbers.common, (indices, places, types.uint64[::1], types.int64[::1], places, places))


def _fixed(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C", readonly=True)
