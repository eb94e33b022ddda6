"""Reading the binary CSR format (``data/FORMAT.md``): every rank takes its own rows.

A single process maps the file into memory without copying. Several read it concurrently through MPI-IO, each the blocks that contain its
rows; but if the file takes more than half of the memory available to any of them, they map it too. The system reads mapped pages when they
are needed, and may evict them at any time, so a file may be much larger than memory. With a cache, files are read, or their cached pieces
are mapped.

In all cases a rank checks what it takes: the checksum of every block, and the validity of rows, indices, values and labels.
"""

from __future__ import annotations

import bisect
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn, cast

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary import kernels
from sparseallreduce.linear.data.binary.format import HEADER_BYTES, MAGIC, Header
from sparseallreduce.linear.data.binary.ones import repeated_ones
from sparseallreduce.linear.data.binary.pages import Pages
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.files import CachedInput, PathLike, first_bytes, open_input, readable
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.runtime.limits import memory_left
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.runtime.serial import SERIAL
from sparseallreduce.streams.kernels.compilation import compiled_entry
from sparseallreduce.streams.stream import index_dtype

__all__ = ["is_binary", "read_binaries", "read_binary"]

Array = NDArray[Any]
Bytes = Callable[[int, int], Array]  # a function that returns the bytes of a file, given offset and length

_SHARE = 0.5  # largest size of a file to read into memory, as a fraction of available memory
_LONGEST_READ = 1 << 30  # bytes per read: MPI counts up to 2**31 - 1


def is_binary(path: PathLike) -> bool:
    """Return True if the first bytes of a file are those of the binary format.

    Raises
    ------
    DatasetError
        If it cannot be read.
    """
    return first_bytes(path, 4) == MAGIC[:4]


def read_binary(path: PathLike, comm: Any) -> Dataset:
    """Return this rank's samples of a binary file. Collective over ``comm``.

    Ranks get contiguous rows with about the same number of non-zeros. On a single rank, the arrays are the mapped file itself.

    Parameters
    ----------
    path : path
    comm : communicator
        Communicator, of mpi4py if it has more than one rank.

    Raises
    ------
    DatasetError
        On every rank, with the file, the offset and the fault.
    """
    plan = agreed(comm, lambda: _plan(path, comm.size) if comm.rank == 0 else None)
    header, checksums, bounds = cast("tuple[Header, Array, list[int]]", gather(comm, plan)[0])
    first, last = bounds[comm.rank : comm.rank + 2]
    large = any(gather(comm, header.file_bytes > _SHARE * memory_left()))
    with _bytes(path, comm, large) as source:
        rows = _Rows(path, header, checksums, source, large)
        indptr = agreed(comm, lambda: rows.indptr(first, last))  # checked on all ranks before any uses it
        return agreed(comm, lambda: rows.dataset(first, last, indptr))


