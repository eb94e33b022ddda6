"""Which GPU is this rank's, and on which of its streams a thread's work goes: what the array module is asked besides arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

__all__ = ["LOCAL_RANKS", "Queue", "local_rank", "numbered"]

# What launchers tell a process of its place among those of its host: MPICH and Intel MPI, Open MPI, MVAPICH, Cray PALS, IBM's jsrun, Flux,
# torchrun, Slurm. Those of the MPI library come first: srun sets its own for mpiexec, too, where it starts that.
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
    """The place of this process among those of its host, as its launcher tells; 0 if none does.

    >>> local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}), local_rank({})
    (3, 0)
    """
    environment = os.environ if environment is None else environment
    told = next((environment[name] for name in LOCAL_RANKS if environment.get(name, "").isdecimal()), "0")
    return int(told)


def numbered(place: int, xp: Any) -> int:
    """The number of the GPU of the process at a place on its host: one after the other, and again from the first where there are fewer."""
    return place % max(1, int(xp.cuda.runtime.getDeviceCount()))


class Queue:
    """A device and the stream on it that are current in a thread, to be current again elsewhere: ``with queue``.

    What is known of the order of work on a GPU is the order on its streams. An operation does its work on the stream that was current when
    it was called, whichever thread moves it on.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.device, self.stream = xp.cuda.Device(), xp.cuda.get_current_stream()

    def room(self, lengths: Iterable[int]) -> list[Any]:
        """Arrays of so many bytes each, which others than this stream may write to at once."""
        with self:
            arrays = [self.xp.empty(length, np.uint8) for length in lengths]
            self.stream.synchronize()  # their memory may be that of arrays which kernels still read
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
