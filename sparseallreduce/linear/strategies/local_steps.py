"""Local steps: every rank trains on its own samples independently, and the ranks sum their changes a few times per pass.

Agarwal et al., *A reliable effective terascale linear learning system* (JMLR 2014), do the same once per pass with dense sums, and combine
weights feature by feature, in proportion to the gradients that each rank has seen for them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.fixed import FIXED
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.occurring import Occurring
from sparseallreduce.linear.kernels.feature_numbers import count
from sparseallreduce.linear.strategies.sparse import SparseStrategy
from sparseallreduce.linear.weights import AdaptiveWeights, Descent, flat_indices
from sparseallreduce.linear.weights.local_changes import LocalChanges
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.hosts import same_host, this_place
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.planning import allreduce_init
from sparseallreduce.streams.stream import SparseStream

__all__ = ["LocalStepsStrategy"]

Array = NDArray[Any]

_SHARE = 0.05  # fraction of a pass that sums of all features may take, and again those of frequent ones
_MOST, _MOST_FREQUENT = 4, 8  # largest numbers of these sums per pass: more do not improve the model
# Cost of a sum, and of a feature in it through shared memory and through a network of 1 Gbit/s, in non-zeros that a rank processes in the
# same time.
_MEETING, _NEAR, _FAR = 100_000.0, 0.5, 8.0
# Number of additional sums of frequent features in the first half of the first pass, the first of them after 1/32 of the steps, because
# weights change most then. On web addresses, the accuracy after a first pass of two ranks was .9966 without them, .9978 with them, and
# .9977 on one rank.
_FIRST = 5
_FREQUENT = 16  # mean number of samples per rank from which a feature is frequent


class _Shared(NamedTuple):
    """Some of the features that several ranks have, and the plan that sums their changes."""

    changes: LocalChanges
    plan: Any


class LocalStepsStrategy(SparseStrategy):
    """Independent steps of every rank, with sums of their changes now and then.

    It needs adaptive weights. Between two sums each rank has its own weights. The weight of a feature that occurs on one rank only is not
    summed; it is sent to the other ranks at the end of a pass. Other features are summed as described in
    :class:`~sparseallreduce.linear.weights.local_changes.LocalChanges`. Frequent ones, which are few and change most, are summed more
    often. Positions are the same in all sums, so that only values are sent. On one rank the steps are bitwise those of the sparse strategy.

    The number of sums per pass depends on the samples and ranks only, not on timing, so results are bitwise reproducible. Checkpoints and
    stops wait for the next sum of all features.

    Parameters
    ----------
    dataset, comm, descent, threads
        As for :class:`~sparseallreduce.linear.strategies.sparse.SparseStrategy`, with the update "ftrl".
    algorithm : str, optional
        Algorithm of the sums: "auto", or another one that ``allreduce_init`` supports with ``fixed_indices``.
    sums : int, optional
        Number of sums of all shared features per pass, without others. By default up to four, which take about a twentieth of the time of a
        pass, and up to eight of frequent features, which take as much, with five more in the first half of the first pass.

    Attributes
    ----------
    shared_features : int
        Number of features that occur on several ranks.
    """

    name = "local"
    devices: tuple[str, ...] = ("cpu",)
    sums_batches = False
    in_unison = False
    shared_features: int = 0

    def __init__(self, dataset: Dataset, comm: Any, descent: Descent | None = None, *, sums: int | None = None, **options: Any) -> None:
        self.sums = sums
        self._next, self._made = 0, 0  # number of the next step in the pass; number of sums in the pass so far
        self._ends: set[int] = set()  # steps of the pass that are followed by a sum, at least of frequent features
        self._ends_of_all: set[int] = set()  # steps that are followed by a sum of all shared features
        super().__init__(dataset, comm, descent or Descent(update="ftrl"), **options)

    def _check_arguments(self) -> None:
        if self.descent.update != "ftrl":
            other = f"{self.descent.update}: use ftrl, or the strategy sparse"
            raise AlgorithmError(f"the strategy {self.name} does not support the update {other}")
        if self.algorithm not in ("auto", *FIXED):
            raise AlgorithmError(f"the strategy {self.name} takes algorithm auto or one of {', '.join(FIXED)}, not {self.algorithm!r}")
        if self.sums is not None and not self.sums >= 1:
            raise ValueError(f"sums must be at least 1, not {self.sums}")

    def _make(self, dataset: Dataset, threads: int) -> None:
        super()._make(dataset, threads)
        self._share()

    def _share(self) -> None:
        """Find the features that several ranks have, and plan the sums of their changes. Collective."""
        assert isinstance(self.weights, AdaptiveWeights)
        self.weights.clear_rate_factors()
        if self.comm.size == 1:
            return
        found, comm, dataset = Occurring(self.dataset, self.comm), self.comm, self.dataset
        received = gather(comm, (dataset.nnz, dataset.rows, this_place()))
        several = found.ranks > 1
        places = np.searchsorted(found.features, found.own)
        shared = several[places]
        # The number of each feature among those that several ranks have, or among those of one rank only.
        numbers = np.where(several, np.cumsum(several), np.cumsum(~several))[places] - 1
        self.shared_features, alone = int(np.count_nonzero(several)), found.features[~several]
        dtype, width = found.own.dtype, self.descent.width
        ranks = max(1, sum(rows > 0 for _, rows, _ in received))
        frequent = self._frequent(numbers[shared].astype(dtype), found.own[shared], ranks)

        weights = self.weights

        def summed(chosen: Array) -> _Shared:
            own = chosen[numbers[shared]]
            slots = (np.cumsum(chosen) - 1)[numbers[shared][own]].astype(dtype)
            given = found.features[several][chosen], slots, found.ranks[several][chosen], ranks
            changes = LocalChanges(weights, *given)
            return _Shared(changes, self._plan(changes.slots, changes.size, 2))

        self._all, self._often = summed(np.ones_like(frequent)), summed(frequent)
        numbers = numbers[~shared].astype(dtype)
        self._spreading = self._plan(self._flat(numbers, len(alone)), len(alone) * width, 1)
        self._private, self._alone = self._flat(found.own[~shared], self.size), self._flat(alone, self.size)
        self._choose(received, int(np.count_nonzero(frequent)))

    def _frequent(self, numbers: Array, own: Array, ranks: int) -> Array:
        """Return which of the shared features are frequent, given the numbers of this rank's. Collective."""
        dataset = self.dataset
        counts = np.zeros(dataset.features, np.float32)
        count(dataset.indices, int(dataset.indptr[0]), int(dataset.indptr[-1]), counts)
        total = allreduce(SparseStream(numbers, counts[own], max(self.shared_features, 1)), self.comm)
        return np.asarray(total.to_dense()[: self.shared_features] >= _FREQUENT * ranks)

    def _choose(self, received: list[tuple[int, int, Any]], frequent: int) -> None:
        """Choose the number of sums per pass, given the non-zeros, samples and host of every rank."""
        self._near = len(same_host([place for *_, place in received], self.comm.rank)) == self.comm.size
        share = _SHARE * max(nonzeros for nonzeros, *_ in received)

        def sums(features: int, most: int) -> int:
            return max(1, min(most, round(share / (_MEETING + (_NEAR if self._near else _FAR) * features))))

        self._parts = self.sums or sums(self.shared_features, _MOST)
        self._parts_of_frequent = self._parts if self.sums else self._parts * -(-sums(frequent, _MOST_FREQUENT) // self._parts)

    def _plan(self, indices: Array, size: int, width: int) -> Any:
        """Return a plan for sums of streams with these indices, and ``width`` values each. Collective."""
        values = np.zeros(len(indices) if width == 1 else (len(indices), width), self.weights.unscaled.dtype)
        stream = SparseStream(indices, values, max(size, 1))
        return allreduce_init(stream, self.comm, algorithm=self.algorithm, fixed_indices=True)

    def _flat(self, features: Array, size: int) -> Array:
        return features if self.columns is None else flat_indices(features, self.columns, size)

    @property
    def alone(self) -> bool:
        return True

    @property
    def between_sums(self) -> bool:
        return self.comm.size > 1 and self._next not in self._ends_of_all

    def begin_pass(self, position: int, steps: int) -> None:
        self._next, self._made = position, 0
        if self.comm.size == 1:
            return
        self._ends_of_all, self._ends = (
            {-(-steps * part // parts) for part in range(1, parts + 1)} for parts in (self._parts, self._parts_of_frequent)
        )
        self._ends |= self._ends_of_all
        if self.sums is None and self._near and self.weights.steps == position:
            self._ends |= {max(1, steps >> halving) for halving in range(1, _FIRST + 1)}
        for each in (self._all, self._often):
            each.changes.begin()

    def step(self, rows: Array, coefficients: Array, rate: float) -> None:
        super().step(rows, coefficients, rate)
        self._next += 1
        if self._next in self._ends_of_all:
            self._add_up(self._all)
            self._often.changes.begin()
        elif self._next in self._ends:
            self._add_up(self._often)
            self._all.changes.begin(self._often.changes)

    def _add_up(self, shared: _Shared) -> None:
        """Apply the changes of all ranks on all of them. Collective."""
        changes = shared.changes
        largest = max(gather(self.comm, changes.largest()))
        self.clock.lap("wait")
        unit = math.ldexp(1.0, math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0
        shared.plan.start(changes.moves(unit))
        self.clock.lap("select")
        total = _all_of(shared.plan.wait(), changes.size)
        self.clock.lap("communicate")
        self._made += 1
        finite = changes.take(total, unit)
        self.clock.lap("update")
        self.weights._check(finite)

    def warm_up(self) -> None:
        super().warm_up()
        if self.comm.size > 1:
            for each in (self._all, self._often):
                each.changes.begin()
                self._add_up(each)
            self._all.changes.begin(self._often.changes)
            self.drain()

    def drain(self) -> None:
        super().drain()
        if self.comm.size > 1:
            self._spread(self.weights.unscaled)

    def finish(self) -> None:
        if self.comm.size > 1:
            assert isinstance(self.weights, AdaptiveWeights)
            self._spread(self.weights._norms)

    def state(self) -> dict[str, Any]:
        self.drain()
        self.finish()
        return super().state()

    def _spread(self, array: Array) -> None:
        """Copy the entries of an array that only one rank changes to all ranks. Collective."""
        self._spreading.start(array[self._private])
        values = _all_of(self._spreading.wait(), len(self._alone))
        self.clock.lap("communicate")
        self.weights.note(self._alone)
        array[self._alone] = values[: len(self._alone)]
        self.clock.lap("update")

    def renew(self, dataset: Dataset) -> None:
        super().renew(dataset)
        self._share()

    def adopt(self, weights: Any) -> None:
        super().adopt(weights)
        self._share()

    def measures(self) -> dict[str, Any]:
        """Return ``sums``, the number of sums of changes, and ``shared_features``, the number of features that they cover."""
        return {"sums": self._made, "shared_features": self.shared_features}


def _all_of(total: SparseStream, size: int) -> Array:
    """Return the values of a sum at all of its positions."""
    return total._stored if len(total._stored) == size else total.to_dense()
