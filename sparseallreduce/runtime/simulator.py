"""P ranks in one process, on a virtual alpha-beta network: for tests, for studies of scaling, and for machines one does not have."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent, common_error
from sparseallreduce.algorithms.allreduce import allreduce, make_call
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.steps import (
    Clock,
    DenseAllgather,
    DenseAllreduce,
    Exchange,
    Payload,
    Recv,
    RecvAny,
    Send,
    Share,
    Shift,
    Step,
)
from sparseallreduce.errors import DeadlockError, StreamError
from sparseallreduce.streams import wire
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction, divided
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Network", "Simulation", "run", "same_bits", "simulate"]

Chooser = Callable[[int], int]


class Network(NamedTuple):
    """The alpha-beta model (thesis section 3.1.1): a message of L bytes takes ``latency + L / bandwidth``.

    Every rank sends one message at a time and receives one at a time, both at once.
    """

    latency: float = 1e-6  # alpha, seconds
    bandwidth: float = 12.5e9  # 1 / beta, bytes a second
    gamma: float = 0.0  # seconds for each entry that a reduction reads; the thesis leaves computation out


@dataclass
class Simulation:
    """What a simulated operation did; arrays have one element a rank."""

    outputs: list[Any]  # what each rank's schedule returned; streams of the same bits are one object
    time: float  # seconds until the last rank had finished
    times: NDArray[np.float64]  # seconds until each rank had finished
    bytes_sent: NDArray[np.int64]  # headers included
    bytes_received: NDArray[np.int64]
    messages: NDArray[np.int64]  # sent
    header_bytes: NDArray[np.int64]  # of the bytes sent


class SimulatedOperation(Protocol):
    """An operation of a reducer: see :class:`sparseallreduce.reducers.base.ReducerOperation`."""

    intent: Intent

    def run(self, rank: int, ranks: int) -> Generator[Step, Any, Any]:
        """Its schedule, behind the agreement."""

    def abandon(self) -> None:
        """It will not run."""


class SimulatedReducer(Protocol):
    """A reducer, as the simulator sees it."""

    reduction: Reduction

    def planned(self, accumulator: Any) -> SimulatedOperation:
        """An operation on an accumulator."""


def simulate(
    streams: Sequence[Any],
    algorithm: str | Sequence[SimulatedReducer] = "auto",
    network: Network | None = None,
    op: str | Operator = "sum",
    *,
    delivery: int | Chooser | None = None,
    through_wire: bool = False,
    **options: Any,
) -> Simulation:
    """The sparse allreduce of P streams, one a rank, on a virtual network.

    Parameters
    ----------
    streams : sequence of SparseStream
        What each of the P ranks contributes; with reducers, their accumulators.
    algorithm, op, **options
        As for :func:`~sparseallreduce.allreduce`; or for ``algorithm`` a sequence of P reducers, which take neither operator nor
        options, and whose state goes on from call to call.
    network : Network, optional
    delivery : int or callable, optional
        By default messages arrive when the network brings them. A seed lets ranks run and messages arrive in an arbitrary order
        (messages between two ranks stay in theirs); a callable is asked to pick one of n possibilities, for tests that search for
        a bad order.
    through_wire : bool
        Whether every message is turned to bytes and back, as over MPI.

    Returns
    -------
    Simulation

    Notes
    -----
    The agreement which starts an operation over MPI is not simulated: all streams are at hand.

    Examples
    --------
    >>> streams = [SparseStream([rank], [1.0], 8) for rank in range(4)]
    >>> out = simulate(streams, "ssar_recursive_doubling", Network(latency=1e-6, bandwidth=1e9))
    >>> out.outputs[3].to_dense()
    array([1., 1., 1., 1., 0., 0., 0., 0.])
    >>> out.messages
    array([2, 2, 2, 2])
    """
    network = network or Network()
    ranks = len(streams)
    if ranks == 0:
        raise StreamError("simulate takes a stream for each rank, and there is none")
    if not isinstance(algorithm, str):
        return _simulate_reducers(streams, algorithm, network, delivery, through_wire)
    calls = [make_call(stream, op, algorithm, options) for stream in streams]
    if any(intent.error is not None or intent.terms != calls[0][1].terms for _, intent in calls):
        raise common_error([intent.said() for _, intent in calls])
    entries = tuple(intent.entries for _, intent in calls)
    machine = Machine(network.latency, 1 / network.bandwidth, network.gamma, network.gamma / 8, 1 / network.bandwidth)
    results: _Results = OrderedDict()
    reductions = [_SharedReduction(call.op, call.switch_density, results, ranks) for call, _ in calls if call is not None]
    schedules = [
        allreduce(call, entries, rank, ranks, machine, reductions[rank]) for rank, (call, _) in enumerate(calls) if call is not None
    ]
    simulation = run(schedules, network, delivery=delivery, through_wire=through_wire, reductions=reductions)
    handed_over = {id(output): _handed_over(output, streams, reductions[0]) for output in simulation.outputs}
    simulation.outputs = [handed_over[id(output)] for output in simulation.outputs]
    return simulation


def _handed_over(output: SparseStream, streams: Sequence[SparseStream], reduction: Reduction) -> SparseStream:
    """What a user gets of a rank's result, on none of the arrays that came in, also by way of another rank."""
    if any(output.overlaps(stream) for stream in streams):
        output = reduction.leave(output.copy())
    return divided(output, len(streams)) if reduction.op.is_mean else output


