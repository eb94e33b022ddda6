"""Ok-Topk: the top k of the sum of the ranks' top k, in less than 6 k words per rank (Ok-Topk algorithm 1)."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import AlgorithmError, CheckpointError
from sparseallreduce.reducers.arrays import no_indices, nothing
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.reducers.cost import case_of, evaluation_seconds, predicted
from sparseallreduce.reducers.oktopk.gather import balance_and_gather
from sparseallreduce.reducers.oktopk.regions import averaged, equal, rebalanced
from sparseallreduce.reducers.oktopk.split import split_and_reduce
from sparseallreduce.reducers.oktopk.thresholds import select_global
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module, on_device
from sparseallreduce.streams.selection import Reuse, choose_reusing, choose_with_copy
from sparseallreduce.streams.selection.period import AUTO, Drift, checked_period
from sparseallreduce.streams.stream import SparseStream

__all__ = ["OkTopk"]


_OPTIONS = ("threshold_period", "boundary_period", "balance_boundaries", "max_imbalance", "bucket")


class History(NamedTuple):
    """The state that one operation passes to the next."""

    ranks: int = 0
    operations: int = 0  # operations with this number of ranks
    local_threshold: float = 0.0
    local_slack: float = Reuse().slack
    global_threshold: float | None = None
    bounds: tuple[int, ...] = ()  # bounds of the regions
    drift: tuple[float, ...] = Drift()  # drift of the global threshold, for period "auto"


class OkTopk(Reducer):
    """The top k of the sum of the ranks' top k.

    The algorithm has two phases:

    1. Split and reduce: each rank selects its local top k. The index space is cut into a region for each rank, with about the same number
       of these values in each, and every rank receives and adds the values in its region.
    2. Balance and allgatherv: each rank selects those of its sums that are among the global top k. If they are distributed too unevenly,
       some are moved to other ranks. An allgatherv gathers all on every rank.

    The thresholds of both selections and the bounds of the regions are evaluated periodically, and reused in between. No rank sends or
    receives more than 6 k (P - 1)/P words, including counts, as measured for 4, 16, 64 and 256 ranks with k of at least 4 P and 64,
    whatever the distribution of values (``bench/lossy_volumes.py``). For smaller k the counts dominate. It takes P - 1 messages for the
    split, ceil(log2 P) for the allgatherv, up to P - 1 if values are moved, and about 3 log2 P for counts (5 log2 P if k is small compared
    with P); an evaluation of thresholds or regions takes 2 log2 P for each of several sums of counts.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    threshold_period : int or "auto"
        Operations from one evaluation of the thresholds to the next, tau' in the paper. An operation that evaluates returns the exact
        result, except for the choice among equal magnitudes. In between, the threshold of the sums is corrected if k is at least 64: of
        magnitudes 3 to 6 % apart the smaller one may be selected, and there may be fewer than k values. If their number is more than 20 %
        off k nevertheless, the threshold is evaluated early. "auto" chooses the period, from 4 to 512 operations, by the predicted cost of
        an evaluation and by how far the number of global values was off k as the threshold aged: see
        :mod:`~sparseallreduce.streams.selection.period`. It is the same on all ranks, and part of the state.
    boundary_period : int
        Operations from one evaluation of the regions to the next, tau in the paper. They are balanced early if one holds far too many
        values.
    balance_boundaries : bool
        Whether to balance the regions; otherwise they have equal lengths.
    max_imbalance : float or None
        Values are moved if the largest number of global top-k values on a rank exceeds this multiple of the mean, or if a rank would send
        more than its bound in the allgatherv. None never moves values.
    bucket : int
        Destinations in a bucket of the split, whose messages are in transit while those of the previous bucket are added.
    hosts : bool
        Whether to reduce between hosts, as for :class:`~sparseallreduce.Reducer`.

    Raises
    ------
    AlgorithmError
        If an option is invalid.

    Notes
    -----
    Values that a rank has sent but that are not in the result count as not contributed: error feedback keeps them (algorithm 2).

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0], [2, 2, -4, 1]])
    >>> out = sar.simulate(list(accumulators), algorithm=[sar.OkTopk(4, k=1) for _ in range(2)])
    >>> out.outputs[0].update.to_dense(), out.outputs[0].contributed, out.outputs[1].contributed
    (array([ 0.,  0., -4.,  0.], dtype=float32), array([], dtype=uint32), array([2], dtype=uint32))
    """

    name = "oktopk"
    _changing = (*Reducer._changing, "_history")

    def __init__(
        self,
        size: int,
        k: int,
        *,
        threshold_period: int | str = 32,
        boundary_period: int = 64,
        balance_boundaries: bool = True,
        max_imbalance: float | None = 4.0,
        bucket: int = 4,
        hosts: bool = False,
    ) -> None:
        super().__init__(size, k, hosts=hosts)
        if max_imbalance is not None and not max_imbalance >= 1:
            raise AlgorithmError(f"max_imbalance is a multiple of the mean, at least 1, or None, not {max_imbalance}")
        self.threshold_period: int | str = checked_period("threshold_period", threshold_period)
        self.boundary_period: int = _at_least_one("boundary_period", boundary_period)
        self.balance_boundaries: bool = bool(balance_boundaries)
        self.max_imbalance = max_imbalance
        self.bucket: int = _at_least_one("bucket", bucket)
        self._history = History()

    def _flat(self, size: int, k: int) -> Reducer:
        return OkTopk(size, k, **{name: getattr(self, name) for name in _OPTIONS})

    def options(self) -> dict[str, Any]:
        # Reducers that were used with other ranks in the meantime would have different regions and thresholds.
        history = self._history
        known = (history.ranks, history.operations, history.bounds, history.drift[:2], float(history.global_threshold or 0))
        named = "regions and threshold of the operation before this one (a checksum)"
        return {name: getattr(self, name) for name in _OPTIONS} | {named: f"{zlib.crc32(repr(known).encode()):08x}"}

    def reset(self) -> None:
        super().reset()
        self._history = History()

    def state(self) -> dict[str, Any]:
        return super().state() | self._history._asdict()

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        bounds = tuple(int(bound) for bound in state["bounds"])
        if bounds and (list(bounds) != sorted(bounds) or bounds[0] != 0 or bounds[-1] != self.size):
            raise CheckpointError(f"this state has regions that do not follow each other from 0 to {self.size}")
        drift = Drift.of(state.get("drift", Drift()))  # not saved by earlier versions
        kept = {name: state[name] for name in History._fields if name not in ("bounds", "drift")}
        self._history = History(**kept, bounds=bounds, drift=drift)

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        if self.size == 0:
            return Reduced(nothing(0, accumulator), no_indices(0, array_module(accumulator)))
        history = self._history if self._history.ranks == ranks else History(ranks)
        drift = Drift.of(history.drift)
        finds = self.threshold_period == AUTO
        reused = not drift.is_due if finds else history.operations % int(self.threshold_period) != 0
        reuse = Reuse(history.local_threshold if reused else 0.0, history.local_slack)
        if ranks > 1 and on_device(accumulator):  # most of it is sent through the host, where regions are also counted
            (indices, values), copy, local = choose_with_copy(accumulator, gradient, self.k, reuse)
        else:
            indices, values, local = choose_reusing(accumulator, gradient, self.k, reuse)
            copy = indices, values
        bounds = yield from self._regions(copy[0], history, rank, ranks)
        ours, sent = (_stream(*entries, self.size) for entries in ((indices, values), copy))
        region = yield from split_and_reduce(ours, bounds, rank, ranks, self.reduction, self.bucket, sent)
        threshold = history.global_threshold if reused else None
        chosen, sizes, global_threshold, passed, evaluated = yield from select_global(region, self.k, threshold, rank, ranks)
        update = yield from balance_and_gather(chosen, sizes, self.k, rank, ranks, self.max_imbalance)
        contributed = indices[kernels.shared(indices, update._entries()[0])[0]]
        result = Reduced(self.reduction.leave(self.reduction.enter(update)), contributed)
        if finds:
            drift = drift if passed is None else drift.seen(abs(passed - self.k) / self.k)
            drift = drift.evaluated((yield from self._evaluation_cost(accumulator, ranks))) if evaluated else drift
        self._history = History(ranks, history.operations + 1, *local, global_threshold, tuple(bounds), drift)
        return result

    def _evaluation_cost(self, accumulator: Array, ranks: int) -> Generator[Step, Any, float]:
        """Return the predicted cost of evaluating thresholds, relative to that of a step."""
        case = yield from case_of(self.size, self.k, accumulator.itemsize, ranks, on_device(accumulator))
        step = predicted(case, (self.name,))[self.name].seconds
        return evaluation_seconds(case) / step if step > 0 else 1.0

    def _regions(self, indices: Array, history: History, rank: int, ranks: int) -> Generator[Step, Any, list[int]]:
        """Return the bounds of the regions."""
        if ranks == 1 or not self.balance_boundaries:
            return equal(self.size, ranks)
        due = history.operations % self.boundary_period == 0
        bounds = (yield from averaged(indices, self.size, self.k, rank, ranks)) if due else list(history.bounds)
        return (yield from rebalanced(indices, bounds, not due, self.k, rank, ranks))


def _stream(indices: Array, values: Array, size: int) -> SparseStream:
    """Return a sparse stream whatever its density; its regions take their own forms when it is cut."""
    return SparseStream._sparse_form(indices, values, size)


def _at_least_one(option: str, value: int) -> int:
    if operator.index(value) < 1:
        raise AlgorithmError(f"{option} is at least 1, not {value}")
    return operator.index(value)
