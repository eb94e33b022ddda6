"""The reduction of two or more streams in any combination of forms (thesis section 4.1.3)."""

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
    """An operator together with the density at which its results become dense.

    :meth:`pair` implements the four of the thesis's eight cases with equal index ranges; the four with adjacent ranges are in
    :func:`~sparseallreduce.streams.partition.concatenate`.

    Parameters
    ----------
    op : Operator
        Sum by default.
    switch_density : float, optional
        Density above which a result is dense; by default where the dense form takes fewer bytes.

    Attributes
    ----------
    work : int
        Entries read by all sparse reductions so far, which the cost model multiplies by gamma.
    dense_work : int
        Values written by all passes over dense arrays so far, and values in the cache lines that entries were written to, which the cost
        model multiplies by gamma_dense.

    Notes
    -----
    Operands are not modified, with one exception that saves a pass over memory: the array of an *owned* dense stream, which an algorithm
    has created, may be reused for the result. :meth:`freeze` ends that. Inputs of users and streams that have been sent are frozen.

    Between :meth:`enter` and :meth:`leave` the absent positions of a dense array hold the neutral element, and for operators other than
    the sum a mask marks them; streams of users have zeros there.
    """

    work: int
    dense_work: int

    def __init__(self, op: Operator = SUM, switch_density: float | None = None) -> None:
        self.op = op
        self.switch_density = switch_density
        self.work = self.dense_work = 0

    def limit(self, stream: SparseStream) -> int:
        """Return the largest number of entries of a sparse result on the range of ``stream``."""
        stored = stream._stored
        width = None if stored.ndim == 1 else stored.shape[1]
        return switch_point(stream.hi - stream.lo, stored.dtype, stream.size, width, self.switch_density)

    def whole(self, first: SparseStream, second: SparseStream) -> SparseStream:
        """Return the reduction of two streams of a user.

        Raises
        ------
        StreamError
            If they differ in size, dtype or width.
        StreamTypeError
            If one is on the host and the other on a GPU.
        """
        a, b = first._stored, second._stored
        if first.size != second.size or a.dtype != b.dtype or a.shape[1:] != b.shape[1:] or type(a) is not type(b):
            raise _unlike(first, second)
        result = self.pair(self.enter(first), self.enter(second))
        return self.leave(result.copy() if result.overlaps(first) or result.overlaps(second) else result)

    def enter(self, stream: SparseStream) -> SparseStream:
        """Return ``stream`` in its internal form: frozen, and sparse or dense by this reduction's switch point."""
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
        """Return ``stream`` in its public form: frozen, with zeros at absent positions."""
        present = stream._present
        if present is not None and not present.all():
            array = stream._stored if stream._owned else stream._stored.copy()
            array[~present] = 0
            stream._owned = False  # its array is the user's from now on
            stream = SparseStream._dense_form(array, stream.size, stream.lo, stream.hi, present)
        stream.switch_density = self.switch_density  # not part of messages, so a received stream has none
        return self.freeze(stream)

    @staticmethod
    def freeze(stream: SparseStream) -> SparseStream:
        """Mark the arrays of ``stream`` as no longer owned, so that no later reduction reuses them, and return it."""
        stream._owned = False
        if stream._array is not None:
            mark_read_only(stream._array)
        return stream

    def same_nans(self, stream: SparseStream) -> SparseStream:
        """Return ``stream`` with all NaNs replaced by NumPy's NaN, for results that several ranks compute separately."""
        values = stream._stored
        if not kernels.has_nan(values):
            return stream
        values = memory.copy(values)
        kernels.unify_nans(values)
        if stream._indices is None:
            return SparseStream._dense_form(values, stream.size, stream.lo, stream.hi, stream._present, self.switch_density, owned=True)
        return SparseStream._sparse_form(stream._indices, values, stream.size, stream.lo, stream.hi, self.switch_density)

    def densify(self, stream: SparseStream) -> SparseStream:
        """Return ``stream`` in the dense form, in an array that may be reused."""
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
        """Return the reduction of two streams on the same range (thesis cases 1.a to 1.d).

        The result is bitwise identical wherever the same two streams are reduced in the same order: callers pass the lower rank first.
        """
        if first.is_dense:
            return self._into(first, second) if not second.is_dense else self._dense_pair(first, second)
        if second.is_dense:
            return self._into(second, first)
        if len(first._values) + len(second._values) > self.limit(first):  # type: ignore[arg-type]  # both are sparse
            return self._into(self.densify(first), second)
        return self._sparse_pair(first, second)

    def many(self, streams: Sequence[SparseStream]) -> SparseStream:
        """Return the reduction of one or more streams on the same range, as a balanced tree in the given order."""
        if len(streams) == 2:
            return self.pair(*streams)
        tree = Tree(self, len(streams))
        for position, stream in enumerate(streams):
            tree.add(position, stream)
        return tree.result()

    def uncounted(self, first: SparseStream | Uncounted, second: SparseStream | Uncounted) -> SparseStream | Uncounted:
        """Return the reduction of two streams as :meth:`pair`, on a device without waiting for the number of entries if possible.

        It is possible for sparse streams whose sum stays sparse however many positions they share.
        """
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
        """Return a stream whose length is known on the host, after one wait for all merges that it results from."""
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
        if va.__class__ is not np.ndarray:  # on a device, where memory is allocated once the entries are counted
            return SparseStream._sparse_form(*kernels.merged(ia, va, ib, vb, self.op), first.size, first.lo, first.hi, self.switch_density)
        indices = memory.empty(room, ia.dtype)
        values = memory.empty(room if va.ndim == 1 else (room, *va.shape[1:]), va.dtype)
        count = kernels.merge(ia, va, ib, vb, self.op, indices, values)
        return SparseStream._sparse_form(indices[:count], values[:count], first.size, first.lo, first.hi, self.switch_density)

    def _dense_pair(self, first: SparseStream, second: SparseStream) -> SparseStream:
        a, b = first._stored, second._stored
        # For a single element in place, NumPy swaps the operands, which shows in the sign of a NaN; and which of the two arrays may be
        # reused
        # differs between ranks.
        reused = first if first._owned else second if second._owned else None
        out = None if reused is None or a.size <= 1 else reused._stored
        self.dense_work += a.size
        with np.errstate(all="ignore"):
            array = self.op.ufunc(a, b) if out is None else self.op.ufunc(a, b, out=out)
        if reused is not None:
            reused._owned = False  # its array may now belong to the result
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
        """Count the work of writing entries to a dense array: a cache line for each, or all lines of the array."""
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
    """A sparse sum on a device, of which the host knows only an upper bound of the number of entries."""

    like: SparseStream  # a stream on the same range
    entries: Any  # indices and values, and their number if that is on the device
    room: int
    counted: bool  # whether `room` is the exact number
    known: int = 0  # entries read by the merges that it results from, as far as the host knows
    read: list[Any] = field(default_factory=list)  # numbers of the other entries read, on the device

    @classmethod
    def of(cls, stream: SparseStream) -> Uncounted | None:
        """Return a stream with a known number of entries in this form; None for a dense one."""
        return None if stream.is_dense else cls(stream, stream._entries(), stream.stored, True)


