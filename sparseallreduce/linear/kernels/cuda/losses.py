"""Derivatives of losses with respect to the score on a GPU, one thread per score, or for a softmax per sample."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.streams.kernels.cuda.launching import BLOCK, device, kernel, launch

__all__ = ["SLOPES", "coefficients", "softmax_coefficients"]

_HIGHEST = 80.0  # largest score that is exponentiated, as in models.Poisson


@device
def _log(score: Any, label: Any, parameter: Any) -> Any:
    margin = label * score
    if margin >= 0.0:  # each branch takes the exponential that does not overflow
        small = math.exp(-margin)
        found = -label * small / (1.0 + small)
    else:
        found = -label / (1.0 + math.exp(margin))
    return found


@device
def _hinge(score: Any, label: Any, parameter: Any) -> Any:
    found = 0.0
    if label * score < 1.0:
        found = -label
    return found


@device
def _squared_hinge(score: Any, label: Any, parameter: Any) -> Any:
    violation = 1.0 - label * score
    if violation < 0.0:
        violation = 0.0
    return -2.0 * label * violation


@device
def _squared(score: Any, label: Any, parameter: Any) -> Any:
    return score - label


@device
def _huber(score: Any, label: Any, parameter: Any) -> Any:
    error = score - label
    if error > parameter:
        error = parameter
    elif error < -parameter:
        error = -parameter
    return error


@device
def _quantile(score: Any, label: Any, parameter: Any) -> Any:
    found = 0.0
    if score < label:
        found = -parameter
    elif score > label:
        found = 1.0 - parameter
    return found


@device
def _poisson(score: Any, label: Any, parameter: Any) -> Any:
    inside = score
    if inside > _HIGHEST:
        inside = _HIGHEST
    return math.exp(inside) - label


@device
def _epsilon_insensitive(score: Any, label: Any, parameter: Any) -> Any:
    error, found = score - label, 0.0
    if error > parameter:
        found = 1.0
    elif error < -parameter:
        found = -1.0
    return found


@device
def _squared_epsilon_insensitive(score: Any, label: Any, parameter: Any) -> Any:
    error, found = score - label, 0.0
    if error > parameter:
        found = 2.0 * (error - parameter)
    elif error < -parameter:
        found = 2.0 * (error + parameter)
    elif error != error:
        found = error
    return found


#: Device functions by the name of the loss.
SLOPES = {
    "log": _log,
    "hinge": _hinge,
    "squared_hinge": _squared_hinge,
    "squared": _squared,
    "huber": _huber,
    "quantile": _quantile,
    "poisson": _poisson,
    "epsilon_insensitive": _epsilon_insensitive,
    "squared_epsilon_insensitive": _squared_epsilon_insensitive,
}


@functools.cache
def _deriving(slope: Any) -> Any:
    @kernel
    def derive(scores: Any, labels: Any, counts: Any, weighted: Any, classes: Any, parameter: Any, divisor: Any, out: Any) -> None:
        i = cuda.grid(1)
        if i < out.shape[0]:
            row, label = i, 0.0
            if classes > 0:  # one-versus-rest
                row = i // classes
                label = -1.0
                if np.int64(labels[row]) == i % classes:
                    label = 1.0
            else:
                label = labels[row]
            found = slope(scores[i], label, parameter)
            if weighted:
                found *= counts[row]
            out[i] = found / divisor

    return derive


def coefficients(
    loss: str, scores: Any, labels: Any, counts: Any, classes: int, parameter: float, divisor: float, dtype: DTypeLike, xp: Any
) -> Any:
    """Return the derivative of the loss at each score, times the weight of its sample, divided by a number.

    Parameters
    ----------
    loss : str
        A key of :data:`SLOPES`.
    scores : device array of float64, shape (samples,), or (samples * K,)
    labels : device array of float64, shape (samples,)
        Numbers to predict; -1 and +1; or class numbers 0 to K - 1 for one-versus-rest.
    counts : device array of float64, shape (samples,), or None for 1
    classes : int
        Number of classes, K; 0 for one score per sample.
    parameter : float
        Parameter of the loss; 0 if it has none.
    divisor : float
    dtype : {float32, float64}
    xp : module
        NumPy or CuPy.

    Returns
    -------
    device array of this dtype, with the shape of the scores
    """
    out = xp.empty(len(scores), dtype)
    weighted = counts is not None
    given = scores, labels, counts if weighted else labels, weighted, classes, parameter, divisor, out
    launch(_deriving(SLOPES[loss]), len(out), BLOCK, xp, *given)
    return out


@kernel
def _derive_softmax(scores: Any, labels: Any, counts: Any, weighted: Any, classes: Any, divisor: Any, out: Any) -> None:
    row = cuda.grid(1)
    if row < labels.shape[0]:
        begin = row * classes
        highest = scores[begin]
        for i in range(begin + 1, begin + classes):
            if scores[i] > highest or scores[i] != scores[i]:
                highest = scores[i]
        whole = 0.0
        for i in range(begin, begin + classes):
            whole += math.exp(scores[i] - highest)
        factor = 1.0 / divisor
        if weighted:
            factor = counts[row] / divisor
        for i in range(begin, begin + classes):
            share = math.exp(scores[i] - highest) / whole
            if np.int64(labels[row]) == i - begin:
                share -= 1.0
            out[i] = share * factor


def softmax_coefficients(scores: Any, labels: Any, counts: Any, classes: int, divisor: float, dtype: DTypeLike, xp: Any) -> Any:
    """Return the same as :func:`coefficients` for the loss -ln p of a softmax of K scores per sample."""
    out = xp.empty(len(scores), dtype)
    weighted = counts is not None
    launch(_derive_softmax, len(labels), BLOCK, xp, scores, labels, counts if weighted else labels, weighted, classes, divisor, out)
    return out
