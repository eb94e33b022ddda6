"""The derivatives of losses by the score, on a GPU: a thread for each score, or of a softmax for each sample."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.streams.kernels.cuda.launching import BLOCK, device, kernel, launch

__all__ = ["SLOPES", "coefficients", "softmax_coefficients"]

_HIGHEST = 80.0  # score of which the exponential is taken, as of models.Poisson


@device
def _log(score: Any, label: Any, parameter: Any) -> Any:
    margin = label * score
    if margin >= 0.0:  # whichever exponential does not overflow
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


#: By the name of the loss.
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
            if classes > 0:  # each against the rest
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
    """The derivative of the loss of each score, times what its sample counts, divided by a number.

    Parameters
    ----------
    loss : str
        Of :data:`SLOPES`.
    scores : device array of float64, shape (samples,), or (samples * K,)
    labels : device array of float64, shape (samples,)
        Numbers; -1 and +1; or of K classes, each against the rest, 0 to K - 1.
    counts : device array of float64, shape (samples,), or None for 1
    classes : int
        K; 0 for one score a sample.
    parameter : float
        Of the loss; 0 of those that have none.
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
    """As :func:`coefficients`, for the loss -ln p of the softmax of K scores a sample."""
    out = xp.empty(len(scores), dtype)
    weighted = counts is not None
    launch(_derive_softmax, len(labels), BLOCK, xp, scores, labels, counts if weighted else labels, weighted, classes, divisor, out)
    return out
