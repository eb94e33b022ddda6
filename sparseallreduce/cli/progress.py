"""Progress bars of commands: on rank 0, if the output is a terminal or --progress asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from tqdm import tqdm

from sparseallreduce.cli.compiling import announce_compiling
from sparseallreduce.cli.terminal import columns_of_terminal, has_terminal

__all__ = ["progress_bar", "progress_option", "shows_progress"]

Command = TypeVar("Command", bound=Callable[..., Any])

_KEY = "sparseallreduce.progress"


def progress_option() -> Callable[[Command], Command]:
    """Return the option ``--progress auto|on|off``, which :func:`progress_bar` evaluates; commands do not receive it."""
    what = "Show progress bars. auto: if the standard error is a terminal, or under mpiexec if COLUMNS and LINES are set."
    kind = click.Choice(["auto", "on", "off"])
    return click.option("--progress", type=kind, default="auto", show_default=True, expose_value=False, callback=_kept, help=what)


def _kept(context: click.Context, option: click.Parameter, choice: str) -> str:
    context.meta[_KEY] = choice
    announce_compiling(context, lambda: shows_progress(context))
    return choice


def shows_progress(context: click.Context | None = None) -> bool:
    """Return True if this process shows progress bars if it is rank 0, by a context, or by that of the current command."""
    context = context or click.get_current_context(silent=True)
    choice = "auto" if context is None else context.meta.get(_KEY, "auto")
    return choice == "on" or (choice == "auto" and has_terminal())


def progress_bar(comm: Any, **options: Any) -> Any:
    """Return a ``tqdm`` progress bar with these options, shown on rank 0 only."""
    shown = comm.rank == 0 and shows_progress()
    return tqdm(disable=not shown, leave=False, dynamic_ncols=columns_of_terminal() is None, ncols=columns_of_terminal(), **options)
