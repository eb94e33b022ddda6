"""The residuals of all ranks in a checkpoint: gathered as non-zeros on the first rank, and distributed to any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.objects import gather, gather_on_first
from sparseallreduce.streams.stream import index_dtype

__all__ = ["gathered", "own_share"]

Array = NDArray[Any]


def gathered(residual: Array, comm: Any) -> dict[str, Any]:
    """Return the residuals of all ranks as arrays by name, complete on the first rank only. Collective.

    ``residual_entries`` are the numbers of non-zeros of the ranks, ``residual_indices`` and ``residual_values`` hold them rank by rank.
    """
    indices = np.flatnonzero(residual).astype(index_dtype(len(residual)))
    entries = gather(comm, len(indices))
    return {
        "residual_entries": tuple(entries),
        "residual_indices": gather_on_first(comm, indices, entries),
        "residual_values": gather_on_first(comm, residual[indices], entries),
    }


def own_share(state: dict[str, Any], residual: Array, comm: Any) -> None:
    """Set ``residual`` to its value in ``state``, or to an equal share of the sum if ``state`` is from another number of ranks.

    In the latter case every rank gets the sum of all residuals divided by the number of ranks, so that nothing is lost.
    """
    entries = state["residual_entries"]
    bounds = np.cumsum([0, *entries])
    same_ranks = len(entries) == comm.size
    residual.fill(0)
    for rank in [comm.rank] if same_ranks else range(len(entries)):
        part = slice(bounds[rank], bounds[rank + 1])
        residual[state["residual_indices"][part]] += state["residual_values"][part]
    if not same_ranks:
        residual /= comm.size
