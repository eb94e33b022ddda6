"""The command line: ``sparseallreduce`` or ``python -m sparseallreduce``, under mpiexec or alone; one module per subcommand."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from sparseallreduce.cli.compiling import announce_compiling
from sparseallreduce.cli.failure import end
from sparseallreduce.runtime.launchers import launched_rank
from sparseallreduce.runtime.stalls import activity
from sparseallreduce.version import __version__

__all__ = ["main"]

# Descriptions of the subcommands by name. A subcommand, its module in this package and its function have the same name.
_SUBCOMMANDS = {
    "bench": "Measure every algorithm against the dense allreduce.",
    "train": "Train a linear model.",
    "predict": "Predict the samples of a file with a trained model.",
    "weights": "Show the largest weights of a model, by the names of their features.",
    "explain": "Show how much each feature contributes to the scores of samples.",
    "convert": "Convert svmlight text to the binary format.",
    "fetch": "Fetch a data set of the LIBSVM collection.",
    "generate": "Write a synthetic data set.",
    "simulate": "Run every algorithm on a simulated network with any number of ranks.",
    "plot": "Draw the reports of train, bench, simulate and figures.",
    "figures": "Reproduce the figures of the papers.",
    "doctor": "Show what MPI, threads, GPU and network this machine offers.",
}


class _Subcommands(click.Group):
    """A click group that imports a subcommand when it is called, and ends every failure with one line and an exit status."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _SUBCOMMANDS:
            return None
        command: click.Command = getattr(import_module(f"sparseallreduce.cli.{name}"), name)
        return command

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _SUBCOMMANDS:
            context.fail(f"there is no subcommand {args[0]!r}: use one of {', '.join(_SUBCOMMANDS)}")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Subcommands"):
            formatter.write_dl(list(_SUBCOMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any) -> NoReturn:
        if launched_rank() and not {"-h", "--help", "--version"}.isdisjoint(sys.argv[1:] if args is None else args):
            raise SystemExit(0)  # rank 0 answers
        command = next((name for name in (sys.argv[1:] if args is None else args) if name in _SUBCOMMANDS), "")
        try:
            with activity(f"the command {command}"):
                status = super().main(args, prog_name, *rest, **extra | {"standalone_mode": False})
        except Exception as error:
            end(error)
        raise SystemExit(status if isinstance(status, int) else 0)


@click.group(cls=_Subcommands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="sparseallreduce")
@click.pass_context
def main(context: click.Context) -> None:
    """Sparse allreduce over MPI: sum vectors with few non-zeros at a fraction of the cost of a dense allreduce.

    Every subcommand runs alone or under mpiexec, and has its own --help.
    """
    announce_compiling(context)
