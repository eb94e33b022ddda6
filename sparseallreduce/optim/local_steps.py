"""The base of SparseLoCo, DiLoCo and local SGD, whose ranks make several steps on their own and then combine their changes."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, CheckpointError, MismatchError
from sparseallreduce.optim.local_sums import ChangeSum
from sparseallreduce.optim.local_vectors import Arrays, Vector
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.launching import agree
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather, is_known, report_error, together
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Arrived", "Flight", "LocalSteps"]

Array = NDArray[Any]
VERSION = 2


class LocalSteps(ABC):
    """Base class of optimisers whose ranks make ``H`` steps independently, and then combine the changes of their parameters.

    The *change* of a rank is the value of its parameters after the last sum minus their value now. The ranks combine their changes. All
    ranks then set their parameters to the values after the last sum minus ``outer_lr`` times the combined change. The caller makes the
    steps, by any rule, and calls :meth:`step` after each.

    Parameters
    ----------
    parameters : array, or sequence of arrays
        As for :class:`~sparseallreduce.optim.Optimizer`. They are set to the values of rank 0. Construction is collective.
    H : int
        The number of steps between two sums of the same parameters, at least 1.
    outer_lr : float
        The factor of the combined change.
    delay : int
        The number of steps between the start of a sum and its application, from 0 to ``H``. With 0, a rank waits for the sum at once.
        Otherwise it continues from its own parameters, and these later changes are part of the next sum; the replicas are then equal only
        after :meth:`synchronize`.
    fragments : int
        The parameters are divided into this number of parts of about equal size, at most ``H``, which are summed in turn, ``H / fragments``
        steps apart.
    progress : str
        How a running sum advances: "manual", in each :meth:`step`, or "thread", see :func:`sparseallreduce.iallreduce`.
    warmup : int
        The number of steps before the local ones, which the ranks make by mean gradients: see :meth:`mean`.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Attributes
    ----------
    steps : int
        The number of steps of this rank.
    sums : int
        The number of sums over the ranks, where each fragment counts.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: AlgorithmError, StreamError or StreamTypeError if an argument is wrong on any rank, MismatchError if
        the ranks differ in their settings or in the sizes of their parameters.

    Notes
    -----
    Streaming DiLoCo (Douillard et al., 2025) introduced fragments that are summed in turn, and sums during computation. It mixes the
    parameters
    of a rank with those of the sum. Here a rank keeps its own steps since the start of the sum, so that each step counts once.
    """

    outer_lr: float
    delay: int
    fragments: int
    progress: str
    steps: int
    sums: int

    def __init__(
        self,
        parameters: Any,
        H: int = 30,
        *,
        outer_lr: float = 1.0,
        delay: int = 0,
        fragments: int = 1,
        progress: str = "manual",
        warmup: int = 0,
        comm: Any = None,
    ) -> None:
        self.comm: Any = resolve(comm)
        self.H, self.outer_lr, self.delay, self.fragments, self.progress = H, outer_lr, delay, fragments, progress
        self.warmup = warmup
        self.steps = self.sums = 0
        self._flights: list[Flight] = []
        together(self.comm, lambda: self._begin(parameters))

    def _begin(self, parameters: Any) -> None:
        agreed(self.comm, lambda: self._prepare(parameters))
        self._meet(new=True)

    def _prepare(self, parameters: Any) -> None:
        self._check()
        self._vector = parameters if isinstance(parameters, Vector) else Arrays(parameters)
        size = self._vector.size
        self._ranges = list(pairwise(size * part // self.fragments for part in range(self.fragments + 1)))
        self._sums = [self._new_sum(hi - lo) for lo, hi in self._ranges]
        self._set_anchor(self._vector.read(0, size))

    def _check(self) -> None:
        if self.H < 1:
            raise AlgorithmError(f"H is the number of steps between two sums, at least 1, not {self.H}")
        if not 0 <= self.delay <= self.H:
            raise AlgorithmError(f"delay is a number of steps, from 0 to H, {self.H}, not {self.delay}")
        if not 1 <= self.fragments <= self.H:
            raise AlgorithmError(f"fragments is the number of parts that are summed in turn, from 1 to H, {self.H}, not {self.fragments}")
        if self.warmup < 0:
            raise AlgorithmError(f"warmup is a number of steps, at least 0, not {self.warmup}")
        if self.progress not in ("manual", "thread"):
            raise AlgorithmError(f"progress is 'manual' or 'thread', not {self.progress!r}")

    def settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks, by name."""
        own = {"kind": type(self).__name__, "H": self.H, "outer_lr": self.outer_lr, "delay": self.delay, "fragments": self.fragments}
        return {**own, "warmup": self.warmup}

    @abstractmethod
    def _new_sum(self, size: int) -> ChangeSum:
        """Return the object that sums the changes of this number of parameters."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the changes: float32 or float64."""
        dtype: np.dtype[Any] = self._vector.dtype
        return dtype

    @property
    def warming_up(self) -> bool:
        """True if the next step belongs to the warm-up, whose gradients are averaged."""
        return self.steps < self.warmup

    def mean(self, gradient: Array) -> Array:
        """Return the mean of the ranks' gradients if the next step belongs to the warm-up, and otherwise this rank's own. Collective.

        The changes of models that have learned nothing yet have little in common, which is why trainings by local steps begin with dense
        sums (Douillard et al., 2023, section 3). The steps of the warm-up must be the same on all ranks: take them by this mean.

        Parameters
        ----------
        gradient : array
            Of any shape, which is the same on all ranks; float32 or float64.

        Returns
        -------
        array
            Of the same shape and dtype.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank, if an argument is wrong or the sum fails on any rank.
        """
        return together(self.comm, lambda: self._mean(gradient)) if self.warming_up else gradient

    def _mean(self, gradient: Array) -> Array:
        flat = agreed(self.comm, lambda: SparseStream.from_dense(np.ascontiguousarray(gradient).reshape(-1)))
        return allreduce(flat, self.comm, "mean").to_dense().reshape(gradient.shape)

    def step(self) -> None:
        """Count a step that this rank has made. After every ``H`` steps, combine the changes of all ranks, which is collective.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank, if the sum fails on any rank. The parameters then have the values from before the sum, and
            :meth:`synchronize` repeats it. MismatchError if the parameters of the ranks differ at the end of the warm-up.
        """
        try:
            self._count()
            for flight in self._flights:
                with suppress(Exception):  # raised again when the sum is finished
                    flight.request.test()
        except BaseException as error:
            raise report_error(self.comm, error) from None
        if 0 < self.warmup == self.steps:
            self.check_replicas()
        while self._flights and self._flights[0].due <= self.steps:
            together(self.comm, self._finish_first)
        for fragment in self._due():
            if self.delay:
                self._start(fragment)
            else:
                together(self.comm, lambda fragment=fragment: self._combine(fragment))  # type: ignore[misc]

    def _count(self) -> None:
        """Count a step. Those of the warm-up have changed the parameters of all ranks alike, which leaves nothing to sum."""
        if self.warming_up:
            self._set_anchor(self._vector.read(0, self._vector.size))
        self.steps += 1

    def finish(self) -> None:
        """Wait for the running sums, and apply them. Collective."""
        while self._flights:
            together(self.comm, self._finish_first)

    def synchronize(self) -> None:
        """Combine the changes since the last sum now, so that all ranks have the same parameters. Collective.

        Call it at the end of training.
        """
        self.finish()
        for fragment in range(self.fragments):
            together(self.comm, lambda fragment=fragment: self._combine(fragment))  # type: ignore[misc]

    def set_communicator(self, comm: Any) -> None:
        """Continue with the ranks of another communicator. Collective over it.

        Each new rank constructs the same object at this time. Rank 0 must not be new. New ranks receive the parameters after the last sum,
        the momentum and the number of steps. If MPI cannot add processes to a run, start a new run with more ranks: see :meth:`restore`.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank: AlgorithmError if sums are running, which :meth:`finish` completes, or if rank 0 is new;
            MismatchError if settings or steps differ.
        """
        comm = resolve(comm)
        before = self.comm

        def move() -> None:
            self.comm = comm
            agreed(comm, self._expect_no_flights)
            self._meet(new=False)
            for each in self._sums:
                each.scale(comm.size / before.size)

        try:
            together(comm, move)
        except BaseException:
            self.comm = before
            raise

    def check_replicas(self) -> None:
        """Check that all ranks had bitwise identical parameters after the last sums. Collective.

        Raises
        ------
        MismatchError
            On every rank, if the parameters differ.
        """
        digests = gather(self.comm, hashlib.blake2b(self._anchor.tobytes()).digest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise MismatchError(f"the replicas differ: rank {rank} has other parameters than rank 0")

    def state(self) -> dict[str, Any]:
        """Return the state of this rank as arrays, numbers, texts, dictionaries and lists. Save it together with the parameters.

        The call waits for running sums, which are still applied later. Every other rank must therefore call it or continue, too.
        """
        flights = [flight.state() for flight in self._flights]
        own = {"version": VERSION, **self.settings(), "rank": self.comm.rank, "ranks": self.comm.size}
        own |= {"steps": self.steps, "sums": self.sums}
        arrays = {"anchor": self._anchor.copy()} | ({} if self._base is self._anchor else {"base": self._base.copy()})
        return {**own, **arrays, "kept": [each.state() for each in self._sums], "flights": flights}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state that this rank has saved, after its parameters were restored. Collective.

        With the same number of ranks, training continues with bitwise identical results. A rank without a state of its own, as when there
        are more ranks than before, loads the state and the parameters of rank 0. With fewer ranks, residuals of the other ranks are lost.

        Raises
        ------
        CheckpointError
            On every rank, if a state does not fit.
        """
        together(self.comm, lambda: self._restore(state))

    def _restore(self, state: Mapping[str, Any]) -> None:
        agreed(self.comm, lambda: self._check_state(state))
        if len(set(gather(self.comm, (state["ranks"], state["steps"], state["sums"])))) > 1:
            raise CheckpointError("the ranks load states of different steps: load those of one step")
        agreed(self.comm, lambda: self._take_over(state))

    def _check_state(self, state: Mapping[str, Any]) -> None:
        for name, value in {"version": VERSION, **self.settings()}.items():
            if state.get(name) != value:
                raise CheckpointError(f"this state has {name} {state.get(name)!r}, and this optimiser has {value!r}")
        if len(state["anchor"]) != self._vector.size:
            raise CheckpointError(f"this state is of {len(state['anchor'])} parameters, and this optimiser has {self._vector.size}")

    def _take_over(self, state: Mapping[str, Any]) -> None:
        self.steps, self.sums = int(state["steps"]), int(state["sums"])
        self._set_anchor(np.array(state["anchor"], self._vector.dtype))
        if self._base is not self._anchor:
            self._base[:] = state["base"]
        for each, kept in zip(self._sums, state["kept"], strict=True):
            if state["rank"] == self.comm.rank:
                each.restore(kept)
                each.scale(self.comm.size / state["ranks"])
            else:
                each.join({name: value for name, value in kept.items() if name != "residual"})
        self._flights = [Flight.of(flight) for flight in state["flights"]]
        for flight in self._flights:
            flight.kept = self._sums[flight.fragment].state()

    def _meet(self, new: bool) -> None:
        """Check that all ranks have the same settings, and send the state of rank 0 to new ranks."""
        settings = {name: str(value) for name, value in self.settings().items()} | {"elements of the parameters": str(self._vector.lengths)}
        gathered = gather(self.comm, (settings, new, (self.steps, self.sums)))
        _check_alike([each for each, _, _ in gathered])
        going_on = {counts for _, is_new, counts in gathered if not is_new}
        if going_on and gathered[0][1]:
            raise AlgorithmError("rank 0 is new, but other ranks are not: let rank 0 be an old one, as Intercomm.Merge(high) does")
        if len(going_on) > 1:
            raise MismatchError("the ranks that continue have made different numbers of steps or sums")
        kept = [each.shared_state() for each in self._sums]
        arrays, numbers = {"anchor": self._anchor}, []
        for part, each in enumerate(kept):
            arrays |= {f"{part} {name}": value for name, value in each.items() if isinstance(value, np.ndarray)}
            numbers.append({name: value for name, value in each.items() if not isinstance(value, np.ndarray)})
        first = gather(self.comm, numbers if self.comm.rank == 0 else [])[0]
        received = broadcast_arrays(self.comm, arrays if self.comm.rank == 0 else None)
        if new and self.comm.rank:
            self.steps, self.sums = gathered[0][2]
            self._vector.write(0, self._vector.size, received["anchor"])
            self._set_anchor(received["anchor"])
            for part, (one, own) in enumerate(zip(self._sums, first, strict=True)):
                prefix = f"{part} "
                one.join({**own, **{name.removeprefix(prefix): value for name, value in received.items() if name.startswith(prefix)}})

    def _expect_no_flights(self) -> None:
        if self._flights:
            raise AlgorithmError("sums are in flight on the former communicator: call finish() first")

    def _set_anchor(self, anchor: Array) -> None:
        """Store the parameters after the sums, in the dtype of the vector and as the parameters round them."""
        self._anchor = np.array(anchor, self._vector.dtype)
        shared = self._vector.exact and not self.delay
        self._base = self._anchor if shared else self._vector.read(0, self._vector.size)

    def _due(self) -> list[int]:
        """Return the fragments whose sums start after this step."""
        local = self.steps - self.warmup
        return [part for part in range(self.fragments) if local > 0 and (local - (part + 1) * self.H // self.fragments) % self.H == 0]

    def _prepared(self, fragment: int, delay: int = 0) -> Flight:
        """Return a sum that is ready to start, without changing anything."""
        lo, hi = self._ranges[fragment]
        then = self._vector.read(lo, hi)
        return Flight(fragment, self.steps + delay, delay > 0, then, self._base[lo:hi] - then, self._sums[fragment].state())

    def _start(self, fragment: int) -> None:
        """Start a sum. An error on this rank is raised on all ranks when the sum is finished."""
        flight = Flight(fragment, self.steps + self.delay)
        try:
            flight = self._prepared(fragment, self.delay)
            flight.request = self._sums[fragment].start(flight.change, self.comm, self.progress)
        except Exception as error:
            flight.request = _Failed(error) if is_known(error) else agree(self.comm, Intent((), 0, error), blocking=False)
        except BaseException as error:
            raise report_error(self.comm, error) from None
        self._flights.append(flight)

    def _finish_first(self) -> None:
        self._apply(self._flights.pop(0))

    def _combine(self, fragment: int) -> None:
        flight = agreed(self.comm, lambda: self._prepared(fragment))
        flight.request = Arrived(lambda: self._sums[fragment].sum(flight.change, self.comm))
        self._apply(flight)

    def _apply(self, flight: Flight) -> None:
        """Wait for a sum and set the parameters, or restore everything after an error."""
        lo, hi = self._ranges[flight.fragment]
        before: list[Array] = []
        try:
            combined = self._sums[flight.fragment].combined(flight.request.wait())
            anchor = self._descended(lo, hi, combined)
            agreed(self.comm, lambda: self._write(flight, anchor, before))
        except BaseException:
            if flight.kept is not None:
                self._sums[flight.fragment].restore(flight.kept)  # the parameters contain the change, and the next sum includes it
            if flight.of_state:
                self._flights.insert(0, flight)
            if before:
                self._anchor[lo:hi], self._base[lo:hi] = before[1:]
                self._vector.write(lo, hi, before[0])
            raise
        self.sums += 1

    def _descended(self, lo: int, hi: int, combined: SparseStream | Array) -> Array:
        anchor = self._anchor[lo:hi].copy()
        rate = anchor.dtype.type(self.outer_lr)
        if isinstance(combined, SparseStream) and not combined.is_dense:
            anchor[combined.indices] -= rate * combined.values
        else:
            anchor -= rate * (combined.to_dense() if isinstance(combined, SparseStream) else combined)
        return anchor

    def _write(self, flight: Flight, anchor: Array, before: list[Array]) -> None:
        """Set the parameters to the anchor plus the changes of this rank since the sum started.

        The previous values are appended to ``before``.
        """
        lo, hi = self._ranges[flight.fragment]
        now = self._vector.read(lo, hi)
        since = now - flight.then if flight.behind else None
        values = anchor if since is None else anchor + since
        before += [now, self._anchor[lo:hi].copy(), self._base[lo:hi].copy()]
        self._vector.write(lo, hi, values)
        if self._base is not self._anchor:
            written = self._vector.read(lo, hi)
            self._base[lo:hi] = written if since is None else written - since
        self._anchor[lo:hi] = anchor


@dataclass(eq=False)
class Flight:
    """A sum of the changes of one fragment that has started and is not applied yet."""

    fragment: int
    due: int  # the step after which it is applied
    behind: bool = True  # whether steps are made before it is applied
    then: Any = None  # the parameters when it started
    change: Any = None
    kept: Any = None  # the state of the ChangeSum before the sum
    request: Any = None
    of_state: bool = False  # whether it was restored from a state, which contains the mean

    def state(self) -> dict[str, Any]:
        mean: SparseStream = self.request.wait()
        entries = {"dense": mean.to_dense()} if mean.is_dense else {"indices": mean.indices.astype(np.int64), "values": mean.values.copy()}
        return {"fragment": self.fragment, "due": self.due, "then": self.then.copy(), **entries}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Flight:
        size = len(state["then"])
        if "dense" in state:
            mean = SparseStream.from_dense(np.asarray(state["dense"]))
        else:
            mean = SparseStream(np.asarray(state["indices"]), np.asarray(state["values"]), size)
        then = np.array(state["then"])
        return cls(int(state["fragment"]), int(state["due"]), then=then, request=Arrived(lambda: mean), of_state=True)


@dataclass
class Arrived:
    """A request that is done where it is waited for."""

    result: Any

    def test(self) -> None:
        pass

    def wait(self) -> SparseStream:
        mean: SparseStream = self.result()
        return mean


@dataclass
class _Failed:
    """The request of an operation that has already failed."""

    error: Exception

    def test(self) -> None:
        pass

    def wait(self) -> Any:
        raise self.error


def _check_alike(settings: Sequence[Mapping[str, str]]) -> None:
    for name, value in settings[0].items():
        for rank, others in enumerate(settings):
            if others.get(name) != value:
                raise MismatchError(f"the ranks differ: {name} is {value} on rank 0, and {others.get(name)} on rank {rank}")
