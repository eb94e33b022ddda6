"""The engine that carries schedules out over MPI: one object an operation, moved on by whoever calls :func:`progress`.

This is what LibNBC is to the thesis (section 4.1.5): a collective is a schedule, and one small engine executes any schedule. Every
operation in flight on this rank is moved on whenever one of them is tested or waited for, so that operations may be completed in
any order, a different one on each rank.

Ranks of one host agree on an operation on a :mod:`~sparseallreduce.runtime.board`, others by messages. Messages of an operation
carry its number as tag, on a duplicate of the user's communicator. Collectives of the MPI library run on a second duplicate, each
operation's after those of all operations started before it, because MPI asks that all ranks start the collectives of a communicator
in the same order. All are of the non-blocking kind: a rank that waits inside MPI burns the core that the others need where ranks
outnumber cores (MPICH's Allgatherv of 64 MiB took 8.5 s with 8 ranks on 2 cores, the same polled 0.12 s). The exception is the dense
sum that all ranks of a blocking operation are ready for: it is what the user would call, and on 2 cores, from 4 KiB to 16 MiB, takes
0.64 to 1.0 of the polled one's time at P = 4 and 8, and 0.7 to 1.5 at P = 3. Smaller ones are made on the board, and sums of sparse
streams on a :mod:`~sparseallreduce.runtime.stage` beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter, sleep
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import RECORD, common_error
from sparseallreduce.algorithms.allreduce import Staging, Told, room
from sparseallreduce.algorithms.choose import measure, pack_machine, unpack_machine
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.steps import (
    Clock,
    DenseAllgather,
    DenseAllreduce,
    Exchange,
    Recv,
    RecvAny,
    Schedule,
    Send,
    Share,
    Shift,
    Step,
)
from sparseallreduce.errors import SparseAllreduceError, WireError
from sparseallreduce.runtime.board import PREFIX, Board, Slot
from sparseallreduce.runtime.calibration import Calibration
from sparseallreduce.runtime.cores import allowed_cores, count_cores
from sparseallreduce.runtime.shared import SharedStep, shared_memory
from sparseallreduce.runtime.stage import Stage
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams import memory, packed, wire
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "INLINE_BYTES",
    "PIECE_BYTES",
    "PREFIX",
    "Begun",
    "Channel",
    "Operation",
    "alone",
    "at_ease",
    "carry_out",
    "done_within",
    "failed",
    "finish",
    "has_native_sum",
    "outcome",
    "progress",
    "progress_thread",
    "takes_collective",
    "wait_until",
]

# The parts of a stream go out as they lie in memory, behind an envelope of the headers, and arrive in arrays of their own: for
# 1.3 MB between two ranks of one host that took a quarter of the time of a message packed and unpacked. Short ones are packed.
INLINE_BYTES = 1 << 14
PIECE_BYTES = 1 << 30  # a part goes out in pieces of this size, since MPI counts in 32 bits before version 4
_ABORT = b"SARX"  # in place of a stream: the sender has given up, and says why
_COUNT_LIMIT = 2**31 - 1
_SPINS = 64  # polls, of about 3 microseconds each, before a rank with a core of its own offers it to other programs
_FIRST_SPINS = 256  # likewise, of half a microsecond, before an operation that should be over at once is taken for a long one
_COLLECTIVE_SPINS = 16  # polls in a row of a collective, which moves on in each by a fragment of some kilobytes
_CAREFUL = 3  # measurements of a machine that is not known yet, of which the fastest of each constant counts
# What a rank says that has given up before it has said anything. It leaves no room for more, as no operation of many ranks does.
_UNWELL = Share(RECORD.pack(False, 0, 0, 0))
_UNKNOWN = Machine(*[0.0] * len(Machine._fields))
_DIRECT_RANKS = 16  # up to which every rank sends its dense block to every other
_MPI_TYPES = {np.dtype(name) for name in ("float32", "float64", "int32", "int64")}

Bytes = NDArray[np.uint8]

_lock = threading.RLock()
_active: list[Operation] = []
_channels: list[Channel] = []
_preparing: list[Channel] = []  # those of them that are not ready
_NO_TRACES: list[Trace] = []


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
    """What the library keeps for a communicator of the user's: two duplicates, the operations in flight, the machine's constants.

    It is set up in the background, by all ranks together: operations wait for that, so that ranks which use several
    communicators for the first time may do so in any order.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank = comm.rank
        self.ranks = comm.size
        self.ready = False  # for operations of users
        self.machine: Machine | None = None
        self.sound = True  # whether no collective on the second duplicate was left unfinished by a rank that gave up
        self.cores = 1  # that ranks of this host may run on
        self.crowded = False  # whether ranks outnumber them
        self.turn = 0  # of the last operation that has begun
        self.board: Board | None = None  # where the ranks agree on an operation, if all are on one host
        self.stage: Stage | None = None  # where they add up sparse streams
        self.staging: Staging | None = None  # the same for schedules
        self.in_flight: list[Operation] = []
        self.kinds: dict[Any, Any] = {}  # what is known of operations on streams of a kind
        self.hearings: list[Any] = []  # where the ranks hear each other, used by turns
        # Of the user's communicator one duplicate is made, now: what happens on it later must be left to the user's own order.
        self.messages, request = comm.Idup()
        self._preparation = self._prepare(request)
        _channels.append(self)
        _preparing.append(self)

    def advance(self) -> None:
        """Move the preparation on."""
        with _lock:
            if not self.ready:
                self.ready = next(self._preparation, True)
                if self.ready:
                    _preparing.remove(self)

    def _prepare(self, duplicated: MPI.Request) -> Generator[bool, None, None]:
        """Yield False until everything is there."""
        while not duplicated.Test():
            yield False
        self.tag_limit = min(self.messages.Get_attr(MPI.TAG_UB) or 32767, 2**31 - 1)
        self.collectives, duplicated = self.messages.Idup()
        while not duplicated.Test():
            yield False
        hosts, allowed = yield from self._outcome(_hosts())
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.cores = count_cores(allowed[rank] for rank in here)
        self.crowded = len(here) > self.cores
        self.machine = yield from self._outcome(_calibrated(self, hosts))
        if len(set(hosts)) == 1:
            self.stage = yield from self._outcome(_stage(self))
            self.staging = None if self.stage is None else Staging(self.stage.room, self._staged)
            self.board = yield from self._outcome(_board(self))  # last, as it counts operations from then on

    def _outcome(self, schedule: Generator[Step, Any, Any]) -> Generator[bool, None, Any]:
        """The result of a schedule of the library's own; no trace counts it."""
        operation = Operation(self, lambda: schedule, counted=False, own=True)
        while not operation.done:
            yield False
        if operation.error is not None:
            raise operation.error
        return operation.result

    def _staged(self, stream: SparseStream, reduction: Reduction) -> Told | None:
        """What an operation that begins tells the others of its stream on the stage, if that is free."""
        assert self.stage is not None
        split = self.stage.offer(self.turn, stream, packed.Kind.of(stream, reduction), reduction)
        return None if split is None else split.told()

    def next_turn(self) -> int:
        """The number of an operation that begins."""
        self.turn += 1
        return self.turn

    def tag(self, turn: int) -> int:
        """A tag which no other operation in flight has."""
        return turn % self.tag_limit

    def free(self) -> None:
        """Give the duplicates back to MPI; collective."""
        wait_until(lambda: self.ready)
        _channels.remove(self)
        # What a rank that gave up has sent to those that were done already must not be taken for a message of the next communicator,
        # to which MPI may give the same context. Those that gave up took part in all collectives here.
        self.messages.Barrier()
        for comm in (self.messages, self.collectives):
            while (left := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status := MPI.Status())) is not None:
                left.Recv([np.empty(status.Get_count(MPI.BYTE), np.uint8), MPI.BYTE])
            comm.Free()