def _simulate_reducers(
    accumulators: Sequence[Any], reducers: Sequence[SimulatedReducer], network: Network, delivery: int | Chooser | None, through_wire: bool
) -> Simulation:
    if len(accumulators) != len(reducers):
        raise StreamError(f"simulate takes a reducer for each rank: {len(accumulators)} accumulators came with {len(reducers)} reducers")
    operations = [reducer.planned(accumulator) for reducer, accumulator in zip(reducers, accumulators)]
    if any(operation.intent.error is not None or operation.intent.terms != operations[0].intent.terms for operation in operations):
        for operation in operations:
            operation.abandon()
        raise common_error([operation.intent.said() for operation in operations])
    schedules = [operation.run(rank, len(operations)) for rank, operation in enumerate(operations)]
    reductions = [reducer.reduction for reducer in reducers]
    try:
        return run(schedules, network, delivery=delivery, through_wire=through_wire, reductions=reductions)
    finally:
        for operation in operations:
            operation.abandon()


def run(
    schedules: Sequence[Generator[Step, Any, Any]],
    network: Network | None = None,
    *,
    delivery: int | Chooser | None = None,
    through_wire: bool = False,
    reductions: Sequence[Reduction] = (),
) -> Simulation:
    """Drive one schedule a rank to its end; ``reductions`` are those whose work the network's gamma turns into time.

    Raises
    ------
    DeadlockError
        If every unfinished rank waits for a message which nobody has sent, or if messages are left over at the end.
    """
    world = _World(schedules, network or Network(), through_wire, reductions)
    if delivery is None:
        world.run_by_time()
    else:
        world.run_in_any_order(random.Random(delivery).randrange if isinstance(delivery, int) else delivery)
    return world.report()


def same_bits(first: SparseStream, second: SparseStream) -> bool:
    """Whether two streams have the same form and hold the same bytes."""
    if first is second:
        return True
    if (first.is_dense, first.dtype, first.size, first.lo, first.hi) != (second.is_dense, second.dtype, second.size, second.lo, second.hi):
        return False
    parts = zip(_arrays(first), _arrays(second))
    return all(a is b or (a is not None and b is not None and _equal_bytes(a, b)) for a, b in parts)


def _arrays(stream: SparseStream) -> tuple[NDArray[Any] | None, ...]:
    return stream._indices, stream._stored, stream._present


