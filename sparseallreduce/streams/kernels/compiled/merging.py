"""Compiled kernels for the union and the intersection of two sorted index sets with values."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, combine, copy_rows, is_list, is_table, lower_bound
from sparseallreduce.streams.kernels.compiled.signatures import POSITIONS, Kernel
from sparseallreduce.streams.kernels.contract import MALFORMED, Indices, Values
from sparseallreduce.streams.kernels.intrinsics import move, select

__all__ = ["KERNELS", "merge_by_chains", "merge_by_steps"]

CHAIN = 4096  # approximate limit of the entries of either input in one chain: three chains fit into the L2 cache
GALLOP_RATIO = 32  # from this ratio of lengths on, searching and copying runs beats stepping through them


@kernel
def merge(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Write the union of two sorted index sets; return its length."""
    return merge_by_chains(op, ia, va, ib, vb, iout, vout)


@inlined
def merge_by_chains(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Merge in blocks of three independent chains of steps, which the processor overlaps.

    A step of a single chain waits for the previous step, which takes 2.3 ns per output. Two chains take 1.4, three 1.1, four 1.15. The
    chains of a block take adjacent ranges of index values: the first goes from (i, j) to (i1, j1), is at (p, s) and writes at x; likewise
    the second with q, t, y, and the third with r, u, z. Shared indices leave gaps between the outputs of chains, which are closed at the
    end.
    """
    na, nb = U(ia.shape[0]), U(ib.shape[0])
    if U(va.shape[0]) != na or U(vb.shape[0]) != nb or U(iout.shape[0]) < na + nb or U(vout.shape[0]) < na + nb:
        return MALFORMED
    if not (is_list(ia) and is_list(va) and is_list(ib) and is_list(vb) and is_list(iout) and is_list(vout)):
        return MALFORMED
    if na > U(GALLOP_RATIO) * nb or nb > U(GALLOP_RATIO) * na:
        return np.int64(_merge_galloping(op, ia, va, ib, vb, iout, vout))
    i, j, n = U(0), U(0), U(0)
    while i < na and j < nb:
        # Where one stream has a long gap, the other is copied without steps.
        p, s = _gallop(ia, i, na, ib[j]), _gallop(ib, j, nb, ia[i])
        n = _copy(ia, va, i, p, iout, vout, n)
        n = _copy(ib, vb, j, s, iout, vout, n)
        i, j = p, s
        i3, j3 = _cut(True, ia, i, na, ib, j, nb, U(3 * CHAIN))
        i3, j3 = _cut(False, ia, i, i3, ib, j, j3, U(3 * CHAIN))
        by_a = i3 - i >= j3 - j
        third = ((i3 - i if by_a else j3 - j) + U(2)) // U(3)
        i1, j1 = _cut(by_a, ia, i, i3, ib, j, j3, third)
        i2, j2 = _cut(by_a, ia, i1, i3, ib, j1, j3, third)
        p, q, r = i, i1, i2
        s, t, u = j, j1, j2
        start_q = n + (i1 - i) + (j1 - j)
        start_r = n + (i2 - i) + (j2 - j)
        x, y, z = n, start_q, start_r
        while True:
            # A step consumes at most one entry of each input, so this many steps need no test for the end.
            steps = min(min(min(i1 - p, j1 - s), min(i2 - q, j2 - t)), min(i3 - r, j3 - u))
            if steps == U(0):
                break
            for _ in range(steps):
                p, s = _step(op, ia, va, ib, vb, iout, vout, p, s, x)
                q, t = _step(op, ia, va, ib, vb, iout, vout, q, t, y)
                r, u = _step(op, ia, va, ib, vb, iout, vout, r, u, z)
                x += U(1)
                y += U(1)
                z += U(1)
        n = merge_by_steps(op, ia, va, p, i1, ib, vb, s, j1, iout, vout, x)
        y = merge_by_steps(op, ia, va, q, i2, ib, vb, t, j2, iout, vout, y)
        z = merge_by_steps(op, ia, va, r, i3, ib, vb, u, j3, iout, vout, z)
        n = _close_gap(iout, vout, n, start_q, y)
        n = _close_gap(iout, vout, n, start_r, z)
        i, j = i3, j3
    return np.int64(merge_by_steps(op, ia, va, i, na, ib, vb, j, nb, iout, vout, n))


@inlined
def _step(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values, i: Any, j: Any, n: Any) -> Any:
    x, y = ia[i], ib[j]
    a, b = va[i], vb[j]
    from_a, from_b = x <= y, y <= x
    iout[n] = select(from_a, x, y)
    vout[n] = select(x != y, select(from_a, a, b), combine(op, a, b))
    return i + U(from_a), j + U(from_b)


@inlined
def merge_by_steps(
    op: int, ia: Indices, va: Values, i: Any, ea: Any, ib: Indices, vb: Values, j: Any, eb: Any, iout: Indices, vout: Values, n: Any
) -> Any:
    """Merge the rest of two ranges in one chain, and copy the rest of the longer."""
    while i < ea and j < eb:
        i, j = _step(op, ia, va, ib, vb, iout, vout, i, j, n)
        n += U(1)
    n = _copy(ia, va, i, ea, iout, vout, n)
    return _copy(ib, vb, j, eb, iout, vout, n)


@inlined
def _copy(indices: Indices, values: Values, start: Any, end: Any, iout: Indices, vout: Values, n: Any) -> Any:
    move(iout, n, indices, start, end - start)
    move(vout, n, values, start, end - start)
    return n + (end - start)


@inlined
def _close_gap(iout: Indices, vout: Values, n: Any, start: Any, end: Any) -> Any:
    if n != start:
        move(iout, n, iout, start, end - start)
        move(vout, n, vout, start, end - start)
    return n + (end - start)


@inlined
def _gallop(indices: Indices, start: Any, end: Any, index: Any) -> Any:
    """Return the lower bound of ``index``; fast if it is near ``start``."""
    stride = U(1)
    while stride < end - start and indices[start + stride] < index:
        stride += stride
    return lower_bound(indices, start + (stride >> U(1)), min(start + stride, end), index)


@inlined
def _cut(by_a: bool, ia: Indices, i: Any, ea: Any, ib: Indices, j: Any, eb: Any, count: Any) -> Any:
    """Cut two ranges at the same index value, ``count`` entries into the leading one."""
    if by_a:
        if ea - i <= count:
            return ea, eb
        return i + count, lower_bound(ib, j, eb, ia[i + count])
    if eb - j <= count:
        return ea, eb
    return lower_bound(ia, i, ea, ib[j + count]), j + count


@inlined
def _merge_galloping(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Merge a short stream into a long one: search for each short index in the long one, and copy the entries between."""
    if ia.shape[0] < ib.shape[0]:
        return _insert(op, True, ia, va, ib, vb, iout, vout)
    return _insert(op, False, ib, vb, ia, va, iout, vout)


@inlined
def _insert(
    op: int, few_first: bool, few: Indices, few_values: Values, many: Indices, many_values: Values, iout: Indices, vout: Values
) -> Any:
    i, n, end = U(0), U(0), U(many.shape[0])
    for j in range(U(few.shape[0])):
        index, value = few[j], few_values[j]
        found = _gallop(many, i, end, index)
        n = _copy(many, many_values, i, found, iout, vout, n)
        i = found
        iout[n] = index
        vout[n] = value
        if i < end and many[i] == index:
            other = many_values[i]
            vout[n] = combine(op, value, other) if few_first else combine(op, other, value)
            i += U(1)
        n += U(1)
    return _copy(many, many_values, i, end, iout, vout, n)


@kernel
def merge_rows(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Merge in one chain, and copy runs of rows from one input together; rows are long enough to hide mispredicted branches."""
    na, nb, width = U(ia.shape[0]), U(ib.shape[0]), U(vout.shape[1])
    if U(va.shape[0]) != na or U(vb.shape[0]) != nb or U(iout.shape[0]) < na + nb or U(vout.shape[0]) < na + nb:
        return MALFORMED
    if U(va.shape[1]) != width or U(vb.shape[1]) != width or not (is_list(ia) and is_list(ib) and is_list(iout)):
        return MALFORMED
    if not (is_table(va) and is_table(vb) and is_table(vout)):
        return MALFORMED
    i, j, n = U(0), U(0), U(0)
    while i < na and j < nb:
        if ia[i] == ib[j]:
            iout[n] = ia[i]
            for k in range(width):
                vout[n, k] = combine(op, va[i, k], vb[j, k])
            i, j, n = i + U(1), j + U(1), n + U(1)
        elif ia[i] < ib[j]:
            start = i
            while i < na and ia[i] < ib[j]:
                i += U(1)
            n = copy_rows(ia, va, start, i, iout, vout, n, width)
        else:
            start = j
            while j < nb and ib[j] < ia[i]:
                j += U(1)
            n = copy_rows(ib, vb, start, j, iout, vout, n, width)
    n = copy_rows(ia, va, i, na, iout, vout, n, width)
    return np.int64(copy_rows(ib, vb, j, nb, iout, vout, n, width))


@kernel
def shared_positions(ia: Indices, ib: Indices, in_a: Values, in_b: Values) -> Any:
    """Write the positions of each shared index; the outputs need one element more than the shorter input."""
    i, j, n, na, nb = U(0), U(0), U(0), U(ia.shape[0]), U(ib.shape[0])
    if min(U(in_a.shape[0]), U(in_b.shape[0])) <= min(na, nb) or not (is_list(ia) and is_list(ib) and is_list(in_a) and is_list(in_b)):
        return np.int64(MALFORMED)
    while i < na and j < nb:
        x, y = ia[i], ib[j]
        in_a[n] = i
        in_b[n] = j
        i, j, n = i + U(x <= y), j + U(y <= x), n + U(x == y)
    return np.int64(n)


KERNELS = {
    "merge": Kernel((merge, merge_rows), lambda of: (of.indices, of.values, of.indices, of.values, of.iout, of.vout)),
    "shared": Kernel((shared_positions,), lambda of: (of.indices, of.indices, POSITIONS, POSITIONS)),
}
