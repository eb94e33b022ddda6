"""The reduction of two streams and of many, in whatever forms they come (thesis section 4.1.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.dtypes import BFLOAT16
from sparseallreduce.streams.kernels.backend import MIXED, array_module, device_kernels, mark_read_only
from sparseallreduce.streams.operator import SUM, Operator
from sparseallreduce.streams.stream import SparseStream, switch_point

__all__ = ["CACHE_LINE", "Reduction", "Tree", "Uncounted", "divide", "divided"]


CACHE_LINE = 64  # bytes


class Reduction:
    """An operator together with the point at which its results become dense.

    The first four of the thesis's eight cases, where the index ranges are the same, are :meth:`pair`; the other four, where
    they adjoin, are :func:`~sparseallreduce.streams.partition.concatenate`.

    Parameters
    ----------
    op : Operator
        Sum by default.
    switch_density : float, optional
        Share of the index range above which a result is dense; by default where the dense form takes fewer bytes.

    Attributes
    ----------
    work : int
        Entries read by all sparse reductions so far: what the gamma of the cost model multiplies.
    dense_work : int
        Values written by all passes over dense arrays so far, be it to fill, to copy or to add, and those in the cache lines that
        entries were written to: what its gamma_dense multiplies.

    Notes
    -----
    Streams are values: operands are left as they were, with one exception that saves a pass over memory. A dense stream that is
    owned has its array from the algorithm that made it, which may be reused for the result; :meth:`freeze` ends that. Whatever a
    user passes in, and whatever has been sent, is frozen. The stream says which it is, whatever kind of array it holds.

    Between :meth:`enter` and :meth:`leave` the absent positions of a dense array hold the neutral element, and for operators
    other than the sum a mask tells which are absent; a stream that a user sees has zeros there.
    """

    def __init__(self, op: Operator = SUM, switch_density: float | None = None) -> None:
        self.op = op
        self.switch_density = switch_density
        self.work = self.dense_work = 0

    def limit(self, stream: SparseStream) -> int:
        """The most entries that a sparse result on the range of ``stream`` may hold."""
        stored = stream._stored
        width = None if stored.ndim == 1 else stored.shape[1]
        return switch_point(stream.hi - stream.lo, stored.dtype, stream.size, width, self.switch_density)

    def whole(self, first: SparseStream, second: SparseStream) -> SparseStream:
        """The reduction of two streams as a user holds them.

        Raises
        ------
        StreamError
            If they differ in size, dtype or width.
        StreamTypeError
            If one lies on the host and the other on a GPU.
        """
        a, b = first._stored, second._stored
        if first.size != second.size or a.dtype != b.dtype or a.shape[1:] != b.shape[1:] or type(a) is not type(b):
            raise _unlike(first, second)
        result = self.pair(self.enter(first), self.enter(second))
        return self.leave(result.copy() if result.overlaps(first) or result.overlaps(second) else result)

    def enter(self, stream: SparseStream) -> SparseStream:
        """``stream`` as the algorithms take it: frozen, and in the form that this reduction's switch point asks for."""
        if not stream.is_dense:
            entered = SparseStream._sparse_form(*stream._entries(), stream.size, stream.lo, stream.hi, self.switch_density)
            return self.densify(entered) if entered.stored > self.limit(entered) else entered
        array, present = stream._stored.view(), stream._present
        if self.op.is_sum:
            present = None
        else:
            if present is None:
                present = stream._mask()
            array = array.copy()
            array[~present] = self.op.neutral_of(array.dtype)
        entered = SparseStream._dense_form(array, stream.size, stream.lo, stream.hi, present, self.switch_density)
        return self.freeze(entered)

    def leave(self, stream: SparseStream) -> SparseStream:
        """``stream`` as a user takes it: frozen, and zero where no entry is."""
        present = stream._present
        if present is not None and not present.all():
            array = stream._stored if stream._owned else stream._stored.copy()
            array[~present] = 0
            stream._owned = False  # its array is the user's from now on
            stream = SparseStream._dense_form(array, stream.size, stream.lo, stream.hi, present)
        stream.switch_density = self.switch_density  # which does not travel: a stream off the wire has none
        return self.freeze(stream)

    @staticmethod
    def freeze(stream: SparseStream) -> SparseStream:
        """``stream``, of which nobody owns the arrays any more: no later reduction reuses them."""
        stream._owned = False
        if stream._array is not None:
            mark_read_only(stream._array)
        return stream

    def same_nans(self, stream: SparseStream) -> SparseStream:
        """Return ``stream`` with all of its NaNs made NumPy's, as a result that other ranks have computed, too, each for itself."""
        values = stream._stored
        if not kernels.has_nan(values):
            return stream
        values = memory.copy(values)
        kernels.unify_nans(values)
        if stream._indices is None:
            return SparseStream._dense_form(values, stream.size, stream.lo, stream.hi, stream._present, self.switch_density, owned=True)
        return SparseStream._sparse_form(stream._indices, values, stream.size, stream.lo, stream.hi, self.switch_density)

    def densify(self, stream: SparseStream) -> SparseStream:
        """``stream`` in the dense form, in an array that may be reused."""
        if stream.is_dense:
            return stream if stream._owned else self._copied(stream)
        indices, values = stream._entries()
        shape = (stream.extent, *values.shape[1:])
        neutral = self.op.neutral_of(values.dtype)
        xp = array_module(values)
        array = memory.full(shape, neutral, xp)
        kernels.scatter_set(indices, values, stream.lo, array)
        present = None if self.op.is_sum else self._mask(stream, xp.zeros(stream.extent, np.bool_))
        self.dense_work += array.size
        self.scattered(len(indices), array)
        return SparseStream._dense_form(array, stream.size, stream.lo, stream.hi, present, self.switch_density, owned=True)

    def pair(self, first: SparseStream, second: SparseStream) -> SparseStream:
        """The reduction of two streams on the same range (thesis cases 1.a to 1.d).

        The result is the same to the bit wherever the same two are reduced in the same order: callers put the lower rank first.
        """
        if first.is_dense:
            return self._into(first, second) if not second.is_dense else self._dense_pair(first, second)
        if second.is_dense:
            return self._into(second, first)
        if len(first._values) + len(second._values) > self.limit(first):  # type: ignore[arg-type]  # both are sparse
            return self._into(self.densify(first), second)
        return self._sparse_pair(first, second)

    def many(self, streams: Sequence[SparseStream]) -> SparseStream:
        """The reduction of at least one stream on the same range, as a balanced tree in the order given."""
        if len(streams) == 2:
            return self.pair(*streams)
        tree = Tree(self, len(streams))
        for position, stream in enumerate(streams):
            tree.add(position, stream)
        return tree.result()

    def uncounted(self, first: SparseStream | Uncounted, second: SparseStream | Uncounted) -> SparseStream | Uncounted:
        """As :meth:`pair`; of sparse streams on a device that stay sparse however many entries they share, one that is not counted yet."""
        if isinstance(first, SparseStream) and isinstance(second, SparseStream) and not first.on_device:
            return self.pair(first, second)
        ours, theirs = (each if isinstance(each, Uncounted) else Uncounted.of(each) for each in (first, second))
        merged = None if ours is None or theirs is None else self._uncounted_pair(ours, theirs)
        return merged or self.pair(self.counted(first), self.counted(second))

    def _uncounted_pair(self, first: Uncounted, second: Uncounted) -> Uncounted | None:
        if not first.room or not second.room or first.room + second.room > self.limit(first.like):
            return None
        made = device_kernels(first.entries[1], second.entries[1]).loosely(first.entries, second.entries, self.op)
        if made is None:
            return None
        read = [*first.read, *second.read, *(each.entries[2] for each in (first, second) if not each.counted)]
        known = first.known + second.known + sum(each.room for each in (first, second) if each.counted)
        return Uncounted(first.like, made, first.room + second.room, False, known, read)

    def counted(self, stream: SparseStream | Uncounted) -> SparseStream:
        """A stream whose length the host knows, for which it waits once, however many merges it comes from."""
        if isinstance(stream, SparseStream):
            return stream
        indices, values, length = stream.entries
        count, *read = array_module(values).concatenate([length, *stream.read]).tolist()
        self.work += stream.known + sum(read)
        like = stream.like
        return SparseStream._sparse_form(indices[:count], values[:count], like.size, like.lo, like.hi, self.switch_density)

    def _sparse_pair(self, first: SparseStream, second: SparseStream) -> SparseStream:
        entries: Any = first._indices, first._values, second._indices, second._values
        ia, va, ib, vb = entries
        room = len(ia) + len(ib)
        self.work += room
        if not len(ia) or not len(ib):
            return first if len(ia) else second
        if va.__class__ is not np.ndarray:  # on a device, where room is made once the entries are counted
            return SparseStream._sparse_form(*kernels.merged(ia, va, ib, vb, self.op), first.size, first.lo, first.hi, self.switch_density)
        indices = memory.empty(room, ia.dtype)
        values = memory.empty(room if va.ndim == 1 else (room, *va.shape[1:]), va.dtype)
        count = kernels.merge(ia, va, ib, vb, self.op, indices, values)
        return SparseStream._sparse_form(indices[:count], values[:count], first.size, first.lo, first.hi, self.switch_density)

    def _dense_pair(self, first: SparseStream, second: SparseStream) -> SparseStream:
        a, b = first._stored, second._stored
        # NumPy takes a single element in place for a reduction and swaps the operands, which shows in the sign of a NaN; and which
        # of the two arrays may be reused differs between the ranks.
        reused = first if first._owned else second if second._owned else None
        out = None if reused is None or a.size <= 1 else reused._stored
        self.dense_work += a.size
        with np.errstate(all="ignore"):
            array = self.op.ufunc(a, b) if out is None else self.op.ufunc(a, b, out=out)
        if reused is not None:
            reused._owned = False  # whether its array was taken or not: what is done with the result later is not done to it
        present = None if self.op.is_sum else self._both(first, second)
        return SparseStream._dense_form(array, first.size, first.lo, first.hi, present, self.switch_density, owned=True)

    def _into(self, dense: SparseStream, sparse: SparseStream) -> SparseStream:
        target = dense if dense._owned else self._copied(dense)
        indices, values = sparse._entries()
        self.scattered(len(indices), target._stored)
        kernels.scatter(indices, values, target.lo, self.op, target._stored)
        if target._present is not None:
            target._present = self._mask(sparse, target._present.copy())
        return target

    def scattered(self, entries: int, array: NDArray[Any]) -> None:
        """Count so many entries that are written to their places in a dense array, a cache line for each, or all of its lines."""
        each = max(array.itemsize * (array.size // max(len(array), 1)), CACHE_LINE)
        self.work += entries
        self.dense_work += min(entries * each // array.itemsize, array.size)

    def _copied(self, stream: SparseStream) -> SparseStream:
        array = memory.copy(stream._stored)
        self.dense_work += array.size
        return SparseStream._dense_form(array, stream.size, stream.lo, stream.hi, stream._present, self.switch_density, owned=True)

    @staticmethod
    def _mask(sparse: SparseStream, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        indices, _ = sparse._entries()
        mask[kernels.places(indices, sparse.lo, len(mask))] = True
        return mask

    @staticmethod
    def _both(first: SparseStream, second: SparseStream) -> NDArray[np.bool_]:
        assert first._present is not None and second._present is not None
        return np.logical_or(first._present, second._present)


@dataclass
class Uncounted:
    """A sparse sum on a device, of which the host knows no more than how many entries there is room for."""

    like: SparseStream  # on the same range
    entries: Any  # indices and values, and their number where that is on the device
    room: int
    counted: bool  # whether that is their number
    known: int = 0  # entries read by the merges that it comes from, as far as the host knows,
    read: list[Any] = field(default_factory=list)  # and the numbers of the others, on the device

    @classmethod
    def of(cls, stream: SparseStream) -> Uncounted | None:
        """A stream whose number of entries is known; None for one that is dense."""
        return None if stream.is_dense else cls(stream, stream._entries(), stream.stored, True)


def _unlike(first: SparseStream, second: SparseStream) -> StreamError | StreamTypeError:
    """The error for streams that cannot be reduced together."""
    for name in ("size", "dtype", "width"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            return StreamError(f"streams of {name} {ours} and {theirs} cannot be reduced: convert one of them")
    return StreamTypeError(MIXED)


def divided(stream: SparseStream, ranks: int) -> SparseStream:
    """A sum of so many ranks divided by their number, in memory of its own: the mean, as a user takes it."""
    values = memory.empty(stream._stored.shape, stream.dtype, array_module(stream._stored))
    divide(stream._stored, ranks, values)
    if stream._indices is None:
        mean = SparseStream._dense_form(values, stream.size, stream.lo, stream.hi, stream._present, stream.switch_density)
        return Reduction.freeze(mean)
    return SparseStream._sparse_form(stream._indices, values, stream.size, stream.lo, stream.hi, stream.switch_density)


def divide(values: NDArray[Any], ranks: int, out: NDArray[Any]) -> None:
    """Write the values, each divided by the number of ranks."""
    with np.errstate(all="ignore"):
        if values.dtype == BFLOAT16:  # which has not every number of ranks above 256, so that they divide floats, rounded once
            out[...] = np.divide(values.astype(np.float32), np.float32(ranks))
        else:
            np.divide(values, values.dtype.type(ranks), out=out)


class Tree:
    """A reduction of ``count`` streams that come in any order and are added in one: as a balanced binary tree.

    Two neighbours are added as soon as both are there, which overlaps with the arrival of the rest (thesis section 4.1.4) and
    leaves the result independent of the order of arrival.

    Examples
    --------
    >>> tree = Tree(Reduction(), 3)
    >>> for position in (2, 0, 1):
    ...     tree.add(position, SparseStream([position], [1.0], 9))
    >>> tree.result().indices
    array([0, 1, 2], dtype=uint32)
    """

    def __init__(self, reduction: Reduction, count: int) -> None:
        self._reduction = reduction
        self._widths = [count]  # nodes on each level, the leaves first
        while self._widths[-1] > 1:
            self._widths.append((self._widths[-1] + 1) // 2)
        self._waiting: dict[tuple[int, int], SparseStream | Uncounted] = {}

    def add(self, position: int, stream: SparseStream) -> None:
        """Take the stream of leaf ``position``, and add what can be added."""
        level, total = 0, stream  # type: int, SparseStream | Uncounted
        while level < len(self._widths) - 1:
            sibling = position ^ 1
            if sibling < self._widths[level]:
                other = self._waiting.pop((level, sibling), None)
                if other is None:
                    break
                pair = (other, total) if sibling < position else (total, other)
                total = self._reduction.uncounted(*pair)
            level, position = level + 1, position // 2
        self._waiting[level, position] = total

    def result(self) -> SparseStream:
        """The reduction, once all leaves were added."""
        return self._reduction.counted(self._waiting[len(self._widths) - 1, 0])
