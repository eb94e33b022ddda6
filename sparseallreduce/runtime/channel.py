"""The internal state that the library keeps for each communicator of the user."""

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
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.runtime.work import Preparing

__all__ = ["Channel", "prepare"]

_OWN = 10  # low bits that number an internal operation; the bits above them number the attempt
_STALE_PROBES = 32  # less than the number of tags, and more than the number of operations that a rank can be behind
_NO_TRACES: list[Trace] = []
_numbers = count()


class Channel:
    """The state of one communicator: two duplicates of it, the operations in flight, and the measured constants of the machine.

    All ranks set it up together in the background. Operations wait until it is ready, so that ranks that use several communicators for the
    first time may do so in any order. If the setup fails on any rank, it fails on all ranks, along with the operations that waited for it,
    and the next operation starts it again.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.rank: int = comm.rank
        self.ranks: int = comm.size
        self.state: int = PREPARING
        self.error: Exception | None = None  # error of the last preparation, if it failed
        self.cause: BaseException | None = None  # exception on this rank that caused it, if any
        self.failed_through: int = 0  # number of the last operation that waited for a failed preparation
        self.failure: Any = None  # Failure of this attempt that takes precedence, as far as is known
        self.last: Any = None  # the same of the previous attempt
        self.words: dict[int, Failure] = {}  # failures announced by other ranks in this attempt
        self.warned: int = -1  # the last rank that this rank's failure was sent to
        self.unsent: Any = None  # Failure of an attempt that ended before it could be sent to other ranks
        self.limit: float = 0.0  # time until which announcements of other ranks are awaited
        self.start_lock: threading.RLock = threading.RLock()  # serialises the threads that start operations
        # Guards the operations in flight; no thread waits for it while it holds another channel's lock.
        self.lock: threading.RLock = threading.RLock()
        self.machine: Machine | None = None
        self.collectives: Collectives = Collectives()
        self.stale: deque[list[int]] = deque(maxlen=16)  # tags of abandoned exchanges, and how often each was probed
        self.number: int = next(_numbers)  # unique in this process
        self.late: LateErrors = LateErrors(self)
        self.cores: int = 1  # cores that ranks of this host may use
        self.oversubscribed: bool = False  # whether there are more ranks than cores
        self.near: frozenset[int] = frozenset(range(self.ranks))  # ranks of this host, to which messages go uncompressed
        self.in_pieces: bool = True  # whether messages to other hosts are compressed and sent in pieces
        self.assumed: float = 0.0  # assumed seconds per byte until they are measured
        self.hosts: Hosts = Hosts((tuple(range(self.ranks)),))  # groups of ranks that may share memory
        self.overlaps: Overlaps = Overlaps(self.rank, self.ranks)
        self.others: list[int] = [(self.rank + distance) % self.ranks for distance in range(1, self.ranks)]
        self.sequence: int = 0  # number of the last operation that was called
        self.begun = 0  # number of the last operation that has started
        self.own: int = 0  # number of the last internal operation; these count down
        self.agreed: float = 0.0  # time when this rank last had the records of all ranks, if they are sent as messages
        self.attempt: int = 0  # number of restarts of the preparation
        self.slots: list[SharedHandshake] = []  # used by operations in turn, if all ranks are on one host
        self.spare_handshakes: list[Handshake] = []  # message handshakes to be reused
        self.orphaned: list[tuple[Handshake, int]] = []  # handshakes of failed operations that are not released yet
        self.areas: list[Area] = []  # shared memory where the ranks of one host add dense vectors
        self.sparse_memory: SparseMemory | None = None  # shared memory where they add sparse streams
        self.host_memory: HostMemory | None = None  # shared memory for the steps of algorithms inside this host
        self.processes: list[tuple[int, int]] = []  # process id and start time of every rank, if all are on one host
        self.in_flight: list[Operation] = []
        self.signatures: dict[Any, Any] = {}  # cached signatures of operations
        self.messages: Any = None  # duplicate of the communicator for point-to-point messages; collectives use another
        self.mailbox: Any = None  # the Mailbox on that duplicate
        self.duplicating: Any = None  # request of the duplication in progress
        self._duplicates: list[tuple[Any, Any]] = []
        self._advancing = False
        self._preparation = self._prepare()

    def begin(self, comm: MPI.Intracomm) -> None:
        """Start to prepare the channel."""
        # The user's communicator is duplicated once, now; later calls on it would have to fit into the user's order of collectives.
        if not self._duplicates:
            self._duplicate(comm)
        self.messages, self.duplicating = self._duplicates[0]
        progress.channels.append(self)
        progress.preparing.append(self)

    def give_up(self, comm: MPI.Intracomm, error: BaseException) -> None:
        """Start the preparation after an error has hit the first operation, in order to report that error to the other ranks."""
        self.next_sequence()
        self.begin(comm)
        self.fail(error)

    def _duplicate(self, comm: Any) -> None:
        """Duplicate a communicator in one bytecode instruction, so that an interrupt cannot lose the result."""
        self._duplicates.extend(map(methodcaller("Idup"), (comm,)))

    def restart(self) -> None:
        """Start the preparation again after a failure."""
        self.state, self.error = PREPARING, None
        self.attempt += 1
        self.own = -(self.attempt << _OWN)
        if self.warned < self.ranks:
            self.unsent = self.failure
        self.last, self.failure, self.words, self.warned = self.failure, None, {}, -1
        self.release_memory()
        self._preparation = self._prepare()
        progress.preparing.append(self)

    def advance(self) -> None:
        """Progress the preparation."""
        if self.state not in (PREPARING, SETTLING) or self._advancing or not self.lock.acquire(blocking=False):
            return
        self._advancing = True
        try:
            if self.mailbox is not None:
                self.mailbox.take_in()
                self.process_alarms()
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
        """Set everything up, yielding False while waiting."""
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
        """Return True if the first duplicate is ready, so that this rank can send messages to other ranks."""
        if self.mailbox is None and self.messages is not None and self.duplicating is not None and self.duplicating.Test():
            # Tags: users' operations are below this limit, internal ones above it, and the last tag announces failed preparations.
            self.tag_limit: int = min(self.messages.Get_attr(MPI.TAG_UB) or 32767, 2**31 - 1) // 2
            self.mailbox = Mailbox(self.messages, self._is_over)
            self._alarms = self.mailbox.box(2 * self.tag_limit)
        return self.mailbox is not None

    def _outcome(self, schedule: Generator[Step, Any, Any]) -> Generator[bool, None, Any]:
        """Run a schedule of the library itself and return its result. Traces do not count it."""
        operation = self._begin_own(Preparing(schedule))
        while not operation.done or self.state != PREPARING:  # else the ranks settle on an error first
            yield False
        if operation.error is not None:
            raise operation.error
        return operation.result

    def _begin_own(self, work: Preparing) -> Operation:
        """Start and return an internal operation of the preparation, which traces do not count."""
        operation = Operation(self, work, None, self.next_own())
        operation.own, operation.traces = True, _NO_TRACES
        operation.enlist()
        operation.advance()
        return operation

    def fail(self, error: BaseException, announced: Failure | None = None) -> None:
        """Record that the preparation failed, on this rank or on the rank of the ``announced`` failure, and notify the other ranks."""
        if self.state not in (PREPARING, READY):
            return
        failure = announced or Failure.of(error, self.attempt, self.rank, self.sequence)
        if announced is None and isinstance(error, WaitTimeoutError) and self.mailbox is None:
            failure = failure._replace(text=str(error))  # every rank whose time is over uses this text, since they cannot communicate
        started = [operation.sequence for operation in self.in_flight]  # started when the channel was ready
        self.failure = failure._replace(through=max(failure.through, self.failed_through, *started))
        self.cause = None if announced else error
        if self not in progress.preparing:
            progress.preparing.append(self)
        self.limit = perf_counter() + SETTLING_SECONDS
        self.state, self.collectives.usable = SETTLING, False
        if not self._advancing:
            self._preparation.close()
        if announced is None:  # after an interrupt this rank may not call the library again
            limit = perf_counter() + WITHDRAWAL_SECONDS
            while not self._has_messages() and perf_counter() < limit:
                os.sched_yield()
        self._warn()

    def _warn(self) -> None:
        """Send the known failure to the other ranks, as soon as messages can be sent."""
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
        """Wait for lower ranks, whose errors take precedence, so that all ranks raise the same one; then end the waiting operations."""
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
        """End the user's operations that waited for a failed preparation."""
        self.failed_through = max(self.failed_through, failure.through)
        for operation in tuple(progress.operations):
            if operation.channel is self and not operation.own and operation.sequence <= self.failed_through:
                # A failure in the operation itself, on a rank that was ready, may take precedence.
                box = self.mailbox.boxes.get(self.tag(operation.sequence)) if self.mailbox is not None else None
                known = list(box.failures.values()) if box is not None else []
                if operation.failure is not None:
                    known.append(operation.failure)
                counting = min([failure, *known], key=by_culprit)
                operation.end(self.error if counting is failure and self.error is not None else common_error([counting.announcement()]))

    def process_alarms(self) -> None:
        """Process the announcements of ranks whose preparation of the channel failed."""
        failures = self._alarms.failures
        while failures:
            source, failure = failures.popitem()
            if failure.number < self.attempt:
                last = self.last
                if last is not None and last.number == failure.number and last.culprit < failure.culprit:
                    self._post(source, last)  # that rank may have lost our message, as below
                self.fail_through(failure)
                continue
            if failure.number > self.attempt:  # the other ranks have started another attempt without this rank
                self.attempt, self.words, self.warned = failure.number, {}, -1
                if self.state == SETTLING:
                    self.failure = failure._replace(through=max(failure.through, self.failure.through))
            self.words[source] = failure
            if self.state == SETTLING:
                through = max(failure.through, self.failure.through)
                if self.failure.culprit < failure.culprit:
                    self._post(source, self.failure)  # the error on that rank may have lost our message
                self.failure = min(failure, self.failure, key=by_culprit)._replace(through=through)
            elif self.state == FAILED:
                self.fail_through(failure)
            else:
                self.fail(common_error([failure.announcement()]), failure)
        error, self._alarms.error = self._alarms.error, None
        if error is not None:  # it has cost the announcement of another rank
            self.fail(error)

    def describe_wait(self) -> tuple[str, str]:
        """Return who is waiting and for what, for the warning about a long preparation."""
        return f"rank {self.rank} of {self.ranks}", "the preparation of the communicator: MPI does not report which ranks are missing"

    @property
    def shares_memory(self) -> bool:
        """True if all ranks run on one host and share memory there."""
        return bool(self.slots)

    @property
    def spins(self) -> int:
        """The number of times to poll shared memory before a wait counts as long."""
        return self.slots[0].spins if self.slots else 1

    def handshake_of(self, sequence: int) -> Handshake:
        """Return the handshake for an operation that is about to start."""
        if self.slots:
            return self.slots[sequence % SLOTS]
        return self.spare_handshakes.pop() if self.spare_handshakes else MessageHandshake(self)

    def next_sequence(self) -> int:
        """Return the number of the user's next operation."""
        self.sequence += 1
        return self.sequence

    def next_own(self) -> int:
        """Return the number of the library's next internal operation."""
        self.own -= 1
        return self.own

    def is_near(self, rank: int) -> bool:
        """Return True if messages to ``rank`` are sent uncompressed, in their memory layout."""
        return rank in self.near or not self.in_pieces

    @property
    def byte_seconds(self) -> float:
        """The time that a byte takes between ranks, in seconds; an assumed value until it is measured."""
        return self.assumed if self.machine is None else self.machine.beta

    def tag(self, sequence: int) -> int:
        """Return a message tag that no other operation in flight uses."""
        return sequence % self.tag_limit if sequence >= 0 else self.tag_limit + -sequence % self.tag_limit

    def _is_over(self, tag: int) -> bool:
        """Return True if the operation with this tag has already ended, rather than not yet started."""
        if tag >= 2 * self.tag_limit:
            return False
        operations = tuple(progress.operations)
        if any(operation.channel is self and operation.tag == tag for operation in operations):
            return False
        ours, latest = (tag, self.sequence) if tag < self.tag_limit else (tag - self.tag_limit, -self.own)
        return (ours - latest - 1) % self.tag_limit >= self.tag_limit // 2

    def tidy(self) -> None:
        """Reply to ranks that gave up in operations that have ended here, and release completed messages that were left behind."""
        mailbox = self.mailbox
        for tag in tuple(mailbox.warned):  # of operations that completed without reading the announcement
            if tag not in mailbox.boxes:
                mailbox.warned.discard(tag)
            elif self._is_over(tag):
                mailbox.finish(tag)
        while mailbox.late_failures:
            source, failure = mailbox.late_failures.pop()
            self.late.receive(failure)
            if not (failure.reply or failure.later or failure.number in self.late.failed):
                sends: list[Sent] = []
                mailbox.post(source, self.tag(failure.number), failure._replace(reply=True).packed(), sends)
                mailbox.leftovers.keep_sent(sends)
        if mailbox.leftovers:
            mailbox.leftovers.tidy()
        self.orphaned = [(handshake, sequence) for handshake, sequence in self.orphaned if not handshake.abandon(sequence)]
        for stale in tuple(self.stale):
            self.drop(stale)
        if len(mailbox.boxes) > len(self.in_flight) + 1:  # announcements about operations that ended without them
            used = {operation.tag for operation in self.in_flight}
            for tag in tuple(mailbox.boxes):
                if tag not in used and self._is_over(tag):
                    mailbox.close(tag)

    def drop(self, stale: list[int]) -> None:
        """Receive and discard messages that were sent to an abandoned exchange."""
        tag, looks = stale
        status = MPI.Status()
        while (left := self.collectives.comm.Improbe(MPI.ANY_SOURCE, tag, status)) is not None:
            place = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.mailbox.leftovers.keep([left.Irecv([place, MPI.BYTE])], place)
        stale[1] = looks + 1
        if stale[1] > _STALE_PROBES:
            self.stale.remove(stale)

    def check_processes(self) -> None:
        """Raise an error if a process of this host that takes part in the communicator has ended, since its rank will never answer.

        Raises
        ------
        SparseAllreduceError
            If a process has ended; the message names it.
        """
        for rank, process in enumerate(self.processes):
            if rank != self.rank and not is_alive(*process):
                raise SparseAllreduceError(f"rank {rank} has ended: its process {process[0]} is gone. Start the program again")

    def release_memory(self) -> None:
        """Release shared memory and file descriptors, without calling MPI."""
        self.slots, self.areas, self.sparse_memory, self.host_memory = [], [], None, None
        self.spare_handshakes, self.orphaned, self.signatures = [], [], {}


def prepare(channel: Channel) -> None:
    """Wait until a channel is ready for operations.

    Raises
    ------
    SparseAllreduceError
        If the preparation failed; the same error on all ranks.
    """
    try:
        progress.wait_until(lambda: channel.state != SETTLING, channel.describe_wait, limited=True)
        if channel.state == FAILED:
            channel.restart()
        progress.wait_until(lambda: channel.state in (READY, FAILED), channel.describe_wait, limited=True)
    except BaseException as error:
        with channel.lock:
            channel.fail(error)
        raise
    if channel.error is not None:
        raise channel.error
