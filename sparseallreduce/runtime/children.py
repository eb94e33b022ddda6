"""Detect processes that a rank has started, such as workers of a pool or of a DataLoader: they inherit much of MPI but are not ranks.

A process can tell in three ways:

* The operating system calls a hook in a forked process. If MPI was running in the parent, the child must not use any of it.
* Workers of :mod:`multiprocessing`, joblib and PyTorch's DataLoader have a parent process recorded in Python. No launcher starts such.
* Any other Python program started by a rank, for example through :mod:`subprocess`, inherits the launcher's environment variables and a
  mark that the library leaves in the environment of a rank. The mark says which process is the rank and how it was launched. If the
  launcher's variables differ from the mark (another job or another socket), the process was launched anew, for example by an mpiexec that
  the rank has started.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sparseallreduce.errors import ForkError
from sparseallreduce.runtime.processes import started_at

__all__ = ["MARK", "after_fork", "check_generation", "generation", "group_variables", "is_child", "is_parents_group", "mark"]

MARK = "SPARSEALLREDUCE_RANK_PROCESS"

# Variables that identify a launch and a rank in it: of PMI, PMIx, Open MPI, hydra, PALS, Slurm, Flux, JSM.
_IDENTITY = (
    *("PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID", "PMI_RANK", "PMI_SIZE"),
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "PALS_APID", "PALS_RANKID", "SLURM_STEP_ID", "FLUX_JOB_ID", "FLUX_TASK_RANK"),
    *("JSM_NAMESPACE_ID", "JSM_NAMESPACE_RANK"),
)
_IN_A_STEP = ("SLURM_JOB_ID", "SLURM_PROCID")  # also set in a batch script, which srun has not started
_GROUP = ("RANK", "WORLD_SIZE")  # of PyTorch

generation: int = 0  # number of forks, from ranks that ran MPI, that lead to this process
_child: bool | None = None  # whether this process is a child of a rank; None until determined
_marked = False


class _Parent(NamedTuple):
    """What is known of the process that started this one."""

    ranks: int = 1  # size of its COMM_WORLD
    variables: Mapping[str, str | None] = MappingProxyType({})  # PyTorch's variables for its place in a process group
    has_group: bool = False  # whether this process inherited its process group


_parent = _Parent()


def is_child() -> bool:
    """Return True if a rank has started this process, so that it is no rank."""
    global _child
    if _child is None:
        marked = _carries_anothers_mark()
        _child = generation > 0 or marked or _is_worker()
    return _child


def mark() -> None:
    """Leave a mark in the environment of a process that runs MPI, by which the Python programs that it starts recognise it."""
    global _marked
    if _marked or is_child():
        return
    _marked = True
    launch = _launch()
    if launch:  # without a launcher there is nothing that a child could mistake for its own
        process, ranks = os.getpid(), sys.modules["mpi4py.MPI"].COMM_WORLD.size
        found = {"process": [process, started_at(process)], "ranks": ranks, "launch": launch, "group": group_variables()}
        os.environ[MARK] = json.dumps(found)


def group_variables() -> dict[str, str | None]:
    """Return the environment variables that define this process's place in PyTorch's process group."""
    return {name: os.environ.get(name) for name in _GROUP}


def is_parents_group(has_group: bool) -> bool:
    """Return True if this process inherited its process group from its parent.

    With ``has_group`` PyTorch's process group itself is meant, otherwise the environment variables that describe it.
    """
    if has_group:
        return _parent.has_group
    variables = group_variables()
    return variables == _parent.variables or variables["WORLD_SIZE"] == str(_parent.ranks)


def check_generation(made: int, what: str) -> None:
    """Check that an object created in generation ``made`` belongs to this process.

    Raises
    ------
    ForkError
        If it belongs to a process from which this one was forked.
    """
    if made != generation:
        raise ForkError(
            f"{what} belongs to the rank from which this process was forked, and means nothing here: leave out comm to compute alone, or "
            "pass sparseallreduce.SERIAL, and make reducers and plans anew"
        )


def after_fork() -> bool:
    """Record the parent's state in a forked process; return True if MPI was running in the parent."""
    global generation, _child, _parent
    mpi = sys.modules.get("mpi4py.MPI")
    running = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    _child = None
    generation += running
    _parent = _Parent(mpi.COMM_WORLD.size if mpi is not None and running else 1, group_variables(), _has_group())
    return running


def _has_group() -> bool:
    """Return True if PyTorch's process group is initialised."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _is_worker() -> bool:
    """Return True if this process was started by multiprocessing or a library based on it."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _carries_anothers_mark() -> bool:
    """Return True if the environment holds the mark of another process that was launched in the same way as this one."""
    global _parent
    try:
        found = json.loads(os.environ.get(MARK, ""))
        process, start = found["process"]
        launched, parent = dict(found["launch"]), _Parent(int(found["ranks"]), dict(found["group"]))
    except (ValueError, TypeError, KeyError):
        return False
    own = os.getpid()
    if (process, start) == (own, started_at(own)):  # the same process, which has replaced its program by exec
        return False
    if any(launched.get(name) != value for name, value in _launch().items()):
        return False
    if _parent == _Parent():
        _parent = parent
    return True


def _launch() -> dict[str, str]:
    """Return the launcher's variables that identify this process's launch; empty if no launcher has started it."""
    names = _IDENTITY + (_IN_A_STEP if "SLURM_STEP_ID" in os.environ else ())
    variables = {name: os.environ[name] for name in names if name in os.environ}
    socket = _socket(variables.get("PMI_FD", ""))
    return variables | ({"socket": socket} if socket else {})


def _socket(descriptor: str) -> str:
    """Return an identifier of the launcher's socket that is unique on this host, or an empty string if it is closed."""
    try:
        status = os.fstat(int(descriptor))
    except (OSError, ValueError):
        return ""
    return f"{status.st_dev}:{status.st_ino}" if stat.S_ISSOCK(status.st_mode) else ""