def read_binaries(source: Source, comm: Any) -> Dataset:
    """Return this rank's samples of several binary files, one after another, in memory. Collective over ``comm``.

    Ranks get contiguous rows of all files together, with about the same number of non-zeros.

    Raises
    ------
    DatasetError
        On every rank, with the file, the offset and the fault.
    """
    headers = source.each(comm, lambda part: _plan(part, 1)[0])
    weights = [header.nonzeros + header.samples for header in headers]
    features, total = max(header.features for header in headers), sum(header.samples for header in headers)
    low, high = (sum(weights) * rank // comm.size for rank in (comm.rank, comm.rank + 1))

    def own() -> Dataset:
        parts, begin = [], 0
        for path, weight in zip(source.parts, weights):
            if low < begin + weight and begin < high:
                header, checksums, bounds = _plan(path, 1, [low - begin, high - begin])
                with _bytes(path, SERIAL, False) as file:
                    rows = _Rows(path, header, checksums, file)
                    first, last = bounds[1:3]
                    parts.append(rows.dataset(first, last, rows.indptr(first, last)))
            begin += weight
        return _joined(parts, features, np.result_type(*(header.dtype("values") for header in headers)))

    mine = agreed(comm, own)
    first = sum(gather(comm, mine.rows)[: comm.rank])
    return replace(mine, first_sample=first, total_samples=total, source=str(source))


def _joined(parts: list[Dataset], features: int, dtype: np.dtype[Any]) -> Dataset:
    """Return parts concatenated into one data set."""
    ends, nonzeros = [np.zeros(1, np.int64)], 0
    for part in parts:
        ends.append(part.indptr[1:] + nonzeros)
        nonzeros += part.nnz
    indices, values, labels = (
        np.concatenate([np.empty(0, kind), *(getattr(part, name) for part in parts)], dtype=kind, casting="same_kind")
        for name, kind in (("indices", index_dtype(features)), ("values", dtype), ("labels", np.dtype(np.float64)))
    )
    return Dataset(np.concatenate(ends), indices, values, labels, features)


def _plan(path: PathLike, ranks: int, targets: list[int] | None = None) -> tuple[Header, Array, list[int]]:
    """Return the header, the checksums, and the first row of each rank followed by the end of the last one.

    With ``targets``, the rows are the first ones that are preceded by this many samples plus non-zeros.
    """
    with readable(path), open_input(path) as file:
        header = Header.from_bytes(file.read(HEADER_BYTES), file.seek(0, os.SEEK_END), path)
        file.seek(header.checksums.offset)
        table = file.read(header.checksums.length)
        if zlib.crc32(table) != header.checksums_crc:
            raise DatasetError(f"{path}, offset {header.checksums.offset}: the checksums do not match their own: they are altered")
        offset, dtype = header.sections["indptr"].offset, header.dtype("indptr")

        def weight(row: int) -> int:
            """Return the number of non-zeros before a row, plus one for each sample before it."""
            file.seek(offset + row * dtype.itemsize)
            begin = file.read(dtype.itemsize)
            if len(begin) < dtype.itemsize:
                raise EOFError("it was truncated while it was read")
            return int(np.frombuffer(begin, dtype)[0]) + row

        everything = header.nonzeros + header.samples
        rows = range(header.samples + 1)
        inner = [everything * rank // ranks for rank in range(1, ranks)] if targets is None else targets
        found = [bisect.bisect_left(rows, target, key=weight) for target in inner]
        # In a damaged file they may be unsorted; reading the rows then reports the fault.
        bounds = np.maximum.accumulate(np.array([0, *found, header.samples], np.int64))
    return header, np.frombuffer(table, "<u4"), np.minimum(bounds, header.samples).tolist()


@contextmanager
def _bytes(path: PathLike, comm: Any, large: bool) -> Iterator[Bytes]:
    """Provide the bytes of a file: mapped on a single rank or if it is large, from the cache, or through MPI-IO."""
    if isinstance(path, CachedInput):
        with path.opened() as cached:
            take = cached.map_at if large else cached.read_at
            yield lambda offset, length: _taken(path, take, offset, length)
        return
    if comm.size == 1 or large:
        mapped = agreed(comm, lambda: _mapped(path))
        yield lambda offset, length: mapped[offset : offset + length]
        return
    from mpi4py import MPI

    def opened() -> Any:
        try:
            return MPI.File.Open(MPI.COMM_SELF, os.fspath(path), MPI.MODE_RDONLY)
        except MPI.Exception as error:
            raise DatasetError(f"cannot read {path}: {error}; every rank must see the file") from None

    file = agreed(comm, opened)
    try:
        yield lambda offset, length: _read(path, file, offset, length)
    finally:
        file.Close()


def _taken(path: PathLike, take: Bytes, offset: int, length: int) -> Array:
    with readable(path):
        return take(offset, length)


def _mapped(path: PathLike) -> Array:
    with readable(path):
        return np.asarray(np.memmap(path, np.uint8, "r"))


def _read(path: PathLike, file: Any, offset: int, length: int) -> Array:
    # Each rank reads one long piece of each section, so collective reading would have no advantage.
    from mpi4py import MPI

    out = np.empty(length, np.uint8)
    for start in range(0, length, _LONGEST_READ):
        piece = out[start : start + _LONGEST_READ]
        status = MPI.Status()
        try:
            file.Read_at(offset + start, piece, status)
        except MPI.Exception as error:
            raise DatasetError(f"cannot read {path} at offset {offset + start}: {error}") from None
        if (count := status.Get_count(MPI.BYTE)) != len(piece):
            raise DatasetError(f"{path}, offset {offset + start + count}: the file ends here: it was truncated while it was read")
    return out


class _Rows:
    """Reads and checks some rows of a file."""

    def __init__(self, path: PathLike, header: Header, checksums: Array, source: Bytes, large: bool = False) -> None:
        self._path, self._header, self._checksums, self._source, self._large = path, header, checksums, source, large

    def indptr(self, first: int, last: int) -> Array:
        """Return the positions of rows [first, last] among the non-zeros of the file."""
        header = self._header
        begins = self._items("indptr", first, last + 1)
        if first == 0 and begins[0] != 0:
            self._refuse("indptr", 0, f"the first sample starts at non-zero {begins[0]}, not at 0")
        falling = np.flatnonzero(begins[1:] < begins[:-1])
        if len(falling):
            row = first + int(falling[0])
            self._refuse("indptr", row + 1, f"sample {row} ends before it starts, at non-zero {begins[row + 1 - first]}")
        if begins[0] < 0 or begins[-1] > header.nonzeros or (last == header.samples and begins[-1] != header.nonzeros):
            self._refuse("indptr", last, f"the samples end at non-zero {begins[-1]} of {header.nonzeros}")
        return begins

    def dataset(self, first: int, last: int, begins: Array) -> Dataset:
        """Return rows [first, last) of the file, given the positions of their non-zeros."""
        header = self._header
        start, end = int(begins[0]), int(begins[-1])
        indptr = begins if start == 0 else begins - start
        indices = self._items("indices", start, end)
        values = self._values(start, end)
        self._check(indptr, indices, values, first, start)
        labels = self._items("labels", first, last).astype(np.float64, copy=False)
        if not np.isfinite(labels).all():
            self._refuse("labels", first + int(np.isfinite(labels).argmin()), "the label is not finite")
        indices = indices.astype(index_dtype(header.features), copy=False)
        pages = Pages(indptr, [indices] if header.value_width == 0 else [indices, values]) if self._large else None
        given = indptr, indices, values, labels, header.features, first, header.samples, str(self._path)
        return Dataset(*given, pages=pages)

    def _refuse(self, section: str, item: int, reason: str) -> NoReturn:
        offset = self._header.sections[section].offset + item * self._header.dtype(section).itemsize
        raise DatasetError(f"{self._path}, offset {offset}: {reason}")

    def _items(self, section: str, first: int, last: int) -> Array:
        """Return items [first, last) of a section, after verifying the checksums of their blocks."""
        header, (offset, length) = self._header, self._header.sections[section]
        item = header.dtype(section).itemsize
        begin = first * item // header.block * header.block
        end = min(-(-last * item // header.block) * header.block, length)
        raw = self._source(offset + begin, max(end - begin, 0))
        expected = self._checksums[header.first_block(section) + begin // header.block :]
        for number, at in enumerate(range(0, len(raw), header.block)):
            if zlib.crc32(raw[at : at + header.block].data) != expected[number]:
                what = f"the {min(header.block, len(raw) - at)} bytes of {section} from here do not match their checksum: they are altered"
                raise DatasetError(f"{self._path}, offset {offset + begin + at}: {what}")
        stored = raw[first * item - begin : last * item - begin].view(header.dtype(section))
        return stored.astype(stored.dtype.newbyteorder("="), copy=False)

    def _values(self, start: int, end: int) -> Array:
        """Return values as float32 or float64, as stored in the file."""
        if self._header.value_width == 0:
            return repeated_ones(end - start) if self._large else np.ones(end - start, np.float32)
        return self._items("values", start, end)

    def _check(self, indptr: Array, indices: Array, values: Array, first: int, start: int) -> None:
        fault, row, entry = _compiled_check(indices.dtype, values.dtype)(indptr, indices, values, self._header.features)
        sample, item = first + row, start + entry
        if fault == kernels.ABOVE:
            self._refuse("indices", item, f"index {indices[entry]} of sample {sample} is not below the {self._header.features} features")
        if fault == kernels.UNSORTED:
            self._refuse("indices", item, f"index {indices[entry]} of sample {sample} does not follow a lower one: rows must be sorted")
        if fault == kernels.NOT_FINITE:
            self._refuse("values", item, f"the value of index {indices[entry]} of sample {sample} is not a finite {values.dtype}")


@cache
def _compiled_check(index: np.dtype[Any], value: np.dtype[Any]) -> Callable[..., tuple[int, int, int]]:
    """Return the compiled check of rows for indices and values of these dtypes."""
    arrays = (types.Array(kind, 1, "C", readonly=True) for kind in (types.int64, *map(numba.from_dtype, (index, value))))
    return compiled_entry(kernels.first_fault, (*arrays, types.uint64))
