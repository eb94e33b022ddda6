"""SparseLoCo, DiLoCo and local SGD for arrays of any framework: ranks make several steps and then combine their changes.

>>> import numpy as np
>>> import sparseallreduce as sar
>>> weights = np.ones(1000, np.float32)
>>> local = SparseLoCo(weights, H=10, density=0.05, comm=sar.SERIAL)       # under mpiexec without comm
>>> for _ in range(30):
...     weights -= 0.01 * weights                 # a step of this rank, by any rule
...     local.step()
>>> local.sums
3
"""

from __future__ import annotations

from typing import Any

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim.local_steps import LocalSteps
from sparseallreduce.optim.local_sums import ChangeSum, FeedbackSum, MomentumSum

__all__ = ["DiLoCo", "LocalSGD", "SparseLoCo"]


class SparseLoCo(LocalSteps):
    """SparseLoCo (Sarfi et al., *Communication efficient LLM pre-training with SparseLoCo*, 2025, algorithm 1).

    A sum has four parts. Each rank adds its change to ``beta`` times its residual; selects the values of largest magnitude in each chunk;
    sends them with 2 bits each; and keeps the other values and the quantisation error in the residual. All ranks apply the mean.

    Parameters
    ----------
    parameters, H, outer_lr, delay, fragments, progress, warmup, comm
        See :class:`LocalSteps`.
    density : float
        The share of the parameters that a sum sends, above 0 and at most 1.
    beta : float
        The factor of the residual in each sum, above 0 and at most 1. It takes the place of momentum.
    codec : str
        The encoding of the values: "qsgd2", "qsgd4", "qsgd8", "float16", "bfloat16" or "exact"; see :class:`~sparseallreduce.TopkA`.
    chunk : int
        The number of parameters in a chunk.
    average : str
        What all ranks apply of a parameter: "senders", the mean of the values that were sent for it, as the authors' program does; or
        "ranks", the sum of these values divided by the number of ranks, as algorithm 1 says. At small densities few ranks send the same
        parameter, so that a mean over all ranks makes much smaller steps.
    """

    density: float
    beta: float
    codec: str
    chunk: int
    average: str

    def __init__(
        self,
        parameters: Any,
        H: int = 30,
        density: float = 0.02,
        beta: float = 0.95,
        outer_lr: float = 1.0,
        codec: str = "qsgd2",
        chunk: int = 4096,
        average: str = "senders",
        **how: Any,
    ) -> None:
        self.density, self.beta, self.codec, self.chunk, self.average = density, beta, codec, chunk, average
        super().__init__(parameters, H, outer_lr=outer_lr, **how)

    def _check(self) -> None:
        super()._check()
        if not 0 < self.density <= 1:
            raise AlgorithmError(f"density is the share of the parameters that a sum sends, above 0 and at most 1, not {self.density}")

    def settings(self) -> dict[str, Any]:
        own = {"density": self.density, "beta": self.beta, "codec": self.codec, "chunk": self.chunk, "average": self.average}
        return super().settings() | own

    def _new_sum(self, size: int) -> ChangeSum:
        return FeedbackSum(size, self._vector.dtype, self.density, self.beta, self.codec, self.chunk, self.average)


class DiLoCo(LocalSteps):
    """DiLoCo (Douillard et al., *DiLoCo: Distributed low-communication training of language models*, 2023, algorithm 1).

    The mean change of the ranks, which is sent in full, is the gradient of an outer SGD with Nesterov momentum.

    Parameters
    ----------
    parameters, H, outer_lr, delay, fragments, progress, warmup, comm
        See :class:`LocalSteps`. The paper uses an ``outer_lr`` of 0.7.
    outer_momentum : float
        The momentum of the outer SGD, at least 0 and below 1.
    nesterov : bool
        Whether the outer SGD uses Nesterov momentum.
    """

    outer_momentum: float
    nesterov: bool

    def __init__(
        self, parameters: Any, H: int = 30, outer_lr: float = 0.7, outer_momentum: float = 0.9, nesterov: bool = True, **how: Any
    ) -> None:
        self.outer_momentum, self.nesterov = outer_momentum, nesterov
        super().__init__(parameters, H, outer_lr=outer_lr, **how)

    def _check(self) -> None:
        super()._check()
        if not 0 <= self.outer_momentum < 1:
            raise AlgorithmError(f"outer_momentum is from 0 to below 1, not {self.outer_momentum}")

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"outer_momentum": self.outer_momentum, "nesterov": self.nesterov}

    def _new_sum(self, size: int) -> ChangeSum:
        return MomentumSum(self.outer_momentum, self.nesterov)


class LocalSGD(DiLoCo):
    """Local SGD (Stich, *Local SGD converges fast and communicates little*, 2019), which averages the parameters after every ``H`` steps.

    Parameters
    ----------
    parameters, H, delay, fragments, progress, warmup, comm
        See :class:`LocalSteps`.
    """

    def __init__(self, parameters: Any, H: int = 30, **how: Any) -> None:
        super().__init__(parameters, H, outer_lr=1.0, outer_momentum=0.0, nesterov=False, **how)
