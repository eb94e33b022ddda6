"""Cut a stream into index ranges, and join streams of adjacent ranges (thesis figure 3.10 and section 4.1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["boundaries", "concatenate", "parts_of", "slice_range", "split"]


def boundaries(size: int, parts: int, lo: int = 0) -> list[int]:
    """Return the ``parts + 1`` bounds that cut ``size`` positions from ``lo`` on into ranges whose lengths differ by at most one.

    Examples
    --------
    >>> boundaries(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [lo + size * part // parts for part in range(parts + 1)]


def parts_of(stream: SparseStream, parts: int) -> list[int]:
    """Return the bounds that cut the range of a stream into equal parts, as :func:`boundaries`."""
    return boundaries(stream.extent, parts, stream.lo)


def slice_range(stream: SparseStream, lo: int, hi: int) -> SparseStream:
    """Return the part of ``stream`` on ``[lo, hi)`` as views. It is owned if the stream is."""
    if stream.is_dense:
        present = stream._present
        first, last = lo - stream.lo, hi - stream.lo
        part = None if present is None else present[first:last]
        return SparseStream._dense_form(stream._stored[first:last], stream.size, lo, hi, part, stream.switch_density, stream._owned)
    indices, values = stream._entries()
    first, last = kernels.cuts(indices, [lo, hi], stream.lo, stream.hi)
    return SparseStream._sparse_form(indices[first:last], values[first:last], stream.size, lo, hi, stream.switch_density)


def split(stream: SparseStream, bounds: Sequence[int]) -> list[SparseStream]:
    """Return the parts of ``stream`` on ``[bounds[0], bounds[1])``, ``[bounds[1], bounds[2])`` and so on, as views.

    Examples
    --------
    >>> [part.values for part in split(SparseStream([1, 2, 7], [1.0, 2.0, 7.0], 9), [0, 2, 4, 9])]
    [array([1.]), array([2.]), array([7.])]
    """
    ranges = list(pairwise(bounds))
    if stream.is_dense:
        return [slice_range(stream, lo, hi) for lo, hi in ranges]
    indices, values = stream._entries()
    cuts = kernels.cuts(indices, bounds, stream.lo, stream.hi)
    return [
        SparseStream._sparse_form(indices[first:last], values[first:last], stream.size, lo, hi, stream.switch_density)
        for (lo, hi), (first, last) in zip(ranges, pairwise(cuts), strict=True)
    ]


def concatenate(streams: Sequence[SparseStream], reduction: Reduction) -> SparseStream:
    """Return the stream that covers the adjacent ranges of ``streams``, given in increasing order (thesis cases 2.a to 2.d).

    The result is sparse if all parts are sparse (phi is linear). With a dense part it is dense, unless the other parts have so few entries
    that the total stays below the switch point.
    """
    first, last = streams[0], streams[-1]
    if len(streams) == 1:
        return first
    shape, dtype, xp = first._stored.shape[1:], first.dtype, array_module(first._stored)
    nothing = xp.empty(0, index_dtype(first.size)), xp.empty((0, *shape), dtype)
    whole = SparseStream._sparse_form(*nothing, first.size, first.lo, last.hi)
    if sum(stream.stored for stream in streams) <= reduction.limit(whole):
        entries = [stream._entries() for stream in streams]
        count = sum(len(part[0]) for part in entries)
        indices = xp.concatenate([part[0] for part in entries], out=memory.empty(count, index_dtype(first.size), xp))
        values = xp.concatenate([part[1] for part in entries], out=memory.empty((count, *shape), dtype, xp))
        return SparseStream._sparse_form(indices, values, first.size, first.lo, last.hi, reduction.switch_density)
    if all(stream.is_dense for stream in streams):
        return _joined(streams, reduction)
    joined = reduction.densify(whole)
    array, present = joined._stored, joined._present
    for stream in streams:
        if stream.is_dense:
            place = slice(stream.lo - first.lo, stream.hi - first.lo)
            array[place] = stream._stored
            reduction.dense_work += stream._stored.size
            if present is not None:
                present[place] = stream._present
        else:
            indices, values = stream._entries()
            kernels.scatter_set(indices, values, first.lo, array)
            reduction.scattered(len(indices), array)
            if present is not None:
                present[kernels.places(indices, first.lo, len(present))] = True
    return joined


def _joined(streams: Sequence[SparseStream], reduction: Reduction) -> SparseStream:
    """Concatenate dense streams, whose array need not be initialised first."""
    first, hi = streams[0], streams[-1].hi
    xp = array_module(first._stored)
    array = memory.empty((hi - first.lo, *first._stored.shape[1:]), first.dtype, xp)
    xp.concatenate([stream._stored for stream in streams], out=array)
    reduction.dense_work += array.size
    present = None if first._present is None else xp.concatenate([stream._present for stream in streams])
    return SparseStream._dense_form(array, first.size, first.lo, hi, present, reduction.switch_density, owned=True)
