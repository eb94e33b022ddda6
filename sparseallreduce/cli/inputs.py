"""The options that say how files of samples are to be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sparseallreduce.data_cache import DataCache
from sparseallreduce.linear.data.files import STANDARD_INPUT
from sparseallreduce.linear.data.reading import BASES, DEFAULT_BITS, FORMATS

__all__ = ["INPUT_FILE", "both_standard_input", "cache_options", "data_cache", "format_options", "zero_based_option"]

F = TypeVar("F", bound=Callable[..., Any])

_GIBIBYTES = click.FloatRange(0, 2**33)

#: A file of samples, or ``-``.
INPUT_FILE = click.Path(path_type=Path, allow_dash=True)


def format_options(command: F) -> F:
    """``--format`` and ``--hash-bits``, as ``format`` and ``hash_bits``."""
    kinds = click.Choice(list(FORMATS))
    chosen = click.option("--format", type=kinds, help="Format of the samples; by default what name and first bytes of a file say.")
    bits = click.option(
        "--hash-bits",
        type=click.IntRange(1, 30),
        metavar="BITS",
        help=f"Formats vw and text: features are hashed to 2**BITS  [{DEFAULT_BITS}, or what the number of features says].",
    )
    return chosen(bits(command))


def zero_based_option(default: str | None, shown: str) -> Callable[[F], F]:
    """``--zero-based``, as ``zero_based``."""
    said = f"Whether indices of svmlight text count from 0; auto: if there is an index 0  [{shown}]."
    return click.option("--zero-based", type=click.Choice(BASES), default=default, help=said)


def cache_options(command: F) -> F:
    """``--cache-dir``, ``--cache-size`` and ``--cache-memory``, for :func:`data_cache`."""
    folder = click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Folder on a local disk, in which what is read of DATA is kept for later runs: for files on a slow store. Runs may share it.",
    )
    size = click.option("--cache-size", type=_GIBIBYTES, default=64.0, show_default=True, metavar="GIB", help="Most of it there.")
    memory = click.option(
        "--cache-memory", type=_GIBIBYTES, default=0.0, show_default=True, metavar="GIB", help="Most of it in memory, while runs last."
    )
    return folder(size(memory(command)))


def data_cache(chosen: dict[str, Any]) -> DataCache | None:
    """The cache that these options describe."""
    folder, size, memory = chosen["cache_dir"], chosen["cache_size"], chosen["cache_memory"]
    return None if folder is None else DataCache(folder, disk_bytes=int(size * 2**30), memory_bytes=int(memory * 2**30))


def both_standard_input(*paths: Path | None) -> bool:
    """Whether more than one of the files is the standard input, which can be read once."""
    return sum(path is not None and str(path) == STANDARD_INPUT for path in paths) > 1
