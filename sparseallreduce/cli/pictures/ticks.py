"""Readable axes: few ticks, each with its unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseallreduce.cli.pictures.panels import Quantity

if TYPE_CHECKING:
    from matplotlib.axis import Axis

__all__ = ["powers_of_two", "scale"]

_MOST = 6  # maximum number of ticks on an axis
_MARGIN = 0.06  # fraction of the axis, so that the frame cuts no marker
_TO_BE_LOG = 3.0  # ratio of the ends of an axis below which it is linear


def scale(axis: Axis, quantity: Quantity, values: Sequence[Any]) -> None:
    """Set the scale, limits, ticks and label of an axis that shows ``values``, ignoring values that cannot be shown."""
    finite = np.array([value for value in values if value is not None], np.float64)
    finite = finite[np.isfinite(finite)]
    log = quantity.log and (finite > 0).any()
    if log:
        finite = finite[finite > 0]
    if len(finite) == 0:
        finite = np.array([0.0, 1.0])
    low, high = float(finite.min()), float(finite.max())
    if log and (high / low >= _TO_BE_LOG or quantity.unit in ("ranks", "count")):
        _log_scale(axis, quantity, finite, low, high)
    else:
        _linear_scale(axis, quantity, low, high)
    axis.set_label_text(quantity.name)
    axis.set_minor_locator(_ticker().NullLocator())


def _log_scale(axis: Axis, quantity: Quantity, values: Any, low: float, high: float) -> None:
    if high == low:
        low, high = low / 1.5, high * 1.5
    margin = (high / low) ** _MARGIN
    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    _set_limits(axis, low / margin, high * margin)
    binary = powers_of_two(values) if quantity.unit in ("ranks", "count") else False
    if quantity.unit == "ranks":
        found = np.unique(values)
    elif binary:
        first, last = round(math.log2(low)), round(math.log2(high))
        found = 2.0 ** np.arange(first, last + 1)
    else:
        found = log_ticks(low / margin, high * margin)
    found = found[:: -(-len(found) // _MOST)]
    axis.set_major_locator(_ticker().FixedLocator(found))
    axis.set_major_formatter(_ticker().FuncFormatter(_power if binary and quantity.unit == "count" else written(quantity)))


def _linear_scale(axis: Axis, quantity: Quantity, low: float, high: float) -> None:
    whole = quantity.unit in ("ranks", "count", "whole")
    if high == low:
        spread = abs(high) * 0.1 or 0.5
        low, high = low - spread, high + spread
        if low < 0 <= low + spread:
            low = 0.0
    margin = (high - low) * _MARGIN
    grows = quantity.unit in ("s", "B", "B/s") and low >= 0
    bottom = 0.0 if grows or (0 <= low <= margin * 4 and not whole) else low - margin
    _set_limits(axis, bottom, high + margin)
    axis.set_major_locator(_ticker().MaxNLocator(_MOST - 1, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(_ticker().FuncFormatter(written(quantity)))


def _set_limits(axis: Axis, low: float, high: float) -> None:
    (axis.axes.set_xlim if axis is axis.axes.xaxis else axis.axes.set_ylim)(low, high)


def log_ticks(low: float, high: float) -> Any:
    """Return round numbers between ``low`` and ``high``: at least two if ``high`` is three times ``low`` or more.

    >>> log_ticks(0.9, 150).tolist()
    [1.0, 10.0, 100.0]
    >>> log_ticks(3, 11).tolist()
    [5.0, 10.0]
    """
    decades = np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
        ticks = np.array([factor * 10.0**decade for decade in decades for factor in factors])
        ticks = ticks[(ticks >= low * (1 - 1e-9)) & (ticks <= high * (1 + 1e-9))]
        if len(ticks) > 2 or (len(ticks) == 2 and len(factors) > 2):
            break
    return ticks


def powers_of_two(values: Any) -> bool:
    """Return True if all values are powers of two."""
    return all(value >= 1 and math.log2(value).is_integer() for value in values)


def _power(value: float, place: int | None = None) -> str:
    return f"$2^{{{round(math.log2(value))}}}$"


def written(quantity: Quantity) -> Callable[..., str]:
    """Return a function that formats a tick of the quantity, with its unit."""
    if quantity.unit == "share":
        return lambda value, place=None: f"{100 * value:.6g} %"
    if quantity.unit in ("s", "B", "B/s", "count"):
        unit = "" if quantity.unit == "count" else quantity.unit
        engineering = _ticker().EngFormatter(unit=unit, sep=" " if unit else "")
        return lambda value, place=None: str(engineering.format_eng(round_to(value)) if value else f"0 {unit}".rstrip())
    return lambda value, place=None: f"{round_to(value):.6g}"


def round_to(value: float) -> float:
    """Return the number rounded to nine digits, without the noise of binary fractions.

    >>> round_to(0.1 + 0.2)
    0.3
    """
    return float(f"{value:.9g}")


def _ticker() -> Any:
    from matplotlib import ticker

    return ticker
