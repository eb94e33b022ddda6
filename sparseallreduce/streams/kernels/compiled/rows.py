"""Compiled kernels for sums of streams stored one in a row of bytes, and for writing such rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, combine, is_list, is_table, lower_bound
from sparseallreduce.streams.kernels.compiled.merging import merge_by_chains, merge_by_steps
from sparseallreduce.streams.kernels.compiled.signatures import BOUNDS, BYTES, BYTES_IN, COUNTS, POSITIONS, Kernel
from sparseallreduce.streams.kernels.contract import ABSENT, MALFORMED, Indices, Values
from sparseallreduce.streams.kernels.intrinsics import LINE, address_of, finish_streaming, move, stream_16_bytes

__all__ = ["KERNELS", "cut", "sum_cut"]

FEW = 100  # up to this many entries of two streams, one chain is faster than three, which must first be found
DENSE_BLOCK = 1 << 14  # positions of a dense vector that are added at a time


@kernel
def sum_rows(op: int, rows: Indices, values: Values, start: Any, counts: Any, lo: Any, hi: Any, cursors: Any, dense: Values) -> Any:
    """Add a block of positions at a time, row after row, while it is in the cache.

    The cursor of a row stops at an index beyond the block; if the index is out of range, it stays there.
    """
    ranks, size, first = U(counts.shape[0]), U(dense.shape[0]), start // U(values.itemsize)
    if lo > hi or hi > size or U(cursors.shape[0]) < ranks or not _have_room(rows, values, ranks) or not is_list(dense):
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
        cursors[r] = lower_bound(indices, U(0), count, lo) if lo > U(0) else U(0)
    for begin in range(lo, hi, U(DENSE_BLOCK)):
        end = min(hi, begin + U(DENSE_BLOCK))
        for j in range(begin, end):
            dense[j] = 0
        for r in range(ranks):
            if counts[r] < 0:
                for j in range(begin, end):
                    dense[j] = combine(op, dense[j], values[r, first + j])
            else:
                count, cursor = U(counts[r]), U(cursors[r])
                behind = _behind(rows, start + count * U(values.itemsize))
                while cursor < count:
                    at = U(rows[r, behind + cursor])
                    if at >= end:
                        break
                    dense[at] = combine(op, dense[at], values[r, first + cursor])
                    cursor += U(1)
                cursors[r] = cursor
    for r in range(ranks):
        if counts[r] >= 0 and U(cursors[r]) < U(counts[r]):
            index = U(rows[r, _behind(rows, start + U(counts[r]) * U(values.itemsize)) + U(cursors[r])])
            if index < hi or index >= size:
                return MALFORMED
    return 0


def _cut_rows(rows: Indices, itemsize: Any, counts: Any, size: Any, part: Any, parts: Any, bounds: Any) -> Any:
    """Find a part in each row; its bounds are the mean of the bounds that each row alone would give."""
    ranks, total, before, n = U(counts.shape[0]), U(0), U(0), U(0)
    if U(bounds.shape[0]) < U(3) or U(bounds.shape[1]) <= ranks or not _have_room(rows, rows, ranks) or not is_table(bounds):
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
        begin = lower_bound(indices, U(0), count, lo) if part > U(0) else U(0)
        end = lower_bound(indices, begin, count, hi) if part + U(1) < parts else count
        bounds[0, r], bounds[1, r] = begin, end
        before += begin
        n += end - begin
    bounds[0, ranks], bounds[1, ranks], bounds[2, ranks] = lo, hi, before
    return np.int64(n)


cut_rows: Any = kernel(_cut_rows)
cut: Any = inlined(_cut_rows)


@kernel
def estimate_union(rows: Indices, start: Any, itemsize: Any, counts: Any, samples: Any) -> Any:
    """Estimate the union: an index in m rows adds 1/m for each of them; m is counted for a sample of entries."""
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
            at = lower_bound(indices, U(0), count, index)
            found += U(at < count and indices[at] == index)
        shares += 1.0 / float(max(found, U(1)))  # at least 1: in an unsorted row, an entry may not be found
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
    """Merge pairs of neighbours, for pieces of the index space with at most ``most`` entries.

    Sums of the tree's levels alternate between two inner arrays, and the last goes to the output. The first two rows of ``bounds`` hold the
    rest of each row, the last two the current piece. A sum at the end of its array starts with the last piece; each piece is moved there
    while it is in the cache.
    """
    ranks, room, left, n = U(counts.shape[0]), U(min(iout.shape[1], vout.shape[1])), U(0), U(0)
    if U(bounds.shape[0]) < U(4) or U(bounds.shape[1]) < ranks or not _have_room(rows, values, ranks) or most == U(0):
        return np.int64(MALFORMED)
    if not is_table(bounds) or iout.shape[0] < 1 or vout.shape[0] < 1:
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


sum_cut_rows: Any = kernel(_sum_cut_rows)
sum_cut: Any = inlined(_sum_cut_rows)


@inlined
def _take_piece(rows: Indices, itemsize: Any, start: Any, counts: Any, bounds: Any, left: Any, most: Any, at_end: Any) -> Any:
    """Take the first or last piece from the rest of the rows; return its number of entries, which is everything or about half of ``most``.

    A piece has at least one entry, and each round leaves fewer, even if a row is unsorted: the cut of the longest row is its own bound.
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
            found = lower_bound(rows[r, behind : behind + U(counts[r])], U(bounds[2, r]), U(bounds[3, r]), index)
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
    """Sum a piece of all rows, and return the number of entries of the sum."""
    nodes, into, found, room = U(counts.shape[0]), U(1), np.int64(0), U(min(inner_indices.shape[1], inner_values.shape[1]))
    if nodes > U(2) and (inner_indices.shape[0] < 2 or inner_values.shape[0] < 2):
        return np.int64(MALFORMED)
    indices, added, packed = rows, values, True  # the inputs: the rows first, then inner arrays
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
                found = np.int64(merge_by_steps(op, ia, va, U(0), na, ib, vb, U(0), nb, io, vo, U(0)))
            else:
                found = np.int64(merge_by_chains(op, ia, va, ib, vb, io, vo))
            if found < 0:
                return np.int64(MALFORMED)
            bounds[2, a >> U(1)], bounds[3, a >> U(1)] = n, n + U(found)
            n += U(found)
        nodes = (nodes + U(1)) >> U(1)
        indices, added, packed = inner_indices, inner_values, False
    return found


