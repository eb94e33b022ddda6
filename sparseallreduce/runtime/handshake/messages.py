"""The handshake by messages: each rank sends its record to all others, or, with 17 ranks or more, all call an allgather."""

from __future__ import annotations

import os
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.errors import WaitTimeoutError
from sparseallreduce.runtime import collectives
from sparseallreduce.runtime.handshake.base import DISAGREED, PENDING, RECORD, UNUSABLE, WITHDRAWN, Handshake, payload_capacity
from sparseallreduce.runtime.progress import HANDSHAKE_SPINS, done_within
from sparseallreduce.runtime.shortcuts.base import PACKED
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import AnyChannel

__all__ = ["WITHDRAWAL_SECONDS", "MessageHandshake"]

_LATE_SECONDS = 1e-3  # time since the last agreement after which a rank checks whether others have timed out
WITHDRAWAL_SECONDS = 1.0  # to wait, after a failure, for records of ranks that may be about to enter an MPI collective


class MessageHandshake(Handshake):
    """Memory for the records of all ranks, and the messages of one operation at a time.

    Parameters
    ----------
    channel : Channel
    """

    spins = HANDSHAKE_SPINS

    def __init__(self, channel: AnyChannel) -> None:
        self._lengths: list[int] = []
        self._flags: list[int] = []
        self.carries_notes: bool = payload_capacity(channel.ranks) > 0
        self._channel = channel
        self._rows = packed.Rows(channel.ranks, RECORD.size, payload_capacity(channel.ranks))
        self._places = [memoryview(row) for row in self._rows.bytes]
        self._others = [(channel.rank + distance) % channel.ranks for distance in range(1, channel.ranks)]
        self._entries: list[int] = []
        self._requests: list[MPI.Request] = []
        self._released = 0  # the operation after which it was released
        self._sequence = 0  # the operation that was published last
        self._ours = b""  # the bytes published for it

    def is_free(self, sequence: int) -> bool:
        return True

    def publish(
        self, sequence: int, usable: bool, flags: int, digest: int, entries: int, payload: packed.Payload = None, valid: bool = True
    ) -> int:
        octets = self.note if payload is None else packed.pack(payload)
        ours = RECORD.pack(usable, len(octets), valid, flags, digest, entries) + octets
        self._ours = ours if self._channel.ranks <= collectives.DIRECT_RANKS else ours.ljust(self._rows.bytes.shape[1], b"\0")
        self._requests = []
        self._sequence = sequence
        self.complete(sequence)
        return len(octets)

    def has_published(self, sequence: int) -> bool:
        return self._sequence == sequence

    def complete(self, sequence: int) -> None:
        channel, ours = self._channel, self._ours
        self._places[channel.rank][: len(ours)] = ours
        if channel.ranks <= collectives.DIRECT_RANKS:
            collectives.exchange(channel.collectives.comm, ours, self._places, self._others, channel.tag(sequence), self._requests)
        elif not self._requests:  # when the operation starts: operations start in the same order on all ranks
            self._requests.append(channel.messages.Iallgather([ours, MPI.BYTE], [self._rows.bytes, MPI.BYTE]))

    def agree(self, sequence: int, spins: int, flags: int, digest: int, itemsize: int) -> int:
        if not done_within(self._requests, self._channel.oversubscribed, spins):
            return PENDING
        if self._is_withdrawn(sequence):
            return WITHDRAWN
        all_usable, self._entries, self._lengths, self._flags = True, [], [], []
        for place in self._places:
            usable, length, valid, theirs, of, count = RECORD.unpack_from(place)
            if not valid or of != digest:
                return DISAGREED
            all_usable = all_usable and usable
            flags &= theirs
            self._entries.append(count)
            self._lengths.append(length)
            self._flags.append(theirs)
        return flags if all_usable else flags | UNUSABLE

    def _is_withdrawn(self, sequence: int) -> bool:
        """Return True if a rank whose record has arrived has given up waiting for this one.

        The check takes four microseconds. It is skipped if this rank agreed on an operation a moment ago, since no other rank can have
        timed out since then, unless it needs nothing more of the others.
        """
        channel, now = self._channel, perf_counter()
        mailbox, tag, late = channel.mailbox, channel.tag(sequence), now > channel.agreed + _LATE_SECONDS
        channel.agreed = now
        known = tag in mailbox.boxes
        if not (known or late):
            return False
        box = mailbox.box(tag)  # as in `commit`
        for _ in range(3 if late else 1):  # MPICH returns messages it knows of before it polls for new ones
            if any(failure.error == WaitTimeoutError.__name__ for failure in box.failures.values()):
                channel.agreed = 0.0  # ranks may time out in the next operation, too
                return True
            if late:
                mailbox.take_in()
        if not (known or box.arrivals or box.failures or box.error):
            mailbox.close(tag)
        return False

    def missing(self, sequence: int) -> list[int] | None:
        if self._channel.ranks > collectives.DIRECT_RANKS:
            return None
        return sorted(rank for rank, request in zip(self._others, self._requests) if not request.Test())

    def entries(self) -> list[int]:
        return self._entries

    def lengths(self) -> list[int]:
        return self._lengths

    def notes(self) -> list[bytes]:
        each = zip(self._places, self._lengths, self._flags, strict=True)
        return [b"" if flags & PACKED else bytes(place[RECORD.size : RECORD.size + length]) for place, length, flags in each]

    def payloads(self) -> list[NDArray[np.uint8]]:
        return self._rows.payloads(self._lengths)

    def reduced(self, layout: packed.Layout, reduction: Reduction) -> SparseStream:
        return reduction.same_nans(self._rows.reduced(self._entries, self._lengths, layout, reduction))  # NaNs of hosts may differ

    def commit(self, sequence: int) -> bool:
        mailbox, tag = self._channel.mailbox, self._channel.tag(sequence)
        box = mailbox.box(tag)  # open the box first: without one, an operation that is in no list counts as over
        mailbox.take_in()
        if box.failures or box.error is not None:
            return False
        mailbox.close(tag)
        return True

    def withdraw(self, sequence: int) -> bool:
        """Return False once all records that announce the collective have arrived, since every rank with all records commits."""
        limit = perf_counter() + WITHDRAWAL_SECONDS
        while not MPI.Request.Testall(self._requests):
            if perf_counter() > limit:
                return True
            os.sched_yield()
        records = [RECORD.unpack_from(place) for place in self._places]
        _, _, _, flags, digest, _ = records[self._channel.rank]
        return not all(usable and valid and theirs & flags and of == digest for usable, _, valid, theirs, of, _ in records)

    def release(self, sequence: int) -> None:
        if self._released != sequence:  # it may be called again after an interrupt
            self._released = sequence
            self._channel.spare_handshakes.append(self)

    def abandon(self, sequence: int) -> bool:
        """Leave the memory to messages in flight instead of reusing it."""
        if self._released == sequence:
            return True
        try:
            if self._sequence == sequence:
                self.complete(sequence)
            else:
                self.publish(sequence, self._channel.collectives.usable, 0, 0, 0, valid=False)
        finally:
            self._channel.mailbox.leftovers.keep(self._requests, self._rows)
        return True
