"""gTop-k: the k largest of the sum of the ranks' top k, selected on every level of a tree (gTop-k algorithm 3)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import Recv, Send, Step
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.reducers.arrays import nothing
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.reducers.local import LocalSelection
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module, device_kernels
from sparseallreduce.streams.reduction import Uncounted
from sparseallreduce.streams.selection import ExactTopK, Selector, top_of_stream
from sparseallreduce.streams.selection.exact import places_of_top
from sparseallreduce.streams.stream import SparseStream

__all__ = ["GTopk"]

FORMS = ("tree", "allgather")


class Level(NamedTuple):
    """Where two ranks of the tree meet: their sum, and what of it goes on."""

    total: SparseStream | Uncounted
    kept: SparseStream


Searching: TypeAlias = "Generator[Step, Any, tuple[SparseStream, list[Level]]]"  # the k largest sums, and how this rank came to them


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
    hosts : bool
        Whether hosts are to be as ranks, as for :class:`~sparseallreduce.Reducer`.

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

    def __init__(
        self, size: int, k: int, *, form: str = "tree", selector: Callable[[int], Selector] = ExactTopK, hosts: bool = False
    ) -> None:
        super().__init__(size, k, selector=selector, hosts=hosts)
        if form not in FORMS:
            raise AlgorithmError(f"form is one of {', '.join(FORMS)}, not {form!r}")
        self.form = form

    def options(self) -> dict[str, Any]:
        return super().options() | {"form": self.form}

    def _flat(self, size: int, k: int) -> Reducer:
        return GTopk(size, k, form=self.form, selector=self._make_selector)

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        mine = self._largest(self.select(accumulator, gradient))
        search = self._tree if self.form == "tree" else self._allgather
        update, levels = yield from search(mine, rank, ranks)
        if update.on_device:
            self.returned, contributed = self._settled_there(levels, update, mine.indices)
        else:
            self.returned, contributed = self._dropped(levels, update), _shared(mine.indices, update.indices)
        return Reduced(self.reduction.leave(update), contributed)

    def _tree(self, mine: SparseStream, rank: int, ranks: int) -> Searching:
        levels = []
        distances = _distances(rank, ranks)
        for distance in distances:
            if rank + distance < ranks:
                total, mine = self._met(mine, (yield Recv(rank + distance)))
                levels.append(Level(total, mine))
        if rank:
            parent = rank - (rank & -rank)
            yield Send(parent, mine)
            mine = yield Recv(parent)
        for distance in reversed(distances):
            if rank + distance < ranks:
                yield Send(rank + distance, mine)
        return mine, levels

    def _allgather(self, mine: SparseStream, rank: int, ranks: int) -> Searching:
        streams = yield from gather_parts(mine, rank, ranks)
        return self._largest(self.reduction.same_nans(self.reduction.many(streams))), []

    def _met(self, ours: SparseStream, theirs: SparseStream) -> Level:
        """The sum of two streams, and the k largest of it, of which on a GPU the host waits for no length: with k of either there are k."""
        total = self.reduction.uncounted(ours, theirs)
        if isinstance(total, Uncounted) and max(ours.stored, theirs.stored) >= self.k:
            self.reduction.work += total.known
            indices, values, _ = total.entries  # zeros behind those that count
            places, like = places_of_top(values, self.k, np.dtype(np.uint64)), total.like
            kept = SparseStream._sparse_form(indices[places], values[places], like.size, like.lo, like.hi, like.switch_density)
            return Level(total, self.reduction.freeze(self.reduction.enter(kept)))
        total = self.reduction.counted(total)
        return Level(total, self._largest(total))

    def _largest(self, stream: SparseStream) -> SparseStream:
        return self.reduction.freeze(self.reduction.enter(top_of_stream(stream, self.k)))

    def _dropped(self, levels: list[Level], update: SparseStream) -> SparseStream:
        """The sum of what did not go on from a level, though its index is in the result."""
        dropped = nothing(self.size, update._stored)
        wanted = update.indices
        for total, kept in levels:
            if kept is update:
                continue
            came_along = kernels.shared(wanted, kept.indices)[0]
            if len(came_along) < len(wanted):
                indices, values = self.reduction.counted(total)._entries()
                missing = np.ones(len(wanted), np.bool_)
                missing[came_along] = False
                places = kernels.shared(indices, wanted[missing])[0]
                dropped = dropped + SparseStream._sparse_form(indices[places], values[places], self.size)
        return dropped


    def _settled_there(self, levels: list[Level], update: SparseStream, ours: Array) -> tuple[SparseStream, Array]:
        """On a GPU, what :meth:`_dropped` returns, and which of our indices are in the result; how many they are travels in one copy."""
        wanted = update.indices
        there, xp = device_kernels(wanted, ours), array_module(wanted)
        sets, marks = [(ours, ours)], [there.contained(ours, wanted)]
        for total, kept in levels:
            if kept is update:
                continue
            indices, values, *length = total.entries if isinstance(total, Uncounted) else total._entries()
            mark = there.contained(indices, wanted) & ~there.contained(indices, kept.indices)
            if length and isinstance(total, Uncounted) and not total.counted:
                mark &= xp.arange(len(indices)) < length[0]
            sets.append((indices, values))
            marks.append(mark)
        counts = xp.stack([xp.count_nonzero(mark) for mark in marks]).tolist()
        dropped = nothing(self.size, update._stored)
        for (indices, values), mark, count in zip(sets[1:], marks[1:], counts[1:], strict=True):
            if count:
                places = there.marked(mark, count)
                dropped = dropped + SparseStream._sparse_form(indices[places], values[places], self.size)
        return dropped, ours[there.marked(marks[0], counts[0])]


def _distances(rank: int, ranks: int) -> list[int]:
    """How far above a rank those are which send to it, in the order of the rounds; some may be beyond the last rank.

    >>> _distances(4, 7), _distances(0, 7), _distances(3, 7)
    ([1, 2], [1, 2, 4], [])
    """
    reach = rank & -rank if rank else ranks
    return [1 << level for level in range((reach - 1).bit_length())]


def _shared(ours: Array, theirs: Array) -> Array:
    """The indices that two sets share."""
    shared: Array = ours[kernels.shared(ours, theirs)[0]]
    return shared
