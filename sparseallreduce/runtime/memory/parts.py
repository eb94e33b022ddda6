"""Layout of parts of streams in host memory: those that a rank writes for the others, and those that make up a result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.runtime.memory.host import Bytes, HostMemory
from sparseallreduce.runtime.memory.words import LINE
from sparseallreduce.streams.dtypes import DTYPES
from sparseallreduce.streams.packed import aligned
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype, switch_point

__all__ = ["DENSE", "MASKED", "SPARSE", "PartsLayout", "form_of", "read_part", "row_bytes", "write_parts"]

SPARSE, DENSE, MASKED = range(3)  # how a part is stored: entries; all values; all values and a mask of the entries
_TABLE = 4  # fields of a part in the table of a row: form, entries, offset and size in bytes


def form_of(stream: SparseStream) -> int:
    """Return how a part is stored: SPARSE, DENSE or MASKED."""
    return SPARSE if not stream.is_dense else DENSE if stream._present is None else MASKED


def row_bytes(parts: Mapping[int, SparseStream], lanes: int) -> int:
    """Return the size in bytes of a row that holds parts for ``lanes`` ranks."""
    return _line_multiple(8 * _TABLE * lanes) + sum(_line_multiple(_part_bytes(part)) for part in parts.values())


def write_parts(host: HostMemory, row: int, parts: Mapping[int, SparseStream], lanes: int) -> None:
    """Write parts, keyed by the index of the rank that adds them, to a row of this rank."""
    begin, table = host.row_at(host.place, row), np.zeros((lanes, _TABLE), np.uint64)
    start = _line_multiple(table.nbytes)
    for lane, part in parts.items():
        at, arrays = start, _arrays_of(part)
        for array in arrays:
            at = aligned(at, array.itemsize)
            host.put(begin, at, array)
            at += array.nbytes
        table[lane] = form_of(part), part.stored, start, at - start
        start = _line_multiple(at)
    host.put(begin, 0, table)


def read_part(host: HostMemory, place: int, row: int, lane: int, lanes: int, own: SparseStream) -> SparseStream:
    """Return the part that rank ``place`` has written for lane ``lane``, as a view of its row.

    ``own`` is this rank's part, which provides size, bounds and dtype.

    Raises
    ------
    StreamError
        If the row is inconsistent.
    """
    begin = host.row_at(place, row)
    table = host.get(begin, 0, 8 * _TABLE * lanes).view(np.uint64).reshape(lanes, _TABLE)
    form, count, start, nbytes = table[lane].tolist()
    content, tail, density = host.get(begin, start, nbytes), own._stored.shape[1:], own.switch_density
    values = _cut(content, 0, (count, *tail), own.dtype)
    if form == SPARSE:
        dtype = index_dtype(own.size)
        indices = _cut(content, aligned(values.nbytes, dtype.itemsize), (count,), dtype)
        return SparseStream._sparse_form(indices, values, own.size, own.lo, own.hi, density)
    if count != own.extent:
        raise StreamError(f"a dense part of {count} values is not that of {own.extent} positions")
    present = _cut(content, values.nbytes, (count,), np.dtype(np.bool_)) if form == MASKED else None
    return SparseStream._dense_form(values, own.size, own.lo, own.hi, present, density)


class PartsLayout(NamedTuple):
    """The layout of a result in a block: its form, and the entries of each part."""

    host: HostMemory
    block: int
    form: int
    counts: tuple[int, ...]  # entries of each part
    bounds: tuple[int, ...]  # of the parts
    dtype: np.dtype[Any]
    width: int | None
    size: int

    @classmethod
    def planned(
        cls, host: HostMemory, forms: Sequence[int], counts: Sequence[int], bounds: Sequence[int], own: SparseStream, reduction: Reduction
    ) -> PartsLayout | None:
        """Return the layout of the concatenation of parts in these forms, without a block yet.

        The result equals that of :func:`~sparseallreduce.streams.partition.concatenate`. Return None if the form depends on the values: for
        dense parts whose concatenation may be sparse, and for masks in some parts only.
        """
        extent = bounds[-1] - bounds[0]
        fits = sum(counts) <= switch_point(extent, own.dtype, own.size, own.width, reduction.switch_density)
        others = {DENSE} if reduction.op.is_sum else {MASKED}
        if not set(forms) <= ({SPARSE} if fits else {SPARSE, *others}):
            return None
        form = SPARSE if fits else others.pop()
        return cls(host, -1, form, tuple(counts), tuple(bounds), own.dtype, own.width, own.size)

    @property
    def nbytes(self) -> int:
        """The size of the result in bytes."""
        count = sum(self.counts) if self.form == SPARSE else self._extent
        behind = count * self._index if self.form == SPARSE else self._extent if self.form == MASKED else 0
        return (_line_multiple(count * self._row) if behind else count * self._row) + behind

    def words(self) -> list[int]:
        """Return the words that describe this layout to the other ranks of the host; see :meth:`found`."""
        return [self.form, self.block, DTYPES.index(self.dtype), 0 if self.width is None else self.width + 1, self.size]

    @classmethod
    def found(cls, host: HostMemory, words: Sequence[int], counts: Sequence[int], bounds: Sequence[int]) -> PartsLayout:
        """Return the layout that another rank has described."""
        form, block, dtype, width, size = words
        return cls(host, block, form, tuple(counts), tuple(bounds), DTYPES[dtype], width - 1 if width else None, size)

    def write(self, part: SparseStream, lane: int, reduction: Reduction) -> None:
        """Write this rank's part to its place."""
        begin = self.host.block_at(self.block)
        if self.form == SPARSE:
            before, total = sum(self.counts[:lane]), sum(self.counts)
            indices, values = part._entries()
            self.host.put(begin, before * self._row, values)
            self.host.put(begin, _line_multiple(total * self._row) + before * self._index, indices)
            return
        dense, before = part if part.is_dense else reduction.densify(part), part.lo - self.bounds[0]
        self.host.put(begin, before * self._row, dense._stored)
        if self.form == MASKED:
            assert dense._present is not None
            self.host.put(begin, _line_multiple(self._extent * self._row) + before, dense._present)

    def stream(self, density: float | None) -> SparseStream:
        """Return the result once all ranks have written their parts; the block is kept while it is in use."""
        lo, hi, tail = self.bounds[0], self.bounds[-1], () if self.width is None else (self.width,)
        content, count = self.host.kept(self.block, self.nbytes), sum(self.counts) if self.form == SPARSE else self._extent
        values = _cut(content, 0, (count, *tail), self.dtype)
        if self.form == SPARSE:
            indices = _cut(content, _line_multiple(values.nbytes), (count,), index_dtype(self.size))
            return SparseStream._sparse_form(indices, values, self.size, lo, hi, density)
        present = _cut(content, _line_multiple(values.nbytes), (count,), np.dtype(np.bool_)) if self.form == MASKED else None
        return SparseStream._dense_form(values, self.size, lo, hi, present, density)

    @property
    def _row(self) -> int:
        return self.dtype.itemsize * (1 if self.width is None else self.width)

    @property
    def _index(self) -> int:
        return index_dtype(self.size).itemsize

    @property
    def _extent(self) -> int:
        return self.bounds[-1] - self.bounds[0]


def _arrays_of(part: SparseStream) -> tuple[NDArray[Any], ...]:
    """Return the arrays of a part that are written."""
    if not part.is_dense:
        indices, values = part._entries()
        return values, indices
    return (part._stored,) if part._present is None else (part._stored, part._present)


def _part_bytes(part: SparseStream) -> int:
    nbytes = 0
    for array in _arrays_of(part):
        nbytes = aligned(nbytes, array.itemsize) + array.nbytes
    return nbytes


def _cut(content: Bytes, start: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array of this shape from byte ``start`` on.

    Raises
    ------
    StreamError
        If the content is too short.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if start + nbytes > len(content):
        raise StreamError(f"{len(content)} bytes do not hold {shape} values of {dtype} from byte {start} on")
    return content[start : start + nbytes].view(dtype).reshape(shape)


def _line_multiple(nbytes: int) -> int:
    """Round ``nbytes`` up to whole cache lines."""
    return aligned(nbytes, LINE)
