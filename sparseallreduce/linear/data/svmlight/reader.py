"""svmlight text, plain or compressed: every rank parses its own contiguous block of lines in bounded memory.

Comments (from ``#`` to the end of a line) and blank lines are skipped, and so is ``qid:...`` after a label, as in scikit-learn. Labels
may be class names, and have weights after a colon, as in XGBoost: :mod:`~sparseallreduce.linear.data.label_words`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.files import Progress
from sparseallreduce.linear.data.label_words import PLAIN, LabelReader, Labels, expected
from sparseallreduce.linear.data.line_blocks import LineFault, excerpt, line_at, line_number, quoted, shared_line_blocks
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.reading import naming_option
from sparseallreduce.linear.data.svmlight import kernels
from sparseallreduce.streams.kernels.compilation import compiled_entry
from sparseallreduce.streams.stream import index_dtype

__all__ = ["ZeroIndexError", "svmlight_blocks"]

Array = NDArray[Any]

_HIGHEST = 2**32  # largest number of features, if it is not given


class ZeroIndexError(DatasetError):
    """Raised for an index 0 if indices should count from 1."""


class _ZeroIndex(LineFault):
    """Raised for an index 0, with its position in a block of lines."""


def svmlight_blocks(
    source: Source,
    comm: Any,
    *,
    labels: Labels = PLAIN,
    n_features: int | None = None,
    zero_based: bool = False,
    dtype: DTypeLike = np.float32,
    progress: Progress = None,
) -> Generator[Block]:
    """Yield this rank's samples of text files, block by block. Collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    source : Source
        Files, decompressed if their first bytes are those of gzip, bzip2, xz or Zstandard.
    comm : communicator
        Communicator of the ranks that share the samples.
    labels : Labels
        Form of the labels.
    n_features : int, optional
        Number of features, which limits the indices; 2**32 by default.
    zero_based : bool
        Whether indices in the text count from 0.
    dtype : dtype
        Data type of the values, float32 or float64.
    progress : callable, optional
        Function called with the number of bytes of the files that this rank has processed since the last call.

    Raises
    ------
    DatasetError
        With the file, the line and the fault; if the file cannot be read, on every rank.
    """
    parser = _Parser(n_features, zero_based, np.dtype(dtype), labels)
    with closing(shared_line_blocks(source, comm, progress)) as blocks:
        for lines in blocks:
            try:
                yield parser.parse(lines.text)
            except LineFault as fault:
                where = f"{source.parts[lines.part]}, line {line_number(source, lines, fault.place)}"
                shown = excerpt(lines.text, fault.place)
                if isinstance(fault, _ZeroIndex):
                    message = f"{where}: {fault.reason} {{option}}: {shown}"
                    raise naming_option(message, "zero_based=True", "--zero-based", ZeroIndexError) from None
                message = f"{where}: {fault.reason}: {shown}"
                if fault.reason.startswith("the label") and b"," in line_at(lines.text, fault.place):
                    message = f"{message}; of a table (CSV), name the column of labels by {{option}}"
                    raise naming_option(message, "target", "--target") from None
                raise DatasetError(message) from None


class _Parser:
    """Parses block after block of lines into the same arrays."""

    def __init__(self, features: int | None, zero_based: bool, dtype: np.dtype[Any], labels: Labels = PLAIN) -> None:
        self._plain = labels.plain
        self._reader = LabelReader(labels)
        self._given = features is not None
        self._features = features or _HIGHEST
        self._base = 0 if zero_based else 1
        self._index, self._value = index_dtype(self._features), dtype
        self._entry = _compiled(self._index, dtype)
        self._reserve(0)

    def _reserve(self, characters: int) -> None:
        """Allocate arrays for the content of this many characters."""
        nonzeros = characters // kernels.SHORTEST_NONZERO + 1
        self._indptr = np.zeros(characters // 2 + 2, np.int64)
        self._indices = np.empty(nonzeros, self._index)
        self._values = np.empty(nonzeros, self._value)
        self._labels = np.empty(characters // 2 + 1)
        self._words = np.empty((0 if self._plain else characters // 2 + 1, 2), np.int64)
        self._hard = np.empty((characters // 2 + 1, 3), np.int64)

    def parse(self, text: bytes) -> Block:
        """Return the samples of whole lines."""
        if len(text) // 2 >= len(self._labels):
            self._reserve(len(text))
        characters = np.frombuffer(text, np.uint8)
        outputs = self._indptr, self._indices, self._values, self._labels, self._words, self._hard
        samples, hards, fault, place = self._entry(characters, self._base, self._features, self._plain, *outputs)
        self._convert(text, self._hard[:hards])
        labels, weights = self._labels[:samples], None
        if not self._plain:
            labels, weights = self._reader.read(text, self._words[:samples].tolist())
        if fault:
            kind = _ZeroIndex if fault == kernels.BELOW else LineFault
            raise kind(self._reason(fault, text, place), place)
        nonzeros = int(self._indptr[samples])
        return Block(self._indptr[: samples + 1], self._indices[:nonzeros], self._values[:nonzeros], labels, weights)

    def _convert(self, text: bytes, hard: Array) -> None:
        """Convert the numbers that take more than one float64 operation; only these can overflow."""
        if not len(hard):
            return
        numbers = np.fromiter((float(text[start:end]) for _, start, end in hard.tolist()), np.float64, len(hard))
        places = hard[:, 0]
        labels = places < 0
        self._labels[-1 - places[labels]] = numbers[labels]
        with np.errstate(over="ignore"):
            self._values[places[~labels]] = numbers[~labels]
            finite = np.isfinite(np.where(labels, numbers, numbers.astype(self._value)))
        if not finite.all():
            _, start, end = hard[finite.argmin()].tolist()
            what, dtype = ("label", "float64") if labels[finite.argmin()] else ("value", self._value.name)
            raise LineFault(f"the {what} {text[start:end].decode()} is too large for {dtype}", start)

    def _reason(self, fault: int, text: bytes, place: int) -> str:
        """Return a description of the fault in the part of a line at this position."""
        if b"\0" in line_at(text, place):
            return "NUL bytes; the file is damaged, or not text"
        part, *rest = text[place:].split(b"\n", 1)[0].split(b"#", 1)[0].split(None, 2)
        index, _, value = part.partition(b":")
        value = value or next(iter(rest), b"")  # the colon may be followed by blanks
        match fault:
            case kernels.BAD_LABEL:
                return f"the label {quoted(part)} is not {expected(part)}"
            case kernels.NO_COLON:
                return f"{quoted(part)} is not of the form index:value"
            case kernels.BAD_INDEX:
                return f"the index {quoted(index)} is not a whole number"
            case kernels.BELOW:
                return "index 0, but indices count from 1; if they count from 0 in this file, use"
            case kernels.UNSORTED:
                return f"index {index.decode()} comes after a higher one, but indices must increase within a line"
            case kernels.REPEATED:
                return f"index {index.decode()} occurs twice"
            case kernels.ABOVE if self._given:
                return f"index {index.decode()} is above the highest of {self._features} features"
            case kernels.ABOVE:
                return f"index {index.decode()} is above {_HIGHEST}, the highest allowed unless the number of features is given"
            case _:
                return f"the value {quoted(value)} of index {index.decode()} is not {expected(value)}"


@cache
def _compiled(index: np.dtype[Any], value: np.dtype[Any]) -> Callable[..., tuple[int, int, int, int]]:
    """Return the parser compiled for these dtypes of indices and values."""
    text = types.Array(types.uint8, 1, "C", readonly=True)
    outputs = numba.from_dtype(index)[::1], numba.from_dtype(value)[::1], types.float64[::1], types.int64[:, ::1], types.int64[:, ::1]
    return compiled_entry(kernels.parse_svmlight, (text, types.int64, types.uint64, types.boolean, types.int64[::1], *outputs))