def _unlike(first: SparseStream, second: SparseStream) -> StreamError | StreamTypeError:
    """Return the error for streams that cannot be reduced together."""
    for name in ("size", "dtype", "width"):
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours != theirs:
            return StreamError(f"streams of {name} {ours} and {theirs} cannot be reduced: convert one of them")
    return StreamTypeError(MIXED)


def divided(stream: SparseStream, ranks: int) -> SparseStream:
    """Return a sum divided by the number of ranks, on new arrays and in its public form: the mean."""
    values = memory.empty(stream._stored.shape, stream.dtype, array_module(stream._stored))
    divide(stream._stored, ranks, values)
    if stream._indices is None:
        mean = SparseStream._dense_form(values, stream.size, stream.lo, stream.hi, stream._present, stream.switch_density)
        return Reduction.freeze(mean)
    return SparseStream._sparse_form(stream._indices, values, stream.size, stream.lo, stream.hi, stream.switch_density)


def divide(values: NDArray[Any], ranks: int, out: NDArray[Any]) -> None:
    """Write ``values`` divided by the number of ranks to ``out``."""
    with np.errstate(all="ignore"):
        if values.dtype == BFLOAT16:  # which cannot represent all integers above 256: divide in float32 and round once
            out[...] = np.divide(values.astype(np.float32), np.float32(ranks))
        else:
            np.divide(values, values.dtype.type(ranks), out=out)


class Tree:
    """A reduction of ``count`` streams that arrive in any order, as a balanced binary tree in the order of their positions.

    Two neighbours are reduced as soon as both have arrived, which overlaps with the arrival of the rest (thesis section 4.1.4). The result
    does not depend on the order of arrival.

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
        """Add the stream at leaf ``position``, and reduce all pairs that are complete."""
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
        """Return the reduction, once all leaves have been added."""
        return self._reduction.counted(self._waiting[len(self._widths) - 1, 0])
