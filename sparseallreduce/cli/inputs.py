"""The options that say how to read files of samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from sparseallreduce.cli.numbers import Whole, whole_number
from sparseallreduce.cli.parameter import Parameter
from sparseallreduce.data_cache import DataCache
from sparseallreduce.linear.data.parts import STANDARD_INPUT, Data
from sparseallreduce.linear.data.reading import AUTO, BASES, DEFAULT_BITS, FORMATS, HEADERS, MOST_CATEGORIES

__all__ = [
    "INPUT_FILE",
    "SamplesCommand",
    "both_standard_input",
    "cache_options",
    "data_cache",
    "format_options",
    "samples_argument",
    "table_arguments",
    "table_options",
    "target_options",
    "zero_based_option",
]

F = TypeVar("F", bound=Callable[..., Any])

_GIBIBYTES = click.FloatRange(0, 2**33)

_WORDS = "sparseallreduce.words"  # key of the command line's words in a context's ``meta``

#: A file of samples, a folder or a pattern of files, a pipe, or ``-``.
INPUT_FILE = click.Path(path_type=Path, allow_dash=True)


class SamplesCommand(click.Command):
    """A command with :func:`samples_argument`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


def samples_argument(name: str, metavar: str) -> Callable[[F], F]:
    """Return the argument for files of samples; the command gets a path, or a tuple of paths if there are several.

    The shell expands a pattern without quotes to several words. After ``--test`` all but the first would silently become training data. So
    several names must follow each other, and must not follow the value of ``--test``.
    """

    def together(context: click.Context, parameter: click.Parameter, given: tuple[Path, ...]) -> Data:
        if len(given) == 1:
            return given[0]
        words, names = context.meta[_WORDS], [str(each) for each in given]
        begins = [at for at in range(len(words)) if [str(Path(word)) for word in words[at : at + len(names)]] == names]
        if not begins or all(begin >= 2 and words[begin - 2] == "--test" for begin in begins):
            remedy = "give --test a pattern in quotes, as --test 'test/part-*'" if "--test" in words else "name them one after the other"
            raise click.UsageError(f"it is not clear which of {', '.join(names[:3])}{', ...' * (len(names) > 3)} are {metavar}: {remedy}")
        return given

    return click.argument(name, metavar=f"{metavar}...", nargs=-1, required=True, type=INPUT_FILE, callback=together)


def format_options(command: F) -> F:
    """Add ``--format`` and ``--hash-bits``, as ``format`` and ``hash_bits``."""
    kinds = click.Choice(list(FORMATS))
    chosen = click.option("--format", type=kinds, help="Format of the samples; by default recognised by name and first bytes.")
    bits = click.option(
        "--hash-bits",
        type=Whole(1, 30),
        metavar="BITS",
        help="Formats vw and text, and columns with too many categories: features are hashed to 2**BITS  "
        f"[{DEFAULT_BITS}, or derived from the number of features].",
    )
    return chosen(bits(command))


class Columns(Parameter):
    """Names of columns, separated by commas."""

    name = "columns"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


class Features(Columns):
    """A number of features, or names of columns, separated by commas."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        number = whole_number(value)
        if number is not None and number < 1:
            self.fail("there must be at least one feature", param, ctx)
        return super().convert(value, param, ctx) if number is None else number


def target_options(command: F) -> F:
    """Add ``--target`` and ``--header``."""
    target = click.option(
        "--target",
        metavar="COLUMN",
        help="Tables: the column of labels, which are numbers or names of classes  [the one named label or target; predict: as in "
        "training].",
    )
    header = click.option(
        "--header",
        type=click.Choice(HEADERS),
        default=AUTO,
        help="Whether the first line of CSV names the columns; otherwise they are named 1, 2, ...  [auto: yes if it contains a given name, "
        "or neither numbers nor empty fields].",
    )
    return target(header(command))


def table_options(command: F) -> F:
    """Add ``--target``, ``--header``, ``--features``, ``--drop``, ``--categorical`` and ``--max-categories``."""
    features = click.option(
        "--features",
        type=Features(),
        metavar="N|COLUMN,...",
        help="Tables: the columns that become features  [all but the target]. Other formats: dimension N  [that of the file, or the "
        "highest index].",
    )
    drop = click.option("--drop", type=Columns(), default=(), metavar="COLUMN,...", help="Tables: columns to ignore.")
    categorical = click.option(
        "--categorical",
        type=Columns(),
        default=(),
        metavar="COLUMN,...",
        help="Tables: columns of categories, even if they look like numbers or dates.",
    )
    most = click.option(
        "--max-categories",
        type=Whole(min=0),
        default=MOST_CATEGORIES,
        metavar="COUNT",
        help=f"Tables: a column with more categories is hashed to 2**--hash-bits features  [{MOST_CATEGORIES:,}].",
    )
    return target_options(features(drop(categorical(most(command)))))


def table_arguments(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the reader's arguments for these options, including the number of features."""
    features, target = chosen["features"], chosen["target"]
    count = features if isinstance(features, int) and target is None else None
    names = None if features is None or count is not None else (str(features),) if isinstance(features, int) else features
    known = {name: chosen[name] for name in ("target", "header", "drop", "categorical", "max_categories")}
    return known | {"features": names, "n_features": count}


def zero_based_option(default: str | None, shown: str) -> Callable[[F], F]:
    """Return the option ``--zero-based``, as ``zero_based``."""
    text = f"Whether indices of svmlight text start at 0; auto: yes if there is an index 0  [{shown}]."
    return click.option("--zero-based", type=click.Choice(BASES), default=default, help=text)


def cache_options(command: F) -> F:
    """Add ``--cache-dir``, ``--cache-size`` and ``--cache-memory``, for :func:`data_cache`."""
    folder = click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Folder on a local disk that keeps what is read from DATA for later runs, if DATA is slow to read. Runs may share it.",
    )
    size = click.option("--cache-size", type=_GIBIBYTES, default=64.0, show_default=True, metavar="GIB", help="Limit of the cache on disk.")
    memory = click.option(
        "--cache-memory", type=_GIBIBYTES, default=0.0, show_default=True, metavar="GIB", help="Limit of the cache in memory, during a run."
    )
    return folder(size(memory(command)))


def data_cache(chosen: dict[str, Any]) -> DataCache | None:
    """Return the cache that these options describe, None without ``--cache-dir``."""
    folder, size, memory = chosen["cache_dir"], chosen["cache_size"], chosen["cache_memory"]
    return None if folder is None else DataCache(folder, disk_bytes=int(size * 2**30), memory_bytes=int(memory * 2**30))


def both_standard_input(*several: Data | None) -> bool:
    """Return True if the standard input, which can be read only once, is named more than once."""
    names = [name for data in several if data is not None for name in ([data] if isinstance(data, str | os.PathLike) else data)]
    return sum(str(name) == STANDARD_INPUT for name in names) > 1
