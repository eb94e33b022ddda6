"""How commands fail: one line that says what is wrong and what to do, an exit status, and no rank left waiting."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any, NoReturn

import click

from sparseallreduce.cli.terminal import has_terminal, wrapped
from sparseallreduce.errors import LauncherError, MPIUnavailableError, SparseAllreduceError
from sparseallreduce.runtime.launchers import launched_rank
from sparseallreduce.runtime.output import flush_to_launcher

__all__ = ["end"]

FAILED = 1
BAD_ARGUMENTS = 2
_TAG = 32767  # the highest tag that every MPI supports; commands send no other point-to-point messages on COMM_WORLD
_SECONDS = 2.0  # how long a failed rank waits for the others to fail too


def end(error: Exception) -> NoReturn:
    """Print ``error`` and exit: with status 2 for bad arguments, 1 for all other errors.

    All ranks get the same arguments, so only rank 0 prints errors in them. If all ranks fail within a few seconds, each distinct message is
    printed once. If some ranks do not fail, they would wait for the failed ones forever, so the run is aborted.

    Raises
    ------
    SystemExit
    """
    if isinstance(error, click.UsageError):
        if launched_rank() == 0:
            _say(_usage(error))
        raise SystemExit(BAD_ARGUMENTS)
    text = _described(error)
    comm = _world_of_several()
    if comm is None:
        if launched_rank() == 0 or not isinstance(error, LauncherError | MPIUnavailableError):  # which all processes meet alike
            _say(text)
    else:
        _end_together(comm, text)
    raise SystemExit(FAILED)


def _usage(error: click.UsageError) -> str:
    where = error.ctx.command_path if error.ctx is not None else "sparseallreduce"
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"Error: {message}. See {where} --help"


def _say(text: str) -> None:
    """Write what is wrong: in one line, or in several where somebody reads it on a terminal of too few columns."""
    click.echo(wrapped(text) if has_terminal() else text, err=True)


def _described(error: Exception) -> str:
    if isinstance(error, click.Abort):
        return "Error: interrupted"
    if isinstance(error, click.ClickException):
        return f"Error: {_one_line(error.format_message())}"
    if isinstance(error, SparseAllreduceError):
        return f"Error: {_one_line(getattr(error, 'at_command_line', None) or str(error))}"
    if isinstance(error, OSError):
        return f"Error: {_one_line(_os_error(error))}"
    return "".join(traceback.format_exception(error)) + "Error: this is a bug in sparseallreduce; please report it with the lines above"


def _os_error(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}; check the path, its permissions and the space on the disk"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _world_of_several() -> Any:
    """Return ``COMM_WORLD`` if this command has initialised MPI and there are several ranks, else None."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.size == 1:
        return None
    return mpi.COMM_WORLD


def _end_together(comm: Any, text: str) -> None:
    """Return once every rank of ``comm`` is here and each distinct message is printed; abort after a timeout."""
    deadline = time.monotonic() + _SECONDS
    texts = {comm.rank: text}
    if comm.rank == 0:
        while len(texts) < comm.size and time.monotonic() < deadline:
            for source in range(comm.size):
                if comm.iprobe(source, _TAG):
                    texts[source] = comm.recv(source=source, tag=_TAG)
            time.sleep(0.001)
        for line in _gathered(texts, comm.size):
            _say(line)
        if len(texts) == comm.size:
            for dest in range(1, comm.size):
                comm.isend(None, dest, _TAG).Free()
            return
    else:
        request = comm.isend(text, 0, _TAG)
        while time.monotonic() < deadline + 1:
            request.test()
            if comm.iprobe(0, _TAG):
                comm.recv(source=0, tag=_TAG)
                return
            time.sleep(0.001)
        _say(_gathered(texts, comm.size)[0])
    flush_to_launcher()
    comm.Abort(FAILED)


def _gathered(texts: dict[int, str], ranks: int) -> list[str]:
    """Return each distinct text once, preceded by its ranks unless it is the same on all."""
    sources: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        sources.setdefault(text, []).append(rank)
    if len(texts) == ranks and len(sources) == 1:
        return list(sources)
    return [f"rank{'s' if len(where) > 1 else ''} {', '.join(map(str, where))}: {text}" for text, where in sources.items()]
