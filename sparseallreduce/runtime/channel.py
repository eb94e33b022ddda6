"""What the library keeps for a communicator of the user's."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Generator
from itertools import count
from operator import methodcaller
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import SparseAllreduceError, WaitTimeoutError
from sparseallreduce.runtime import progress, setup
from sparseallreduce.runtime.collectives import ALL, Collectives, recovery
from sparseallreduce.runtime.failing import SETTLING_RANKS, SETTLING_SECONDS, by_culprit
from sparseallreduce.runtime.handshake.base import Handshake
from sparseallreduce.runtime.handshake.messages import WITHDRAWAL_SECONDS, MessageHandshake
from sparseallreduce.runtime.handshake.shared import SLOTS, SharedHandshake
from sparseallreduce.runtime.hosts import count_cores, same_host, same_memory
from sparseallreduce.runtime.late_errors import LateErrors
from sparseallreduce.runtime.mailbox import Failure, Mailbox, Sent
from sparseallreduce.runtime.memory.dense import Area
from sparseallreduce.runtime.memory.host import HostMemory
from sparseallreduce.runtime.memory.sparse import SparseMemory
from sparseallreduce.runtime.operation import Operation
from sparseallreduce.runtime.overlaps import Overlaps
from sparseallreduce.runtime.processes import is_alive
from sparseallreduce.runtime.states import FAILED, PREPARING, READY, SETTLING
from sparseallreduce.runtime.work import Preparing

__all__ = ["Channel", "prepare"]

_OWN = 10  # bits of the number of one of the library's own operations, above which is that of the attempt
_STALE_PROBES = 32  # fewer than there are tags, and more than the operations that a rank can be behind
_numbers = count()


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
        self.unsent: Any = None  # the Failure of an attempt that ended before there was a way to tell others of it
        self.limit = 0.0  # until when we wait for those of others
        self.turn = threading.RLock()  # of threads that begin operations, one after the other
        self.lock = threading.RLock()  # of the operations in flight; nobody who may hold that of another channel waits for it
        self.machine: Machine | None = None
        self.collectives = Collectives()
        self.stale: deque[list[int]] = deque(maxlen=16)  # tags of exchanges that were given up, and how often they were looked for
        self.number = next(_numbers)  # which no other channel of this process has
        self.late = LateErrors(self)
        self.cores = 1  # that ranks of this host may run on
        self.oversubscribed = False  # whether ranks outnumber them
        self.near = frozenset(range(self.ranks))  # ranks of this host, to which messages go as they lie in memory
        self.in_pieces = True  # whether those to other hosts do not
        self.assumed = 0.0  # seconds a byte, before anything is measured
        self.hosts = Hosts((tuple(range(self.ranks)),))  # those whose ranks may share memory
        self.overlaps = Overlaps(self.rank, self.ranks)
        self.others = [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]
        self.sequence = 0  # number of the last operation that has been called
        self.begun = 0  # of the last that has begun
        self.own = 0  # likewise of the library's own, which count down
        self.agreed = 0.0  # when this rank has last seen the records of all, if they travel as messages
        self.attempt = 0  # to prepare the channel
        self.slots: list[SharedHandshake] = []  # in which operations take their handshakes in turn, if all ranks are on one host
        self.spare_handshakes: list[Handshake] = []  # by messages, to be used again
        self.orphaned: list[tuple[Handshake, int]] = []  # handshakes that operations which gave up have still to release
        self.areas: list[Area] = []  # where the ranks of one host add up dense vectors
        self.sparse_memory: SparseMemory | None = None  # and sparse streams
        self.host_memory: HostMemory | None = None  # in which the ranks of this host do what an algorithm leaves to them
        self.processes: list[tuple[int, int]] = []  # of all ranks, and when they started, if all are on one host
        self.in_flight: list[Operation] = []
        self.signatures: dict[Any, Any] = {}  # what is known of operations on streams of a kind
        self.messages: Any = None  # a duplicate of the communicator, once it is there; collectives have another
        self.mailbox: Any = None  # a Mailbox, with it
        self.duplicating: Any = None  # the request of the duplicate that is being made
        self._duplicates: list[tuple[Any, Any]] = []
        self._advancing = False
        self._preparation = self._prepare()

    def begin(self, comm: MPI.Intracomm) -> None:
        """Begin to prepare the channel."""
        # Of the user's communicator one duplicate is made, now: what happens on it later must be left to the user's own order.
        if not self._duplicates:
            self._duplicate(comm)
        self.messages, self.duplicating = self._duplicates[0]
        progress.channels.append(self)
        progress.preparing.append(self)

    def give_up(self, comm: MPI.Intracomm, error: BaseException) -> None:
        """The first operation has been hit while the preparation was about to begin: begin it, to tell the others."""
        self.next_sequence()
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
        if self.warned < self.ranks:
            self.unsent = self.failure
        self.last, self.failure, self.words, self.warned = self.failure, None, {}, -1
        self.let_go()
        self._preparation = self._prepare()
        progress.preparing.append(self)

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
                progress.preparing.remove(self)
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
        if self.unsent is not None:
            for other in self.others:
                self._post(other, self.unsent)
            self.unsent = None
        if len(self._duplicates) == 1:
            self._duplicate(self.messages)
        self.collectives.comm, self.duplicating = self._duplicates[1]
        while not self.duplicating.Test():
            yield False
        if self.attempt:
            yield from self._outcome(recovery(self, ALL))
        group = yield from self._outcome(setup.group_of_ranks())
        places, here = group.places, same_host(group.places, self.rank)
        self.near = frozenset(same_memory(places, self.rank))
        self.hosts = Hosts.of([place.memory for place in places])
        self.cores = count_cores(places[rank] for rank in here)
        self.oversubscribed = len(here) > self.cores
        self.machine = yield from self._outcome(setup.calibrated(self, group))
        if len(self.near) < self.ranks:
            self.in_pieces = self.machine.codec > 0
        else:
            self.sparse_memory = yield from self._outcome(setup.made_sparse_memory(self))
            made = yield from self._outcome(setup.made_slots_and_areas(self))
            self.slots, self.areas = made or ([], [])
        if self.hosts.most > 1:
            self.host_memory = yield from self._outcome(setup.made_host_memory(self))
        has_memory = self.host_memory is not None or len(self.hosts.members[self.hosts.place_of(self.rank)[0]]) == 1
        self.failed_through, all_have = yield from self._outcome(setup.settled(self.failed_through, has_memory))
        self.hosts = self.hosts._replace(share_memory=all_have)
        self.processes = group.processes if self.shares_memory else []
        for slot in self.slots:
            slot.first = self.failed_through + 1

    def _has_messages(self) -> bool:
        """Whether the first duplicate is there, by which ranks can be told anything."""
        if self.mailbox is None and self.messages is not None and self.duplicating is not None and self.duplicating.Test():
            # The tags of users' operations are below this, those of our own behind it, and last that of a preparation that failed.
            self.tag_limit = min(self.messages.Get_attr(MPI.TAG_UB) or 32767, 2**31 - 1) // 2
            self.mailbox = Mailbox(self.messages, self._is_over)
            self._alarms = self.mailbox.box(2 * self.tag_limit)
        return self.mailbox is not None

    def _outcome(self, schedule: Generator[Step, Any, Any]) -> Generator[bool, None, Any]:
        """The result of a schedule of the library's own; no trace counts it."""
        operation = setup.own_operation(self, Preparing(schedule))
        while not operation.done or self.state != PREPARING:  # as it is not while all settle on an error, after which all begins again
            yield False
        if operation.error is not None:
            raise operation.error
        return operation.result

    def fail(self, error: BaseException, announced: Failure | None = None) -> None:
        """The preparation has failed, here or, as has been ``announced``, on another rank: give the others word of it."""
        if self.state not in (PREPARING, READY):
            return
        failure = announced or Failure.of(error, self.attempt, self.rank, self.sequence)
        if announced is None and isinstance(error, WaitTimeoutError) and self.mailbox is None:
            failure = failure._replace(text=str(error))  # as all say whose time is over, who cannot tell each other
        started = [operation.sequence for operation in self.in_flight]  # by what the preparation had made
        self.failure = failure._replace(through=max(failure.through, self.failed_through, *started))
        self.cause = None if announced else error
        if self not in progress.preparing:
            progress.preparing.append(self)
        self.limit = perf_counter() + SETTLING_SECONDS
        self.state, self.collectives.usable = SETTLING, False
        if not self._advancing:
            self._preparation.close()
        if announced is None:  # maybe by an interrupt, after which this rank does something else
            limit = perf_counter() + WITHDRAWAL_SECONDS
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
        late = perf_counter() > self.limit + (0 if self._has_messages() else WITHDRAWAL_SECONDS)
        waited = [rank for rank in range(self.failure.culprit) if rank != self.rank and rank not in self.words]
        if not late and (self.mailbox is None or (waited and self.ranks <= SETTLING_RANKS)):
            return
        self.error = common_error([self.failure.announcement()])
        if self.failure.culprit == self.rank:
            self.error.__cause__ = self.cause
        for operation in tuple(progress.operations):
            if operation.channel is self and operation.own:
                operation.end(self.error)
        self.fail_through(self.failure)
        progress.preparing.remove(self)
        self.state, self.cause = FAILED, None

    def fail_through(self, failure: Failure) -> None:
        """End the user's operations that waited for a preparation which failed."""
        self.failed_through = max(self.failed_through, failure.through)
        for operation in tuple(progress.operations):
            if operation.channel is self and not operation.own and operation.sequence <= self.failed_through:
                # Where a rank was ready, and failed in the operation itself, that may count before.
                box = self.mailbox.boxes.get(self.tag(operation.sequence)) if self.mailbox is not None else None
                known = list(box.failures.values()) if box is not None else []
                if operation.failure is not None:
                    known.append(operation.failure)
                counting = min([failure, *known], key=by_culprit)
                operation.end(self.error if counting is failure and self.error is not None else common_error([counting.announcement()]))

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
                self.failure = min(failure, self.failure, key=by_culprit)._replace(through=through)
            elif self.state == FAILED:
                self.fail_through(failure)
            else:
                self.fail(common_error([failure.announcement()]), failure)
        error, self._alarms.error = self._alarms.error, None
        if error is not None:  # which has cost us word of another rank
            self.fail(error)

    def said(self) -> tuple[str, str]:
        """Who prepares the channel, for a warning that it takes long."""
        return f"rank {self.rank} of {self.ranks}", "the preparation of the communicator: MPI does not tell which ranks have not come to it"

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host, and share memory there."""
        return bool(self.slots)

    @property
    def spins(self) -> int:
        """How often to look at shared memory before a wait is a long one."""
        return self.slots[0].spins if self.slots else 1

    def handshake_of(self, sequence: int) -> Handshake:
        """That of an operation that is about to begin."""
        if self.slots:
            return self.slots[sequence % SLOTS]
        return self.spare_handshakes.pop() if self.spare_handshakes else MessageHandshake(self)

    def next_sequence(self) -> int:
        """The number of an operation that is called."""
        self.sequence += 1
        return self.sequence

    def next_own(self) -> int:
        """The number of an operation of the library's own."""
        self.own -= 1
        return self.own

    def is_near(self, rank: int) -> bool:
        """Whether messages to a rank go as they lie in memory."""
        return rank in self.near or not self.in_pieces

    @property
    def byte_seconds(self) -> float:
        """What a byte takes between ranks; what it is assumed to take while that is not known."""
        return self.assumed if self.machine is None else self.machine.beta

    def tag(self, sequence: int) -> int:
        """A tag which no other operation in flight has."""
        return sequence % self.tag_limit if sequence >= 0 else self.tag_limit + -sequence % self.tag_limit

    def _is_over(self, tag: int) -> bool:
        """Whether the operation of this tag, which is not in flight, has been before."""
        if tag >= 2 * self.tag_limit:
            return False
        operations = tuple(progress.operations)
        if any(operation.channel is self and operation.tag == tag for operation in operations):
            return False
        ours, latest = (tag, self.sequence) if tag < self.tag_limit else (tag - self.tag_limit, -self.own)
        return (ours - latest - 1) % self.tag_limit >= self.tag_limit // 2

    def tidy(self) -> None:
        """Answer ranks that gave up in operations that are over here, and let go what was left under way."""
        mailbox = self.mailbox
        for tag in tuple(mailbox.warned):  # of operations that were complete without a look at it
            if tag not in mailbox.boxes:
                mailbox.warned.discard(tag)
            elif self._is_over(tag):
                mailbox.finish(tag)
        while mailbox.strays:
            source, failure = mailbox.strays.pop()
            self.late.hear(failure)
            if not failure.reply and failure.number not in self.late.failed:
                sends: list[Sent] = []
                mailbox.post(source, self.tag(failure.number), failure._replace(reply=True).packed(), sends)
                mailbox.leftovers.keep_sent(sends)
        if mailbox.leftovers:
            mailbox.leftovers.tidy()
        self.orphaned = [(handshake, sequence) for handshake, sequence in self.orphaned if not handshake.abandon(sequence)]
        for stale in tuple(self.stale):
            self.drop(stale)
        if len(mailbox.boxes) > len(self.in_flight) + 1:  # word of ranks that gave up in operations which have been without it
            used = {operation.tag for operation in self.in_flight}
            for tag in tuple(mailbox.boxes):
                if tag not in used and self._is_over(tag):
                    mailbox.close(tag)

    def drop(self, stale: list[int]) -> None:
        """Receive and drop what has been sent to an exchange that was given up."""
        tag, looks = stale
        status = MPI.Status()
        while (left := self.collectives.comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
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

    def let_go(self) -> None:
        """Give memory and descriptors back, without a call of MPI."""
        self.slots, self.areas, self.sparse_memory, self.host_memory = [], [], None, None
        self.spare_handshakes, self.orphaned, self.signatures = [], [], {}


def prepare(channel: Channel) -> None:
    """Wait until a channel is ready for operations.

    Raises
    ------
    SparseAllreduceError
        If the preparation failed, on all ranks the same.
    """
    try:
        progress.wait_until(lambda: channel.state != SETTLING, channel.said, limited=True)
        if channel.state == FAILED:
            channel.restart()
        progress.wait_until(lambda: channel.state in (READY, FAILED), channel.said, limited=True)
    except BaseException as error:
        with channel.lock:
            channel.fail(error)
        raise
    if channel.error is not None:
        raise channel.error
