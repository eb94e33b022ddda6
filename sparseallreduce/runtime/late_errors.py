"""Propagate errors that some ranks raised in an operation that others had completed: those raise them in their next operation.

Otherwise a rank that does not know of the error would wait in that operation for a rank that has left its loop. A rank learns of such an
error in one of two ways, whichever comes first:

* **By a message.** A rank that fails notifies all others with the number of the operation. A rank that has completed that operation raises
  the error in the operation that it is waiting for, or else in its next one, and notifies the others that this one has failed. A message
  may say that its sender has completed the operation: a rank on which it is in flight then completes it, too, before it raises the error.
* **By the handshake.** A rank on which an operation has failed reports in its next record that there is something to compare. All ranks
  then compare which operations have failed and which have been completed, and all raise the error if an operation is in both sets.

An error that all ranks have raised is settled. So is one with a lower number than a failed operation, since every rank has raised an error
in that one, but not before an operation between the two, still in flight on this rank, has compared it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.runtime import progress
from sparseallreduce.runtime.mailbox import Failure, Sent
from sparseallreduce.runtime.states import FREED, READY

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import AnyChannel

__all__ = ["LateError", "LateErrors"]

_COMPARED = 32  # largest number of failed operations per rank that are compared, oldest first
_NUMBER_BYTES = 24  # size of an operation's number as text
_FAILURE_BYTES = 4096  # size of a Failure as text
_REMEMBERED = 256  # failed operations whose numbers are kept


class LateError(Exception):
    """Raised to fail an operation on this rank because of an error that occurred on another rank or in an earlier operation."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class LateErrors:
    """The operations that failed on some ranks of a communicator, as far as this rank knows.

    Parameters
    ----------
    channel : Channel
    """

    def __init__(self, channel: AnyChannel) -> None:
        self._channel = channel
        self.failed: deque[int] = deque(maxlen=_REMEMBERED)  # numbers of operations that failed on this rank
        self.unshared: dict[int, Failure] = {}  # those that may not have failed on all ranks
        self._overdue: Failure | None = None  # failure of an operation that this rank has completed
        self._raised_through = -1  # the last operation called when it was raised; -1 until then
        self._ending = False
        self._settled = -1  # errors of operations up to this number are settled
        self._raised = -1  # they will be up to this one, once no earlier operation is in flight

    def note(self, number: int, failure: Failure | None = None) -> None:
        """Record that an operation has failed on this rank; pass its ``failure`` if it may not have failed on all ranks."""
        if number not in self.failed:
            self.failed.append(number)
        if failure is not None:
            self.unshared[number] = failure
        if self._overdue is not None and self._overdue.number == number and self._raised_through < 0:
            self._overdue = None  # this rank was to complete the operation
        self._settle(number - 1)

    def receive(self, failure: Failure) -> None:
        """Record that another rank has failed in an operation that has ended on this rank."""
        self._settle()
        if failure.reply or failure.number <= self._settled or failure.number in self.failed:
            return
        known = self._overdue
        if known is None or self._raised_through >= 0 or (failure.number, failure.culprit) < (known.number, known.culprit):
            self._overdue, self._raised_through = failure, -1

    def may_strand(self, number: int) -> bool:
        """Return True if a rank that gave up, and may not call the library again, may be one to which that operation still sends."""
        return self._overdue is not None and not (self._overdue.later and self._overdue.number == number)

    def check(self, number: int) -> None:
        """Raise a pending error of another rank in the operation with this number.

        Raises
        ------
        LateError
            If such an error is pending.
        """
        if self._overdue is not None:
            self._settle()
        overdue = self._overdue
        if overdue is None or number <= overdue.number:
            return
        if self._raised_through < 0:
            self._raised_through = self._channel.sequence  # every operation that waits for a rank that may have left must raise
        if number <= self._raised_through:
            raise LateError(overdue._replace(number=number, later=False))
        self._overdue, self._raised_through = None, -1

    def mark(self, error: BaseException) -> None:
        """Mark an error as known to the other ranks of this channel."""
        vars(error).setdefault("_reported_on", set()).add(self._channel.number)

    def is_reported(self, error: BaseException) -> bool:
        """Return True if the other ranks know of an error, or raise it, too."""
        return bool(getattr(error, "on_all_ranks", False)) or self._channel.number in getattr(error, "_reported_on", ())

    def leave(self, error: BaseException, number: int) -> None:
        """Notify the other ranks of an error that a call raises after an operation, unless they know of it."""
        if not self.is_reported(error):
            self.notify(error, number)

    def notify(self, error: BaseException, number: int) -> None:
        """Notify all other ranks of an error that this rank raises after an operation, which may be complete here and elsewhere."""
        channel = self._channel
        mailbox = channel.mailbox
        if mailbox is None or channel.state == FREED:
            return
        failure = Failure.of(error, number, channel.rank)._replace(later=self._is_done(number))
        self.note(number, failure)
        self.mark(error)
        self.post(failure)
        if not isinstance(error, Exception):
            self.end_all(error)

    def end_all(self, error: BaseException) -> None:
        """Fail all operations in flight with an interrupt, because this rank may leave without waiting for them."""
        channel = self._channel
        if self._ending or channel.state != READY:
            return
        self._ending = True
        try:
            for each in sorted(progress.operations, key=lambda operation: operation.sequence):
                if each.channel is channel and each.failure is None and not each.ended:
                    each.fail(error)
        finally:
            self._ending = False

    def post(self, failure: Failure) -> None:
        """Send all other ranks the failure of an operation that they may have completed."""
        channel, sends = self._channel, list[Sent]()
        try:
            for other in channel.others:
                channel.mailbox.post(other, channel.tag(failure.number), failure.packed(), sends)
        finally:
            channel.mailbox.leftovers.keep_sent(sends)

    def compare(self, number: int) -> Generator[Step, Any, None]:
        """Compare the failed operations of all ranks before the operation with this number proceeds.

        Raises
        ------
        SparseAllreduceError
            If an operation failed on some ranks and completed on others; the same error on all ranks.
        """
        self._settle()
        ours = json.dumps(sorted(self.unshared)[:_COMPARED]).encode().ljust(_COMPARED * _NUMBER_BYTES)
        texts: list[bytes] = yield Share(ours)
        failed = sorted({each for text in texts for each in json.loads(text)})
        completed: list[bytes] = yield Share(bytes(map(self._has_completed, failed)).ljust(_COMPARED * len(texts), b"\0"))
        uneven = [each for place, each in enumerate(failed) if any(text[place] for text in completed)]
        if uneven:
            known = self.unshared.get(uneven[0])
            texts = yield Share(json.dumps(known, ensure_ascii=False).encode("utf-8", "replace").ljust(_FAILURE_BYTES))
            failures = [Failure(*known) for known in map(json.loads, texts) if known is not None]
            self._settle(number - 1)
            raise common_error([min(failures, key=lambda failure: failure.culprit).announcement()])
        for each in failed:
            self.unshared.pop(each, None)

    def _has_completed(self, number: int) -> bool:
        """Return True if this rank has completed an operation and has raised no error since."""
        channel = self._channel
        if number > channel.begun or number <= max(self._settled, channel.failed_through) or number in self.failed:
            return False
        return not any(each.channel is channel and each.sequence == number and not each.ended for each in progress.operations)

    def _is_done(self, number: int) -> bool:
        """Return True if this rank has completed an operation, and the other ranks need nothing more of it to complete it, too."""
        sending = [each.sequence for each in progress.operations if each.channel is self._channel]
        sending += [each.sequence for each in self._channel.mailbox.leftovers.outboxes]
        return number not in sending and self._has_completed(number)

    def _settle(self, number: int = -1) -> None:
        """Discard the errors of operations up to this one, except those that an earlier operation, still in flight, has to raise."""
        self._raised = number = max(number, self._raised)
        for each in progress.operations:
            if each.channel is self._channel and each.sequence >= 0 and not each.ended and each.failure is None:
                number = min(number, each.sequence - 2) if each.sequence <= number else number
        if number <= self._settled:
            return
        self._settled = number
        for failed in tuple(self.unshared):
            if failed <= number:
                self.unshared.pop(failed, None)
        if self._overdue is not None and self._overdue.number <= number and self._raised_through < 0:
            self._overdue = None
