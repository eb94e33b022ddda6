"""CUDA merges of sorted streams by merge path, and sums of many streams as a tree, bitwise identical to the CPU's.

A merge has three steps. Every thread finds the start of its diagonal in the two index sets, and counts the outputs of a fixed number of
steps along it. Prefix sums of the counts give each thread's output position. The threads then repeat the steps and write. The path visits
the entry of the first set before an equal one of the second: the thread that visits the former writes the combined value, and the thread
that visits the latter finds its equal just before, and writes nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.cuda.arrays import as_bits, check_together, larger, operator_of, replace, smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, RUN, device, exclusive, kernel, launch, threads_for
from sparseallreduce.streams.kernels.reference.arrays import combine
from sparseallreduce.streams.operator import Operator

__all__ = ["Loose", "loosely", "merge", "merge_many"]

Entries = tuple[Any, Any]  # indices and values, arrays on the device


class Loose(NamedTuple):
    """Entries whose number is known only on the device; it is at most the length of the arrays. Values beyond it are zero."""

    indices: Any  # device arrays, of which the first ``length[0]`` count
    values: Any
    length: Any  # a device array of one int64


def merge(ia: Any, va: Any, ib: Any, vb: Any, op: Operator, xp: Any, *, run: int = RUN, block: int = BLOCK) -> Entries:
    """Return the union of two sorted index sets with their values.

    Parameters
    ----------
    ia, ib : device arrays of uint32 or uint64, shapes (m,) and (n,)
        Strictly increasing, of one dtype.
    va, vb : device arrays, shapes (m,) and (n,), or (m, width) and (n, width)
        Of one dtype.
    op : Operator
        For an index in both sets the value is ``op.ufunc(va, vb)``, otherwise a bit-exact copy of the one.
    xp : module
        NumPy or CuPy, the module of the arrays.
    run, block : int
        Steps of a thread, and threads of a block. Results do not depend on them.

    Returns
    -------
    indices, values : device arrays
        The entries of the union, whose number is copied to the host.

    Raises
    ------
    StreamError
        If lengths, widths, dimensions or dtypes do not match, or an array is not contiguous.
    """
    return _merge_pairs([((ia, va), (ib, vb))], op, xp, run, block)[0]


def merge_many(streams: Sequence[Entries], op: Operator, xp: Any, *, run: int = RUN, block: int = BLOCK) -> Entries:
    """Return the union of one or more streams, in the CPU's balanced tree (``streams.reduction.Tree``).

    All merges of a level are counted before any is written, so that lengths are copied to the host once per level.

    Raises
    ------
    StreamError
        As :func:`merge`, and if there are no streams.
    """
    if not streams:
        raise StreamError("no streams were given, and there is nothing to sum")
    level = list(streams)
    while len(level) > 1:
        pairs = list(zip(level[::2], level[1::2]))
        level = _merge_pairs(pairs, op, xp, run, block) + level[2 * len(pairs) :]
    return level[0]


def loosely(first: Entries | Loose, second: Entries | Loose, op: Operator, xp: Any, *, run: int = RUN, block: int = BLOCK) -> Loose | None:
    """Return the union of two streams, as :func:`merge`, without making the host wait for its length.

    Operands may be earlier results of this function. Return None for operators that are evaluated on whole arrays, which need the length.
    """
    (ia, va), (ib, vb) = first[:2], second[:2]
    if operator_of(op.ufunc, va.dtype) is None:
        return None
    _check_pair((ia, va), (ib, vb))
    held = [stream.length if isinstance(stream, Loose) else None for stream in (first, second)]
    plan = _counted(ia, ib, xp, run, block, held)
    indices, values = _written((ia, va), (ib, vb), op, plan, len(ia) + len(ib), xp, run, block, held)
    return Loose(indices, values, plan[2])


def _lengths(ia: Any, ib: Any, held: Sequence[Any], begins: Any) -> tuple[Any, Any, Any, Any]:
    """Return for each of two streams its length, or -1, and the device array that otherwise holds it."""
    known = held or (None, None)
    pairs = [(len(indices), begins) if length is None else (-1, length) for indices, length in zip((ia, ib), known)]
    return (*pairs[0], *pairs[1])


def _check_pair(first: Entries, second: Entries) -> None:
    (ia, va), (ib, vb) = first, second
    check_together("merged", ia, va)
    check_together("merged", ib, vb)
    if ia.dtype != ib.dtype or va.dtype != vb.dtype or va.shape[1:] != vb.shape[1:]:
        raise StreamError(
            f"streams of {ia.dtype} and {ib.dtype} indices, {va.dtype} and {vb.dtype} values of shapes {va.shape} and {vb.shape} "
            "cannot be merged: convert one of them"
        )


def _merge_pairs(pairs: Sequence[tuple[Entries, Entries]], op: Operator, xp: Any, run: int, block: int) -> list[Entries]:
    for first, second in pairs:
        _check_pair(first, second)
    plans = [_counted(ia, ib, xp, run, block) for (ia, _), (ib, _) in pairs]
    lengths = xp.concatenate([total for _, _, total in plans]).tolist()
    return [_written(first, second, op, plan, length, xp, run, block) for (first, second), plan, length in zip(pairs, plans, lengths)]


def _counted(ia: Any, ib: Any, xp: Any, run: int, block: int, held: Sequence[Any] = ()) -> tuple[Any, Any, Any]:
    """Return each thread's start in the first set and in the outputs, and the number of outputs."""
    threads = threads_for(len(ia) + len(ib), run)
    begins, counts = xp.empty(threads, np.int64), xp.empty(threads, np.int64)
    launch(_count, threads, block, xp, ia, ib, *_lengths(ia, ib, held, begins), run, begins, counts)
    return (begins, *exclusive(counts, xp))


