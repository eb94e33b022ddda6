"""Define how an operation fails, whatever raises and wherever: :meth:`Failing.fail`.

* Before a rank publishes its record, it completes every step that may fail. If something fails at that point or later, the rank sends the
  other ranks a message with the number of the operation, and they raise the same error. If several ranks fail at the same time, the error
  of the lowest rank takes precedence, so ranks exchange what they know.
* A rank that has the result may still fail while it writes messages that others need for theirs. The operation then fails as before.
* Only MPI's own blocking sum cannot be interrupted by a message. A rank that has published that it enters the sum withdraws, unless another
  rank has already seen that all ranks enter; in that case it enters the sum, and raises afterwards.
* An MPI collective that only some ranks have started is started by the others in the next operation, whose handshake reports that one is
  missing (:func:`~sparseallreduce.runtime.collectives.recovery`). Its result is discarded.
* A rank whose wait timed out withdraws its record, so that a rank that arrives later sees the failure instead of a result that the others
  did not wait for. If records are sent as messages, the late rank reads the announcement of the failure itself.
* An error in a rank after its operation ended may be unknown to ranks that have the result. All ranks raise it in their next operation
  (:mod:`~sparseallreduce.runtime.late_errors`). An interrupt ends all operations that this rank has in flight on the communicator.
* A failed preparation fails on all ranks with the operations that waited for it, and the next operation starts another. Each rank sends one
  announcement to all others, of its own failure or one that it has received, so that the lowest failing rank takes precedence here, too.
"""

from __future__ import annotations

import contextlib
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeGuard

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
    from sparseallreduce.runtime.handshake.base import Handshake
    from sparseallreduce.runtime.interfaces import AnyChannel
    from sparseallreduce.runtime.shortcuts.base import Shortcut
    from sparseallreduce.runtime.trace import Trace
    from sparseallreduce.runtime.work import Work
    from sparseallreduce.streams.kernels.devices import Queue
    from sparseallreduce.streams.stream import SparseStream

__all__ = ["SETTLING_RANKS", "SETTLING_SECONDS", "CommonError", "Failing", "RemoteFailure", "by_culprit"]

SETTLING_SECONDS = 0.25  # to wait for lower ranks, whose errors take precedence; a rank that has returned does not answer
SETTLING_RANKS = 64  # larger communicators do not wait for them
_RETRIES = 3  # attempts to fail, since failing may be interrupted, too


