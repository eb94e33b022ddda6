"""The handshake of ranks of one host, in shared memory.

By messages, each rank sends and receives one record for every other rank, and if ranks share cores each message waits until the others have
had their turn. In shared memory, the records of eight ranks on 2 cores are known after 60 to 110 microseconds instead of 160 to 260, and
those of two ranks with a core each after 1 instead of 4.

There are a few slots, used by successive operations, and in each slot a row for every rank. A rank publishes in its row once all have
released the slot's previous operation, and never writes to another rank's row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from sparseallreduce.runtime.handshake.base import DISAGREED, PENDING, RECORD, UNUSABLE, WITHDRAWN, Handshake
from sparseallreduce.runtime.memory.words import LINE, Words, spinning, wait_for, word_kernels
from sparseallreduce.streams import packed
from sparseallreduce.streams.kernels.compilation import compiled_entry, kernel
from sparseallreduce.streams.kernels.intrinsics import compare_exchange, load_acquire, store_release
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["SLOTS", "SharedHandshake", "nbytes", "slots_in"]

SLOTS = 4  # operations that may be published and not released; further ones in flight publish later
# Words of a row: the last operation published, the last one released, the decision about MPI's sum (in the first row), and the record;
# the packed stream follows.
_PUBLISHED, _RELEASED, _DECIDED, _RECORD = 0, 1, 2, 4
_RECALLED = 2  # in place of the validity of the arguments, in the second word of the record
_WITHDRAWN, _COMMITTED = 0, 1  # lowest bit of the decision, below the sequence number
_PAYLOAD = 8 * _RECORD + RECORD.size  # offset of the packed stream, a multiple of 16; hence the unused word
U: Any = np.uint64


def nbytes(ranks: int, capacity: int) -> int:
    """Return the size of the slots in bytes, for streams of up to ``capacity`` bytes a rank."""
    return SLOTS * ranks * _row(capacity)


def slots_in(memory: NDArray[np.uint8], rank: int, ranks: int, capacity: int, cores: int, first: int = 1) -> list[SharedHandshake]:
    """Return the slots as one rank sees them; the operation with sequence number s uses the slot ``s % SLOTS``.

    Parameters
    ----------
    memory : ndarray of uint8
        The same memory on all ranks, initially zero, of size :func:`nbytes`.
    rank, ranks, capacity : int
    cores : int
        Cores of the host, the same on all ranks.
    first : int
        Number of the first operation; numbers are consecutive.
    """
    spins, yield_core = spinning(ranks > cores)
    return [SharedHandshake(rows, rank, capacity, spins, yield_core, first) for rows in memory.reshape(SLOTS, ranks, -1)]


class SharedHandshake(Handshake):
    """One slot: a row for each rank.

    Parameters
    ----------
    rows : ndarray of uint8, shape (ranks, length)
    rank, capacity : int
    spins, yield_core : int
        As returned by :func:`~sparseallreduce.runtime.memory.words.spinning`.
    first : int
        Number of the first operation.
    """

    spins: int
    first: int

    def __init__(self, rows: NDArray[np.uint8], rank: int, capacity: int, spins: int, yield_core: int, first: int) -> None:
        ranks = len(rows)
        self.spins, self.first = spins, first
        self._rows = packed.Rows(ranks, _PAYLOAD, capacity, rows)
        self._payload = memoryview(rows[rank])[_PAYLOAD:]
        self._entries, self._lengths, counts = self._read = tuple(np.zeros(ranks + extra, np.int64) for extra in (0, 0, 2))
        self._counts, self._sums = counts[:ranks], counts[ranks:]
        self._ranks, self._yield_core = ranks, yield_core
        self._words, self._step = rows.reshape(-1).view(np.uint64), rows.shape[1] // 8
        self._ours = rank * self._step
        self._our_release = self._ours + _RELEASED
        (self._all_reached, self._store), (self._publish, self._agree, self._decide) = word_kernels(), _kernels()

    def is_free(self, sequence: int) -> bool:
        before = sequence - SLOTS
        return before < self.first or bool(self._all_reached(self._words, _RELEASED, self._step, self._ranks, before, 1, 0))

    def publish(
        self, sequence: int, usable: bool, flags: int, digest: int, entries: int, payload: packed.Payload = None, valid: bool = True
    ) -> int:
        length = 0 if payload is None else packed.pack_into(payload, self._payload)
        self._publish(self._words, self._ours, sequence, usable, length, valid, flags, digest, entries)
        return length

    def has_published(self, sequence: int) -> bool:
        return bool(self._all_reached(self._words, self._ours + _PUBLISHED, 1, 1, sequence, 1, 0))

    def agree(self, sequence: int, spins: int, flags: int, digest: int, itemsize: int) -> int:
        common: int = self._agree(self._words, self._step, sequence, spins, self._yield_core, flags, digest, itemsize, *self._read)
        return common

    def entries(self) -> list[int]:
        return self._entries.tolist()

    def lengths(self) -> list[int]:
        return self._lengths.tolist()

    def payloads(self) -> list[NDArray[np.uint8]]:
        return self._rows.payloads(self.lengths())

    def reduced(self, layout: packed.Layout, reduction: Reduction) -> SparseStream:
        if not layout.plain:
            return self._rows.reduced(self._entries.tolist(), self._lengths.tolist(), layout, reduction)
        total, dense = self._sums.tolist()
        return self._rows.summed(self._counts, total, dense > 0, layout, reduction)

    def commit(self, sequence: int) -> bool:
        return bool(self._decide(self._words, _DECIDED, sequence, _COMMITTED) == _COMMITTED)

    def withdraw(self, sequence: int) -> bool:
        return bool(self._decide(self._words, _DECIDED, sequence, _WITHDRAWN) == _WITHDRAWN)

    def recall(self, sequence: int) -> None:
        if self.has_published(sequence):
            self._store(self._words, self._ours + _RECORD + 1, _RECALLED)

    def missing(self, sequence: int) -> list[int] | None:
        return self._behind(_PUBLISHED, sequence)

    def holding(self, sequence: int) -> list[int]:
        """Return the ranks that have not released the slot's previous operation."""
        return self._behind(_RELEASED, sequence - SLOTS)

    def _behind(self, word: int, sequence: int) -> list[int]:
        return [rank for rank in range(self._ranks) if not self._all_reached(self._words, rank * self._step + word, 1, 1, sequence, 1, 0)]

    def complete(self, sequence: int) -> None:
        pass  # one word publishes

    def release(self, sequence: int) -> None:
        self._store(self._words, self._our_release, sequence)

    def abandon(self, sequence: int) -> bool:
        """Release the slot, unless this rank has still to read an earlier operation's records.

        The other ranks wait for this rank's record until they receive its failure message.
        """
        if not (self.has_published(sequence) or self.is_free(sequence)):
            return False
        self.release(sequence)
        return True


