"""Progress bars of commands: on rank 0, if the output is a terminal or --progress asks for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click
from tqdm import tqdm

from sparseallreduce.cli.compiling import PROGRESS
from sparseallreduce.cli.terminal import columns_of_terminal, has_terminal, wrapped

__all__ = ["progress_bar", "progress_option", "shows_progress", "write_line"]

Command = TypeVar("Command", bound=Callable[..., Any])

_FORWARDED = 0.02  # seconds after which mpiexec has passed on what a rank has written


def progress_option() -> Callable[[Command], Command]:
    """Return the option ``--progress auto|on|off``, which :func:`progress_bar` evaluates; commands do not receive it."""
    what = (
        "Show progress bars. auto: if the standard error is a terminal, or under mpiexec if COLUMNS and LINES are set. "
        "off also omits the line that says that kernels are compiled."
    )
    kind = click.Choice(["auto", "on", "off"])
    return click.option("--progress", type=kind, default="auto", show_default=True, expose_value=False, callback=_kept, help=what)


def _kept(context: click.Context, option: click.Parameter, choice: str) -> str:
    context.meta[PROGRESS] = choice
    return choice


def shows_progress(context: click.Context | None = None) -> bool:
    """Return True if this process shows progress bars if it is rank 0, by a context, or by that of the current command."""
    context = context or click.get_current_context(silent=True)
    choice = "auto" if context is None else context.meta.get(PROGRESS, "auto")
    return choice == "on" or (choice == "auto" and has_terminal())


def progress_bar(comm: Any, **options: Any) -> Any:
    """Return a ``tqdm`` progress bar with these options, shown on rank 0 only."""
    shown = comm.rank == 0 and shows_progress()
    kind = tqdm if sys.stderr.isatty() else _PipedBar
    return kind(disable=not shown, leave=False, dynamic_ncols=columns_of_terminal() is None, ncols=columns_of_terminal(), **options)


def write_line(text: str) -> None:
    """Print a text above the bars of this process, wrapped to the width of the terminal."""
    text = wrapped(text)
    if shows_progress() and not sys.stderr.isatty():
        text = "\n".join(line.ljust(columns_of_terminal() or 0) for line in text.split("\n"))
    with tqdm.external_write_mode(file=sys.stdout):
        click.echo(text)


class _Returning:
    """A file in which the cursor goes back to the start of the line with each piece of text."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> None:
        self._file.write(f"{text}\r")

    def flush(self) -> None:
        self._file.flush()


class _PipedBar(tqdm):  # type: ignore[type-arg]  # generic in its stubs only
    """A bar that reaches a terminal through a pipe of mpiexec, which may deliver it before or after lines of the standard output.

    The cursor stays at the start of the bar, so that such a line replaces it in either case.
    """

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        return tqdm.status_printer(_Returning(file))

    def close(self) -> None:
        was_open = not self.disable
        super().close()
        if was_open:
            time.sleep(_FORWARDED)
