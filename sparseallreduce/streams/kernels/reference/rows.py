"""Sums of streams stored one in a row of bytes, in plain NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.contract import ABSENT, MALFORMED, Indices, Positions, Values
from sparseallreduce.streams.kernels.reference.arrays import combine
from sparseallreduce.streams.kernels.reference.dense import scatter
from sparseallreduce.streams.kernels.reference.merging import merge
from sparseallreduce.streams.operator import SUM

__all__ = ["cut_rows", "estimate_union", "sum_cut_rows", "sum_rows", "write_past"]


def sum_rows(
    rows: Indices, values: Values, start: int, counts: NDArray[np.int64], lo: int, hi: int, _cursors: Positions, dense: Values
) -> int:
    """Sum a range of packed streams, one in each row."""
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
    """Find a part of the index space in each row."""
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
    """Estimate the number of different indices, from how many rows contain sampled entries."""
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
    """Return the indices of packed streams, which follow ``nbytes`` bytes in each row; None if the rows are too short."""
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
