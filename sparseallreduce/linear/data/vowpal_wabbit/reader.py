"""Vowpal Wabbit's text, plain or compressed: every rank parses its own contiguous block of lines in bounded memory.

A line is ``[label [importance [base]]] [tag]|namespace[:weight] feature[:value] ... |...``, whose features are hashed as ``vw`` does by
default. Importances are the sample weights; bases and tags are skipped. Features with the same hash are added. The constant
feature that ``vw`` adds to every sample is left out: trainers have their own intercept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator
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
from sparseallreduce.linear.data.line_blocks import NUMBER, LineFault, excerpt, line_number, quoted, shared_line_blocks
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.row_kernels import merge_rows
from sparseallreduce.linear.data.vowpal_wabbit import kernels
from sparseallreduce.streams.kernels.compilation import compiled_entry

__all__ = ["parsed", "vowpal_wabbit_blocks"]

Array = NDArray[Any]

_BLANKS = re.compile(rb"[ \t\r]+")


def vowpal_wabbit_blocks(
    source: Source, comm: Any, *, bits: int, unlabelled: bool = False, dtype: DTypeLike = np.float32, progress: Progress = None
) -> Generator[Block]:
    """Yield this rank's samples of files, block by block. Collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    source, comm, progress
        As for :func:`~sparseallreduce.linear.data.svmlight.reader.svmlight_blocks`.
    bits : int
        Number of lowest bits of a hash that form the feature.
    unlabelled : bool
        Whether samples may lack a label, which is then NaN.
    dtype : dtype
        Data type of the values, float32 or float64.

    Raises
    ------
    DatasetError
        With the file, the line and the fault; if the file cannot be read, on every rank.
    """
    with closing(shared_line_blocks(source, comm, progress)) as blocks:
        for lines in blocks:
            try:
                yield parsed(lines.text, bits, unlabelled, np.dtype(dtype))
            except LineFault as fault:
                where = f"{source.parts[lines.part]}, line {line_number(source, lines, fault.place)}"
                raise DatasetError(f"{where}: {fault.reason}: {excerpt(lines.text, fault.place)}") from None


def parsed(text: bytes, bits: int, unlabelled: bool, dtype: np.dtype[Any]) -> Block:
    """Return the samples of whole lines; the arguments are those of :func:`vowpal_wabbit_blocks`.

    Raises
    ------
    LineFault
        With the position of the first fault.
    """
    features, rows = len(text) // kernels.SHORTEST_FEATURE + 1, text.count(b"\n") + 2
    indptr, heads = np.zeros(rows, np.int64), np.empty((rows, 2), np.int64)
    indices, values, hard = np.empty(features, np.uint32), np.empty(features, dtype), np.empty((features, 5), np.int64)
    characters = np.frombuffer(text, np.uint8)
    samples, hards, fault, place = _compiled(dtype)(characters, (1 << bits) - 1, indptr, indices, values, heads, hard)
    if fault:
        raise LineFault(_reason(fault, text, place), place)
    indptr, nonzeros = indptr[: samples + 1], int(indptr[samples])
    zeros = _converted(text, hard[:hards], values)
    if zeros:  # vw leaves them out
        kept = np.ones(nonzeros, bool)
        kept[zeros] = False
        indices, values = indices[:nonzeros][kept], values[:nonzeros][kept]
        indptr = np.append(0, np.cumsum(kept))[indptr]
        nonzeros = len(values)
    finite = np.isfinite(values[:nonzeros])
    if not finite.all():
        sample = int(np.searchsorted(indptr, finite.argmin(), "right")) - 1
        raise LineFault(f"a value is too large for {dtype}", int(heads[sample, 0]))
    nonzeros = int(merge_rows(indptr, indices, values))
    labels, weights = _labels(text, heads[:samples].tolist(), unlabelled)
    return Block(indptr, indices[:nonzeros], values[:nonzeros], labels, weights)


def _converted(text: bytes, hard: Array, values: Array) -> list[int]:
    """Convert the numbers that the kernel has left to the caller; return the positions of zeros."""
    zeros = []
    for entry, begin, end, weight_begin, weight_end in hard.tolist():
        product = float(text[begin:end] or b"1") * float(text[weight_begin:weight_end] or b"1")
        with np.errstate(over="ignore"):
            values[entry] = product
        if product == 0:
            zeros.append(entry)
    return zeros


@cache
def _compiled(value: np.dtype[Any]) -> Any:
    """Return the parser compiled for this dtype of values."""
    text = types.Array(types.uint8, 1, "C", readonly=True)
    outputs = types.int64[::1], types.uint32[::1], numba.from_dtype(value)[::1], types.int64[:, ::1], types.int64[:, ::1]
    return compiled_entry(kernels.parse_lines, (text, types.uint64, *outputs))


def _labels(text: bytes, heads: list[list[int]], unlabelled: bool) -> tuple[Array, Array]:
    """Return labels and importances, from the parts of lines before the first bar."""
    labels, weights = np.empty(len(heads)), np.ones(len(heads))
    for sample, (begin, end) in enumerate(heads):
        head = text[begin:end]
        words = [word for word in _BLANKS.split(head) if word]
        if words and (words[-1].startswith(b"'") or head[-1:] not in (b" ", b"\t", b"\r")):
            words.pop()  # the tag
        if len(words) > 3:
            raise LineFault(f"{quoted(words[3])} is more than label, importance, base and tag before the first |", begin)
        numbers = [_number(what, word, begin) for what, word in zip(("label", "importance", "base"), words)]
        if not numbers and not unlabelled:
            raise LineFault("there is no label", begin)
        labels[sample] = numbers[0] if numbers else math.nan
        if len(numbers) > 1:
            if numbers[1] < 0:
                raise LineFault(f"the importance {quoted(words[1])} is below 0", begin)
            weights[sample] = numbers[1]
    return labels, weights


def _number(what: str, word: bytes, place: int) -> float:
    if not NUMBER.fullmatch(word):
        raise LineFault(f"the {what} {quoted(word)} is not a number", place)
    number = float(word)
    if not math.isfinite(number):
        raise LineFault(f"the {what} {quoted(word)} is too large for float64", place)
    return number


def _reason(fault: int, text: bytes, place: int) -> str:
    """Return a description of the fault in the part of a line at this position."""
    part = quoted(re.split(rb"[ \t\r\n|]", text[place:], maxsplit=1)[0])
    match fault:
        case kernels.NO_BAR:
            return "there is no | before the features"
        case kernels.BAD_WEIGHT:
            return f"the weight of the namespace {part} is not a finite number"
        case kernels.NOT_FINITE:
            return f"the value of the feature {part} is not finite"
        case _:
            return f"the feature {part} has no number after its colon"
