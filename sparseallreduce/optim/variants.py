"""The optimisers of the papers: they differ in what is selected, how it is summed, and where the learning rate comes in."""

from __future__ import annotations

from functools import partial
from typing import Any

from sparseallreduce.optim.dense import Dense
from sparseallreduce.optim.optimizer import Optimizer
from sparseallreduce.reducers import GTopk, OkTopk, Reducer, TopkA, TopkDSA
from sparseallreduce.streams.selection import ApproximateTopK, MSTopK
from sparseallreduce.streams.selection.seeds import seed_of

__all__ = ["ApproximateTopKSGD", "DenseSGD", "GTopkSGD", "MSTopKSGD", "OkTopkSGD", "TopKSGD"]


class DenseSGD(Optimizer):
    """Data-parallel SGD by a dense allreduce: the baseline. It takes no density; residuals are zero."""

    name = "dense"

    def __init__(self, parameters: Any, learning_rate: Any, density: float = 1.0, comm: Any = None, **settings: Any) -> None:
        super().__init__(parameters, learning_rate, 1.0, comm, **settings)

    def reducer(self, size: int, k: int) -> Reducer:
        return Dense(size, k, **self.options)


class TopKSGD(Optimizer):
    """TopK SGD (thesis section 2.4, algorithm 2): each rank's k largest magnitudes, summed by a sparse allreduce.

    The thesis adds up where this takes the mean: its rate is 1/P of ours. Options are those of :class:`~sparseallreduce.TopkDSA`:
    ``algorithm``, ``switch_density``, ``selector``.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> w = np.zeros(4)
    >>> optimizer = TopKSGD(w, learning_rate=0.5, density=0.25, comm=sar.SERIAL)
    >>> for _ in range(3):
    ...     _ = optimizer.step(np.array([3.0, 0, 0, 2]))
    >>> w, optimizer.residuals
    (array([-4.5,  0. ,  0. , -2. ]), [array([0., 0., 0., 2.])])
    """

    name = "topk"

    def reducer(self, size: int, k: int) -> Reducer:
        return TopkDSA(size, k, **self.options)


class ApproximateTopKSGD(Optimizer):
    """TopK SGD with the thesis's approximate selection (sections 2.4.1 and 4.3.3): each value with a probability by its magnitude.

    Options are those of :class:`~sparseallreduce.streams.selection.ApproximateTopK`: ``form``, ``bucket``, ``fixed``, ``seed``; and
    ``algorithm``, as of :class:`TopKSGD`. Each rank draws its own random numbers.
    """

    name = "approximate-topk"

    def reducer(self, size: int, k: int) -> Reducer:
        options = {"algorithm": "ssar_split_allgather", "seed": 0, **self.options}
        algorithm, seed = options.pop("algorithm"), options.pop("seed")
        return TopkDSA(size, k, algorithm=algorithm, selector=partial(ApproximateTopK, seed=seed_of(seed, self.comm.rank), **options))


class OkTopkSGD(Optimizer):
    """Ok-Topk SGD (Ok-Topk section 4, algorithm 2): the largest of the sum of the ranks' largest, for O(k) words a rank.

    Residuals are of gradients times their learning rates. Options are those of :class:`~sparseallreduce.OkTopk`:
    ``threshold_period``, ``boundary_period``, and so on. With ``adam``, as section 5 trains BERT, sums are of gradients.
    """

    name = "oktopk"
    rate_first = True

    def reducer(self, size: int, k: int) -> Reducer:
        return OkTopk(size, k, **self.options)


class GTopkSGD(Optimizer):
    """gTop-k S-SGD (gTop-k section III-E, algorithm 4): the k largest along a tree of ranks; what was sent in vain is put back."""

    name = "gtopk"

    def reducer(self, size: int, k: int) -> Reducer:
        return GTopk(size, k, **self.options)


class MSTopKSGD(Optimizer):
    """Top-k SGD with MSTopK's selection by a search of thresholds, and an allgather (CommLib section 3.1, algorithm 1).

    The options ``searches`` and ``seed`` are those of :class:`~sparseallreduce.streams.selection.MSTopK`.
    """

    name = "mstopk"

    def reducer(self, size: int, k: int) -> Reducer:
        return TopkA(size, k, selector=partial(MSTopK, **self.options))
