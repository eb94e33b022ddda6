"""Writing the binary CSR format (``data/FORMAT.md``) by all ranks, in bounded memory; the file appears complete or not at all.

The number of samples is known only at the end. So each rank first appends its columns to its own files, in a folder
next to the result; then all ranks copy them to their final positions, each a share of the result's blocks. The result is renamed last.
"""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import filelock
import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.atomic_file import is_special, publish
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.format import BLOCK, SECTIONS, Header
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.files import PathLike, Progress, written
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import index_dtype

__all__ = ["BinaryWriter", "write_binary"]

Array = NDArray[Any]

_WHOLE = "whole"  # name of the result before it is renamed


class _Share(NamedTuple):
    """Properties of the samples that a rank has appended."""

    rows: int = 0
    nnz: int = 0
    highest: int = -1  # highest index
    ones: bool = True  # whether all values are 1
    small: bool = True  # whether all labels are integers of one byte


def write_binary(path: PathLike, dataset: Dataset, comm: Any) -> None:
    """Write the samples of all ranks in rank order. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank.
    """
    if dataset.names is not None:
        raise DatasetError(f"cannot write {path}: labels are names of classes, but the binary format has only numbers: number the classes")
    with BinaryWriter(path, comm, features=dataset.features, dtype=dataset.values.dtype) as writer:
        agreed(comm, lambda: writer.append(Block(dataset.indptr, dataset.indices, dataset.values, dataset.labels, dataset.weights)))
        writer.finish()


