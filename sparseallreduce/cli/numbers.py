"""Whole numbers as people write them on a command line: 1000000, 1_000_000 and 1e6 are the same."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import click

__all__ = ["Whole", "whole_number"]

_LONGEST = 20  # digits before the decimal point, so that 1e999999 is rejected early


def whole_number(text: str) -> int | None:
    """Return the value of a text that is a whole number, None for other texts.

    >>> whole_number("1e6"), whole_number("1_000"), whole_number("2.5e3"), whole_number("2.5")
    (1000000, 1000, 2500, None)
    """
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    if not number.is_finite() or number.adjusted() > _LONGEST or number != number.to_integral_value():
        return None
    return int(number)


class Whole(click.IntRange):
    """A whole number between ``min`` and ``max``, which may be written with an exponent."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = whole_number(value) if isinstance(value, str) else value
        if number is None:
            self.fail(f"{value!r} is not a whole number, such as 1000000, 1_000_000 or 1e6", param, ctx)
        return super().convert(number, param, ctx)
