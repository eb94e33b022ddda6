"""What an operation carries out once the ranks agree: a sum, the schedule of a reducer, or a step of the preparation of a channel."""

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

__all__ = ["BLOCKING", "FIRST", "OTHER", "Launched", "Preparing", "Work"]

# What an operation may take: what several in flight may; memory that one at a time has, as no other request is waited for; or what blocks,
# as this rank has nothing else to do.
OTHER, FIRST, BLOCKING = range(3)


class Work(ABC):
    """The same object for any number of operations, each with its own stream, or with None."""

    digest: int  # of what has to be the same on all ranks
    itemsize = 1  # bytes of a value
    encoding = Encoding()  # how messages are written
    error: BaseException | None = None  # what is wrong with the arguments on this rank
    counted = True  # by traces

    @abstractmethod
    def intent(self, stream: SparseStream | None) -> Intent:
        """What to tell the other ranks, should they not agree."""

    def entries(self, stream: SparseStream | None) -> int:
        """Of our stream."""
        return 0

    def note(self, stream: SparseStream | None) -> bytes:
        """What else to tell the other ranks, by which they choose an algorithm; where it can travel with the record."""
        return b""

    def choose(self, stream: SparseStream | None, level: int) -> Sequence[Shortcut]:
        """The shortcuts to be armed, as far as the first that can be; ``level`` is one of those above."""
        return ()

    @abstractmethod
    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Generator[Step, Any, Any]:
        """What the ranks do if they take no shortcut; ``entries`` and ``notes`` are those of all ranks."""

    def takes_collectives(self) -> bool:
        """Whether other ranks may be inside a collective of MPI when an operation fails."""
        return True

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """An operation has failed, maybe before it had a schedule."""


class Launched(Work):
    """One operation of any kind.

    Parameters
    ----------
    intent : Intent
    schedule : callable
        Makes it.
    close : callable, optional
        Called if the operation fails, maybe before there is a schedule, and maybe more than once.
    encoding : Encoding
        How messages are written.
    """

    def __init__(
        self,
        intent: Intent,
        schedule: Callable[[], Generator[Step, Any, Any]] | None = None,
        close: Callable[[], None] | None = None,
        encoding: Encoding = Encoding(),  # noqa: B008 - a constant
    ) -> None:
        self._intent, self._schedule, self._close, self.encoding = intent, schedule, close, encoding
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
    """A step of the preparation of a channel, which needs no handshake."""

    digest = 0

    def __init__(self, schedule: Generator[Step, Any, Any]) -> None:
        self._schedule = schedule

    def intent(self, stream: SparseStream | None) -> Intent:
        return Intent((), 0)

    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Generator[Step, Any, Any]:
        return self._schedule
