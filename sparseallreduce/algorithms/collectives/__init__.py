"""The collectives besides allreduce: reduce, reduce_scatter, allgather and bcast, composed of the same steps as allreduces.

An algorithm is a generator of (stream, rank, ranks, reduction, **details), as those of allreduce are. ``docs/algorithms.md`` describes each
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable

from sparseallreduce.algorithms.collectives.allgather import allgather_doubling, allgather_ring
from sparseallreduce.algorithms.collectives.bcast import bcast_scatter, bcast_tree
from sparseallreduce.algorithms.collectives.reduce import reduce_split, reduce_tree
from sparseallreduce.algorithms.collectives.reduce_scatter import reduce_scatter_halving, reduce_scatter_split
from sparseallreduce.algorithms.steps import Schedule

__all__ = ["COLLECTIVES"]

#: The algorithms of each collective by the name that ``algorithm=`` accepts.
COLLECTIVES: dict[str, dict[str, Callable[..., Schedule]]] = {
    "reduce": {"tree": reduce_tree, "split": reduce_split},
    "reduce_scatter": {"halving": reduce_scatter_halving, "split": reduce_scatter_split},
    "allgather": {"doubling": allgather_doubling, "ring": allgather_ring},
    "bcast": {"tree": bcast_tree, "scatter": bcast_scatter},
}
