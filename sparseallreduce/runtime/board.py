"""A board in memory that the ranks of one host share, on which each posts what the others are told before an operation.

By messages, each rank sends and receives one for every other, and where ranks share cores each message waits for several turns of
the others. Read where it lies, what eight ranks have to say on 2 cores is known after 60 to 110 microseconds instead of 160 to 260,
what two on a core each have to say after 1 instead of 4.

The board has a few slots, which operations take in turn, and each slot a row for every rank. A rank posts when all have taken from
the slot what it held before, takes from it when all have posted, and never writes to another rank's row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import RECORD
from sparseallreduce.runtime.shared import LINE, Words, come, patience, word_kernels
from sparseallreduce.streams.kernels.compilation import compiled_entry, kernel
from sparseallreduce.streams.kernels.intrinsics import compare_exchange, load_acquire, store_release
from sparseallreduce.streams.packed import Rows

__all__ = ["CLAIMED", "LEFT", "PREFIX", "SLOTS", "SUMMED", "Area", "Board", "Slot"]

PREFIX = struct.Struct("<?xxxI")  # of what a rank shares: whether its channel is sound, bytes of the payload

SLOTS = 4  # operations that may have posted and not taken; more may be in flight, which post later
# Where in a row lie, in words of 8 bytes: the turn that was posted, the turn that was taken from the slot, in the first row what was
# decided for a turn, and the text, which is the prefix of a Share and its record; in bytes, the payload.
_POSTED, _TAKEN, _DECIDED, _TEXT = 0, 1, 2, 3
_WITHDRAWN, _COMMITTED = 0, 1  # lowest bit of the decision, below the turn
_PAYLOAD = 8 * _TEXT + PREFIX.size + RECORD.size
# Most bytes of a vector that the ranks add up on the board, with a core each and where they share cores, and of all such vectors.
# Beyond, MPI's sum takes no longer: Open MPI's at P = 2 and 1 MiB 0.8 of the time, at P = 4 on 2 cores and 4 MiB 1.5 times as long.
_AREA, _AREA_CROWDED, _AREAS = 1 << 18, 1 << 22, 1 << 25
# Words of a row of an area: the last turn whose part of the sum lies there, that from which the rank has taken all and, of the first row
# alone, what the ranks claim parts by.
SUMMED, LEFT, CLAIMED = range(3)


class Board:
    """What one rank sees of the board. Two areas beside it take the vectors that are summed there.

    Parameters
    ----------
    memory : ndarray of uint8
        The same for all ranks, zeros at first; of :meth:`nbytes`.
    rank, ranks : int
    room : int
        Most bytes of a payload.
    cores : int
        Of the host, as all ranks know.
    first : int
        The first turn; turns are numbered one after the other.
    reserve : callable, optional
        Takes memory for pieces of it, :meth:`SharedFile.reserve`; by default all of it is there. What :meth:`reserved` says is.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        rank: int,
        ranks: int,
        room: int,
        cores: int,
        first: int = 1,
        reserve: Callable[[list[tuple[int, int]]], bool] = lambda _pieces: True,
    ) -> None:
        self.polls, offer = patience(ranks > cores)
        end = SLOTS * ranks * _stride(room)
        blocks = memory[:end].reshape(SLOTS, ranks, -1)
        self.slots = [Slot(rows, rank, room, offer, first) for rows in blocks]
        self.areas: list[Area] = []
        for rows in memory[end:].reshape(2, ranks, -1):
            place = end + (len(self.areas) * ranks + rank) * rows.shape[1]  # of our row
            self.areas.append(Area(rows, rank, min(ranks, cores), offer, _reserve_row(reserve, place)))

    def start(self, first: int) -> None:
        """Begin with another turn than was known when the board was made."""
        for slot in self.slots:
            slot._first = first

    @staticmethod
    def nbytes(ranks: int, room: int, cores: int) -> int:
        """Bytes of memory that the board takes."""
        return SLOTS * ranks * _stride(room) + 2 * ranks * _area(ranks, cores)

    @staticmethod
    def reserved(ranks: int, room: int, cores: int) -> list[tuple[int, int]]:
        """The pieces of it, each a place and bytes, that are used from the first turn on: all but the vectors of the areas."""
        end, area = SLOTS * ranks * _stride(room), _area(ranks, cores)
        return [(0, end), *((end + row * area, LINE) for row in range(2 * ranks))]

    def slot(self, turn: int) -> Slot:
        """The slot of a turn."""
        return self.slots[turn % SLOTS]


