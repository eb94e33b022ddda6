"""Which GPU is whose, where a host has several, or several ranks share one."""

from __future__ import annotations

from typing import Any

from sparseallreduce.runtime.hosts import this_place
from sparseallreduce.runtime.objects import gather
from sparseallreduce.streams.kernels.backend import device_module
from sparseallreduce.streams.kernels.devices import local_rank, numbered

__all__ = ["local_device"]


def local_device(comm: Any = None, xp: Any = None) -> int:
    """The number of this rank's GPU, as CuPy counts those that ``CUDA_VISIBLE_DEVICES`` leaves.

    The ranks of a host take its GPUs in their order, and begin again from the first where there are more ranks than GPUs.
    :meth:`SparseStream.to_device` and ``bench --device gpu`` make it the current device if nobody has imported CuPy before. A program
    that imports CuPy says so itself: ``cupy.cuda.Device(sar.local_device()).use()``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        Whose ranks count; collective then. By default the launcher's environment tells the place of the rank on its host, and the first
        GPU is that of a process of which no launcher tells one.
    xp : module, optional
        CuPy by default.

    Raises
    ------
    StreamError
        If there is no GPU here, or CuPy is not installed.
    """
    xp = xp or device_module()
    if comm is None:
        return numbered(local_rank(), xp)
    if comm.size == 1:
        return numbered(0, xp)
    hosts = gather(comm, this_place().host)
    return numbered(hosts[: comm.rank].count(hosts[comm.rank]), xp)