class Begun(NamedTuple):
    """Where an operation stands in its first step, or behind it."""

    turn: int
    step: Step | None = None  # under way, with
    requests: list[MPI.Request] | None = None
    received: Any = None
    native: bool = True  # whether collectives of MPI may be used
    shared: bool = True  # whether the others have been told anything
    taken: bool = True  # whether it has left its slot of the board, if there is one


class Operation:
    """One schedule on its way.

    Parameters
    ----------
    channel : Channel
    schedule : callable
        Makes the schedule, once the channel is ready.
    entries : int
        Of our stream, for traces.
    counted : bool
        Whether traces count it.
    collective : callable
        Whether other ranks may be inside a collective of MPI when this operation fails.
    own : bool
        Whether it belongs to the preparation of the channel, which other operations wait for.
    begun : Begun, optional
        How far it has come without this object.
    """

    def __init__(
        self,
        channel: Channel,
        schedule: Callable[[], Generator[Step, Any, Any]],
        entries: int = 0,
        counted: bool = True,
        collective: Callable[[], bool] = lambda: True,
        own: bool = False,
        begun: Begun | None = None,
    ) -> None:
        self.channel = channel
        self.schedule = schedule
        self.traces = traces if counted else _NO_TRACES
        self.stack: list[Any] = []
        self.entries = entries
        self.own = own
        self.begun = begun
        self.started = False
        self.step: Step | SharedStep | None = None  # what the schedule waits for
        self.requests: list[MPI.Request] | None = None  # of a collective
        self.received: Any = None  # what the collective fills
        self.envelope: tuple[MPI.Request, Bytes, int] | None = None  # being received
        self.arriving: dict[int, deque[_Arrival]] = {}
        self.sends: list[tuple[MPI.Request, Bytes]] = []
        self.shared = False  # whether the others have been told anything
        self.slot: Slot | None = None  # of the board, which this operation has still to leave
        self.collective = collective
        self.native = True  # whether collectives of MPI may be used
        self.result: Any = None
        self.error: Exception | None = None
        self.ended = False  # the schedule
        self.done = False  # and its messages are out
        with _lock:
            _active.append(self)
            self.advance()

    def advance(self) -> None:
        """Move on as far as finished messages and collectives allow."""
        if self.done:
            return
        if self.ended:
            self._flush()
            return
        if not self.started and not self._start():
            return
        try:
            self._run()
        except Exception as error:
            self._give_up(error)

    def _start(self) -> bool:
        """Begin if the channel is ready: in the order of the calls, which is that of all ranks."""
        if not self.channel.ready and not self.own:
            return False
        self.started = True
        taken, board = self.own, self.channel.board
        if self.begun is None:
            self.turn = self.channel.next_turn()
        else:
            self.turn, self.step, self.requests, self.received, self.native, self.shared, taken = self.begun
        self.slot = None if taken or board is None else board.slot(self.turn)
        self.tag = self.channel.tag(self.turn)
        self.channel.in_flight.append(self)
        self.stack.append(self.schedule())
        return True

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
            elif isinstance(step, DenseAllreduce) and not (self.native and _is_native(step)):
                self.stack.append(rabenseifner(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op)))
            elif isinstance(step, DenseAllgather) and not (self.native and _is_native(step)):
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
        if isinstance(step, Share) and self.slot is not None:
            if not self._posted(step, self.slot):
                self._probe()  # likewise
                return False, None
            value, self.slot = self._taken(step, self.slot), None
        elif isinstance(step, SharedStep):
            value = step.result()
            if value is None:
                self._probe()
                return False, None
            if self.traces:
                self._count_moved(*step.moved())
        elif isinstance(step, Share | DenseAllreduce | DenseAllgather):
            if self.requests is None:
                self.requests = self._start_collective(step)
            crowded = self.channel.crowded
            if self.requests is None or not done_within(self.requests, crowded, 1 if crowded else _COLLECTIVE_SPINS):
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
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            source, self.received = (MPI.IN_PLACE, array) if step.into is None else (array, step.into)
            if step.soon:
                channel.collectives.Allreduce(source, self.received, MPI.SUM)
                return []
            return [channel.collectives.Iallreduce(source, self.received, MPI.SUM)]
        raw, blocks = self._raw_blocks(step)
        lengths, places = [len(block) for block in blocks], [lo * (step.stream.width or 1) for lo, _ in step.ranges]
        return [channel.collectives.Iallgatherv(raw, [self.received.reshape(-1).view(raw.dtype), lengths, places, _typed(raw)])]

    def _is_direct(self, step: Step) -> TypeGuard[DenseAllgather]:
        return isinstance(step, DenseAllgather) and self.channel.ranks <= _DIRECT_RANKS

    def _posted(self, step: Share, slot: Slot) -> bool:
        """Whether all ranks have posted what they tell the others first, we too once the slot is free."""
        if not self.shared and slot.is_free(self.turn):
            self._count_share(step)
            slot.post(self.turn, _text(step, self.channel))
            self.shared = True
        return self.shared and slot.is_complete(self.turn)

    def _taken(self, step: Share, slot: Slot) -> Any:
        said, sound = _heard(step, slot.texts)
        slot.take(self.turn)
        return self._told(step, said, sound)

    def _share(self, step: Share) -> list[MPI.Request]:
        first, self.shared = not self.shared, True
        self._count_share(step)
        requests, self.received = _tell(step, self.channel, self.tag, first)
        return requests

    def _count_share(self, step: Share) -> None:
        for counts in self.traces:
            counts.share(len(step.record), len(step.payload), self.channel.ranks)

    def _told(self, step: Share, said: list[bytes], sound: bool) -> list[bytes]:
        self.native = self.native and sound
        record, ours = len(step.record), len(said[self.channel.rank])
        for counts in self.traces:
            counts.bytes_received += sum(len(message) - record for message in said) - (ours - record)
        return said

    def _gather_directly(self, step: DenseAllgather) -> list[MPI.Request]:
        """Blocks sent straight from and to their places: half the time of the MPI libraries' rings in shared memory."""
        return _exchange(*self._raw_blocks(step), self.channel, self.tag)

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
            return self._told(step, *_heard(step, map(memoryview, self.received)))
        return SparseStream._dense_form(self.received, step.stream.size, density=step.stream.switch_density)

    def _count_collective(self, nbytes: int, passes: int) -> None:
        self._count_moved(nbytes, nbytes, passes * (self.channel.ranks - 1).bit_length())

    def _count_moved(self, sent: int, received: int, messages: int) -> None:
        for counts in self.traces:
            counts.move(sent, received, messages)

    def _give_up(self, error: Exception) -> None:
        """End the operation by an error, on all ranks of it if it is not known there."""
        self.error = error
        agreed = getattr(error, "on_all_ranks", False)
        waiting = isinstance(self.step, DenseAllreduce | DenseAllgather) and not self._is_direct(self.step) and self.requests is not None
        if waiting or (not agreed and self.collective()):
            self.channel.sound = False  # of which the agreement of the next operation tells the other ranks
        if isinstance(self.step, SharedStep):
            self.step.abandon()
        if not self.shared and self.slot is None:  # the others may hear of it by a collective, which waits for all ranks
            _farewells.append(_tell(_UNWELL, self.channel, self.tag, first=True))
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
            counts.complete(self.entries, self.result)
        self._flush()

    def _flush(self) -> None:
        if self.slot is not None and (self.shared or self.slot.is_free(self.turn)):
            self.slot.take(self.turn)  # what no longer concerns us
            self.slot = None
        # Large messages leave only while this rank calls MPI, so that an operation is not done before they are out.
        self.sends = [(request, piece) for request, piece in self.sends if not request.Test()]
        if self.sends:
            try:
                self._probe()
            except Exception:
                self._leave()  # we have our result; who gave up takes no more of our messages
        if not self.sends and self.slot is None:
            self.done = True
            _active.remove(self)

    def _leave(self) -> None:
        """Wait no longer for messages under way, which nobody may receive any more, but keep their memory."""
        _farewells.extend([*self.sends, (self.requests, self.received), self.envelope, self.arriving])
        self.sends, self.requests, self.received, self.envelope, self.arriving = [], None, None, None, {}


