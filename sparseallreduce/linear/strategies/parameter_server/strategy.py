"""Parameter server strategies: separate ranks store the model, and workers pull weights and push gradients (thesis section 4.2.2)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.gradients.columns import new_batch
from sparseallreduce.linear.gradients.compact import CompactBatch
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.strategies.parameter_server.core import AsynchronousServer, Server, SynchronousServer
from sparseallreduce.linear.strategies.parameter_server.link import Link, LocalLink, RemoteLink, answer_workers
from sparseallreduce.linear.strategies.parameter_server.ranges import balanced_bounds
from sparseallreduce.linear.strategies.parameter_server.state import gathered_state, state_of_range
from sparseallreduce.linear.weights import Descent, Weights, new_weights
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.partition import split
from sparseallreduce.streams.stream import SparseStream, index_dtype

if TYPE_CHECKING:
    from sparseallreduce.linear.strategies.parameter_server.mailbox import Mailbox

__all__ = ["AsynchronousParameterServer", "ParameterServer", "SynchronousParameterServer", "read_on_workers"]

Array = NDArray[Any]
T = TypeVar("T")
Sets = tuple[Dataset, Dataset | None]


class ParameterServer(Strategy):
    """Base class of the synchronous and asynchronous strategy.

    The last ``servers`` ranks hold no samples; each stores the weights of a range of indices, chosen so that all are requested equally
    often. The other ranks are workers: for each batch they pull the weights of the indices that occur in it, and push its gradient, divided
    at the same bounds. A single rank is worker and server in one.

    Parameters
    ----------
    dataset, comm, descent, threads
        As for :class:`~sparseallreduce.linear.strategies.base.Strategy`. A server's data set has no samples: see
        :func:`read_on_workers`.
    servers : int, optional
        Number of servers, at least 1 and less than the number of ranks.

    Raises
    ------
    AlgorithmError
        If no worker is left.
    """

    summed_densities: list[float]

    in_unison = False
    interrupts_waits = True
    server_class: type[Server]
    _batch: CompactBatch

    def __init__(self, dataset: Dataset, comm: Any, descent: Descent | None = None, *, threads: int = 1, servers: int = 1) -> None:
        self.servers = servers
        super().__init__(dataset, comm, descent, threads=threads)  # checks the arguments of all ranks
        workers = workers_of(comm, servers)
        self._mailbox: Mailbox | None = None if comm.size == 1 else _mailbox(comm)
        self._workers_comm = workers if self._mailbox is None or workers is None else self._mailbox.watchful(workers)
        self._bounds = balanced_bounds(self.dataset, comm, servers)
        self._bounds[-1] = self.size  # the intercept comes after the features
        self._server: Server | None = None
        dtype = self.dataset.values.dtype
        if comm.size == 1:
            self._server = self.server_class(self.weights, 1)
        elif self.serves:
            lo, hi = self._range
            intercept = self.descent.intercept and hi == self.size
            weights = new_weights(hi - lo, replace(self.descent, intercept=intercept), dtype, self.threads)
            self._server = self.server_class(weights, self.workers)
        if not self.serves:
            self._link = self._linked()
            self._batch = new_batch(self.dataset, self.size, self.threads, self.columns)
            self._intercept = np.arange(self.dataset.features, self.size, dtype=index_dtype(self.size))
        self._speed = _Speed()

    def _check_arguments(self) -> None:
        _check_servers(self.comm, self.servers)

    def _holders(self, comm: Any) -> int:
        return max(1, int(comm.size) - self.servers)

    @property
    def workers_comm(self) -> Any:
        return self._workers_comm

    @property
    def workers(self) -> int:
        return 1 if self.comm.size == 1 else int(self.comm.size) - self.servers

    @property
    def serves(self) -> bool:  # type: ignore[override]
        return int(self.comm.rank) >= self.workers

    def warm_up(self) -> None:
        kernels.warm_up(self.dataset.indices.dtype, self.dataset.values.dtype)
        self.weights.warm_up(self.dataset)
        if not self.serves:
            rows = np.arange(min(1, self.dataset.rows))
            self._batch.gradient(rows, np.ones(self._shape(len(rows)), self.dataset.values.dtype))
        if self._server is not None:
            self._server.warm_up()

    def scores(self, rows: Array) -> Array:
        self._speed.count(len(rows))
        self._batch.take(rows)
        # Every score depends on the intercept; without rows there is no score.
        indices = np.concatenate([self._batch.features, self._intercept[: len(rows)]])
        parts = np.split(indices, np.searchsorted(indices, np.array(self._bounds[1:-1], indices.dtype)))
        asked = [_from(part, lo, hi) for part, (lo, hi) in zip(parts, pairwise(self._bounds), strict=True)]
        self.clock.lap("compute")
        weights = np.concatenate(self._link.pull(asked))
        self.clock.lap("communicate")
        descent = Descent(intercept=len(indices) > len(self._batch.features), columns=self.columns)
        known = Weights(len(indices), descent, weights.dtype, self.threads)
        known.assign(weights)
        return known.compact_scores(self._batch.samples)

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        gradient = self._batch.gradient(rows, coefficients)
        self.clock.lap("compute")
        return gradient

    def update(self, gradient: SparseStream, rate: float) -> None:
        self.given_densities.append(gradient.stored / self.size)
        self._link.push([_moved(part) for part in split(gradient, self._bounds)], rate)
        self._speed.lap()
        self.clock.lap("communicate")

    def serve(self, asked_to_stop: Callable[[], str | None] = lambda: None) -> None:
        assert self._mailbox is not None and self._server is not None
        answer_workers(self._mailbox, self._server, self.clock, self._gather_state, asked_to_stop)

    def ask_to_stop(self, reason: str) -> None:
        self._link.ask_to_stop(reason)

    @property
    def received_stop(self) -> str | None:
        return self._link.stop

    def drain(self) -> None:
        if self._server is not None:
            self.summed_densities += [entries * self.servers / self.size for entries in self._server.entries]
            self._server.entries.clear()
        if not self.serves:
            self._link.drain()
        if self.comm.size > 1:
            self._adopt_state(self._gather_state())
        self.clock.lap("wait")

    def assign(self, array: Array) -> None:
        self._check_start(array)
        self.weights.assign(array)
        if self.serves and self._server is not None:
            lo, hi = self._range
            self._server.weights.assign(array[lo:hi])

    def state(self) -> dict[str, Any]:
        if not self.serves:
            self._link.pause()
        return self._gather_state()

    def drained_state(self) -> dict[str, Any]:
        return self._own_state(self.weights)

    def restore(self, state: dict[str, Any]) -> None:
        self._adopt_state(state)
        if self.serves and self._server is not None:
            self._server.weights.restore(state_of_range(state, *self._range, self.descent.width))

    def measures(self) -> dict[str, Any]:
        """Return ``workers``: each one's samples per second, until it had finished its share, and the staleness of its gradients.

        The staleness of a gradient is the number of updates that a server has applied since it sent the weights with which the gradient
        was computed. Each server counts separately.
        """
        own = self._speed, [] if self._server is None else self._server.staleness
        self._speed = _Speed()
        if self._server is not None:
            self._server.staleness = [Counter() for _ in range(self.workers)]
        received = [own] if self._mailbox is None else self._mailbox.gather(own)
        records = []
        for worker in range(self.workers):
            staleness = sum((counted[worker] for _, counted in received if counted), Counter[int]())
            records.append({"rank": worker, **received[worker][0].record(), "staleness": _distribution(staleness)})
        return {"servers": self.servers, "workers": records}

    def meet(self, value: T) -> list[T]:
        return [value] if self._mailbox is None else self._mailbox.gather(value)

    def give_up(self, error: Exception) -> Exception:
        return error if self._mailbox is None else self._mailbox.give_up(error)

    @property
    def _range(self) -> tuple[int, int]:
        """The indices stored by this server."""
        number = self.comm.rank - self.workers
        return self._bounds[number], self._bounds[number + 1]

    def _linked(self) -> Link:
        if self._mailbox is None:
            assert self._server is not None
            return LocalLink(self._server)
        return RemoteLink(self._mailbox, range(self.workers, self.comm.size), self.dataset.values.dtype, self._shape(-1))

    def _gather_state(self) -> dict[str, Any]:
        """Return the state of the whole model, which servers send to each other and to the workers."""
        part = None if self._server is None else self._own_state(self._server.weights)
        if self._mailbox is None:
            assert part is not None
            return part
        return gathered_state(self._mailbox, part)

    def _own_state(self, weights: Weights) -> dict[str, Any]:
        """Return the part of a server's weights that it sends."""
        return weights.state()

    def _adopt_state(self, state: dict[str, Any]) -> None:
        """Set this rank's copy of the weights to the state of the whole model."""
        self.weights.restore(state)


