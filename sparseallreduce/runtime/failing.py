"""How an operation fails: in one place, :meth:`Failing.fail`, whatever raises and wherever.

* Before a rank publishes anything, it is done with all that may fail; what hits it there or later it tells the others by a message with
  the number of the operation. They raise the same. Of ranks that fail at once the lowest counts, so they tell each other what they know.
* A rank that has the result may still fail while it writes what others need for theirs; then it fails as before.
* Only MPI's own blocking sum cannot be told anything. A rank that has published that it enters it withdraws, unless another has seen
  already that all do; then it enters the sum, and raises behind it.
* A collective of MPI that some ranks have begun and others have not is begun by the others with the next operation, whose handshake tells
  that one is missing (:func:`~sparseallreduce.runtime.collectives.recovery`). What it comes to is thrown away.
* Who waits no longer recalls its record, so that a rank that comes later finds that, and not a result which the others have not waited
  for; where records travel as messages, it looks for the word of the failure itself.
* An error behind an operation that is over here may be news to ranks that have its result: it is raised by all in their next operation
  (:mod:`~sparseallreduce.runtime.late_errors`). An interrupt ends all operations that this rank has in flight on the communicator.
* A preparation that fails, fails on all ranks with the operations that waited for it, and the next operation begins another. Each rank
  gives all others word of it once, its own or what it has heard, so that here, too, the lowest that failed counts.
"""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from mpi4py import MPI

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Share, Step
from sparseallreduce.errors import SparseAllreduceError, WaitTimeoutError
from sparseallreduce.runtime import collectives, progress
from sparseallreduce.runtime.late_errors import LateError
from sparseallreduce.runtime.mailbox import Failure
from sparseallreduce.runtime.outbox import Outbox
from sparseallreduce.runtime.states import FAILED, READY, SETTLING

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel
    from sparseallreduce.runtime.handshake.base import Handshake
    from sparseallreduce.runtime.operation import Operation
    from sparseallreduce.runtime.shortcuts.base import Shortcut
    from sparseallreduce.runtime.trace import Trace
    from sparseallreduce.runtime.work import Work
    from sparseallreduce.streams.kernels.devices import Queue
    from sparseallreduce.streams.stream import SparseStream

__all__ = ["SETTLING_RANKS", "SETTLING_SECONDS", "Alike", "Failing", "GivenUp", "by_culprit"]

SETTLING_SECONDS = 0.25  # to wait for ranks whose error would count before ours; who has returned already does not answer
SETTLING_RANKS = 64  # up to which they are waited for
_RETRIES = 3  # of the way to fail, which may be interrupted, too


