"""Plain text with one sample per line: its label, a tab, and words, whose counts are hashed by scikit-learn's HashingVectorizer.

Labels are numbers, or class names. Words are tokens of the vectorizer's default analyzer: lower case, two characters or more;
a sample has unit length. Every rank reads its own contiguous block of lines in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.files import Progress
from sparseallreduce.linear.data.label_words import PLAIN, Labels
from sparseallreduce.linear.data.line_blocks import NUMBER, LineFault, line_number, quoted, shared_line_blocks
from sparseallreduce.linear.data.parts import Source

__all__ = ["hashed_text_blocks"]


def hashed_text_blocks(
    source: Source,
    comm: Any,
    *,
    bits: int,
    labels: Labels = PLAIN,
    unlabelled: bool = False,
    dtype: DTypeLike = np.float32,
    progress: Progress = None,
) -> Generator[Block]:
    """Yield this rank's samples of files, block by block. Collective over ``comm`` until it ends or is closed.

    Parameters
    ----------
    source, comm, labels, progress
        As for :func:`~sparseallreduce.linear.data.svmlight.reader.svmlight_blocks`. The text is UTF-8.
    bits : int
        There are 2**bits features.
    unlabelled : bool
        Whether the label before the tab may be missing; it is then NaN.
    dtype : dtype
        Data type of the values, float32 or float64.

    Raises
    ------
    DatasetError
        With the file, the line and the fault; if the file cannot be read, on every rank.
    """
    # Imported on demand, because scikit-learn takes two seconds to load on every rank.
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(n_features=1 << bits, dtype=np.dtype(dtype).type)
    with closing(shared_line_blocks(source, comm, progress)) as blocks:
        for lines in blocks:
            try:
                numbers, texts = _split(lines.text, labels, unlabelled)
            except LineFault as fault:
                where = f"{source.parts[lines.part]}, line {line_number(source, lines, fault.place)}"
                raise DatasetError(f"{where}: {fault.reason}") from None
            rows = vectorizer.transform(texts) if texts else None
            if rows is not None:
                rows.sort_indices()
                yield Block(rows.indptr.astype(np.int64), rows.indices.astype(np.uint32), rows.data, np.array(numbers))


def _split(text: bytes, labels: Labels, unlabelled: bool) -> tuple[list[float], list[str]]:
    """Return labels and texts of lines, without blank ones."""
    numbers, texts, place = [], [], 0
    for line in text.split(b"\n"):
        if line.strip():
            word, tab, rest = line.partition(b"\t")
            word = word.strip()
            if not tab:
                raise LineFault(f"there is no tab between label and text: {quoted(line)}", place)
            finite = labels.named or (NUMBER.fullmatch(word) and math.isfinite(float(word)))
            if not finite and (word or not unlabelled):
                raise LineFault(f"the label {quoted(word)} is not a finite number: {quoted(line)}", place)
            try:
                texts.append(rest.decode())
            except UnicodeDecodeError as error:
                raise LineFault(f"{error.reason} of UTF-8 in {quoted(rest)}", place) from None
            numbers.append(math.nan if unlabelled and not word else labels.number(word, place))
        place += len(line) + 1
    return numbers, texts
