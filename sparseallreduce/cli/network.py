"""What the library has measured of a network, and the algorithms it chooses for it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.algorithms.choose import choose, problem_of
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.runtime.communicators import measured, shared_capacity
from sparseallreduce.runtime.predictions import expected_beginning
from sparseallreduce.streams.operator import SUM, Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["Taken", "capacity_of", "known_time", "machine_of", "taken_by_auto"]


class Taken(NamedTuple):
    """The algorithm that "auto" chooses, with or without shared memory."""

    algorithm: str
    shared: bool = False  # whether it uses shared memory

    def __str__(self) -> str:
        return self.algorithm + " in shared memory" * self.shared


def known_time(seconds: float) -> float | None:
    """Return a time of the cost model; None if the algorithm has no cost function, for which the model returns NaN."""
    return None if math.isnan(seconds) else float(seconds)


def machine_of(comm: Any) -> Machine | None:
    """Return the constants measured on ``comm``, measuring them if necessary; None if it has one rank. Collective."""
    return None if comm.size == 1 else measured(comm)


def capacity_of(comm: Any) -> int:
    """Return the size in bytes of streams that the ranks can reduce in shared memory, 0 if they share none. Collective."""
    return 0 if comm.size == 1 else shared_capacity(comm)


def taken_by_auto(
    machine: Machine,
    size: int,
    entries: int,
    ranks: int,
    dtype: str = "float32",
    op: Operator = SUM,
    blocking: bool = False,
    capacity: int = 0,
    hosts: Hosts | None = None,
    on_device: bool = False,
) -> Taken:
    """Return the algorithm that "auto" chooses for plain streams with ``entries`` entries on each of ``ranks`` ranks.

    On a real network short streams are gathered along with the agreement. In blocking operations ``auto`` may also choose MPI's dense
    allreduce, an allgather along with the agreement, or a reduction in shared memory with a ``capacity`` of so many bytes; with streams
    ``on_device`` it chooses none of these.
    """
    reduction = Reduction(op)
    stream = SparseStream._sparse_form(np.empty(entries, index_dtype(size)), np.empty(entries, dtype), size)
    if entries > stream.switch_point:
        stream = SparseStream._dense_form(np.empty(size, dtype), size)
    if blocking and ranks > 1 and not on_device:
        beginning = expected_beginning(stream, ranks, reduction, machine, capacity=capacity)
        if beginning == "sparse_shared":
            return Taken("ssar_split_allgather", shared=True)
        if beginning in ("packed", "dense"):
            return Taken("allgather" if beginning == "packed" else "dense")
    problem = problem_of(stream, entries, ranks, reduction, hosts=hosts)._replace(on_device=on_device)
    return Taken(choose(problem, machine))
