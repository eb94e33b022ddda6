"""Conversion of other formats to the binary one: all ranks parse and write, in bounded memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.format import Header
from sparseallreduce.linear.data.binary.writer import BinaryWriter
from sparseallreduce.linear.data.companion import write_columns
from sparseallreduce.linear.data.files import PathLike, Piped, Progress
from sparseallreduce.linear.data.formats import format_of, open_samples
from sparseallreduce.linear.data.parts import Data, Source, described, source_of
from sparseallreduce.linear.data.reading import Reading, TableOptions, table_reading
from sparseallreduce.runtime.objects import agreed, collective, gather

__all__ = ["convert"]


@collective
def convert(
    source: Data,
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
    **columns: Unpack[TableOptions],
) -> Header:
    """Write the samples of files to a binary file, which appears under its name once complete. Collective over ``comm``.

    A table is read twice, so that it need not fit into memory. The encoding of its columns is written to ``OUT.columns.json``.

    Parameters
    ----------
    source : path or sequence of paths
        Files in any other format that :func:`~sparseallreduce.linear.load` reads, and named as there.
    out : path
        File in a folder that all ranks share.
    comm : communicator
    n_features : int, optional
        Number of features, N; by default that of the file, or the highest index plus one.
    n_samples : int, optional
        Expected number of samples.
    zero_based : bool
        Whether indices in svmlight text count from 0.
    format, hash_bits
        As for :func:`~sparseallreduce.linear.load`.
    dtype : dtype
        Data type of the values, float32 or float64.
    on_read, on_written : callable, optional
        Functions called with the number of bytes of the source that this rank has processed, and of the result that it has written, since
        the last call.
    target, features, drop, categorical, header, max_categories, encoding
        Options of tables, as for :func:`~sparseallreduce.linear.load`.

    Returns
    -------
    Header
        Header of the result.

    Raises
    ------
    DatasetError
        On every rank.
    """
    reading = Reading(format, hash_bits=hash_bits, table=table_reading("convert", columns))
    with source_of(source, comm) as files:
        chosen = format_of(files, reading, comm)
        agreed(comm, lambda: _check(files, chosen, Path(out)))
        given: Any = {"n_features": n_features, "zero_based": zero_based, "dtype": dtype, "progress": on_read}
        samples = open_samples(files, comm, chosen, reading, **given)
        if samples.labels.named and samples.encoding is None:
            shown = f"names of classes, such as {samples.labels.example.decode()!r}"
            remedy = "number the classes, or train on the source itself"
            raise DatasetError(f"cannot write {out}: labels are {shown}, but the binary format has only numbers: {remedy}")
        with BinaryWriter(out, comm, features=n_features or samples.features, dtype=dtype) as writer:

            def parse() -> None:
                with closing(samples.blocks) as blocks:
                    for block in blocks:
                        writer.append(block)

            agreed(comm, parse)
            found = sum(gather(comm, writer.samples))
            if n_samples is not None and found != n_samples:
                what = f"{found} samples in it instead of {n_samples}: it is damaged, or has changed; remove it to fetch it again"
                raise DatasetError(f"{described(source)}: {what}")
            found_header = writer.finish(on_written)
        if samples.encoding is not None:
            names = samples.labels.names if samples.labels.named else None
            encoding = samples.encoding
            agreed(comm, lambda: write_columns(out, encoding, names) if comm.rank == 0 else None)
        return found_header


def _check(source: Source, chosen: str, out: Path) -> None:
    if chosen == "binary":
        raise DatasetError(f"{source} is in the binary format already")
    if out.exists() and any(out.samefile(part) for part in source.parts if not isinstance(part, Piped)):
        which = "one of the files" if source.parts[1:] else "the file"
        raise DatasetError(f"cannot write {out}: it is {which} to convert; give the result another name")
