"""Synthetic streams as in thesis section 5.2, and a check of the results of their reduction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.algorithms import ALLREDUCE, algorithms
from sparseallreduce.streams.dtypes import epsilon, smallest_normal
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["algorithms_option", "draw_positions", "draw_values", "entries_of", "largest_deviation"]

Array = NDArray[Any]
Command = TypeVar("Command", bound=Callable[..., Any])


def algorithms_option() -> Callable[[Command], Command]:
    """Return the option ``--algorithms a,b|all``, passed on as the list ``names``."""
    return click.option("--algorithms", "names", default="all", show_default=True, metavar="A,B|all", callback=_named)


def _named(context: click.Context, option: click.Parameter, text: str) -> list[str]:
    known = algorithms(context.params.get("collective", ALLREDUCE))
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = f"unknown algorithm {unknown[0]!r}" if unknown else "no algorithm given"
        raise click.BadParameter(f"{what}: give all, or some of {','.join(known)}", context, option)
    return list(dict.fromkeys(names))


def entries_of(size: int, density: float) -> int:
    """Return the number of entries per rank, k = N d, rounded."""
    return round(size * density)


def draw_positions(rng: np.random.Generator, size: int, count: int) -> Array:
    """Return exactly ``count`` different positions below ``size`` in increasing order; every set of that size is equally likely.

    Time and memory are proportional to ``count`` if it is at most half of ``size``, else to ``size``.
    """
    if count > size // 2:
        absent = np.ones(size, np.bool_)
        absent[draw_positions(rng, size, size - count)] = False
        return np.flatnonzero(absent).astype(index_dtype(size))
    found = np.empty(0, index_dtype(size))
    while len(found) < count:
        # The expected number of different positions among these draws is slightly more than the number missing.
        missing = count - len(found)
        draws = math.ceil(-size * math.log1p(-missing / size) * 1.001 + 4 * math.sqrt(missing)) + 4
        found = _union(found, rng.integers(size, size=draws, dtype=found.dtype.type), size)
    surplus = rng.choice(len(found), len(found) - count, replace=False, shuffle=False)
    kept: Array = np.delete(found, surplus)
    return kept


def _union(found: Array, drawn: Array, size: int) -> Array:
    if len(drawn) < size // 64:
        both = np.sort(np.concatenate([found, drawn]))
        different: Array = both[np.diff(both, prepend=~both[:1]) != 0]
        return different
    present = np.zeros(size, np.bool_)  # faster than sorting if ``size`` is not much larger than the number of draws
    present[found] = present[drawn] = True
    return np.flatnonzero(present).astype(found.dtype)


def draw_values(rng: np.random.Generator, count: int, dtype: DTypeLike) -> Array:
    """Return standard normal floats, complex numbers with standard normal parts, or integers from -100 to 100."""
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        return rng.integers(-100, 101, size=count, dtype=dtype.type)
    if dtype.kind == "c":
        return rng.standard_normal((count, 2)).view(np.complex128)[:, 0].astype(dtype, copy=False)
    drawn = rng.standard_normal(count, dtype=np.float64 if dtype == np.float64 else np.float32)
    return drawn.astype(dtype, copy=False)


def largest_deviation(result: SparseStream, expected: Array, magnitude: Array | None, ranks: int, op: Operator) -> float:
    """Return the largest error of ``result`` against the dense reduction, as a multiple of the bound on rounding errors.

    Parameters
    ----------
    result : SparseStream
    expected : ndarray, shape (size,)
        The dense reduction, zero where no rank has an entry.
    magnitude : ndarray, shape (size,), or None
        The same reduction of absolute values; None stands for the absolute values of ``expected``.
    ranks : int
        Number of reduced streams.
    op : Operator

    Returns
    -------
    float
        At most 1 for a correct result; exact reductions (integers, minimum, maximum) give 0 or infinity.
    """
    dense = result.to_dense()
    if dense.shape != expected.shape or dense.dtype != expected.dtype:
        return math.inf
    if dense.dtype.kind in "iu" or op.name in ("min", "max"):
        return 0.0 if np.array_equal(dense, expected) else math.inf
    # In either order, the error of P - 1 roundings is at most (P - 1) eps times the reduction of absolute values.
    wrong = np.flatnonzero(dense != expected)
    if len(wrong) == 0:
        return 0.0
    allowed = np.abs(expected[wrong]) if magnitude is None else magnitude[wrong]
    wide = np.complex128 if dense.dtype.kind == "c" else np.float64
    tolerance = 2 * ranks * epsilon(dense.dtype) * np.abs(allowed.astype(wide)) + smallest_normal(dense.dtype)
    deviation = np.abs(dense[wrong].astype(wide) - expected[wrong].astype(wide)) / tolerance
    return math.inf if np.isnan(deviation).any() else float(deviation.max())
