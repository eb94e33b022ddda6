"""Weights that all change in every step, by L1, momentum or averaging, without a pass over all of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels import lazy as lazy_kernels
from sparseallreduce.linear.weights.descent import Descent
from sparseallreduce.linear.weights.plain import Intercept, Weights, as_numbers, flat_indices
from sparseallreduce.runtime.threads import Threads

__all__ = ["LazyWeights"]

Array = NDArray[Any]

_STEPS = 4096  # number of steps in the table, after which there is a pass over all weights
_FADED = 1e-12  # fraction of a velocity that is negligible


class LazyWeights(Weights):
    """Weights with L1, momentum or averaging, updated lazily.

    A step does the following for every weight: ``w *= 1 - rate * l2 / (1 - beta)``; ``w -= rate * d``, where d is the gradient, or with
    momentum beta the velocity ``m = beta * m + gradient`` (heavy ball), or ``gradient + beta * m`` (Nesterov); then ``w`` is moved towards
    zero by ``rate * l1 / (1 - beta)``. The latter is the truncated gradient of Langford et al. (2009) with a truncation in each step, or
    FOBOS (Duchi and Singer, 2009): unlike a subgradient it gives weights of exactly zero. The average is over the weights after all steps
    from ``average_from`` on.

    Weights that the gradient does not touch are not updated, but computed from their last update when they are needed (for L1
    the cumulative penalty of Tsuruoka et al., 2009). Reading never writes, because ranks read different weights: so all copies stay bitwise
    identical.
    """

    _NUMBERS = (*Weights._NUMBERS, "_now", "_current", "_averaged", "_intercept_velocity", "_intercept_sum")

    def __init__(self, size: int, descent: Descent, dtype: DTypeLike = np.float32, threads: Threads | None = None) -> None:
        super().__init__(size, descent, dtype, threads)
        weights = len(self.unscaled)
        nothing = np.zeros(1, dtype)
        self._velocity = np.zeros(weights, dtype) if descent.momentum else nothing
        self._sums = np.zeros(weights) if descent.averages else np.zeros(1)
        self._last = np.zeros(weights, np.uint16)
        self._now = 0  # number of steps in the table
        self._table = np.zeros((lazy_kernels.ROWS, _STEPS + 1))
        if descent.momentum:
            self._table[lazy_kernels.POWER] = descent.momentum ** np.arange(_STEPS + 1)
        self._written = self._table[: lazy_kernels.POWER]
        self._fade = math.ceil(math.log(_FADED) / math.log(descent.momentum)) if descent.momentum else 0
        self._current = True  # after a dense gradient, and before the first step
        self._averaged = 0  # number of steps in the average
        self._intercept_velocity: Intercept = self._intercept_of(0.0)
        self._intercept_sum: Intercept = self._intercept_of(0.0)

    @property
    def _settings(self) -> tuple[bool, bool, bool, int]:
        return self.descent.momentum > 0, self.descent.l1 > 0, self.descent.averages, self._fade

    @property
    def current(self) -> bool:
        return self._current

    def to_array(self) -> Array:
        self.wait_for_peers()
        array = np.empty(self.shape, self.unscaled.dtype)
        weights = array.reshape(-1)[: len(self.unscaled)]
        unscaled, _, sums = self._present()
        if self._averaged:
            np.divide(sums, self._averaged, out=weights, casting="same_kind")
            array[self.features :] = self._intercept_sum / self._averaged
        else:
            np.multiply(unscaled, self.scale, out=weights)
            array[self.features :] = self.intercept
        return array

    def assign(self, array: Array) -> None:
        super().assign(array)
        self._write(_velocity=0, _sums=0, _last=0)
        self._now = self._averaged = 0
        self._current = True
        self._intercept_velocity, self._intercept_sum = self._intercept_of(0.0), self._intercept_of(0.0)

    def penalty(self) -> float:
        weights = self.to_array()[: self.features].reshape(-1)
        return self.descent.l2 / 2 * float(np.dot(weights, weights)) + self.descent.l1 * float(np.abs(weights).sum(dtype=np.float64))

    def at(self, indices: Array) -> Array:
        self.wait_for_peers()
        inside = indices[: np.searchsorted(indices, self.features)].astype(np.int64)
        found = np.full(self._shape(len(indices)), self.intercept, self.unscaled.dtype)
        places = inside if self.columns is None else flat_indices(inside, self.columns, self.size)
        velocity = self._velocity[places] if self.descent.momentum else self._velocity
        unscaled, _, _ = self._evaluated(self.unscaled[places], velocity, self._last[places], self._sums, False)
        found[: len(inside)] = self._by_feature(unscaled * self.scale)
        return found

    def learned_at(self, features: Array) -> Array:
        if not self._averaged:
            return super().learned_at(features)
        *_, sums = self._evaluated_at(self._places(features))
        found = np.empty(len(sums), self.unscaled.dtype)
        np.divide(sums, self._averaged, out=found, casting="same_kind")
        return self._by_feature(found)

    @property
    def learned_intercept(self) -> Intercept:
        return self._intercept_sum / self._averaged if self._averaged else self.intercept

    def scores(self, dataset: Dataset, rows: Array) -> Array:
        """Return the scores like :meth:`Weights.scores`; after a pass over all weights, unless they are current."""
        self.wait_for_peers()
        return self._scored(self.unscaled if self.current else self._present()[0], dataset, rows)

    def _gathered(self, features: Array) -> Array:
        velocity = self._each_gathered(self._velocity, features) if self.descent.momentum else self._velocity
        last = self._each_gathered(self._last, features)
        return self._evaluated(super()._gathered(features), velocity, last, self._sums, False)[0]

    def final(self) -> Weights:
        descent = Descent(intercept=self.descent.intercept, columns=self.columns)
        plain = Weights(self.size, descent, self.unscaled.dtype, self._threads)
        plain.assign(self.to_array())
        return plain

    def state(self) -> dict[str, Any]:
        columns = self._written[:, : self._now + 1]
        return super().state() | {
            "velocity": self._velocity if self.descent.momentum else 0.0,
            "sums": self._sums if self.descent.averages else 0.0,
            "last": self._last,
            "now": self._now,
            "averaged": self._averaged,
            "intercept_velocity": as_numbers(self._intercept_velocity),
            "intercept_sum": as_numbers(self._intercept_sum),
            "table": tuple(map(tuple, columns.tolist())),  # a tuple, because arrays in the state have one entry per weight
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._write(_velocity=state["velocity"], _sums=state["sums"], _last=state["last"])
        self._now, self._averaged = int(state["now"]), int(state["averaged"])
        # Tests the given array, because another rank may already change the shared one. Kernels do not check bounds of the table.
        last = int(np.max(state["last"], initial=0))
        if not 0 <= self._now <= _STEPS or last > self._now:
            raise ValueError(f"weights of step {last} of {self._now}")
        self._current = bool((self._last == self._now).all())
        self._intercept_velocity = self._intercept_of(state["intercept_velocity"])
        self._intercept_sum = self._intercept_of(state["intercept_sum"])
        self._written[:, : self._now + 1] = state["table"]

    def memory(self) -> dict[str, Any]:
        self.wait_for_peers()
        self._settle()
        memory = super().memory() | {"intercept_velocity": self._intercept_velocity}
        if self.descent.momentum:
            memory["velocity"] = self._velocity.copy()
        if self.descent.averages:
            # The result is the average, but steps continue from the last weights.
            memory |= {"weights": self.unscaled.copy(), "sums": self._sums.copy(), "averaged": self._averaged}
            memory |= {"intercept": self.intercept, "intercept_sum": self._intercept_sum}
        return memory

    def remember(self, memory: dict[str, Any], stretch: Array | float = 1.0) -> None:
        super().remember(memory, stretch)
        if isinstance(stretch, np.ndarray) and len(stretch) == self.features:
            stretch = np.repeat(stretch, self.descent.width)
        if self.descent.momentum and "velocity" in memory:
            self._write(_velocity=memory["velocity"] / stretch)
            if self.descent.intercept:
                self._intercept_velocity = memory["intercept_velocity"]
        if self.descent.averages and "sums" in memory:
            self._write(unscaled=memory["weights"] * stretch, _sums=memory["sums"] * stretch)
            self._averaged = memory["averaged"]
            if self.descent.intercept:
                self.intercept, self._intercept_sum = memory["intercept"], memory["intercept_sum"]

    def _shared_names(self) -> list[str]:
        weights = len(self.unscaled)
        return [name for name in ("unscaled", "_velocity", "_sums", "_last") if len(getattr(self, name)) == weights]

    def _shrink(self, factor: float) -> None:
        if self._now == _STEPS or self.scale * factor < self._SMALLEST_SCALE:
            self._settle()
        self.scale *= factor

    def _settle(self) -> None:
        """Compute all weights, and start a new table."""
        self.note(None)
        self._meet()
        own = self._own(len(self.unscaled))
        unscaled, velocity, last, sums = (array[own] for array in (self.unscaled, self._velocity, self._last, self._sums))
        unscaled[:], velocity[:], sums[:] = self._evaluated(unscaled, velocity, last, sums, self.descent.averages)
        unscaled *= self.scale
        last.fill(0)
        self._meet()
        self.scale: float = 1.0
        self._now = 0
        self._current = True
        self._written.fill(0)

    def _stretch(self, places: Array, factors: Array) -> None:
        unscaled, velocity, sums = self._evaluated_at(places)
        self.unscaled[places], self._last[places] = unscaled * factors, self._now
        if self.descent.momentum:
            self._velocity[places] = velocity / factors
        if self.descent.averages:
            self._sums[places] = sums * factors

    def _evaluated_at(self, places: Array) -> tuple[Array, Array, Array]:
        """Return the present unscaled weights, velocity and sums at some positions."""
        velocity = self._velocity[places] if self.descent.momentum else self._velocity
        sums = self._sums[places] if self.descent.averages else self._sums
        return self._evaluated(self.unscaled[places], velocity, self._last[places], sums, self.descent.averages)

    def _numbers(self) -> dict[str, Any]:
        return super()._numbers() | {"table": self._written[:, : self._now + 1].copy()}

    def _put_numbers_back(self, numbers: dict[str, Any]) -> None:
        super()._put_numbers_back(numbers)
        self._written[:, : self._now + 1] = numbers["table"]
        self._written[:, self._now + 1 :] = 0

    def _present(self) -> tuple[Array, Array, Array]:
        """Return the present unscaled weights, velocity and sums."""
        return self._evaluated(self.unscaled, self._velocity, self._last, self._sums, self.descent.averages)

    def _evaluated(self, unscaled: Array, velocity: Array, last: Array, sums: Array, averaging: bool) -> tuple[Array, Array, Array]:
        """Return the present unscaled weights, velocity and sums of some entries as new arrays; ``sums`` itself without averaging."""
        out = np.empty_like(unscaled), np.empty_like(velocity), np.empty_like(sums) if averaging else sums
        cuts = self._threads.cuts(len(unscaled))
        momentum, l1, _, fade = self._settings

        def evaluate(part: int) -> None:
            low, high = cuts[part], cuts[part + 1]
            given = unscaled, velocity, last, sums, self._now, self._table, momentum, l1, averaging, fade, low
            lazy_kernels.lazy_values(*given, *(array[low:high] for array in out))

        self._threads.each(evaluate)
        return out

    def _subtract(self, indices: Array | None, values: Array, rate: float) -> bool:
        descent = self.descent
        indices, values = self._flat(indices, values)
        averages = descent.average_from is not None and self.steps > descent.average_from
        beta = descent.momentum
        eta, tau, share = rate / self.scale, rate * descent.l1 * descent.penalty_factor / self.scale, self.scale * averages
        step = np.array([eta, tau, beta, share, beta if descent.nesterov else 0.0])
        cuts = self._cuts(len(values))
        momentum, l1, averaging, fade = self._settings
        state = self.unscaled, self._velocity, self._last, self._sums, self._now, self._table, momentum, l1, averaging, fade, step

        def subtract(part: int) -> bool:
            low, high = cuts[part], cuts[part + 1]
            mine = np.empty(0, np.uint32) if indices is None else indices[low:high]
            return bool(lazy_kernels.lazy_descend(mine, values[low:high], *state, low, indices is None))

        finite = all(self._threads.each(subtract))
        self._current = indices is None
        self._append(eta * (beta if descent.nesterov else 1.0), tau, share)
        self._averaged += averages
        return finite

    def _subtract_intercept(self, slope: Intercept, rate: float) -> None:
        beta = self.descent.momentum
        self._intercept_velocity = beta * self._intercept_velocity + slope
        change = slope + beta * self._intercept_velocity if self.descent.nesterov else self._intercept_velocity
        self.intercept = self.intercept - rate * change
        counts = self.descent.average_from is not None and self.steps > self.descent.average_from
        self._intercept_sum = self._intercept_sum + self.intercept * counts

    def _append(self, eta: float, tau: float, share: float) -> None:
        """Append a step to the table."""
        shrinkage, shares_of, shares, shrunk_shares, etas, drift, drift_shares, powers = self._table
        before = self._now
        self._now = now = before + 1
        shrinkage[now] = shrinkage[before] + tau
        shares_of[now] = share
        shares[now] = shares[before] + share
        shrunk_shares[now] = shrunk_shares[before] + share * shrinkage[now]
        etas[now] = eta
        if self.descent.momentum:
            drift[:now] += eta * powers[now:0:-1]
            drift_shares[:now] += share * drift[:now]
