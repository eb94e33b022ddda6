"""The interface of shortcuts: a rank arms one before the handshake, and if all ranks have armed the same one, they take it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.handshake.base import Handshake

__all__ = ["DENSE_SHARED", "FREE_BLOCKS", "MPI_SUM", "PACKED", "SPARSE_SHARED", "Shortcut"]

# Flags of the shortcut that a rank is armed for: its stream is packed into the record; it can enter MPI's own dense sum; its dense form is
# in shared memory; its sparse stream is in shared memory, with the result blocks that this rank does not use in the bits from FREE_BLOCKS.
PACKED, MPI_SUM, DENSE_SHARED, SPARSE_SHARED = 1, 2, 4, 8
FREE_BLOCKS = 4


class Shortcut(ABC):
    """A method for operations on streams of one layout; it serves one operation at a time."""

    __slots__ = ()

    flag: int  # one of those above
    spins: int  # number of polls before a wait counts as long

    @abstractmethod
    def arm(self, sequence: int, stream: SparseStream) -> int:
        """Do everything that may fail before the record is published, and return the flags to publish.

        Return 0 if the shortcut is in use or there is no memory for it.
        """

    def payload(self, stream: SparseStream) -> Any:
        """Return what to send with the record of a stream that :meth:`arm` has returned PACKED for: the stream, bytes, or None."""
        return stream

    @abstractmethod
    def commit(self, sequence: int, flags: int, handshake: Handshake) -> SparseStream | None:
        """Take the shortcut, which all ranks have armed with these common flags. ``handshake`` provides the other published data.

        Return the result if it is already complete, otherwise None.
        """

    @abstractmethod
    def poll(self, sequence: int, spins: int) -> SparseStream | None:
        """Return the result if the other ranks have done their part, polling up to ``spins`` times; otherwise None."""

    @abstractmethod
    def moved(self) -> tuple[int, int, int]:
        """Return the bytes sent and received, and the messages sent, by this rank in the operation.

        For a shortcut without messages, these are the figures of the corresponding algorithm.
        """

    def missing(self, sequence: int) -> list[int] | None:
        """Return the ranks that have not finished their part, or None if that is unknown."""
        return None

    def decline(self, sequence: int) -> None:  # noqa: B027 - most have nothing to do
        """Release the shortcut because not all ranks have armed it."""

    def cancel(self, sequence: int) -> None:  # noqa: B027
        """Withdraw this rank from the operation; other ranks may still be in it."""

    def fulfil(self, sequence: int, handshake: Handshake | None) -> bool:
        """Complete this rank's part after a failure, if other ranks may be waiting for it where no message reaches them.

        ``handshake`` is None before this rank's record is published and after the handshake was released. Return True if the other ranks
        have everything they need, so that they need not be notified.
        """
        return False
