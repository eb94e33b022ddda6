"""The handshake that every operation begins with: the record that a rank publishes, and what all kinds of handshake have in common.

Each rank publishes what it is about to do, once it can do all of it. When all have, each knows whether they mean the same operation, how
many entries each has, and which shortcut all of them are armed for. A short stream travels behind the record.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence

from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DISAGREED", "PENDING", "RECORD", "UNUSABLE", "WITHDRAWN", "Handshake", "payload_capacity"]

# Of a rank: whether MPI's collectives are usable, bytes of the stream behind the record, whether the arguments are right, the flags of the
# shortcut that it is armed for, the digest of the operation's terms, and the entries of its stream. Words of 8 bytes each.
RECORD = struct.Struct("<?xxxI?B6xQq")
# What :meth:`Handshake.agree` returns besides flags: not all have published; not all mean the same, or the arguments of one are wrong; all
# have, but one of them waits no longer, of which word is on its way.
PENDING, DISAGREED, WITHDRAWN = -1, -2, -3
UNUSABLE = 1 << 8  # above the flags: on some rank MPI's collectives cannot be used before the ranks have recovered them

_CAPACITY = 1 << 18  # bytes of the streams of all ranks that travel with the records: 131,072 of a rank at P = 2
_RANKS = 16  # from 17 ranks on only records are exchanged


def payload_capacity(ranks: int) -> int:
    """The most bytes of a rank's stream that travel behind its record."""
    return _CAPACITY // ranks if ranks <= _RANKS else 0


class Handshake(ABC):
    """What the ranks publish for one operation, or for one operation after the other."""

    spins: int  # how often to look before a wait is a long one
    carries_notes = False  # whether what an algorithm is to be chosen by may travel behind the record, too
    note = b""  # our next

    @abstractmethod
    def is_free(self, sequence: int) -> bool:
        """Whether this rank may publish: no rank has still to read what was published for an earlier operation."""

    @abstractmethod
    def publish(
        self, sequence: int, usable: bool, flags: int, digest: int, entries: int, stream: SparseStream | None = None, valid: bool = True
    ) -> int:
        """Publish our record, with the stream packed behind it if there is one, and return the bytes that this takes.

        What raises before the record is out leaves it unpublished.
        """

    @abstractmethod
    def has_published(self, sequence: int) -> bool:
        """Whether any other rank may have, or get, our record."""

    @abstractmethod
    def agree(self, sequence: int, spins: int, flags: int, digest: int, itemsize: int) -> int:
        """What all ranks have published, if they have, or do while we look ``spins`` times.

        Returns those of ``flags`` that all have set, with ``UNUSABLE`` if that is so on any rank; or ``DISAGREED``, ``WITHDRAWN`` or
        ``PENDING``.
        ``itemsize`` is that of a value.
        """

    @abstractmethod
    def entries(self) -> list[int]:
        """Of each rank, once they agree."""

    def notes(self) -> Sequence[bytes]:
        """Of all ranks, once they agree; none where none travel."""
        return ()

    @abstractmethod
    def lengths(self) -> list[int]:
        """Of the packed streams of all ranks in bytes, once they agree."""

    @abstractmethod
    def reduced(self, layout: packed.Layout, reduction: Reduction) -> SparseStream:
        """The reduction of the streams that all have packed, once they agree."""

    @abstractmethod
    def commit(self, sequence: int) -> bool:
        """All are armed for a collective of MPI that blocks: whether it is certain that all enter it, since none has withdrawn."""

    @abstractmethod
    def withdraw(self, sequence: int) -> bool:
        """This rank will not enter that collective, although it has published that it does: whether no other has committed itself yet."""

    def recall(self, sequence: int) -> None:  # noqa: B027 - where word of it comes with the records, there is nothing to do
        """This rank waits no longer: who comes later is not to find its record, if that is out, as if it did. No collective is armed."""

    @abstractmethod
    def missing(self, sequence: int) -> list[int] | None:
        """The ranks whose records are not here; None if that cannot be told."""

    @abstractmethod
    def complete(self, sequence: int) -> None:
        """Publish to those whom an interrupt has kept it from."""

    @abstractmethod
    def release(self, sequence: int) -> None:
        """We need nothing more of what has been published."""

    @abstractmethod
    def abandon(self, sequence: int) -> bool:
        """The same where this rank has failed; False if it has to be called again later.

        A rank that has not published lets nobody wait for its record.
        """
