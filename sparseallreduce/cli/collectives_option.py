"""The option ``--collective`` of `bench` and `simulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from sparseallreduce.algorithms import ALLREDUCE
from sparseallreduce.algorithms.collectives import COLLECTIVES

__all__ = ["collective_option"]

Command = TypeVar("Command", bound=Callable[..., Any])


def collective_option() -> Callable[[Command], Command]:
    """Return the option ``--collective``, by which ``--algorithms`` knows what it may name."""
    return click.option(
        "--collective",
        type=click.Choice([ALLREDUCE, *COLLECTIVES]),
        default=ALLREDUCE,
        show_default=True,
        is_eager=True,
        help="Operation; its root is rank 0, its ranges are even, and streams are gathered as ranges.",
    )
