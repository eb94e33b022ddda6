"""What benchmarks share: timing a call on all ranks, statistics of the times, and bitwise comparison of results."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.stalls import LongWait, blocked
from sparseallreduce.streams.operator import OPERATORS, Operator
from sparseallreduce.streams.stream import SparseStream

__all__ = ["checksum", "mpi_operator", "slowest", "spread", "timed", "timed_alone"]

Array = NDArray[Any]

_BARRIER = "the barrier before a measurement: MPI does not report which ranks have not entered it"


def timed(call: Callable[[], Any], comm: Any) -> float:
    """Return the seconds of a call on this rank, after a barrier; freeing the result is not included."""
    if comm.size > 1:
        with blocked(comm.rank, comm.size, _BARRIER):
            comm.Barrier()
    start = perf_counter()
    result = call()
    seconds = perf_counter() - start
    del result
    return seconds


def timed_alone(call: Callable[[], Any], comm: Any) -> float:
    """Return the seconds of a call on rank 0 while the other ranks sleep; the same on all ranks."""
    if comm.size == 1:
        return timed(call, comm)
    with blocked(comm.rank, comm.size, _BARRIER):
        comm.Barrier()
    start = perf_counter()
    if comm.rank == 0:
        call()
    seconds = perf_counter() - start
    done = comm.Ibarrier()
    wait = LongWait(lambda: (f"rank {comm.rank} of {comm.size}", "a measurement on rank 0 alone"))
    while not done.Test():
        sleep(1e-4)
        wait.check()
    wait.over()
    return float(comm.bcast(seconds))


def slowest(times: Array, comm: Any) -> Array:
    """Return the element-wise maximum over the ranks."""
    if comm.size == 1:
        return times
    found = np.empty_like(times)
    comm.Allreduce(times, found, mpi_operator(OPERATORS["max"]))
    return found


def spread(seconds: Any) -> dict[str, float]:
    """Return median and quartiles of times, by name."""
    lower, median, upper = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return {"median": median, "lower_quartile": lower, "upper_quartile": upper}


def checksum(stream: SparseStream) -> tuple[bool, int, int]:
    """Return a checksum that is equal for bitwise identical streams, and different for nearly all others."""
    parts = (stream.indices, stream.values) if not stream.is_dense else (stream._stored,)
    value = 0
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, value)
    return stream.is_dense, stream.stored, value


def mpi_operator(op: Operator) -> Any:
    """Return the MPI operator that corresponds to ``op``."""
    from mpi4py import MPI

    return getattr(MPI, op.name.upper())
