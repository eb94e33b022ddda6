"""A line on the standard error that says that a command waits because kernels are compiled."""

from __future__ import annotations

import sys

import click

from sparseallreduce.cli.terminal import has_terminal, wrapped
from sparseallreduce.runtime.launchers import launched_rank
from sparseallreduce.streams.kernels.compilations import NOTICE, REMEDY, Compilations

__all__ = ["PROGRESS", "announce_compiling"]

PROGRESS = "sparseallreduce.progress"  # key of the choice of --progress in a context's meta
_PATIENCE, _PATIENCE_WITHOUT_TERMINAL = 1.0, 3.0  # seconds of compiling of which nothing is said


def announce_compiling(context: click.Context) -> None:
    """Have rank 0 say once, on the standard error, that kernels are compiled, if that takes long.

    It does so through the pipes of ``mpiexec``, too, unless the command has the option ``--progress off``.
    """

    def notify() -> None:
        from tqdm import tqdm  # here, as --help needs none of it

        tqdm.write(wrapped(text), file=sys.stderr)

    text = NOTICE if context.invoked_subcommand == "doctor" else f"{NOTICE}; {REMEDY}"
    compilations = Compilations(
        notify=notify,
        patience=_PATIENCE if has_terminal() else _PATIENCE_WITHOUT_TERMINAL,
        is_wanted=lambda: launched_rank() == 0 and context.meta.get(PROGRESS) != "off",
    )
    context.with_resource(compilations.counted())
