"""The options that say how files of samples are to be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sparseallreduce.linear.data.files import STANDARD_INPUT
from sparseallreduce.linear.data.reading import BASES, DEFAULT_BITS, FORMATS

__all__ = ["INPUT_FILE", "both_standard_input", "format_options", "zero_based_option"]

F = TypeVar("F", bound=Callable[..., Any])

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


def both_standard_input(*paths: Path | None) -> bool:
    """Whether more than one of the files is the standard input, which can be read once."""
    return sum(path is not None and str(path) == STANDARD_INPUT for path in paths) > 1
