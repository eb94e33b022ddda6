"""The options of `--lossy`, which bench and simulate share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from sparseallreduce.reducers import REDUCERS

__all__ = ["WORD", "lossy_density", "lossy_options", "refuse_lossless"]

WORD = 4  # bytes per value or index, as in the Ok-Topk paper

_DENSITY = 0.01  # by default
Command = TypeVar("Command", bound=Callable[..., Any])


def lossy_options() -> Callable[[Command], Command]:
    """Return a decorator that adds ``--lossy``, and ``--reducers a,b|all``, which is passed on as a list or None."""

    def mark(command: Command) -> Command:
        what = "Reducers that --lossy runs.  [default: all]"
        command = click.option("--reducers", metavar="A,B|all", callback=_named, help=what)(command)
        what = "Run the reducers instead, which sum about k of N dense values."
        return click.option("--lossy", is_flag=True, is_eager=True, help=what)(command)

    return mark


def _named(context: click.Context, option: click.Parameter, text: str | None) -> list[str] | None:
    if text is None:
        return None
    if not context.params.get("lossy"):
        raise click.UsageError("--reducers is for --lossy: leave it out, or give --lossy too", context)
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if names == ["all"]:
        return list(REDUCERS)
    unknown = [name for name in names if name not in REDUCERS]
    if unknown or not names:
        what = f"unknown reducer {unknown[0]!r}" if unknown else "no reducer given"
        raise click.BadParameter(f"{what}: give all, or some of {','.join(REDUCERS)}", context, option)
    return names


def lossy_density(density: float | None) -> float:
    """Return the given density, or the default.

    Raises
    ------
    click.UsageError
        If it is zero.
    """
    if density == 0:
        raise click.UsageError("--density must be above 0 with --lossy: a reducer sums at least one value")
    return _DENSITY if density is None else density


def refuse_lossless(context: click.Context, options: Mapping[str, str], dtype: str) -> None:
    """Raise an error for options (by their parameters' names) and dtypes that do not apply to reducers.

    Raises
    ------
    click.UsageError
    """
    for name, option in options.items():
        if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} is for the lossless algorithms: leave it out, or leave out --lossy")
    if dtype not in ("float32", "float64"):
        raise click.UsageError(f"reducers support float32 and float64, not {dtype}: give --dtype float32 or float64")
