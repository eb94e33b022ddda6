"""The kernels in plain NumPy: any operator, any value dtype; the second opinion on the compiled ones.

Names, arguments and results, bit for bit, are those of :mod:`sparseallreduce.streams.kernels`, which documents them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import ABSENT, MALFORMED, Indices, Positions, Values
from sparseallreduce.streams.operator import SUM, Operator

__all__ = [
    "combine",
    "first_violation",
    "gather_present",
    "merge",
    "places",
    "scatter",
    "scatter_set",
    "shared",
    "sum_duplicates",
    "sum_rows",
]


def merge(ia: Indices, va: Values, ib: Indices, vb: Values, op: Operator, iout: Indices, vout: Values) -> int:
    """Write the union of two sorted index sets, combining the values of shared indices; return its length."""
    if len(va) != len(ia) or len(vb) != len(ib) or min(len(iout), len(vout)) < len(ia) + len(ib):
        raise StreamError("merge needs a value for each index and room for len(ia) + len(ib) outputs")
    in_a = np.searchsorted(ia, ib)
    shared = in_a < len(ia)
    shared[shared] = ia[in_a[shared]] == ib[shared]
    only_b = ~shared
    to_a = np.arange(len(ia)) + np.searchsorted(ib[only_b], ia)
    to_b = in_a[only_b] + np.arange(np.count_nonzero(only_b))
    iout[to_a], vout[to_a] = ia, va
    iout[to_b], vout[to_b] = ib[only_b], vb[only_b]
    vout[to_a[in_a[shared]]] = combine(op, va[in_a[shared]], vb[shared])
    return len(to_a) + len(to_b)


def scatter(indices: Indices, values: Values, lo: int, op: Operator, dense: Values) -> None:
    """Combine ``values`` into ``dense[indices - lo]``."""
    _check_lengths(indices, values)
    at = places(indices, lo, len(dense))
    dense[at] = combine(op, dense[at], values)


def scatter_set(indices: Indices, values: Values, lo: int, dense: Values) -> None:
    """Assign ``values`` to ``dense[indices - lo]``."""
    _check_lengths(indices, values)
    dense[places(indices, lo, len(dense))] = values


def gather_present(dense: Values, lo: int, index_dtype: DTypeLike) -> tuple[Indices, Values]:
    """The positions of ``dense`` that are not zero, plus ``lo``, and their values."""
    present = dense != 0
    positions = np.flatnonzero(present if dense.ndim == 1 else present.any(axis=1))
    return (positions.astype(np.uint64) + np.uint64(lo)).astype(index_dtype), dense[positions]


def first_violation(indices: Indices, size: int) -> int:
    """The position of the first index that does not exceed its predecessor or is not below ``size``; ABSENT if none."""
    wrong = indices > size - 1 if size > 0 else np.ones(len(indices), dtype=bool)
    wrong[1:] |= indices[1:] <= indices[:-1]
    return int(np.argmax(wrong)) if wrong.any() else ABSENT


def sum_duplicates(indices: Indices, values: Values, op: Operator = SUM) -> tuple[Indices, Values]:
    """Combine the values of equal neighbouring indices in order of appearance."""
    if len(values) != len(indices):
        raise StreamError("sum_duplicates needs a value for each index")
    first = np.ones(len(indices), dtype=bool)
    first[1:] = indices[1:] != indices[:-1]
    starts = np.flatnonzero(first)
    repeats = np.diff(np.append(starts, len(indices)))
    combined = values[starts]
    longer, turn = np.flatnonzero(repeats > 1), 1
    while len(longer):  # not ufunc.reduceat, which sums pairwise
        combined[longer] = combine(op, combined[longer], values[starts[longer] + turn])
        turn += 1
        longer = longer[repeats[longer] > turn]
    return indices[starts], combined


def sum_rows(
    rows: Indices, values: Values, start: int, counts: NDArray[np.int64], lo: int, hi: int, _cursors: Positions, dense: Values
) -> int:
    """Sum a range of packed streams, one a row."""
    held, first = np.maximum(counts, 0), start // values.itemsize
    streams = _indices(rows, start + values.itemsize * held, held)
    if streams is None or not 0 <= lo <= hi <= len(dense) or ((counts < 0).any() and first + len(dense) > values.shape[1]):
        return MALFORMED
    if any(len(indices) and indices[-1] >= len(dense) for indices in streams):
        return MALFORMED
    part = dense[lo:hi]
    part[:] = 0
    for indices, row, count in zip(streams, values[:, first:], counts.tolist(), strict=True):
        if count < 0:
            part[:] = combine(SUM, part, row[lo:hi])
        else:
            inside = slice(*np.searchsorted(indices, np.array([lo, hi], np.uint64)).tolist())
            scatter(indices[inside], row[:count][inside], lo, SUM, part)
    return 0


def cut_rows(rows: Indices, itemsize: int, counts: NDArray[np.int64], size: int, part: int, parts: int, bounds: Positions) -> int:
    """Find where a part lies in each row."""
    streams, ranks = _indices(rows, itemsize * counts, counts), len(counts)
    if streams is None or bounds.shape[1] <= ranks:
        return MALFORMED
    total, cuts = counts.sum(), [0, size]
    for side, bound in enumerate((part, part + 1)):
        if 0 < bound < parts:
            weighted = [float(indices[len(indices) * bound // parts]) * len(indices) for indices in streams if len(indices)]
            cuts[side] = int(sum(weighted) / float(total)) if total else size
    for r, indices in enumerate(streams):
        inner = np.searchsorted(indices, np.array(cuts, np.uint64))
        bounds[:2, r] = (inner[0] if part else 0), (inner[1] if part + 1 < parts else len(indices))
    bounds[:3, ranks] = *cuts, bounds[0, :ranks].sum()
    return int((bounds[1] - bounds[0])[:ranks].sum())


def estimate_union(rows: Indices, start: int, itemsize: int, counts: NDArray[np.int64], samples: int) -> int:
    """The number of different indices, from how many rows have those of some entries."""
    streams = _indices(rows, start + itemsize * counts, counts)
    if streams is None:
        return MALFORMED
    entries, shares = np.concatenate(streams), 0.0
    if not len(entries):
        return 0
    for sample in range(samples):
        index = entries[len(entries) * (2 * sample + 1) // (2 * samples)]
        shares += 1.0 / float(np.count_nonzero(entries == index))
    return int(shares / float(samples) * float(len(entries)) + 0.5)


def sum_cut_rows(
    rows: Indices,
    values: Values,
    start: int,
    counts: NDArray[np.int64],
    bounds: Positions,
    whole: bool,
    at_end: bool,
    limit: int,
    _most: int,
    _inner_indices: Indices,
    _inner_values: Values,
    iout: Indices,
    vout: Values,
) -> int:
    """Sum the parts as a balanced tree."""
    begins, ends = (np.zeros(len(counts), np.uint64), counts.astype(np.uint64)) if whole else bounds[:2, : len(counts)]
    streams = _indices(rows, start + values.itemsize * counts, counts)
    if streams is None or (ends > counts.astype(np.uint64)).any() or (begins > ends).any() or int((ends - begins).sum()) > iout.shape[1]:
        return MALFORMED
    cuts = zip(streams, values[:, start // values.itemsize :], begins.tolist(), ends.tolist(), strict=True)
    parts = [(indices[begin:end], added[begin:end]) for indices, added, begin, end in cuts]
    while len(parts) > 1:
        merged = []
        for (ia, va), (ib, vb) in zip(parts[::2], parts[1::2], strict=False):
            pair = np.empty(len(ia) + len(ib), ia.dtype), np.empty(len(ia) + len(ib), va.dtype)
            n = merge(ia, va, ib, vb, SUM, *pair)
            merged.append((pair[0][:n], pair[1][:n]))
        parts = merged + parts[2 * len(merged) :]
    n = len(parts[0][0])
    if n > limit:
        return ABSENT
    place = slice(iout.shape[1] - n, None) if at_end else slice(n)
    iout[0, place], vout[0, place] = parts[0]
    return n


def _indices(rows: Indices, nbytes: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Indices] | None:
    """The indices of packed streams, one a row, behind so many bytes; None if the rows are too short."""
    behind = -(-nbytes // rows.itemsize)
    if (counts < 0).any() or (counts > rows.shape[1]).any() or (behind + counts > rows.shape[1]).any():
        return None
    return [row[start : start + count] for row, start, count in zip(rows, behind.tolist(), counts.tolist(), strict=True)]


def write_past(target: NDArray[np.uint8], to: int, source: NDArray[np.uint8]) -> int:
    """Copy bytes."""
    if to + len(source) > len(target):
        return MALFORMED
    target[to : to + len(source)] = source
    return 0


def shared(ia: Indices, ib: Indices) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Where the indices lie that both sets hold."""
    _, in_a, in_b = np.intersect1d(ia, ib, assume_unique=True, return_indices=True)
    return in_a.astype(np.uint64), in_b.astype(np.uint64)


def combine(op: Operator, a: Values, b: Values) -> Values:
    """``op.ufunc(a, b)`` in the dtype of ``a``, and like the compiled kernels without a warning of overflow or NaN."""
    out = np.empty_like(a)
    with np.errstate(all="ignore"):
        op.ufunc(a, b, out=out)
    return out


def places(indices: Indices, lo: int, length: int) -> NDArray[np.intp]:
    """Where indices lie in an array of ``length`` that begins at ``lo``.

    Raises
    ------
    StreamError
        If one lies outside; NumPy itself would take some of those for places counted from the end.
    """
    at = indices.astype(np.uint64) - np.uint64(lo)  # an index below lo becomes one far beyond the end
    if len(at) and int(at.max()) >= length:
        raise StreamError(f"indices {indices.min()}..{indices.max()} leave the range {lo}..{lo + length} of the dense array")
    return at.astype(np.intp)


def _check_lengths(indices: Indices, values: Values) -> None:
    if len(values) != len(indices):
        raise StreamError(f"{len(indices)} indices but {len(values)} values")
