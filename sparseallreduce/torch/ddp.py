"""A communication hook for PyTorch's DistributedDataParallel, which sums its buckets over MPI with a sparse reducer."""

# No "from __future__ import annotations": DistributedDataParallel compares the annotations of a hook with its own, as objects.
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from sparseallreduce.errors import AlgorithmError, CheckpointError, MismatchError
from sparseallreduce.reducers import Reducer
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.launching import latest, leave
from sparseallreduce.runtime.objects import mark_known
from sparseallreduce.torch import header, state
from sparseallreduce.torch.buckets import Bucket, Member, arranged, grouped
from sparseallreduce.torch.devices import Order, future_for, in_order
from sparseallreduce.torch.flight import Flight, translated
from sparseallreduce.torch.recipes import recipe_of

__all__ = ["CommHook", "comm_hook"]


def comm_hook(
    reducer: str | Callable[[int, int], Reducer] = "oktopk",
    comm: Any = None,
    *,
    density: float | Callable[[int], float] = 0.01,
    dense: bool | None = None,
    scaler: Any = None,
    **options: Any,
) -> "CommHook":
    """Return a hook for ``DistributedDataParallel.register_comm_hook(None, hook)``.

    Parameters
    ----------
    reducer : str or callable
        "oktopk", "gtopk", "topk", "approximate-topk", "mstopk", "hitopk", "dense" or "auto"; or a callable that takes a size and a k and
        returns a reducer, such as ``sparseallreduce.GTopk``.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        The processes of DistributedDataParallel's process group. The default is ``MPI.COMM_WORLD``.
    density : float or callable
        The approximate share of a bucket's elements that a step sums, or a callable that returns it for the number of a step.
    dense : bool, optional
        Whether all elements of the gradients are summed. By default this holds for parameters with at most one dimension.
    scaler : torch.amp.GradScaler, optional
        The scaler of the loss. The residuals then hold unscaled gradients. If a gradient is infinite on any rank, all ranks skip the step
        and the residuals do not change, which takes a copy of the residuals.
    **options
        Options of the reducer, if it is given by name.

    Returns
    -------
    CommHook
        A hook for one model.

    Raises
    ------
    AlgorithmError
        If there is no such reducer or option.
    """
    if isinstance(reducer, str):
        recipe, rank = recipe_of(reducer), resolve(comm).rank

        def make(size: int, k: int) -> Reducer:
            return recipe.reducer_of(size, k, rank, **options)
    else:

        def make(size: int, k: int) -> Reducer:
            return reducer(size, k, **options)

    try:
        make(64, 8)
    except TypeError as error:
        raise AlgorithmError(str(error)) from None
    return CommHook(make, resolve(comm), density, dense, scaler, everything=reducer == "dense")


class _Ready(NamedTuple):
    """A bucket of DistributedDataParallel whose gradients are being summed."""

    future: Any
    buffer: torch.Tensor
    gradients: dict[torch.Tensor, torch.Tensor]  # by parameter, as views of the buffer
    own: list[Bucket]


