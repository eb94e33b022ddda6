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

An operation fails in one place, :meth:`Operation.fail`, whatever raises and wherever:

* Before a rank tells the others anything, it is done with all that may fail; what hits it there or later it tells them by a message with
  the number of the operation. They raise the same. Of ranks that fail at once the lowest counts, so they tell each other what they know.
* Only MPI's own blocking sum cannot be told anything. A rank that has said that it enters it takes that back, unless another has seen
  already that all do; then it enters the sum, and raises behind it.
* A collective of MPI that some ranks have begun and others have not is begun by the others with the next operation, whose agreement tells
  that one is missing (:func:`_recovery`). What it comes to is thrown away.
* A preparation that fails, fails on all ranks with the operations that waited for it, and the next operation begins another. Each rank
  gives all others word of it once, its own or what it has heard, so that here, too, the lowest that failed counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import methodcaller
from time import perf_counter, sleep
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import RECORD, common_error
from sparseallreduce.algorithms.allreduce import READY as SAYS_READY
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
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime.board import PREFIX, Board, Slot
from sparseallreduce.runtime.calibration import Calibration
from sparseallreduce.runtime.hosts import Place, count_cores, same_host, same_memory, this_place
from sparseallreduce.runtime.mailbox import Failure, Mailbox, Sent, all_done
from sparseallreduce.runtime.processes import is_alive, started_at
from sparseallreduce.runtime.shared import SharedFile, SharedStep, shared_file
from sparseallreduce.runtime.stage import Stage
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams import memory, packed, wire
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "FAILED",
    "FREED",
    "PREFIX",
    "PREPARING",
    "READY",
    "SETTLING",
    "Begun",
    "Channel",
    "Operation",
    "alone",
    "at_ease",
    "carry_out",
    "done_within",
    "finish",
    "has_entered",
    "has_native_sum",
    "outcome",
    "give_up",
    "prepare",
    "progress",
    "progress_thread",
    "takes_collective",
    "wait_until",
]

# What a channel is. SETTLING: the preparation has failed, by whose fault is to be heard. After FAILED, the next operation begins another.
PREPARING, SETTLING, READY, FAILED, FREED = range(5)

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
_SETTLING = 0.25  # seconds to wait for ranks whose error would count before ours; who has returned already does not answer
_SETTLING_RANKS = 64  # up to which they are waited for
_PROMISED = 1.0  # seconds to wait, after a fault, for what the others say to a collective of MPI that they may be about to enter
_ALIVE = 0.2  # seconds between two looks whether the processes of this host are there
_RETRIES = 3  # of the way to fail, which may be interrupted, too
_OWN = 10  # bits of the number of one of the library's own operations, above which is that of the attempt
_STALE_PROBES = 64
_ALL = 1 << 62  # more than there are operations

Bytes = NDArray[np.uint8]

_lock = threading.RLock()  # of the lists below
_active: list[Operation] = []
_channels: list[Channel] = []
_preparing: list[Channel] = []  # those of them that are being prepared
_NO_TRACES: list[Trace] = []
_LAST = struct.Struct("<qqq")  # a rank's process, when that started, and the last operation that failed with an earlier preparation


