"""The engine that carries schedules out over MPI: one object an operation, moved on by whoever calls :func:`progress`.

This is what LibNBC is to the thesis (section 4.1.5): a collective is a schedule, and one small engine executes any schedule. Every
operation in flight on this rank is moved on whenever one of them is tested or waited for, so that operations may be completed in
any order, a different one on each rank.

Messages of an operation carry its number as tag, on a duplicate of the user's communicator. Collectives of the MPI library run on
a second duplicate, each operation's after those of all operations started before it, because MPI asks that all ranks start the
collectives of a communicator in the same order. All are of the non-blocking kind: a rank that waits inside MPI burns the core that
the others need where ranks outnumber cores (MPICH's Allgatherv of 64 MiB took 8.5 s with 8 ranks on 2 cores, the same polled
0.12 s), and is no faster where they do not.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Collection, Generator
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any, TypeGuard

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.steps import (
    Clock,
    DenseAllgather,
    DenseAllreduce,
    Exchange,
    Recv,
    RecvAny,
    Send,
    Share,
    Shift,
    Step,
)
from sparseallreduce.errors import SparseAllreduceError, WireError
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams import memory, wire
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "INLINE_BYTES",
    "PIECE_BYTES",
    "Channel",
    "Operation",
    "co_located",
    "complete",
    "finish",
    "progress",
    "progress_thread",
    "takes_collective",
    "wait",
]

# The parts of a stream go out as they lie in memory, behind an envelope of the headers, and arrive in arrays of their own: for
# 1.3 MB between two ranks of one host that took a quarter of the time of a message packed and unpacked. Short ones are packed.
INLINE_BYTES = 1 << 14
PIECE_BYTES = 1 << 30  # a part goes out in pieces of this size, since MPI counts in 32 bits before version 4
_ABORT = b"SARX"  # in place of a stream: the sender has given up, and says why
_COUNT_LIMIT = 2**31 - 1
_SPINS = 64  # polls, of about 3 microseconds each, before a rank with a core of its own offers it to other programs
_DIRECT_RANKS = 16  # up to which every rank sends its dense block to every other
_MPI_TYPES = {np.dtype(name) for name in ("float32", "float64", "int32", "int64")}

Bytes = NDArray[np.uint8]

_lock = threading.RLock()
_active: list[Operation] = []
_channels: list[Channel] = []


@dataclass
class _Arrival:
    """A message whose headers are here, and whose parts are on their way."""

    headers: list[wire.Header]
    parts: list[Bytes]
    requests: list[MPI.Request]

    def complete(self) -> bool:
        """Whether all parts are here.

        Raises
        ------
        WireError
            If one came shorter than its header says.
        """
        if not self.requests:
            return True
        statuses = [MPI.Status() for _ in self.requests]
        if not MPI.Request.Testall(self.requests, statuses):
            return False
        came, announced = sum(status.Get_count(MPI.BYTE) for status in statuses), sum(map(len, self.parts))
        if came != announced:
            raise WireError(f"a message announces a payload of {announced} bytes, but {came} came: it was truncated")
        return True


class Channel:
    """What the library keeps for a communicator of the user's: two duplicates, the operations in flight, the machine's constants."""

    def __init__(self, messages: MPI.Intracomm, collectives: MPI.Intracomm) -> None:
        self.messages = messages
        self.collectives = collectives
        self.rank = messages.rank
        self.ranks = messages.size
        self.machine: Machine | None = None
        self.sound = True  # whether no collective on the second duplicate was left unfinished by a rank that gave up
        self.crowded = False  # whether ranks outnumber cores on this host
        self.tag_limit = min(messages.Get_attr(MPI.TAG_UB) or 32767, 2**31 - 1)
        self.number = 0
        self.in_flight: list[Operation] = []
        _channels.append(self)

    def next_tag(self) -> int:
        """A tag which no operation in flight has."""
        self.number = self.number % self.tag_limit + 1
        return self.number

    def free(self) -> None:
        """Give the duplicates back to MPI; collective."""
        _channels.remove(self)
        self.messages.Free()
        self.collectives.Free()


class Operation:
    """One schedule on its way."""

    def __init__(
        self,
        channel: Channel,
        schedule: Generator[Step, Any, Any],
        entries: int = 0,
        counted: bool = True,
        collective: bool = True,
    ) -> None:
        self.channel = channel
        self.traces = traces if counted else []
        self.stack: list[Any] = [schedule]
        self.entries = entries
        self.tag = channel.next_tag()
        self.step: Step | None = None  # what the schedule waits for
        self.requests: list[MPI.Request] | None = None  # of a collective
        self.received: Any = None  # what the collective fills
        self.envelope: tuple[MPI.Request, Bytes, int] | None = None  # being received
        self.arriving: dict[int, deque[_Arrival]] = {}
        self.sends: list[tuple[MPI.Request, Bytes]] = []
        self.shared = False
        self.collective = collective  # whether other ranks may be inside a collective of MPI when this one fails
        self.native = True  # whether collectives of MPI may be used
        self.result: Any = None
        self.error: Exception | None = None
        self.ended = False  # the schedule
        self.done = False  # and its messages are out
        with _lock:
            _active.append(self)
            channel.in_flight.append(self)
            self.advance()

    def advance(self) -> None:
        """Move on as far as finished messages and collectives allow."""
        if self.done:
            return
        if self.ended:
            self._flush()
            return
        try:
            self._run()
        except Exception as error:
            self._give_up(error)

    def _run(self) -> None:
        value: Any = None
        if self.step is not None:
            ready, value = self._ready()
            if not ready:
                return
        while self.stack:
            try:
                step = self.stack[-1].send(value)
            except StopIteration as stop:
                self.stack.pop()
                value = stop.value
                continue
            value = None
            if isinstance(step, Send):
                self._send(step.dest, step.stream)
            elif isinstance(step, Clock):
                value = perf_counter()
            elif isinstance(step, DenseAllreduce) and not self._native(step):
                self.stack.append(rabenseifner(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op)))
            elif isinstance(step, DenseAllgather) and not self._native(step):
                self.stack.append(join_blocks(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op)))
            else:
                if isinstance(step, Exchange):
                    self._send(step.partner, step.stream)
                elif isinstance(step, Shift):
                    self._send(step.dest, step.stream)
                self.step = step
                for counts in self.traces:
                    counts.rounds += 1
                ready, value = self._ready()
                if not ready:
                    return
        self.result = value
        self._close()

    def _ready(self) -> tuple[bool, Any]:
        """Whether the step that the schedule waits for is complete, and its result."""
        step = self.step
        if isinstance(step, Share | DenseAllreduce | DenseAllgather):
            if self.requests is None:
                self.requests = self._start_collective(step)
            if self.requests is None or not MPI.Request.Testall(self.requests):
                self._probe()  # a rank that has given up will not take part
                return False, None
            value, self.requests, self.received = self._collected(step), None, None
        else:
            message = self._message(step)
            if message is None:
                return False, None
            source, streams = message
            if isinstance(step, RecvAny):
                value = source, streams[0]
            else:
                value = tuple(streams) if isinstance(step, Exchange | Shift) and isinstance(step.stream, tuple) else streams[0]
        self.step = None
        return True, value

    def _message(self, step: Step | None) -> tuple[int, list[SparseStream]] | None:
        """The next message from where ``step`` expects one, if it is there."""
        if isinstance(step, RecvAny):
            wanted = step.sources
        else:
            assert isinstance(step, Recv | Exchange | Shift)
            wanted = frozenset((step.partner if isinstance(step, Exchange) else step.source,))
        self._probe()
        for source in wanted & self.arriving.keys():
            arrivals = self.arriving[source]
            if arrivals and arrivals[0].complete():
                arrival = arrivals.popleft()
                for counts in self.traces:
                    counts.bytes_received += wire.HEADER_BYTES * len(arrival.headers) + sum(map(len, arrival.parts))
                return source, wire.join(arrival.headers, arrival.parts)
        return None

    def _probe(self) -> None:
        """Take in whatever has arrived for this operation, and raise if any rank of it has given up."""
        comm, status = self.channel.messages, MPI.Status()
        while True:
            if self.envelope is None:
                matched = comm.Improbe(MPI.ANY_SOURCE, self.tag, status)
                if matched is None:
                    return
                envelope = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                self.envelope = matched.Irecv([envelope, MPI.BYTE]), envelope, status.Get_source()
            # Until it is known what follows this envelope, its parts must not be taken for envelopes.
            request, envelope, source = self.envelope
            if not request.Test():
                return
            self.envelope = None
            if envelope[:4].tobytes() == _ABORT:
                raise common_error([json.loads(envelope[4:].tobytes())])
            self.arriving.setdefault(source, deque()).append(self._arrival(envelope, source))

    def _arrival(self, envelope: Bytes, source: int) -> _Arrival:
        """The message whose headers have come, its parts inside or on their way."""
        headers = wire.read_headers(envelope)
        at = wire.HEADER_BYTES * len(headers)
        lengths = wire.part_lengths(headers)
        if at < len(envelope) or not any(lengths):
            if len(envelope) - at != sum(lengths):
                raise WireError(f"a message announces a payload of {sum(lengths)} bytes, but {len(envelope) - at} follow: it was truncated")
            ends = np.cumsum([at, *lengths]).tolist()
            return _Arrival(headers, [envelope[start:end] for start, end in pairwise(ends)], [])
        comm = self.channel.messages
        parts = [memory.empty(length, np.uint8) for length in lengths]
        requests = [comm.Irecv([piece, MPI.BYTE], source, self.tag) for part in parts for piece in _pieces(part)]
        return _Arrival(headers, parts, requests)

    def _send(self, dest: int, payload: SparseStream | tuple[SparseStream, ...]) -> None:
        streams = payload if isinstance(payload, tuple) else (payload,)
        for stream in streams:
            Reduction.freeze(stream)
        envelope, parts = wire.enclose(streams)
        nbytes = len(envelope) + sum(map(len, parts))
        for counts in self.traces:
            counts.bytes_sent += nbytes
            counts.header_bytes += len(envelope)
            counts.messages += 1
        messages = [envelope, *(piece for part in parts for piece in _pieces(part))]
        if nbytes - len(envelope) <= INLINE_BYTES:
            messages = [np.concatenate(messages)]
        comm = self.channel.messages
        self.sends += [(comm.Isend([message, MPI.BYTE], dest, self.tag), message) for message in messages]

    def _native(self, step: DenseAllreduce | DenseAllgather) -> bool:
        """Whether MPI has this collective: any dtype is gathered, a sum of what MPI has a type for is reduced."""
        stream = step.stream
        values = stream.size * (stream.width or 1)
        if not self.native or stream._present is not None or values > _COUNT_LIMIT:
            return False
        return isinstance(step, DenseAllgather) or (step.op.is_sum and stream.dtype in _MPI_TYPES)

    def _start_collective(self, step: Share | DenseAllreduce | DenseAllgather) -> list[MPI.Request] | None:
        """The requests of the collective, or None while it is not this operation's turn."""
        channel = self.channel
        if self._is_direct(step):
            return self._gather_directly(step)
        if isinstance(step, Share):
            return self._share(step)
        if not channel.sound:
            raise SparseAllreduceError("an operation that was in flight before this one failed inside a collective: start it again")
        if channel.in_flight[0] is not self:
            return None
        array = step.stream._stored
        if isinstance(step, DenseAllreduce):
            self.received = memory.empty(array.shape, array.dtype)
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            return [channel.collectives.Iallreduce(array, self.received, MPI.SUM)]
        raw, blocks = self._raw_blocks(step)
        lengths, places = [len(block) for block in blocks], [lo * (step.stream.width or 1) for lo, _ in step.ranges]
        return [channel.collectives.Iallgatherv(raw, [self.received.reshape(-1).view(raw.dtype), lengths, places, _typed(raw)])]

    def _is_direct(self, step: Step) -> TypeGuard[DenseAllgather]:
        return isinstance(step, DenseAllgather) and self.channel.ranks <= _DIRECT_RANKS

    def _share(self, step: Share) -> list[MPI.Request]:
        channel = self.channel
        for counts in self.traces:
            counts.agreement_bytes += len(step.record) * (channel.ranks - 1)
        first, self.shared = not self.shared, True
        record = np.frombuffer(step.record + bytes([channel.sound]), np.uint8)
        self.received = np.empty((channel.ranks, len(record)), np.uint8)
        if first:  # goes out as the operation starts, in the order of the calls, which is that of all ranks
            return [channel.messages.Iallgather([record, MPI.BYTE], [self.received, MPI.BYTE])]
        return self._exchange(record, list(self.received))

    def _gather_directly(self, step: DenseAllgather) -> list[MPI.Request]:
        """Blocks sent straight from and to their places: half the time of the MPI libraries' rings in shared memory."""
        return self._exchange(*self._raw_blocks(step))

    def _exchange(self, ours: NDArray[Any], places: list[NDArray[Any]]) -> list[MPI.Request]:
        """Send our array to all ranks, and receive theirs in their places."""
        comm, rank = self.channel.collectives, self.channel.rank
        places[rank][:] = ours
        others = [(rank + distance) % self.channel.ranks for distance in range(1, self.channel.ranks)]
        requests = [comm.Irecv(places[other], other, self.tag) for other in others if len(places[other])]
        return requests + [comm.Isend(ours, other, self.tag) for other in others if len(ours)]

    def _raw_blocks(self, step: DenseAllgather) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Our block, and the places of all blocks in the array to be filled, as unsigned integers that any MPI knows."""
        array, width = step.stream._stored, step.stream.width or 1
        self.received = memory.empty((step.stream.size, *array.shape[1:]), array.dtype)
        self._count_collective(self.received.nbytes - array.nbytes, 1)
        unsigned = np.dtype(f"u{array.itemsize}")
        places = self.received.reshape(-1).view(unsigned)
        return array.reshape(-1).view(unsigned), [places[lo * width : hi * width] for lo, hi in step.ranges]

    def _collected(self, step: Share | DenseAllreduce | DenseAllgather) -> Any:
        if isinstance(step, Share):
            self.native = self.native and bool(self.received[:, -1].all())
            return [row[:-1].tobytes() for row in self.received]
        return SparseStream._dense_form(self.received, step.stream.size, density=step.stream.switch_density)

    def _count_collective(self, nbytes: int, passes: int) -> None:
        for counts in self.traces:
            counts.bytes_sent += nbytes
            counts.bytes_received += nbytes
            counts.messages += passes * (self.channel.ranks - 1).bit_length()

    def _give_up(self, error: Exception) -> None:
        """End the operation by an error, on all ranks of it if it is not known there."""
        self.error = error
        agreed = getattr(error, "on_all_ranks", False)
        waiting = isinstance(self.step, DenseAllreduce | DenseAllgather) and not self._is_direct(self.step) and self.requests is not None
        if waiting or (not agreed and self.collective):
            self.channel.sound = False  # of which the agreement of the next operation tells the other ranks
        if not agreed:
            said = {"error": type(error).__name__[:100], "text": f"rank {self.channel.rank} gave up: {str(error)[:400]}"}
            self.error = common_error([said])
            self.error.__cause__ = error
            message = np.frombuffer(_ABORT + json.dumps(said, ensure_ascii=False).encode(), np.uint8)
            for dest in range(self.channel.ranks):
                if dest != self.channel.rank:
                    self.sends.append((self.channel.messages.Isend([message, MPI.BYTE], dest, self.tag), message))
        self._leave()
        for generator in reversed(self.stack):
            generator.close()
        self.stack.clear()
        self._close()

    def _close(self) -> None:
        """The schedule has ended, and with it the operation once its last messages are out."""
        self.channel.in_flight.remove(self)
        self.ended = True
        for counts in self.traces:
            counts.operations += 1
            counts.entries_in += self.entries
            counts.entries_out += self.result.stored if isinstance(self.result, SparseStream) else 0
        self._flush()

    def _flush(self) -> None:
        # Large messages leave only while this rank calls MPI, so that an operation is not done before they are out.
        self.sends = [(request, piece) for request, piece in self.sends if not request.Test()]
        if self.sends:
            try:
                self._probe()
            except Exception:
                self._leave()  # we have our result; who gave up takes no more of our messages
        if not self.sends:
            self.done = True
            _active.remove(self)

    def _leave(self) -> None:
        """Wait no longer for messages under way, which nobody may receive any more, but keep their memory."""
        _farewells.extend([*self.sends, (self.requests, self.received), self.envelope, self.arriving])
        self.sends, self.requests, self.received, self.envelope, self.arriving = [], None, None, None, {}


_farewells: list[Any] = []


def _pieces(part: Bytes) -> list[Bytes]:
    return [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]


def takes_collective(channel: Channel, steps: Collection[type]) -> bool:
    """Whether an algorithm that takes these dense steps enters collectives of MPI."""
    return DenseAllreduce in steps or (DenseAllgather in steps and channel.ranks > _DIRECT_RANKS)


def _typed(array: NDArray[Any]) -> MPI.Datatype:
    return MPI.Datatype.fromcode(array.dtype.char)


def progress() -> None:
    """Move every operation in flight on this rank as far as it goes now."""
    with _lock:
        for operation in tuple(_active):
            operation.advance()


def finish(operation: Operation) -> None:
    """Move on until ``operation`` is done."""
    rounds = 0
    while not operation.done:
        progress()
        rounds = _rest(rounds)


def complete(channel: Channel, schedule: Generator[Step, Any, Any]) -> Any:
    """The result of a schedule of the library's own, waited for; no trace counts it."""
    operation = Operation(channel, schedule, counted=False)
    finish(operation)
    if operation.error is not None:
        raise operation.error
    return operation.result


def wait(request: MPI.Request) -> None:
    """Wait for a request of MPI, and move the operations in flight on meanwhile."""
    rounds = 0
    while not request.Test():
        progress()
        rounds = _rest(rounds)


def _rest(rounds: int) -> int:
    """Between two rounds of polling: leave the core to others after some, or at once where ranks share cores."""
    if rounds >= _SPINS or any(channel.crowded for channel in _channels):
        os.sched_yield()
    return rounds + 1


def co_located(ranks: int) -> Generator[Step, Any, int]:
    """The ranks on this host."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
    return list((yield Share(host))).count(host) if ranks > 1 else 1


class _ProgressThread:
    """A thread that moves operations on while the program computes; it runs while there are any, and starts again when asked."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sparseallreduce-progress", daemon=True)
            self._thread.start()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            progress()
            with _lock:
                if not _active:
                    self._wanted.clear()
            sleep(20e-6)  # leaves the interpreter to the program between two rounds


progress_thread = _ProgressThread()
