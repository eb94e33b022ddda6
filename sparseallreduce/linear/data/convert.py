"""From other formats to the binary one: all ranks parse, and all write, with a bounded part of the samples in memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.format import Header
from sparseallreduce.linear.data.binary.writer import BinaryWriter
from sparseallreduce.linear.data.files import PathLike, Progress, StandardInput, input_file
from sparseallreduce.linear.data.formats import format_of, open_samples
from sparseallreduce.linear.data.reading import Reading
from sparseallreduce.runtime.objects import agreed, collective, gather

__all__ = ["convert"]


@collective
def convert(
    source: PathLike,
    out: PathLike,
    comm: Any,
    *,
    n_features: int | None = None,
    n_samples: int | None = None,
    zero_based: bool = False,
    format: str | None = None,
    hash_bits: int | None = None,
    dtype: DTypeLike = np.float32,
    on_read: Progress = None,
    on_written: Progress = None,
) -> Header:
    """Write the samples of a file to a binary file, which gets its name when it is whole; collective over ``comm``.

    Parameters
    ----------
    source : path
        Of any other format that :func:`~sparseallreduce.linear.load` reads; ``-`` for the standard input of rank 0.
    out : path
        In a folder that all ranks see.
    comm : communicator
    n_features : int, optional
        Dimension N; by default that of the file, or one more than the highest index.
    n_samples : int, optional
        How many samples there must be.
    zero_based : bool
        Whether indices in svmlight text count from 0.
    format, hash_bits
        As for :func:`~sparseallreduce.linear.load`.
    dtype : dtype
        Of the values, float32 or float64.
    on_read, on_written : callable, optional
        Called with the bytes of the source that this rank has worked off, and of the result that it has written, since the last call.

    Returns
    -------
    Header
        Of the result.

    Raises
    ------
    DatasetError
        On every rank alike.
    """
    reading = Reading(format, hash_bits=hash_bits)
    with input_file(source, comm) as file:
        chosen = format_of(file, reading, comm)
        agreed(comm, lambda: _check(file, chosen, Path(out)))
        given: Any = {"n_features": n_features, "zero_based": zero_based, "dtype": dtype, "progress": on_read}
        samples = open_samples(file, comm, chosen, reading, **given)
        with BinaryWriter(out, comm, features=n_features or samples.features, dtype=dtype) as writer:

            def parse() -> None:
                with closing(samples.blocks) as blocks:
                    for block in blocks:
                        writer.append(block)

            agreed(comm, parse)
            found = sum(gather(comm, writer.samples))
            if n_samples is not None and found != n_samples:
                raise DatasetError(
                    f"{source}: {found} samples in it instead of {n_samples}: it is damaged, or has changed; remove it to fetch it anew"
                )
            return writer.finish(on_written)


def _check(source: PathLike, chosen: str, out: Path) -> None:
    if chosen == "binary":
        raise DatasetError(f"{source} is in the binary format already")
    if not isinstance(source, StandardInput) and out.exists() and out.samefile(source):
        raise DatasetError(f"cannot write {out}: it is the file to convert; give the result another name")
