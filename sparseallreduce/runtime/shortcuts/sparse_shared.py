"""Add sparse streams in memory shared by the ranks of a host: SSAR_Split_AlGa (thesis section 3.3.3) without messages.

It has three steps:

1. Each rank writes its stream where all can read it, before the handshake.
2. Once all have, the entries of each part of the index space are added: the split. There are as many parts as cores, but no more than
   ranks, with about the same number of entries each. Each rank takes the next part that no rank has started, so that no rank waits for one
   that has no core at the moment.
3. Once all parts are added, each is written to its place in the result, and once all are, that memory is the result of every rank: the
   allgather, without a copy.

Two parts need no third step: if the first ends at their border and the second starts there, the result has no gap, wherever the border is.

If the total number of entries is more than a sparse result may hold, all ranks sample how many entries coincide. If too few do, each rank
adds its part directly into the dense result, again without a third step.

A result is in one of a few blocks that no rank uses any more; if there is none, each rank copies it to its own memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.memory.sparse import KEPT, SparseMemory
from sparseallreduce.runtime.memory.sum_parts import ADDED, ENTRIES, FIRST, LEFT, WORDS, WRITTEN
from sparseallreduce.runtime.memory.words import LINE
from sparseallreduce.runtime.shortcuts.base import FREE_BLOCKS, SPARSE_SHARED, Shortcut
from sparseallreduce.streams import kernels, memory, packed
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import slice_range
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.handshake.base import Handshake

__all__ = ["SparseShared"]

_TOGETHER = 16  # positions, at least a cache line, which only one rank writes
_LITTLE = 1 << 18  # a dense vector of at most this size, in bytes, is not worth sampling
_SAMPLES = 16  # sampled entries that show how much the ranks' sets overlap


class SparseShared(Shortcut):
    """Sums of streams of one layout in shared memory.

    Parameters
    ----------
    layout : packed.Layout
        Layout of the streams.
    reduction : Reduction
        A sum.
    memory : SparseMemory
    """

    __slots__ = (
        "_block",
        "_counts",
        "_dense",
        "_dense_bytes",
        "_direct",
        "_first",
        "_layout",
        "_memory",
        "_next",
        "_ours",
        "_parts",
        "_reduction",
        "_sequence",
        "_sum",
        "_total",
        "spins",
    )
    spins: int

    flag = SPARSE_SHARED

    def __init__(self, layout: packed.Layout, reduction: Reduction, memory: SparseMemory) -> None:
        self._memory, self._layout, self._reduction, self.spins = memory, layout, reduction, memory.spins
        # A switch density set by the user may make the result dense although that takes more bytes.
        self._dense_bytes = 0 if reduction.switch_density is None else math.prod(layout.shape) * layout.dtype.itemsize
        self._sequence = 0  # the latest operation
        self._counts = np.zeros(memory.ranks, np.int64)  # entries of each rank
        self._ours: list[tuple[int, int, NDArray[Any], NDArray[Any]]] = []  # parts of this rank: number, start, indices and values
        self._next: Callable[[int], bool] | None = None  # the next step

    def arm(self, sequence: int, stream: SparseStream) -> int:
        memory = self._memory
        if not memory.write(sequence, stream, self._dense_bytes):
            return 0
        self._sequence = sequence
        self._dense = self._direct = False
        self._parts = min(memory.ranks, memory.cores)  # number of parts of the index space
        self._total = self._first = 0  # entries of a sparse result, and its offset in the block
        self._ours = []
        self._next = self._add
        return SPARSE_SHARED | memory.free_blocks() << FREE_BLOCKS

    def commit(self, sequence: int, flags: int, handshake: Handshake) -> SparseStream | None:
        entries = handshake.entries()
        self._counts = np.array(entries, np.int64)
        self._sum = sum(entries)
        self._memory.reach(self._longest(max(entries)))
        free = flags >> FREE_BLOCKS
        self._block = (free & -free).bit_length() - 1 if free else KEPT
        return None

    def _longest(self, entries: int) -> int:
        """Return the size in bytes of a row for the longest stream, of ``entries`` entries.

        A dense stream counts as large as the longest sparse one.
        """
        layout = self._layout
        value, index = math.prod(layout.shape[1:]) * layout.dtype.itemsize, layout.indices.itemsize
        nbytes: int = packed.aligned(entries * value, index) + (index if entries == layout.size else entries * index)
        return nbytes

    def poll(self, sequence: int, spins: int) -> SparseStream | None:
        while self._next is not None:
            if not self._next(spins):
                return None
        result = self._result()
        self._memory.unread()
        self._memory.armed = 0
        return result

    def moved(self) -> tuple[int, int, int]:
        shared, layout = self._memory, self._layout
        value = math.prod(layout.shape[1:]) * layout.dtype.itemsize
        streams = [count * value if count == layout.size else count * (value + layout.indices.itemsize) for count in self._counts.tolist()]
        total = layout.size * value if self._dense else self._total * (value + layout.indices.itemsize)
        ours, others = streams[shared.rank], shared.ranks - 1
        sent = others * (ours + total) // shared.ranks
        return sent, (sum(streams) - ours + others * total) // shared.ranks, others + others.bit_length()

    def missing(self, sequence: int) -> list[int] | None:
        return self._memory.reading(sequence)

    def decline(self, sequence: int) -> None:
        if self._memory.armed == sequence:
            self._memory.unread()
            self._memory.armed = 0

    def cancel(self, sequence: int) -> None:
        if self._memory.armed == sequence:
            self._memory.leave(sequence)
            self._ours = []
            self._memory.armed = 0

    def _add(self, spins: int) -> bool:
        """Add parts that no other rank has started."""
        shared = self._memory
        self._dense = self._becomes_dense()
        if self._dense:
            self._parts = shared.ranks
            self._add_dense()
            shared.store(shared.rank, WRITTEN, self._sequence)
            self._next = self._await
        elif self._layout.compiled and self._parts <= 2 and self._sum <= self._layout.limit:
            self._direct = True
            self._next = self._await
            return self._sum_parts(spins)
        else:
            while (part := shared.claim(self._sequence, self._parts)) >= 0:
                self._sum_part(part)
            self._next = self._write
        self._memory.leave(self._sequence)
        return True

    def _sum_parts(self, spins: int) -> bool:
        """Add parts directly in the result, which needs at most two parts, and wait for the others."""
        shared, layout = self._memory, self._layout
        there = shared.sum_parts(layout)(self._sequence, self._parts, spins, self._counts, layout.size, self._block)
        if there < 0:
            raise StreamError(f"rows of {shared.capacity} bytes cannot hold {self._counts.tolist()} entries")
        if there:
            self._find()
        return bool(there)

    def _find(self) -> None:
        """Determine the position and size of a result of at most two parts."""
        words = self._memory.words[: self._parts * WORDS].tolist()
        self._total, self._first, self._next = sum(words[ENTRIES::WORDS]), words[FIRST], None

    def _becomes_dense(self) -> bool:
        """Return True if the result is to be dense, judging the overlap by some entries; the same on all ranks.

        It is dense if the ranks have more entries in total than a sparse result may hold, unless the sum is expected to have at most half
        of that limit.
        """
        layout = self._layout
        if self._sum <= layout.limit:
            return False
        if layout.size in self._counts or math.prod(layout.shape) * layout.dtype.itemsize <= _LITTLE:
            return True
        rows, itemsize, counts = self._packed()
        return 2 * kernels.estimate_union(rows, 0, itemsize, counts, _SAMPLES) > layout.limit

    def _sum_part(self, part: int) -> None:
        """Add one of the parts."""
        shared, layout, bounds = self._memory, self._layout, self._memory.bounds
        rows, itemsize, counts = self._packed()
        total = kernels.cut_rows(rows, itemsize, counts, layout.size, part, self._parts, bounds)
        first = int(bounds[0, shared.ranks])
        if self._layout.compiled:
            indices, values = memory.empty((1, total), layout.indices), memory.empty((1, total), layout.dtype)
            n = kernels.sum_cut_rows(rows, shared.view(layout.dtype), 0, counts, bounds, shared.inner(layout), indices, values)
            indices, values = indices[0, :n], values[0, :n]
        else:
            streams = []
            for rank, (begin, end) in enumerate(bounds[:2, : shared.ranks].T.tolist()):
                indices, values = self._stream(rank)._entries()
                streams.append(SparseStream._sparse_form(indices[begin:end], values[begin:end], layout.size))
            indices, values = Reduction(SUM, 1.0).many(streams)._entries()
        self._ours.append((part, first, indices, values))
        shared.note(part, len(indices), first)
        shared.store(part, ADDED, self._sequence)

    def _add_dense(self) -> None:
        """Add this rank's part of the dense result in place."""
        shared, layout = self._memory, self._layout
        dense = self._dense_block(shared.blocks[self._block])
        share = -(-layout.size // (shared.ranks * _TOGETHER)) * _TOGETHER
        lo, hi = (min(layout.size, place * share) for place in (shared.rank, shared.rank + 1))
        if self._layout.compiled:
            rows, _, counts = self._packed()
            kernels.sum_rows(rows, shared.view(layout.dtype), 0, np.where(counts == layout.size, -1, counts), lo, hi, dense)
            return
        dense[lo:hi] = 0
        for rank in range(shared.ranks):
            part = slice_range(self._stream(rank), lo, hi)
            if part.is_dense:
                np.add(dense[lo:hi], part._stored, out=dense[lo:hi])
            else:
                kernels.scatter(*part._entries(), lo, SUM, dense[lo:hi])

    def _write(self, spins: int) -> bool:
        """Write this rank's parts to their places, once the sizes of the preceding parts are known."""
        shared = self._memory
        if not shared.all_reached(ADDED, self._parts, self._sequence, spins):
            return False
        counts, firsts = self._words(ENTRIES), self._words(FIRST)
        self._total = sum(counts)
        block, self._dense = shared.blocks[self._block], self._total > self._layout.limit
        for part, first, indices, values in self._ours:
            if self._dense:  # decided by the true size
                last = [*firsts, self._layout.size][part + 1]
                dense = self._dense_block(block)[first:last]
                dense.fill(0)
                kernels.scatter_set(indices, values, first, dense)
            else:
                before = sum(counts[:part])
                place = self._sparse(block, before, before + len(indices))
                place[0][:], place[1][:] = indices, values
            shared.store(part, WRITTEN, self._sequence)
        self._ours.clear()
        self._next = self._await
        return True

    def _words(self, what: int) -> list[int]:
        """Return one word of each part."""
        words: list[int] = self._memory.words[what : self._parts * WORDS : WORDS].tolist()
        return words

    def _await(self, spins: int) -> bool:
        shared = self._memory
        if not shared.all_reached(WRITTEN, self._parts, self._sequence, spins):
            return False
        # A rank with the result may overwrite its row with another stream, so wait until all have read the rows.
        if not (self._direct or shared.all_reached(LEFT, shared.ranks, self._sequence, spins)):
            return False
        if self._direct:
            self._find()
        self._next = None
        return True

    def _result(self) -> SparseStream:
        """Return the complete result."""
        shared, layout, density = self._memory, self._layout, self._reduction.switch_density
        keeps = self._block < KEPT
        block = shared.keep(self._block) if keeps else shared.blocks[KEPT]
        if self._dense:
            dense = self._dense_block(block)
            if not keeps:
                dense = memory.copy(dense)
                dense.flags.writeable = False
            return SparseStream._dense_form(dense, layout.size, density=density)
        indices, values = self._sparse(block, self._first, self._first + self._total)
        if not keeps:
            indices, values = indices.copy(), values.copy()
        return SparseStream._sparse_form(indices, values, layout.size, density=density)

    def _dense_block(self, block: NDArray[np.uint8]) -> NDArray[Any]:
        return _array(block, 0, self._layout.shape, self._layout.dtype)

    def _sparse(self, block: NDArray[np.uint8], begin: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a range of the indices and values of a sparse result."""
        layout = self._layout
        value, index = math.prod(layout.shape[1:]) * layout.dtype.itemsize, layout.indices.itemsize
        start = -(-self._sum * value // LINE) * LINE  # as in the kernel
        values = block[begin * value : end * value].view(layout.dtype)
        if not layout.plain:
            values = values.reshape(-1, *layout.shape[1:])
        return block[start + begin * index : start + end * index].view(layout.indices), values

    def _packed(self) -> tuple[NDArray[Any], int, NDArray[np.int64]]:
        """Return the rows as indices, the size of an entry's values in bytes, and the number of entries of each row."""
        layout = self._layout
        return self._memory.view(layout.indices), math.prod(layout.shape[1:]) * layout.dtype.itemsize, self._counts

    def _stream(self, rank: int) -> SparseStream:
        """Return the stream of a rank as a view of its row."""
        row, count, layout = self._memory.rows[rank], int(self._counts[rank]), self._layout
        if count == layout.size:
            array = _array(row, 0, layout.shape, layout.dtype)
            array.flags.writeable = False
            return SparseStream._dense_form(array, layout.size)
        values = _array(row, 0, (count, *layout.shape[1:]), layout.dtype)
        indices = _array(row, packed.aligned(values.nbytes, layout.indices.itemsize), (count,), layout.indices)
        return SparseStream._sparse_form(indices, values, layout.size)


def _array(row: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return row[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
