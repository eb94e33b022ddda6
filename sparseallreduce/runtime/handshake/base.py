"""The handshake that starts every operation: the record that a rank publishes, and the interface of all kinds of handshake.

Each rank publishes what it is about to do once it is able to do all of it. When all ranks have, each knows whether they mean the same
operation, how many entries each has, and which shortcut all of them are armed for. A short stream is sent along with the record.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DISAGREED", "PENDING", "RECORD", "UNUSABLE", "WITHDRAWN", "Handshake", "payload_capacity"]

# Fields, in 8-byte words: whether MPI's collectives are usable, size in bytes of the stream after the record, whether the arguments are
# valid, flags of the armed shortcut, digest of the operation's terms, and entries of the stream.
RECORD = struct.Struct("<?xxxI?B6xQq")
# What :meth:`Handshake.agree` returns besides flags: some have not published; the ranks' operations differ, or the arguments of one are
# wrong; all have published, but one has timed out, and its failure message is on its way.
PENDING, DISAGREED, WITHDRAWN = -1, -2, -3
UNUSABLE = 1 << 8  # above the flags: MPI's collectives must be recovered before they are used

_CAPACITY = 1 << 18  # bytes of the streams of all ranks sent with the records: 131,072 a rank at P = 2
_RANKS = 16  # from 17 ranks on only records are exchanged


def payload_capacity(ranks: int) -> int:
    """Return the largest stream of a rank, in bytes, that can be sent with its record."""
    return _CAPACITY // ranks if ranks <= _RANKS else 0


class Handshake(ABC):
    """The records that the ranks publish for one operation, or for successive operations."""

    spins: int  # number of polls before a wait counts as long
    carries_notes = False  # whether notes for the choice of an algorithm may be sent with the record
    note = b""  # this rank's next note

    @abstractmethod
    def is_free(self, sequence: int) -> bool:
        """Return True if this rank may publish: every rank has read what was published for an earlier operation."""

    @abstractmethod
    def publish(
        self, sequence: int, usable: bool, flags: int, digest: int, entries: int, payload: packed.Payload = None, valid: bool = True
    ) -> int:
        """Publish this rank's record, followed by a packed stream or other bytes if any; return the size of these in bytes.

        If it raises before the record is sent, the record is not published.
        """

    @abstractmethod
    def has_published(self, sequence: int) -> bool:
        """Return True if any other rank may have, or receive, this rank's record."""

    @abstractmethod
    def agree(self, sequence: int, spins: int, flags: int, digest: int, itemsize: int) -> int:
        """Return what all ranks have in common, once all have published; poll up to ``spins`` times.

        The result is the set of ``flags`` that all ranks have published, plus ``UNUSABLE`` if MPI's collectives are unusable on any rank;
        or ``DISAGREED``, ``WITHDRAWN`` or ``PENDING``. ``itemsize`` is the size of a value in bytes.
        """

    @abstractmethod
    def entries(self) -> list[int]:
        """Return the number of entries of each rank, after an agreement."""

    def notes(self) -> Sequence[bytes]:
        """Return the notes of all ranks after an agreement; empty if no notes are sent."""
        return ()

    @abstractmethod
    def lengths(self) -> list[int]:
        """Return the size in bytes of each rank's packed stream, after an agreement."""

    @abstractmethod
    def payloads(self) -> list[NDArray[np.uint8]]:
        """Return what each rank has sent with its record, after an agreement: views that are valid until :meth:`release`."""

    @abstractmethod
    def reduced(self, layout: packed.Layout, reduction: Reduction) -> SparseStream:
        """Return the reduction of the packed streams of all ranks, after an agreement."""

    @abstractmethod
    def commit(self, sequence: int) -> bool:
        """Commit to a blocking MPI collective that all ranks are armed for.

        Return True if all ranks will enter it, False if one has withdrawn.
        """

    @abstractmethod
    def withdraw(self, sequence: int) -> bool:
        """Withdraw from that collective after publishing; return False if another rank has already committed to it."""

    def recall(self, sequence: int) -> None:  # noqa: B027 - where word of it comes with the records, there is nothing to do
        """Withdraw this rank's record because its wait has timed out, so that late ranks do not find it.

        It is used only for operations without an MPI collective. Nothing is to be done where failure messages come with the records.
        """

    @abstractmethod
    def missing(self, sequence: int) -> list[int] | None:
        """Return the ranks whose records have not arrived, or None if that is unknown."""

    @abstractmethod
    def complete(self, sequence: int) -> None:
        """Finish publishing if an interrupt has cut it short."""

    @abstractmethod
    def release(self, sequence: int) -> None:
        """Mark the records as read by this rank."""

    @abstractmethod
    def abandon(self, sequence: int) -> bool:
        """Release the handshake after a failure of this rank; return False if it must be called again later.

        A rank that has not published does so now, as failed, so that no other rank waits for its record.
        """
