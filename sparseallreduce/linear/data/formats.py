"""Which reader a file of samples takes, by its name, its first bytes, or what the user says."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.reader import is_binary
from sparseallreduce.linear.data.blocks import Block
from sparseallreduce.linear.data.files import PathLike, Progress, StandardInput
from sparseallreduce.linear.data.hashed_text import hashed_text_blocks
from sparseallreduce.linear.data.npz import npz_blocks
from sparseallreduce.linear.data.parquet import parquet_blocks
from sparseallreduce.linear.data.reading import FORMATS, Reading
from sparseallreduce.linear.data.svmlight.reader import svmlight_blocks
from sparseallreduce.linear.data.vowpal_wabbit.reader import vowpal_wabbit_blocks
from sparseallreduce.runtime.objects import agreed

__all__ = ["Samples", "format_of", "open_samples"]

_COMPRESSED = (".gz", ".bz2", ".xz")
_TEXTS = ("svmlight", "vw", "text")


class Samples(NamedTuple):
    """The samples of a file that are this rank's."""

    blocks: Generator[Block]
    features: int | None  # as many as the file says, None if one more than the highest index


def format_of(path: PathLike, reading: Reading, comm: Any) -> str:
    """The format of a file, a key of :data:`FORMATS`; collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank alike, if it cannot be read, or is said to be of another format than it is.
    """
    if isinstance(path, StandardInput):
        chosen = reading.format or "svmlight"
        if chosen not in _TEXTS:
            raise DatasetError(f"cannot read {path} as {chosen}: text alone comes that way, {', '.join(_TEXTS)}; give a file")
        return chosen
    binary = agreed(comm, lambda: is_binary(path))
    if reading.format is None:
        return "binary" if binary else _by_name(path)
    if binary != (reading.format == "binary"):
        raise DatasetError(f"{path} is {'' if binary else 'not '}in the binary format, and --format says {reading.format}")
    return reading.format


def _by_name(path: PathLike) -> str:
    name = os.fspath(path).lower()
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    endings = ((format, ending) for format, endings in FORMATS.items() for ending in endings if format != "binary")
    return next((format for format, ending in endings if name.endswith(ending)), "svmlight")


def open_samples(
    path: PathLike,
    comm: Any,
    chosen: str,
    reading: Reading,
    *,
    n_features: int | None,
    zero_based: bool = False,
    dtype: DTypeLike = np.float32,
    progress: Progress = None,
) -> Samples:
    """This rank's samples of a file of a format, but for the binary one; collective over ``comm``.

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
        return Samples(svmlight_blocks(path, comm, n_features=n_features, zero_based=zero_based, **given), n_features)
    given["unlabelled"] = reading.unlabelled
    if chosen == "npz":
        return Samples(*npz_blocks(path, comm, n_features=n_features, **given))
    if chosen == "parquet":
        return Samples(parquet_blocks(path, comm, n_features=n_features, **given), n_features)
    bits = reading.bits(path, n_features)
    reader = vowpal_wabbit_blocks if chosen == "vw" else hashed_text_blocks
    return Samples(reader(path, comm, bits=bits, **given), 1 << bits)
