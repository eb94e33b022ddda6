"""Assign the GPUs of a host to its ranks."""

from __future__ import annotations

from typing import Any

from sparseallreduce.runtime.hosts import this_place
from sparseallreduce.runtime.objects import gather
from sparseallreduce.streams.kernels.backend import device_module
from sparseallreduce.streams.kernels.devices import local_rank, numbered

__all__ = ["local_device"]


def local_device(comm: Any = None, xp: Any = None) -> int:
    """Return the number of this rank's GPU, counted by CuPy among those in ``CUDA_VISIBLE_DEVICES``.

    The ranks of a host are assigned its GPUs in order, starting again from the first if there are more ranks than GPUs.
    :meth:`SparseStream.to_device` and ``bench --device gpu`` make this the current device unless CuPy was imported before. A program that
    imports CuPy selects it itself: ``cupy.cuda.Device(sar.local_device()).use()``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        Communicator whose ranks are counted; the call is then collective. By default the rank on its host is read from the launcher's
        environment, and a process without a launcher gets the first GPU.
    xp : module, optional
        CuPy by default.

    Returns
    -------
    int
        The number to pass to ``cupy.cuda.Device``.

    Raises
    ------
    StreamError
        If there is no GPU, or CuPy is not installed.
    """
    xp = xp or device_module()
    if comm is None:
        return numbered(local_rank(), xp)
    if comm.size == 1:
        return numbered(0, xp)
    hosts = gather(comm, this_place().host)
    return numbered(hosts[: comm.rank].count(hosts[comm.rank]), xp)
