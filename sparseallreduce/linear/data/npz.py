"""Compressed rows written by ``scipy.sparse.save_npz``: every rank reads its own contiguous rows in bounded memory.

Labels are an array ``labels`` or ``y`` in the same file, or the file ``NAME.labels.npy`` next to ``NAME.npz``. Because the arrays are
compressed, a rank reads them up to the end of its rows, and keeps its own part. The last rank reads all of each, including the
checksum at the end.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.checked_file import Damaged, open_regular
from sparseallreduce.checked_npz import ArrayHeader, Npz, damage, read_header
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.compressed_rows import NONZEROS_AT_ONCE, checked_block
from sparseallreduce.linear.data.files import PathLike, Progress, first_bytes, open_input
from sparseallreduce.linear.data.parts import LABELS_SUFFIX, Source, sharing
from sparseallreduce.runtime.limits import memory_left
from sparseallreduce.streams.stream import index_dtype

__all__ = ["npz_blocks"]

Array = NDArray[Any]

_LABELS = ("labels", "y")
_LONGEST_WORD = 1 << 12  # largest size in bytes of an array that describes the matrix
_LARGE = 1 << 26  # size of a sample in bytes from which available memory is checked
_PIECE = 1 << 22  # bytes read or skipped in one call
_ROWS = 1 << 16  # rows read in one call


def npz_blocks(
    source: Source,
    comm: Any,
    *,
    n_features: int | None = None,
    unlabelled: bool = False,
    dtype: DTypeLike = np.float32,
    progress: Progress = None,
) -> tuple[Generator[Block], int]:
    """Return this rank's samples of files, block by block, and the number of features. Collective over ``comm``.

    Parameters
    ----------
    source, comm
        Files, and communicator of the ranks, which take about the same number of samples each.
    n_features : int, optional
        Largest allowed number of features.
    unlabelled : bool
        Whether labels may be missing; they are then NaN.
    dtype : dtype
        Data type of the values, float32 or float64.
    progress : callable, optional
        Function called with the number of bytes that this rank has read since the last call.

    Raises
    ------
    DatasetError
        On every rank, if a file is not in this format, or has no labels. From the generator, with the file and the invalid sample.
    """
    outlines = source.each(comm, lambda part: _outline(part, unlabelled))
    for path, (_, features) in zip(source.parts, outlines):
        if n_features is not None and features > n_features:
            raise DatasetError(f"{path}: it has {features} features, more than the requested {n_features}")
    shares = sharing([rows for rows, _ in outlines], comm)
    if comm.rank == comm.size - 1:  # the last rank also checks files without samples
        shares += [(part, 0, 0) for part, (rows, _) in enumerate(outlines) if rows == 0]
    most = max(features for _, features in outlines)
    return _of_parts(source, shares, outlines, most, np.dtype(dtype), progress), most


def _of_parts(
    source: Source,
    shares: list[tuple[int, int, int]],
    outlines: list[tuple[int, int]],
    features: int,
    dtype: np.dtype[Any],
    progress: Progress,
) -> Generator[Block]:
    """Yield samples of files, given their numbers of rows and features, with the features of the data set."""
    index = index_dtype(features)
    for part, first, last in shares:
        rows, own = outlines[part]
        for block in _blocks(source.parts[part], first, last, own, dtype, last == rows, progress):
            yield block._replace(indices=block.indices.astype(index, copy=False))


def _outline(path: PathLike, unlabelled: bool) -> tuple[int, int]:
    """Return the numbers of samples and features of a file after checking it."""
    with _arrays(path) as arrays:
        kind = arrays.small("format")
        if kind not in (b"csr", "csr"):
            shown = kind.decode(errors="replace") if isinstance(kind, bytes) else kind
            raise DatasetError(f"{path}: the matrix is of format {shown!r}, not compressed rows: save X.tocsr()")
        shape = arrays.small("shape")
        if np.shape(shape) != (2,) or np.asarray(shape).dtype.kind not in "iu" or not all(0 <= int(extent) < 2**63 for extent in shape):
            raise DatasetError(f"{path}: the shape {shape!r} is not that of a matrix")
        rows, features = (int(extent) for extent in shape)
        lengths = {name: arrays.stream(name).length for name in ("indptr", "indices", "data")}
        if lengths["indptr"] != rows + 1 or lengths["indices"] != lengths["data"]:
            raise DatasetError(f"{path}: there are {lengths} numbers for {rows} samples: the file is damaged")
        labels = arrays.labels()
        if labels is None and not unlabelled:
            raise DatasetError(f"{path}: no labels: put an array 'labels' into it, or write them to {_labels_path(path)} by numpy.save")
        if labels is not None and labels.length != rows:
            raise DatasetError(f"{path}: there are {labels.length} labels for {rows} samples")
        return rows, features


def _blocks(
    path: PathLike, first: int, last: int, features: int, dtype: np.dtype[Any], whole: bool, progress: Progress
) -> Generator[Block]:
    """Yield the samples [first, last)."""
    with _arrays(path) as arrays:
        indptr, indices, values = (arrays.stream(name, progress) for name in ("indptr", "indices", "data"))
        labels = arrays.labels()
        indptr.skip(first)
        if labels is not None:
            labels.skip(first)
        start = int(indptr.take(1)[0])
        if (first == 0 and start != 0) or not 0 <= start <= indices.length:
            raise DatasetError(f"{path}, sample {first}: it starts at non-zero {start} of {indices.length}")
        for stream in (indices, values):
            stream.skip(start)
        for begin in range(first, last, _ROWS):
            count = min(_ROWS, last - begin)
            ends = np.append(start, indptr.take(count).astype(np.int64))
            falling = np.flatnonzero((ends[1:] < ends[:-1]) | (ends[1:] > indices.length))
            if len(falling):
                what = f"it ends at non-zero {ends[falling[0] + 1]} of {indices.length}, but starts at {ends[falling[0]]}"
                raise DatasetError(f"{path}, sample {begin + falling[0]}: {what}")
            targets = np.full(count, math.nan) if labels is None else labels.take(count)
            if labels is not None and not np.isfinite(targets).all():
                raise DatasetError(f"{path}, sample {begin + int(np.isfinite(targets).argmin())}: the label is not finite")
            for low, high in _pieces(ends):
                inside = ends[low : high + 1] - ends[low]
                given = inside, indices.take(int(inside[-1])), values.take(int(inside[-1])), targets[low:high]
                yield checked_block(*given, features=features, first=begin + low, source=path, dtype=dtype)
            start = int(ends[-1])
        if whole:
            if start != indices.length:
                raise DatasetError(f"{path}: the samples end at non-zero {start} of {indices.length}")
            arrays.finish()


def _pieces(ends: Array) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with a limited number of non-zeros each."""
    low, rows = 0, len(ends) - 1
    while low < rows:
        high = int(np.searchsorted(ends, ends[low] + NONZEROS_AT_ONCE, "right")) - 1
        high = min(max(high, low + 1), rows)
        yield low, high
        low = high