class CommHook:
    """The hook that DistributedDataParallel calls for each bucket whose gradients have been computed.

    It starts the sum of the bucket at once. The call for the last bucket of a step waits for all sums and completes the futures of their
    buckets. If the buckets change, as they do after the first step, each residual stays with its parameter.

    Attributes
    ----------
    steps : int
        The number of steps made.
    """

    def __init__(
        self,
        make: Callable[[int, int], Reducer],
        comm: Any,
        density: float | Callable[[int], float],
        dense: bool | None,
        scaler: Any,
        everything: bool,
    ) -> None:
        self.comm = comm
        self.steps: int = 0
        self._make = make
        self._everything = everything
        self._scaler = scaler
        self._group: dict[str, Any] = {"density": density, "dense": dense, "params": []}
        self._members: dict[torch.Tensor, Member] = {}
        self._buckets: dict[tuple[int, ...], list[Bucket]] = {}  # by the indices of the parameters in DistributedDataParallel's bucket
        self._waiting = state.Waiting()
        self._flight: Flight | None = None
        self._ready: list[_Ready] = []
        self._before: dict[Bucket, dict[str, Any]] = {}
        self._infinite = False
        self._interrupt: BaseException | None = None  # an interrupt of this rank, raised at the end of the step
        self._order = Order()
        self.__name__ = self.__qualname__ = "comm_hook"  # DistributedDataParallel logs these names

    def __call__(self, _state: object, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the sum of a bucket, and return the future of its mean."""
        before = latest(self.comm)
        try:
            return self._start(bucket)
        except BaseException as error:
            if self._flight is not None:
                self._flight.leave(error)
            leave(self.comm, error, before)
            raise

    def _start(self, bucket: torch.distributed.GradBucket) -> Any:
        if not self._ready:
            self._begin()
        assert self._flight is not None
        flight, started, known = self._flight, self._flight.started, len(self._ready)
        try:
            self._ready.append(_ready_of(bucket))
            self._order = self._order.of([bucket.buffer()])
            with self._order:
                self._sum(flight, self._ready[-1])
        except BaseException as error:  # the other ranks continue the step to its last bucket
            if len(self._ready) == known:
                self._ready.append(_ready_of(bucket))
            self._leave(flight, started, self._ready[-1], error)
        ready = self._ready[-1]
        if bucket.is_last():
            interrupt, self._interrupt = self._interrupt, None
            with self._order:
                self._finish(interrupt)
        return ready.future

    def _leave(self, flight: Flight, started: int, ready: _Ready, error: BaseException) -> None:
        """Send an error to the other ranks in place of the sums of a bucket. An interrupt is raised at the end of the step."""
        parameters = list(ready.gradients)
        sums = len(grouped(self._members_of(parameters), _bytes_of(parameters), self._everything))
        flight.tell_rest(error, started + sums)
        leave(self.comm, error, 0)
        if flight.failure is None:
            flight.failure = translated(error)
            mark_known(self.comm, flight.failure)
        if not isinstance(error, Exception):
            self._interrupt = self._interrupt or error

    def _sum(self, flight: Flight, ready: _Ready) -> None:
        """Start the sums of a bucket of DistributedDataParallel."""
        if self._interrupt is not None:
            raise self._interrupt
        scale = self._scale()
        ready.own.extend(self._buckets_of(list(ready.gradients)))
        if self._scaler is not None:
            self._infinite |= not bool(torch.isfinite(ready.buffer).all())
        flight.buckets += ready.own
        for _ in ready.own:
            flight.start(lambda own: self._pack(own, ready.gradients, 1 / scale))
        flight.test()

    @in_order
    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and thresholds of this rank, for a run with the same number of ranks."""
        waiting = state.Waiting()
        waiting.residuals, waiting.reducers = dict(self._waiting.residuals), dict(self._waiting.reducers)
        waiting.take_from([each for own in self._buckets.values() for each in own], _unit)
        return {"ranks": self.comm.size, "rank": self.comm.rank, "steps": self.steps, **waiting.as_tensors()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that was saved by the same rank. Call it before the first step.

        Raises
        ------
        CheckpointError
            If the state was saved by another rank, or in a run with another number of ranks.
        AlgorithmError
            If a step has been made already.
        """
        if self._buckets:
            raise AlgorithmError("a state is loaded before the first step")
        ours = self.comm.rank, self.comm.size
        if (state_dict["rank"], state_dict["ranks"]) != ours:
            theirs = f"rank {state_dict['rank']} of {state_dict['ranks']}"
            raise CheckpointError(f"this state is of {theirs}, and this is rank {ours[0]} of {ours[1]}")
        self.steps = state_dict["steps"]
        self._waiting = state.Waiting.from_tensors(state_dict)

    def _begin(self) -> None:
        if self._flight is not None:  # of a backward pass that did not reach its last bucket
            self._flight.give_back()
        ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else self.comm.size
        self._flight = Flight(self.comm, [], self.steps, early=True)
        if ranks != self.comm.size:
            self._flight = None
            raise MismatchError(f"the process group has {ranks} ranks, and the communicator {self.comm.size}: both have to be the same")

    def _scale(self) -> float:
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def _buckets_of(self, parameters: list[torch.Tensor]) -> list[Bucket]:
        """Return the buckets for one of DistributedDataParallel's: one for the reducer, and one whose elements are all summed."""
        members = self._members_of(parameters)
        key = tuple(member.index for member in members)
        if key not in self._buckets:
            for other in [each for each in self._buckets if not set(each).isdisjoint(key)]:
                self._waiting.take_from(self._buckets.pop(other), _unit)
            own = arranged(sorted(members, key=lambda member: member.index), _bytes_of(parameters), self._make, self._everything)
            self._waiting.give_to(own, _unit)
            self._buckets[key] = own
        return self._buckets[key]

    def _members_of(self, parameters: list[torch.Tensor]) -> list[Member]:
        for parameter in parameters:
            if parameter not in self._members:
                self._members[parameter] = Member(len(self._members), parameter, self._group)
                self._group["params"].append(parameter)
        return [self._members[parameter] for parameter in parameters]

    def _pack(self, own: Bucket, gradients: dict[torch.Tensor, torch.Tensor], factor: float) -> None:
        if self._scaler is not None and own.feedback is not None:
            self._before[own] = own.feedback.state()
        given = [None if self._infinite else gradients[member.parameter] for member in own.members]
        own.fill(given, [factor] * len(given))

    def _finish(self, interrupt: BaseException | None) -> None:
        """Wait for the sums of all buckets, complete their futures, and raise an interrupt of this rank."""
        flight, ready, before, infinite = self._flight, self._ready, self._before, self._infinite
        assert flight is not None
        self._flight, self._ready, self._before, self._infinite = None, [], {}, False
        try:
            if self._scaler is not None and flight.has_failed():
                flight.give_up()
            infinite = self._scaler is not None and header.on_any_rank(self.comm, infinite)
            flight.wait()
            if flight.failure is not None:
                raise flight.failure
            scale = self._scale()
        except Exception as error:
            leave(self.comm, error, 0)
            flight.give_back()
            if interrupt is not None:
                raise interrupt from None
            for each in ready:
                each.future.set_exception(error)
            return
        for each in ready:
            if infinite:
                each.buffer.fill_(math.inf)
            else:
                _write(flight, each, scale)
        if infinite:
            for own, state_before in before.items():
                assert own.feedback is not None
                own.feedback.reducer = self._make(own.size, state_before["k"])
                own.feedback.restore(state_before)
        else:
            self.steps += 1
        for each in ready:
            each.future.set_result(each.buffer)


def _write(flight: Flight, ready: _Ready, scale: float) -> None:
    """Write the means into DistributedDataParallel's bucket."""
    for own in ready.own:
        own.take(flight.means[own])
        for member, part in own.parts():
            gradient = ready.gradients[member.parameter]
            gradient.copy_(own.flat[part].view(gradient.shape))
            if scale != 1:
                gradient.mul_(scale)


def _ready_of(bucket: torch.distributed.GradBucket) -> _Ready:
    gradients = dict(zip(bucket.parameters(), bucket.gradients()))
    return _Ready(future_for(bucket.buffer()), bucket.buffer(), gradients, [])


def _bytes_of(parameters: list[torch.Tensor]) -> int:
    """Return an upper bound on the bytes of the parameters' sum."""
    elements: int = sum(parameter.numel() for parameter in parameters)
    return max(1, 8 * elements)


def _unit(_member: Member) -> float:
    return 1.0