def _written(
    first: Entries, second: Entries, op: Operator, plan: Any, length: int, xp: Any, run: int, block: int, held: Sequence[Any] = ()
) -> Entries:
    (ia, va), (ib, vb) = first, second
    begins, starts, _ = plan
    make = xp.empty if len(held) == 0 else xp.zeros
    indices, values = xp.empty(length, ia.dtype), make((length, *va.shape[1:]), va.dtype)
    code = operator_of(op.ufunc, va.dtype)
    if code is None:
        (a, width), (b, _), (out, _) = as_bits(va), as_bits(vb), as_bits(values)
    else:
        (a, b, out), width = (each.reshape(-1) for each in (va, vb, values)), math.prod(va.shape[1:])
    lengths = _lengths(ia, ib, held, begins)
    launch(_writing(code or replace), len(begins), block, xp, ia, a, ib, b, *lengths, run, width, begins, starts, indices, out)
    if code is None and len(ia) + len(ib) > length:
        _fill_shared(first, second, op, values, xp)
    return indices, values


def _fill_shared(first: Entries, second: Entries, op: Operator, values: Any, xp: Any) -> None:
    """Apply the operator to whole arrays at the shared indices."""
    (ia, va), (ib, vb) = first, second
    places = xp.searchsorted(ib, ia)
    meets = ib[xp.minimum(places, len(ib) - 1)] == ia
    in_a = xp.flatnonzero(meets)
    in_b = places[in_a]
    at = in_a + in_b - xp.arange(len(in_a))
    if xp is np:
        values[at] = combine(op, va[in_a], vb[in_b])
    else:
        combined = xp.empty_like(va[in_a])
        op.ufunc(va[in_a], vb[in_b], out=combined)
        values[at] = combined


@device
def _path(ia: Any, m: Any, ib: Any, n: Any, diagonal: Any) -> Any:
    """Return how many of the first ``diagonal`` merged entries come from the first set, of length ``m``; the second has ``n``."""
    lo, hi = larger(0, diagonal - n), smaller(diagonal, m)
    while lo < hi:
        middle = (lo + hi) // 2
        if ia[middle] <= ib[diagonal - 1 - middle]:
            lo = middle + 1
        else:
            hi = middle
    return lo


@kernel
def _count(ia: Any, ib: Any, m: Any, m_held: Any, n: Any, n_held: Any, run: Any, begins: Any, counts: Any) -> None:
    thread = cuda.grid(1)
    if thread < counts.shape[0]:
        if m < 0:
            m = smaller(m_held[0], ia.shape[0])
        if n < 0:
            n = smaller(n_held[0], ib.shape[0])
        count = 0
        i = _path(ia, m, ib, n, thread * run)
        j = thread * run - i
        begins[thread] = i
        end = smaller((thread + 1) * run, m + n)
        while i + j < end:
            if j >= n or (i < m and ia[i] <= ib[j]):
                i += 1
                count += 1
            else:
                if i == 0 or ia[i - 1] != ib[j]:
                    count += 1
                j += 1
        counts[thread] = count


@functools.cache
def _writing(combined: Any) -> Any:
    """Return the kernel that writes a merge with an operator."""

    @kernel
    def write(
        ia: Any,
        va: Any,
        ib: Any,
        vb: Any,
        m: Any,
        m_held: Any,
        n: Any,
        n_held: Any,
        run: Any,
        width: Any,
        begins: Any,
        starts: Any,
        iout: Any,
        vout: Any,
    ) -> None:
        thread = cuda.grid(1)
        if thread < begins.shape[0]:
            if m < 0:
                m = smaller(m_held[0], ia.shape[0])
            if n < 0:
                n = smaller(n_held[0], ib.shape[0])
            room = iout.shape[0]
            i, at = begins[thread], starts[thread]
            j = thread * run - i
            end = smaller((thread + 1) * run, m + n)
            while i + j < end and at < room:  # room suffices unless the indices have changed since the count
                if j >= n or (i < m and ia[i] <= ib[j]):
                    iout[at] = ia[i]
                    both = j < n and ia[i] == ib[j]
                    for k in range(width):
                        if both:
                            vout[at * width + k] = combined(va[i * width + k], vb[j * width + k])
                        else:
                            vout[at * width + k] = va[i * width + k]
                    i += 1
                    at += 1
                else:
                    if i == 0 or ia[i - 1] != ib[j]:
                        iout[at] = ib[j]
                        for k in range(width):
                            vout[at * width + k] = vb[j * width + k]
                        at += 1
                    j += 1

    return write
