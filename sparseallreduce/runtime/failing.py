"""How an operation fails: in one place, :meth:`Failing.fail`, whatever raises and wherever.

* Before a rank tells the others anything, it is done with all that may fail; what hits it there or later it tells them by a message with
  the number of the operation. They raise the same. Of ranks that fail at once the lowest counts, so they tell each other what they know.
* Only MPI's own blocking sum cannot be told anything. A rank that has said that it enters it takes that back, unless another has seen
  already that all do; then it enters the sum, and raises behind it.
* A collective of MPI that some ranks have begun and others have not is begun by the others with the next operation, whose agreement tells
  that one is missing (:func:`~sparseallreduce.runtime.collectives.recovery`). What it comes to is thrown away.
* A preparation that fails, fails on all ranks with the operations that waited for it, and the next operation begins another. Each rank
  gives all others word of it once, its own or what it has heard, so that here, too, the lowest that failed counts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeGuard

from mpi4py import MPI

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Step
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime import collectives, progress
from sparseallreduce.runtime.board import Slot
from sparseallreduce.runtime.handshake import UNWELL, all_ready, heard, rows_for, tell
from sparseallreduce.runtime.mailbox import Failure, Sent
from sparseallreduce.runtime.shared import SharedStep
from sparseallreduce.runtime.states import FAILED, READY, SETTLING

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel
    from sparseallreduce.runtime.trace import Trace

__all__ = ["PROMISED", "SETTLING_RANKS", "SETTLING_SECONDS", "Alike", "Failing", "GivenUp", "by_culprit"]

SETTLING_SECONDS = 0.25  # to wait for ranks whose error would count before ours; who has returned already does not answer
SETTLING_RANKS = 64  # up to which they are waited for
PROMISED = 1.0  # seconds to wait, after a fault, for what the others say to a collective of MPI that they may be about to enter
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
    """What an operation is to those who end it; :class:`~sparseallreduce.runtime.operation.Operation` is its only kind."""

    channel: Channel
    own: bool  # whether it belongs to the preparation of the channel, which other operations wait for
    turn: int
    tag: int
    traces: list[Trace]
    entries: int
    stack: list[Any]
    collective: Callable[[], bool]

    def __init__(self) -> None:
        self.started = False
        self.step: Step | SharedStep | None = None  # what the schedule waits for
        self.requests: list[MPI.Request] | None = None  # of a collective
        self.received: Any = None  # what the collective fills
        self.shared = False  # whether the others have been told anything
        self.telling: Callable[[], None] | None = None  # tells by messages those who have not been told yet, if any
        self.promise: DenseAllreduce | None = None  # the collective of MPI which the others have been told that we enter
        self.committed = False  # whether all ranks enter it
        self.entered = False  # and we have
        self.box: Any = None  # a Box, once started
        self.sends: list[Sent] = []
        self.slot: Slot | None = None  # of the board, which this operation has still to leave
        self.error: Exception | None = None
        self.cause: BaseException | None = None  # what hit this rank
        self.failure: Any = None  # the Failure whose error counts, as far as is known
        self.warned = -1  # the last rank that we have told of it
        self.limit = 0.0  # until when we wait for others whose error would count
        self.ended = False  # the schedule
        self.done = False  # and its messages are out

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
        if isinstance(error, GivenUp):
            failure = error.failure
        elif self.own or getattr(error, "on_all_ranks", False):
            self.end(error if isinstance(error, Exception) else common_error([Failure.of(error, self.turn, channel.rank).said()]))
            return
        elif isinstance(error, Alike):
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
            if self.telling is not None and channel.ranks <= collectives.DIRECT_RANKS:
                self.telling()  # those who have been told may go on without asking who else has
                self.telling = None
            if self._keeps_its_promise():
                self.end(common_error([failure.said()]))
                return
        if not self.started:
            self.end(common_error([failure.said()]))
            return
        if self.awaits_mpi() or self.collective():  # others may have begun one that we shall not come to
            channel.native.usable = False  # of which the agreement of the next operation tells the other ranks
        self._leave_slot()  # now: later operations may come to it before this one has settled
        self.limit = perf_counter() + SETTLING_SECONDS
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
        limit = perf_counter() + PROMISED
        while not MPI.Request.Testall(self.requests):
            if perf_counter() > limit:
                return False
            os.sched_yield()
        return all_ready(*heard(UNWELL, map(memoryview, self.received)))

    def _warn(self) -> None:
        """Tell all ranks whose error counts, as far as we know, and what they have still to hear from us in the first step."""
        channel, failure = self.channel, self.failure
        if not self.shared and self.slot is None and not self.own:  # a collective that tells them may be under way, which waits for us
            self.shared = True
            rows = rows_for(UNWELL, channel, True)
            requests: list[MPI.Request] = []
            try:
                tell(UNWELL, channel, self.tag, True, rows, requests)
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
        if not waited or channel.ranks > SETTLING_RANKS or perf_counter() > self.limit:
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
        if self in progress.operations:
            progress.operations.remove(self)
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

    def _earlier(self) -> list[Any]:
        """The user's operations on this channel that were called before, and have not begun: a thread was moving others on at the time."""
        others = [operation for operation in tuple(progress.operations) if operation.channel is self.channel]
        return [other for other in others if other.is_waiting() and other.turn < self.turn]

    def is_waiting(self) -> bool:
        """Whether this operation of the user's has not begun."""
        return not (self.started or self.own or self.done)

    def awaits_mpi(self) -> bool:
        """Whether this rank has begun a collective of MPI for it, which is not done."""
        native = isinstance(self.step, DenseAllreduce | DenseAllgather) and not self._is_direct(self.step)
        return native and self.requests is not None and not self.ended

    def _is_direct(self, step: Step | SharedStep) -> TypeGuard[DenseAllgather]:
        return isinstance(step, DenseAllgather) and self.channel.ranks <= collectives.DIRECT_RANKS

    def _start(self) -> bool:
        raise NotImplementedError

    def _enter(self, step: DenseAllreduce) -> None:
        raise NotImplementedError


def _closed(generator: Any) -> None:
    """Close a generator, whatever it has to say to that: the operation has failed already."""
    with contextlib.suppress(Exception):
        generator.close()
