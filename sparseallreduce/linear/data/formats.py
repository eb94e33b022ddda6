"""Which reader the files of a data set take, by their names, their first bytes, or what the user says."""

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
    """The samples of a data set that are this rank's."""

    blocks: Generator[Block]
    features: int | None  # as many as the files say, None if one more than the highest index
    labels: Labels = PLAIN  # what labels look like; of names, those that were found once all blocks have been read
    encoding: Encoding | None = None  # of a table, how its columns become features


def format_of(source: Source, reading: Reading, comm: Any) -> str:
    """The format of a data set, a key of :data:`FORMATS`; collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank alike, if a file cannot be read, is of another format than is said, or than the other files are, or none that is read.
    """
    formats = source.each(comm, lambda part: _format(part, reading))
    for part, format in zip(source.parts, formats):
        if format != formats[0]:
            both = f"{source.parts[0]} is of the format {formats[0]} and {part} of the format {format}"
            remedy = "convert each, or say by {option} what they are"
            raise naming_option(f"{both}, and the files of a data set must be alike: {remedy}", "format", "--format")
    return formats[0]


def _format(path: PathLike, reading: Reading) -> str:
    binary = is_binary(path)
    chosen = reading.format or ("binary" if binary else _by_name(str(path), reading.table.names_columns))
    if isinstance(path, Piped) and (binary or chosen not in _TEXTS):
        raise DatasetError(f"cannot read {path} as {chosen}: text alone comes that way, {', '.join(_TEXTS)}; give a file")
    if binary != (chosen == "binary"):
        said = f"{path} is {'' if binary else 'not '}in the binary format, and {{option}} says {reading.format}"
        raise naming_option(said, "format", "--format")
    if chosen in _TEXTS:
        check_text(path, reading.format is not None)
    if reading.table.names_columns and chosen not in TABLES:
        said = f"{path} is of the format {chosen}, which has no columns with names, as {{option}} asks for"
        given = "target" if reading.table.target is not None else "encoding" if reading.table.encoding is not None else "features"
        if given == "encoding":
            return chosen
        raise naming_option(f"{said}: tables are {', '.join(TABLES)}", given, f"--{given}")
    return chosen


def _by_name(name: str, names_columns: bool) -> str:
    """The format by the ending of a name; of text whose ending says none, or plain text, a table if a column is named."""
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
    """This rank's samples of files of a format, but for the binary one; collective over ``comm``.

    Parameters
    ----------
    chosen : str
        The format.
    n_features : int, optional
        Indices must be below it.
    zero_based : bool
        Of svmlight text, whether indices count from 0.
    keep : bool
        Of a table, whether to keep its values in memory until all ranks have agreed on their encoding, rather than to read it twice.

    Raises
    ------
    DatasetError
        Here on every rank alike; from the generator on the rank that reads what is wrong.
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
