"""`sparseallreduce convert`: other formats to the binary one, in parallel."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from sparseallreduce.cli.inputs import SamplesCommand, format_options, samples_argument, table_arguments, table_options
from sparseallreduce.cli.interpretation_options import names_option, write_dictionary
from sparseallreduce.cli.report import OUTPUT_FILE, check_output
from sparseallreduce.cli.signals import stop_as_interrupted
from sparseallreduce.linear.data.binary.format import Header
from sparseallreduce.linear.data.binary.reader import is_binary
from sparseallreduce.linear.data.convert import convert as convert_file
from sparseallreduce.linear.data.parts import Data, described
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed

__all__ = ["byte_bar", "convert", "convert_with_bars"]


@click.command(cls=SamplesCommand)
@samples_argument("source", "IN")
@click.argument("out", type=OUTPUT_FILE)
@table_options
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float64"]),
    default="float32",
    show_default=True,
    help="Type of the values in OUT, and of the weights that are trained on it.",
)
@click.option("--zero-based", is_flag=True, help="The indices of svmlight text start at 0, not at 1.")
@names_option
@format_options
def convert(source: Data, out: Path, names: Path | None, **options: Any) -> None:
    """Convert svmlight text, or samples of another format, IN, to the binary format, OUT.

    Text may be compressed by gzip, bzip2, xz or Zstandard, and come by a pipe or on standard input, for which IN is `-`. Vowpal Wabbit's
    text (.vw), compressed rows of SciPy (.npz), tables (.csv, .parquet, .arrow, .feather; .tsv with --target), and labels with plain text
    behind a tab (.tsv) are known by the ending of their name. How columns of a table are encoded is written beside OUT, to
    OUT.columns.json, for `train`. IN may be several files of one format, a folder of them, or a pattern in quotes.
    Under mpiexec the ranks share the work. OUT appears when it is complete. Until then its parts are in the folder .OUT.partial beside
    it.
    """
    stop_as_interrupted()
    comm = world()
    agreed(comm, lambda: _check(out))
    agreed(comm, lambda: check_output(names))
    given = {name: options[name] for name in ("dtype", "zero_based", "format", "hash_bits")} | table_arguments(options)
    header = convert_with_bars(source, out, comm, **given)
    if names is not None:
        said = write_dictionary(names, source, comm, header.features, options)
        if comm.rank == 0:
            click.echo(said)


def convert_with_bars(source: Data, out: Path, comm: Any, **options: Any) -> Header:
    """Convert a file, with progress bars and a line about the result on rank 0."""
    start = time.perf_counter()
    shown = comm.rank == 0
    with byte_bar(shown, f"parsing {_title(source)}", _size(source)) as reading, byte_bar(shown, f"writing {out.name}") as writing:
        # What rank 0 has done stands for all.
        header = convert_file(
            source,
            out,
            comm,
            on_read=lambda count: reading.update(count * comm.size),
            on_written=lambda count: writing.update(count * comm.size),
            **options,
        )
    if shown:
        click.echo(
            f"{out}: {header.samples:,} samples, {header.features:,} features, {header.nonzeros / header.samples:.1f} non-zeros a sample; "
            f"{header.file_bytes / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
        )
    return header


def byte_bar(shown: bool, title: str, total: int | None = None) -> tqdm[Any]:
    """A progress bar of bytes, off where it is not shown or nobody looks."""
    return tqdm(desc=title, total=total, unit="B", unit_scale=True, disable=None if shown else True, dynamic_ncols=True, leave=False)


def _check(out: Path) -> None:
    """Refuse a result that cannot be written, or would take the place of samples: of several files, it may have been forgotten."""
    check_output(out)
    if out.is_file() and out.suffix != ".csr" and out.stat().st_size and not is_binary(out):
        raise click.UsageError(f"OUT, {out}, is there already, and is not in the binary format: name the result last, or remove that file")


def _title(source: Data) -> str:
    return Path(source).name if isinstance(source, str | os.PathLike) else described(source)


def _size(source: Data) -> int | None:
    """The bytes of files, if these are all named."""
    paths = [Path(each) for each in ([source] if isinstance(source, str | os.PathLike) else source)]
    return sum(path.stat().st_size for path in paths) if all(path.is_file() for path in paths) else None