class SynchronousParameterServer(ParameterServer):
    """All workers compute with the same weights, and the servers apply the sum of their gradients once all have arrived.

    The model takes the same steps as with an allreduce, up to rounding, and is bitwise reproducible.
    """

    name = "ps-sync"
    server_class: type[Server] = SynchronousServer


class AsynchronousParameterServer(ParameterServer):
    """No worker waits for another: servers apply each gradient when it arrives, so it may be stale.

    Each worker processes its own share of every global batch at its own speed, and waits only at the end of an epoch, or if
    training has to stop: then each ends after its current step, and a checkpoint has the number of the slowest worker's step.

    A gradient is the mean over a share of a global batch: a learning rate that suits a step of all workers is divided by
    their number, so that an epoch changes the weights as much as a synchronous one, including L2.

    Runs are not reproducible. A checkpoint holds only the weights; a resumed run continues from them, but not with bitwise identical
    results.

    Raises
    ------
    AlgorithmError
        If the descent has momentum, to which delays would add (Mitliagkas et al., 2016), or averages, or adaptive weights.
    """

    name = "ps-async"
    in_step = False
    server_class: type[Server] = AsynchronousServer

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.descent.momentum or self.descent.averages:
            wanted = "momentum" if self.descent.momentum else "averaging"
            raise AlgorithmError(f"the strategy {self.name} does not support {wanted}, which needs a count of steps: use ps-sync")
        if self.descent.adaptive:
            raise AlgorithmError(f"the strategy {self.name} stores only weights: use the update sgd, or the strategy ps-sync")

    def gradient(self, rows: Array, coefficients: Array) -> SparseStream:
        return super().gradient(rows, coefficients * coefficients.dtype.type(self.workers))

    def update(self, gradient: SparseStream, rate: float) -> None:
        super().update(gradient, rate / self.workers)

    def restore(self, state: dict[str, Any]) -> None:
        self.assign(state["weights"].reshape(self._shape(-1)))

    def _own_state(self, weights: Weights) -> dict[str, Any]:
        return {"weights": weights.to_array().reshape(-1)}  # servers apply gradients in different orders, so their scales differ

    def _adopt_state(self, state: dict[str, Any]) -> None:
        self.weights.assign(state["weights"].reshape(self._shape(-1)))


