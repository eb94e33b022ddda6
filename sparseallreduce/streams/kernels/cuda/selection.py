"""Selection by a threshold on a GPU: one pass updates and counts the residual, a second places and clears selected values."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.cuda.arrays import smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN, exclusive, kernel, launch, threads_for

__all__ = ["check_selected", "select", "select_at_least"]


def select_at_least(
    accumulator: Any,
    threshold: float,
    gradient: Any | None,
    index_dtype: DTypeLike,
    xp: Any,
    *,
    clear: bool = False,
    run: int = RUN,
    block: int = BLOCK,
) -> tuple[Any, Any]:
    """Select the non-zero values of at least a given magnitude, like ``streams.selection.select_at_least``.

    Raises
    ------
    StreamError
        As :func:`select`, and if the threshold is negative.
    """
    if threshold < 0:
        raise StreamError(f"a threshold of magnitudes is at least 0, not {threshold}")
    over = max(1, magnitude.key_of(threshold, accumulator.dtype)) - 1
    return select(accumulator, gradient, over, index_dtype, xp, clear=clear, run=run, block=block)


def select(
    accumulator: Any,
    gradient: Any | None,
    over: int,
    index_dtype: DTypeLike,
    xp: Any,
    *,
    clear: bool = False,
    run: int = RUN,
    block: int = BLOCK,
) -> tuple[Any, Any]:
    """Add two arrays, and select the sums above a threshold.

    Parameters
    ----------
    accumulator : device array of float32 or float64, shape (N,)
        The gradient is added to it; with ``clear``, selected values are set to zero.
    gradient : device array of the same shape and dtype, or None
    over : int
        Magnitudes whose key (``streams.kernels.magnitude``) is above this are selected; -1 selects all.
    index_dtype : {uint32, uint64}
    xp : module
        NumPy or CuPy.

    Returns
    -------
    indices, values : device arrays, shape (n,)
        In increasing order. Their number is copied to the host.

    Raises
    ------
    StreamError
        For arrays of other dtypes or dimensions, or that are not contiguous.
    """
    check_selected(accumulator, gradient)
    bits = magnitude.bits_of(accumulator)
    keys = np.int64(magnitude.mask(bits.dtype)), np.int64(over)
    threads = threads_for(len(bits), run)
    counts = xp.empty(threads, np.int64)
    added = accumulator if gradient is None else gradient
    launch(_add_and_count, threads, block, xp, accumulator, bits, added, gradient is not None, *keys, run, counts)
    starts, total = exclusive(counts, xp)
    found = int(total[0])
    indices, values = xp.empty(found, index_dtype), xp.empty(found, accumulator.dtype)
    launch(_place, threads, block, xp, bits, *keys, clear, run, starts, indices, magnitude.bits_of(values))
    return indices, values


def check_selected(accumulator: Any, gradient: Any | None = None) -> None:
    """Raise an error for arrays that selection does not support."""
    if accumulator.ndim != 1 or accumulator.dtype not in (np.float32, np.float64) or not accumulator.flags.c_contiguous:
        raise StreamError(
            f"values are selected from a contiguous vector of float32 or float64, not from {accumulator.dtype} of shape {accumulator.shape}"
        )
    if gradient is not None and not (
        gradient.dtype == accumulator.dtype and gradient.shape == accumulator.shape and gradient.flags.c_contiguous
    ):
        raise StreamError(f"a gradient of {gradient.dtype} and shape {gradient.shape} does not fit the accumulator, or has gaps")


@kernel
def _add_and_count(accumulator: Any, bits: Any, gradient: Any, add: Any, mask: Any, over: Any, run: Any, counts: Any) -> None:
    thread = cuda.grid(1)
    if thread < counts.shape[0]:
        count = 0
        for i in range(thread * run, smaller((thread + 1) * run, accumulator.shape[0])):
            if add:
                accumulator[i] += gradient[i]
            if (bits[i] & mask) > over:
                count += 1
        counts[thread] = count


@kernel
def _place(bits: Any, mask: Any, over: Any, clear: Any, run: Any, starts: Any, indices: Any, values: Any) -> None:
    thread = cuda.grid(1)
    if thread < starts.shape[0]:
        at = starts[thread]
        for i in range(thread * run, smaller((thread + 1) * run, bits.shape[0])):
            if (bits[i] & mask) > over and at < indices.shape[0]:
                indices[at] = i
                values[at] = bits[i]
                at += 1
                if clear:
                    bits[i] = 0
