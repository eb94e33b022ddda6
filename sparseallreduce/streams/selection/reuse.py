"""Threshold reuse: an exact threshold in some steps, adjusted in the steps between (Ok-Topk section 3.1.3)."""

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
ENOUGH = 2.0  # times k: with more candidates, the slack shrinks
WIDER, NARROWER = 2.0, 0.97  # factors of the slack; too few candidates may cost a second pass, too many only little time
NARROWEST, WIDEST = 0.001, 0.5
_EVALUATION = 1 / 3  # cost of an evaluation relative to a step of three passes


class Reuse(NamedTuple):
    """The state that one selection passes to the next."""

    threshold: float = 0.0  # magnitude that candidates must reach; 0 to evaluate the exact top k
    slack: float = 0.03  # logarithm of the ratio of the k-th magnitude to the threshold


class ThresholdReuse(Selector):
    """Selects the k largest of the values that reach a threshold from earlier selections; k values, or up to 10 % fewer, without zeros.

    The distribution of gradients changes slowly, and so does the k-th magnitude. The threshold of the next step is slightly below the k-th
    magnitude of this one, so that usually more than k values reach it, and their k largest are the exact top k. If fewer reach it than
    ``drift`` allows, the threshold is evaluated early, in a second pass over memory.

    Parameters
    ----------
    k : int
        Largest number of values to select.
    period : int or "auto"
        Steps from one exact threshold to the next, tau' in the paper; 1 always selects the exact top k. "auto" derives it from how many of
        k values are missing as the threshold ages: see :mod:`~sparseallreduce.streams.selection.period`.
    drift : float
        Fraction of k that may be missing before the threshold is evaluated again.

    Attributes
    ----------
    threshold : float
        Threshold of the next step; 0 if it will evaluate the exact top k.
    slack : float
        Logarithm of the ratio of the k-th magnitude to the threshold.
    steps : int
        Number of selections so far.

    Notes
    -----
    The paper selects whatever reaches a threshold. With error feedback at a low density that is imprecise: most of a residual is just below
    the k-th magnitude, more so at lower densities. In training a perceptron on digits, a threshold that is 3 % lower selects 1.5 times as
    many values at a density of 1 %, and three times as many at 0.1 %, while the k-th magnitude changes by 1 % per step. The slack is
    therefore controlled by the count: it doubles if fewer than k values reach the threshold, and shrinks by 3 % if more than 2 k do. In
    that
    training, there are 1.8 k candidates on average, and one step in 200 takes a second pass.

    Examples
    --------
    >>> selector = ThresholdReuse(2, period=32)
    >>> [selector(np.array(gradient)).indices.tolist() for gradient in ([4.0, 1.0, 3.0], [4.0, 3.5, 3.2])]
    [[0, 2], [0, 1]]
    """

    threshold: float
    slack: float

    passes: float = 3.0  # also if the exact threshold is found; 4 if it is evaluated early

    def __init__(self, k: int, period: int | str = 32, *, drift: float = DRIFT) -> None:
        super().__init__(k)
        if period != AUTO and (isinstance(period, str) or period < 1):
            raise StreamError(f"period is the number of steps that share an exact threshold, at least 1, or {AUTO!r}, not {period!r}")
        if not 0 <= drift <= 1:
            raise StreamError(f"drift is a share of k, from 0 to 1, not {drift}")
        self.period = period
        self.drift = drift
        self.threshold, self.slack = Reuse()
        self.steps: int = 0
        self.history: Array | None = np.array(Drift()) if period == AUTO else None  # only for period "auto"

    def choose(self, accumulator: Array, gradient: Array | None, clear: bool) -> tuple[Array, Array]:
        drift = None if self.history is None else Drift.of(self.history)
        due = self.steps % int(self.period) == 0 if drift is None else drift.is_due
        threshold = 0.0 if due else self.threshold
        indices, values, left = choose_reusing(accumulator, gradient, self.k, Reuse(threshold, self.slack), self.drift)
        if drift is not None:
            # Without a threshold for the next step, all non-zeros have been selected.
            missing = 0.0 if left.threshold == 0 else 1 - len(values) / self.k
            self.history = np.array(drift.evaluated(_EVALUATION) if threshold == 0 else drift.seen(missing))
        if clear:
            clear_places(accumulator, indices)
        self.threshold, self.slack = left
        self.steps += 1
        return indices, values


def choose_reusing(accumulator: Array, gradient: Array | None, k: int, reuse: Reuse, drift: float = DRIFT) -> tuple[Array, Array, Reuse]:
    """Perform a step of threshold reuse.

    Parameters
    ----------
    accumulator : ndarray of float32 or float64, shape (N,)
        The gradient is added to it, in the pass over memory that selects.
    gradient : ndarray, shape (N,), or None
    k : int
    reuse : Reuse
        State from the previous step, or ``Reuse()``.
    drift : float
        Fraction of k that may be missing.

    Returns
    -------
    indices, values : ndarray
        The k largest magnitudes, or all non-zeros if fewer; or all that reach the threshold, if at most ``drift * k`` are missing.
    reuse : Reuse
        State for the next step.
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
    """Select like :func:`choose_reusing` from device arrays, and return a copy of the selected entries on the host.

    The host waits only for this copy and for the number of values that reach the threshold.

    Parameters
    ----------
    accumulator, gradient, k, reuse, drift
        As for :func:`choose_reusing`.
    wanted : bool
        Whether to copy the selected entries; otherwise only two numbers are copied.

    Returns
    -------
    entries, copy : (ndarray, ndarray)
        Indices and values, on the device and on the host.
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
    if present < len(values):  # there are fewer than k non-zeros
        places = device_kernels(values).marked(values != 0, present)
        indices, values = indices[places], values[places]
        if wanted:
            copy = copy[0][copy[1] != 0], copy[1][copy[1] != 0]
    reached = present if over == 0 else reached
    return (indices, values), copy, _left(reuse, present, reached, least, k, smallest)


def _left(reuse: Reuse, chosen: int, reached: int, least: int, k: int, smallest: float) -> Reuse:
    """Return the state after a step with these numbers of selected and reaching values; ``smallest`` is the k-th magnitude."""
    slack = _controlled(reuse.slack, reached, k) if reuse.threshold > 0 else reuse.slack
    if chosen == k:
        right = smallest
    else:  # all that reached the threshold, or all non-zeros if too few did
        right = reuse.threshold if reached >= least else 0.0
    return Reuse(right * math.exp(-slack), slack)


def _least(values: Array) -> float:
    """Return the smallest magnitude that is not NaN, infinity if there is none."""
    return float(np.fmin.reduce(np.abs(values), initial=np.inf))


def _present_and_least(values: Array, xp: Any) -> tuple[int, float]:
    """Return the number of non-zeros of device values, and the smallest magnitude that is not NaN, infinity if none."""
    if not len(values):
        return 0, math.inf
    magnitudes = xp.abs(values)
    least = xp.where(xp.isnan(magnitudes), values.dtype.type(np.inf), magnitudes).min()
    present, smallest = xp.stack([xp.count_nonzero(values).astype(np.float64), least.astype(np.float64)]).tolist()
    return int(present), smallest


def _controlled(slack: float, reached: int, k: int) -> float:
    """Return the slack of the next threshold, given the number of values that reached the last one."""
    if reached < k:
        return min(WIDER * slack, WIDEST)
    return max(NARROWER * slack, NARROWEST) if reached > ENOUGH * k else slack
