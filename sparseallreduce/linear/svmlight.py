"""svmlight text, plain or compressed, of which every rank reads its own contiguous block of samples."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_svmlight_file

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.collective import agreed, gather
from sparseallreduce.linear.dataset import Dataset
from sparseallreduce.streams.stream import index_dtype

__all__ = ["open_text", "read_svmlight"]

Array = NDArray[Any]
T = TypeVar("T")

_CHUNK = 1 << 25  # bytes of text parsed at once: bounds the memory that text takes beside the parsed samples
_EXCERPT = 60  # characters of a bad line that an error shows


def open_text(path: str | os.PathLike[str], mode: str = "rb") -> BinaryIO:
    """The bytes of a text file, decompressed or compressed as its suffix says: ``.gz``, ``.bz2``, ``.xz``, any other plain."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(BinaryIO, openers.get(Path(path).suffix, open)(path, mode))


def read_svmlight(path: str | os.PathLike[str], comm: Any, n_features: int | None, progress: Callable[[int], object] | None) -> Dataset:
    """This rank's samples of a text file; collective over ``comm``."""
    # One rank alone reads to the end, wherever that is; several have to know it to share the text evenly.
    length = gather(comm, agreed(comm, lambda: _text_length(path) if comm.size > 1 and comm.rank == 0 else 0))[0]
    start = length * comm.rank // comm.size
    end = length * (comm.rank + 1) // comm.size if comm.size > 1 else None
    mine = agreed(comm, lambda: _joined(_parsed_chunks(path, start, end, n_features, progress), str(path)))
    shares = gather(comm, (mine.rows, mine.features))
    total = sum(rows for rows, _ in shares)
    if total == 0:
        raise DatasetError(f"{path}: no samples in it")
    return replace(
        mine,
        features=n_features or max(features for _, features in shares),
        first=sum(rows for rows, _ in shares[: comm.rank]),
        total=total,
    )


def _text_length(path: str | os.PathLike[str]) -> int:
    with _opened(path) as text:
        if isinstance(text, io.BufferedReader):  # plain
            return os.fstat(text.fileno()).st_size
        length = 0
        while block := text.read(1 << 20):
            length += len(block)
        return length


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """The text of a file; every failure to open, read or decompress it is a DatasetError that names it."""
    try:
        with open_text(path) as text:
            yield text
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = (getattr(error, "strerror", None) or str(error)).rstrip(".")
        raise DatasetError(f"cannot read {path}: {reason}") from None


def _parsed_chunks(
    path: str | os.PathLike[str], start: int, end: int | None, n_features: int | None, progress: Callable[[int], object] | None
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """The samples of all lines that begin in bytes [start, end) of the text, chunk by chunk."""
    with _opened(path) as text:
        if start > 0:
            text.seek(start - 1)
            start += len(text.readline()) - 1  # a line that begins exactly at start is ours
        while end is None or start < end:
            wanted = _CHUNK if end is None else min(_CHUNK, end - start)
            chunk = text.read(wanted)
            if len(chunk) == wanted and not chunk.endswith(b"\n"):
                chunk += text.readline()
            if not chunk:
                return
            try:
                yield _parsed(chunk, n_features)
            except _LineError:
                line, reason = _first_bad_line(chunk, n_features)
                excerpt = chunk.split(b"\n")[line].decode("ascii", "backslashreplace")
                shown = excerpt if len(excerpt) <= _EXCERPT else excerpt[:_EXCERPT] + "..."
                raise DatasetError(f"{path}, line {_lines_before(path, start) + line + 1}: {reason}: {shown!r}") from None
            start += len(chunk)
            if progress is not None:
                progress(len(chunk))


class _LineError(Exception):
    """Some line of a chunk is malformed."""


def _parsed(chunk: bytes, n_features: int | None) -> tuple[Array, Array, Array, Array]:
    """The row lengths, indices, values and labels of whole lines."""
    try:
        samples, labels = load_svmlight_file(io.BytesIO(chunk), dtype=np.float32, zero_based=False)
    except OverflowError:
        raise _LineError("an index is above 2147483647, the highest that can be read") from None
    except ValueError as error:
        reason = str(error).replace(" in SVMlight/LibSVM data file", "").rstrip(".")
        # The parser's words for "there is no colon" are about Python's tuples.
        reason = "a feature is not of the form index:value" if "unpack" in reason else reason[0].lower() + reason[1:]
        raise _LineError(reason) from None
    if not np.isfinite(labels).all():
        raise _LineError("the label is not a finite number")
    if not np.isfinite(samples.data).all():
        raise _LineError("a value is not a finite float32")
    highest = int(samples.indices.max(initial=-1))
    if n_features is not None and highest >= n_features:
        raise _LineError(f"index {highest + 1} is above the number of features, {n_features}")
    indices = samples.indices.astype(index_dtype(highest + 1))
    return np.diff(samples.indptr), indices, samples.data, labels


def _first_bad_line(chunk: bytes, n_features: int | None) -> tuple[int, str]:
    """The number, from 0, of a chunk's first malformed line, by halving, and what is wrong with it."""
    lines = [line + b"\n" for line in chunk.split(b"\n")]
    low, high = 0, len(lines)
    reason = ""
    while high - low > 1 or not reason:
        middle = max(low + 1, (low + high) // 2)
        try:
            _parsed(b"".join(lines[low:middle]), n_features)
        except _LineError as error:
            high, reason = middle, str(error)
        else:
            low = middle
    return low, reason


def _lines_before(path: str | os.PathLike[str], position: int) -> int:
    with _opened(path) as text:
        count = 0
        while position > 0 and (block := text.read(min(position, 1 << 20))):
            count += block.count(b"\n")
            position -= len(block)
        return count


def _joined(chunks: Iterator[tuple[Array, Array, Array, Array]], source: str) -> Dataset:
    parts = list(chunks) or [(np.empty(0, np.int64), np.empty(0, np.uint32), np.empty(0, np.float32), np.empty(0, np.float64))]
    lengths, indices, values, labels = (np.concatenate(columns) for columns in zip(*parts))
    indptr = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=indptr[1:])
    return Dataset(indptr, indices, values, labels, int(indices.max(initial=0)) + 1 if len(indices) else 0, source=source)
