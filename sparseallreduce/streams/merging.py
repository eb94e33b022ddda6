"""Reduce a stream with one that arrives in pieces: what has arrived is added while the rest is in transit."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Arriving", "Merging"]

_LEAST = 4096  # new entries needed before another step is worthwhile


class Arriving(Protocol):
    """The interface of a stream that is being received."""

    arrived: int  # number of leading entries received so far
    stored: int  # total number of entries

    @property
    def masked(self) -> bool:
        """True if it is dense with a mask of the present positions, which :meth:`prefix` omits."""

    def prefix(self) -> tuple[NDArray[Any] | None, NDArray[Any]]:
        """Return the indices received so far, None for a dense stream, and the values."""


class Merging:
    """The reduction of ``mine`` with a stream on the same range that arrives from another rank.

    The result is bitwise identical to that of :meth:`~sparseallreduce.streams.reduction.Reduction.pair`, however it arrives.

    Parameters
    ----------
    reduction : Reduction
    mine : SparseStream
    first : bool
        Whether ``mine`` is the first operand.
    """

    def __init__(self, reduction: Reduction, mine: SparseStream, first: bool) -> None:
        self._reduction, self._mine, self._first = reduction, mine, first
        self._sum: _SparseSum | _DenseSum | None = None
        self._begun = False

    def advance(self, theirs: Arriving) -> None:
        """Reduce what has arrived of a stream, if that is enough to be worthwhile."""
        if not self._begun and theirs.arrived < theirs.stored:
            self._begun, self._sum = True, self._begin(theirs)
        if self._sum is not None and theirs.arrived - self._sum.done >= _LEAST:
            self._sum.advance(*theirs.prefix())

    def finish(self, theirs: SparseStream) -> SparseStream:
        """Return the reduction, once everything has arrived."""
        if self._sum is None:
            return self._reduction.pair(self._mine, theirs) if self._first else self._reduction.pair(theirs, self._mine)
        return self._sum.finish(theirs)

    def _begin(self, theirs: Arriving) -> _SparseSum | _DenseSum | None:
        """Return the incremental sum, or None if the reduction needs both streams as a whole."""
        mine, reduction = self._mine, self._reduction
        indices, _ = theirs.prefix()
        if mine.on_device:  # messages are received on the host, and copied to the device as a whole
            return None
        if indices is None or not theirs.stored or not mine.stored:
            return None
        if not mine.is_dense and mine.stored + theirs.stored <= reduction.limit(mine):
            return _SparseSum(reduction, mine, self._first, theirs.stored)
        if reduction.op.is_sum and (mine.is_dense or self._first):
            return _DenseSum(reduction, reduction.densify(mine))
        return None


class _SparseSum:
    """The incremental sum of two sparse streams, by merging."""

    def __init__(self, reduction: Reduction, mine: SparseStream, first: bool, stored: int) -> None:
        self._op, self._mine, self._first, self._density = reduction.op, mine, first, reduction.switch_density
        indices, values = mine._entries()
        room = len(indices) + stored
        self._indices = memory.empty(room, indices.dtype)
        self._values = memory.empty((room, *values.shape[1:]), values.dtype)
        self._count = 0  # entries of the sum
        self._taken = 0  # of ours
        self.done = 0  # of theirs

    def advance(self, indices: NDArray[Any] | None, values: NDArray[Any]) -> None:
        assert indices is not None
        ours = self._mine._entries()[0]
        # Compared in their own dtype: any other would be converted, all of it.
        end = int(np.searchsorted(ours, indices[-1:], side="right")[0])
        self._merge(end, indices, values)

    def finish(self, theirs: SparseStream) -> SparseStream:
        self._merge(self._mine.stored, *theirs._entries())
        indices, values, mine = self._indices[: self._count], self._values[: self._count], self._mine
        return SparseStream._sparse_form(indices, values, mine.size, mine.lo, mine.hi, self._density)

    def _merge(self, end: int, indices: NDArray[Any], values: NDArray[Any]) -> None:
        """Merge this rank's entries up to ``end`` with the received entries."""
        our_indices, our_values = self._mine._entries()
        ours = our_indices[self._taken : end], our_values[self._taken : end]
        theirs = indices[self.done :], values[self.done :]
        out = self._indices[self._count :], self._values[self._count :]
        if not len(ours[0]) or not len(theirs[0]):
            only = theirs if len(theirs[0]) else ours
            count = len(only[0])
            out[0][:count], out[1][:count] = only
        else:
            pair = (*ours, *theirs) if self._first else (*theirs, *ours)
            count = kernels.merge(*pair, self._op, *out)
        self._count += count
        self._taken, self.done = end, len(indices)


class _DenseSum:
    """The incremental sum of a dense stream, which is the first operand or the only dense one, and a sparse one."""

    def __init__(self, reduction: Reduction, target: SparseStream) -> None:
        self._op, self._target = reduction.op, target
        self.done = 0

    def advance(self, indices: NDArray[Any] | None, values: NDArray[Any]) -> None:
        assert indices is not None
        kernels.scatter(indices[self.done :], values[self.done :], self._target.lo, self._op, self._target._stored)
        self.done = len(indices)

    def finish(self, theirs: SparseStream) -> SparseStream:
        self.advance(*theirs._entries())
        return self._target
