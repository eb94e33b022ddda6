"""The residuals of all ranks in a checkpoint: each as its non-zeros, gathered on the first rank, and given back to any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.objects import gather, gather_on_first
from sparseallreduce.streams.stream import index_dtype

__all__ = ["gathered", "own_share"]

Array = NDArray[Any]


def gathered(residual: Array, comm: Any) -> dict[str, Any]:
    """The residuals of all ranks, as arrays by name, whole on the first rank alone; collective.

    ``residual_entries`` counts the non-zeros of each rank, which ``residual_indices`` and ``residual_values`` hold, rank by rank.
    """
    indices = np.flatnonzero(residual).astype(index_dtype(len(residual)))
    entries = gather(comm, len(indices))
    return {
        "residual_entries": tuple(entries),
        "residual_indices": gather_on_first(comm, indices, entries),
        "residual_values": gather_on_first(comm, residual[indices], entries),
    }


def own_share(state: dict[str, Any], residual: Array, comm: Any) -> None:
    """Make ``residual`` what it was when ``state`` was taken, or this rank's share if that was by another number of ranks.

    Then every rank gets an equal part of the sum of all residuals: nothing is lost, and no rank has more to say than another.
    """
    entries = state["residual_entries"]
    bounds = np.cumsum([0, *entries])
    alike = len(entries) == comm.size
    residual.fill(0)
    for rank in [comm.rank] if alike else range(len(entries)):
        part = slice(bounds[rank], bounds[rank + 1])
        residual[state["residual_indices"][part]] += state["residual_values"][part]
    if not alike:
        residual /= comm.size
