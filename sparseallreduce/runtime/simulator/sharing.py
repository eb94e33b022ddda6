"""Share bitwise identical streams as one object, so that P large results fit into memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Outputs", "same_bits", "shared_reductions"]

# The two operands, kept so that their ids are not reused, the result, and its sparse and dense work.
_Results: TypeAlias = "OrderedDict[tuple[int, int], tuple[SparseStream, SparseStream, SparseStream, int, int]]"


def shared_reductions(settings: Sequence[tuple[Operator, float | None]]) -> list[Reduction]:
    """Return a reduction for each rank, with its operator and switch density; the reductions share their latest results."""
    results: _Results = OrderedDict()
    return [_SharedReduction(op, switch_density, results, len(settings)) for op, switch_density in settings]


class _SharedReduction(Reduction):
    """A reduction whose latest results are shared by the ranks of a simulation.

    In recursive doubling or after an allgather many ranks reduce the same two streams. Only the first of them computes the result here, and
    the others get the same object.
    """

    def __init__(self, op: Operator, switch_density: float | None, results: _Results, capacity: int) -> None:
        super().__init__(op, switch_density)
        self._results = results
        self._capacity = capacity

    def pair(self, first: SparseStream, second: SparseStream) -> SparseStream:
        if first.extent != first.size or _is_own(first) or _is_own(second):
            return super().pair(first, second)
        key = id(first), id(second)
        if key in self._results:
            self._results.move_to_end(key)
            _, _, result, work, dense_work = self._results[key]
            self.work += work
            self.dense_work += dense_work
            return result
        work, dense_work = self.work, self.dense_work
        result = self.freeze(super().pair(first, second))
        self._results[key] = first, second, result, self.work - work, self.dense_work - dense_work
        if len(self._results) > self._capacity:
            self._results.popitem(last=False)
        return result


def _is_own(stream: SparseStream) -> bool:
    """Return True if the stream may be modified in place by the rank that holds it, since no other rank does."""
    return stream.is_dense and stream._owned


class Outputs:
    """The outputs of the ranks, where bitwise identical ones are replaced by the first rank's object."""

    def __init__(self) -> None:
        self._first: SparseStream | None = None

    def once(self, output: Any) -> Any:
        """Return ``output``, or the first rank's output if they are identical."""
        if not isinstance(output, SparseStream):
            return output
        if self._first is None:
            self._first = output
        return self._first if same_bits(self._first, output) else output


def same_bits(first: SparseStream, second: SparseStream) -> bool:
    """Return True if two streams have the same form and are bitwise identical."""
    if first is second:
        return True
    if first.on_device != second.on_device:
        return False
    if (first.is_dense, first.dtype, first.size, first.lo, first.hi) != (second.is_dense, second.dtype, second.size, second.lo, second.hi):
        return False
    parts = zip(_arrays(first), _arrays(second))
    return all(a is b or (a is not None and b is not None and _equal_bytes(a, b)) for a, b in parts)


def _arrays(stream: SparseStream) -> tuple[NDArray[Any] | None, ...]:
    return stream._indices, stream._stored, stream._present


def _equal_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and np.array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8))
