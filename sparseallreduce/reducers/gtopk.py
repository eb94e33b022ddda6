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
    """A node of the tree: the sum of two ranks' streams, and the part of it that is kept."""

    total: SparseStream | Uncounted
    kept: SparseStream


Searching: TypeAlias = "Generator[Step, Any, tuple[SparseStream, list[Level]]]"  # the k largest sums, and this rank's nodes of the tree


class GTopk(LocalSelection):
    """The approximate top k of the sum of the ranks' top k, by a tree.

    The algorithm has three steps:

    1. Each rank selects its own top k.
    2. Reduction tree: in round t, of two ranks at distance 2**t the upper one sends its stream to the lower one, which adds it and keeps
       the k largest sums (the paper's operation ⊤). With an odd number, the last rank skips the round.
    3. Broadcast tree: rank 0's k sums are sent back the same way.

    Latency 2 log2(P) alpha; no rank sends or receives more than 4 k log2(P) words in total. A partial sum that a rank drops is missing in
    the result if other ranks contribute the same index. The paper loses it; here the rank that dropped it has it in ``returned``. The ranks
    that contributed to it count it as contributed, so that nothing is lost or counted twice.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    form : str
        "tree", or "allgather" for the simple form of algorithm 2: each rank gathers all top k, and selects the k largest of their sum. It
        takes 2 k (P - 1) words and drops no partial sums.
    selector : callable, optional
        Returns the selector of each rank's values, given k; the exact top k by default. If it selects more than k, the k largest are used.
    hosts : bool
        Whether to reduce between hosts, as for :class:`~sparseallreduce.Reducer`.

    Raises
    ------
    AlgorithmError
        If the form is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0], [0, 2, -4, 1]])
    >>> out = sar.simulate(list(accumulators), algorithm=[sar.GTopk(4, k=1) for _ in range(2)])
    >>> out.outputs[0].update.to_dense(), out.outputs[0].contributed, out.outputs[1].contributed
    (array([ 0.,  0., -4.,  0.], dtype=float32), array([], dtype=uint32), array([2], dtype=uint32))
    """

    returned: SparseStream

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
        """Return the sum of two streams, and its k largest values.

        On a GPU the host does not wait for its length: if either stream has k entries, there are at least k.
        """
        total = self.reduction.uncounted(ours, theirs)
        if isinstance(total, Uncounted) and max(ours.stored, theirs.stored) >= self.k:
            self.reduction.work += total.known
            indices, values, _ = total.entries  # padded with zeros
            places, like = places_of_top(values, self.k, np.dtype(np.uint64)), total.like
            kept = SparseStream._sparse_form(indices[places], values[places], like.size, like.lo, like.hi, like.switch_density)
            return Level(total, self.reduction.freeze(self.reduction.enter(kept)))
        total = self.reduction.counted(total)
        return Level(total, self._largest(total))

    def _largest(self, stream: SparseStream) -> SparseStream:
        return self.reduction.freeze(self.reduction.enter(top_of_stream(stream, self.k)))

    def _dropped(self, levels: list[Level], update: SparseStream) -> SparseStream:
        """Return the sum of dropped values whose indices are in the result."""
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
        """Return the result of :meth:`_dropped`, and this rank's indices in the result, computed on a GPU.

        Their numbers are copied to the host together.
        """
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
    """Return the distances to the higher ranks that send to a rank, in the order of the rounds; some may be beyond the last rank.

    Examples
    --------
    >>> _distances(4, 7), _distances(0, 7), _distances(3, 7)
    ([1, 2], [1, 2, 4], [])
    """
    reach = rank & -rank if rank else ranks
    return [1 << level for level in range((reach - 1).bit_length())]


def _shared(ours: Array, theirs: Array) -> Array:
    """Return the indices that two sets share."""
    shared: Array = ours[kernels.shared(ours, theirs)[0]]
    return shared
