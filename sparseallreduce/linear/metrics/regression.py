"""Metrics of regression over the samples of all ranks: errors and the coefficient of determination."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.objects import gather_results

__all__ = ["determination", "errors"]

Array = NDArray[Any]


def errors(labels: Array, predictions: Array, weights: Array, comm: Any) -> dict[str, float | None]:
    """Return R^2 and the mean absolute, mean squared and root mean squared error over all ranks' weighted samples. Collective.

    Parameters
    ----------
    labels, predictions, weights : ndarray of float64, shape (samples,)
        Those of this rank, which may have none.

    Raises
    ------
    ValueError
        On every rank, if all samples have weight zero.
    """

    def sums() -> tuple[float, float, float]:
        with np.errstate(over="ignore", invalid="ignore"):  # infinite values become None below
            differences = labels - predictions
            return float(weights.sum()), float(np.dot(weights, np.abs(differences))), float(np.dot(weights, differences**2))

    weight, absolute, squared = (sum(column) for column in zip(*gather_results(comm, sums), strict=True))
    if not weight > 0:
        raise ValueError("no rank has a sample with a weight other than zero")
    found = {"mae": absolute / weight, "mse": squared / weight, "rmse": math.sqrt(squared / weight)}
    return {"r2": determination(labels, predictions, weights, comm)} | {
        name: figure if math.isfinite(figure) else None for name, figure in found.items()
    }


def determination(labels: Array, predictions: Array, weights: Array, comm: Any) -> float | None:
    """Return the coefficient of determination R^2 over all ranks' weighted samples, or None for fewer than two. Collective.

    If all labels are equal, it is 1 if all predictions are exact, otherwise 0. Values are scaled by a power of two so that no square
    overflows, and the lowest label is subtracted first so that equal labels have a variance of exactly zero, whatever the weights.

    Parameters
    ----------
    labels, predictions, weights : ndarray of float64, shape (samples,)

    Raises
    ------
    ValueError
        On every rank, if all samples have weight zero.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> determination(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 2.0]), np.ones(3), sar.SERIAL)
    0.5
    """

    def sums() -> tuple[int, float, float, float]:
        largest = max(float(np.abs(each).max(initial=0.0)) for each in (labels, predictions))
        return len(labels), float(weights.sum()), largest, float(labels.min(initial=np.inf))

    samples, counted, largest, lowest = zip(*gather_results(comm, sums))
    weight, exponent = float(sum(counted)), -math.frexp(max(largest))[1] if math.isfinite(max(largest)) else 0
    if sum(samples) < 2:
        return None
    if not weight > 0:
        raise ValueError("no rank has a sample with a weight other than zero")
    labels, predictions = np.ldexp(labels, exponent), np.ldexp(predictions, exponent)
    above = labels - math.ldexp(min(lowest), exponent)
    mean = sum(gather_results(comm, lambda: float(np.dot(weights, above)))) / weight
    shares = gather_results(
        comm, lambda: (float(np.dot(weights, (labels - predictions) ** 2)), float(np.dot(weights, (above - mean) ** 2)))
    )
    unexplained, variance = (float(sum(column)) for column in zip(*shares))
    return 1 - unexplained / variance if variance > 0 else float(unexplained == 0)