def _equal_bytes(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


# The two operands, kept so that no other object takes their ids, the result, and the work that it took.
_Results = OrderedDict[tuple[int, int], tuple[SparseStream, SparseStream, SparseStream, int]]


class _SharedReduction(Reduction):
    """A reduction that the ranks of a simulation share the latest results of.

    In recursive doubling or after an allgather many ranks reduce the same two streams. Here only the first of them does, and the
    others get the same object, so that P results of many megabytes fit into memory.
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
            _, _, result, work = self._results[key]
            self.work += work
            return result
        before = self.work
        result = self.freeze(super().pair(first, second))
        self._results[key] = first, second, result, self.work - before
        if len(self._results) > self._capacity:
            self._results.popitem(last=False)
        return result


def _is_own(stream: SparseStream) -> bool:
    """Whether the stream may be changed in place by the rank that holds it, which is then the only one."""
    return stream.is_dense and bool(stream._stored.flags.writeable)


class _Rank:
    """One simulated rank: its schedule, with those it calls on top, and what it waits for."""

    def __init__(self, schedule: Generator[Step, Any, Any]) -> None:
        self.stack: list[Any] = [schedule]
        self.waits_for: Step | None = None
        self.value: Any = None  # what the schedule is resumed with
        self.inbox: dict[int, deque[tuple[SparseStream, ...] | bytes]] = {}
        self.clock = 0.0
        self.port_free = 0.0  # when the next message can leave
        self.leaving: deque[tuple[float, int, str, Any]] = deque()  # heads of messages, in the order in which they leave
        self.arrival_free = 0.0  # when the next message can begin to arrive
        self.output: Any = None
        self.done = False
        self.work = 0


class _World:
    def __init__(
        self, schedules: Sequence[Generator[Step, Any, Any]], network: Network, through_wire: bool, reductions: Sequence[Reduction]
    ) -> None:
        self.ranks = [_Rank(schedule) for schedule in schedules]
        for rank, reduction in zip(self.ranks, reductions):
            rank.work = reduction.work
        self.network = network
        self.through_wire = through_wire
        self.reductions = reductions
        self.numbers = count()
        self.events: list[tuple[float, int, str, Any]] = []
        self.in_flight: dict[tuple[int, int], deque[Any]] = {}
        self.by_time = True
        self.first_output: SparseStream | None = None
        self.bytes_sent, self.bytes_received, self.messages, self.header_bytes = np.zeros((4, len(schedules)), np.int64)

    def run_by_time(self) -> None:
        for rank in range(len(self.ranks)):
            self._at(0.0, "resume", rank)
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind == "resume":
                self.ranks[what].clock = max(self.ranks[what].clock, now)
                self._resume(what)
            elif kind == "head":  # the first byte is at the receiver, whose port may be busy
                source, dest, payload, nbytes = what
                leaving = self.ranks[source].leaving
                leaving.popleft()
                if leaving:
                    heapq.heappush(self.events, leaving[0])
                receiver = self.ranks[dest]
                receiver.arrival_free = max(now, receiver.arrival_free) + nbytes / self.network.bandwidth
                self._at(receiver.arrival_free, "deliver", (source, dest, payload))
            else:
                source, dest, payload = what
                if self._deliver(source, dest, payload):
                    self._at(now, "resume", dest)
        self._check_end()

    def run_in_any_order(self, pick: Chooser) -> None:
        self.by_time = False
        runnable = list(range(len(self.ranks)))
        while runnable or self.in_flight:
            pairs = list(self.in_flight)
            choice = pick(len(runnable) + len(pairs))
            if choice < len(runnable):
                self._resume(runnable.pop(choice))
                continue
            source, dest = pair = pairs[choice - len(runnable)]
            payload = self.in_flight[pair].popleft()
            if not self.in_flight[pair]:
                del self.in_flight[pair]
            if self._deliver(source, dest, payload):
                runnable.append(dest)
        self._check_end()

    def report(self) -> Simulation:
        times = np.array([rank.clock for rank in self.ranks])
        return Simulation(
            [rank.output for rank in self.ranks],
            float(times.max()),
            times,
            self.bytes_sent,
            self.bytes_received,
            self.messages,
            self.header_bytes,
        )

    def _at(self, time: float, kind: str, what: Any) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), kind, what))

    def _resume(self, number: int) -> None:
        """Run a rank until it waits."""
        rank = self.ranks[number]
        value, rank.value = rank.value, None
        while rank.stack:
            try:
                step = rank.stack[-1].send(value)
            except StopIteration as stop:
                rank.stack.pop()
                value = stop.value
                self._charge(number)
                continue
            self._charge(number)
            value = None
            if isinstance(step, Send):
                self._send(number, step.dest, step.stream)
            elif isinstance(step, Clock):
                value = rank.clock
            elif isinstance(step, DenseAllreduce):
                rank.stack.append(rabenseifner(step.stream, number, len(self.ranks), Reduction(step.op)))
            elif isinstance(step, DenseAllgather):
                rank.stack.append(join_blocks(step.stream, number, len(self.ranks), Reduction(step.op)))
            elif isinstance(step, Share):
                rank.stack.append(_share(step, number, len(self.ranks)))
            else:
                if isinstance(step, Exchange):
                    self._send(number, step.partner, step.stream)
                elif isinstance(step, Shift):
                    self._send(number, step.dest, step.stream)
                rank.waits_for = step
                if not self._satisfy(rank):
                    return
                value, rank.value = rank.value, None
        rank.output, rank.done = self._once(value), True

    def _once(self, output: Any) -> Any:
        """``output``, as the object that an earlier rank returned if it has the same bits: P large results may fit no memory."""
        if not isinstance(output, SparseStream):
            return output
        if self.first_output is None:
            self.first_output = output
        return self.first_output if same_bits(self.first_output, output) else output

    def _charge(self, number: int) -> None:
        if self.reductions:
            work = self.reductions[number].work
            self.ranks[number].clock += (work - self.ranks[number].work) * self.network.gamma
            self.ranks[number].work = work

    def _send(self, source: int, dest: int, payload: Payload | bytes) -> None:
        streams = payload if isinstance(payload, tuple | bytes) else (payload,)
        if isinstance(streams, bytes):
            nbytes, frames = len(streams), 0
        else:
            nbytes, frames = wire.message_bytes(streams), len(streams)
            for stream in streams:
                Reduction.freeze(stream)
            if self.through_wire:
                message = wire.encode(streams)
                assert len(message) == nbytes
                streams = tuple(wire.decode(message))
        self.bytes_sent[source] += nbytes
        self.bytes_received[dest] += nbytes
        self.messages[source] += 1
        self.header_bytes[source] += frames * wire.HEADER_BYTES
        sender = self.ranks[source]
        if self.by_time:
            start = max(sender.clock, sender.port_free)
            sender.port_free = start + self.network.latency + nbytes / self.network.bandwidth
            # Only the next message of each rank waits among the events, which are few then however many messages there are.
            sender.leaving.append((start + self.network.latency, next(self.numbers), "head", (source, dest, streams, nbytes)))
            if len(sender.leaving) == 1:
                heapq.heappush(self.events, sender.leaving[0])
        else:
            self.in_flight.setdefault((source, dest), deque()).append(streams)

    def _deliver(self, source: int, dest: int, payload: Any) -> bool:
        """Put a message into the inbox; whether that lets the rank go on."""
        rank = self.ranks[dest]
        rank.inbox.setdefault(source, deque()).append(payload)
        return rank.waits_for is not None and self._satisfy(rank)

    def _satisfy(self, rank: _Rank) -> bool:
        """Take what the rank waits for out of its inbox, if it is there."""
        step = rank.waits_for
        if isinstance(step, RecvAny):
            source = next((source for source in rank.inbox if source in step.sources), None)
        else:
            assert isinstance(step, Recv | Exchange | Shift)
            source = step.partner if isinstance(step, Exchange) else step.source
        if source is None or source not in rank.inbox:
            return False
        streams = rank.inbox[source].popleft()
        if not rank.inbox[source]:
            del rank.inbox[source]
        single = isinstance(streams, tuple) and not (isinstance(step, Exchange | Shift) and isinstance(step.stream, tuple))
        message = streams[0] if single else streams
        rank.value = (source, message) if isinstance(step, RecvAny) else message
        rank.waits_for = None
        return True

    def _check_end(self) -> None:
        stuck = [f"rank {number} waits in {_described(rank.waits_for)}" for number, rank in enumerate(self.ranks) if not rank.done]
        if stuck:
            shown = "; ".join(stuck[:16]) + (f"; ... ({len(stuck)} ranks in all)" if len(stuck) > 16 else "")
            raise DeadlockError(f"no message is on its way, but {shown}")
        left = [
            f"{len(queue)} from rank {source} to rank {dest}"
            for dest, rank in enumerate(self.ranks)
            for source, queue in rank.inbox.items()
        ]
        if left:
            raise DeadlockError(f"messages were sent that nobody received: {'; '.join(left[:16])}")


def _described(step: Step | None) -> str:
    if isinstance(step, Recv | Shift):
        return f"{type(step).__name__}(source={step.source})"
    if isinstance(step, Exchange):
        return f"Exchange(partner={step.partner})"
    if isinstance(step, RecvAny):
        return f"RecvAny(sources={sorted(step.sources)})"
    return "no step"


def _share(step: Share, rank: int, ranks: int) -> Any:
    """The records and payloads of all ranks, by dissemination; where payloads differ in length, each goes with its own."""
    held = [step.record + step.payload]
    while len(held) < ranks:
        distance = len(held)
        outgoing = held[: ranks - distance]
        lengths = b"".join(len(piece).to_bytes(4, "little") for piece in outgoing) if step.room else b""
        message = lengths + b"".join(outgoing)
        arrived: bytes = yield Shift((rank - distance) % ranks, message, (rank + distance) % ranks)  # type: ignore[arg-type]
        at = len(lengths)
        for position in range(0, len(lengths), 4) if step.room else range(0, len(arrived), len(step.record)):
            length = int.from_bytes(arrived[position : position + 4], "little") if step.room else len(step.record)
            held.append(arrived[at : at + length])
            at += length
    return held[ranks - rank :] + held[: ranks - rank]