_farewells: list[Any] = []


def _tell(step: Share, channel: Channel, tag: int, first: bool) -> tuple[list[MPI.Request], Bytes]:
    """Tell all ranks what ``step`` says; what they say comes into the rows of the array."""
    length, ours = PREFIX.size + len(step.record) + step.room, _text(step, channel)
    rows = np.empty((channel.ranks, length), np.uint8)
    if first and channel.ranks > _DIRECT_RANKS:
        # Goes out as the operation starts, in the order of the calls, which is that of all ranks.
        padded = np.frombuffer(ours.ljust(length, b"\0"), np.uint8)
        return [channel.messages.Iallgather([padded, MPI.BYTE], [rows, MPI.BYTE])], rows
    return _exchange(np.frombuffer(ours, np.uint8), list(rows), channel, tag), rows


def _text(step: Share, channel: Channel) -> bytes:
    """The words in which ``step`` is told."""
    return PREFIX.pack(channel.sound, len(step.payload)) + step.record + step.payload


def _heard(step: Share, texts: Iterable[memoryview]) -> tuple[list[bytes], bool]:
    """What the ranks have said, and whether the channel is sound on all of them."""
    said, all_sound, record = [], True, PREFIX.size + len(step.record)
    for text in texts:
        sound, payload = PREFIX.unpack_from(text)
        said.append(bytes(text[PREFIX.size : record + payload]))
        all_sound = all_sound and sound
    return said, all_sound