class Slot:
    """A row for each rank, in which it posts what it tells the others.

    Parameters
    ----------
    rows : ndarray of uint8, shape (ranks, length)
    rank : int
    room, first
        Of the board.
    offer : int
        The address of a function to call while we wait, or 0.
    """

    def __init__(self, rows: NDArray[np.uint8], rank: int, room: int, offer: int, first: int) -> None:
        ranks = len(rows)
        self.rows = Rows(ranks, _PAYLOAD, room, rows)
        self.texts = [memoryview(row)[8 * _TEXT :] for row in rows]
        self.payload = self.texts[rank][_PAYLOAD - 8 * _TEXT :]  # ours
        self.entries, self.lengths, counts = self._heard = tuple(np.empty(ranks + extra, np.int64) for extra in (0, 0, 2))
        self.counts, self.sums = counts[:ranks], counts[ranks:]
        self._text = self.texts[rank]
        self._ranks, self._first, self._offer = ranks, first, offer
        self._words, self._step = rows.reshape(-1).view(np.uint64), rows.shape[1] // 8
        self._ours = rank * self._step
        self._ours_taken = self._ours + _TAKEN
        (self._have_come, self._set), (self._say, self._hear, self._decide) = word_kernels(), _kernels()

    def is_free(self, turn: int) -> bool:
        """Whether all ranks have taken what was posted here before."""
        before = turn - SLOTS
        return before < self._first or bool(self._have_come(self._words, _TAKEN, self._step, self._ranks, before, 1, 0))

    def post(self, turn: int, text: bytes) -> None:
        """Post a text, once the slot is free."""
        self._text[: len(text)] = text
        self._set(self._words, self._ours + _POSTED, turn)

    def post_word(self, turn: int, sound: bool, length: int, flags: int, digest: int, entries: int) -> None:
        """Post the prefix and the record of a rank whose arguments are well, before ``length`` bytes that have been written already."""
        self._say(self._words, self._ours, turn, sound, length, flags, digest, entries)

    def has_posted(self, turn: int) -> bool:
        """Whether we have posted."""
        return bool(self._have_come(self._words, self._ours + _POSTED, 1, 1, turn, 1, 0))

    def is_complete(self, turn: int, polls: int = 1) -> bool:
        """Whether all ranks have posted, or do while we look so many times, and offer the core to others in between if they share it."""
        complete: bool = self._have_come(self._words, _POSTED, self._step, self._ranks, turn, polls, self._offer)
        return complete

    def agreed(self, turn: int, polls: int, flags: int, digest: int, itemsize: int) -> int:
        """Of ``flags`` those that all have set, if all have posted before long, are well and mean what ``digest`` stands for; else -1.

        Fills in what each rank has said: its ``entries``, the ``lengths`` of the payloads in bytes, and the ``counts`` of entries in
        them, -1 for a dense vector of values of ``itemsize`` bytes. Behind the counts come their sum without those of dense vectors,
        and the number of the latter.
        """
        common: int = self._hear(self._words, self._step, turn, polls, self._offer, flags, digest, itemsize, *self._heard)
        return common

    def commit(self, turn: int) -> bool:
        """All have said that they enter a collective of MPI: whether it is sure that they do, since none has withdrawn."""
        return bool(self._decide(self._words, _DECIDED, turn, _COMMITTED) == _COMMITTED)

    def withdraw(self, turn: int) -> bool:
        """This rank will not enter the collective, although it has said so: whether no other has committed itself yet."""
        return bool(self._decide(self._words, _DECIDED, turn, _WITHDRAWN) == _WITHDRAWN)

    def take(self, turn: int) -> None:
        """Leave the slot to the operation that is next to post in it."""
        self._set(self._words, self._ours_taken, turn)