@inlined
def _behind(rows: Indices, nbytes: Any) -> Any:
    """Return the start of a row's indices, which follow ``nbytes`` bytes of values, as an index."""
    return (nbytes + U(rows.itemsize - 1)) // U(rows.itemsize)


@inlined
def _have_room(rows: Indices, values: Values, ranks: Any) -> Any:
    """Return whether there is a contiguous row for each rank."""
    return U(rows.shape[0]) >= ranks and U(values.shape[0]) >= ranks and is_table(rows) and is_table(values)


@inlined
def _fits(rows: Indices, start: Any, count: Any, itemsize: Any) -> Any:
    """Return whether a row can hold ``count`` values after ``start`` bytes, and their indices, without overflow."""
    room = U(rows.shape[1])
    if count > room or start > room * U(rows.itemsize):
        return False
    return count == U(0) or (itemsize <= room * U(rows.itemsize) // count and _behind(rows, start + count * itemsize) + count <= room)


@kernel
def write_past(target: Values, to: Any, source: Values) -> Any:
    """Copy bytes past the caches by whole cache lines, since a core that writes part of a line must first load it."""
    count = U(source.shape[0])
    if count > U(target.shape[0]) or to > U(target.shape[0]) - count or not (is_list(target) and is_list(source)):
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


_WORD, _FLAG = types.uint64, types.boolean
KERNELS = {
    "sum_rows": Kernel((sum_rows,), lambda of: (*of.tables, _WORD, COUNTS, _WORD, _WORD, POSITIONS, of.vout)),
    "cut_rows": Kernel((cut_rows,), lambda of: (of.tables[0], _WORD, COUNTS, _WORD, _WORD, _WORD, BOUNDS)),
    "estimate_union": Kernel((estimate_union,), lambda of: (of.tables[0], _WORD, _WORD, COUNTS, _WORD)),
    "sum_cut_rows": Kernel(
        (sum_cut_rows,), lambda of: (*of.tables, _WORD, COUNTS, BOUNDS, _FLAG, _FLAG, _WORD, _WORD, *of.tables, *of.tables)
    ),
    "write_past": Kernel((write_past,), lambda of: (BYTES, _WORD, BYTES_IN)),
}