def _exchange(ours: NDArray[Any], places: Sequence[NDArray[Any]], channel: Channel, tag: int) -> list[MPI.Request]:
    """Send our array to all ranks, and receive theirs, which may be shorter than their places."""
    comm, rank, ranks = channel.collectives, channel.rank, channel.ranks
    places[rank][: len(ours)] = ours
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    requests = [comm.Irecv(places[other], other, tag) for other in others if len(places[other])]
    return requests + [comm.Isend(ours, other, tag) for other in others if len(ours)]


def _pieces(part: Bytes) -> list[Bytes]:
    return [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]


def takes_collective(channel: Channel, steps: Collection[type]) -> bool:
    """Whether an algorithm that takes these dense steps enters collectives of MPI."""
    return DenseAllreduce in steps or (DenseAllgather in steps and channel.ranks > _DIRECT_RANKS)


def _is_native(step: DenseAllreduce | DenseAllgather) -> bool:
    """Whether MPI has this collective: any dtype is gathered, a sum of what MPI has a type for is reduced."""
    stream = step.stream
    if stream._present is not None or stream._stored.size > _COUNT_LIMIT:
        return False
    return isinstance(step, DenseAllgather) or has_native_sum(step.op, stream.dtype, stream._stored.size)


def has_native_sum(op: Operator, dtype: np.dtype[Any], count: int) -> bool:
    """Whether MPI reduces ``count`` values of this type by this operator."""
    return op.is_sum and dtype in _MPI_TYPES and count <= _COUNT_LIMIT


