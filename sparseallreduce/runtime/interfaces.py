"""The interfaces through which the parts of the runtime use a channel and an operation.

A channel has operations, and an operation runs on a channel. Everything below the two, such as the progress of operations, the failure
handling, MPI's collectives, the outboxes and the handshakes, depends only on these interfaces. The modules
:mod:`~sparseallreduce.runtime.operation` and :mod:`~sparseallreduce.runtime.channel` implement them, so that imports form no circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.runtime.handshake.base import Handshake
from sparseallreduce.runtime.mailbox import Failure
from sparseallreduce.runtime.memory.host import HostMemory
from sparseallreduce.runtime.work import Work

if TYPE_CHECKING:
    from sparseallreduce.runtime.trace import Trace
    from sparseallreduce.streams.kernels.devices import Queue

__all__ = ["AnyChannel", "AnyOperation", "Lateness", "Ranks"]


class Ranks(Protocol):
    """The ranks of a communicator, where they run, and how messages reach them."""

    rank: int
    ranks: int
    others: list[int]
    near: frozenset[int]
    hosts: Hosts
    cores: int
    oversubscribed: bool
    machine: Machine | None
    in_pieces: bool
    assumed: float
    mailbox: Any  # the Mailbox; None until messages can be sent
    messages: Any  # the duplicate of the communicator that the mailbox uses
    collectives: Any  # the Collectives on the other duplicate
    host_memory: HostMemory | None

    @property
    def byte_seconds(self) -> float: ...

    def is_near(self, rank: int) -> bool:
        """Return True if messages to ``rank`` are sent uncompressed, in their memory layout."""

    def tag(self, sequence: int) -> int:
        """Return a message tag that no other operation in flight uses."""


class Lateness(Protocol):
    """The errors that some ranks raised in operations which other ranks had completed."""

    unshared: dict[int, Failure]

    def may_strand(self, number: int) -> bool:
        """Return True if a rank that gave up, and may not call the library again, may be one to which that operation still sends."""

    def note(self, number: int, failure: Failure | None = None) -> None:
        """Record that an operation has failed on this rank."""

    def mark(self, error: BaseException) -> None:
        """Mark an error as known to the other ranks."""

    def leave(self, error: BaseException, number: int) -> None:
        """Notify the other ranks of an error that a call raises after an operation, unless they know of it."""

    def check(self, number: int) -> None:
        """Raise a pending error of another rank in the operation with this number."""

    def compare(self, number: int) -> Generator[Step, Any, None]:
        """Compare the failed operations of all ranks before the operation with this number proceeds."""

    def post(self, failure: Failure) -> None:
        """Send all other ranks the failure of an operation that they may have completed."""

    def end_all(self, error: BaseException) -> None:
        """Fail all operations in flight with an interrupt."""


class AnyChannel(Ranks, Protocol):
    """The state of one communicator, with its operations."""

    number: int
    state: int
    error: Exception | None
    lock: Any
    sequence: int
    begun: int
    failed_through: int
    agreed: float
    slots: list[Any]
    spare_handshakes: list[Handshake]
    orphaned: list[tuple[Handshake, int]]
    stale: deque[list[int]]
    in_flight: list[Any]  # each an AnyOperation

    @property
    def late(self) -> Lateness: ...

    def advance(self) -> None:
        """Progress the preparation."""

    def restart(self) -> None:
        """Start the preparation again after a failure."""

    def fail(self, error: BaseException, announced: Failure | None = None) -> None:
        """Record that the preparation failed, and notify the other ranks."""

    def handshake_of(self, sequence: int) -> Handshake:
        """Return the handshake for an operation that is about to start."""

    def process_alarms(self) -> None:
        """Process the announcements of ranks whose preparation of the channel failed."""

    def tidy(self) -> None:
        """Reply to ranks that gave up, and release completed messages that were left behind."""

    def check_processes(self) -> None:
        """Raise an error if a process of this host that takes part in the communicator has ended."""


class AnyOperation(Protocol):
    """An operation of this rank, in flight or complete."""

    channel: AnyChannel
    work: Work
    sequence: int
    own: bool
    begun: bool
    ended: bool
    done: bool
    error: Exception | None
    failure: Failure | None
    queue: Queue | None
    steps_inside: int

    @property
    def traces(self) -> Sequence[Trace]: ...

    @property
    def tag(self) -> int: ...

    def advance(self, spin: bool = False) -> None:
        """Progress as far as possible."""

    def fail(self, error: BaseException) -> None:
        """Fail because of an error on this rank or an announcement from another rank."""

    def end(self, error: Exception) -> None:
        """End the operation with an error that all ranks raise or have been told of."""

    def has_unsent(self) -> bool:
        """Return True if messages for other ranks are unwritten, so that the operation can still fail."""

    def is_waiting(self) -> bool:
        """Return True if this is a user's operation that has not started."""

    def awaits_mpi(self) -> bool:
        """Return True if this rank has started an MPI collective for the operation that is not complete."""