def workers_of(comm: Any, servers: int) -> Any:
    """Return the communicator of the ranks that hold samples, or None on servers. Collective.

    Raises
    ------
    AlgorithmError
        If there are no such ranks.
    """
    _check_servers(comm, servers)
    return comm if comm.size == 1 else _mailbox(comm).first_ranks(comm.size - servers)


def _check_servers(comm: Any, servers: int) -> None:
    """Raise an error if a number of servers leaves no server or no worker."""
    if servers < 1:
        raise AlgorithmError(f"a parameter server strategy needs at least one server, not {servers}")
    if servers >= max(comm.size, 2):
        raise AlgorithmError(
            f"{servers} of {comm.size} rank{'s' * (comm.size > 1)} as parameter server{'s' * (servers > 1)} leave none to compute: "
            "start more ranks, or take fewer servers"
        )


def read_on_workers(comm: Any, servers: int, read: Callable[[Any], Sets]) -> Sets:
    """Return the data sets that ``read`` returns on the workers, given their communicator; on servers, the same without samples.

    Collective over ``comm``; an error that ``read`` raises is raised on all ranks.

    Parameters
    ----------
    comm : communicator
        Workers and servers.
    servers : int
        Number of servers, which are the last ranks.
    read : callable
        Takes the communicator of the workers, and returns the data sets of a worker.

    Returns
    -------
    tuple of Dataset
        As ``read`` returns them.
    """
    group = workers_of(comm, servers)
    if comm.size == 1:
        return read(group)
    sets = agreed(comm, lambda: None if group is None else read(group))
    outlines = gather(comm, sets and (_without_samples(sets[0]), sets[1] and _without_samples(sets[1])))
    return sets or cast(Sets, outlines[0])


