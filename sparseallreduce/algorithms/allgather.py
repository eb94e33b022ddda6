"""The allgather baseline: gather the streams of all ranks, reduce locally (thesis section 3.3.1)."""

from __future__ import annotations

from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["allgather"]


def allgather(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
    """Gather the streams of all ranks on every rank and add them there, as PyTorch and Horovod do with sparse gradients.

    Latency log2(P) alpha, bandwidth (P - 1) k beta, whatever the overlap of the indices; every rank adds all P streams.
    """
    return reduction.same_nans(reduction.many((yield from gather_parts(stream, rank, ranks))))
