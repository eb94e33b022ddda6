"""Memory in which the ranks of one host add up sparse streams: rows for the streams, blocks for results, and words.

A rank writes its stream to its row, where all can read it. The sum comes into a block, and is the result of every rank where it lies; the
block is free again when no rank has the result any more. Results that a process has when it forks stay for good, as its child may have
them. A rank writes to the blocks through one mapping and gives its user another, through which nobody can write.

Before a rank publishes that its stream is there, it has reserved the memory for its row, and in each block P times as many bytes: whichever
rank has the longest stream has reserved enough for the result of all. What is reserved stays so, and a loop over sums of one size asks
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.memory.leases import Leases
from sparseallreduce.runtime.memory.mapping import PAGE, SharedFile, rounded_up
from sparseallreduce.runtime.memory.sum_parts import ENTRIES, FIRST, LEFT, WORDS, sum_parts_kernel
from sparseallreduce.runtime.memory.words import LINE, claim_kernel, spinning, word_kernels
from sparseallreduce.streams import kernels, packed
from sparseallreduce.streams.stream import SparseStream

__all__ = ["KEPT", "SparseMemory"]

KEPT = 3  # results that may be kept where they lie: the last of a loop, the one that is being made, and another
_BYTES = 1 << 29  # of the streams of all ranks, at most
_MAPPED = 1 << 18  # bytes of a row that are mapped at first; then twice as many, and so on
_LATER = 256  # operations after which memory is asked for again that was refused
_WHOLE = 1 << 21  # bytes of a large page, of which rows and blocks begin at a multiple if they are as long


class SparseMemory:
    """What one rank sees of the memory: words, a row of bytes for the stream of each rank, and blocks for results.

    Parameters
    ----------
    memory : SharedFile
        The same for all ranks, zeros at first; of :meth:`nbytes`, of which what :meth:`reserved` says is there.
    rank, ranks : int
    oversubscribed : bool
        Whether ranks share cores.
    cores : int
        Of the host, as all ranks know.

    Raises
    ------
    OSError
        If the memory cannot be mapped.
    """

    def __init__(self, memory: SharedFile, rank: int, ranks: int, oversubscribed: bool, cores: int) -> None:
        self.rank, self.ranks, self.cores = rank, ranks, cores
        self.spins, self.yield_core = spinning(oversubscribed)
        self.capacity = self._most = _capacity(ranks)  # bytes that a stream may take
        self._file = memory
        self.words = memory.map([0], (ranks + 1) * LINE)[0].view(np.uint64)
        self.bounds = np.empty((4, ranks + 1), np.uint64)  # for us alone, as all below
        self._map(min(_MAPPED, self._most))
        self._reserved = [0, 0]  # bytes of our row, and of each block
        self._asked = 0  # the operation from which on more may be asked for
        self._leases = Leases(KEPT)
        self._last = 0  # the operation in which others may read our row, until we have its result
        self.armed = 0  # the operation that has the memory on this rank, until that is over; 0 for none
        (self._have_come, self._store), self._claim = word_kernels(), claim_kernel()

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of the file, of which those take memory that have been reserved, and those address space that a rank has mapped."""
        return _head(ranks) + (ranks + (KEPT + 1) * (ranks + 1)) * _capacity(ranks)

    @staticmethod
    def reserved(ranks: int) -> list[tuple[int, int]]:
        """The pieces of it, each a place and bytes, that are used from the first operation on."""
        return [(0, (ranks + 1) * LINE)]

    def _map(self, length: int) -> None:
        """Map so many bytes of each row, and of each block one more than for all of them. Results stay where they are."""
        file, ranks, count = self._file, self.ranks, KEPT + 1
        first, block = _head(ranks) + ranks * self._most, (ranks + 1) * self._most
        places = [first + number * block for number in range(count)]
        rows = file.map([_head(ranks) + rank * self._most for rank in range(ranks)], length)
        blocks = file.map(places, (ranks + 1) * length)
        self._readable = [memoryview(file.map([place], (ranks + 1) * length, writeable=False)[0]) for place in places[:KEPT]]
        self.rows, self.blocks, self._length = rows, blocks, length
        self.row = memoryview(rows[self.rank])
        self._views: dict[np.dtype[Any], NDArray[Any]] = {}
        self._inner: dict[tuple[np.dtype[Any], np.dtype[Any]], tuple[NDArray[Any], NDArray[Any]]] = {}
        self._summed: tuple[packed.Layout | None, Any] = None, None  # the kind of streams that were summed last, and how

    def reach(self, row: int, block: int = 0) -> None:
        """Map as many bytes of each row, and of each block, if fewer are."""
        needed = min(max(row, -(-block // (self.ranks + 1))), self._most)
        if needed > self._length:
            self._map(min(1 << (needed - 1).bit_length(), self._most))

    def _secure(self, sequence: int, row: int, block: int) -> bool:
        """Whether our row and each block have memory for so many bytes: from then on no rank can fail to have it."""
        if row <= self._reserved[0] and block <= self._reserved[1]:
            return True
        if sequence < self._asked:
            return False
        row, block = (max(old, new and rounded_up(new)) for old, new in zip(self._reserved, (row, block), strict=True))
        row, block = min(row, self._most), min(block, (self.ranks + 1) * self._most)
        first, (had_row, had_block) = _head(self.ranks), self._reserved
        first_block, step = first + self.ranks * self._most, (self.ranks + 1) * self._most
        pieces = [(first + self.rank * self._most + had_row, row - had_row)]
        pieces += [(first_block + number * step + had_block, block - had_block) for number in range(KEPT + 1)]
        try:
            self.reach(row, block)
            # All ranks may be asking at this moment, or have done so: what counts is that there is memory for all of it, or for the rest.
            whole = self.ranks * row + (KEPT + 1) * block
            enough = self._file.reserve(pieces, max(row - had_row, whole - self._file.taken()))
        except (OSError, MemoryError):
            enough = False
        if enough:
            self._reserved = [row, block]
        else:
            self._asked = sequence + _LATER
        return enough

    def write(self, sequence: int, stream: SparseStream, dense_bytes: int = 0) -> bool:
        """Write our stream, of at most ``capacity`` bytes, to our row; False if the memory is in use, or cannot be had.

        ``dense_bytes`` are those of a result that is to be dense where that takes more bytes than a sparse one, for which a block may
        have no room.
        """
        if self.armed:
            return False
        row = packed.packed_bytes(stream)
        block = max(self.ranks * row + LINE, dense_bytes)
        if dense_bytes and block > (self.ranks + 1) * self._most:
            return False
        self.store(self.rank, LEFT, sequence - 1)  # also if an operation failed before it came here
        if not self.have_come(LEFT, self.ranks, self._last) or not self._secure(sequence, row, block):
            return False
        packed.pack_into(stream, self.row)
        self.armed = sequence
        self._last = sequence  # from when the others are told on, whether we hear that all agree or not
        return True

    def unread(self) -> None:
        """No rank reads our row, or none does any more."""
        self._last = 0

    def leave(self, sequence: int) -> None:
        """We no longer read what the others have written."""
        self.store(self.rank, LEFT, sequence)

    def view(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The rows as numbers of this type."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.rows.view(dtype)
        return view

    def free_blocks(self) -> int:
        """The blocks whose results this rank does not have: a bit for each."""
        return self._leases.free()

    def claim(self, sequence: int, parts: int) -> int:
        """A part for us to add up, which no other rank does; -1 if there is none left."""
        part: int = self._claim(self.words, self.ranks * WORDS, sequence, parts)
        return part

    def store(self, of: int, what: int, word: int) -> None:
        """Store a word of a part that is ours, or of our rank."""
        self._store(self.words, of * WORDS + what, word)

    def note(self, part: int, entries: int, first: int) -> None:
        """Write how many entries a part came to and where it begins, to be seen with our next word."""
        self.words[part * WORDS + ENTRIES], self.words[part * WORDS + FIRST] = entries, first

    def have_come(self, what: int, count: int, sequence: int, spins: int = 1) -> bool:
        """Whether that word of the first so many parts or ranks has come to an operation, or does while we look so many times."""
        come: bool = self._have_come(self.words, what, WORDS, count, sequence, spins, self.yield_core)
        return come

    def reading(self, sequence: int) -> list[int]:
        """The other ranks that may still read what has been written, as they do while they add up."""
        words = self.words[LEFT : self.ranks * WORDS : WORDS].tolist()
        return [rank for rank, left in enumerate(words) if left < sequence and rank != self.rank]

    def inner(self, layout: packed.Layout) -> tuple[NDArray[Any], NDArray[Any]]:
        """Memory of our own for the sums within a tree."""
        dtypes = layout.indices, layout.dtype
        found = self._inner.get(dtypes)
        if found is None:
            found = self._inner[dtypes] = kernels.inner_sums(self.ranks, self.blocks.shape[1], *dtypes)
        return found

    def sum_parts(self, layout: packed.Layout) -> Callable[..., Any]:
        """The compiled ``sum_parts`` for streams of this layout, but for what changes from one sum to the next."""
        last, found = self._summed
        if last is not layout:
            dtypes = layout.indices, layout.dtype
            rows, blocks = ([memory.view(dtype) for dtype in dtypes] for memory in (self.rows, self.blocks))
            given = self.words, self.rank, self.yield_core, *rows, self.bounds, *self.inner(layout), *blocks
            found = functools.partial(sum_parts_kernel(*dtypes), *given)
            self._summed = layout, found
        run: Callable[..., Any] = found
        return run

    def keep(self, place: int) -> NDArray[np.uint8]:
        """The block, read-only, which is free again when all views of it are gone."""
        return self._leases.keep(place, self._readable[place])


def _head(ranks: int) -> int:
    """Bytes before the rows."""
    return -(-(ranks + 1) * LINE // _WHOLE) * _WHOLE


def _capacity(ranks: int) -> int:
    """Bytes that a row may have."""
    capacity = _BYTES // ranks
    unit = _WHOLE if capacity >= _WHOLE else PAGE
    return capacity // unit * unit
