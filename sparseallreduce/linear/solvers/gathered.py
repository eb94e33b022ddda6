"""Gathering of the active samples of all ranks on the first rank, which processes them alone once they are few."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import weight_changes
from sparseallreduce.linear.kernels.dual import HINGE, SQUARED_HINGE
from sparseallreduce.linear.kernels.dual_warming import warm_up_gathering
from sparseallreduce.linear.solvers.exchange import Exchange
from sparseallreduce.linear.solvers.local import LocalProblem, Passes
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather, gather_on_first

__all__ = ["Gathered"]

Array = NDArray[Any]

# Active samples are gathered if they have at most this fraction of the non-zeros of all ranks, in the first rounds and later, and at most
# _LARGEST times those of the rank with the most, which limits the memory of the first rank. With the hinge, simultaneous changes of ranks
# obstruct each other: on 3,000 samples, 73 % of them active, two ranks took 968 rounds to a gap of 1e-5, and 18 with gathering.
_SHARE = {HINGE: (0.6, 1.0), SQUARED_HINGE: (0.4, 0.4)}
_FIRST_ROUNDS = 10
_LARGEST = 4


class _Samples(NamedTuple):
    """Samples sent to the first rank, row by row."""

    numbers: Array  # int64, numbers among all samples
    lengths: Array  # int64, number of non-zeros of each
    factors: Array  # float64, (rows, 3): label, weight and dual variable
    indices: Array  # features of all non-zeros
    values: Array

    def after(self, others: _Samples) -> _Samples:
        """Return ``others`` followed by these samples."""
        return _Samples(*(np.concatenate(pair) for pair in zip(others, self, strict=True)))


class Gathered:
    """Passes of the first rank over the active samples of all ranks.

    A sample is inactive while its dual variable is at a bound that it would not leave: with the hinge most samples are, after some rounds.
    The active ones depend strongly on each other, and need hundreds of passes, each of which takes less time than a sum of changes. So the
    first rank receives their rows, dual variables and weights, and makes passes as a single rank does; then it broadcasts its changes. All
    ranks compute primal objectives, each on its own samples; samples that were deactivated too early are then sent too.

    Creating an instance, :meth:`collect` and :meth:`advance` are collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    local : LocalProblem
        The problem of these samples.
    exchange : Exchange
    comm : communicator
    """

    entries: int

    def __init__(self, dataset: Dataset, local: LocalProblem, exchange: Exchange, comm: Any) -> None:
        self._dataset, self._local, self._exchange, self._comm = dataset, local, exchange, comm
        entries = gather(comm, local.entries)
        self.entries, self._room = sum(entries), _LARGEST * max(entries)  # non-zeros of all ranks
        self._received: dict[str, Array] | None = None  # the first rank's last changes, until all ranks have applied them
        self.forget()

    def forget(self) -> None:
        """Return to passes of every rank over its own samples. The first rank's changes stay."""
        self.begun: bool = False
        self._handed_over = np.zeros(self._local.rows, bool)  # which of this rank's samples the first rank has
        self._entries = 0  # number of non-zeros that it has
        self._samples: _Samples | None = None  # only on the first rank
        self._problem: LocalProblem | None = None  # the problem of these samples, in their order

    @property
    def active(self) -> int:
        """The number of samples that this rank's next pass visits."""
        if self.begun:
            return 0 if self._problem is None else self._problem.active
        return self._local.active

    def is_due(self, entries: int, rounds: int) -> bool:
        """Return True if the active samples of all ranks have few enough non-zeros to be gathered after this many rounds."""
        early, late = _SHARE.get(self._local.loss, (0.0, 0.0))
        return self.has_room(entries) and 0 < entries <= (early if rounds < _FIRST_ROUNDS else late) * self.entries

    def has_room(self, entries: int) -> bool:
        """Return True if this many non-zeros fit the memory of one rank."""
        return entries <= self._room

    def collect(self) -> int:
        """Send the active samples that the first rank does not have to it; return the number of bytes sent by this rank.

        If it would have too many, gathering starts again, or ends if the active samples alone are too many.
        """
        local, comm = self._local, self._comm
        rows = local.active_rows
        new = rows[~self._handed_over[rows]]
        ranks = gather(comm, (len(rows), len(new), local.entries_of(new), local.entries_of(rows)))
        active, counts, entries, needed = (list(each) for each in zip(*ranks, strict=True))
        if self._entries + sum(entries) > self._room:
            again = self.begun and sum(needed) <= self._room
            self.forget()
            return self.collect() if again else 0
        part, (features, weights) = agreed(comm, lambda: self._handed(new))
        sizes = gather(comm, len(features))
        arrays = [*part._replace(factors=part.factors.reshape(-1)), features, weights, rows + self._dataset.first_sample]
        lengths = [counts, counts, [3 * count for count in counts], entries, entries, sizes, sizes, active]
        arrived = [gather_on_first(comm, array, length) for array, length in zip(arrays, lengths, strict=True)]
        agreed(comm, lambda: self._take_in(arrived) if comm.rank == 0 else None)
        self._handed_over[new] = True
        self._entries += sum(entries)
        self.begun = True
        return sum(array.nbytes for array in arrays) if comm.rank else 0

    def advance(self, passes: int, visits: int, enough: float) -> tuple[Passes, int]:
        """Let the first rank make passes, and apply its changes on all ranks; return them, and the bytes that this rank sent.

        Parameters
        ----------
        passes : int
            Smallest number of passes.
        visits : int
            Smallest number of visits of samples, unless the gap is expected to be small enough before.
        enough : float
            Sum of gaps that is small enough.
        """
        changes = agreed(self._comm, lambda: self._ascended(passes, visits, enough), long_wait=True)
        self._received = received = broadcast_arrays(self._comm, changes)
        self.catch_up()
        gap, before = received["figures"][:2].tolist()
        sent = 0 if changes is None else (self._comm.size - 1) * sum(array.nbytes for array in changes.values())
        return Passes(gap, before, int(received["figures"][5])), sent

    def catch_up(self) -> None:
        """Apply the first rank's last changes, if not all ranks have applied them because one failed. All ranks call it."""
        if self._received is not None:
            received = self._received
            agreed(self._comm, lambda: self._learn(**received))
            self._received = None

    def _handed(self, rows: Array) -> tuple[_Samples, tuple[Array, Array]]:
        """Return some of this rank's samples, their features, and the weights of these features."""
        dataset = self._dataset
        warm_up_gathering(dataset.indices.dtype, dataset.values.dtype, self._local.numbering.indices.dtype)
        return self._taken(rows), self._local.weights_of(rows)

    def _taken(self, rows: Array) -> _Samples:
        """Return some of this rank's samples."""
        dataset = self._dataset
        counts = np.ones(len(rows)) if dataset.weights is None else dataset.weights[rows]
        factors = np.stack([dataset.labels[rows], counts, self._local.dual[rows]], axis=1)
        lengths = dataset.indptr[rows + 1] - dataset.indptr[rows]
        indices, values = (np.empty(lengths.sum(), array.dtype) for array in (dataset.indices, dataset.values))
        weight_changes.take_rows(dataset.indptr, dataset.indices, dataset.values, rows, indices, values)
        return _Samples(rows + dataset.first_sample, lengths, factors, indices, values)

    def _take_in(self, arrived: list[Array]) -> None:
        """Add the received samples to the problem, and activate those that the ranks report as active."""
        samples, (features, weights, active) = _Samples(*arrived[:5]), arrived[5:]
        samples = samples._replace(factors=samples.factors.reshape(-1, 3))
        if len(samples.numbers) or self._problem is None:
            self._samples = samples if self._samples is None else samples.after(self._samples)
            self._problem = self._put_together(self._samples, self._problem, features, weights)
        assert self._samples is not None
        order = np.argsort(self._samples.numbers)
        self._problem.activate(order[np.searchsorted(self._samples.numbers, active, sorter=order)])

    def _put_together(self, samples: _Samples, former: LocalProblem | None, features: Array, weights: Array) -> LocalProblem:
        """Return the problem of gathered samples, with the dual variables and weights known so far."""
        labels, counts, dual = np.ascontiguousarray(samples.factors.T)
        rows = Dataset(
            np.concatenate([[0], np.cumsum(samples.lengths)]),
            samples.indices,
            samples.values,
            labels,
            self._dataset.features,
            total_samples=self._dataset.total_samples,
            weights=counts,
        )
        problem = self._local.like(rows)
        problem.dual[:] = dual
        order = np.argsort(features, kind="stable")  # ranks that have the same feature have the same weight
        problem.assign(features[order], weights[order])
        if former is None:
            problem.limits[:] = self._local.limits
        else:
            problem.dual[: former.rows] = former.dual
            problem.limits[:] = former.limits
            problem.assign(former.numbering.features, former.feature_weights)
        if problem.numbering.intercept >= 0:
            problem.weights[problem.numbering.intercept] = self._exchange.weights[-1]
        self._sent_weights, self._sent_dual = problem.feature_weights, problem.dual.copy()
        return problem

    def _ascended(self, passes: int, visits: int, enough: float) -> dict[str, Array] | None:
        """Return the changes made by passes of the first rank, by name; None on other ranks."""
        problem = self._problem
        if problem is None:
            return None
        gap, before, nonzeros = problem.ascend_until(passes, visits, enough)
        weights, features = problem.feature_weights, problem.numbering.features
        changed, visited = np.flatnonzero(weights != self._sent_weights), np.flatnonzero(problem.dual != self._sent_dual)
        self._sent_weights, self._sent_dual = weights, problem.dual.copy()
        assert self._samples is not None
        return {
            "features": features[changed],
            "weights": weights[changed],
            "samples": self._samples.numbers[visited],
            "dual": problem.dual[visited],
            "figures": np.array([gap, before, *problem.limits, problem.weights[problem.numbering.intercept], nonzeros]),
        }

    def _learn(self, features: Array, weights: Array, samples: Array, dual: Array, figures: Array) -> None:
        """Apply changes of the first rank. Applying them twice has no further effect."""
        local, rows = self._local, samples - self._dataset.first_sample
        own = (rows >= 0) & (rows < local.rows)
        local.dual[rows[own]] = dual[own]
        local.limits[:] = figures[2:4]
        self._exchange.assign(features, weights, float(figures[4]))
