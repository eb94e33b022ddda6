"""The sum of sparse streams in memory that the ranks of one host share: SSAR_Split_AlGa (thesis section 3.3.3) without messages.

It has three steps, as :mod:`~sparseallreduce.runtime.part_sum` has for dense vectors:

1. Each rank writes its stream where all can read it, before the ranks agree on the operation.
2. Once all have, the entries of each part of the index space are added up: the split. There are as many parts as cores, but no more than
   ranks, with about as many entries each. Who comes first adds up what nobody has begun to: a rank that waits for a core need not be
   waited for.
3. Once all parts are added up, who has one writes it to its place in the result, and once all have, that is the result of every rank,
   where it lies: the allgather, without a copy.

Two parts need no third step: if the first has its end at their border, the second its beginning, nothing lies between them, wherever the
border is.

Where more entries come together than a sparse result may hold, all ranks look whether some of them meet others. If too few do, each rank
adds up its part in the dense result itself, and there is no third step either.

A result lies in one of a few blocks, and the block is free again when no rank has the result any more. If none is free, each rank
copies the result to memory of its own. Results that a process has when it forks stay for good, as its child may have them.

A rank writes to the blocks through one mapping and gives its user another, through which nobody can write.

Before a rank says that its stream is there, it has reserved the memory for its row, and in each block P times as many bytes: whichever rank
has the longest stream has reserved enough for the result of all. What is reserved stays so, and a loop over sums of one size asks once.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.allreduce import FREE, STAGED, Told
from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.shared import LINE, PAGE, SharedFile, SharedStep, claim_kernel, page_multiple, patience, word_kernels
from sparseallreduce.runtime.stage_kernels import ADDED, ENTRIES, FIRST, LEFT, WORDS, WRITTEN, sum_parts_kernel
from sparseallreduce.streams import kernels, memory, packed
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import slice_range
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["KEPT", "Split", "Stage"]

KEPT = 3  # results that may be kept where they lie: the last of a loop, the one that is being made, and another
_BYTES = 1 << 29  # of the streams of all ranks, at most
_MAPPED = 1 << 18  # bytes of a row that are mapped at first; then twice as many, and so on
_RESERVED = 1 << 16  # bytes of a row that are reserved at least
_LATER = 256  # turns after which memory is asked for again that was refused
_WHOLE = 1 << 21  # bytes of a large page, of which rows and blocks begin at a multiple if they are as long
_NOT, _HERE, _FOREVER = range(3)  # whether this rank keeps a block
_TOGETHER = 16  # positions, a cache line of the shortest values, of which no two ranks write some
_LITTLE = 1 << 18  # bytes of a dense vector that are not worth a look at samples
_SAMPLES = 16  # entries that tell how much the ranks have in common


class Stage:
    """What one rank sees of the memory: words, a row of bytes for the stream of each rank, and blocks for results.

    Parameters
    ----------
    memory : SharedFile
        The same for all ranks, zeros at first; of :meth:`nbytes`, of which what :meth:`reserved` says is there.
    rank, ranks : int
    crowded : bool
        Whether ranks share cores.
    cores : int
        Of the host, as all ranks know.

    Raises
    ------
    OSError
        If the memory cannot be mapped.
    """

    def __init__(self, memory: SharedFile, rank: int, ranks: int, crowded: bool, cores: int) -> None:
        self.rank, self.ranks, self.cores = rank, ranks, cores
        self.polls, self.offered = patience(crowded)
        self.room = self._most = _room(ranks)  # bytes that a stream may take
        self._file = memory
        self.words = memory.map([0], (ranks + 1) * LINE)[0].view(np.uint64)
        self.bounds = np.empty((4, ranks + 1), np.uint64)  # for us alone, as all below
        self._map(min(_MAPPED, self._most))
        self._reserved = [0, 0]  # bytes of our row, and of each block
        self._asked = 0  # the turn from which on more may be asked for
        self._kept = [_NOT] * KEPT
        self._released = [_release(self._kept, place) for place in range(KEPT)]
        self._leases: list[Any] = [None] * KEPT
        self._last = 0  # turn which we have entered, until we have its result
        self.held: Split | None = None  # ours, until it ends
        (self._have_come, self._set), self._claim = word_kernels(), claim_kernel()
        _stages.add(self)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of the file, of which those take memory that have been reserved, and those address space that a rank has mapped."""
        return _head(ranks) + (ranks + (KEPT + 1) * (ranks + 1)) * _room(ranks)

    @staticmethod
    def reserved(ranks: int) -> list[tuple[int, int]]:
        """The pieces of it, each a place and bytes, that are used from the first turn on."""
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
        self._place = memoryview(rows[self.rank])
        self._views: dict[np.dtype[Any], NDArray[Any]] = {}
        self._inner: dict[tuple[np.dtype[Any], np.dtype[Any]], tuple[NDArray[Any], NDArray[Any]]] = {}
        self._summed: tuple[packed.Kind | None, Any] = None, None  # the kind of streams that were summed last, and how

    def reach(self, row: int, block: int = 0) -> None:
        """Map as many bytes of each row, and of each block, if fewer are."""
        needed = min(max(row, -(-block // (self.ranks + 1))), self._most)
        if needed > self._length:
            self._map(min(1 << (needed - 1).bit_length(), self._most))

    def _secure(self, turn: int, row: int, block: int) -> bool:
        """Whether our row and each block have memory for so many bytes: from then on no rank can fail to have it."""
        if row <= self._reserved[0] and block <= self._reserved[1]:
            return True
        if turn < self._asked:
            return False
        row, block = (max(old, new and _rounded(new)) for old, new in zip(self._reserved, (row, block), strict=True))
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
            self._asked = turn + _LATER
        return enough

    def offer(self, turn: int, stream: SparseStream, kind: packed.Kind, reduction: Reduction) -> Split | None:
        """Write our stream, of at most ``room`` bytes, for a split of all ranks; None if the memory is in use, or cannot be had.

        Also None if the caller wants the result dense where that takes more bytes, which a block might not have.
        """
        if self.held is not None:
            return None
        row = packed.packed_bytes(stream)
        block = self.ranks * row + LINE
        if reduction.switch_density is not None:
            block = max(block, math.prod(kind.shape) * kind.dtype.itemsize)
            if block > (self.ranks + 1) * self._most:
                return None
        self.say(self.rank, LEFT, turn - 1)  # also if an operation failed before it came here
        if not self.have_come(LEFT, self.ranks, self._last) or not self._secure(turn, row, block):
            return None
        packed.pack_into(stream, self._place)
        self.held = Split(self, turn, kind, reduction)
        self.enter(turn)  # from when the others are told on, whether we hear that all agree or not
        return self.held

    def view(self, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The rows as numbers of this type."""
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.rows.view(dtype)
        return view

    def free_blocks(self) -> int:
        """The blocks whose results this rank does not have: a bit for each."""
        free = 0
        for place, kept in enumerate(self._kept):
            free |= (kept == _NOT) << place
        return free

    def enter(self, turn: int) -> None:
        """Others may read what we have written, as long as they have not left this turn; 0 if nobody does, or does any more."""
        self._last = turn

    def claim(self, turn: int, parts: int) -> int:
        """A part for us to add up, which no other rank does; -1 if there is none left."""
        part: int = self._claim(self.words, self.ranks * WORDS, turn, parts)
        return part

    def say(self, of: int, what: int, word: int) -> None:
        """Write a word of a part that is ours, or of our rank."""
        self._set(self.words, of * WORDS + what, word)

    def tell(self, part: int, entries: int, first: int) -> None:
        """Write how many entries a part came to and where it begins, to be seen with our next word."""
        self.words[part * WORDS + ENTRIES], self.words[part * WORDS + FIRST] = entries, first

    def have_come(self, what: int, count: int, turn: int, polls: int = 1) -> bool:
        """Whether that word of the first so many parts or ranks has come to a turn, or does while we look so many times."""
        come: bool = self._have_come(self.words, what, WORDS, count, turn, polls, self.offered)
        return come

    def inner(self, kind: packed.Kind) -> tuple[NDArray[Any], NDArray[Any]]:
        """Memory of our own for the sums within a tree."""
        dtypes = kind.indices, kind.dtype
        found = self._inner.get(dtypes)
        if found is None:
            found = self._inner[dtypes] = kernels.inner_sums(self.ranks, self.blocks.shape[1], *dtypes)
        return found

    def sum_parts(self, kind: packed.Kind) -> Callable[..., Any]:
        """The compiled ``sum_parts`` for streams of this kind, but for what changes from one sum to the next."""
        last, found = self._summed
        if last is not kind:
            dtypes = kind.indices, kind.dtype
            rows, blocks = ([memory.view(dtype) for dtype in dtypes] for memory in (self.rows, self.blocks))
            given = self.words, self.rank, self.offered, *rows, self.bounds, *self.inner(kind), *blocks
            found = functools.partial(sum_parts_kernel(*dtypes), *given)
            self._summed = kind, found
        run: Callable[..., Any] = found
        return run

    def keep(self, place: int) -> NDArray[np.uint8]:
        """The block, read-only, which is free again when all views of it are gone."""
        array = np.frombuffer(self._readable[place], np.uint8)  # which all views refer to
        self._leases[place] = weakref.ref(array, self._released[place])
        self._kept[place] = _HERE  # last, so that no interrupt can keep a block for nobody
        return array

    def pin(self) -> None:
        """Keep for good what is kept now."""
        self._kept[:] = [_FOREVER if kept else _NOT for kept in self._kept]


_stages: weakref.WeakSet[Stage] = weakref.WeakSet()


def _pin() -> None:
    for stage in _stages:
        stage.pin()


# A process that is forked off has the same results in the same memory, and nobody knows for how long.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pin)


def _release(kept: list[int], place: int, here: int = _HERE, free: int = _NOT) -> Callable[[Any], None]:
    """What is called when a result is gone, also while the interpreter ends."""

    def release(_lease: Any) -> None:
        if kept[place] == here:
            kept[place] = free

    return release


class Split(SharedStep):
    """The step in which a rank adds up its part and waits for those of the others, once its stream is on the stage.

    Parameters
    ----------
    stage : Stage
    turn : int
    kind : packed.Kind
        Of the streams.
    reduction : Reduction
        A sum.
    """

    __slots__ = (
        "_block",
        "_counts",
        "_dense",
        "_direct",
        "_first",
        "_kind",
        "_next",
        "_ours",
        "_parts",
        "_reduction",
        "_stage",
        "_sum",
        "_total",
        "flags",
        "turn",
    )

    def __init__(self, stage: Stage, turn: int, kind: packed.Kind, reduction: Reduction) -> None:
        self._stage, self.turn, self._kind, self._reduction = stage, turn, kind, reduction
        self.flags = STAGED | stage.free_blocks() << FREE
        self._dense = self._direct = False
        self._parts = min(stage.ranks, stage.cores)  # into which the index space is cut
        self._total = self._first = 0  # entries of a sparse result, and how many do not count before them
        self._ours: list[tuple[int, int, NDArray[Any], NDArray[Any]]] = []  # parts, where they begin, their indices and values
        self._next: Callable[[int], bool] | None = self._add

    def told(self) -> Told:
        """What this rank tells the others."""
        return Told(self.flags, self.begin, self.abandon, decline=self.decline)

    def begin(self, entries: Sequence[int] | NDArray[np.int64], common: int, total: int | None = None) -> Split:
        """This step, for streams of so many entries on each rank, all positions if dense, and the flags that all ranks have set.

        An array of int64 must stay as it is until the step ends. ``total`` is the sum of all entries, for who knows it.
        """
        self._counts = entries if isinstance(entries, np.ndarray) else np.array(entries, np.int64)
        self._sum = int(self._counts.sum()) if total is None else total
        self._stage.reach(self._longest())
        free = common >> FREE
        self._block = (free & -free).bit_length() - 1 if free else KEPT
        return self

    def _longest(self) -> int:
        """Bytes of a row that the longest stream takes; if one is dense, as many as any sparse one could take."""
        kind, entries = self._kind, max(self._counts.tolist())
        value, index = math.prod(kind.shape[1:]) * kind.dtype.itemsize, kind.indices.itemsize
        nbytes: int = packed.aligned(entries * value, index) + (index if entries == kind.size else entries * index)
        return nbytes

    def result(self, polls: int = 1) -> SparseStream | None:
        while self._next is not None:
            if not self._next(polls):
                return None
        made = self._made()
        self._stage.enter(0)
        self._release()
        return made

    def moved(self) -> tuple[int, int, int]:
        stage, kind = self._stage, self._kind
        value = math.prod(kind.shape[1:]) * kind.dtype.itemsize
        streams = [count * value if count == kind.size else count * (value + kind.indices.itemsize) for count in self._counts.tolist()]
        total = kind.size * value if self._dense else self._total * (value + kind.indices.itemsize)
        ours, others = streams[stage.rank], stage.ranks - 1
        sent = others * (ours + total) // stage.ranks
        return sent, (sum(streams) - ours + others * total) // stage.ranks, others + others.bit_length()

    def decline(self) -> None:
        if self._stage.held is self:
            self._stage.enter(0)
        self._release()

    def abandon(self) -> None:
        if self._stage.held is self:
            self._leave()
        self._release()

    def _release(self) -> None:
        if self._stage.held is self:
            self._stage.held = None

    def _leave(self) -> None:
        """We no longer read what the others have written."""
        self._stage.say(self._stage.rank, LEFT, self.turn)

    def _add(self, polls: int) -> bool:
        """Add up our part, and what other ranks have not yet begun to."""
        stage = self._stage
        self._dense = self._becomes_dense()
        if self._dense:
            self._parts = stage.ranks
            self._add_dense()
            stage.say(stage.rank, WRITTEN, self.turn)
            self._next = self._await
        elif self._kind.compiled and self._parts <= 2 and self._sum <= self._kind.limit:
            self._direct = True
            self._next = self._await
            return self._sum_parts(polls)
        else:
            while (part := stage.claim(self.turn, self._parts)) >= 0:
                self._sum_part(part)
            self._next = self._write
        self._leave()
        return True

    def _sum_parts(self, polls: int) -> bool:
        """Add up parts where they are to lie, which is known of two at most, and wait for the others."""
        stage, kind = self._stage, self._kind
        come = stage.sum_parts(kind)(self.turn, self._parts, polls, self._counts, kind.size, self._block)
        if come < 0:
            raise StreamError(f"rows of {stage.room} bytes cannot hold {self._counts.tolist()} entries")
        if come:
            self._find()
        return bool(come)

    def _find(self) -> None:
        """Find the result of two parts at most."""
        words = self._stage.words[: self._parts * WORDS].tolist()
        self._total, self._first, self._next = sum(words[ENTRIES::WORDS]), words[FIRST], None

    def _becomes_dense(self) -> bool:
        """Whether the result is to be dense, as far as some entries tell what the ranks have in common; the same on all ranks.

        It is where more entries come together than a sparse result may hold, unless there is much to gain: half of that or less.
        """
        kind = self._kind
        if self._sum <= kind.limit:
            return False
        if kind.size in self._counts or math.prod(kind.shape) * kind.dtype.itemsize <= _LITTLE:
            return True
        rows, itemsize, counts = self._packed()
        return 2 * kernels.estimate_union(rows, 0, itemsize, counts, _SAMPLES) > kind.limit

    def _sum_part(self, part: int) -> None:
        """Add up one of the parts."""
        stage, kind, bounds = self._stage, self._kind, self._stage.bounds
        rows, itemsize, counts = self._packed()
        total = kernels.cut_rows(rows, itemsize, counts, kind.size, part, self._parts, bounds)
        first = int(bounds[0, stage.ranks])
        if self._kind.compiled:
            indices, values = memory.empty((1, total), kind.indices), memory.empty((1, total), kind.dtype)
            n = kernels.sum_cut_rows(rows, stage.view(kind.dtype), 0, counts, bounds, stage.inner(kind), indices, values)
            indices, values = indices[0, :n], values[0, :n]
        else:
            streams = []
            for rank, (begin, end) in enumerate(bounds[:2, : stage.ranks].T.tolist()):
                indices, values = self._stream(rank)._entries()
                streams.append(SparseStream._sparse_form(indices[begin:end], values[begin:end], kind.size))
            indices, values = Reduction(SUM, 1.0).many(streams)._entries()
        self._ours.append((part, first, indices, values))
        stage.tell(part, len(indices), first)
        stage.say(part, ADDED, self.turn)

    def _add_dense(self) -> None:
        """Add up a part of the dense result where it is to lie."""
        stage, kind = self._stage, self._kind
        dense = self._dense_block(stage.blocks[self._block])
        share = -(-kind.size // (stage.ranks * _TOGETHER)) * _TOGETHER
        lo, hi = (min(kind.size, place * share) for place in (stage.rank, stage.rank + 1))
        if self._kind.compiled:
            rows, _, counts = self._packed()
            kernels.sum_rows(rows, stage.view(kind.dtype), 0, np.where(counts == kind.size, -1, counts), lo, hi, dense)
            return
        dense[lo:hi] = 0
        for rank in range(stage.ranks):
            part = slice_range(self._stream(rank), lo, hi)
            if part.is_dense:
                np.add(dense[lo:hi], part._stored, out=dense[lo:hi])
            else:
                kernels.scatter(*part._entries(), lo, SUM, dense[lo:hi])

    def _write(self, polls: int) -> bool:
        """Write our parts to their places, once it is known what comes before them."""
        stage = self._stage
        if not stage.have_come(ADDED, self._parts, self.turn, polls):
            return False
        counts, firsts = self._words(ENTRIES), self._words(FIRST)
        self._total = sum(counts)
        block, self._dense = stage.blocks[self._block], self._total > self._kind.limit
        for part, first, indices, values in self._ours:
            if self._dense:  # after all
                last = [*firsts, self._kind.size][part + 1]
                dense = self._dense_block(block)[first:last]
                dense.fill(0)
                kernels.scatter_set(indices, values, first, dense)
            else:
                before = sum(counts[:part])
                place = self._sparse(block, before, before + len(indices))
                place[0][:], place[1][:] = indices, values
            stage.say(part, WRITTEN, self.turn)
        self._ours.clear()
        self._next = self._await
        return True

    def _words(self, what: int) -> list[int]:
        """A word of each part."""
        words: list[int] = self._stage.words[what : self._parts * WORDS : WORDS].tolist()
        return words

    def _await(self, polls: int) -> bool:
        stage = self._stage
        if not stage.have_come(WRITTEN, self._parts, self.turn, polls):
            return False
        # Who has the result may write another stream. If all know that it is sparse, who comes last reads none any more.
        if not (self._direct or stage.have_come(LEFT, stage.ranks, self.turn, polls)):
            return False
        if self._direct:
            self._find()
        self._next = None
        return True

    def _made(self) -> SparseStream:
        """The result, once all of it is there."""
        stage, kind, density = self._stage, self._kind, self._reduction.switch_density
        keeps = self._block < KEPT
        block = stage.keep(self._block) if keeps else stage.blocks[KEPT]
        if self._dense:
            dense = self._dense_block(block)
            if not keeps:
                dense = memory.copy(dense)
                dense.flags.writeable = False
            return SparseStream._dense_form(dense, kind.size, density=density)
        indices, values = self._sparse(block, self._first, self._first + self._total)
        if not keeps:
            indices, values = indices.copy(), values.copy()
        return SparseStream._sparse_form(indices, values, kind.size, density=density)

    def _dense_block(self, block: NDArray[np.uint8]) -> NDArray[Any]:
        return _array(block, 0, self._kind.shape, self._kind.dtype)

    def _sparse(self, block: NDArray[np.uint8], begin: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A range of the indices and values of a sparse result."""
        kind = self._kind
        value, index = math.prod(kind.shape[1:]) * kind.dtype.itemsize, kind.indices.itemsize
        start = -(-self._sum * value // LINE) * LINE  # as the kernel has it
        values = block[begin * value : end * value].view(kind.dtype)
        if not kind.plain:
            values = values.reshape(-1, *kind.shape[1:])
        return block[start + begin * index : start + end * index].view(kind.indices), values

    def _packed(self) -> tuple[NDArray[Any], int, NDArray[np.int64]]:
        """The rows as indices, the bytes of an entry's values, and the entries of each."""
        kind = self._kind
        return self._stage.view(kind.indices), math.prod(kind.shape[1:]) * kind.dtype.itemsize, self._counts

    def _stream(self, rank: int) -> SparseStream:
        """What a rank has written, where it lies."""
        row, count, kind = self._stage.rows[rank], int(self._counts[rank]), self._kind
        if count == kind.size:
            array = _array(row, 0, kind.shape, kind.dtype)
            array.flags.writeable = False
            return SparseStream._dense_form(array, kind.size)
        values = _array(row, 0, (count, *kind.shape[1:]), kind.dtype)
        indices = _array(row, packed.aligned(values.nbytes, kind.indices.itemsize), (count,), kind.indices)
        return SparseStream._sparse_form(indices, values, kind.size)


def _array(memory: NDArray[np.uint8], start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def _head(ranks: int) -> int:
    """Bytes before the rows."""
    return -(-(ranks + 1) * LINE // _WHOLE) * _WHOLE


def _room(ranks: int) -> int:
    """Bytes that a row may have."""
    room = _BYTES // ranks
    unit = _WHOLE if room >= _WHOLE else PAGE
    return room // unit * unit


def _rounded(nbytes: int) -> int:
    """As many bytes or up to an eighth more, of which few numbers are told apart, so that streams that grow seldom ask for memory."""
    nbytes = max(nbytes, _RESERVED)
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return page_multiple(-(-nbytes // step) * step)
