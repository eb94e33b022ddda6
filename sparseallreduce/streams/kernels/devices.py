"""Determine this rank's GPU and the CUDA stream of a thread."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

__all__ = ["LOCAL_RANKS", "Queue", "local_rank", "numbered"]

# Variables with the number of a process on its host: of MPICH and Intel MPI, Open MPI, MVAPICH, Cray PALS, IBM's jsrun, Flux, torchrun,
# Slurm. Those of MPI libraries come first, since srun also sets its own for an mpiexec that it starts.
LOCAL_RANKS = (
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "JSM_NAMESPACE_LOCAL_RANK",
    "FLUX_TASK_LOCAL_ID",
    "LOCAL_RANK",
    "SLURM_LOCALID",
)


def local_rank(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of this process on its host, as set by its launcher; 0 without one.

    Examples
    --------
    >>> local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}), local_rank({})
    (3, 0)
    """
    environment = os.environ if environment is None else environment
    variable = next((environment[name] for name in LOCAL_RANKS if environment.get(name, "").isdecimal()), "0")
    return int(variable)


def numbered(place: int, xp: Any) -> int:
    """Return the GPU of process ``place`` of a host; GPUs are assigned in order, and reused if there are fewer than processes."""
    return place % max(1, int(xp.cuda.runtime.getDeviceCount()))


class Queue:
    """The device and CUDA stream that are current in a thread, to be made current elsewhere by ``with queue``.

    Work on a GPU is ordered by its stream. An operation works on the stream that was current when it was called, in whichever thread it
    progresses.
    """

    device: Any
    stream: Any

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.device, self.stream = xp.cuda.Device(), xp.cuda.get_current_stream()

    def room(self, lengths: Iterable[int]) -> list[Any]:
        """Return device arrays of these sizes in bytes, which other streams may write to immediately."""
        with self:
            arrays = [self.xp.empty(length, np.uint8) for length in lengths]
            self.stream.synchronize()  # kernels may still read earlier arrays in the same memory
        return arrays

    def __enter__(self) -> Queue:
        self.device.__enter__()
        try:
            self.stream.__enter__()
        except BaseException:
            self.device.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.stream.__exit__(kind, error, traceback)
        finally:
            self.device.__exit__(kind, error, traceback)
