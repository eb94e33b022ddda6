"""TopkDSA: the top k of every rank, summed by the dynamic sparse allreduce of the thesis, with fill-in (Ok-Topk section 2.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparseallreduce.algorithms import AUTO, FLAT, checked_options
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.reducers.base import Array, Reduced, Reducing
from sparseallreduce.reducers.local import LocalSelection
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.selection import ExactTopK, Selector

__all__ = ["TopkDSA"]


class TopkDSA(LocalSelection):
    """The sum of the ranks' top k by an exact sparse allreduce.

    By default a reduce-scatter and an allgather of streams, each of which becomes dense as soon as that is smaller. If no part is much
    larger than the others, a rank receives from 4 k (P - 1)/P words (the same indices on all ranks) to (2 k + N) (P - 1)/P (Ok-Topk table
    1), at (P - 1 + log2 P) alpha.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    algorithm : str
        Any of :func:`~sparseallreduce.algorithms` except "auto" and those by hosts; "dsar_split_allgather" always gathers dense parts.
    selector : callable, optional
        Returns the selector of each rank's values, given k; the exact top k by default.
    switch_density : float, optional
        Density above which streams become dense, by default and at most where the dense form is smaller.
    **options
        Options of the algorithm.

    Raises
    ------
    AlgorithmError
        If the algorithm or an option is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> accumulators = np.float32([[3, 0, -1, 0, 0], [0, 2, -4, 1, 0]])
    >>> out = sar.simulate(list(accumulators), algorithm=[sar.TopkDSA(5, k=2) for _ in range(2)])
    >>> out.outputs[0].update.to_dense()
    array([ 3.,  2., -5.,  0.,  0.], dtype=float32)
    """

    name = "topkdsa"

    def __init__(
        self,
        size: int,
        k: int,
        *,
        algorithm: str = "ssar_split_allgather",
        selector: Callable[[int], Selector] = ExactTopK,
        switch_density: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(size, k, selector=selector)
        self.algorithm_options: dict[str, Any] = checked_options(algorithm, options)
        if algorithm not in FLAT:
            needs = "a measured network" if algorithm == AUTO else "to know the hosts"
            raise AlgorithmError(f"algorithm {algorithm!r} needs {needs}: name one of {', '.join(FLAT)}")
        if switch_density is not None and not 0 <= switch_density <= 1:
            raise AlgorithmError(f"switch_density is a fraction of the size, from 0 to 1, not {switch_density!r}")
        self.algorithm = algorithm
        self.reduction: Reduction = Reduction(switch_density=switch_density)

    def options(self) -> dict[str, Any]:
        ours = {"algorithm": self.algorithm, "switch_density": self.reduction.switch_density, **self.algorithm_options}
        return super().options() | ours

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        chosen = self.select(accumulator, gradient)
        total = yield from FLAT[self.algorithm].run(chosen, rank, ranks, self.reduction, **self.algorithm_options)
        return Reduced(self.reduction.leave(total), chosen.indices)
