"""Choice of the reader for the files of a data set, by their names, their first bytes, or the user's option."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.reader import is_binary
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.files import PathLike, Piped, Progress
from sparseallreduce.linear.data.foreign import check_text
from sparseallreduce.linear.data.hashed_text import hashed_text_blocks
from sparseallreduce.linear.data.label_words import PLAIN, Labels, svmlight_labels, tabbed_labels
from sparseallreduce.linear.data.npz import npz_blocks
from sparseallreduce.linear.data.parquet import parquet_blocks
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.reading import FORMATS, TABLES, Reading, naming_option
from sparseallreduce.linear.data.svmlight.reader import svmlight_blocks
from sparseallreduce.linear.data.tables.table import is_table, table
from sparseallreduce.linear.data.vowpal_wabbit.reader import vowpal_wabbit_blocks
from sparseallreduce.linear.encoding import Encoding

__all__ = ["Samples", "format_of", "open_samples"]

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_TEXTS = ("svmlight", "vw", "text", "csv", "tsv")


class Samples(NamedTuple):
    """The samples of a data set that belong to this rank."""

    blocks: Generator[Block]
    features: int | None  # number of features given by the files; None means the highest index plus one
    labels: Labels = PLAIN  # form of the labels; names are complete once all blocks have been read
    encoding: Encoding | None = None  # encoding of the columns of a table


def format_of(source: Source, reading: Reading, comm: Any) -> str:
    """Return the format of a data set, a key of :data:`FORMATS`. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank, if a file cannot be read, has another format than declared or than the other files, or an unsupported one.
    """
    formats = source.each(comm, lambda part: _format(part, reading))
    for part, format in zip(source.parts, formats):
        if format != formats[0]:
            both = f"{source.parts[0]} has the format {formats[0]} and {part} the format {format}"
            remedy = "convert them, or set their format by {option}"
            raise naming_option(f"{both}, but the files of a data set must have the same: {remedy}", "format", "--format")
    return formats[0]


def _format(path: PathLike, reading: Reading) -> str:
    binary = is_binary(path)
    chosen = reading.format or ("binary" if binary else _by_name(str(path), reading.table.names_columns))
    if isinstance(path, Piped) and (binary or chosen not in _TEXTS):
        raise DatasetError(f"cannot read {path} as {chosen}: pipes are only for text, {', '.join(_TEXTS)}; give a file")
    if binary != (chosen == "binary"):
        reason = f"{path} is {'' if binary else 'not '}in the binary format, but {{option}} is {reading.format}"
        raise naming_option(reason, "format", "--format")
    if chosen in _TEXTS:
        check_text(path, reading.format is not None)
    if reading.table.names_columns and chosen not in TABLES:
        reason = f"{path} has the format {chosen}, which has no named columns, but {{option}} needs them"
        given = "target" if reading.table.target is not None else "encoding" if reading.table.encoding is not None else "features"
        if given == "encoding":
            return chosen
        raise naming_option(f"{reason}: tables are {', '.join(TABLES)}", given, f"--{given}")
    return chosen


def _by_name(name: str, names_columns: bool) -> str:
    """Return the format by the end of a name; if that is unknown or plain text, a table if a column is named."""
    name = os.path.basename(name).lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    endings = ((format, ending) for format, endings in FORMATS.items() for ending in endings if format != "binary")
    found = next((format for format, ending in endings if name.endswith(ending)), "csv" if names_columns else "svmlight")
    return "tsv" if found == "text" and names_columns else found


def open_samples(
    source: Source,
    comm: Any,
    chosen: str,
    reading: Reading,
    *,
    n_features: int | None,
    zero_based: bool = False,
    dtype: DTypeLike = np.float32,
    progress: Progress = None,
    keep: bool = False,
) -> Samples:
    """Open files in a given format, except the binary one, and return this rank's samples. Collective over ``comm``.

    Parameters
    ----------
    chosen : str
        Format of the files.
    n_features : int, optional
        Number of features; indices must be below it.
    zero_based : bool
        Whether indices of svmlight text count from 0.
    keep : bool
        Whether to keep a table in memory until all ranks have agreed on its encoding, instead of reading it twice.

    Raises
    ------
    DatasetError
        On every rank from this call; from the generator only on the rank that reads the fault.
    """
    given: Any = {"dtype": dtype, "progress": progress}
    if is_table(source, comm, chosen, reading):
        encoding, names, blocks = table(source, comm, chosen, reading, n_features=n_features, keep=keep, **given)
        return Samples(blocks, encoding.features, PLAIN if names is None else Labels.of_names(names), encoding)
    if chosen == "svmlight":
        labels = svmlight_labels(source, comm)
        options = given | {"n_features": n_features, "zero_based": zero_based, "labels": labels}
        return Samples(svmlight_blocks(source, comm, **options), n_features, labels)
    given["unlabelled"] = reading.unlabelled
    if chosen == "npz":
        return Samples(*npz_blocks(source, comm, n_features=n_features, **given))
    if chosen == "parquet":
        return Samples(parquet_blocks(source, comm, n_features=n_features, **given), n_features)
    bits = reading.bits(source, n_features)
    if chosen == "vw":
        return Samples(vowpal_wabbit_blocks(source, comm, bits=bits, **given), 1 << bits)
    labels = tabbed_labels(source, comm)
    return Samples(hashed_text_blocks(source, comm, bits=bits, labels=labels, **given), 1 << bits, labels)
