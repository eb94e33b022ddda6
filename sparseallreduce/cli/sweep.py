"""The option `--sweep NAME=VALUES`: a grid of benchmark settings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import click
import numpy as np

__all__ = ["Setting", "grid", "sweep_option", "values_of"]

Command = TypeVar("Command", bound=Callable[..., Any])

_NAMES = ("density", "ranks", "size")
_MOST = 10_000  # values per name, and points of a grid
_HOW = "give NAME=A,B,C or NAME=FROM:TO:log9 (lin9), with NAME density, ranks or size"


class Setting(NamedTuple):
    """The setting of one benchmark in a grid."""

    ranks: int
    size: int
    density: float


def sweep_option() -> Callable[[Command], Command]:
    """Return the option ``--sweep``, passed on as ``sweeps``, a dict of lists by name."""
    what = (
        "Measure at several values: density=0.0001:0.1:log9, ranks=2,4,8 or size=1e5:1e7:log5. Several sweeps form a grid. Ranks beyond "
        "those started are simulated."
    )
    return click.option("--sweep", "sweeps", multiple=True, metavar="NAME=VALUES", callback=_parsed, help=what)


def _parsed(context: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in _NAMES or not values:
            raise click.BadParameter(f"{text!r} is no sweep: {_HOW}", context, option)
        if name in found:
            raise click.BadParameter(f"{name} is swept twice: give all its values in one --sweep", context, option)
        try:
            found[name] = values_of(name, values)
        except ValueError as error:
            raise click.BadParameter(f"{text!r}: {error}", context, option) from None
    if math.prod(map(len, found.values())) > _MOST:
        raise click.BadParameter(f"the grid has more than {_MOST:,} points: sweep fewer values", context, option)
    return found


def values_of(name: str, text: str) -> list[Any]:
    """Return the distinct values of a sweep in ascending order.

    Raises
    ------
    ValueError
        If the text is not a valid sweep, or a value is out of range.

    >>> values_of("ranks", "2,4,8")
    [2, 4, 8]
    >>> values_of("size", "1e2:1e4:log3")
    [100, 1000, 10000]
    >>> values_of("density", "0:0.1:lin3")
    [0.0, 0.05, 0.1]
    """
    is_range = ":" in text
    found = _range(text) if is_range else [_number(each) for each in text.split(",")]
    if name == "density":
        found = [float(f"{value:.12g}") for value in found]
        if not all(0 <= value <= 1 for value in found):
            raise ValueError("a density must be between 0 and 1")
        return sorted(set(found))
    least = 1 if name == "ranks" else 0
    whole = [round(value) for value in found]
    if not is_range and any(value != exact for value, exact in zip(whole, found)):
        raise ValueError(f"{name} must be whole numbers")
    if min(whole) < least:
        raise ValueError(f"{name} must be at least {least}")
    return sorted(set(whole))


def _range(text: str) -> list[float]:
    """Return the values of a range such as "1:100:log3"."""
    low, high, spacing = [*text.split(":"), "", ""][:3]
    count = spacing[3:]
    if text.count(":") != 2 or spacing[:3] not in ("log", "lin") or not count.isdecimal() or not 2 <= int(count) <= _MOST:
        raise ValueError(f"{text!r} is no range: {_HOW}")
    ends = _number(low), _number(high)
    if spacing.startswith("log") and min(ends) <= 0:
        raise ValueError("both ends of a log range must be above 0: give a list of values, or lin")
    values: list[float] = (np.geomspace if spacing.startswith("log") else np.linspace)(*ends, int(count)).tolist()
    return values


def _number(text: str) -> float:
    base, power, exponent = text.replace("^", "**").partition("**")
    try:
        value = float(base) ** float(exponent) if power else float(base)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no number, such as 0.01, 1e6, 1_000_000 or 2**24") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not finite")
    return value


def grid(sweeps: Mapping[str, Sequence[Any]], ranks: int, size: int | None, density: float | None) -> list[Setting]:
    """Return all points of a grid, with the given values for what is not swept.

    Raises
    ------
    click.UsageError
        If the size or the density is neither swept nor given, or one of them is both.
    """
    given = {"ranks": None, "size": size, "density": density}
    for name, value in given.items():
        if name in sweeps and value is not None:
            raise click.UsageError(f"--{name} and --sweep {name}= exclude each other: leave one of them out")
        if name not in sweeps and name != "ranks" and value is None:
            what = "dimension N" if name == "size" else "fraction of the N positions that each rank has"
            raise click.UsageError(f"--{name} is missing: give the {what}, or sweep it")
    axes = [sweeps.get("ranks", [ranks]), sweeps.get("size", [size]), sweeps.get("density", [density])]
    return [Setting(*point) for point in itertools.product(*axes)]
