"""GaussianK: every rank's values beyond a threshold that a normal distribution suggests, gathered on all ranks (Ok-Topk section 2.2)."""

from __future__ import annotations

from functools import partial

from sparseallreduce.reducers.topka import TopkA
from sparseallreduce.streams.selection import Gaussian

__all__ = ["GaussianK"]


class GaussianK(TopkA):
    """TopkA's exchange of what Gaussian-k selects: about k values a rank, and a different number on each.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    least : float
        The share of k up to which the threshold is scaled down until more are selected (Ok-Topk section 5.4); 0 leaves it as it is.
    scale : float
        By which it is multiplied each time.

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
