"""What the library has measured of a network, and what it concludes from that."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseallreduce.algorithms import AUTO
from sparseallreduce.algorithms.allreduce import PACKED, Call, begins
from sparseallreduce.algorithms.choose import choose
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.runtime.mpi import measured
from sparseallreduce.streams.operator import SUM, Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["machine_of", "taken_by_auto"]


def machine_of(comm: Any) -> Machine | None:
    """The constants measured on ``comm`` by its first operation, which this may be; None if it has one rank. Collective."""
    return None if comm.size == 1 else measured(comm)


def taken_by_auto(
    machine: Machine, size: int, entries: int, ranks: int, dtype: str = "float32", op: Operator = SUM, blocking: bool = False
) -> str:
    """The algorithm that "auto" takes for plain streams of ``entries`` on each of ``ranks``; short ones of a real network are gathered.

    Ranks that block take MPI's dense sum, or an allgather along with the agreement, as soon as they expect to.
    """
    reduction = Reduction(op)
    stream = SparseStream._sparse_form(np.empty(entries, index_dtype(size)), np.empty(entries, dtype), size)
    if entries > stream.switch_point:
        stream = SparseStream._dense_form(np.empty(size, dtype), size)
    if blocking and ranks > 1:
        begun = begins(Call(stream, op, AUTO, {}, None, None), ranks, reduction, machine)
        if begun:
            return "allgather" if begun == PACKED else "dense"
    return choose(stream, [entries] * ranks, reduction, machine)
