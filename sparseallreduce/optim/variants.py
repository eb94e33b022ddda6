"""The optimisers of the papers, which differ in the selection, the sum, and the place of the learning rate."""

from __future__ import annotations

from functools import partial
from typing import Any

from sparseallreduce.optim.optimizer import Optimizer
from sparseallreduce.reducers import Auto, GTopk, HiTopK, OkTopk, Reducer, ReducerChoice, TopkA, TopkDSA
from sparseallreduce.reducers.dense import Dense
from sparseallreduce.runtime.objects import collective
from sparseallreduce.streams.selection import ApproximateTopK, MSTopK
from sparseallreduce.streams.selection.seeds import seed_of

__all__ = ["ApproximateTopKSGD", "AutoSGD", "DenseSGD", "GTopkSGD", "HiTopKSGD", "MSTopKSGD", "OkTopkSGD", "TopKSGD"]


class DenseSGD(Optimizer):
    """Data-parallel SGD with a dense allreduce, the baseline. It has no density, and its residuals are zero."""

    name = "dense"

    def __init__(self, parameters: Any, learning_rate: Any, density: float = 1.0, comm: Any = None, **settings: Any) -> None:
        super().__init__(parameters, learning_rate, 1.0, comm, **settings)

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return Dense(size, k, **options)


class TopKSGD(Optimizer):
    """TopK SGD (thesis section 2.4, algorithm 2): each rank's k largest magnitudes, summed by a sparse allreduce.

    The thesis sums where this class takes the mean: its learning rate is 1/P of this one's. Options are those of
    :class:`~sparseallreduce.TopkDSA`: ``algorithm``, ``switch_density``, ``selector``.

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

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return TopkDSA(size, k, **options)


class ApproximateTopKSGD(Optimizer):
    """TopK SGD with the thesis's approximate selection (sections 2.4.1 and 4.3.3), with probabilities that grow with magnitudes.

    Options are those of :class:`~sparseallreduce.streams.selection.ApproximateTopK`: ``form``, ``bucket``, ``fixed``, ``seed``; and
    ``algorithm``, as of :class:`TopKSGD`. Each rank draws its own random numbers. Values are not divided by their probabilities: the
    residual keeps the rest.

    Use no momentum, and a rate 1 / (1 - momentum) times as high instead, if the model allows it. SGD is stable for curvatures up to 2 /
    rate without momentum, and up to 2 (1 + m) / rate with momentum m; if it diverges, try a momentum of 0.5. Use a density warm-up and
    ``bucket=None``: equal shares for all buckets do not reflect where the large values are.

    Notes
    -----
    A value waits about 1 / p_i steps until it is selected, even a large one, which the exact top k would select immediately. This is a
    delay in
    the feedback loop of gradient descent, and momentum is another one, of 1 / (1 - momentum) steps. With one delay the loop is damped. With
    both
    it oscillates with growing amplitude if the rate times the curvature, divided by 1 - momentum, exceeds p_i + 1 - momentum (the criterion
    of
    Routh and Hurwitz). Momentum correction changes only the order of the two delays.

    The table shows the loss after 40 epochs in which 4 ranks train the perceptron of the examples (`bench/lossy_training.py`), relative to
    dense
    SGD, with rate 0.05 and momentum 0.9, and with rate 0.5 and no momentum:

    ========================  =============  ============  ===============  ==============
    selection                 1 %, momentum  1 %, without  0.1 %, momentum  0.1 %, without
    ========================  =============  ============  ===============  ==============
    top k                     0.74           1.03          1.41             0.71
    "expected"                6.96           0.74          860              14.7
    "at most"                 17.9           0.74          860              14.7
    "expected", with warm-up                 0.94                           1.61
    "at most", with warm-up                  0.93                           1.20
    ========================  =============  ============  ===============  ==============
    """

    name = "approximate-topk"

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        options = {"algorithm": "ssar_split_allgather", "seed": 0, **options}
        algorithm, seed = options.pop("algorithm"), options.pop("seed")
        return TopkDSA(size, k, algorithm=algorithm, selector=partial(ApproximateTopK, seed=seed_of(seed, rank), **options))


class OkTopkSGD(Optimizer):
    """Ok-Topk SGD (Ok-Topk section 4, algorithm 2): the top k of the sum of the ranks' top k, with O(k) words per rank.

    Residuals hold gradients multiplied by their learning rates. Options are those of :class:`~sparseallreduce.OkTopk`:
    ``threshold_period``, ``boundary_period``, and so on. With ``adam``, as in section 5 for BERT, residuals hold gradients.
    """

    name = "oktopk"
    rate_first = True

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return OkTopk(size, k, **options)


class GTopkSGD(Optimizer):
    """S-SGD with gTop-k (gTop-k III-E, algorithm 4): the top k along a tree of ranks; values sent but not applied return to residuals."""

    name = "gtopk"

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return GTopk(size, k, **options)


class MSTopKSGD(Optimizer):
    """Top-k SGD with MSTopK's selection by a search for thresholds, and an allgather (CommLib section 3.1, algorithm 1).

    The options ``searches`` and ``seed`` are those of :class:`~sparseallreduce.streams.selection.MSTopK`.
    """

    name = "mstopk"

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return TopkA(size, k, selector=partial(MSTopK, **options))


class HiTopKSGD(Optimizer):
    """Top-k SGD by HiTopKComm: dense sums inside every host, MSTopK of them, and an allgather between hosts (CommLib section 3.2).

    The options ``searches`` and ``seed`` are those of :class:`~sparseallreduce.streams.selection.MSTopK`. Residuals are parts of a host's
    sum, one for each rank. With momentum correction, a rank's own velocity is set to zero where its host has sent values.
    """

    name = "hitopk"

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return HiTopK(size, k, selector=partial(MSTopK, **options))


class AutoSGD(Optimizer):
    """Top-k SGD with the reducer that is expected to be fastest for each summed vector: see :class:`~sparseallreduce.Auto`.

    The choice depends on sizes, density and network, and is the same on all ranks. Residuals hold gradients, whatever the choice. The
    options are ``candidates``, which restricts the choice, ``selector`` and ``threshold_period``. :meth:`explain` returns the choice and
    the predictions.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> w = np.zeros(4)
    >>> optimizer = AutoSGD(w, learning_rate=0.5, density=0.25, comm=sar.SERIAL, candidates=["gtopk", "oktopk"])
    >>> _ = optimizer.step(np.array([3.0, 0, 0, 2]))
    >>> w, [each.choice in ("gtopk", "oktopk") for each in optimizer.explain()]
    (array([-1.5,  0. ,  0. ,  0. ]), [True])
    """

    name = "auto"

    @classmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        return Auto(size, k, **options)

    @collective
    def explain(self) -> list[ReducerChoice]:
        """Return the predictions for each candidate, for each summed vector. Collective. ``print`` shows each as a table."""
        found = []
        for descent in self._descents:
            reducer = descent.feedback.reducer
            assert isinstance(reducer, Auto)
            found.append(reducer.explained(self.comm, descent.pack.dtype, descent.pack.on_device))
        return found
