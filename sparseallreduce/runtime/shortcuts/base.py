"""What shortcuts have in common: a rank arms one before the handshake, and when all have armed the same one, they take it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.handshake.base import Handshake

__all__ = ["DENSE_SHARED", "FREE_BLOCKS", "MPI_SUM", "PACKED", "SPARSE_SHARED", "Shortcut"]

# What a rank publishes that it is armed for: its stream travels with the record; it can enter MPI's own dense sum; its dense form lies in
# shared memory; its stream does, and the bits from FREE_BLOCKS on tell which blocks for results this rank has no use for.
PACKED, MPI_SUM, DENSE_SHARED, SPARSE_SHARED = 1, 2, 4, 8
FREE_BLOCKS = 4


class Shortcut(ABC):
    """One way, for all operations on streams of a kind; for one operation at a time."""

    __slots__ = ()

    flag: int  # one of those above
    spins: int  # how often to look before a wait is a long one

    @abstractmethod
    def arm(self, sequence: int, stream: SparseStream) -> int:
        """Do all that may fail, before the others are told: the flags to publish; 0 if it is in use, or there is no memory for it."""

    @abstractmethod
    def commit(self, sequence: int, flags: int, handshake: Handshake) -> SparseStream | None:
        """All ranks have armed it, and have these flags in common; ``handshake`` tells what else they have published.

        Returns the result if that is all it takes.
        """

    @abstractmethod
    def poll(self, sequence: int, spins: int) -> SparseStream | None:
        """The result, if the others have come as far as that takes, or do while we look so many times."""

    @abstractmethod
    def moved(self) -> tuple[int, int, int]:
        """Of the operation: bytes that this rank has sent and received, or would have by messages, and messages sent."""

    def missing(self, sequence: int) -> list[int] | None:
        """The ranks that are not done with their part; None if that cannot be told."""
        return None

    def decline(self, sequence: int) -> None:  # noqa: B027 - most have nothing to do
        """Not all ranks have armed it, and none takes it."""

    def cancel(self, sequence: int) -> None:  # noqa: B027
        """This rank takes no part any more, if it did in this operation; others may still be at it."""

    def fulfil(self, sequence: int, handshake: Handshake | None) -> bool:
        """This rank has failed: do what the others have been promised, if they may be waiting in it where no word reaches them.

        ``handshake`` is None before our record is out and after it was released. Returns whether the others need to be told nothing.
        """
        return False
