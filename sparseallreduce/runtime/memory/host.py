"""Memory through which the ranks of one host exchange parts of streams and share a result: words, rows and blocks.

Ownership: a rank has four rows, which only it writes. The blocks for results belong to the first rank of the host, which alone assigns them
and allocates their memory. Operations in flight use four sets of words in turn; in each set, a rank writes only its own words.

What a rank has published stays unchanged until all ranks of the host have left the operation, because they have read everything or have
failed. Only then is a row reused. A block is reused when, in addition, no rank has a view of it any more, which each rank reports with its
next publication. A number higher than the awaited one was published by a rank that has failed, and whose failure message is on its way;
nothing is then read.

A reader checks the bounds of everything that it reads from a row, so that wrong numbers in it cannot lead elsewhere. Rows and blocks are
mapped on first use; if that fails, they are read and written through the file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.memory.leases import Leases
from sparseallreduce.runtime.memory.mapping import PAGE, SharedFile, page_multiple, rounded_up
from sparseallreduce.runtime.memory.words import LINE, word_kernels
from sparseallreduce.streams import memory, packed
from sparseallreduce.streams.stream import SparseStream

__all__ = ["GATHERING", "KEPT", "LEFT", "PUBLISHED", "REDUCING", "SETTLING", "SLOTS", "WORDS", "Bytes", "HostMemory"]

Bytes = NDArray[np.uint8]

SLOTS = 4  # operations that may use the memory at the same time
KEPT = 8  # results that may be kept in blocks: of four operations in flight, and of four before
_BYTES = 1 << 29  # limit of what all ranks write for one operation, and of a result
_WHOLE = 1 << 21  # size of a large page, to which long rows are aligned
_MAPPED = 1 << 18  # smallest mapping of a row or a block, in bytes
_LATER = 256  # requests for memory that are skipped after one was refused

# The words of a rank, in lines: one for the blocks that it keeps; and for each slot one for the reducing step, one for the gathering step,
# and one for the first rank's description of the result. The first two words of a step are the last number that the rank has published
# and the last that it has left.
WORDS = LINE // 8
PUBLISHED, LEFT = range(2)
REDUCING, GATHERING, SETTLING = range(3)
_LINES = 1 + 3 * SLOTS


class HostMemory:
    """Memory that the ranks of one of several hosts share, as one of these ranks sees it.

    Parameters
    ----------
    file : SharedFile
        The same file on all ranks of the host, initially zero, of size :meth:`nbytes`, with the pieces of :meth:`reserved` allocated.
    members : tuple of int
        The ranks of the host.
    place : int
        Index of this rank in ``members``.

    Raises
    ------
    OSError
        If the words cannot be mapped.
    """

    members: tuple[int, ...]
    place: int
    ranks: int

    def __init__(self, file: SharedFile, members: tuple[int, ...], place: int) -> None:
        self.members, self.place, self.ranks = members, place, len(members)
        self.words: Any = file.map([0], self.ranks * _LINES * LINE)[0].view(np.uint64)
        self._file, self._leases = file, Leases(KEPT)
        self._all_reached, self._store = word_kernels()
        self._published: dict[int, int] = {}  # the last number, by line
        self._used: list[tuple[int, int]] = [(1, 0)] * SLOTS  # line and number for which each row of this rank was last written
        self._given: list[tuple[int, int]] = [(1, 0)] * (KEPT + 1)  # the same for the blocks, on the first rank
        self._maps: dict[tuple[int, bool], Bytes] = {}  # by offset and whether they are writable
        self._secured: dict[int, int] = {}  # allocated bytes by offset
        self._refused = 0  # requests for memory that are still to be skipped

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the size of the file in bytes. Only reserved pieces use memory, and only mapped ones use address space."""
        return _head(ranks) + ranks * SLOTS * _row(ranks) + (KEPT + 1) * _BYTES

    @staticmethod
    def reserved(ranks: int) -> list[tuple[int, int]]:
        """Return the pieces (offset and size in bytes) that are used from the first operation on."""
        return [(0, ranks * _LINES * LINE)]

    def line_of(self, sequence: int, step: int) -> int:
        """Return the line of an operation's step: :data:`REDUCING`, :data:`GATHERING` or :data:`SETTLING`."""
        return 1 + 3 * (sequence % SLOTS) + step

    def word(self, place: int, line: int, word: int) -> int:
        """Return a word that a rank has published."""
        return int(self.words[_at(place, line, word)])

    def store(self, line: int, word: int, value: int) -> None:
        """Store a word of this rank, ordered after all its previous reads and writes."""
        self._store(self.words, _at(self.place, line, word), value)

    def is_at(self, place: int, line: int, word: int, number: int) -> bool:
        """Return True if a rank's word is exactly ``number``; everything that the rank wrote before can then be read."""
        at = _at(place, line, word)
        return bool(self._all_reached(self.words, at, 1, 1, number, 1, 0)) and int(self.words[at]) == number

    def have_left(self, line: int, number: int) -> bool:
        """Return True if all ranks have left step ``number``."""
        return bool(self._all_reached(self.words, _at(0, line, LEFT), _LINES * WORDS, self.ranks, number, 1, 0))

    def is_free(self, line: int, number: int) -> bool:
        """Return True if this rank may publish ``number``, because all ranks have read what it published in this line before."""
        self.store(line, LEFT, number - 1)  # also needed if an operation failed before this point
        return self.have_left(line, self._published.get(line, 0))

    def publish(self, line: int, number: int, words: list[int]) -> None:
        """Publish words together with their step number."""
        self._tell_kept()
        begin = _at(self.place, line, LEFT + 1)
        self.words[begin : begin + len(words)] = words
        self._published[line] = number
        self.store(line, PUBLISHED, number)

    def leave(self, line: int, number: int) -> None:
        """Publish that this rank no longer reads or writes anything of the step."""
        self._tell_kept()
        self.store(line, LEFT, number)

    def take_row(self, nbytes: int, line: int, number: int) -> int | None:
        """Return the number of a row of this rank that no other rank reads; None if there is no memory for it."""
        row = next(row for row, used in enumerate(self._used) if self.have_left(*used))
        if not self._secure(self.row_at(self.place, row), nbytes):
            return None
        self._used[row] = line, number
        return row

    def take_block(self, nbytes: int, line: int, number: int) -> int | None:
        """Return the first block that no rank uses; the last one is returned only if all others are kept as results.

        Return None if there is none, or no memory.
        """
        kept = 0
        for place in range(self.ranks):
            kept |= self.word(place, 0, 0)
        block = next((block for block, given in enumerate(self._given) if not kept >> block & 1 and self.have_left(*given)), None)
        if block is None or not self._secure(self.block_at(block), nbytes):
            return None
        self._given[block] = line, number
        return block

    def row_at(self, place: int, row: int) -> int:
        """Return the offset of a rank's row."""
        return _head(self.ranks) + (place * SLOTS + row) * _row(self.ranks)

    def block_at(self, block: int) -> int:
        """Return the offset of a block."""
        return _head(self.ranks) + self.ranks * SLOTS * _row(self.ranks) + block * _BYTES

    def put(self, begin: int, start: int, array: NDArray[Any]) -> None:
        """Write an array at offset ``start`` of the row or block that starts at ``begin``."""
        if array.nbytes:
            found, source = self._mapped(begin, start + array.nbytes), array.reshape(-1).view(np.uint8)
            if found is None:
                self._file.write(begin + start, source)
            else:
                packed.put(source, memoryview(found), start)  # type: ignore[arg-type]

    def get(self, begin: int, start: int, nbytes: int) -> Bytes:
        """Return ``nbytes`` bytes of the row or block that starts at ``begin``, read-only: a view, or a copy if it cannot be mapped.

        Raises
        ------
        StreamError
            If the row or block is shorter.
        """
        if start + nbytes > self._most(begin):
            raise StreamError(f"a row or block of {self._most(begin)} bytes does not have {nbytes} from byte {start} on")
        found = self._mapped(begin, start + nbytes)
        if found is None:
            found = memory.empty(nbytes, np.uint8)
            self._file.read(begin + start, found)
        else:
            found = found[start : start + nbytes]
        found.flags.writeable = False
        return found

    def kept(self, block: int, nbytes: int) -> Bytes:
        """Return the content of a block to be given to the user, read-only.

        The block stays reserved until all views of it are gone; the last block is copied instead.
        """
        if block < KEPT:
            found = self._mapped(self.block_at(block), nbytes, writeable=False)
            if found is not None:
                return self._leases.keep(block, memoryview(found)[:nbytes])  # type: ignore[arg-type]
        copied = memory.empty(nbytes, np.uint8)
        copied[:] = self.get(self.block_at(block), 0, nbytes)
        copied.flags.writeable = False
        return copied

    def holds(self, stream: SparseStream) -> bool:
        """Return True if part of a stream is in memory that this rank has mapped."""
        arrays = [array for array in stream._arrays if array is not None]
        return any(np.may_share_memory(array, mapped) for array in arrays for mapped in self._maps.values())

    def _tell_kept(self) -> None:
        """Write which blocks this rank keeps, to be published with its next word."""
        self.words[_at(self.place, 0, 0)] = self._leases.held()

    def _most(self, begin: int) -> int:
        """Return the capacity in bytes of the row or block that starts at ``begin``."""
        return _BYTES if begin >= self.block_at(0) else _row(self.ranks)

    def _secure(self, begin: int, nbytes: int) -> bool:
        """Allocate memory for ``nbytes`` bytes from ``begin`` on; return True on success. Allocated memory is never freed."""
        had, most = self._secured.get(begin, 0), self._most(begin)
        if nbytes <= had:
            return True
        self._refused = max(self._refused - 1, 0)
        if nbytes > most or self._refused:
            return False
        wanted = min(rounded_up(nbytes), most)
        try:
            enough = self._file.reserve([(begin + had, wanted - had)])
        except (OSError, MemoryError):
            enough = False
        if enough:
            self._secured[begin] = wanted
        else:
            self._refused = _LATER
        return enough

    def _mapped(self, begin: int, nbytes: int, writeable: bool = True) -> Bytes | None:
        """Return a view of at least ``nbytes`` bytes from ``begin`` on; None if they cannot be mapped."""
        found = self._maps.get((begin, writeable))
        if found is None or len(found) < nbytes:
            length = min(max(1 << max(nbytes - 1, 0).bit_length(), _MAPPED), self._most(begin))
            try:
                found = self._file.map([begin], length, writeable)[0]
            except OSError:
                return None
            self._maps[begin, writeable] = found
        return found


def _at(place: int, line: int, word: int) -> int:
    """Return the index of a rank's word."""
    return (place * _LINES + line) * WORDS + word


def _head(ranks: int) -> int:
    """Return the number of bytes before the rows."""
    return -(-ranks * _LINES * LINE // _WHOLE) * _WHOLE


def _row(ranks: int) -> int:
    """Return the capacity of a row in bytes."""
    capacity = _BYTES // ranks
    return capacity // _WHOLE * _WHOLE if capacity >= _WHOLE else page_multiple(max(capacity, PAGE))