class _Stream:
    """An array in a file, read from start to end."""

    def __init__(self, file: IO[bytes], header: ArrayHeader, name: str, kinds: str, progress: Progress = None) -> None:
        if len(header.shape) > 1 or header.dtype.kind not in kinds:
            raise Damaged(f"the array {name} is {header.dtype} of shape {header.shape}, not numbers in one dimension")
        self._file, self._name, self._progress = file, name, progress
        self.length, self.dtype = header.items, header.dtype

    def take(self, count: int) -> Array:
        """Return the next ``count`` items."""
        parts, left = [], count * self.dtype.itemsize
        if left > _LARGE and left > memory_left():
            raise Damaged(f"{count:,} items of the array {self._name} belong to one sample, but there is no memory for them")
        while left > 0:
            with damage():
                part = self._file.read(min(left, _PIECE))
            if not part:
                raise Damaged(f"the array {self._name} ends too early")
            parts.append(part)
            left -= len(part)
        if self._progress is not None:
            self._progress(count * self.dtype.itemsize)
        items = np.frombuffer(b"".join(parts), self.dtype)
        return items.astype(self.dtype.newbyteorder("="), copy=False)

    def skip(self, count: int) -> None:
        """Skip ``count`` items."""
        at_once = max(1, _PIECE // max(1, self.dtype.itemsize))
        for begin in range(0, count, at_once):
            self.take(min(at_once, count - begin))

    def finish(self) -> None:
        """Read the rest, and verify the checksum."""
        with damage():
            while self._file.read(_PIECE):
                pass


class _Arrays:
    """The arrays of an ``.npz`` file, and its companion file of labels."""

    def __init__(self, path: PathLike, file: Npz, stack: ExitStack) -> None:
        self._path, self._file, self._stack = path, file, stack
        self._streams: list[_Stream] = []

    def small(self, name: str) -> Any:
        """Return a number, string or short array that describes the matrix."""
        value = self._file.array(name, _LONGEST_WORD)
        with damage():
            return value.item() if value.ndim == 0 else value

    def stream(self, name: str, progress: Progress = None) -> _Stream:
        """Open an array for reading."""
        kinds = "biuf" if name in ("data", *_LABELS) else "iu"
        return self._kept(*self._file.open(name), name, kinds, progress)

    def labels(self) -> _Stream | None:
        """Open the labels; return None if there are none."""
        for name in _LABELS:
            if name in self._file.names:
                return self.stream(name)
        labels_path = _labels_path(self._path)
        if not os.path.lexists(labels_path):
            return None
        file = self._stack.enter_context(open_regular(labels_path))
        try:
            header = read_header(file, os.fstat(file.fileno()).st_size, labels_path.name)
            return self._kept(file, header, labels_path.name, "biuf", None)
        except Damaged as fault:
            raise DatasetError(f"cannot read {labels_path}: {fault}; it has to be a file written by numpy.save") from None

    def finish(self) -> None:
        """Read all arrays to their ends."""
        for stream in self._streams:
            stream.finish()

    def _kept(self, file: IO[bytes], header: ArrayHeader, name: str, kinds: str, progress: Progress) -> _Stream:
        self._streams.append(_Stream(self._stack.enter_context(file), header, name, kinds, progress))
        return self._streams[-1]


@contextmanager
def _arrays(path: PathLike) -> Iterator[_Arrays]:
    """Open the arrays of a file; turn every fault into a DatasetError."""
    first_bytes(path, 1)
    try:
        with ExitStack() as stack:
            yield _Arrays(path, Npz(stack.enter_context(open_input(path)), in_memory=False), stack)
    except (OSError, Damaged) as error:
        named = getattr(error, "filename", None)
        file = path if named is None else named  # the labels may be in another file
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split()).rstrip(".")
        remedy = "it has to be a file written by scipy.sparse.save_npz"
        raise DatasetError(f"cannot read {file}: {reason or type(error).__name__}; {remedy}") from None


def _labels_path(path: PathLike) -> Path:
    """Return the path of the companion file of labels."""
    path = Path(path)
    return path.with_name(f"{path.name.removesuffix('.npz')}{LABELS_SUFFIX}")
