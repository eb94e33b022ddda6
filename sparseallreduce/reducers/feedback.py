"""Error feedback: what a reducer leaves out of one update is kept, and takes part in the next."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.reducers.base import Reduced, Reducer, no_indices
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Keeps the residual of one tensor around a reducer.

    Parameters
    ----------
    reducer : Reducer
    dtype : data-type, optional
        Of the residual, that of the gradients.

    Attributes
    ----------
    residual : ndarray, shape (size,)
        What has come in on this rank and was not applied yet: nothing is lost.
    contributed : ndarray
        Of the latest step: the indices of this rank's values that were applied.
    """

    def __init__(self, reducer: Reducer, dtype: DTypeLike = np.float32) -> None:
        self.reducer = reducer
        self.residual: NDArray[Any] = np.zeros(reducer.size, dtype)
        self.contributed = no_indices(reducer.size)

    def step(self, gradient: Any, comm: Any = None) -> SparseStream:
        """The mean over the ranks of what is selected of residuals and gradients."""
        reduced: Reduced = self.reducer.start(self.residual, gradient, comm, blocking=True).wait()
        self.contributed = reduced.contributed
        self.residual[reduced.contributed] = 0
        returned = self.reducer.returned
        assert returned is not None
        returned.add_to(self.residual)
        update = reduced.update
        mean = update._stored / update.dtype.type(1 if comm is None else comm.size)
        if update.is_dense:
            return SparseStream._dense_form(mean, update.size)
        return SparseStream._sparse_form(update.indices, mean, update.size)
