"""Run a PyTorch script that was written for ``torchrun`` with MPI's launcher.

Use it as ``mpiexec -n 4 python -m sparseallreduce.torch.run train.py ARGS``. The script finds the environment variables that ``torchrun``
sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so that its own call of ``torch.distributed.init_process_group`` works unchanged. If
one rank ends with an error, all ranks are ended, as with ``torchrun``.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from contextlib import redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import click

from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.launchers import launched_rank
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.runtime.output import flush_to_launcher
from sparseallreduce.torch.process_group import set_environment

__all__ = ["main"]

_INTERRUPTED = 130  # the exit status of a program that SIGINT has ended

_OF_TORCHRUN = {"--nproc-per-node", "--nproc_per_node", "--nnodes", "--standalone", "--rdzv-endpoint", "--rdzv_endpoint", "--node-rank"}


class _Command(click.Command):
    """A command that explains what replaces the options of torchrun."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Rank 0 alone prints the help, and what is wrong with them."""
        if launched_rank() == 0:
            return self._parsed(ctx, args)
        with redirect_stdout(StringIO()):
            try:
                return self._parsed(ctx, args)
            except click.UsageError as error:
                raise SystemExit(error.exit_code) from None

    def _parsed(self, ctx: click.Context, args: list[str]) -> list[str]:
        for each in args:
            if not each.startswith("-"):
                break
            option = each.partition("=")[0]
            if option in _OF_TORCHRUN:
                raise click.UsageError(f"{option} is torchrun's: mpiexec -n 4, or srun -n 4, says how many processes there are", ctx)
        return super().parse_args(ctx, args)


@click.command(cls=_Command, context_settings={"allow_interspersed_args": False})
@click.option("-m", "--module", is_flag=True, help="SCRIPT is the name of a module, as of python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(script: str, arguments: tuple[str, ...], module: bool) -> None:
    """Run SCRIPT with its ARGUMENTS on every rank, in the environment that torchrun would give it.

    Start it by mpiexec or srun: mpiexec -n 4 python -m sparseallreduce.torch.run train.py --lr 0.1
    """
    try:
        comm = resolve(None)
        set_environment(comm)
        agreed(comm, lambda: _find(script, module))
    except SparseAllreduceError as error:
        if launched_rank() == 0:
            raise click.ClickException(str(error)) from error
        raise SystemExit(1) from None
    sys.argv = [script, *arguments]
    try:
        _execute(script, module)
    except SystemExit as exit:
        if exit.code not in (None, 0):
            _end(comm, exit.code)
    except KeyboardInterrupt as error:
        _end(comm, _INTERRUPTED, error)
    except BaseException as error:
        _end(comm, 1, error)
    gather(comm, None, long_wait=True)  # rank 0 keeps the store open until no rank needs it


def _find(script: str, module: bool) -> None:
    """Set the path for imports, and raise an error if there is no such script or module."""
    sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    if not module:
        if not Path(script).exists():
            raise SparseAllreduceError(f"there is no file {script}: SCRIPT is a path, or with -m the name of a module")
        return
    try:
        found = find_spec(script) is not None
    except ModuleNotFoundError as error:
        found = not (error.name and script.startswith(error.name))
    except Exception:
        return  # raised again, with its traceback, where the module is executed
    if not found:
        raise SparseAllreduceError(f"there is no module {script} in {Path.cwd()} or among the installed packages")


def _execute(script: str, module: bool) -> None:
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


def _end(comm: Any, code: Any, error: BaseException | None = None) -> NoReturn:
    """End all ranks with an exit status, after printing the reason."""
    if error is not None:
        traceback.print_exception(type(error), error, _of_script(error.__traceback__))
    elif not isinstance(code, int):
        print(code, file=sys.stderr)
    status = code if isinstance(code, int) else 1
    if comm.size > 1:
        flush_to_launcher()
        comm.Abort(status)
    raise SystemExit(status)


def _of_script(found: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames before the script's own."""
    before = found
    while found is not None and found.tb_frame.f_code.co_filename.startswith((__file__, "<frozen runpy>")):
        found = found.tb_next
    return found or before


if __name__ == "__main__":
    main()
