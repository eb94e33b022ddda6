"""gTop-k: the k largest of the sum of the ranks' top k, selected on every level of a tree (gTop-k algorithm 3)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import Recv, Send, Step
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.reducers.base import Array, Reduced, Reducing, no_indices
from sparseallreduce.reducers.local import LocalSelection
from sparseallreduce.streams import kernels
from sparseallreduce.streams.selection import ExactTopK, Selector
from sparseallreduce.streams.stream import SparseStream

__all__ = ["GTopk"]

FORMS = ("tree", "allgather")
# The k largest sums, and what this rank has dropped on its way to them.
Searching: TypeAlias = "Generator[Step, Any, tuple[SparseStream, list[SparseStream]]]"


class Split(NamedTuple):
    """The entries of a stream, in two."""

    kept: SparseStream  # the k largest magnitudes
    rest: SparseStream


class GTopk(LocalSelection):
    """The k largest of the sum of the ranks' top k, nearly.

    The algorithm has three steps:

    1. Each rank selects its own top k.
    2. Reduction tree: in round t, of two ranks at distance 2**t the upper one sends what it has to the lower one, which adds it up
       and keeps the k largest sums (the paper's operation ⊤). The last rank of an odd number rests.
    3. Broadcast tree: rank 0's k sums go the same ways back.

    Latency 2 log2(P) alpha; no rank sends or receives more than 4 k log2(P) words in all. A sum that a rank drops on its way is
    missing in the result if its index comes in by other ranks all the same. The paper loses it; here the rank that dropped it has it
    in ``returned``. The ranks that it came from count it as contributed: between them nothing is lost, and nothing is there twice.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    form : str
        "tree", or "allgather" for the naive form of algorithm 2: each rank gathers all top k, and takes the k largest of their sum.
        It takes 2 k (P - 1) words and drops nothing on a way.
    selector : callable, optional
        Of each rank's values, made from k; the exact top k by default. Of one that chooses more than k, the k largest are taken.

    Raises
    ------
    AlgorithmError
        If there is no such form.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0], [0, 2, -4, 1]])
    >>> out = sar.simulate(list(accumulators), algorithm=[sar.GTopk(4, k=1) for _ in range(2)])
    >>> out.outputs[0].update.to_dense(), out.outputs[0].contributed, out.outputs[1].contributed
    (array([ 0.,  0., -4.,  0.], dtype=float32), array([], dtype=uint32), array([2], dtype=uint32))
    """

    name = "gtopk"

    def __init__(self, size: int, k: int, *, form: str = "tree", selector: Callable[[int], Selector] = ExactTopK) -> None:
        super().__init__(size, k, selector=selector)
        if form not in FORMS:
            raise AlgorithmError(f"form is one of {', '.join(FORMS)}, not {form!r}")
        self.form = form

    def options(self) -> dict[str, Any]:
        return super().options() | {"form": self.form}

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        mine = self.reduction.freeze(self._largest(self.select(accumulator, gradient)).kept)
        search = self._tree if self.form == "tree" else self._allgather
        update, dropped = yield from search(mine, rank, ranks)
        self.returned = self._still_in(dropped, update)
        return Reduced(self.reduction.leave(update), _shared(mine, update))

    def _tree(self, mine: SparseStream, rank: int, ranks: int) -> Searching:
        dropped = []
        distances = _distances(rank, ranks)
        for distance in distances:
            if rank + distance < ranks:
                mine, rest = self._largest(self.reduction.pair(mine, (yield Recv(rank + distance))))
                dropped.append(rest)
        if rank:
            parent = rank - (rank & -rank)
            yield Send(parent, mine)
            mine = yield Recv(parent)
        for distance in reversed(distances):
            if rank + distance < ranks:
                yield Send(rank + distance, mine)
        return mine, dropped

    def _allgather(self, mine: SparseStream, rank: int, ranks: int) -> Searching:
        streams = yield from gather_parts(mine, rank, ranks)
        return self._largest(self.reduction.many(streams)).kept, []

    def _largest(self, stream: SparseStream) -> Split:
        """The k entries of largest magnitude, of equals those of lower index, apart from the rest."""
        if stream.stored <= self.k:
            return Split(stream, self._of(no_indices(self.size), np.empty(0, stream.dtype)))
        indices, values = stream._entries()
        chosen = np.zeros(len(values), np.bool_)
        chosen[ExactTopK(min(self.k, len(values)))(values).indices] = True
        return Split(self._of(indices[chosen], values[chosen]), self._of(indices[~chosen], values[~chosen]))

    def _still_in(self, dropped: list[SparseStream], update: SparseStream) -> SparseStream:
        """The sum of the entries of ``dropped`` whose indices are in the result."""
        wanted = update.indices
        total = self._of(no_indices(self.size), np.empty(0, update.dtype))
        for rest in dropped:
            indices, values = rest._entries()
            at, _ = kernels.shared(indices, wanted)
            total = total + self._of(indices[at], values[at])
        return total

    def _of(self, indices: Array, values: Array) -> SparseStream:
        return self.reduction.enter(SparseStream._sparse_form(indices, values, self.size))


def _distances(rank: int, ranks: int) -> list[int]:
    """How far above a rank those are which send to it, in the order of the rounds; some may be beyond the last rank.

    >>> _distances(4, 7), _distances(0, 7), _distances(3, 7)
    ([1, 2], [1, 2, 4], [])
    """
    reach = rank & -rank if rank else ranks
    return [1 << level for level in range((reach - 1).bit_length())]


def _shared(mine: SparseStream, update: SparseStream) -> Array:
    """The indices of ``mine`` that are in the result."""
    indices = mine.indices
    shared: Array = indices[kernels.shared(indices, update.indices)[0]]
    return shared