class GivenUp(Exception):
    """Another rank has given up."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Alike(SparseAllreduceError):
    """An error that says the same whichever rank meets it first."""


def by_culprit(failure: Failure) -> int:
    return failure.culprit


class Failing:
    """What an operation is to those who end it; :class:`~sparseallreduce.runtime.operation.Operation` is its only kind.

    What most operations never need is an attribute of the class until they do.
    """

    channel: Channel
    work: Work
    stream: SparseStream | None
    sequence: int
    traces: list[Trace]
    own = False  # whether it belongs to the preparation of the channel, which other operations wait for
    queue: Queue | None = None  # where its work on a GPU goes, if it may have any
    begun = False  # whether it takes part in the handshake, or in what comes behind it
    listed = False  # whether it is among those that are moved on
    handshake: Handshake | None = None  # until it is released
    shortcut: Shortcut | None = None  # that this rank is armed for, or takes
    stack: list[Any] | None = None  # schedules, the innermost last, if it takes no shortcut
    step: Step | None = None  # what the schedule waits for
    requests: list[MPI.Request] | None = None  # of a collective
    received: Any = None  # what the collective fills
    outbox: Outbox | None = None  # once it has sent anything
    result: Any = None
    error: Exception | None = None
    cause: BaseException | None = None  # what hit this rank
    failure: Failure | None = None  # whose error counts, as far as is known
    warned = -1  # the last rank that we have told of it
    limit = 0.0  # until when we wait for others whose error would count
    ended = False  # shortcut or schedule
    done = False  # and its messages are out

    @property
    def tag(self) -> int:
        return self.channel.tag(self.sequence)

    def outgoing(self) -> Outbox:
        """That of the operation."""
        outbox = self.outbox
        if outbox is None:
            outbox = self.outbox = Outbox(self.channel, self.tag, self.work.encoding, self.traces, self.queue)
        return outbox

    def fail(self, error: BaseException) -> None:
        """The one way to fail, for whatever has hit this rank, and for word that another has given up.

        Nothing is raised here but an interrupt that comes meanwhile, once the others have been told.
        """
        interrupt: BaseException | None = None
        for _ in range(_RETRIES):
            try:
                if self.owes():
                    self.ended, self.result = False, None
                self.enlist()
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
            self.end(common_error([Failure.of(latest, self.sequence, self.channel.rank).announcement()]))
        if interrupt is not None:
            raise interrupt
        if not isinstance(error, Exception):
            self.channel.late.end_all(error)

    def owes(self) -> bool:
        """Whether the result is there, but others wait for messages of ours that are still to be written: then it can still fail."""
        return self.ended and self.error is None and self.outbox is not None and self.outbox.owes()

    def enlist(self) -> None:
        """Have the operation moved on with all others."""
        if self.done:
            return
        if self.begun and not self.ended and self not in self.channel.in_flight:
            self.channel.in_flight.append(cast("Operation", self))
        if not self.listed:
            # In this order, and with no other call: an interrupt may come as soon as it has been appended, and not before.
            self.listed = True
            progress.operations.append(self)  # type: ignore[arg-type]

    def _fail(self, error: BaseException) -> None:
        channel = self.channel
        if channel.state == SETTLING and not self.own:
            return  # ends with the preparation
        if isinstance(error, GivenUp):
            failure = error.failure
            self._begin_to_fail()
        elif self.own or getattr(error, "on_all_ranks", False):
            own = Failure.of(error, self.sequence, channel.rank)
            self.end(error if isinstance(error, Exception) else common_error([own.announcement()]))
            return
        elif isinstance(error, LateError):
            failure = error.failure
            self._begin_to_fail()
            if self._has_fulfilled(failure):
                return
        elif isinstance(error, Alike):
            failure = Failure(self.sequence, channel.ranks, "SparseAllreduceError", str(error))  # any other error counts before it
        else:
            failure, self.cause = Failure.of(error, self.sequence, channel.rank), error
            if not self.begun and channel.state != READY:
                if channel.state == FAILED:
                    channel.restart()
                channel.fail(error)  # ends this operation, too, when that has settled
                return
            channel.late.mark(error)
            self._begin_to_fail()
            if self._has_fulfilled(failure):
                return
        if not self.begun:
            self.end(common_error([failure.announcement()]))
            return
        if self.awaits_mpi() or self.work.takes_collectives():  # others may have begun one that we shall not come to
            channel.collectives.usable = False  # of which the handshake of the next operation tells the other ranks
        if isinstance(error, WaitTimeoutError) and self.handshake is not None:
            self.handshake.recall(self.sequence)
        self._leave_handshake()  # now: later operations may come to it before this one has settled
        self.limit = perf_counter() + SETTLING_SECONDS
        self.failure = failure
        channel.late.note(self.sequence, failure)
        self._warn()
        self._settle()

    def _has_fulfilled(self, failure: Failure) -> bool:
        """Return whether the others have all that they need of this rank: then it ends here, and they raise the error later."""
        if not self._fulfils():
            return False
        late = self.channel.late
        late.note(self.sequence, failure)
        late.post(failure)
        self.end(common_error([failure.announcement()]))
        return True

    def _begin_to_fail(self) -> None:
        """Take part in the handshake, which is to be released or told that we have given up."""
        if self.begun:
            return
        for earlier in self.earlier():
            earlier.advance()
        self._enter(self.channel.handshake_of(self.sequence))
        self.enlist()

    def _fulfils(self) -> bool:
        """Whether the others have all that they need of this rank, which it does now if it has to."""
        handshake = self.handshake
        if handshake is not None and handshake.has_published(self.sequence):
            handshake.complete(self.sequence)  # those who know our record may go on without asking who else does
        else:
            handshake = None
        return self.shortcut is not None and self.shortcut.fulfil(self.sequence, handshake)

    def _leave_handshake(self) -> None:
        """Release the handshake, or see to it that it is released as soon as that gives up nothing which we have still to read there."""
        handshake, channel = self.handshake, self.channel
        if handshake is None:
            return
        orphan = handshake, self.sequence
        if orphan not in channel.orphaned and not handshake.abandon(self.sequence):
            channel.orphaned.append(orphan)
        self.handshake = None  # last: what raises here is tried again

    def _warn(self) -> None:
        """Tell all ranks whose error counts, as far as we know."""
        channel, failure = self.channel, self.failure
        assert failure is not None
        message = failure.packed()
        outbox = self.outgoing()
        while self.warned < channel.ranks:
            self.warned += 1
            if self.warned < channel.ranks and self.warned != channel.rank:
                outbox.post(self.warned, message)

    def _settle(self) -> None:
        """Wait for ranks whose error would count before the one that we know of, so that all raise the same."""
        channel, failure = self.channel, self.failure
        assert failure is not None
        channel.mailbox.take_in()
        channel.look()
        if channel.state == SETTLING:
            return
        failures = channel.mailbox.box(self.tag).failures
        for announced in failures.values():
            if not announced.reply and announced.culprit < failure.culprit:
                failure = self.failure = announced
        waited = [rank for rank in range(failure.culprit) if rank != channel.rank and rank not in failures]
        if not waited or channel.ranks > SETTLING_RANKS or perf_counter() > self.limit:
            channel.late.note(self.sequence, failure)  # that counts
            self.end(common_error([failure.announcement()]))

    def _leave(self) -> None:
        """The result is there, and the operation done once its last messages are out; called until then, from the start if interrupted."""
        if self in self.channel.in_flight:
            self.channel.in_flight.remove(self)
        self.stack = None
        mailbox = self.channel.mailbox
        outbox = self.outbox
        if outbox is not None and not outbox.is_empty():
            mailbox.take_in()
            if mailbox.strays or mailbox.warned:
                self.channel.tidy()
            box = mailbox.boxes.get(self.tag)
            if (box is not None and box.failures) or self.channel.late.is_owed:  # who gave up may call the library no more
                outbox.abandon()
        if outbox is None or outbox.is_empty():
            mailbox.finish(self.tag)
            if self.listed and self in progress.operations:
                progress.operations.remove(self)
            self.done = True

    def end(self, error: Exception) -> None:
        """End by an error that all ranks raise, or that they have been told of."""
        if self.done:
            return
        channel, entries = self.channel, self.work.entries(self.stream)
        if not self.ended:
            self.error = error
            if not self.own:
                channel.late.note(self.sequence)
            if self.cause is not None and error.__cause__ is None:
                error.__cause__ = self.cause
        self.ended = True
        if self.shortcut is not None:
            self.shortcut.cancel(self.sequence)
        if self in channel.in_flight:
            channel.in_flight.remove(self)
        if self.begun:
            self._leave_handshake()
            self._leave_messages()
        self.outbox = self.requests = self.received = None
        for generator in reversed(self.stack or ()):
            _close(generator)
        _close(self.work)
        self.stack = self.step = self.shortcut = self.stream = None
        for counts in self.traces:
            counts.complete(entries, None)
        self.done = True
        if self in progress.operations:
            progress.operations.remove(self)
        if self.begun and channel.mailbox is not None:
            channel.tidy()

    def _leave_messages(self) -> None:
        """Leave what is on its way to itself."""
        channel, step, mailbox = self.channel, self.step, self.channel.mailbox
        if mailbox is None:
            return
        if self.outbox is not None:
            self.outbox.abandon()
        mailbox.leftovers.keep(self.requests, self.received)
        if isinstance(step, Share) or (step is not None and self._is_direct(step)):
            sources = channel.ranks - 1
            if isinstance(step, DenseAllgather):
                sources = sum(low < high for rank, (low, high) in enumerate(step.ranges) if rank != channel.rank)
            for request in (self.requests or [])[:sources]:
                if request:  # MPI makes null what was found complete, and cancels nothing that is null
                    request.Cancel()
        channel.stale.append([self.tag, 0])  # also where others have come further than this rank, to an exchange
        mailbox.close(self.tag)

    def earlier(self) -> list[Any]:
        """The user's operations on this channel that were called before, and have not begun: a thread was moving others on at the time."""
        others = [operation for operation in tuple(progress.operations) if operation.channel is self.channel]
        return [other for other in others if other.is_waiting() and other.sequence < self.sequence]

    def is_waiting(self) -> bool:
        """Whether this operation of the user's has not begun."""
        return not (self.begun or self.own or self.done)

    def awaits_mpi(self) -> bool:
        """Whether this rank has begun a collective of MPI for it, which is not done."""
        native = isinstance(self.step, DenseAllreduce | DenseAllgather) and not self._is_direct(self.step)
        return native and self.requests is not None and not self.ended

    def _is_direct(self, step: Step) -> TypeGuard[DenseAllgather]:
        return isinstance(step, DenseAllgather) and self.channel.ranks <= collectives.DIRECT_RANKS

    def _enter(self, handshake: Handshake | None) -> None:
        raise NotImplementedError


def _close(generator: Any) -> None:
    """Close a generator, whatever it has to say to that: the operation has failed already."""
    with contextlib.suppress(Exception):
        generator.close()

