"""Threshold reuse: an exact threshold now and then, adjusted in between (Ok-Topk section 3.1.3)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels import selection as loops
from sparseallreduce.streams.kernels.backend import array_module, as_host_together, device_kernels, on_device
from sparseallreduce.streams.selection.base import Array, Selector, clear_places
from sparseallreduce.streams.selection.exact import choose_top, places_of_top
from sparseallreduce.streams.selection.nonzero import choose_nonzero
from sparseallreduce.streams.selection.period import AUTO, Drift
from sparseallreduce.streams.selection.threshold import key_from
from sparseallreduce.streams.stream import index_dtype

__all__ = ["Reuse", "ThresholdReuse", "choose_reusing", "choose_with_copy"]

DRIFT = 0.1
ENOUGH = 2.0  # times k: with more candidates than that the threshold comes nearer to the k-th magnitude
WIDER, NARROWER = 2.0, 0.97  # factors of the slack: too few candidates may take a second pass, too many only a little time
NARROWEST, WIDEST = 0.001, 0.5
_EVALUATION = 1 / 3  # of the time of a step: a look at a sample, and at what is not copied, beside three passes


class Reuse(NamedTuple):
    """What one selection leaves to the next."""

    threshold: float = 0.0  # that candidates have to reach; 0 to find the top k without
    slack: float = 0.03  # how far it is below the k-th magnitude, in logarithms


class ThresholdReuse(Selector):
    """The k largest of what reaches a threshold that earlier selections have left; k values, or up to a tenth fewer; no zeros.

    The distribution of gradients changes slowly, and so does the k-th magnitude. From the one of this step comes the threshold of the
    next, a little lower, so that rather too many values reach it, the largest k of which are the top k. Where fewer reach it than
    ``drift`` allows, it is evaluated ahead of its time, in a second pass over memory.

    Parameters
    ----------
    k : int
        How many to choose, at most.
    period : int or "auto"
        Steps from one exact threshold to the next, the paper's tau'; 1 always chooses the top k. "auto" finds it from how many of k values
        are missing as the threshold gets older: see :mod:`~sparseallreduce.streams.selection.period`.
    drift : float
        Share of k that may be missing before the threshold is evaluated anew.

    Attributes
    ----------
    threshold : float
        What the next step will compare with; 0 if it will find the top k without.
    slack : float
        The logarithm of how far it is below the k-th magnitude.
    steps : int
        Selections so far.

    Notes
    -----
    The paper takes whatever reaches a threshold. Error feedback at a low density makes that imprecise: most of a residual waits just
    below the k-th magnitude, the more of it the lower the density. In training a perceptron on digits, a threshold that is 3 % lower
    chooses half as many again at a density of 1 %, and three times as many at 0.1 %, while the k-th magnitude changes by 1 % a step.
    So the slack is controlled by the count: it doubles where fewer than k values reach the threshold, and shrinks by 3 % where
    more than 2 k do. In that training, there are 1.8 k candidates on average, and one step in 200 takes a second pass.

    Examples
    --------
    >>> selector = ThresholdReuse(2, period=32)
    >>> [selector(np.array(gradient)).indices.tolist() for gradient in ([4.0, 1.0, 3.0], [4.0, 3.5, 3.2])]
    [[0, 2], [0, 1]]
    """

    passes = 3.0  # also when the exact threshold is found; 4 when it is evaluated ahead of its time

    def __init__(self, k: int, period: int | str = 32, *, drift: float = DRIFT) -> None:
        super().__init__(k)
        if period != AUTO and (isinstance(period, str) or period < 1):
            raise StreamError(f"period is the number of steps that share an exact threshold, at least 1, or {AUTO!r}, not {period!r}")
        if not 0 <= drift <= 1:
            raise StreamError(f"drift is a share of k, from 0 to 1, not {drift}")
        self.period = period
        self.drift = drift
        self.threshold, self.slack = Reuse()
        self.steps = 0
        self.history: Array | None = np.array(Drift()) if period == AUTO else None  # where the period is found

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        drift = None if self.history is None else Drift.of(self.history)
        due = self.steps % int(self.period) == 0 if drift is None else drift.is_due
        threshold = 0.0 if due else self.threshold
        indices, values, left = choose_reusing(accumulator, gradient, self.k, Reuse(threshold, self.slack), self.drift)
        if drift is not None:
            # Where no threshold is left, there is nothing else to choose.
            missing = 0.0 if left.threshold == 0 else 1 - len(values) / self.k
            self.history = np.array(drift.evaluated(_EVALUATION) if threshold == 0 else drift.seen(missing))
        if clear:
            clear_places(accumulator, indices)
        self.threshold, self.slack = left
        self.steps += 1
        return indices, values


def choose_reusing(
    accumulator: Array, gradient: Array | None, k: int, reuse: Reuse, drift: float = DRIFT
) -> tuple[Array, Array, Reuse]:
    """A step of threshold reuse.

    Parameters
    ----------
    accumulator : ndarray of float32 or float64, shape (N,)
        Increased by ``gradient``, if there is one, in the pass over memory that selects.
    gradient : ndarray, shape (N,), or None
    k : int
    reuse : Reuse
        What the step before has left, or ``Reuse()``.
    drift : float
        Share of k that may be missing.

    Returns
    -------
    indices, values : ndarray
        The k largest magnitudes, or all that are not zero; or all that reach the threshold, if at most ``drift * k`` are missing.
    reuse : Reuse
        For the next step.
    """
    if on_device(accumulator):
        (indices, values), _, left = choose_with_copy(accumulator, gradient, k, reuse, drift, wanted=False)
        return indices, values, left
    least = math.ceil((1 - drift) * k)
    indices, values, reached = choose_nonzero(accumulator, gradient, k, reuse.threshold, least)
    return indices, values, _left(reuse, len(values), reached, least, k, _least(values) if len(values) == k else 0.0)


def choose_with_copy(
    accumulator: Array, gradient: Array | None, k: int, reuse: Reuse, drift: float = DRIFT, *, wanted: bool = True
) -> tuple[tuple[Array, Array], tuple[Array, Array], Reuse]:
    """As :func:`choose_reusing`, of arrays on a device, with a copy on the host of what is chosen: the one thing that it waits for, besides
    how many reach a threshold.

    Returns
    -------
    entries, copy : (ndarray, ndarray)
        Indices and values. Unless it is ``wanted``, two numbers are copied in its place.
    reuse : Reuse
    """
    least, size = math.ceil((1 - drift) * k), len(accumulator)
    over = key_from(reuse.threshold, accumulator.dtype) - 1
    reached = k
    if over > 0:
        indices, values, _ = loops.select(accumulator, gradient, over, index_dtype(size))
        reached, gradient = len(values), None
    if over == 0 or reached < least:
        indices, values = choose_top(accumulator, gradient, k)
    elif k < reached:
        places = places_of_top(values, k, indices.dtype) if k else slice(0)
        indices, values = indices[places], values[places]
    xp = array_module(values)
    if wanted:
        copy = as_host_together(indices, values)
        present, smallest = int(np.count_nonzero(copy[1])), _least(copy[1])
    else:
        copy, (present, smallest) = (indices, values), _present_and_least(values, xp)
    if present < len(values):  # the largest of fewer than k that are not zero
        places = device_kernels(values).marked(values != 0, present)
        indices, values = indices[places], values[places]
        if wanted:
            copy = copy[0][copy[1] != 0], copy[1][copy[1] != 0]
    reached = present if over == 0 else reached
    return (indices, values), copy, _left(reuse, present, reached, least, k, smallest)


def _left(reuse: Reuse, chosen: int, reached: int, least: int, k: int, smallest: float) -> Reuse:
    """What a step leaves in which so many were chosen, and reached its threshold, and that is the smallest magnitude of k."""
    slack = _controlled(reuse.slack, reached, k) if reuse.threshold > 0 else reuse.slack
    if chosen == k:
        right = smallest
    else:  # all that reached the threshold; or all there is, of which fewer did
        right = reuse.threshold if reached >= least else 0.0
    return Reuse(right * math.exp(-slack), slack)


def _least(values: Array) -> float:
    """The smallest magnitude that is a number, infinity if there is none."""
    return float(np.fmin.reduce(np.abs(values), initial=np.inf))


def _present_and_least(values: Array, xp: Any) -> tuple[int, float]:
    """How many of some values on a device are not zero, and the smallest magnitude that is a number, infinity if there is none."""
    if not len(values):
        return 0, math.inf
    magnitudes = xp.abs(values)
    least = xp.where(xp.isnan(magnitudes), values.dtype.type(np.inf), magnitudes).min()
    present, smallest = xp.stack([xp.count_nonzero(values).astype(np.float64), least.astype(np.float64)]).tolist()
    return int(present), smallest


def _controlled(slack: float, reached: int, k: int) -> float:
    """The slack of the next threshold, by how many values have reached that of this step."""
    if reached < k:
        return min(WIDER * slack, WIDEST)
    return max(NARROWER * slack, NARROWEST) if reached > ENOUGH * k else slack