def _row(capacity: int) -> int:
    """Return the size of a row in bytes."""
    return -(-(_PAYLOAD + capacity) // LINE) * LINE


@kernel
def _publish(words: Words, at: Any, sequence: Any, usable: Any, length: Any, valid: Any, flags: Any, digest: Any, entries: Any) -> None:
    """Write a record, then publish it."""
    record = at + U(_RECORD)
    words[record] = usable | length << U(32)
    words[record + U(1)] = valid | flags << U(8)
    words[record + U(2)] = digest
    words[record + U(3)] = entries
    store_release(words, at + U(_PUBLISHED), sequence)


@kernel
def _agree(
    words: Words,
    step: Any,
    sequence: Any,
    spins: Any,
    yield_core: Any,
    flags: Any,
    digest: Any,
    itemsize: Any,
    entries: Any,
    lengths: Any,
    counts: Any,
) -> Any:
    """Implement :meth:`Handshake.agree` in compiled code.

    Store what each rank has published: its entries, the size of its packed stream in bytes, and the number of entries in that, -1 for a
    dense vector (of values of ``itemsize`` bytes). The last two elements of ``counts`` are the sum of the sparse entries and the number of
    dense vectors.
    """
    ranks = U(len(entries))
    if not wait_for(words, U(_PUBLISHED), step, ranks, sequence, spins, yield_core):
        return np.int64(PENDING)
    total = dense = np.int64(0)
    usable = U(1)
    for rank in range(ranks):
        record = rank * step + U(_RECORD)
        first, second = words[record], words[record + U(1)]
        if second & U(0xFF) == U(_RECALLED):
            return np.int64(WITHDRAWN)
        if not second & U(0xFF) or words[record + U(2)] != digest:
            return np.int64(DISAGREED)
        length, count = np.int64(first >> U(32)), np.int64(words[record + U(3)])
        is_dense = count > 0 and length == count * np.int64(itemsize)
        entries[rank], lengths[rank], counts[rank] = count, length, -1 if is_dense else count
        total += 0 if is_dense else count
        dense += is_dense
        flags &= second >> U(8) & U(0xFF)
        usable &= first & U(1)
    counts[ranks], counts[ranks + U(1)] = total, dense
    return np.int64(flags if usable else flags | U(UNUSABLE))


@kernel
def _decide(words: Words, at: Any, sequence: Any, what: Any) -> Any:
    """Return the decision for an operation: that of the first rank to make one."""
    while True:
        found = load_acquire(words, at)
        if found >> U(1) >= sequence:
            return np.int64(found & U(1))
        if compare_exchange(words, at, found, sequence << U(1) | what):
            return np.int64(what)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Callable[..., Any], ...]:
    words, counts, word = types.Array(types.uint64, 1, "C"), types.Array(types.int64, 1, "C"), types.uint64
    return (
        compiled_entry(_publish, (words, *(word,) * 8)),
        compiled_entry(_agree, (words, *(word,) * 7, counts, counts, counts)),
        compiled_entry(_decide, (words, *(word,) * 3)),
    )
