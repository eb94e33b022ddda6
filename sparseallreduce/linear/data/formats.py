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
from sparseallreduce.linear.data.reading import FORMATS, Reading, naming_option
from sparseallreduce.linear.data.svmlight.reader import svmlight_blocks
from sparseallreduce.linear.data.vowpal_wabbit.reader import vowpal_wabbit_blocks

__all__ = ["Samples", "format_of", "open_samples"]

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_TEXTS = ("svmlight", "vw", "text")


class Samples(NamedTuple):
    """The samples of a data set that are this rank's."""

    blocks: Generator[Block]
    features: int | None  # as many as the files say, None if one more than the highest index
    labels: Labels = PLAIN  # what labels look like; of names, those that were found once all blocks have been read


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
    chosen = reading.format or ("binary" if binary else _by_name(str(path)))
    if isinstance(path, Piped) and (binary or chosen not in _TEXTS):
        raise DatasetError(f"cannot read {path} as {chosen}: text alone comes that way, {', '.join(_TEXTS)}; give a file")
    if binary != (chosen == "binary"):
        said = f"{path} is {'' if binary else 'not '}in the binary format, and {{option}} says {reading.format}"
        raise naming_option(said, "format", "--format")
    if chosen in _TEXTS:
        check_text(path, reading.format is not None)
    return chosen


def _by_name(name: str) -> str:
    name = os.path.basename(name).lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    endings = ((format, ending) for format, endings in FORMATS.items() for ending in endings if format != "binary")
    return next((format for format, ending in endings if name.endswith(ending)), "svmlight")


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

    Raises
    ------
    DatasetError
        Here on every rank alike; from the generator on the rank that reads what is wrong.
    """
    given: Any = {"dtype": dtype, "progress": progress}
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
