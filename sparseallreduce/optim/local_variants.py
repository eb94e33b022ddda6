"""SparseLoCo, DiLoCo and local SGD for arrays of any framework: ranks take several steps alone, and then sum what these have changed.

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

    A sum has four parts. Each rank adds its change to what earlier sums left of it, times ``beta``; selects the largest values of each
    chunk; sends these, in 2 bits each; and keeps the rest, and what the 2 bits lack. The mean over the ranks is applied.

    Parameters
    ----------
    parameters, H, outer_lr, delay, fragments, progress, comm
        As for :class:`LocalSteps`.
    density : float
        The share of the parameters that a sum sends, above 0 and at most 1.
    beta : float
        What is left of earlier changes counts by this factor in each sum, above 0 and at most 1; it takes the place of momentum.
    codec : str
        How values travel: "qsgd2", "qsgd4", "qsgd8", "float16", "bfloat16" or "exact"; see :class:`~sparseallreduce.TopkA`.
    chunk : int
        Parameters in a chunk.
    """

    def __init__(
        self,
        parameters: Any,
        H: int = 30,
        density: float = 0.02,
        beta: float = 0.95,
        outer_lr: float = 1.0,
        codec: str = "qsgd2",
        chunk: int = 4096,
        **how: Any,
    ) -> None:
        self.density, self.beta, self.codec, self.chunk = density, beta, codec, chunk
        super().__init__(parameters, H, outer_lr=outer_lr, **how)

    def _check(self) -> None:
        super()._check()
        if not 0 < self.density <= 1:
            raise AlgorithmError(f"density is the share of the parameters that a sum sends, above 0 and at most 1, not {self.density}")

    def settings(self) -> dict[str, Any]:
        own = {"density": self.density, "beta": self.beta, "codec": self.codec, "chunk": self.chunk}
        return super().settings() | own

    def _new_sum(self, size: int) -> ChangeSum:
        return FeedbackSum(size, self._vector.dtype, self.density, self.beta, self.codec, self.chunk)


class DiLoCo(LocalSteps):
    """DiLoCo (Douillard et al., *DiLoCo: Distributed low-communication training of language models*, 2023, algorithm 1).

    The mean change of the ranks, which travels whole, is the gradient of an outer SGD with Nesterov's momentum.

    Parameters
    ----------
    parameters, H, outer_lr, delay, fragments, progress, comm
        As for :class:`LocalSteps`; the paper's outer rate is 0.7.
    outer_momentum : float
        Of the outer SGD, from 0 to below 1.
    nesterov : bool
        Whether that is Nesterov's.
    """

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
    """Local SGD (Stich, *Local SGD converges fast and communicates little*, 2019): after ``H`` steps parameters are set to their mean.

    Parameters
    ----------
    parameters, H, delay, fragments, progress, comm
        As for :class:`LocalSteps`.
    """

    def __init__(self, parameters: Any, H: int = 30, **how: Any) -> None:
        super().__init__(parameters, H, outer_lr=1.0, outer_momentum=0.0, nesterov=False, **how)