class Area:
    """Rows of bytes, one for each rank, on which the ranks add up dense vectors, in some of the turns.

    A rank writes a vector to its own row once all ranks have left the area after the sum before. Then parts of the sum come into the
    first rows, each from who has claimed it.

    Parameters
    ----------
    rows : ndarray of uint8, shape (ranks, start + room)
    rank : int
    parts : int
        In which a sum is made.
    offer : int
        The address of a function to call while we wait, or 0.
    reserve : callable
        Takes memory for some bytes of our row from a place in it on, as far as there is enough.
    """

    start = LINE  # bytes of a row before the vector

    def __init__(self, rows: NDArray[np.uint8], rank: int, parts: int, offer: int, reserve: Callable[[int, int], bool]) -> None:
        self.rows, self.rank, self.ranks, self.parts = rows, rank, len(rows), parts
        self.room = rows.shape[1] - self.start
        self._words = rows.reshape(-1).view(np.uint64)
        self._step = rows.shape[1] // 8
        self.terms = self._words, self._step, rank, parts, offer  # what compiled code is told of us
        self._last = 0  # turn of the last sum in which others may have read what we wrote, unless it is known that none did
        self._reserve, self._reserved = reserve, self.start  # bytes of our row
        self._have_come, self._set = word_kernels()

    def reserve(self, nbytes: int) -> bool:
        """Whether there is memory for vectors of so many bytes.

        The parts of a sum lie no further in a row than the vector of the rank whose row it is, so that each rank sees to its own.
        """
        end = self.start + nbytes
        if end > self._reserved and self._reserve(self._reserved, end - self._reserved):
            self._reserved = end
        return end <= self._reserved

    def is_free(self) -> bool:
        """Whether all ranks have left it."""
        free: bool = self._have_come(self._words, LEFT, self._step, self.ranks, self._last, 1, 0)
        return free

    def enter(self, turn: int) -> None:
        """Others may read what we have written, as long as they have not left this turn; 0 if nobody does."""
        self._last = turn

    def leave(self, turn: int) -> None:
        """We have the whole sum."""
        self._set(self._words, self.rank * self._step + LEFT, turn)


def _reserve_row(reserve: Callable[[list[tuple[int, int]]], bool], row: int) -> Callable[[int, int], bool]:
    return lambda place, nbytes: reserve([(row + place, nbytes)])


def _area(ranks: int, cores: int) -> int:
    """Bytes of a row of an area."""
    return LINE + min(_AREA_CROWDED if ranks > cores else _AREA, _AREAS // (2 * ranks)) // LINE * LINE


def _stride(room: int) -> int:
    return -(-(_PAYLOAD + room) // LINE) * LINE


@kernel
def _say(words: Words, at: Any, turn: Any, sound: Any, length: Any, flags: Any, digest: Any, entries: Any) -> None:
    """Post the prefix and the record of a rank whose arguments are well."""
    text = at + np.uint64(_TEXT)
    words[text] = sound | length << np.uint64(32)
    words[text + np.uint64(1)] = np.uint64(1) | flags << np.uint64(8)
    words[text + np.uint64(2)] = digest
    words[text + np.uint64(3)] = entries
    store_release(words, at + np.uint64(_POSTED), turn)


@kernel
def _hear(
    words: Words,
    step: Any,
    turn: Any,
    polls: Any,
    offer: Any,
    flags: Any,
    digest: Any,
    itemsize: Any,
    entries: Any,
    lengths: Any,
    counts: Any,
) -> Any:
    """The flags that all ranks have in common, or -1 if any has not posted, is not well or means something else."""
    ranks = np.uint64(len(entries))
    if not come(words, np.uint64(_POSTED), step, ranks, turn, polls, offer):
        return np.int64(-1)
    total = dense = np.int64(0)
    for rank in range(ranks):
        text = rank * step + np.uint64(_TEXT)
        prefix, record = words[text], words[text + np.uint64(1)]
        if not (prefix & np.uint64(0xFF) and record & np.uint64(0xFF)) or words[text + np.uint64(2)] != digest:
            return np.int64(-1)
        length, count = np.int64(prefix >> np.uint64(32)), np.int64(words[text + np.uint64(3)])
        is_dense = count > 0 and length == count * np.int64(itemsize)
        entries[rank], lengths[rank], counts[rank] = count, length, -1 if is_dense else count
        total += 0 if is_dense else count
        dense += is_dense
        flags &= record >> np.uint64(8) & np.uint64(0xFF)
    counts[ranks], counts[ranks + np.uint64(1)] = total, dense
    return np.int64(flags)


@kernel
def _decide(words: Words, at: Any, turn: Any, what: Any) -> Any:
    """What the ranks decide for a turn, which is what the first of them says."""
    while True:
        found = load_acquire(words, at)
        if found >> np.uint64(1) >= turn:
            return np.int64(found & np.uint64(1))
        if compare_exchange(words, at, found, turn << np.uint64(1) | what):
            return np.int64(what)


@lru_cache(maxsize=1)
def _kernels() -> tuple[Callable[..., Any], ...]:
    words, counts, word = types.Array(types.uint64, 1, "C"), types.Array(types.int64, 1, "C"), types.uint64
    return (
        compiled_entry(_say, (words, *(word,) * 7)),
        compiled_entry(_hear, (words, *(word,) * 7, counts, counts, counts)),
        compiled_entry(_decide, (words, *(word,) * 3)),
    )
