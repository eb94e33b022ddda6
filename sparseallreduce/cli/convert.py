"""`sparseallreduce convert`: convert other formats to the binary one, in parallel."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from sparseallreduce.cli.inputs import SamplesCommand, format_options, samples_argument, table_arguments, table_options
from sparseallreduce.cli.interpretation_options import names_option, write_dictionary
from sparseallreduce.cli.progress import progress_bar, progress_option
from sparseallreduce.cli.report import OUTPUT_FILE, check_output
from sparseallreduce.cli.signals import stop_as_interrupted
from sparseallreduce.cli.terminal import wrapped
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
    help="Type of the values in OUT, and of weights trained on it.",
)
@click.option("--zero-based", is_flag=True, help="The indices of svmlight text start at 0, not at 1.")
@names_option
@progress_option()
@format_options
def convert(source: Data, out: Path, names: Path | None, **options: Any) -> None:
    """Convert svmlight text, or samples IN of another format, to a file OUT in the binary format.

    Text may be compressed with gzip, bzip2, xz or Zstandard, and may come from a pipe or from standard input, for which IN is `-`. The file
    name's suffix selects Vowpal Wabbit's text (.vw), compressed rows of SciPy (.npz), tables (.csv, .parquet, .arrow, .feather; .tsv with
    --target), or lines of a label, a tab and plain text (.tsv). The encoding of a table's columns is written to OUT.columns.json, for
    `train`. IN may be several files of one format, a folder of them, or a quoted pattern.

    Under mpiexec the ranks share the work. OUT appears when it is complete. Until then its parts are in the folder .OUT.partial next to it.
    """
    stop_as_interrupted()
    comm = world()
    agreed(comm, lambda: _check(out))
    agreed(comm, lambda: check_output(names))
    given = {name: options[name] for name in ("dtype", "zero_based", "format", "hash_bits")} | table_arguments(options)
    header = convert_with_bars(source, out, comm, **given)
    if names is not None:
        text = write_dictionary(names, source, comm, header.features, options)
        if comm.rank == 0:
            click.echo(wrapped(text))


def convert_with_bars(source: Data, out: Path, comm: Any, **options: Any) -> Header:
    """Convert a file; rank 0 shows progress bars and prints a line about the result."""
    start = time.perf_counter()
    with byte_bar(comm, f"parsing {_title(source)}", _size(source)) as reading, byte_bar(comm, f"writing {out.name}") as writing:
        # Rank 0's progress stands for that of all ranks.
        header = convert_file(
            source,
            out,
            comm,
            on_read=lambda count: reading.update(count * comm.size),
            on_written=lambda count: writing.update(count * comm.size),
            **options,
        )
    if comm.rank == 0:
        click.echo(
            wrapped(
                f"{out}: {header.samples:,} samples, {header.features:,} features, {header.nonzeros / header.samples:.1f} non-zeros per "
                f"sample; {header.file_bytes / 1e6:,.1f} MB in {time.perf_counter() - start:.1f} s"
            )
        )
    return header


def byte_bar(comm: Any, title: str, total: int | None = None) -> Any:
    """Return a progress bar that counts bytes."""
    return progress_bar(comm, desc=title, total=total, unit="B", unit_scale=True)


def _check(out: Path) -> None:
    """Raise an error if OUT cannot be written, or would overwrite samples: if OUT is forgotten, the last input takes its place."""
    check_output(out)
    if out.is_file() and out.suffix != ".csr" and out.stat().st_size and not is_binary(out):
        raise click.UsageError(f"OUT, {out}, already exists and is not in the binary format: name the result last, or remove that file")


def _title(source: Data) -> str:
    return Path(source).name if isinstance(source, str | os.PathLike) else described(source)


def _size(source: Data) -> int | None:
    """Return the total size of the files in bytes; None if any of them is not a regular file."""
    paths = [Path(each) for each in ([source] if isinstance(source, str | os.PathLike) else source)]
    return sum(path.stat().st_size for path in paths) if all(path.is_file() for path in paths) else None
