"""Shared memory in which the ranks of one host add sparse streams: rows for the streams, blocks for results, and words.

A rank writes its stream to its row, where all can read it. The sum is written to a block, which is the result of every rank without a copy;
the block is reused when no rank uses the result any more. Results that a process has when it forks are kept for ever, as its child may use
them. A rank writes to the blocks through one mapping and gives the user another one, which is read-only.

Before a rank publishes its stream, it has reserved the memory for its row, and in each block P times that size: whichever rank has the
longest stream has reserved enough for the result. Reserved memory is kept, so that a loop over sums of one size reserves it once.
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

KEPT = 3  # results that may be kept in blocks: the last of a loop, the current one, and another
_BYTES = 1 << 29  # limit of the streams of all ranks
_MAPPED = 1 << 18  # bytes of a row that are mapped at first; doubled as needed
_LATER = 256  # operations after which refused memory is requested again
_WHOLE = 1 << 21  # size of a large page, to which long rows and blocks are aligned


class SparseMemory:
    """One rank's view of the memory: words, a row of bytes for the stream of each rank, and blocks for results.

    Parameters
    ----------
    memory : SharedFile
        The same file on all ranks, initially zero, of size :meth:`nbytes`, with the pieces of :meth:`reserved` allocated.
    rank, ranks : int
    oversubscribed : bool
        Whether ranks share cores.
    cores : int
        Cores of the host, the same on all ranks.

    Raises
    ------
    OSError
        If the memory cannot be mapped.
    """

    rank: int
    ranks: int
    cores: int
    spins: int
    yield_core: int
    capacity: int
    rows: NDArray[Any]
    blocks: NDArray[Any]

    def __init__(self, memory: SharedFile, rank: int, ranks: int, oversubscribed: bool, cores: int) -> None:
        self.rank, self.ranks, self.cores = rank, ranks, cores
        self.spins, self.yield_core = spinning(oversubscribed)
        self.capacity = self._most = _capacity(ranks)  # largest stream in bytes
        self._file = memory
        self.words: Any = memory.map([0], (ranks + 1) * LINE)[0].view(np.uint64)
        self.bounds: NDArray[Any] = np.empty((4, ranks + 1), np.uint64)  # private to this rank, as everything below
        self._map(min(_MAPPED, self._most))
        self._reserved = [0, 0]  # reserved bytes of this rank's row, and of each block
        self._asked = 0  # the operation from which on more memory may be requested
        self._leases = Leases(KEPT)
        self._last = 0  # the operation in which others may read this rank's row, until its result is complete
        self.armed: int = 0  # the operation that uses the memory on this rank; 0 for none
        (self._all_reached, self._store), self._claim = word_kernels(), claim_kernel()

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the size of the file in bytes. Only reserved pieces use memory, and only mapped ones use address space."""
        return _head(ranks) + (ranks + (KEPT + 1) * (ranks + 1)) * _capacity(ranks)

    @staticmethod
    def reserved(ranks: int) -> list[tuple[int, int]]:
        """Return the pieces (offset and size in bytes) that are used from the first operation on."""
        return [(0, (ranks + 1) * LINE)]

    def _map(self, length: int) -> None:
        """Map ``length`` bytes of each row, and ``(ranks + 1) * length`` of each block. Existing results keep their memory."""
        file, ranks, count = self._file, self.ranks, KEPT + 1
        first, block = _head(ranks) + ranks * self._most, (ranks + 1) * self._most
        places = [first + number * block for number in range(count)]
        rows = file.map([_head(ranks) + rank * self._most for rank in range(ranks)], length)
        blocks = file.map(places, (ranks + 1) * length)
        self._readable = [memoryview(file.map([place], (ranks + 1) * length, writeable=False)[0]) for place in places[:KEPT]]
        self.rows, self.blocks, self._length = rows, blocks, length
        self.row: memoryview = memoryview(rows[self.rank])
        self._views: dict[np.dtype[Any], NDArray[Any]] = {}
        self._inner: dict[tuple[np.dtype[Any], np.dtype[Any]], tuple[NDArray[Any], NDArray[Any]]] = {}
        self._summed: tuple[packed.Layout | None, Any] = None, None  # layout of the last sum, and its function

    def reach(self, row: int, block: int = 0) -> None:
        """Map at least ``row`` bytes of each row and ``block`` bytes of each block."""
        needed = min(max(row, -(-block // (self.ranks + 1))), self._most)
        if needed > self._length:
            self._map(min(1 << (needed - 1).bit_length(), self._most))

    def _secure(self, sequence: int, row: int, block: int) -> bool:
        """Reserve memory for this rank's row and for each block; return True on success. It then stays available to all ranks."""
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
            # Other ranks may be reserving their pieces at the same time: require memory for all pieces, less what is already allocated.
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
        """Write this rank's stream, of at most ``capacity`` bytes, to its row; return False if the memory is in use or cannot be reserved.

        ``dense_bytes`` is the size of a result that the user wants dense although that takes more bytes, for which a block may be too
        small.
        """
        if self.armed:
            return False
        row = packed.packed_bytes(stream)
        block = max(self.ranks * row + LINE, dense_bytes)
        if dense_bytes and block > (self.ranks + 1) * self._most:
            return False
        self.store(self.rank, LEFT, sequence - 1)  # also needed if an operation failed before this point
        if not self.all_reached(LEFT, self.ranks, self._last) or not self._secure(sequence, row, block):
            return False
        packed.pack_into(stream, self.row)
        self.armed = sequence
        self._last = sequence  # from publication on, whether or not this rank learns that all agree
        return True

    def unread(self) -> None:
        """Record that no rank reads this rank's row any more."""
        self._last = 0

    def leave(self, sequence: int) -> None:
        """Publish that this rank no longer reads the rows of the others."""
        self.store(self.rank, LEFT, sequence)

    def view(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return the rows as numbers of this type."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.rows.view(dtype)
        return view

    def free_blocks(self) -> int:
        """Return a bit mask of the blocks whose results are not in use on this rank."""
        return self._leases.free()

    def claim(self, sequence: int, parts: int) -> int:
        """Claim and return a part that no other rank adds; -1 if none is left."""
        part: int = self._claim(self.words, self.ranks * WORDS, sequence, parts)
        return part

    def store(self, of: int, what: int, word: int) -> None:
        """Store a word of this rank, or of a part that it has claimed."""
        self._store(self.words, of * WORDS + what, word)

    def note(self, part: int, entries: int, first: int) -> None:
        """Write the number of entries of a part's sum and where it starts, to be published with the next word."""
        self.words[part * WORDS + ENTRIES], self.words[part * WORDS + FIRST] = entries, first

    def all_reached(self, what: int, count: int, sequence: int, spins: int = 1) -> bool:
        """Return True if this word of the first ``count`` parts or ranks has reached ``sequence``, polling ``spins`` times."""
        reached: bool = self._all_reached(self.words, what, WORDS, count, sequence, spins, self.yield_core)
        return reached

    def reading(self, sequence: int) -> list[int]:
        """Return the other ranks that may still read the rows, which they do while they add."""
        words = self.words[LEFT : self.ranks * WORDS : WORDS].tolist()
        return [rank for rank, left in enumerate(words) if left < sequence and rank != self.rank]

    def inner(self, layout: packed.Layout) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return private memory for intermediate sums of a reduction tree."""
        dtypes = layout.indices, layout.dtype
        found = self._inner.get(dtypes)
        if found is None:
            found = self._inner[dtypes] = kernels.inner_sums(self.ranks, self.blocks.shape[1], *dtypes)
        return found

    def sum_parts(self, layout: packed.Layout) -> Callable[..., Any]:
        """Return the compiled ``sum_parts`` for streams of this layout, with its constant arguments bound."""
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
        """Return a block, read-only; it is free again when all views of it are gone."""
        return self._leases.keep(place, self._readable[place])


def _head(ranks: int) -> int:
    """Return the number of bytes before the rows."""
    return -(-(ranks + 1) * LINE // _WHOLE) * _WHOLE


def _capacity(ranks: int) -> int:
    """Return the capacity of a row in bytes."""
    capacity = _BYTES // ranks
    unit = _WHOLE if capacity >= _WHOLE else PAGE
    return capacity // unit * unit