class RemoteFailure(Exception):
    """Raised when another rank has announced its failure."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class CommonError(SparseAllreduceError):
    """An error whose text is the same on every rank, so that no rank takes precedence."""


def by_culprit(failure: Failure) -> int:
    """Sort key: the rank that failed."""
    return failure.culprit


class Failing:
    """The failure handling of an operation; :class:`~sparseallreduce.runtime.operation.Operation` is its only subclass.

    Fields that most operations never need are class attributes until they are set.
    """

    channel: AnyChannel
    work: Work
    stream: SparseStream | None
    sequence: int
    traces: list[Trace]
    steps_inside = 0  # number of steps inside a host that its schedule has reached
    own = False  # whether it is an internal operation, which prepares the channel
    queue: Queue | None = None  # queue of its work on a GPU, if there may be any
    begun = False  # whether it has entered the handshake or a later stage
    listed: bool = False  # whether it is in the list of operations to be progressed
    handshake: Handshake | None = None  # None once it is released
    shortcut: Shortcut | None = None  # the shortcut that this rank is armed for, or takes
    stack: list[Any] | None = None  # nested schedules, the innermost last, if it takes no shortcut
    step: Step | None = None  # the step that the schedule waits for
    requests: list[MPI.Request] | None = None  # requests of a collective
    received: Any = None  # arrays that the collective fills
    outbox: Outbox | None = None  # created when it first sends
    result: Any = None
    error: Exception | None = None
    cause: BaseException | None = None  # exception that hit this rank
    failure: Failure | None = None  # the failure that takes precedence, as far as is known
    warned: int = -1  # the last rank that it was sent to
    limit: float = 0.0  # time until which announcements of lower ranks are awaited
    ended: bool = False  # whether the shortcut or schedule has ended
    done: bool = False  # whether it has ended and its messages are sent

    @property
    def tag(self) -> int:
        return self.channel.tag(self.sequence)

    def outgoing(self) -> Outbox:
        """Return the outbox of the operation, created on first use."""
        outbox = self.outbox
        if outbox is None:
            outbox = self.outbox = Outbox(self.channel, self.tag, self.work.encoding, self.traces, self.queue)
        return outbox

    def fail(self, error: BaseException) -> None:
        """Fail because of an error on this rank or an announcement from another rank. All failures pass through this method.

        It raises nothing except an interrupt that arrives meanwhile, after the other ranks have been notified.
        """
        interrupt: BaseException | None = None
        for _ in range(_RETRIES):
            try:
                if self.has_unsent():
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

    def has_unsent(self) -> bool:
        """Return True if the result is complete but messages for other ranks are unwritten, so that the operation can still fail."""
        return self.ended and self.error is None and self.outbox is not None and self.outbox.has_unsent()

    def enlist(self) -> None:
        """Add the operation to the list of those that are progressed."""
        if self.done:
            return
        if self.begun and not self.ended and self not in self.channel.in_flight:
            self.channel.in_flight.append(self)
        if not self.listed:
            # Keep this order, without another call in between: no interrupt can occur between the two statements.
            self.listed = True
            progress.operations.append(self)

    def _fail(self, error: BaseException) -> None:
        channel = self.channel
        if channel.state == SETTLING and not self.own:
            return  # it ends with the preparation
        if isinstance(error, RemoteFailure):
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
        elif isinstance(error, CommonError):
            failure = Failure(self.sequence, channel.ranks, "SparseAllreduceError", str(error))  # any other error takes precedence
        else:
            failure, self.cause = Failure.of(error, self.sequence, channel.rank), error
            if not self.begun and channel.state != READY:
                if channel.state == FAILED:
                    channel.restart()
                channel.fail(error)  # this ends the operation, too, once the ranks have settled
                return
            channel.late.mark(error)
            self._begin_to_fail()
            if self._has_fulfilled(failure):
                return
        if not self.begun:
            self.end(common_error([failure.announcement()]))
            return
        if self.awaits_mpi() or self.work.takes_collectives():  # other ranks may have started one that this rank will not reach
            channel.collectives.usable = False  # the handshake of the next operation reports this to the other ranks
        if isinstance(error, WaitTimeoutError) and self.handshake is not None:
            self.handshake.recall(self.sequence)
        self._leave_handshake()  # now, since later operations may use it before this one has settled
        self.limit = perf_counter() + SETTLING_SECONDS
        self.failure = failure
        channel.late.note(self.sequence, failure)
        self._warn()
        self._settle()

    def _has_fulfilled(self, failure: Failure) -> bool:
        """Return True if the other ranks have all that they need of this rank.

        The operation then ends here, and the other ranks raise the error later.
        """
        if not self._fulfils():
            return False
        late = self.channel.late
        late.note(self.sequence, failure)
        late.post(failure)
        self.end(common_error([failure.announcement()]))
        return True

    def _begin_to_fail(self) -> None:
        """Join the handshake, so that the failure can be announced there and the handshake be released."""
        if self.begun:
            return
        for earlier in self.earlier():
            earlier.advance()
        self._enter(self.channel.handshake_of(self.sequence))
        self.enlist()

    def _fulfils(self) -> bool:
        """Return True if the other ranks have all that they need of this rank, after providing it if necessary."""
        handshake = self.handshake
        if handshake is not None and handshake.has_published(self.sequence):
            handshake.complete(self.sequence)  # ranks that have read our record may proceed without checking the others
        else:
            handshake = None
        return self.shortcut is not None and self.shortcut.fulfil(self.sequence, handshake)

    def _leave_handshake(self) -> None:
        """Release the handshake, or arrange for its release once no record in it is unread by this rank."""
        handshake, channel = self.handshake, self.channel
        if handshake is None:
            return
        orphan = handshake, self.sequence
        if orphan not in channel.orphaned and not handshake.abandon(self.sequence):
            channel.orphaned.append(orphan)
        self.handshake = None  # last, so that the method can be repeated if it raises

    def _warn(self) -> None:
        """Send the failure that takes precedence, as far as it is known, to all ranks."""
        channel, failure = self.channel, self.failure
        assert failure is not None
        message = failure.packed()
        outbox = self.outgoing()
        while self.warned < channel.ranks:
            self.warned += 1
            if self.warned < channel.ranks and self.warned != channel.rank:
                outbox.post(self.warned, message)

    def _settle(self) -> None:
        """Wait for announcements of lower ranks, whose errors take precedence, so that all ranks raise the same one."""
        channel, failure = self.channel, self.failure
        assert failure is not None
        channel.mailbox.take_in()
        channel.process_alarms()
        if channel.state == SETTLING:
            return
        failures = channel.mailbox.box(self.tag).failures
        for announced in failures.values():
            if not announced.reply and announced.culprit < failure.culprit:
                failure = self.failure = announced
        waited = [rank for rank in range(failure.culprit) if rank != channel.rank and rank not in failures]
        if not waited or channel.ranks > SETTLING_RANKS or perf_counter() > self.limit:
            channel.late.note(self.sequence, failure)  # the one that takes precedence
            self.end(common_error([failure.announcement()]))

    def _leave(self) -> None:
        """Finish an operation that has its result, once its last messages are sent.

        It is called repeatedly until then, and can be repeated from its start after an interrupt.
        """
        if self in self.channel.in_flight:
            self.channel.in_flight.remove(self)
        self.stack = None
        mailbox = self.channel.mailbox
        outbox = self.outbox
        if outbox is not None and not outbox.is_empty():
            mailbox.take_in()
            if mailbox.late_failures or mailbox.warned:
                self.channel.tidy()
            box = mailbox.boxes.get(self.tag)
            if (box is not None and box.failures) or self.channel.late.may_strand(self.sequence):
                outbox.abandon()
        if outbox is None or outbox.is_empty():
            mailbox.finish(self.tag)
            if self.listed and self in progress.operations:
                progress.operations.remove(self)
            self.done = True

    def end(self, error: Exception) -> None:
        """End the operation with an error that all ranks raise or have been told of."""
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
        """Hand pending messages over to the mailbox, which completes or cancels them later."""
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
                if request:  # completed requests are null, and cannot be cancelled
                    request.Cancel()
        channel.stale.append([self.tag, 0])  # also if other ranks have already reached an exchange
        mailbox.close(self.tag)

    def earlier(self) -> list[Any]:
        """Return the user's operations on this channel that were called before this one and have not started.

        They have not if another thread was progressing the channel when they were called.
        """
        others = [operation for operation in tuple(progress.operations) if operation.channel is self.channel]
        return [other for other in others if other.is_waiting() and other.sequence < self.sequence]

    def is_waiting(self) -> bool:
        """Return True if this is a user's operation that has not started."""
        return not (self.begun or self.own or self.done)

    def awaits_mpi(self) -> bool:
        """Return True if this rank has started an MPI collective for the operation that is not complete."""
        native = isinstance(self.step, DenseAllreduce | DenseAllgather) and not self._is_direct(self.step)
        return native and self.requests is not None and not self.ended

    def _is_direct(self, step: Step) -> TypeGuard[DenseAllgather]:
        return isinstance(step, DenseAllgather) and self.channel.ranks <= collectives.DIRECT_RANKS

    def advance(self, spin: bool = False) -> None:
        raise NotImplementedError

    def _enter(self, handshake: Handshake | None) -> None:
        raise NotImplementedError


def _close(generator: Any) -> None:
    """Close a generator and ignore its exceptions, since the operation has already failed."""
    with contextlib.suppress(Exception):
        generator.close()
