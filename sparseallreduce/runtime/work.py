"""Define what an operation executes once the ranks agree: a sum, a reducer's schedule, or a step of a channel's preparation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.streams.wire import Encoding

if TYPE_CHECKING:
    from sparseallreduce.runtime.shortcuts.base import Shortcut
    from sparseallreduce.streams.stream import SparseStream

__all__ = ["BLOCKING", "FIRST", "OTHER", "Launched", "Preparing", "Work", "level", "pending", "waiting"]

# Levels of operations. OTHER: several may be in flight. FIRST: no other request is waited for, so that memory for one operation at a time
# may be used. BLOCKING: this rank may also block inside MPI.
OTHER, FIRST, BLOCKING = range(3)
pending: set[int] = set()  # numbers of requests that have not been seen to complete
waiting: set[Any] = set()  # operations of threads in blocking calls


def level(blocking: bool) -> int:
    """Return the level of an operation that starts now, which says which shortcuts it may take.

    It depends on whether requests are waited for, not on whether they are complete, since the choice, and so the bits of the result, must
    not depend on timing. Other threads that wait in blocking calls count as requests.
    """
    return OTHER if pending or waiting else BLOCKING if blocking else FIRST


class Work(ABC):
    """The work of an operation. One object may serve any number of operations, each with its own stream, or with None."""

    digest: int  # digest of the terms that must be equal on all ranks
    itemsize = 1  # bytes of a value
    encoding: Encoding = Encoding()  # how messages are encoded
    error: BaseException | None = None  # error in the arguments on this rank
    uneven: Any = None  # choice of all ranks while their streams differ much in length
    traced = True  # whether traces count its bytes

    @abstractmethod
    def intent(self, stream: SparseStream | None) -> Intent:
        """Return the description of the operation that is sent to the other ranks if they disagree."""

    def entries(self, stream: SparseStream | None) -> int:
        """Return the number of entries of this rank's stream."""
        return 0

    def note(self, stream: SparseStream | None) -> bytes:
        """Return a note by which ranks choose an algorithm, sent along with the record if possible."""
        return b""

    def choose(self, stream: SparseStream | None, level: int) -> Sequence[Shortcut]:
        """Return the shortcuts to try in order; the first that can be armed is used. ``level`` is one of the levels above."""
        return ()

    def record_entries(self, stream: SparseStream | None, entries: Sequence[int]) -> None:  # noqa: B027
        """Process the entries of all ranks after an agreement."""

    @abstractmethod
    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Generator[Step, Any, Any]:
        """Return the schedule that runs if no shortcut is taken; ``entries`` and ``notes`` are those of all ranks."""

    def takes_collectives(self) -> bool:
        """Return True if other ranks may be inside an MPI collective when an operation fails."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Clean up after an operation has failed, possibly before it had a schedule."""


class Launched(Work):
    """The work of one operation of any kind.

    Parameters
    ----------
    intent : Intent
    schedule : callable
        Returns the schedule.
    close : callable, optional
        Called if the operation fails, possibly before there is a schedule, and possibly more than once.
    encoding : Encoding
        How messages are encoded.
    traced : bool
        Whether traces count its bytes.
    """

    encoding: Encoding
    traced: bool
    digest: int
    error: BaseException | None

    def __init__(
        self,
        intent: Intent,
        schedule: Callable[[], Generator[Step, Any, Any]] | None = None,
        close: Callable[[], None] | None = None,
        encoding: Encoding = Encoding(),  # noqa: B008 - a constant
        traced: bool = True,
    ) -> None:
        self._intent, self._schedule, self._close, self.encoding, self.traced = intent, schedule, close, encoding, traced
        self.digest, self.error = digest_of(intent.terms), intent.error

    def intent(self, stream: SparseStream | None) -> Intent:
        return self._intent

    def entries(self, stream: SparseStream | None) -> int:
        return self._intent.entries

    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Generator[Step, Any, Any]:
        assert self._schedule is not None, "all ranks have been told of an error"
        return self._schedule()

    def close(self) -> None:
        self._schedule = None
        if self._close is not None:
            self._close()


class Preparing(Work):
    """A step of a channel's preparation, which needs no handshake."""

    digest = 0

    def __init__(self, schedule: Generator[Step, Any, Any]) -> None:
        self._schedule = schedule

    def intent(self, stream: SparseStream | None) -> Intent:
        return Intent((), 0)

    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Generator[Step, Any, Any]:
        return self._schedule
