"""Processes that a rank has started, such as workers of a pool or of a DataLoader: they inherit much of MPI, and are no ranks.

How a process knows that it is one:

* The system tells who was forked. After a rank that had MPI running, nothing of MPI may be used any more.
* Workers of :mod:`multiprocessing`, of joblib and of PyTorch's DataLoader know that they have a parent process. No launcher starts such.
* Any other Python program that a rank has started, as by :mod:`subprocess`, inherits the variables of the rank's launcher, and a mark that
  the library leaves in the environment of a rank. The mark says which process is the rank, and how it was launched. Who finds it there
  was launched anew, as by an mpiexec that a rank has started, if the launcher tells it anything else: another job, or another socket.
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

# What tells one launch, and one rank of it, from others: of PMI, PMIx, Open MPI, hydra, PALS, Slurm, Flux, JSM.
_IDENTITY = (
    *("PMI_FD", "PMI_PORT", "PMI_ID", "PMI_JOBID", "PMI_RANK", "PMI_SIZE"),
    *("PMIX_NAMESPACE", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "PALS_APID", "PALS_RANKID", "SLURM_STEP_ID", "FLUX_JOB_ID", "FLUX_TASK_RANK"),
    *("JSM_NAMESPACE_ID", "JSM_NAMESPACE_RANK"),
)
_IN_A_STEP = ("SLURM_JOB_ID", "SLURM_PROCID")  # which a batch script has, too, that no srun has started
_GROUP = ("RANK", "WORLD_SIZE")  # of PyTorch

generation = 0  # how often this process, or one before it, was forked from a rank that had MPI running
_child: bool | None = None  # whether it is a child of a rank; None until that is asked for
_marked = False


class _Parent(NamedTuple):
    """What the process was that has started this one, as far as is known."""

    ranks: int = 1  # of its COMM_WORLD
    variables: Mapping[str, str | None] = MappingProxyType({})  # by which PyTorch knew its place in a process group
    has_group: bool = False  # whether this process has its process group


_parent = _Parent()


def is_child() -> bool:
    """Return True if a rank has started this process, so that it is no rank."""
    global _child
    if _child is None:
        marked = _carries_anothers_mark()
        _child = generation > 0 or marked or _is_worker()
    return _child


def mark() -> None:
    """Leave a mark in the environment of a process that has MPI running, by which the Python programs that it starts know that it did."""
    global _marked
    if _marked or is_child():
        return
    _marked = True
    launch = _launch()
    if launch:  # of a process that nobody launched there is nothing that another could take for its own
        process, ranks = os.getpid(), sys.modules["mpi4py.MPI"].COMM_WORLD.size
        found = {"process": [process, started_at(process)], "ranks": ranks, "launch": launch, "group": group_variables()}
        os.environ[MARK] = json.dumps(found)


def group_variables() -> dict[str, str | None]:
    """Return the environment variables that tell a process its place in PyTorch's process group."""
    return {name: os.environ.get(name) for name in _GROUP}


def is_parents_group(has_group: bool) -> bool:
    """Return True if the environment variables of PyTorch, or with ``has_group`` its process group, were those of the parent already."""
    if has_group:
        return _parent.has_group
    variables = group_variables()
    return variables == _parent.variables or variables["WORLD_SIZE"] == str(_parent.ranks)


def check_generation(made: int, what: str) -> None:
    """Check that an object that was made in some generation belongs to this process.

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
    """Take note, in a forked process, of what its parent was; return True if MPI was running there."""
    global generation, _child, _parent
    mpi = sys.modules.get("mpi4py.MPI")
    running = mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized()
    _child, generation = None, generation + running
    _parent = _Parent(mpi.COMM_WORLD.size if mpi is not None and running else 1, group_variables(), _has_group())
    return running


def _has_group() -> bool:
    """Return True if PyTorch's process group is there."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _is_worker() -> bool:
    """Return True if multiprocessing has started this process, or what builds on it."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _carries_anothers_mark() -> bool:
    """Return True if a rank has left its mark here, is another process than this one, and was launched as it seems that this one was."""
    global _parent
    try:
        found = json.loads(os.environ.get(MARK, ""))
        process, start = found["process"]
        launched, parent = dict(found["launch"]), _Parent(int(found["ranks"]), dict(found["group"]))
    except (ValueError, TypeError, KeyError):
        return False
    own = os.getpid()
    if (process, start) == (own, started_at(own)):  # another program of the same process, by exec
        return False
    if any(launched.get(name) != value for name, value in _launch().items()):
        return False
    if _parent == _Parent():
        _parent = parent
    return True


def _launch() -> dict[str, str]:
    """Return what the launcher has told this process, empty if none has started it."""
    names = _IDENTITY + (_IN_A_STEP if "SLURM_STEP_ID" in os.environ else ())
    told = {name: os.environ[name] for name in names if name in os.environ}
    socket = _socket(told.get("PMI_FD", ""))
    return told | ({"socket": socket} if socket else {})


def _socket(descriptor: str) -> str:
    """Return what tells the socket to the launcher from all others of this host; an empty string if it is closed."""
    try:
        status = os.fstat(int(descriptor))
    except (OSError, ValueError):
        return ""
    return f"{status.st_dev}:{status.st_ino}" if stat.S_ISSOCK(status.st_mode) else ""
