"""TopkA: every rank's top k, gathered on all ranks (Ok-Topk section 2.2, gTop-k algorithm 1)."""

from __future__ import annotations

from sparseallreduce.algorithms.allgather import allgather
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.reducers.local import LocalSelection

__all__ = ["TopkA"]


class TopkA(LocalSelection):
    """The sum of the ranks' top k by an allgather.

    Latency log2(P) alpha; every rank receives 2 k (P - 1) words. The sum has from k entries (the same on all ranks) to k P.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    selector : callable, optional
        Of each rank's values, made from k; the exact top k by default.
    hosts : bool
        Whether hosts are to be as ranks, as for :class:`~sparseallreduce.Reducer`.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0], [0, 2, -4, 1]])
    >>> out = sar.simulate(list(accumulators), algorithm=[sar.TopkA(4, k=1) for _ in range(2)])
    >>> out.outputs[0].update.to_dense(), out.outputs[1].contributed
    (array([ 3.,  0., -4.,  0.], dtype=float32), array([2], dtype=uint32))
    """

    name = "topka"

    def _flat(self, size: int, k: int) -> Reducer:
        return TopkA(size, k, selector=self._make_selector)

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        chosen = self.select(accumulator, gradient)
        total = yield from allgather(chosen, rank, ranks, self.reduction)
        return Reduced(self.reduction.leave(total), chosen.indices)
