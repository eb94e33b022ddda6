"""Memory by which the ranks of one host hand each other parts of streams, and have a result together: words, rows and blocks.

Who owns what: a rank has four rows, which it alone writes. The blocks for results belong to the first rank of the host, which alone gives
them out, and reserves memory for them. Operations in flight take four sets of words by turns; in each a rank writes words of its own alone.

What a rank has published stays as it is until all ranks of the host have left the operation. They leave it when they have read all that
they read there, or have failed. Only then is a row used again; a block, when besides no rank has a view of it any more, which a rank says
with the next that it publishes. A number that is higher than the one awaited is that of a rank which has failed, and of which word is on
its way: nothing of it is read.

What is read of a row is bytes that the reader has cut out for itself, so that no number in it leads elsewhere. Rows and blocks are mapped
when they are first used; where they cannot be, they are copied from the file, or to it.
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

SLOTS = 4  # operations that may be at it at a time
KEPT = 8  # results that may be kept where they lie: those of four operations in flight, and of four before
_BYTES = 1 << 29  # of what the ranks write for one operation, at most, and of a result
_WHOLE = 1 << 21  # bytes of a large page, of which rows begin at a multiple if they are as long
_MAPPED = 1 << 18  # bytes of a row or a block that are mapped at least
_LATER = 256  # requests for memory that are given up after one was refused

# The words of a rank, in lines: which blocks it keeps; and of each slot its step that reduces, its step that gathers, and what the first
# rank says of the result. The first two words of a step are the last number that the rank has published, and the last that it has left.
WORDS = LINE // 8
PUBLISHED, LEFT = range(2)
REDUCING, GATHERING, SETTLING = range(3)
_LINES = 1 + 3 * SLOTS


class HostMemory:
    """What one rank sees of the memory.

    Parameters
    ----------
    file : SharedFile
        The same for all ranks of the host, zeros at first; of :meth:`nbytes`, of which what :meth:`reserved` says is there.
    members : tuple of int
        The ranks of the host.
    place : int
        Of this one among them.

    Raises
    ------
    OSError
        If the words cannot be mapped.
    """

    def __init__(self, file: SharedFile, members: tuple[int, ...], place: int) -> None:
        self.members, self.place, self.ranks = members, place, len(members)
        self.words = file.map([0], self.ranks * _LINES * LINE)[0].view(np.uint64)
        self._file, self._leases = file, Leases(KEPT)
        self._have_come, self._store = word_kernels()
        self._published: dict[int, int] = {}  # the last number, by line
        self._used: list[tuple[int, int]] = [(1, 0)] * SLOTS  # the line and the number for which each of our rows was written last
        self._given: list[tuple[int, int]] = [(1, 0)] * (KEPT + 1)  # likewise of the blocks, of which the first rank knows
        self._maps: dict[tuple[int, bool], Bytes] = {}  # by where they begin, and whether they can be written to
        self._secured: dict[int, int] = {}  # bytes that are reserved, by where they begin
        self._refused = 0  # requests for memory that are still to be given up

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of the file, of which those take memory that have been reserved, and those address space that a rank has mapped."""
        return _head(ranks) + ranks * SLOTS * _row(ranks) + (KEPT + 1) * _BYTES

    @staticmethod
    def reserved(ranks: int) -> list[tuple[int, int]]:
        """The pieces of it, each a place and bytes, that are used from the first operation on."""
        return [(0, ranks * _LINES * LINE)]

    def line_of(self, sequence: int, step: int) -> int:
        """The line of an operation's step: :data:`REDUCING`, :data:`GATHERING` or :data:`SETTLING`."""
        return 1 + 3 * (sequence % SLOTS) + step

    def word(self, place: int, line: int, word: int) -> int:
        """What a rank has published."""
        return int(self.words[_at(place, line, word)])

    def store(self, line: int, word: int, value: int) -> None:
        """Store a word of ours, after all that was written or read before."""
        self._store(self.words, _at(self.place, line, word), value)

    def is_at(self, place: int, line: int, word: int, number: int) -> bool:
        """Whether a rank has come to a number, and no further; what it wrote before can then be read."""
        at = _at(place, line, word)
        return bool(self._have_come(self.words, at, 1, 1, number, 1, 0)) and int(self.words[at]) == number

    def have_left(self, line: int, number: int) -> bool:
        """Whether all ranks have left what has that number."""
        return bool(self._have_come(self.words, _at(0, line, LEFT), _LINES * WORDS, self.ranks, number, 1, 0))

    def is_free(self, line: int, number: int) -> bool:
        """Whether we may publish a number: all have left what we published there last. What came before is over on this rank."""
        self.store(line, LEFT, number - 1)  # also if an operation failed before it came here
        return self.have_left(line, self._published.get(line, 0))

    def publish(self, line: int, number: int, words: list[int]) -> None:
        """Publish words, behind the number."""
        self._tell_kept()
        begin = _at(self.place, line, LEFT + 1)
        self.words[begin : begin + len(words)] = words
        self._published[line] = number
        self.store(line, PUBLISHED, number)

    def leave(self, line: int, number: int) -> None:
        """We read and write nothing more of it."""
        self._tell_kept()
        self.store(line, LEFT, number)

    def take_row(self, nbytes: int, line: int, number: int) -> int | None:
        """The number of a row of ours that nobody reads, of which there is one for every slot; None if there is no memory for it."""
        row = next(row for row, used in enumerate(self._used) if self.have_left(*used))
        if not self._secure(self.row_at(self.place, row), nbytes):
            return None
        self._used[row] = line, number
        return row

    def take_block(self, nbytes: int, line: int, number: int) -> int | None:
        """The first block that no rank has a use for, the last one only if all others are kept; None if there is none, or no memory."""
        kept = 0
        for place in range(self.ranks):
            kept |= self.word(place, 0, 0)
        block = next((block for block, given in enumerate(self._given) if not kept >> block & 1 and self.have_left(*given)), None)
        if block is None or not self._secure(self.block_at(block), nbytes):
            return None
        self._given[block] = line, number
        return block

    def row_at(self, place: int, row: int) -> int:
        """Where a row of a rank begins."""
        return _head(self.ranks) + (place * SLOTS + row) * _row(self.ranks)

    def block_at(self, block: int) -> int:
        """Where a block begins."""
        return _head(self.ranks) + self.ranks * SLOTS * _row(self.ranks) + block * _BYTES

    def put(self, begin: int, start: int, array: NDArray[Any]) -> None:
        """Write an array to the row or block that begins there, from a byte in it on."""
        if array.nbytes:
            found, source = self._mapped(begin, start + array.nbytes), array.reshape(-1).view(np.uint8)
            if found is None:
                self._file.write(begin + start, source)
            else:
                packed.put(source, memoryview(found), start)  # type: ignore[arg-type]

    def get(self, begin: int, start: int, nbytes: int) -> Bytes:
        """So many bytes of the row or block that begins there, read-only: where they lie, or copied if they cannot be mapped.

        Raises
        ------
        StreamError
            If it does not have so many.
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
        """What is in a block, for the user: read-only, and ours until all views of it are gone; a copy of the last one."""
        if block < KEPT:
            found = self._mapped(self.block_at(block), nbytes, writeable=False)
            if found is not None:
                return self._leases.keep(block, memoryview(found)[:nbytes])  # type: ignore[arg-type]
        copied = memory.empty(nbytes, np.uint8)
        copied[:] = self.get(self.block_at(block), 0, nbytes)
        copied.flags.writeable = False
        return copied

    def holds(self, stream: SparseStream) -> bool:
        """Whether a stream lies in memory that this rank has mapped, if only in part."""
        arrays = [array for array in stream._arrays if array is not None]
        return any(np.may_share_memory(array, mapped) for array in arrays for mapped in self._maps.values())

    def _tell_kept(self) -> None:
        """Write which blocks we keep, to be seen with our next word."""
        self.words[_at(self.place, 0, 0)] = self._leases.held()

    def _most(self, begin: int) -> int:
        """Bytes that the row or block has which begins there."""
        return _BYTES if begin >= self.block_at(0) else _row(self.ranks)

    def _secure(self, begin: int, nbytes: int) -> bool:
        """Whether there is memory for so many bytes from there on. What is reserved stays so."""
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
        """At least so many bytes from there on where they lie; None if they cannot be mapped."""
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
    """Where a word of a rank is."""
    return (place * _LINES + line) * WORDS + word


def _head(ranks: int) -> int:
    """Bytes before the rows."""
    return -(-ranks * _LINES * LINE // _WHOLE) * _WHOLE


def _row(ranks: int) -> int:
    """Bytes that a row may have."""
    capacity = _BYTES // ranks
    return capacity // _WHOLE * _WHOLE if capacity >= _WHOLE else page_multiple(max(capacity, PAGE))