class Channel:
    """What the library keeps for a communicator of the user's: two duplicates, the operations in flight, the machine's constants.

    It is set up in the background, by all ranks together: operations wait for that, so that ranks which use several
    communicators for the first time may do so in any order. If that fails on any rank, it fails on all, with the operations that waited for
    it, and the next operation begins it anew.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank = comm.rank
        self.ranks = comm.size
        self.state = PREPARING
        self.error: Exception | None = None  # with which the last preparation failed
        self.cause: BaseException | None = None  # what hit this rank there, if anything did
        self.failed_through = 0  # the last operation that waited for a preparation which failed on any rank
        self.failure: Any = None  # the Failure of this attempt to prepare it whose error counts, as far as is known
        self.last: Any = None  # likewise of the attempt before
        self.words: dict[int, Failure] = {}  # of it, by ranks that have given us theirs
        self.warned = -1  # the last rank that we have given ours
        self.limit = 0.0  # until when we wait for those of others
        self.lock = threading.RLock()  # of the operations in flight; nobody who may hold that of another channel waits for it
        self.machine: Machine | None = None
        self.sound_from = 0  # the operation that has made it sound again last: those before it begin no more collectives
        self.sound = True  # whether no collective on the second duplicate was left unfinished by a rank that gave up
        self.entered = _Entered(0, [])  # collectives of MPI on the second duplicate that this rank has begun
        self.unfinished: list[tuple[int, int, str, str, list[int]]] = []  # of those: number, operation, kind, dtype and counts
        self.stale: deque[list[int]] = deque(maxlen=16)  # tags of exchanges that were given up, and how often they were looked for
        self.failed: deque[int] = deque(maxlen=256)  # operations that failed here, of which this rank has told the others
        self.cores = 1  # that ranks of this host may run on
        self.crowded = False  # whether ranks outnumber them
        self.turn = 0  # of the last operation that has been called
        self.beginning = 0  # of the last that has begun
        self.own = 0  # likewise of the library's own, which count down
        self.attempt = 0  # to prepare the channel
        self.board: Board | None = None  # where the ranks agree on an operation, if all are on one host
        self.stage: Stage | None = None  # where they add up sparse streams
        self.staging: Staging | None = None  # the same for schedules
        self.processes: list[tuple[int, int]] = []  # of all ranks, and when they started, if all are on one host
        self.in_flight: list[Operation] = []
        self.untaken: list[tuple[Slot, int]] = []  # slots that operations which gave up have still to leave
        self.kinds: dict[Any, Any] = {}  # what is known of operations on streams of a kind
        self.hearings: list[Any] = []  # where the ranks hear each other, used by turns
        self.messages: Any = None  # duplicates of the communicator, once they are there
        self.collectives: Any = None
        self.mailbox: Any = None  # a Mailbox, with the first of them
        self._duplicating: Any = None
        self._duplicates: list[tuple[Any, Any]] = []
        self._advancing = False
        self._preparation = self._prepare()

    def begin(self, comm: MPI.Intracomm) -> None:
        """Begin to prepare the channel."""
        # Of the user's communicator one duplicate is made, now: what happens on it later must be left to the user's own order.
        if not self._duplicates:
            self._duplicate(comm)
        self.messages, self._duplicating = self._duplicates[0]
        _channels.append(self)
        _preparing.append(self)

    def give_up(self, comm: MPI.Intracomm, error: BaseException) -> None:
        """The first operation has been hit while the preparation was about to begin: begin it, to tell the others."""
        self.next_turn()
        self.begin(comm)
        self.fail(error)

    def _duplicate(self, comm: Any) -> None:
        """Duplicate a communicator, in one instruction of the interpreter: an interrupt behind the call would lose what it returns."""
        self._duplicates.extend(map(methodcaller("Idup"), (comm,)))

    def restart(self) -> None:
        """Begin again after a failure."""
        self.state, self.error = PREPARING, None
        self.attempt += 1
        self.own = -(self.attempt << _OWN)
        self.last, self.failure, self.words, self.warned = self.failure, None, {}, -1
        self.board = self.stage = self.staging = None
        self.kinds, self.hearings = {}, []
        self._preparation = self._prepare()
        _preparing.append(self)

    def advance(self) -> None:
        """Move the preparation on."""
        if self.state not in (PREPARING, SETTLING) or self._advancing or not self.lock.acquire(blocking=False):
            return
        self._advancing = True
        try:
            if self.mailbox is not None:
                self.mailbox.take_in()
                self.look()
            if self.state == SETTLING:
                self._settle()
            elif next(self._preparation, True):
                self.state = READY
                _preparing.remove(self)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._advancing = False
            self.lock.release()

    def _prepare(self) -> Generator[bool, None, None]:
        """Yield False until everything is there."""
        while not self._has_messages():
            yield False
        if len(self._duplicates) == 1:
            self._duplicate(self.messages)
        self.collectives, self._duplicating = self._duplicates[1]
        while not self._duplicating.Test():
            yield False
        if self.attempt:
            yield from self._outcome(_recovery(self, _ALL))
        places = yield from self._outcome(_hosts())
        here = same_host(places, self.rank)
        self.cores = count_cores(places[rank] for rank in here)
        self.crowded = len(here) > self.cores
        self.machine = yield from self._outcome(_calibrated(self, [place.memory for place in places], len(here)))
        if len(same_memory(places, self.rank)) == self.ranks:
            self.stage = yield from self._outcome(_stage(self))
            self.staging = None if self.stage is None else Staging(self.stage.room, self._staged)
            self.board = yield from self._outcome(_board(self))
        last = yield from self._outcome(_last(self.failed_through))
        self.processes = [(process, start) for process, start, _ in last] if self.board is not None else []
        self.failed_through = max(through for _, _, through in last)
        if self.board is not None:
            self.board.start(self.failed_through + 1)

    def enter(self, turn: int, kind: str, dtype: np.dtype[Any], counts: list[int], call: Callable[[Any], MPI.Request]) -> MPI.Request:
        """Begin a collective of MPI that others wait for, so that it is known whether it was begun whatever interrupts this rank."""
        before, begun = self.entered
        self.unfinished.append((before + len(begun) + 1, turn, kind, dtype.char, counts))
        begun.extend(map(call, (self.collectives,)))  # one instruction of the interpreter
        request: MPI.Request = begun[-1]
        return request

    def has_entered(self) -> int:
        """How many collectives of MPI this rank has begun."""
        before, begun = self.entered
        return before + len(begun)

    def forget_entered(self, number: int) -> None:
        """All ranks have begun this collective, and those before it."""
        last = self.has_entered()
        self.unfinished = [entry for entry in self.unfinished if number < entry[0] <= last]
        if not self.unfinished:
            self.entered = _Entered(last, [])

    def _has_messages(self) -> bool:
        """Whether the first duplicate is there, by which ranks can be told anything."""
        if self.mailbox is None and self.messages is not None and self._duplicating is not None and self._duplicating.Test():
            # The tags of users' operations are below this, those of our own behind it, and last that of a preparation that failed.
            self.tag_limit = min(self.messages.Get_attr(MPI.TAG_UB) or 32767, 2**31 - 1) // 2
            self.mailbox = Mailbox(self.messages, self._is_over)
            self._alarms = self.mailbox.box(2 * self.tag_limit)
        return self.mailbox is not None

    def _outcome(self, schedule: Generator[Step, Any, Any]) -> Generator[bool, None, Any]:
        """The result of a schedule of the library's own; no trace counts it."""
        operation = Operation(self, lambda: schedule, counted=False, own=True)
        while not operation.done and self.state == PREPARING:
            yield False
        if operation.error is not None:
            raise operation.error
        if self.error is not None:
            raise self.error
        return operation.result

    def fail(self, error: BaseException, told: Failure | None = None) -> None:
        """The preparation has failed, here or, as we have been ``told``, on another rank: give the others word of it."""
        if self.state not in (PREPARING, READY):
            return
        failure = told or Failure.of(error, self.attempt, self.rank, self.turn)
        started = [operation.turn for operation in self.in_flight]  # by what the preparation had made
        self.failure = failure._replace(through=max(failure.through, self.failed_through, *started))
        self.cause = None if told else error
        if self not in _preparing:
            _preparing.append(self)
        self.limit = perf_counter() + _SETTLING
        self.state, self.sound = SETTLING, False
        if not self._advancing:
            self._preparation.close()
        if told is None:  # maybe by an interrupt, after which this rank does something else
            limit = perf_counter() + _PROMISED
            while not self._has_messages() and perf_counter() < limit:
                os.sched_yield()
        self._warn()

    def _warn(self) -> None:
        """Tell the others what we know of the failure, as soon as there is a way to."""
        if not self._has_messages():
            return
        while self.warned < self.ranks:
            self.warned += 1
            if self.warned < self.ranks and self.warned != self.rank:
                self._post(self.warned, self.failure)

    def _post(self, dest: int, failure: Failure) -> None:
        sends: list[Sent] = []
        try:
            self.mailbox.post(dest, 2 * self.tag_limit, failure.packed(), sends)
        finally:
            self.mailbox.leftovers.keep_sent(sends)

    def _settle(self) -> None:
        """Wait for ranks whose error would count before the one that we know of, so that all raise the same; then end what waited."""
        self._warn()
        late = perf_counter() > self.limit + (0 if self._has_messages() else _PROMISED)
        waited = [rank for rank in range(self.failure.culprit) if rank != self.rank and rank not in self.words]
        if not late and (self.mailbox is None or (waited and self.ranks <= _SETTLING_RANKS)):
            return
        self.error = common_error([self.failure.said()])
        if self.failure.culprit == self.rank:
            self.error.__cause__ = self.cause
        for operation in tuple(_active):
            if operation.channel is self and operation.own:
                operation.end(self.error)
        self.fail_through(self.failure)
        _preparing.remove(self)
        self.state, self.cause = FAILED, None

    def fail_through(self, failure: Failure) -> None:
        """End the user's operations that waited for a preparation which failed."""
        self.failed_through = max(self.failed_through, failure.through)
        for operation in tuple(_active):
            if operation.channel is self and not operation.own and operation.turn <= self.failed_through:
                # Where a rank was ready, and failed in the operation itself, that may count before.
                box = self.mailbox.boxes.get(self.tag(operation.turn)) if self.mailbox is not None else None
                known = list(box.failures.values()) if box is not None else []
                if operation.failure is not None:
                    known.append(operation.failure)
                said = min([failure, *known], key=_by_culprit)
                operation.end(self.error if said is failure and self.error is not None else common_error([said.said()]))

    def look(self) -> None:
        """Take note of ranks that gave up while they prepared the channel."""
        failures = self._alarms.failures
        while failures:
            source, failure = failures.popitem()
            if failure.number < self.attempt:
                last = self.last
                if last is not None and last.number == failure.number and last.culprit < failure.culprit:
                    self._post(source, last)  # likewise
                self.fail_through(failure)
                continue
            if failure.number > self.attempt:  # meanwhile the others have tried again without us
                self.attempt, self.words, self.warned = failure.number, {}, -1
                if self.state == SETTLING:
                    self.failure = failure._replace(through=max(failure.through, self.failure.through))
            self.words[source] = failure
            if self.state == SETTLING:
                through = max(failure.through, self.failure.through)
                if self.failure.culprit < failure.culprit:
                    self._post(source, self.failure)  # our word has been lost there, maybe, by what has hit that rank
                self.failure = min(failure, self.failure, key=_by_culprit)._replace(through=through)
            elif self.state == FAILED:
                self.fail_through(failure)
            else:
                self.fail(common_error([failure.said()]), failure)
        error, self._alarms.error = self._alarms.error, None
        if error is not None:  # which has cost us word of another rank
            self.fail(error)

    def _staged(self, stream: SparseStream, reduction: Reduction) -> Told | None:
        """What an operation that begins tells the others of its stream on the stage, if that is free."""
        assert self.stage is not None
        split = self.stage.offer(self.beginning, stream, packed.Kind.of(stream, reduction), reduction)
        return None if split is None else split.told()

    def next_turn(self) -> int:
        """The number of an operation that is called."""
        self.turn += 1
        return self.turn

    def next_own(self) -> int:
        """The number of an operation of the library's own."""
        self.own -= 1
        return self.own

    def tag(self, turn: int) -> int:
        """A tag which no other operation in flight has."""
        return turn % self.tag_limit if turn >= 0 else self.tag_limit + -turn % self.tag_limit

    def _is_over(self, tag: int) -> bool:
        """Whether the operation of this tag, which is not in flight, has been before."""
        if tag >= 2 * self.tag_limit:
            return False
        if any(operation.channel is self and not operation.started and self.tag(operation.turn) == tag for operation in tuple(_active)):
            return False
        ours, latest = (tag, self.turn) if tag < self.tag_limit else (tag - self.tag_limit, -self.own)
        return (ours - latest - 1) % self.tag_limit >= self.tag_limit // 2

    def tidy(self) -> None:
        """Answer ranks that gave up in operations that are over here, and let go what was left under way."""
        mailbox = self.mailbox
        while mailbox.strays:
            source, failure = mailbox.strays.pop()
            if not failure.reply and failure.number not in self.failed:
                sends: list[Sent] = []
                mailbox.post(source, self.tag(failure.number), failure._replace(reply=True).packed(), sends)
                mailbox.leftovers.keep_sent(sends)
        if mailbox.leftovers:
            mailbox.leftovers.tidy()
        self.untaken = [(slot, turn) for slot, turn in self.untaken if not _left(slot, turn)]
        for stale in tuple(self.stale):
            self._drop(stale)
        if len(mailbox.boxes) > len(self.in_flight) + 1:  # word of ranks that gave up in operations which have been without it
            used = {operation.tag for operation in self.in_flight}
            for tag in tuple(mailbox.boxes):
                if tag not in used and self._is_over(tag):
                    mailbox.close(tag)

    def _drop(self, stale: list[int]) -> None:
        """Receive and drop what has been sent to an exchange that was given up."""
        tag, looks = stale
        status = MPI.Status()
        while (left := self.collectives.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
            place = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.mailbox.leftovers.keep([left.Irecv([place, MPI.BYTE])], place)
        stale[1] = looks + 1
        if stale[1] > _STALE_PROBES:
            self.stale.remove(stale)

    def check_processes(self) -> None:
        """Raise if a process of this host with which operations are in flight is gone: its rank would be waited for in vain.

        Raises
        ------
        SparseAllreduceError
            That names it.
        """
        for rank, process in enumerate(self.processes):
            if rank != self.rank and not is_alive(*process):
                raise SparseAllreduceError(f"rank {rank} has ended: its process {process[0]} is gone. Start the program again")

    def free(self) -> None:
        """Give the duplicates back to MPI; collective. Operations in flight fail."""
        if self.messages is None:
            return
        wait_until(lambda: self.state in (READY, FAILED))
        for operation in tuple(_active):
            if operation.channel is self:
                operation.fail(_Alike(_FREED))
                operation.end(common_error([{"error": "SparseAllreduceError", "text": _FREED}]))
        self.state = FREED
        _channels.remove(self)
        if self.mailbox is None or self.collectives is None:
            return
        # What a rank that gave up has sent to those that were done already must not be taken for a message of the next communicator,
        # to which MPI may give the same context.
        for _ in range(2):
            barrier, limit = self.messages.Ibarrier(), perf_counter() + _PROMISED
            while not barrier.Test() or (self.mailbox.leftovers and perf_counter() < limit):
                self.mailbox.drain()
                self._drop([MPI.ANY_TAG, 0])
                os.sched_yield()
        self.mailbox.leftovers.cancel()
        for comm in (self.messages, self.collectives):
            comm.Free()


class _Entered(NamedTuple):
    """Collectives of MPI that a rank has begun: how many before, and the requests of the others."""

    before: int
    begun: list[Any]


class _GivenUp(Exception):
    """Another rank has given up."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


def _by_culprit(failure: Failure) -> int:
    return failure.culprit


def _left(slot: Slot, turn: int) -> bool:
    """Leave a slot that we have not posted in, if that does not give up what we have still to read there."""
    if not slot.is_free(turn):
        return False
    slot.take(turn)
    return True


class Begun(NamedTuple):
    """Where an operation stands in its first step, or behind it."""

    turn: int
    step: Step | None = None  # under way, with
    requests: list[MPI.Request] | None = None
    received: Any = None
    native: bool = True  # whether collectives of MPI may be used
    shared: bool = True  # whether the others have been told anything
    taken: bool = True  # whether it has left its slot of the board, if there is one
    telling: Callable[[], None] | None = None  # tells by messages those who have not been told yet, if any
    promise: DenseAllreduce | None = None  # the collective of MPI which the others have been told that we enter
    committed: bool = False  # whether all ranks enter it
    entered: bool = False  # and we have
    hit: BaseException | None = None  # what has hit this rank there


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
        self.native = True  # whether collectives of MPI may be used
        self.shared = False  # whether the others have been told anything
        self.telling: Callable[[], None] | None = None  # tells by messages those who have not been told yet, if any
        self.promise: DenseAllreduce | None = None  # the collective of MPI which the others have been told that we enter
        self.committed = False  # whether all ranks enter it
        self.entered = False  # and we have
        self.box: Any = None  # a Box, once started
        self.sends: list[Sent] = []
        self.slot: Slot | None = None  # of the board, which this operation has still to leave
        self.collective = collective
        self.result: Any = None
        self.error: Exception | None = None
        self.cause: BaseException | None = None  # what hit this rank
        self.failure: Any = None  # the Failure whose error counts, as far as is known
        self.warned = -1  # the last rank that we have told of it
        self.limit = 0.0  # until when we wait for others whose error would count
        self.ended = False  # the schedule
        self.done = False  # and its messages are out
        self.advancing = False
        self.turn = begun.turn if begun is not None else channel.next_own() if own else channel.next_turn()
        _active.append(self)
        self.advance()

    def advance(self) -> None:
        """Move on as far as finished messages and collectives allow."""
        channel = self.channel
        if self.done or self.advancing or not channel.lock.acquire(blocking=False):
            return  # another thread is at it
        self.advancing = True
        try:
            if channel.state == SETTLING and not (self.own or self.ended):
                return  # ends with the preparation
            if self.ended:
                self._flush()
            elif self.failure is not None:
                self._settle()
            elif self.started or self._start():
                self._run()
        except _GivenUp as other:
            self.fail(other)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.advancing = False
            channel.lock.release()

    def _start(self) -> bool:
        """Begin if the channel is ready: in the order of the calls, which is that of all ranks."""
        channel = self.channel
        if not self.own:
            if self.turn <= channel.failed_through:
                self.end(channel.error or common_error([_PREPARATION]))
                return False
            if channel.state == FAILED:
                channel.restart()
            if channel.state != READY or self._earlier():
                return False
        taken = self.own
        if self.begun is not None:
            begun = self.begun
            self.step, self.requests, self.received, taken = begun.step, begun.requests, begun.received, begun.taken
            self.native, self.shared, self.telling = begun.native, begun.shared, begun.telling
            self.promise, self.committed, self.entered = begun.promise, begun.committed, begun.entered
        self.slot = None if taken or channel.board is None else channel.board.slot(self.turn)
        self.tag = channel.tag(self.turn)
        self.box = channel.mailbox.box(self.tag)
        channel.in_flight.append(self)
        if not self.own:
            channel.beginning = self.turn
        self.started = True
        channel.tidy()
        if self.begun is not None and self.begun.hit is not None:
            raise self.begun.hit
        self.stack.append(self.schedule())
        return True

    def _earlier(self) -> list[Operation]:
        """The user's operations on this channel that were called before, and have not begun: a thread was moving others on at the time."""
        return [other for other in tuple(_active) if other.channel is self.channel and other.is_waiting() and other.turn < self.turn]

    def is_waiting(self) -> bool:
        """Whether this operation of the user's has not begun."""
        return not (self.started or self.own or self.done)

    def _run(self) -> None:
        value: Any = None
        if self.step is not None:
            ready, value = self._ready()
            if not ready or self.ended:  # by word of a preparation that failed elsewhere
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
                if not ready or self.ended:
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
            value = self._taken(step, self.slot)
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
            value = self._collected(step)
            self.requests, self.received = None, None
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
        found = self.box.first(wanted)
        if found is None:
            return None
        source, arrival = found
        for counts in self.traces:
            counts.bytes_received += wire.HEADER_BYTES * len(arrival.headers) + sum(map(len, arrival.parts))
        return source, wire.join(arrival.headers, arrival.parts)

    def _probe(self) -> None:
        """Take in whatever has arrived, and raise if any rank of this operation has given up."""
        channel, box = self.channel, self.box
        channel.mailbox.take_in()
        channel.look()
        if channel.untaken:
            channel.tidy()
        if box.error is not None:
            raise box.error
        if box.failures:
            raise _GivenUp(min(box.failures.values(), key=_by_culprit))

    def _send(self, dest: int, payload: SparseStream | tuple[SparseStream, ...]) -> None:
        streams = payload if isinstance(payload, tuple) else (payload,)
        for stream in streams:
            Reduction.freeze(stream)
        nbytes, headers = self.channel.mailbox.send(dest, self.tag, streams, self.sends)
        for counts in self.traces:
            counts.bytes_sent += nbytes
            counts.header_bytes += headers
            counts.messages += 1

    def _start_collective(self, step: Share | DenseAllreduce | DenseAllgather) -> list[MPI.Request] | None:
        """The requests of the collective, or None while it is not this operation's turn."""
        channel = self.channel
        if self._is_direct(step):
            return self._gather_directly(step)
        if isinstance(step, Share):
            return self._share(step)
        array = step.stream._stored
        if isinstance(step, DenseAllreduce) and step.soon:
            if not self.committed:
                return None  # one of those that have said so takes it back, and will tell us
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            self.received = array if step.into is None else step.into
            self._enter(step)
            return []
        if not channel.sound or (not self.own and self.turn < channel.sound_from):
            raise _Alike(_BEHIND)
        if channel.in_flight[0] is not self:
            return None
        if isinstance(step, DenseAllreduce):
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            source, self.received = (MPI.IN_PLACE, array) if step.into is None else (array, step.into)
            call = methodcaller("Iallreduce", source, self.received, MPI.SUM)
            return [channel.enter(self.turn, "allreduce", array.dtype, [array.size], call)]
        raw, blocks = self._raw_blocks(step)
        lengths, places = [len(block) for block in blocks], [lo * (step.stream.width or 1) for lo, _ in step.ranges]
        call = methodcaller("Iallgatherv", raw, [self.received.reshape(-1).view(raw.dtype), lengths, places, _typed(raw)])
        return [channel.enter(self.turn, "allgatherv", raw.dtype, lengths, call)]

    def _enter(self, step: DenseAllreduce) -> None:
        """Enter MPI's own sum, as all ranks do now, and stay until it is done."""
        array, comm = step.stream._stored, self.channel.collectives
        source, into = (MPI.IN_PLACE, array) if step.into is None else (array, step.into)
        try:
            comm.Allreduce(source, into, MPI.SUM)
        except BaseException as error:
            self.entered = has_entered(error)
            raise
        self.entered = True

    def awaits_mpi(self) -> bool:
        """Whether this rank has begun a collective of MPI for it, which is not done."""
        native = isinstance(self.step, DenseAllreduce | DenseAllgather) and not self._is_direct(self.step)
        return native and self.requests is not None and not self.ended

    def _is_direct(self, step: Step | SharedStep) -> TypeGuard[DenseAllgather]:
        return isinstance(step, DenseAllgather) and self.channel.ranks <= _DIRECT_RANKS

    def _posted(self, step: Share, slot: Slot) -> bool:
        """Whether all ranks have posted what they tell the others first, we too once the slot is free."""
        if not self.shared and slot.is_free(self.turn):
            self._count_share(step)
            self.promise = step.ready
            slot.post(self.turn, _text(step, self.channel))
            self.shared = True
        return self.shared and slot.is_complete(self.turn)

    def _taken(self, step: Share, slot: Slot) -> Any:
        said, sound = _heard(step, slot.texts)
        if step.ready is not None:
            self.committed = _all_ready(said, sound) and slot.commit(self.turn)
            self.promise = step.ready if self.committed else None
        slot.take(self.turn)
        self.slot = None
        return self._told(step, said, sound)

    def _share(self, step: Share) -> list[MPI.Request]:
        first, self.shared = not self.shared, True
        self._count_share(step)
        if first:
            self.promise = step.ready
        requests: list[MPI.Request] = []
        rows = _places(step, self.channel, first)
        self.requests, self.received = requests, rows
        if first:
            self.telling = partial(_tell, step, self.channel, self.tag, True, rows, requests)
        _tell(step, self.channel, self.tag, first, rows, requests)
        return requests

    def _count_share(self, step: Share) -> None:
        for counts in self.traces:
            counts.share(len(step.record), len(step.payload), self.channel.ranks)

    def _told(self, step: Share, said: list[bytes], sound: bool) -> list[bytes] | None:
        """What the ranks have said; None if it is to wait until the channel is sound again, as it then has to become first."""
        record, ours = len(step.record), len(said[self.channel.rank])
        for counts in self.traces:
            counts.bytes_received += sum(len(message) - record for message in said) - (ours - record)
        if not sound and not self.own and self.native:
            self.native = False
            self.stack.append(_recovered(self, said))
            return None
        return said

    def _gather_directly(self, step: DenseAllgather) -> list[MPI.Request]:
        """Blocks sent straight from and to their places: half the time of the MPI libraries' rings in shared memory."""
        ours, places = self._raw_blocks(step)
        requests: list[MPI.Request] = []
        self.requests = requests
        _exchange(ours, places, self.channel, self.tag, requests)
        return requests

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
            self.telling = None
            said, sound = _heard(step, map(memoryview, self.received))
            if step.ready is not None:
                self._probe()  # a rank that has given up in the meantime does not take part
                self.committed = _all_ready(said, sound)
                self.promise = step.ready if self.committed else None
            return self._told(step, said, sound)
        entered = [number for number, turn, *_ in self.channel.unfinished if turn == self.turn]
        if entered:  # it could not be complete without all of them
            self.channel.forget_entered(entered[-1])
        return SparseStream._dense_form(self.received, step.stream.size, density=step.stream.switch_density)

    def _count_collective(self, nbytes: int, passes: int) -> None:
        self._count_moved(nbytes, nbytes, passes * (self.channel.ranks - 1).bit_length())

    def _count_moved(self, sent: int, received: int, messages: int) -> None:
        for counts in self.traces:
            counts.move(sent, received, messages)

    def fail(self, error: BaseException) -> None:
        """The one way to fail, for whatever has hit this rank, and for word that another has given up.

        Nothing is raised here but an interrupt that comes meanwhile, once the others have been told.
        """
        interrupt: BaseException | None = None
        for _ in range(_RETRIES):
            try:
                if self.failure is None and not self.ended:
                    self._fail(error)
                elif not self.ended:
                    self._warn()
                elif self.error is not None:
                    self.end(self.error)
                break
            except BaseException as another:
                latest = another
                if not isinstance(another, Exception):
                    interrupt = another
        else:
            self.end(common_error([Failure.of(latest, self.turn, self.channel.rank).said()]))
        if interrupt is not None:
            raise interrupt

    def _fail(self, error: BaseException) -> None:
        channel = self.channel
        if channel.state == SETTLING and not self.own:
            return  # ends with the preparation
        if isinstance(error, _GivenUp):
            failure = error.failure
        elif self.own or getattr(error, "on_all_ranks", False):
            self.end(error if isinstance(error, Exception) else common_error([Failure.of(error, self.turn, channel.rank).said()]))
            return
        elif isinstance(error, _Alike):
            failure = Failure(self.turn, channel.ranks, "SparseAllreduceError", str(error))  # any other error counts before it
        else:
            failure, self.cause = Failure.of(error, self.turn, channel.rank), error
            if not self.started and channel.state != READY:
                if channel.state == FAILED:
                    channel.restart()
                channel.fail(error)  # ends this operation, too, when that has settled
                return
            if not self.started:
                for earlier in self._earlier():
                    earlier.advance()
                self._start()
            if self.telling is not None and channel.ranks <= _DIRECT_RANKS:
                self.telling()  # those who have been told may go on without asking who else has
                self.telling = None
            if self._keeps_its_promise():
                self.end(common_error([failure.said()]))
                return
        if not self.started:
            self.end(common_error([failure.said()]))
            return
        if self.awaits_mpi() or self.collective():  # others may have begun one that we shall not come to
            channel.sound = False  # of which the agreement of the next operation tells the other ranks
        self._leave_slot()  # now: later operations may come to it before this one has settled
        self.limit = perf_counter() + _SETTLING
        self.failure = failure
        channel.failed.append(self.turn)
        self._warn()
        self._settle()

    def _keeps_its_promise(self) -> bool:
        """Whether all ranks enter a collective of MPI, as we have told them that we do: then we have, too, when this returns."""
        if self.promise is None:
            return False
        if not (self.committed or self.entered):
            self.committed = self._is_too_late()
        if self.committed and not self.entered:
            self._enter(self.promise)
        return self.entered

    def _is_too_late(self) -> bool:
        """Whether the others may have seen that all ranks are ready for a collective of MPI; if not, they will see that we are not."""
        if self.slot is not None:
            return not self.slot.withdraw(self.turn)
        if self.requests is None:  # of the first step, as long as there is a promise that is not kept
            return False
        limit = perf_counter() + _PROMISED
        while not MPI.Request.Testall(self.requests):
            if perf_counter() > limit:
                return False
            os.sched_yield()
        return _all_ready(*_heard(_UNWELL, map(memoryview, self.received)))

    def _warn(self) -> None:
        """Tell all ranks whose error counts, as far as we know, and what they have still to hear from us in the first step."""
        channel, failure = self.channel, self.failure
        if not self.shared and self.slot is None and not self.own:  # a collective that tells them may be under way, which waits for us
            self.shared = True
            rows = _places(_UNWELL, channel, True)
            requests: list[MPI.Request] = []
            try:
                _tell(_UNWELL, channel, self.tag, True, rows, requests)
            finally:
                channel.mailbox.leftovers.keep(requests, rows)
        message = failure.packed()
        while self.warned < channel.ranks:
            self.warned += 1
            if self.warned < channel.ranks and self.warned != channel.rank:
                channel.mailbox.post(self.warned, self.tag, message, self.sends)

    def _settle(self) -> None:
        """Wait for ranks whose error would count before the one that we know of, so that all raise the same."""
        channel, box, failure = self.channel, self.box, self.failure
        channel.mailbox.take_in()
        channel.look()
        if channel.state == SETTLING:
            return
        for said in box.failures.values():
            if not said.reply and said.culprit < failure.culprit:
                failure = self.failure = said
        waited = [rank for rank in range(failure.culprit) if rank != channel.rank and rank not in box.failures]
        if not waited or channel.ranks > _SETTLING_RANKS or perf_counter() > self.limit:
            self.end(common_error([failure.said()]))

    def end(self, error: Exception) -> None:
        """End by an error that all ranks raise, or that they have been told of."""
        if self.done:
            return
        channel, step = self.channel, self.step
        if not self.ended:
            self.error = error
            if self.cause is not None and error.__cause__ is None:
                error.__cause__ = self.cause
        self.ended = True
        if isinstance(step, SharedStep):
            step.abandon()
        held = None if channel.stage is None else channel.stage.held
        if held is not None and held.turn == self.turn:  # made, but lost by an interrupt
            held.abandon()
        if self in channel.in_flight:
            channel.in_flight.remove(self)
        self._leave_slot()
        mailbox = channel.mailbox
        if self.started and mailbox is not None:
            leftovers = mailbox.leftovers
            leftovers.keep_sent(self.sends)
            leftovers.keep(self.requests, self.received)
            if step is not None and self._is_direct(step):
                sources = sum(low < high for rank, (low, high) in enumerate(step.ranges) if rank != channel.rank)
                for request in (self.requests or [])[:sources]:
                    request.Cancel()
                channel.stale.append([self.tag, 0])
            mailbox.close(self.tag)
        self.sends, self.requests, self.received = [], None, None
        for generator in reversed(self.stack):
            _closed(generator)
        self.stack.clear()
        self.step = self.promise = None
        for counts in self.traces:
            counts.complete(self.entries, None)
        self.done = True
        if self in _active:
            _active.remove(self)
        if self.started and mailbox is not None:
            channel.tidy()

    def _leave_slot(self) -> None:
        """Leave our slot of the board, or see to it that it is left as soon as that gives up nothing which we have still to read there."""
        slot, channel = self.slot, self.channel
        if slot is None:
            return
        if self.shared:
            slot.take(self.turn)
        else:
            channel.untaken.append((slot, self.turn))
            self.shared = True  # nobody needs to be told by messages instead
        self.slot = None  # last: what raises here is tried again

    def _close(self) -> None:
        """The schedule has ended, and with it the operation once its last messages are out."""
        self.channel.in_flight.remove(self)
        self.ended = True
        for counts in self.traces:
            counts.complete(self.entries, self.result)
        self._flush()

    def _flush(self) -> None:
        mailbox = self.channel.mailbox
        if self.slot is not None and (self.shared or self.slot.is_free(self.turn)):
            self.slot.take(self.turn)  # what no longer concerns us
            self.slot = None
        # Large messages leave only while this rank calls MPI, so that an operation is not done before they are out.
        self.sends = [sent for sent in self.sends if not all_done(sent.requests)]
        if self.sends:
            mailbox.take_in()
            if self.box.failures:  # who gave up takes no more of our messages before it calls the library again; we have our result
                mailbox.leftovers.keep_sent(self.sends)
                self.sends = []
        if not self.sends and self.slot is None:
            mailbox.close(self.tag)
            self.done = True
            _active.remove(self)


def has_entered(error: BaseException) -> bool:
    """Whether a collective of MPI that has raised was entered: not for want of memory for its arguments; interrupts come behind it."""
    return not isinstance(error, Exception) or isinstance(error, MPI.Exception)


class _Until(SharedStep):
    """Wait for what other operations of this rank come to."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition

    def told(self) -> Told:
        return Told(0)

    def result(self, polls: int = 1) -> Any:
        return True if self._condition() else None

    def moved(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def decline(self) -> None:
        pass

    def abandon(self) -> None:
        pass


class _Alike(SparseAllreduceError):
    """An error that says the same whichever rank meets it first."""


_FREED = "the communicator was freed while an operation on it was in flight: wait for it before"
_BEHIND = "an operation that was in flight before this one failed inside a collective: start it again"
_PREPARATION = {"error": "SparseAllreduceError", "text": "another rank gave up while the ranks prepared the communicator"}


def _recovered(operation: Operation, said: list[bytes]) -> Generator[Step, Any, list[bytes]]:
    """Make the channel sound again, before the schedule of an operation goes on with what the ranks have said."""
    yield from _recovery(operation.channel, operation.turn)
    return said


def _recovery(channel: Channel, before: int) -> Generator[Step, Any, None]:
    """Begin, and leave to themselves, the collectives of MPI which other ranks have begun in operations that failed, and this one has not.

    Then all ranks have begun the same ones, and may begin others again.
    """
    channel.sound = False  # from here on, none is begun before all have told
    # What others begin below in place of what they did not come to is no sum: whoever waits for one has to hear first that it fails.
    waited = _Until(lambda: not any(operation.turn < before and operation.awaits_mpi() for operation in channel.in_flight))
    yield waited  # type: ignore[misc]
    last = channel.has_entered()
    ours = json.dumps([last, [entry for entry in channel.unfinished if entry[0] <= last and entry[1] < before]]).encode()
    texts: list[bytes] = yield Share(ours.ljust(512 + 48 * channel.ranks))
    known = [json.loads(text) for text in texts]
    last = channel.has_entered()  # an operation before this one may have made the channel sound since
    missing = {entry[0]: entry for _, entries in known for entry in entries if entry[0] > last}
    for number in sorted(missing):
        _, turn, kind, code, counts = missing[number]
        total, dtype = np.zeros(sum(counts), code), np.dtype(code)
        call = methodcaller("Iallreduce", MPI.IN_PLACE, total, MPI.SUM)
        if kind == "allgatherv":
            block, places = np.zeros(counts[channel.rank], code), np.cumsum([0, *counts[:-1]]).tolist()
            call = methodcaller("Iallgatherv", block, [total, counts, places, _typed(total)])
        channel.mailbox.leftovers.keep([channel.enter(turn, kind, dtype, counts, call)], total)
    channel.forget_entered(min(count for count, _ in known))  # others may fail before they have begun what they miss
    if before < _ALL:
        channel.sound_from = max(channel.sound_from, before)
    channel.sound = True


def _all_ready(said: Sequence[bytes], sound: bool) -> bool:
    """Whether all ranks have said that they enter MPI's own sum, and mean the same operation."""
    if not sound:
        return False
    records = [RECORD.unpack_from(text) for text in said]
    return all(well and flags & SAYS_READY and digest == records[0][2] for well, flags, digest, _ in records)


def _closed(generator: Any) -> None:
    """Close a generator, whatever it has to say to that: the operation has failed already."""
    with contextlib.suppress(Exception):
        generator.close()


def _places(step: Share, channel: Channel, first: bool) -> Bytes:
    """Memory for what all ranks tell by ``step``. That with which an operation begins is as long for every kind of operation."""
    most = max(len(step.record) + step.room, RECORD.size + room(channel.ranks)) if first else len(step.record) + step.room
    return np.empty((channel.ranks, PREFIX.size + most), np.uint8)


def _tell(step: Share, channel: Channel, tag: int, first: bool, rows: Bytes, requests: list[MPI.Request]) -> None:
    """Tell all ranks what ``step`` says; what they say comes into the rows."""
    ours = _text(step, channel)
    if first and channel.ranks > _DIRECT_RANKS:
        # Goes out as the operation starts, in the order of the calls, which is that of all ranks.
        padded = np.frombuffer(ours.ljust(rows.shape[1], b"\0"), np.uint8)
        requests.append(channel.messages.Iallgather([padded, MPI.BYTE], [rows, MPI.BYTE]))
    else:
        _exchange(np.frombuffer(ours, np.uint8), list(rows), channel, tag, requests)


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


def _exchange(
    ours: NDArray[Any], places: Sequence[NDArray[Any]], channel: Channel, tag: int, requests: list[MPI.Request]
) -> None:
    """Send our array to all ranks, and receive theirs, which may be shorter than their places; receives come first in the list.

    Called again with the same list, it goes on where it was interrupted.
    """
    comm, rank, ranks = channel.collectives, channel.rank, channel.ranks
    places[rank][: len(ours)] = ours
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    sources = [other for other in others if len(places[other])]
    received = len(sources)
    sources = sources[len(requests) :]
    requests.extend(map(comm.Irecv, [places[other] for other in sources], sources, repeat(tag)))  # no interrupt loses a request here
    if len(ours):
        requests.extend(map(comm.Isend, repeat(ours), others[len(requests) - received :], repeat(tag)))


def takes_collective(channel: Channel, steps: Collection[type]) -> bool:
    """Whether an algorithm that takes these dense steps enters collectives of MPI."""
    return DenseAllreduce in steps or (DenseAllgather in steps and channel.ranks > _DIRECT_RANKS)


def _is_native(step: DenseAllreduce | DenseAllgather) -> bool:
    """Whether MPI has this collective: any dtype is gathered, a sum of what MPI has a type for is reduced.

    What is complete must tell that all ranks have entered it. MPI may gather without one that has nothing to give, so that is left to it
    only where all have something.
    """
    stream = step.stream
    if stream._present is not None or stream._stored.size > _COUNT_LIMIT:
        return False
    if isinstance(step, DenseAllgather):
        return len(step.ranges) <= _DIRECT_RANKS or all(low < high for low, high in step.ranges)
    return has_native_sum(step.op, stream.dtype, stream._stored.size)


def has_native_sum(op: Operator, dtype: np.dtype[Any], count: int) -> bool:
    """Whether MPI reduces ``count`` values of this type by this operator."""
    return op.is_sum and dtype in _MPI_TYPES and count <= _COUNT_LIMIT


def _typed(array: NDArray[Any]) -> MPI.Datatype:
    return MPI.Datatype.fromcode(array.dtype.char)


def progress() -> None:
    """Move every operation in flight on this rank as far as it goes now."""
    for channel in tuple(_preparing):
        channel.advance()
    for operation in tuple(_active):
        operation.advance()


def alone() -> bool:
    """Whether there is at most one operation in flight on this rank, and nothing being prepared."""
    return len(_active) <= 1 and not _preparing


def finish(operation: Operation) -> None:
    """Move on until ``operation`` is done. If this is interrupted, the operation has failed, on all ranks."""
    try:
        wait_until(lambda: operation.done)
    except BaseException as error:
        give_up(operation, error)
        raise


def prepare(channel: Channel) -> None:
    """Wait until a channel is ready for operations.

    Raises
    ------
    SparseAllreduceError
        If the preparation failed, on all ranks the same.
    """
    try:
        wait_until(lambda: channel.state != SETTLING)
        if channel.state == FAILED:
            channel.restart()
        wait_until(lambda: channel.state in (READY, FAILED))
    except BaseException as error:
        with channel.lock:
            channel.fail(error)
        raise
    if channel.error is not None:
        raise channel.error


def give_up(operation: Operation, error: BaseException) -> None:
    """Let an operation fail because of what has hit this rank outside of it."""
    with operation.channel.lock:
        if not operation.ended:
            operation.fail(error)


def carry_out(channel: Channel, schedule: Callable[[], Schedule], entries: int, collective: Callable[[], bool]) -> Any:
    """The result of an operation that this rank waits for; parameters and exceptions are those of :class:`Operation`.

    That object, which can wait among others, is made only where there is more to wait for than what the ranks tell each other
    first: for little data it would take half of the time. See also :mod:`~sparseallreduce.runtime.short`.
    """
    if traces or not at_ease(channel):
        return outcome(Operation(channel, schedule, entries, collective=collective))
    before, begun = channel.turn, Begun(channel.turn + 1, shared=False, taken=False)
    requests: list[MPI.Request] = []
    steps: Any = None
    try:
        steps = schedule()
        turn, board = channel.next_turn(), channel.board
        channel.beginning = turn
        slot = None if board is None else board.slot(turn)
        share = steps.send(None)
        assert isinstance(share, Share)
        told = False
        if board is None or slot is None:
            rows = _places(share, channel, True)
            telling = partial(_tell, share, channel, channel.tag(turn), True, rows, requests)
            begun = Begun(turn, share, requests, rows, telling=telling, promise=share.ready)
            telling()
            told = done_within(requests, channel.crowded)
        elif slot.is_free(turn):
            slot.post(turn, _text(share, channel))
            begun = begun._replace(step=share, shared=True, promise=share.ready)
            told = slot.is_complete(turn, board.polls)
        else:
            begun = begun._replace(step=share)
        if told and share.ready is None:
            said, sound = _heard(share, map(memoryview, rows) if slot is None else slot.texts)
            if sound:
                if slot is not None:
                    slot.take(turn)
                begun = Begun(turn)
                steps = _resumed(steps.send(said), steps)
    except StopIteration as stop:
        return stop.value
    except BaseException as error:
        if channel.turn == before:
            channel.next_turn()
        begun = begun._replace(hit=error)
    return outcome(Operation(channel, lambda: steps, entries, collective=collective, begun=begun))


def at_ease(channel: Channel) -> bool:
    """Whether an operation on this channel can do without an object of its own: nothing is in flight or prepared."""
    return channel.state == READY and channel.ranks <= _DIRECT_RANKS and not (_active or _preparing)


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


def wait_until(done: Callable[[], bool]) -> None:
    """Move operations on until ``done``. Between two rounds, leave the core to others after some, or at once where ranks share cores."""
    rounds, looked = 0, 0.0
    while not done():
        progress()
        if rounds >= _SPINS or any(channel.crowded for channel in _channels):
            os.sched_yield()
            now = perf_counter()
            if now > looked + _ALIVE:
                if looked:
                    _check_processes()
                looked = now
        rounds += 1


def _check_processes() -> None:
    """End the operations for which a rank that has ended would be waited for."""
    for channel in {operation.channel for operation in tuple(_active)}:
        try:
            channel.check_processes()
        except SparseAllreduceError as error:
            error.on_all_ranks = True  # as they all look for themselves
            for operation in tuple(channel.in_flight):
                operation.end(error)


def _hosts() -> Generator[Step, Any, list[Place]]:
    """Where each rank runs."""
    records: list[bytes] = yield Share(this_place().pack())
    return list(map(Place.unpack, records))


def _calibrated(channel: Channel, hosts: list[bytes], here: int) -> Generator[Step, Any, Machine]:
    """The constants of this network, the same on all ranks: those that rank 0 keeps of it, if they are like what is measured."""
    rank, ranks, sharing = channel.rank, channel.ranks, max(1.0, here / channel.cores)
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
    given = channel.ranks, most, channel.cores
    nbytes = Board.nbytes(*given)

    def make(file: SharedFile) -> Board:
        return Board(file.map([0], nbytes)[0], channel.rank, *given, reserve=file.reserve)

    board: Board | None = yield from shared_file(channel.rank, nbytes, Board.reserved(*given), make)
    return board


def _stage(channel: Channel) -> Generator[Step, Any, Stage | None]:
    """Memory in which the ranks of a host add up sparse streams, if they can share it."""

    def make(file: SharedFile) -> Stage:
        return Stage(file, channel.rank, channel.ranks, channel.crowded, channel.cores)

    ranks = channel.ranks
    stage: Stage | None = yield from shared_file(channel.rank, Stage.nbytes(ranks), Stage.reserved(ranks), make)
    return stage


def _last(failed_through: int) -> Generator[Step, Any, list[tuple[int, ...]]]:
    """What the ranks know of each other at the end: their processes, and which operations have failed with earlier preparations."""
    process = os.getpid()
    records: list[bytes] = yield Share(_LAST.pack(process, started_at(process), failed_through))
    return [_LAST.unpack(record) for record in records]


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
        with _lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sparseallreduce-progress", daemon=True)
                self._thread.start()
            self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            with contextlib.suppress(Exception):  # that of an operation which has failed of it, and whose request raises it
                progress()
            with _lock:
                if not _active:
                    self._wanted.clear()
            sleep(20e-6)  # leaves the interpreter to the program between two rounds


progress_thread = _ProgressThread()
