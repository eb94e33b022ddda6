"""The base class of the command line's own types of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

__all__ = ["Parameter"]

if TYPE_CHECKING:
    Parameter = click.ParamType[Any]
else:
    Parameter = click.ParamType  # not generic in earlier versions of click
