"""The kernels as numba compiles them: plain loops over sorted indices, without allocations or the GIL.

None reads or writes outside of its arrays, whatever the arrays hold and even if they change meanwhile: a place that comes from an
index is read once and compared with the length, and lengths and counts are compared first. What numba itself checks at a call is
only that an argument is an array of items of the right size: dtypes and dimensions are up to
:mod:`~sparseallreduce.streams.kernels`. What does not fit, a kernel answers with one of the negative numbers in
:mod:`~sparseallreduce.streams.kernels.contract`.

Two rules keep the loops fast. Every position is a ``uint64``, so that numba emits no code for negative positions (and ``uint64``
with a signed integer would become a float). And what a loop selects, it selects without a branch, because in random streams
no branch on the order of two indices can be predicted.
"""

from __future__ import annotations

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.contract import ABSENT, MALFORMED, Indices, Values
from sparseallreduce.streams.kernels.intrinsics import (
    LINE,
    address_of,
    count_bits,
    finish_streaming,
    lowest_bit,
    move,
    present_of_64,
    select,
    stream_16_bytes,
)

__all__ = ["ADD", "COPIED_DTYPES", "MALFORMED", "OPERATORS", "VALUE_DTYPES", "compile_kernel", "array_type", "cut", "sum_cut"]

ADD, MULTIPLY, MINIMUM, MAXIMUM, REPLACE = range(5)  # REPLACE keeps the second value: a copy, or a place for the caller to fill
OPERATORS = {np.add: ADD, np.multiply: MULTIPLY, np.minimum: MINIMUM, np.maximum: MAXIMUM, "replace": REPLACE}
VALUE_DTYPES = tuple(np.dtype(name) for name in ("float32", "float64", "int32", "int64"))
COPIED_DTYPES = (*VALUE_DTYPES, np.dtype("uint16"))  # the last for the bits of float16, with which numba does not compute

CHAIN = 4096  # entries of either input that one chain of a merge takes at most, about: three chains stay in the L2 cache
FEW = 100  # entries of two streams up to which one chain takes less time than three, which have to be found first
SHORT_ROW = 8  # values from which on a row is combined in vectors
GALLOP_RATIO = 32  # from this ratio of lengths on, searching and copying runs beats stepping through them
DENSE_BLOCK = 1 << 14  # positions of a dense vector that are added up together
BLOCK = 4096  # indices that are tested together before any is looked at, while they are in the L1 cache

U: Any = np.uint64


@inlined
def _combine(op: int, a: Any, b: Any) -> Any:
    """``op`` is a literal at compile time, so that one line of this remains; NaNs travel as in NumPy."""
    if op == ADD:
        return a + b
    if op == MULTIPLY:
        return a * b
    if op == MINIMUM:
        return select((a < b) | (a != a), a, b)
    if op == MAXIMUM:
        return select((a > b) | (a != a), a, b)
    return b


@inlined
def _is_list(array: Values) -> bool:
    """Whether a 1-D array lies without gaps, as its declared type only promises."""
    return array.shape[0] <= 1 or array.strides[0] == array.itemsize


@inlined
def _is_table(array: Values) -> bool:
    """Whether a 2-D array lies without gaps."""
    rows, width = array.shape
    together = rows <= 1 or array.strides[0] == array.itemsize * width  # the stride of a single row or column means nothing
    return array.size == 0 or (together and (width <= 1 or array.strides[1] == array.itemsize))


@inlined
def _lower_bound(indices: Indices, lo: Any, hi: Any, index: Any) -> Any:
    while lo < hi:
        middle = (lo + hi) >> U(1)
        if indices[middle] < index:
            lo = middle + U(1)
        else:
            hi = middle
    return lo


@inlined
def _gallop(indices: Indices, start: Any, end: Any, index: Any) -> Any:
    """The lower bound, faster where it is near ``start``."""
    stride = U(1)
    while stride < end - start and indices[start + stride] < index:
        stride += stride
    return _lower_bound(indices, start + (stride >> U(1)), min(start + stride, end), index)


@inlined
def _cut(by_a: bool, ia: Indices, i: Any, ea: Any, ib: Indices, j: Any, eb: Any, count: Any) -> Any:
    """Cut two ranges at the same index value, ``count`` entries into the one that leads."""
    if by_a:
        if ea - i <= count:
            return ea, eb
        return i + count, _lower_bound(ib, j, eb, ia[i + count])
    if eb - j <= count:
        return ea, eb
    return _lower_bound(ia, i, ea, ib[j + count]), j + count


