"""`sparseallreduce fetch`: download, check and convert data sets of the LIBSVM collection."""

from __future__ import annotations

import logging
from pathlib import Path

import click
import pooch

from sparseallreduce.cache import CACHE_VARIABLE
from sparseallreduce.cli.convert import byte_bar, convert_with_bars
from sparseallreduce.cli.progress import progress_option
from sparseallreduce.cli.signals import stop_as_interrupted
from sparseallreduce.linear.data.collection.fetch import fetch as fetch_set
from sparseallreduce.linear.data.collection.sets import COLLECTION, SETS
from sparseallreduce.runtime.communicators import world


def _checksums(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    for file, separator, checksum in pairs:
        if not (file and separator and checksum):
            raise click.BadParameter(f"{file!r} is not of the form FILE=CHECKSUM")
    return {file: checksum for file, _, checksum in pairs}


@click.command()
@click.argument("name", type=click.Choice(list(SETS)))
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Folder for the files; by default ${CACHE_VARIABLE}, or the user's cache.",
)
@click.option("--mirror", default=COLLECTION, show_default=True, help="URL of the folder with the files.")
@click.option(
    "--checksum", "checksums", multiple=True, callback=_checksums, metavar="FILE=HEX", help="SHA-256 of a file, or MD5 as FILE=md5:HEX."
)
@progress_option()
@click.option("--convert/--no-convert", "binary", default=True, help="Whether to convert to the binary format.  [default: convert]")
def fetch(name: str, cache: Path | None, mirror: str, checksums: dict[str, str], binary: bool) -> None:
    """Fetch a data set of the LIBSVM collection, and print the paths of the training set and, if there is one, of the test set.

    An interrupted download continues where it stopped, also in a later run. Files in the cache are not downloaded again. Several processes
    can share a cache. Under mpiexec the ranks share the conversion.
    """
    stop_as_interrupted()
    logging.getLogger(pooch.get_logger().name).setLevel(logging.WARNING)
    comm = world()
    with byte_bar(comm, f"fetching {name}") as bar:

        def show(received: int, total: int | None) -> None:
            bar.total = total
            bar.update(received - bar.n)

        paths = fetch_set(
            name, comm, cache=cache, mirror=mirror, checksums=checksums, binary=binary, convert=convert_with_bars, on_received=show
        )
    if comm.rank == 0:
        for path in paths:
            click.echo(path)