def _typed(array: NDArray[Any]) -> MPI.Datatype:
    return MPI.Datatype.fromcode(array.dtype.char)


def progress() -> None:
    """Move every operation in flight on this rank as far as it goes now."""
    with _lock:
        for channel in tuple(_preparing):
            channel.advance()
        for operation in tuple(_active):
            operation.advance()


def alone() -> bool:
    """Whether there is at most one operation in flight on this rank, and nothing being prepared."""
    return len(_active) <= 1 and not _preparing


def finish(operation: Operation) -> None:
    """Move on until ``operation`` is done."""
    wait_until(lambda: operation.done)


def carry_out(channel: Channel, schedule: Callable[[], Schedule], entries: int, collective: Callable[[], bool]) -> Any:
    """The result of an operation that this rank waits for; parameters and exceptions are those of :class:`Operation`.

    That object, which can wait among others, is made only where there is more to wait for than what the ranks tell each other
    first: for little data it would take half of the time. See also :mod:`~sparseallreduce.runtime.short`.
    """
    if traces or not at_ease(channel):
        return outcome(Operation(channel, schedule, entries, collective=collective))
    steps, turn, board = schedule(), channel.next_turn(), channel.board
    slot = None if board is None else board.slot(turn)
    begun = Begun(turn, shared=False, taken=False)
    try:
        share = steps.send(None)
        assert isinstance(share, Share)
        told = False
        if board is None or slot is None:
            requests, rows = _tell(share, channel, channel.tag(turn), first=True)
            begun = Begun(turn, requests=requests, received=rows)
            told = done_within(requests, channel.crowded)
        elif slot.is_free(turn):
            slot.post(turn, _text(share, channel))
            begun = begun._replace(shared=True)
            told = slot.is_complete(turn, board.polls)
        if told:
            said, sound = _heard(share, map(memoryview, rows) if slot is None else slot.texts)
            if slot is not None:
                slot.take(turn)
            begun = Begun(turn, native=sound)
            steps = _resumed(steps.send(said), steps)
        else:
            begun = begun._replace(step=share)
    except StopIteration as stop:
        return stop.value
    except Exception as error:
        steps = failed(error)
    return outcome(Operation(channel, lambda: steps, entries, collective=collective, begun=begun))