@kernel
def merge(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Write the union of two sorted index sets; return its length."""
    return _merge(op, ia, va, ib, vb, iout, vout)


@inlined
def _merge(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Merge in blocks of three chains of steps that do not depend on each other, so that the processor overlaps them.

    One step of one chain waits for the step before it: 2.3 ns an output. Two chains take 1.4, three 1.1, four 1.15.
    The chains of a block take adjoining ranges of index values: the first goes from (i, j) to (i1, j1), stands at (p, s) and
    writes at x; so the second with q, t, y, and the third with r, u, z. Where indices meet, the chains leave gaps, closed at last.
    """
    na, nb = U(ia.shape[0]), U(ib.shape[0])
    if U(va.shape[0]) != na or U(vb.shape[0]) != nb or U(iout.shape[0]) < na + nb or U(vout.shape[0]) < na + nb:
        return MALFORMED
    if not (_is_list(ia) and _is_list(va) and _is_list(ib) and _is_list(vb) and _is_list(iout) and _is_list(vout)):
        return MALFORMED
    if na > U(GALLOP_RATIO) * nb or nb > U(GALLOP_RATIO) * na:
        return np.int64(_merge_galloping(op, ia, va, ib, vb, iout, vout))
    i, j, n = U(0), U(0), U(0)
    while i < na and j < nb:
        # Where one stream has nothing for long, the other is copied instead of stepped through.
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
            # No step passes more than one entry of either side, so that so many steps need no test for the end.
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
        n = _finish(op, ia, va, p, i1, ib, vb, s, j1, iout, vout, x)
        y = _finish(op, ia, va, q, i2, ib, vb, t, j2, iout, vout, y)
        z = _finish(op, ia, va, r, i3, ib, vb, u, j3, iout, vout, z)
        n = _close_gap(iout, vout, n, start_q, y)
        n = _close_gap(iout, vout, n, start_r, z)
        i, j = i3, j3
    return np.int64(_finish(op, ia, va, i, na, ib, vb, j, nb, iout, vout, n))


@inlined
def _step(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values, i: Any, j: Any, n: Any) -> Any:
    x, y = ia[i], ib[j]
    a, b = va[i], vb[j]
    from_a, from_b = x <= y, y <= x
    iout[n] = select(from_a, x, y)
    vout[n] = select(x != y, select(from_a, a, b), _combine(op, a, b))
    return i + U(from_a), j + U(from_b)


@inlined
def _finish(
    op: int, ia: Indices, va: Values, i: Any, ea: Any, ib: Indices, vb: Values, j: Any, eb: Any, iout: Indices, vout: Values, n: Any
) -> Any:
    """Merge what is left of two ranges in one chain, and copy what is left of the longer."""
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
def _merge_galloping(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Merge a short stream into a long one: find each short index in the long one, and copy what lies between."""
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
            vout[n] = _combine(op, value, other) if few_first else _combine(op, other, value)
            i += U(1)
        n += U(1)
    return _copy(many, many_values, i, end, iout, vout, n)


@kernel
def merge_rows(op: int, ia: Indices, va: Values, ib: Indices, vb: Values, iout: Indices, vout: Values) -> Any:
    """Merge in one chain, and copy the rows of each run of one side together: rows are long enough to hide the branches."""
    na, nb, width = U(ia.shape[0]), U(ib.shape[0]), U(vout.shape[1])
    if U(va.shape[0]) != na or U(vb.shape[0]) != nb or U(iout.shape[0]) < na + nb or U(vout.shape[0]) < na + nb:
        return MALFORMED
    if U(va.shape[1]) != width or U(vb.shape[1]) != width or not (_is_list(ia) and _is_list(ib) and _is_list(iout)):
        return MALFORMED
    if not (_is_table(va) and _is_table(vb) and _is_table(vout)):
        return MALFORMED
    i, j, n = U(0), U(0), U(0)
    while i < na and j < nb:
        if ia[i] == ib[j]:
            iout[n] = ia[i]
            for k in range(width):
                vout[n, k] = _combine(op, va[i, k], vb[j, k])
            i, j, n = i + U(1), j + U(1), n + U(1)
        elif ia[i] < ib[j]:
            start = i
            while i < na and ia[i] < ib[j]:
                i += U(1)
            n = _copy_rows(ia, va, start, i, iout, vout, n, width)
        else:
            start = j
            while j < nb and ib[j] < ia[i]:
                j += U(1)
            n = _copy_rows(ib, vb, start, j, iout, vout, n, width)
    n = _copy_rows(ia, va, i, na, iout, vout, n, width)
    return np.int64(_copy_rows(ib, vb, j, nb, iout, vout, n, width))


@inlined
def _copy_rows(indices: Indices, values: Values, start: Any, end: Any, iout: Indices, vout: Values, n: Any, width: Any) -> Any:
    move(iout, n, indices, start, end - start)
    move(vout, n * width, values, start * width, (end - start) * width)
    return n + (end - start)


@kernel
def shared_positions(ia: Indices, ib: Indices, in_a: Values, in_b: Values) -> Any:
    """Write where each index that both hold lies in either; the outputs need one place more than the shorter input has."""
    i, j, n, na, nb = U(0), U(0), U(0), U(ia.shape[0]), U(ib.shape[0])
    if min(U(in_a.shape[0]), U(in_b.shape[0])) <= min(na, nb) or not (_is_list(ia) and _is_list(ib) and _is_list(in_a) and _is_list(in_b)):
        return np.int64(MALFORMED)
    while i < na and j < nb:
        x, y = ia[i], ib[j]
        in_a[n] = i
        in_b[n] = j
        i, j, n = i + U(x <= y), j + U(y <= x), n + U(x == y)
    return np.int64(n)


@kernel
def scatter(op: int, indices: Indices, values: Values, lo: Any, dense: Values) -> Any:
    """Combine values into a dense array; an index out of range in their midst is left out, and told at the end."""
    n, size, outside = U(indices.shape[0]), U(dense.shape[0]), False
    if U(values.shape[0]) != n or not (_is_list(indices) and _is_list(values) and _is_list(dense)):
        return MALFORMED
    if n > U(0) and (indices[U(0)] < lo or U(indices[n - U(1)]) - lo >= size):
        return MALFORMED
    for j in range(n):
        at = U(indices[j]) - lo
        if at < size:
            dense[at] = _combine(op, dense[at], values[j])
        else:
            outside = True
    return MALFORMED if outside else 0


@kernel
def scatter_rows(op: int, indices: Indices, values: Values, lo: Any, dense: Values) -> Any:
    """As ``scatter``, of rows."""
    n, width, size, outside = U(indices.shape[0]), U(dense.shape[1]), U(dense.shape[0]), False
    if U(values.shape[0]) != n or U(values.shape[1]) != width:
        return MALFORMED
    if not (_is_list(indices) and _is_table(values) and _is_table(dense)):
        return MALFORMED
    if n > U(0) and (indices[U(0)] < lo or U(indices[n - U(1)]) - lo >= size):
        return MALFORMED
    for j in range(n):
        at = U(indices[j]) - lo
        if at >= size:
            outside = True
        elif op != REPLACE and width < U(SHORT_ROW):
            _combine_short_row(op, dense, at, values, j, width)
        else:
            for k in range(width):
                dense[at, k] = _combine(op, dense[at, k], values[j, k])
    return MALFORMED if outside else 0


@inlined
def _combine_short_row(op: int, dense: Values, at: Any, values: Values, j: Any, width: Any) -> None:
    """Four values at a time: to find out whether rows overlap, as LLVM does before it uses vectors, takes longer than a short row."""
    whole = width & ~U(3)
    for k in range(U(0), whole, U(4)):
        a, b, c, d = values[j, k], values[j, k + U(1)], values[j, k + U(2)], values[j, k + U(3)]
        w, x, y, z = dense[at, k], dense[at, k + U(1)], dense[at, k + U(2)], dense[at, k + U(3)]
        dense[at, k] = _combine(op, w, a)
        dense[at, k + U(1)] = _combine(op, x, b)
        dense[at, k + U(2)] = _combine(op, y, c)
        dense[at, k + U(3)] = _combine(op, z, d)
    for k in range(whole, width):
        dense[at, k] = _combine(op, dense[at, k], values[j, k])


@kernel
def gather_present(bits: Values, mask: Any, lo: Any, iout: Indices, vout: Values) -> Any:
    """Count the elements with a bit under ``mask``, and write those that fit.

    64 elements are tested together, and the places of those present taken from the bits of the result, at any density.
    """
    if not (_is_list(bits) and _is_list(iout) and _is_list(vout)) or vout.shape[0] < iout.shape[0]:
        return MALFORMED
    size, room, n = U(bits.shape[0]), U(iout.shape[0]), U(0)
    whole = size & ~U(63)
    for start in range(U(0), whole, U(64)):
        present = present_of_64(bits, start, mask)
        count = count_bits(present)
        if n + count > room:
            n += count
        else:
            while present:
                i = start + lowest_bit(present)
                iout[n] = i + lo
                vout[n] = bits[i]
                n += U(1)
                present &= present - U(1)
    for i in range(whole, size):
        if bits[i] & mask:
            if n < room:
                iout[n] = i + lo
                vout[n] = bits[i]
            n += U(1)
    return np.int64(n)


@kernel
def gather_present_rows(bits: Values, mask: Any, lo: Any, iout: Indices, vout: Values) -> Any:
    """Count the rows with a bit under ``mask``, and write those that fit."""
    size, width, room, n = U(bits.shape[0]), U(bits.shape[1]), U(iout.shape[0]), U(0)
    if not (_is_table(bits) and _is_list(iout) and _is_table(vout)) or vout.shape[0] < iout.shape[0] or U(vout.shape[1]) != width:
        return MALFORMED
    for i in range(size):
        found = mask & U(0)
        for k in range(width):
            found |= bits[i, k] & mask
        if found:
            if n < room:
                iout[n] = i + lo
                move(vout, n * width, bits, i * width, width)
            n += U(1)
    return np.int64(n)


@kernel
def first_violation(indices: Indices, last: Any) -> Any:
    """Test block after block as a whole, where only its last index can be the first beyond ``last``; then find the place."""
    n = U(indices.shape[0])
    if not _is_list(indices):
        return MALFORMED
    if n > U(0) and indices[U(0)] > last:
        return 0
    for start in range(U(1), n, U(BLOCK)):
        end = min(start + U(BLOCK), n)
        wrong = np.uint32(0)
        for i in range(start, end):
            wrong |= np.uint32(indices[i] <= indices[i - U(1)])
        if wrong or indices[end - U(1)] > last:
            for i in range(start, end):
                if indices[i] <= indices[i - U(1)] or indices[i] > last:
                    return np.int64(i)
    return ABSENT


@kernel
def sum_duplicates(op: int, indices: Indices, values: Values, iout: Indices, vout: Values) -> Any:
    """Count the different indices; if that many fit, write each with its values combined, without a branch on repeats."""
    length, n, room = U(indices.shape[0]), U(0), U(min(iout.shape[0], vout.shape[0]))
    if U(values.shape[0]) != length or not (_is_list(indices) and _is_list(values) and _is_list(iout) and _is_list(vout)):
        return MALFORMED
    if length == U(0):
        return 0
    different = _count_different(indices)
    if room < different:
        return np.int64(different)
    total, before = values[U(0)], indices[U(0)]
    iout[U(0)] = before
    vout[U(0)] = total
    for i in range(U(1), length):
        index, value = indices[i], values[i]
        starts = index != before
        total = select(starts, value, _combine(op, total, value))
        n += U(starts)
        if n >= room:  # indices have changed since they were counted
            return MALFORMED
        iout[n] = index
        vout[n] = total
        before = index
    return np.int64(n + U(1))


@kernel
def sum_duplicates_rows(op: int, indices: Indices, values: Values, iout: Indices, vout: Values) -> Any:
    """Count the different indices; if that many fit, write each with its rows combined."""
    length, width, n, room = U(indices.shape[0]), U(values.shape[1]), U(0), U(min(iout.shape[0], vout.shape[0]))
    if U(values.shape[0]) != length or not (_is_list(indices) and _is_table(values) and _is_list(iout) and _is_table(vout)):
        return MALFORMED
    if length == U(0):
        return 0
    different = _count_different(indices)
    if room < different:
        return np.int64(different)
    if U(vout.shape[1]) != width:
        return MALFORMED
    for i in range(length):
        if n == U(0) or indices[i] != iout[n - U(1)]:
            if n >= room:  # indices have changed since they were counted
                return MALFORMED
            n = _copy_rows(indices, values, i, i + U(1), iout, vout, n, width)
        else:
            for k in range(width):
                vout[n - U(1), k] = _combine(op, vout[n - U(1), k], values[i, k])
    return np.int64(n)


@inlined
def _count_different(indices: Indices) -> Any:
    different = U(1)
    for i in range(U(1), U(indices.shape[0])):
        different += U(indices[i] != indices[i - U(1)])
    return different


@kernel
def sum_rows(op: int, rows: Indices, values: Values, start: Any, counts: Any, lo: Any, hi: Any, cursors: Any, dense: Values) -> Any:
    """Add some positions at a time, row after row, while they are in the cache.

    A row comes to a halt before an index that is not below the positions at hand; if that is out of range, until the end.
    """
    ranks, size, first = U(counts.shape[0]), U(dense.shape[0]), start // U(values.itemsize)
    if lo > hi or hi > size or U(cursors.shape[0]) < ranks or not _have_room(rows, values, ranks) or not _is_list(dense):
        return MALFORMED
    for r in range(ranks):
        is_dense = counts[r] < 0
        count = U(0) if is_dense else U(counts[r])
        if not _fits(rows, start, count, U(values.itemsize)) or first + (size if is_dense else count) > U(values.shape[1]):
            return MALFORMED
        behind = _behind(rows, start + count * U(values.itemsize))
        indices = rows[r, behind : behind + count]
        if count > U(0) and U(indices[count - U(1)]) >= size:
            return MALFORMED
        cursors[r] = _lower_bound(indices, U(0), count, lo) if lo > U(0) else U(0)
    for begin in range(lo, hi, U(DENSE_BLOCK)):
        end = min(hi, begin + U(DENSE_BLOCK))
        for j in range(begin, end):
            dense[j] = 0
        for r in range(ranks):
            if counts[r] < 0:
                for j in range(begin, end):
                    dense[j] = _combine(op, dense[j], values[r, first + j])
            else:
                count, cursor = U(counts[r]), U(cursors[r])
                behind = _behind(rows, start + count * U(values.itemsize))
                while cursor < count:
                    at = U(rows[r, behind + cursor])
                    if at >= end:
                        break
                    dense[at] = _combine(op, dense[at], values[r, first + cursor])
                    cursor += U(1)
                cursors[r] = cursor
    for r in range(ranks):
        if counts[r] >= 0 and U(cursors[r]) < U(counts[r]):
            index = U(rows[r, _behind(rows, start + U(counts[r]) * U(values.itemsize)) + U(cursors[r])])
            if index < hi or index >= size:
                return MALFORMED
    return 0


def _cut_rows(rows: Indices, itemsize: Any, counts: Any, size: Any, part: Any, parts: Any, bounds: Any) -> Any:
    """Find where a part lies in each row; its bounds are the mean of where they would be by each row alone."""
    ranks, total, before, n = U(counts.shape[0]), U(0), U(0), U(0)
    if U(bounds.shape[0]) < U(3) or U(bounds.shape[1]) <= ranks or not _have_room(rows, rows, ranks) or not _is_table(bounds):
        return np.int64(MALFORMED)
    for r in range(ranks):
        total += U(counts[r])
        if not _fits(rows, U(0), U(counts[r]), itemsize):
            return np.int64(MALFORMED)
    lo, hi = U(0), size
    for bound in range(part, part + U(2)):
        if bound > U(0) and bound < parts:
            mean = 0.0
            for r in range(ranks):
                count = U(counts[r])
                if count > U(0):
                    mean += float(rows[r, _behind(rows, itemsize * count) + count * bound // parts]) * float(count)
            cut = U(mean / float(total)) if total > U(0) else size
            lo, hi = (cut, hi) if bound == part else (lo, cut)
    for r in range(ranks):
        count = U(counts[r])
        start = _behind(rows, itemsize * count)
        indices = rows[r, start : start + count]
        begin = _lower_bound(indices, U(0), count, lo) if part > U(0) else U(0)
        end = _lower_bound(indices, begin, count, hi) if part + U(1) < parts else count
        bounds[0, r], bounds[1, r] = begin, end
        before += begin
        n += end - begin
    bounds[0, ranks], bounds[1, ranks], bounds[2, ranks] = lo, hi, before
    return np.int64(n)


cut_rows, cut = kernel(_cut_rows), inlined(_cut_rows)


@kernel
def estimate_union(rows: Indices, start: Any, itemsize: Any, counts: Any, samples: Any) -> Any:
    """Of an index that m rows have, each of these adds one m-th to the union: look how many have those of some entries."""
    ranks, total, shares = U(counts.shape[0]), U(0), 0.0
    if not _have_room(rows, rows, ranks):
        return np.int64(MALFORMED)
    for r in range(ranks):
        total += U(counts[r])
        if not _fits(rows, start, U(counts[r]), itemsize):
            return np.int64(MALFORMED)
    if total == U(0):
        return np.int64(0)
    for sample in range(samples):
        place, r = total * (U(2) * sample + U(1)) // (U(2) * samples), U(0)
        while place >= U(counts[r]):
            place -= U(counts[r])
            r += U(1)
        index, found = rows[r, _behind(rows, start + itemsize * U(counts[r])) + place], U(0)
        for q in range(ranks):
            count = U(counts[q])
            behind = _behind(rows, start + itemsize * count)
            indices = rows[q, behind : behind + count]
            at = _lower_bound(indices, U(0), count, index)
            found += U(at < count and indices[at] == index)
        shares += 1.0 / float(max(found, U(1)))  # a row in disorder hides its own
    return np.int64(shares / float(samples) * float(total) + 0.5)


def _sum_cut_rows(
    op: int,
    rows: Indices,
    values: Values,
    start: Any,
    counts: Any,
    bounds: Any,
    whole: Any,
    at_end: Any,
    limit: Any,
    most: Any,
    inner_indices: Indices,
    inner_values: Values,
    iout: Indices,
    vout: Values,
) -> Any:
    """Merge two neighbours at a time, a piece of the index space after the other, of ``most`` entries at most.

    Sums of a level of the tree are made in two inner arrays by turns, those of the last one in the output. ``bounds`` has where in each
    row lies what is still to be merged, and in its last two rows the same of a piece. A sum at the end of its array is made from the last
    piece on, each of which is moved there while it is in the cache.
    """
    ranks, room, left, n = U(counts.shape[0]), U(min(iout.shape[1], vout.shape[1])), U(0), U(0)
    if U(bounds.shape[0]) < U(4) or U(bounds.shape[1]) < ranks or not _have_room(rows, values, ranks) or most == U(0):
        return np.int64(MALFORMED)
    if not _is_table(bounds) or iout.shape[0] < 1 or vout.shape[0] < 1:
        return np.int64(MALFORMED)
    for r in range(ranks):
        if whole:
            bounds[0, r], bounds[1, r] = U(0), U(counts[r])
        begin, end, count = U(bounds[0, r]), U(bounds[1, r]), U(counts[r])
        if begin > end or end > count or not _fits(rows, start, count, U(values.itemsize)):
            return np.int64(MALFORMED)
        if start // U(values.itemsize) + end > U(values.shape[1]):
            return np.int64(MALFORMED)
        left += end - begin
    if left > room:
        return np.int64(MALFORMED)
    while left > U(0):
        piece = _take_piece(rows, U(values.itemsize), start, counts, bounds, left, most, at_end)
        place = room - n - piece if at_end else n
        found = _sum_piece(op, rows, values, start, counts, bounds, inner_indices, inner_values, iout, vout, place)
        if found < 0:
            return np.int64(found)
        if at_end and U(found) < piece:
            move(iout, room - n - U(found), iout, place, U(found))
            move(vout, room - n - U(found), vout, place, U(found))
        left -= piece
        n += U(found)
        if n > limit:
            return np.int64(ABSENT)
    return np.int64(n)


sum_cut_rows, sum_cut = kernel(_sum_cut_rows), inlined(_sum_cut_rows)


@inlined
def _take_piece(rows: Indices, itemsize: Any, start: Any, counts: Any, bounds: Any, left: Any, most: Any, at_end: Any) -> Any:
    """Take the first piece, or the last, from what is left in the rows; return its entries, which are all or about half of ``most``.

    They are at least one, and each round leaves fewer, also where a row is in disorder: of the longest row the cut itself is the bound.
    """
    ranks, total = U(counts.shape[0]), left
    for r in range(ranks):
        bounds[2, r], bounds[3, r] = bounds[0, r], bounds[1, r]
    while total > most:
        longest, length = U(0), U(0)
        for r in range(ranks):
            if U(bounds[3, r]) - U(bounds[2, r]) > length:
                longest, length = r, U(bounds[3, r]) - U(bounds[2, r])
        share = max(length * most // (total + total), U(1))
        cut = U(bounds[3, longest]) - share if at_end else U(bounds[2, longest]) + share
        index = rows[longest, _behind(rows, start + U(counts[longest]) * itemsize) + cut]
        total = U(0)
        for r in range(ranks):
            behind = _behind(rows, start + U(counts[r]) * itemsize)
            found = _lower_bound(rows[r, behind : behind + U(counts[r])], U(bounds[2, r]), U(bounds[3, r]), index)
            bounds[2 if at_end else 3, r] = cut if r == longest else found
            total += U(bounds[3, r]) - U(bounds[2, r])
        if length == U(1):
            break
    for r in range(ranks):
        if at_end:
            bounds[1, r] = bounds[2, r]
        else:
            bounds[0, r] = bounds[3, r]
    return total


@inlined
def _sum_piece(
    op: int,
    rows: Indices,
    values: Values,
    start: Any,
    counts: Any,
    bounds: Any,
    inner_indices: Indices,
    inner_values: Values,
    iout: Indices,
    vout: Values,
    place: Any,
) -> Any:
    """Sum a piece of all rows, and return the entries of its sum."""
    nodes, into, found, room = U(counts.shape[0]), U(1), np.int64(0), U(min(inner_indices.shape[1], inner_values.shape[1]))
    if nodes > U(2) and (inner_indices.shape[0] < 2 or inner_values.shape[0] < 2):
        return np.int64(MALFORMED)
    indices, added, packed = rows, values, True  # what is merged: the rows first, then what has come into an inner array
    while packed or nodes > U(1):
        source, into, n, last = into, U(1) - into, U(0), nodes <= U(2)
        for a in range(U(0), nodes, U(2)):
            b = min(a + U(1), nodes - U(1))
            row_a, row_b = (a, b) if packed else (source, source)
            first = start // U(values.itemsize) if packed else U(0)
            behind_a = _behind(rows, start + U(counts[a]) * U(values.itemsize)) if packed else U(0)
            behind_b = _behind(rows, start + U(counts[b]) * U(values.itemsize)) if packed else U(0)
            begin_a, end_a, begin_b = U(bounds[2, a]), U(bounds[3, a]), U(bounds[2, b])
            end_b = begin_b if a == b else U(bounds[3, b])  # the last of an odd number has no neighbour
            ia, va = indices[row_a, behind_a + begin_a : behind_a + end_a], added[row_a, first + begin_a : first + end_a]
            ib, vb = indices[row_b, behind_b + begin_b : behind_b + end_b], added[row_b, first + begin_b : first + end_b]
            na, nb = U(ia.shape[0]), U(ib.shape[0])
            if na != U(va.shape[0]) or nb != U(vb.shape[0]) or (not last and na + nb > room - n):
                return np.int64(MALFORMED)
            io, vo = (iout[0, place:], vout[0, place:]) if last else (inner_indices[into, n:], inner_values[into, n:])
            if na + nb > U(min(io.shape[0], vo.shape[0])):
                return np.int64(MALFORMED)
            if na + nb < U(FEW):
                found = np.int64(_finish(op, ia, va, U(0), na, ib, vb, U(0), nb, io, vo, U(0)))
            else:
                found = np.int64(_merge(op, ia, va, ib, vb, io, vo))
            if found < 0:
                return np.int64(MALFORMED)
            bounds[2, a >> U(1)], bounds[3, a >> U(1)] = n, n + U(found)
            n += U(found)
        nodes = (nodes + U(1)) >> U(1)
        indices, added, packed = inner_indices, inner_values, False
    return found


@inlined
def _behind(rows: Indices, nbytes: Any) -> Any:
    """Where the indices of a row begin, behind so many bytes."""
    return (nbytes + U(rows.itemsize - 1)) // U(rows.itemsize)


@inlined
def _have_room(rows: Indices, values: Values, ranks: Any) -> Any:
    """Whether there is a row for each rank, without gaps."""
    return U(rows.shape[0]) >= ranks and U(values.shape[0]) >= ranks and _is_table(rows) and _is_table(values)


@inlined
def _fits(rows: Indices, start: Any, count: Any, itemsize: Any) -> Any:
    """Whether a row holds that many values behind ``start`` bytes, and their indices; a count so large that bytes overflow does not fit."""
    room = U(rows.shape[1])
    if count > room or start > room * U(rows.itemsize):
        return False
    return count == U(0) or (itemsize <= room * U(rows.itemsize) // count and _behind(rows, start + count * itemsize) + count <= room)


@kernel
def write_past(target: Values, to: Any, source: Values) -> Any:
    """Copy bytes past the caches, a line at a time: a core that writes to a part of one must wait for the rest."""
    count = U(source.shape[0])
    if count > U(target.shape[0]) or to > U(target.shape[0]) - count or not (_is_list(target) and _is_list(source)):
        return MALFORMED
    i = min(count, (U(LINE) - (address_of(target, to) & U(LINE - 1))) % U(LINE))
    move(target, to, source, U(0), i)
    while i + U(LINE) <= count:
        for j in range(U(0), U(LINE), U(16)):
            stream_16_bytes(target, to + i + j, source, i + j)
        i += U(LINE)
    move(target, to + i, source, i, count - i)
    finish_streaming()
    return 0


def compile_kernel(name: str, index_dtype: Any, value_dtype: Any = np.uint32, ndim: int = 1, op: int | None = None) -> Any:
    """Compile one specialisation of a kernel, or load it from numba's cache on disk.

    Parameters
    ----------
    name : str
        One of the kernels above; that for rows is chosen by ``ndim``.
    index_dtype, value_dtype : numpy dtype
        Of the indices, and of the values or their bits.
    ndim : {1, 2}
        Of the array of values.
    op : int, optional
        What the kernel does to two values, bound to its first argument; for the kernels that have it.

    Returns
    -------
    callable
    """
    i, iout = array_type(index_dtype, 1, True), array_type(index_dtype, 1, False)
    v, vout = array_type(value_dtype, ndim, True), array_type(value_dtype, ndim, False)
    positions, counts = array_type(np.uint64, 1, False), array_type(np.int64, 1, False)
    bounds = array_type(np.uint64, 2, False)
    tables = array_type(index_dtype, 2, False), array_type(value_dtype, 2, False)
    mask = numba.from_dtype(np.dtype(value_dtype))
    kernels = {
        "merge": ((merge, merge_rows), (i, v, i, v, iout, vout)),
        "shared_positions": ((shared_positions, None), (i, i, positions, positions)),
        "scatter": ((scatter, scatter_rows), (i, v, types.uint64, vout)),
        "gather_present": ((gather_present, gather_present_rows), (v, mask, types.uint64, iout, vout)),
        "first_violation": ((first_violation, None), (i, types.uint64)),
        "sum_duplicates": ((sum_duplicates, sum_duplicates_rows), (i, v, iout, vout)),
        "write_past": ((write_past, None), (array_type(np.uint8, 1, False), types.uint64, array_type(np.uint8, 1, True))),
        "cut_rows": ((cut_rows, None), (tables[0], types.uint64, counts, *(types.uint64,) * 3, bounds)),
        "estimate_union": ((estimate_union, None), (tables[0], types.uint64, types.uint64, counts, types.uint64)),
        "sum_cut_rows": (
            (sum_cut_rows, None),
            (*tables, types.uint64, counts, bounds, *(types.boolean,) * 2, *(types.uint64,) * 2, *tables, *tables),
        ),
        "sum_rows": ((sum_rows, None), (*tables, types.uint64, counts, types.uint64, types.uint64, positions, vout)),
    }
    variants, signature = kernels[name]
    dispatcher = variants[ndim - 1]
    if op is None:
        return compiled_entry(dispatcher, signature)
    literal = types.literal(op)  # type: ignore[no-untyped-call]
    return functools.partial(compiled_entry(dispatcher, (literal, *signature)), op)


def array_type(dtype: Any, ndim: int, readonly: bool) -> Any:
    """The type of arrays of a dtype without gaps."""
    # Declared unaligned, since a slice of a message starts at any byte; on today's processors that costs aligned ones nothing.
    return types.Array(numba.from_dtype(np.dtype(dtype)), ndim, "C", readonly=readonly, aligned=False)