class BinaryWriter:
    """Collects samples block by block, those of rank 0 before those of rank 1 and so on, and finally writes them.

    Entering the context and :meth:`finish` are collective; leaving it without the latter leaves no file.

    Parameters
    ----------
    path : path
    comm : communicator
        Communicator of ranks that share the folder.
    features : int, optional
        Number of features, N; by default the highest index plus one, and indices must then fit into four bytes.
    dtype : dtype
        Data type of the values, float32 or float64.
    """

    def __init__(self, path: PathLike, comm: Any, *, features: int | None = None, dtype: DTypeLike = np.float32) -> None:
        self._path, self._comm, self._features = Path(path), comm, features
        self._folder = self._path.with_name(f".{self._path.name}.partial")
        self._lock = filelock.FileLock(self._folder / "lock")
        self._dtypes: dict[str, np.dtype[Any]] = {
            "indptr": np.dtype("<i8"),
            "indices": index_dtype(features or 2**32).newbyteorder("<"),
            "values": np.dtype(dtype).newbyteorder("<"),
            "labels": np.dtype("<f8"),
        }
        self._share = _Share()
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        try:
            agreed(self._comm, lambda: self._prepare() if self._comm.rank == 0 else None)
            agreed(self._comm, self._open)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if self._lock.is_locked:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.release()

    def _prepare(self) -> None:
        """Create the folder, and remove what a killed writer has left."""
        with written(self._path):
            if is_special(self._path):
                raise OSError(errno.EINVAL, "it is not a regular file")  # otherwise renaming would fail after everything is written
            self._folder.mkdir(exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except filelock.Timeout:
                raise DatasetError(f"cannot write {self._path}: another process is writing it; wait for that one") from None
            for left in self._folder.iterdir():
                if left.name != "lock":
                    left.unlink()

    def _open(self) -> None:
        with written(self._path):
            for section in SECTIONS:
                self._files[section] = (self._folder / f"{section}.{self._comm.rank}").open("wb", buffering=0)
            if self._comm.rank == 0:
                _write(self._files["indptr"], np.zeros(1, self._dtypes["indptr"]))

    @property
    def samples(self) -> int:
        """The number of samples that this rank has appended."""
        return self._share.rows

    def append(self, block: Block) -> None:
        """Append samples to those of this rank.

        Raises
        ------
        DatasetError
            If they cannot be written, or have weights other than 1: the format has no sample weights.
        """
        share = self._share
        if block.weights is not None and not (block.weights == 1).all():
            what = f"sample {share.rows + int((block.weights != 1).argmax())} of rank {self._comm.rank} has the importance"
            weight = block.weights[(block.weights != 1).argmax()]
            raise DatasetError(f"cannot write {self._path}: {what} {weight:g}, but the binary format has none: train on the source itself")
        with written(self._path):
            _write(self._files["indptr"], (block.indptr[1:] - block.indptr[0] + share.nnz).astype(self._dtypes["indptr"], copy=False))
            for section, items in (("indices", block.indices), ("values", block.values), ("labels", block.labels)):
                _write(self._files[section], items.astype(self._dtypes[section], copy=False))
        self._share = _Share(
            share.rows + len(block.labels),
            share.nnz + len(block.values),
            max(share.highest, int(block.indices.max(initial=0)) if len(block.indices) else -1),
            share.ones and bool((block.values == 1).all()),
            share.small and _fits_one_byte(block.labels),
        )

    def finish(self, progress: Progress = None) -> Header:
        """Write the samples of all ranks, and rename the file. Collective.

        Parameters
        ----------
        progress : callable, optional
            Function called with the number of bytes that this rank has written since the last call.

        Raises
        ------
        DatasetError
            On every rank.
        """
        for file in self._files.values():
            file.close()
        shares = gather(self._comm, self._share)
        header = self._header(shares)
        whole = self._folder / _WHOLE
        agreed(self._comm, lambda: self._create(whole, header.file_bytes) if self._comm.rank == 0 else None)
        mine = agreed(self._comm, lambda: self._copied(whole, header, shares, progress))
        table = np.concatenate(gather(self._comm, mine))
        header = replace(header, checksums_crc=zlib.crc32(table.data))
        agreed(self._comm, lambda: self._complete(whole, header, table) if self._comm.rank == 0 else None)
        return header

    def _header(self, shares: list[_Share]) -> Header:
        samples = sum(share.rows for share in shares)
        if samples == 0:
            raise DatasetError(f"cannot write {self._path}: there are no samples")
        highest = max(share.highest for share in shares)
        features = self._features or max(highest + 1, 1)
        if highest >= features:
            raise DatasetError(f"cannot write {self._path}: index {highest} is not below the {features} features")
        itemsize = self._dtypes["values"].itemsize
        # Values that are left out are read, and then trained, as float32.
        value_width = 0 if itemsize == 4 and all(share.ones for share in shares) else itemsize
        label_width = 1 if all(share.small for share in shares) else 8
        widths = self._dtypes["indices"].itemsize, value_width, label_width
        return Header.planned(samples, features, sum(share.nnz for share in shares), widths)

    def _create(self, whole: Path, size: int) -> None:
        with written(self._path), whole.open("wb") as file:
            file.truncate(size)

    def _copied(self, whole: Path, header: Header, shares: list[_Share], progress: Progress) -> Array:
        """Copy this rank's share of all blocks into the file, and return their checksums."""
        ranks, rank = self._comm.size, self._comm.rank
        mine = range(header.blocks * rank // ranks, header.blocks * (rank + 1) // ranks)
        checksums = []
        with written(self._path), whole.open("r+b", buffering=0) as file:
            for section, number in _numbered_blocks(header, mine):
                place = header.sections[section]
                length = min(BLOCK, place.length - number * BLOCK)
                size = header.dtype(section).itemsize
                items = self._items(section, number * BLOCK // size, (number * BLOCK + length) // size, shares)
                block = items.astype(header.dtype(section), copy=False)
                file.seek(place.offset + number * BLOCK)
                _write(file, block)
                checksums.append(zlib.crc32(block.data))
                if progress is not None:
                    progress(length)
        return np.array(checksums, "<u4")

    def _items(self, section: str, first: int, last: int, shares: list[_Share]) -> Array:
        """Return items [first, last) of a section from the files of the ranks that have them."""
        dtype = self._dtypes[section]
        parts = []
        begin = nonzeros = 0
        for rank, share in enumerate(shares):
            count = share.nnz if section in ("indices", "values") else share.rows + (section == "indptr" and rank == 0)
            low, high = max(first, begin), min(last, begin + count)
            if low < high:
                file = self._folder / f"{section}.{rank}"
                part = np.fromfile(file, dtype, high - low, offset=(low - begin) * dtype.itemsize)
                parts.append(part + nonzeros if section == "indptr" else part)
            begin += count
            nonzeros += share.nnz
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _complete(self, whole: Path, header: Header, table: Array) -> None:
        with written(self._path):
            with whole.open("r+b") as file:
                file.write(header.to_bytes())
                file.seek(header.checksums.offset)
                file.write(table.tobytes())
            publish(whole, self._path)


def _numbered_blocks(header: Header, blocks: range) -> Iterator[tuple[str, int]]:
    """Yield the section, and the number in it, of blocks that are numbered over all sections."""
    for section in SECTIONS:
        first = header.first_block(section)
        count = -(-header.sections[section].length // header.block)
        for number in range(max(blocks.start - first, 0), min(blocks.stop - first, count)):
            yield section, number


def _fits_one_byte(labels: Array) -> bool:
    return bool(((labels >= -128) & (labels <= 127) & (labels == np.rint(labels))).all())


def _write(file: BinaryIO, items: Array) -> None:
    left = np.ascontiguousarray(items).data.cast("B")
    while len(left):
        left = left[file.write(left) :]