def at_ease(channel: Channel) -> bool:
    """Whether an operation on this channel can do without an object of its own: nothing is in flight or prepared."""
    return channel.ready and channel.ranks <= _DIRECT_RANKS and not (_active or _preparing)


def done_within(requests: list[MPI.Request], crowded: bool, polls: int = _FIRST_SPINS) -> bool:
    """Whether the requests are done, or within so many polls, by default the time that a small message takes.

    Where ranks share cores, what is waited for may have to be done by one that waits for this core.
    """
    for _ in range(polls):
        if MPI.Request.Testall(requests):
            return True
        if crowded:
            os.sched_yield()
    return False


def outcome(operation: Operation) -> Any:
    """The result of an operation, when it is done.

    Raises
    ------
    SparseAllreduceError
        If the operation failed, on all ranks the same.
    """
    finish(operation)
    if operation.error is not None:
        raise operation.error
    return operation.result


def _resumed(step: Step, steps: Schedule) -> Schedule:
    """A schedule that goes on with a step which it has asked for already."""
    try:
        while True:
            step = steps.send((yield step))
    except StopIteration as stop:
        result: SparseStream = stop.value
        return result


def failed(error: Exception) -> Schedule:
    """What is left of a schedule that has raised."""
    raise error
    yield


def wait_until(done: Callable[[], bool]) -> None:
    """Move operations on until ``done``. Between two rounds, leave the core to others after some, or at once where ranks share cores."""
    rounds = 0
    while not done():
        progress()
        if rounds >= _SPINS or any(channel.crowded for channel in _channels):
            os.sched_yield()
        rounds += 1


def _hosts() -> Generator[Step, Any, tuple[list[bytes], list[bytes]]]:
    """What stands for the host of each rank, and the cores of it that it may use."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=8).digest()
    records: list[bytes] = yield Share(host + allowed_cores())
    return [record[: len(host)] for record in records], [record[len(host) :] for record in records]


def _calibrated(channel: Channel, hosts: list[bytes]) -> Generator[Step, Any, Machine]:
    """The constants of this network, the same on all ranks: those that rank 0 keeps of it, if they are like what is measured."""
    rank, ranks, sharing = channel.rank, channel.ranks, max(1.0, hosts.count(hosts[channel.rank]) / channel.cores)
    library = MPI.Get_library_version().splitlines()[0]
    faster_blocking = not library.startswith("MPICH")
    measured = yield from measure(rank, ranks, sharing, faster_blocking)
    calibration = Calibration(library, hosts, channel.cores) if rank == 0 else None
    machine = yield from _told(None if calibration is None else calibration.like(measured))
    if machine is None:  # which is to last, and had better not be of a moment at which the machine had much else to do
        for _ in range(_CAREFUL - 1):
            again = yield from measure(rank, ranks, sharing, faster_blocking)
            constants: Any = zip(measured, again, strict=True)  # all numbers, as measured
            measured = Machine(*map(min, constants))
        machine = measured
        if calibration is not None:
            calibration.keep(machine)
    return machine


def _board(channel: Channel) -> Generator[Step, Any, Board | None]:
    """A board for what the ranks of a host tell each other, if they can share memory."""
    most = room(channel.ranks)
    memory = yield from shared_memory(channel.rank, Board.nbytes(channel.ranks, most, channel.cores))
    return None if memory is None else Board(memory, channel.rank, channel.ranks, most, channel.cores, channel.turn + 1)


def _stage(channel: Channel) -> Generator[Step, Any, Stage | None]:
    """Memory in which the ranks of a host add up sparse streams, if they can share it."""
    memory = yield from shared_memory(channel.rank, Stage.nbytes(channel.ranks))
    return None if memory is None else Stage(memory, channel.rank, channel.ranks, channel.crowded, channel.cores)


def _told(machine: Machine | None) -> Generator[Step, Any, Machine | None]:
    """What rank 0 knows, on all ranks."""
    records: list[bytes] = yield Share(pack_machine(machine or _UNKNOWN))
    told = unpack_machine(records[0])
    return None if told == _UNKNOWN else told


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
