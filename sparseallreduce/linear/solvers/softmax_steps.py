"""Newton steps for the softmax of many classes, by products with the second derivatives, which are not stored."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DivergenceError
from sparseallreduce.linear.kernels import newton as kernels
from sparseallreduce.linear.solvers.curvature import add_curvature
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather_results
from sparseallreduce.streams.stream import SparseStream

__all__ = ["SoftmaxSteps"]

Array = NDArray[Any]

_RESIDUAL = 0.3  # norm to which the residual of a step is reduced, as a fraction of its first norm
_MOST = 200  # largest number of products per step
_RIDGE = 1e-12  # fraction of the mean curvature added to it if there is no penalty


class SoftmaxSteps:
    """Solves for Newton steps by preconditioned conjugate gradients.

    The preconditioner of each class is the sum of ``x x^T`` times the class's mean curvature p (1 - p), plus the penalty. It is applied
    through the eigenvectors of that sum, which are computed once.

    Parameters
    ----------
    rows : tuple of ndarray
        Arrays of this rank's samples in the order of the kernels' arguments.
    place : int
        Position of the intercept, or -1.
    shares : ndarray
        Weight of each sample, as a fraction of the total over all ranks.
    size : int
        Number of weights per class.
    l2 : float
    comm : communicator
    """

    def __init__(self, rows: tuple[Array, ...], place: int, shares: Array, size: int, l2: float, comm: Any) -> None:
        self._rows, self._place, self._shares, self._comm = rows, place, shares, comm

        def own() -> Array:
            lower = np.zeros((size, size))
            add_curvature(rows, shares, place, lower)
            return lower

        lower = self._summed(agreed(comm, own))
        found = agreed(comm, lambda: _eigen(lower) if comm.rank == 0 else {})
        found = broadcast_arrays(comm, found) if comm.size > 1 else found
        self._sizes, self._basis = np.maximum(found["sizes"], 0.0), found["basis"]
        self.penalise(l2)

    def penalise(self, l2: float) -> None:
        """Set the penalty."""
        self._penalties = np.full((len(self._sizes), 1), l2)
        if self._place >= 0:
            self._penalties[self._place] = 0.0
        self._least = max(l2, _RIDGE * float(self._sizes.mean()), np.finfo(float).tiny)

    def products(self, weights: Array) -> Array:
        """Return the scores of this rank's samples."""
        out = np.empty((len(self._shares), weights.shape[1]))
        kernels.class_products(*self._rows, np.ascontiguousarray(weights), self._place, out)
        return out

    def slopes(self, slopes: Array, shape: tuple[int, int]) -> Array:
        """Return the sum of this rank's samples, each times its slopes and weight."""
        out = np.zeros(shape)
        kernels.add_class_slopes(*self._rows, slopes * self._shares[:, np.newaxis], self._place, out)
        return out

    def solved(self, slope: Array, probabilities: Array) -> Array:
        """Return the step that approximately minimises the second-order expansion, the same on every rank. Collective.

        Parameters
        ----------
        slope : ndarray, shape (size, K)
        probabilities : ndarray, shape (samples, K)
            Class probabilities of this rank's samples.

        Raises
        ------
        DivergenceError
            On all ranks, if a derivative is not finite.
        """
        own: Array = self._shares @ (probabilities * (1 - probabilities))
        curvatures = np.sum(gather_results(self._comm, lambda: own), axis=0)
        divisors = self._sizes[:, np.newaxis] * curvatures + self._least
        step, residual = np.zeros_like(slope), -slope
        scaled = self._divided(residual, divisors)
        direction, length = scaled, float((residual * scaled).sum())
        aim = _RESIDUAL**2 * length
        for _ in range(_MOST):
            image = self._image(direction, probabilities)
            curvature = float((direction * image).sum())
            ends = not (curvature > 0 and length > aim)
            if gather_results(self._comm, partial(bool, ends))[0]:  # rank 0 decides, because rounding errors may differ between ranks
                break
            stride = length / curvature
            step, residual = step + stride * direction, residual - stride * image
            scaled = self._divided(residual, divisors)
            before, length = length, float((residual * scaled).sum())
            direction = scaled + length / before * direction
        found = agreed(self._comm, lambda: {"step": step} if self._comm.rank == 0 else {})
        whole: Array = (broadcast_arrays(self._comm, found) if self._comm.size > 1 else found)["step"]
        if not math.isfinite(float((whole * slope).sum())):
            raise DivergenceError("a derivative is no longer a finite number: scale the values down, or raise l2")
        return whole

    def _divided(self, residual: Array, divisors: Array) -> Array:
        return np.asarray(self._basis @ ((self._basis.T @ residual) / divisors))

    def _image(self, direction: Array, probabilities: Array) -> Array:
        """Return the product of the objective's second derivatives with a direction. Collective."""

        def own() -> Array:
            out = np.zeros_like(direction)
            given = np.ascontiguousarray(direction)
            kernels.add_class_curvature(*self._rows, probabilities, self._shares, given, self._place, out)
            return out

        return np.asarray(self._summed(agreed(self._comm, own)) + self._penalties * direction)

    def _summed(self, own: Array) -> Array:
        if self._comm.size == 1:
            return own
        stream = SparseStream.from_dense(own.reshape(-1))
        return np.asarray(allreduce(stream, self._comm).to_dense()).reshape(own.shape)


def _eigen(lower: Array) -> dict[str, Array]:
    """Return the eigenvalues and eigenvectors of a symmetric matrix, given its lower triangle."""
    if not np.isfinite(lower).all():
        raise DivergenceError("a derivative is no longer a finite number: scale the values down, or raise l2")
    sizes, basis = np.linalg.eigh(lower)
    return {"sizes": sizes, "basis": np.ascontiguousarray(basis)}
