"""The functions of :mod:`sparseallreduce.streams.kernels` for device arrays, with the same names, arguments and results.

Outputs passed by the caller are filled with a copy of the kernel's result, whose length is not known in advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.kernels.cuda import bitmap, dense, drawing, gaps, merging, mstopk, norms, order, partition, ranking, selection
from sparseallreduce.streams.kernels.reference.selection import sample_places
from sparseallreduce.streams.operator import SUM, Operator

__all__ = [
    "clear",
    "contained",
    "cuts",
    "decode_bitmap",
    "decode_gaps",
    "decode_nonzero",
    "draw",
    "encode_bitmap",
    "encode_gaps",
    "encode_nonzero",
    "first_violation",
    "gather_present",
    "key_counts",
    "kth",
    "largest",
    "loosely",
    "marked",
    "mean_and_largest",
    "merge",
    "merged",
    "moments",
    "mstopk_places",
    "norms_of",
    "places",
    "sample",
    "scatter",
    "scatter_set",
    "select",
    "shared",
    "sum_duplicates",
    "top",
    "violation_and_nonzeros",
]


def merged(ia: Any, va: Any, ib: Any, vb: Any, op: Operator) -> tuple[Any, Any]:
    return merging.merge(ia, va, ib, vb, op, array_module(va))


def loosely(first: Any, second: Any, op: Operator) -> Any:
    return merging.loosely(first, second, op, array_module(first[1]))


def merge(ia: Any, va: Any, ib: Any, vb: Any, op: Operator, iout: Any, vout: Any) -> int:
    indices, values = merged(ia, va, ib, vb, op)
    if iout.dtype != indices.dtype or vout.dtype != values.dtype or min(len(iout), len(vout)) < len(indices):
        raise StreamError(f"{len(indices)} entries do not go into {iout.dtype} indices of {iout.shape} and {vout.dtype} of {vout.shape}")
    iout[: len(indices)], vout[: len(indices)] = indices, values
    return len(indices)


def shared(ia: Any, ib: Any) -> tuple[Any, Any]:
    return order.shared(ia, ib, array_module(ia))


def contained(ia: Any, ib: Any) -> Any:
    return order.contained(ia, ib, array_module(ia))


def marked(flags: Any, count: int) -> Any:
    return order.marked(flags, count, array_module(flags))


def scatter(indices: Any, values: Any, lo: int, op: Operator, target: Any) -> None:
    dense.scatter(indices, values, lo, op, target, array_module(values))


def clear(indices: Any, target: Any) -> None:
    dense.clear(indices, target, array_module(target))


def scatter_set(indices: Any, values: Any, lo: int, target: Any) -> None:
    dense.scatter_set(indices, values, lo, target, array_module(values))


def gather_present(array: Any, lo: int, index_dtype: DTypeLike) -> tuple[Any, Any]:
    return dense.gather_present(array, lo, index_dtype, array_module(array))


def places(indices: Any, lo: int, length: int) -> Any:
    at = indices.astype(np.uint64) - np.uint64(lo)
    if len(at) and int(at.max()) >= length:
        raise StreamError(f"indices {indices.min()}..{indices.max()} leave the range {lo}..{lo + length} of the dense array")
    return at.astype(np.int64)


def first_violation(indices: Any, size: int) -> int:
    return order.first_violation(indices, size, array_module(indices))


def violation_and_nonzeros(indices: Any, values: Any, size: int) -> tuple[bool, int]:
    return order.violation_and_nonzeros(indices, values, size, array_module(indices))


def sum_duplicates(indices: Any, values: Any, op: Operator = SUM) -> tuple[Any, Any]:
    return order.sum_duplicates(indices, values, op, array_module(values))


def cuts(indices: Any, bounds: Sequence[int], lo: int, hi: int) -> list[int]:
    return partition.cuts(indices, bounds, lo, hi, array_module(indices))


def encode_bitmap(indices: Any, lo: int, extent: int, out: Any) -> None:
    bits = bitmap.encode_bitmap(indices, lo, extent, array_module(indices))
    if len(bits) != len(out):
        raise StreamError(f"{extent} bits take {len(bits)} bytes, not {len(out)}")
    out[:] = bits


def decode_bitmap(bits: Any, lo: int, extent: int, out: Any) -> bool:
    indices = bitmap.decode_bitmap(bits, lo, extent, len(out), out.dtype, array_module(bits))
    if indices is None:
        return False
    out[:] = indices
    return True


def encode_nonzero(array: Any, bits: Any, out: Any) -> int:
    found, values = bitmap.encode_nonzero(array, array_module(array))
    if len(found) != len(bits):
        raise StreamError(f"{len(array)} elements take {len(found)} bytes as bits, not {len(bits)}")
    bits[:] = found
    if len(values) <= len(out):
        out[: len(values)] = values
    return len(values)


def decode_nonzero(bits: Any, values: Any, out: Any) -> bool:
    array = bitmap.decode_nonzero(bits, values, len(out), array_module(bits))
    if array is None:
        return False
    out[...] = array
    return True


def encode_gaps(indices: Any, lo: int, out: Any) -> int:
    octets = gaps.encode_gaps(indices, lo, array_module(indices))
    if len(octets) > len(out):
        raise StreamError(f"{len(indices)} indices take {len(octets)} bytes as gaps, and there is room for {len(out)}")
    out[: len(octets)] = octets
    return len(octets)


def decode_gaps(octets: Any, lo: int, hi: int, out: Any) -> bool:
    indices = gaps.decode_gaps(octets, lo, hi, len(out), out.dtype, array_module(octets))
    if indices is None:
        return False
    out[:] = indices
    return True


def select(accumulator: Any, gradient: Any | None, over: int, index_dtype: DTypeLike, clear: bool) -> tuple[Any, Any, int]:
    found = selection.select(accumulator, gradient, over, index_dtype, array_module(accumulator), clear=clear)
    return (*found, len(accumulator))


def draw(accumulator: Any, gradient: Any | None, index_dtype: DTypeLike, **options: Any) -> tuple[Any, Any]:
    return drawing.draw(accumulator, gradient, index_dtype, array_module(accumulator), **options)


def sample(accumulator: Any, gradient: Any | None, count: int, seed: int) -> Any:
    places_ = array_module(accumulator).asarray(sample_places(len(accumulator), count, seed).astype(np.int64))
    sampled = accumulator[places_]
    if gradient is not None:
        with np.errstate(all="ignore"):
            sampled += gradient[places_]
    return sampled


def kth(array: Any, k: int) -> tuple[int, int]:
    return ranking.kth(array, k, array_module(array))


def largest(array: Any, k: int, index_dtype: DTypeLike) -> Any:
    return ranking.largest(array, k, index_dtype, array_module(array))


def key_counts(array: Any, low: int, shift: int, length: int) -> Any:
    counts = array_module(array).zeros(length, np.int64)
    ranking.count_interval(array, low, shift, counts, array_module(array))
    return counts.get()


def top(array: Any, key: int, ties: int, k: int, index_dtype: DTypeLike) -> Any:
    return ranking.top(array, key, ties, k, index_dtype, array_module(array))


def mean_and_largest(accumulator: Any, gradient: Any | None) -> tuple[float, float]:
    return norms.mean_and_largest(accumulator, gradient, array_module(accumulator))


def norms_of(accumulator: Any, gradient: Any | None) -> tuple[float, float]:
    return norms.sum_and_largest(accumulator, gradient, array_module(accumulator))


def moments(accumulator: Any, gradient: Any | None) -> tuple[float, float]:
    """Sum by reductions of whole arrays in the order of the array module, which may round differently from the CPU."""
    xp = array_module(accumulator)
    with np.errstate(all="ignore"):
        if gradient is not None:
            accumulator += gradient
        finite = xp.where(xp.isfinite(accumulator), accumulator, accumulator.dtype.type(0)).astype(np.float64)
        total, squares = xp.stack([finite.sum(), (finite * finite).sum()]).tolist()
    return total, squares if not math.isnan(squares) else math.inf


def mstopk_places(
    accumulator: Any, k: int, measures: tuple[float, float], index_dtype: DTypeLike, searches: int, seeds: tuple[int, int]
) -> Any:
    return mstopk.choose_between(accumulator, k, measures, index_dtype, array_module(accumulator), searches, seeds)
