"""Compiled loops over weights that keep changing without gradients: by momentum, L1, or averaging.

Each weight is stored as of the step at which a gradient last touched it. The effect of the steps since then follows from sums over
these steps, the same for all weights, which are kept in a table: a weight is computed when it is needed, at a cost
that does not depend on how long ago its last gradient was. Only momentum together with L1 takes a loop over steps, until the momentum has
vanished.

``v`` is a weight divided by the scale of all weights (the L2 term), ``m`` its velocity, ``eta`` the learning rate divided by the scale.
A step without gradient is ``m *= beta; v -= eta * m; v = soft(v, tau)``, where ``soft`` moves v towards zero by ``tau``, at most to zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import prefetch_to_write

__all__ = ["POWER", "ROWS", "lazy_descend", "lazy_values"]

Array = NDArray[Any]

# Rows of the table. Column t describes the state after step t, column 0 that before the first.
_SHRINKAGE = 0  # sum of tau over steps 1 to t
_SHARE = 1  # weight of step t in the average, times the scale after the step
_SHARES = 2  # sum of shares over steps 1 to t
_SHRUNK_SHARES = 3  # sum of share times shrinkage over steps 1 to t
_ETA = 4  # eta of step t, times the factor of the velocity in a step without gradient
_DRIFT = 5  # distance that a velocity of 1 after step t has since moved a weight
_DRIFT_SHARES = 6  # contribution of this drift to the sum that is averaged
POWER = 7  # beta to the power of t; the only row that does not depend on the steps taken
ROWS = 8

_AHEAD = 64  # number of entries by which a weight is prefetched ahead


@kernel
def lazy_values(
    v: Array,
    m: Array,
    last: Array,
    sums: Array,
    now: int,
    table: Array,
    momentum: bool,
    l1: bool,
    averaging: bool,
    fade: int,
    first: int,
    out_v: Array,
    out_m: Array,
    out_sums: Array,
) -> None:
    """Write the state of the weights from ``first`` on after step ``now``. The outputs may be the arrays themselves."""
    for place in range(out_v.size):
        index = first + place
        velocity = np.float64(m[index]) if momentum else 0.0
        weight, velocity, gained = _advanced(np.float64(v[index]), velocity, last[index], now, table, momentum, l1, averaging, fade)
        out_v[place] = weight
        if momentum:
            out_m[place] = velocity
        if averaging:
            out_sums[place] = sums[index] + gained


@kernel
def lazy_descend(
    indices: Array,
    gradient: Array,
    v: Array,
    m: Array,
    last: Array,
    sums: Array,
    now: int,
    table: Array,
    momentum: bool,
    l1: bool,
    averaging: bool,
    fade: int,
    step: Array,
    first: int,
    dense: bool,
) -> bool:
    """Take step ``now + 1`` for the weights that the gradient touches; return True if they are finite.

    ``step`` holds eta, tau, beta, the step's share in the average, and beta again for Nesterov momentum, otherwise 0. A dense gradient
    starts at index ``first``, and ``indices`` are ignored.
    """
    eta, tau, beta, share, ahead = step[0], step[1], step[2], step[3], step[4]
    finite = True
    for entry in range(gradient.size):
        if not dense and entry + _AHEAD < gradient.size:
            later = np.uint64(indices[entry + _AHEAD])
            prefetch_to_write(v, later)
            prefetch_to_write(last, later)
            if momentum:
                prefetch_to_write(m, later)
            if averaging:
                prefetch_to_write(sums, later)
        index = np.uint64(first + entry) if dense else np.uint64(indices[entry])
        slope = np.float64(gradient[entry])
        velocity = np.float64(m[index]) if momentum else 0.0
        weight, velocity, gained = _advanced(np.float64(v[index]), velocity, last[index], now, table, momentum, l1, averaging, fade)
        velocity = beta * velocity + slope
        weight = _soft(weight - eta * (slope + ahead * velocity if ahead > 0 else velocity), tau)
        v[index] = weight
        last[index] = now + 1
        if momentum:
            m[index] = velocity
            finite &= np.isfinite(m[index])
        if averaging:
            sums[index] += gained + share * weight
        finite &= np.isfinite(v[index])
    return finite


@inlined
def _advanced(v: float, m: float, last: int, now: int, table: Array, momentum: bool, l1: bool, averaging: bool, fade: int) -> Any:
    """Return weight and velocity after steps ``last + 1`` to ``now`` without gradient, and their contribution to the averaged sum."""
    gained = 0.0
    if momentum and not l1:
        if averaging:
            gained = v * (table[_SHARES, now] - table[_SHARES, last]) - m * table[_DRIFT_SHARES, last]
        return v - m * table[_DRIFT, last], m * table[POWER, now - last], gained
    if momentum and m != 0.0:
        begin = last
        end = min(now, last + fade)
        while last < end:
            last += 1
            velocity = m * table[POWER, last - begin]
            v = _soft(v - table[_ETA, last] * velocity, table[_SHRINKAGE, last] - table[_SHRINKAGE, last - 1])
            gained += table[_SHARE, last] * v
        m *= table[POWER, now - begin]
    if averaging and v != 0.0:
        gained += _shrinking_sum(v, last, now, table)
    return _soft(v, table[_SHRINKAGE, now] - table[_SHRINKAGE, last]), m, gained


@inlined
def _shrinking_sum(v: float, last: int, now: int, table: Array) -> float:
    """Return the sum of shares times the weight over steps ``last + 1`` to ``now``, in which L1 shrinks it until it is zero."""
    start = table[_SHRINKAGE, last]
    low, high = last, now  # the last step at which it is not zero lies in [low, high]
    while low < high:
        middle = (low + high + 1) // 2
        if table[_SHRINKAGE, middle] - start < abs(v):
            low = middle
        else:
            high = middle - 1
    shares = table[_SHARES, low] - table[_SHARES, last]
    size: float = (abs(v) + start) * shares - (table[_SHRUNK_SHARES, low] - table[_SHRUNK_SHARES, last])
    return size if v > 0 else -size


@inlined
def _soft(v: float, tau: float) -> float:
    """Return ``v`` moved towards zero by ``tau``, at most to zero. NaN stays NaN, so that the training ends."""
    if v > tau:
        return v - tau
    if v < -tau:
        return v + tau
    return 0.0 if tau > 0 and not np.isnan(v) else v
