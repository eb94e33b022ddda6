"""The option `--device` of commands that train and predict: where samples and weights are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.backend import device_module

__all__ = ["array_module_of", "device_option"]


def device_option(help_: str) -> Callable[[Any], Any]:
    """Return the option ``--device cpu|gpu``."""
    return click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help=help_)


def array_module_of(device: str) -> Any:
    """Return CuPy for "gpu" and None for "cpu".

    Raises
    ------
    click.UsageError
        If there is no GPU, or no CuPy.
    """
    if device == "cpu":
        return None
    try:
        return device_module()
    except StreamError as error:
        raise click.UsageError(f"--device gpu: {error}") from error
