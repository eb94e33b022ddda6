"""GaussianK: values of every rank beyond a threshold from a normal distribution, gathered on all ranks (Ok-Topk section 2.2)."""

from __future__ import annotations

from functools import partial

from sparseallreduce.reducers.topka import TopkA
from sparseallreduce.streams.selection import Gaussian

__all__ = ["GaussianK"]


class GaussianK(TopkA):
    """The sum of the values that Gaussian-k selects on each rank, about k and a different number on each, by TopkA's allgather.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    least : float
        The threshold is scaled down until more than this fraction of k is selected (Ok-Topk section 5.4); 0 disables scaling.
    scale : float
        Factor of each scaling.

    Raises
    ------
    StreamError
        If an option is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> sar.GaussianK(6, k=2).allreduce(np.array([0.1, -3.0, 0.2, 0.1, 2.0, -0.1]), sar.SERIAL).contributed
    array([1, 4], dtype=uint32)
    """

    name = "gaussiank"

    def __init__(self, size: int, k: int, *, least: float = 0.75, scale: float = 0.95) -> None:
        super().__init__(size, k, selector=partial(Gaussian, least=least, scale=scale))