def _without_samples(dataset: Dataset) -> Dataset:
    empty = {name: getattr(dataset, name)[:0].copy() for name in ("indices", "values", "labels")}
    if dataset.weights is not None:
        empty["weights"] = dataset.weights[:0].copy()
    total = dataset.total_samples
    return replace(dataset, indptr=np.zeros(1, np.int64), first_sample=total, total_samples=total, pages=None, **empty)


def _mailbox(comm: Any) -> Mailbox:
    # Imported here, because a rank alone needs no mpi4py.
    from sparseallreduce.linear.strategies.parameter_server.mailbox import mailbox

    return mailbox(comm)


def _from(indices: Array, lo: int, hi: int) -> Array:
    """Return indices of the range ``[lo, hi)`` as positions in it."""
    return (indices - indices.dtype.type(lo)).astype(index_dtype(hi - lo), copy=False) if len(indices) else indices


def _moved(part: SparseStream) -> SparseStream:
    """Return a stream on ``[lo, hi)`` as a stream whose indices start at 0."""
    extent = part.hi - part.lo
    if part.is_dense:
        return SparseStream._dense_form(part._stored, extent)
    indices, values = part._entries()
    return SparseStream._sparse_form(_from(indices, part.lo, part.hi), values, extent)


class _Speed:
    """The rate at which a worker processes its samples."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0
        self._start: float | None = None

    def count(self, samples: int) -> None:
        """Add samples whose step begins."""
        if self._start is None:
            self._start = time.perf_counter()
        self.samples += samples

    def lap(self) -> None:
        """Record the end of a step."""
        if self._start is not None:
            self.seconds = time.perf_counter() - self._start

    def record(self) -> dict[str, float]:
        rate = self.samples / self.seconds if self.seconds else 0.0
        return {"samples": self.samples, "seconds": self.seconds, "samples_per_second": rate}


def _distribution(counts: Counter[int]) -> dict[str, Any]:
    """Return mean, median, 90th and 99th percentile, maximum and histogram of values, given their counts."""
    values = np.array(sorted(counts), np.int64)
    if not len(values):
        return {"mean": 0.0, "median": 0, "p90": 0, "p99": 0, "max": 0, "histogram": {}}
    often = np.array([counts[value] for value in values.tolist()])
    reached = np.cumsum(often) / often.sum()
    median, p90, p99 = (int(values[np.searchsorted(reached, share - 1e-12)]) for share in (0.5, 0.9, 0.99))
    mean = float((values * often).sum() / often.sum())
    histogram = {str(value): counts[value] for value in values.tolist()}
    return {"mean": mean, "median": median, "p90": p90, "p99": p99, "max": int(values[-1]), "histogram": histogram}
