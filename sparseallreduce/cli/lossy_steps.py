"""Timed and checked steps of error feedback on synthetic gradients, for `sparseallreduce bench --lossy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.synthetic import draw_values, entries_of, largest_deviation
from sparseallreduce.cli.timing import checksum, slowest, timed, timed_alone
from sparseallreduce.reducers import REDUCERS, ErrorFeedback
from sparseallreduce.reducers.base import contributions
from sparseallreduce.runtime.objects import gather
from sparseallreduce.streams.kernels.backend import as_host
from sparseallreduce.streams.operator import SUM

__all__ = ["LossySetting", "MeasuredReducer", "measure"]

Array = NDArray[Any]

_SHIFT = 613  # offset in positions between the gradients of successive steps
_PERIOD = 101  # steps until the gradients repeat


class LossySetting(NamedTuple):
    """The setting of a benchmark of reducers."""

    size: int
    density: float
    dtype: str
    experiments: int  # each with new data
    repeats: int  # timed steps of every reducer in an experiment
    seed: int
    non_blocking: bool

    @property
    def k(self) -> int:
        """The number of values to sum."""
        return min(self.size, max(1, entries_of(self.size, self.density)))


@dataclass
class MeasuredReducer:
    """The measurements of one reducer; the same on all ranks."""

    seconds: list[list[float]] = field(default_factory=list)  # by experiment and repeat, on the slowest rank
    select_seconds: list[list[float]] = field(default_factory=list)  # the part of these spent in selection
    bytes_sent: Any = 0  # per rank, over the checked steps
    header_bytes: Any = 0  # the part of bytes_sent in headers
    messages: Any = 0
    contributed: float = 0.0  # entries per rank that were included in the sum, over the checked steps
    entries: float = 0.0  # entries of the sum, over the checked steps
    faults: list[str] = field(default_factory=list)


def measure(
    setting: LossySetting, names: list[str], comm: Any, on_step: Callable[[], object] = lambda: None, xp: Any = None
) -> tuple[list[float], list[float], dict[str, MeasuredReducer]]:
    """Run the experiments; collective over ``comm``. With ``xp``, which is CuPy, gradients and residuals are on the device.

    Returns
    -------
    copies, dense : list of float
        Seconds for copying N values on one rank, where the gradients are, and for MPI's allreduce of them on the host, on the slowest rank.
    measured : dict
        The measurements of each reducer in ``names``.
    """
    arrays = _Arrays(setting, comm, xp)
    feedbacks = {name: ErrorFeedback(REDUCERS[name](setting.size, setting.k), setting.dtype) for name in names}
    measured = {name: MeasuredReducer() for name in names}
    copies: list[float] = []
    dense: list[float] = []
    for experiment in range(setting.experiments):
        arrays.draw(experiment)
        timed(arrays.reduce, comm)  # a warm-up: the first call takes longer
        on_step()
        for _ in range(setting.repeats):
            copies.append(timed_alone(arrays.copy, comm))
            dense.append(float(slowest(np.array([timed(arrays.reduce, comm)]), comm)[0]))
            on_step()
        for place in np.random.default_rng((setting.seed, experiment)).permutation(len(names)):
            name = names[place]
            feedback = feedbacks[name]
            if experiment == 0:
                feedback.residual[:] = arrays.residual()
            _check(feedback, arrays, comm, measured[name])
            on_step()
            times = np.empty((2, setting.repeats))
            for repeat in range(setting.repeats):
                times[:, repeat] = _timed_step(feedback, arrays, 1 + repeat)
                on_step()
            total, select = slowest(times, comm)
            measured[name].seconds.append(total.tolist())
            measured[name].select_seconds.append(select.tolist())
    return copies, dense, measured


class _Arrays:
    """The input of one rank: its gradients and its initial residual."""

    def __init__(self, setting: LossySetting, comm: Any, xp: Any = None) -> None:
        self.setting = setting
        self.comm = comm
        self._xp = xp
        self._noise = np.empty(0, setting.dtype)
        self._given: Any = self._noise  # the same values where the gradients are
        self._total = np.empty(setting.size, setting.dtype)
        self._copied: Any = self._total if xp is None else xp.empty(setting.size, setting.dtype)

    def draw(self, experiment: int) -> None:
        """Draw the gradients of an experiment: standard normal values."""
        rng = np.random.default_rng((self.setting.seed, experiment, self.comm.rank))
        self._noise = draw_values(rng, self.setting.size + _SHIFT * (_PERIOD - 1), self.setting.dtype)
        self._given = self._noise if self._xp is None else self._xp.asarray(self._noise)

    def gradient(self, step: int) -> Any:
        """Return the gradient of a step: the values drawn before, at shifted positions, which saves drawing them again."""
        start = _SHIFT * (step % _PERIOD)
        return self._given[start : start + self.setting.size]

    def finish(self) -> None:
        """Wait until the device, if there is one, is idle."""
        if self._xp is not None:
            self._xp.cuda.Device().synchronize()

    def residual(self) -> Array:
        """Return a residual as after very many steps, for which about as many values are selected in a step as in any later one.

        Each value is a random walk with unit variance per step, which restarts from zero when it is selected, beyond +-T. Its stationary
        distribution is a triangle over that range, and it is selected every T**2 steps, so T is 1 / sqrt(density).
        """
        rng = np.random.default_rng((self.setting.seed, self.comm.rank))
        dtype = np.float64 if self.setting.dtype == "float64" else np.float32
        triangle: Array = rng.random(self.setting.size, dtype)
        triangle -= rng.random(self.setting.size, dtype)
        triangle *= self.setting.density**-0.5
        return triangle

    def copy(self) -> None:
        """Read and write N values, as the reference of the timings."""
        self._copied[:] = self.gradient(0)
        self.finish()

    def reduce(self) -> None:
        """Compute the dense sum by MPI on the host; a copy if there is only one process."""
        if self.comm.size == 1:
            np.copyto(self._total, self._noise[: self.setting.size])
        else:
            self.comm.Allreduce(self._noise[: self.setting.size], self._total)

    def summed(self, array: Array) -> Array:
        """Return the dense sum of arrays, on every rank."""
        total = array.copy()
        if self.comm.size > 1:
            self.comm.Allreduce(array, total)
        return total


def _check(feedback: ErrorFeedback, arrays: _Arrays, comm: Any, measured: MeasuredReducer) -> None:
    """Run an untimed step: check that all ranks have identical bits and that nothing is lost, and record what was sent."""
    gradient = arrays.gradient(0)
    before = as_host(feedback.residual) + as_host(gradient)
    with sar.trace() as traffic:
        update = feedback.step(gradient, comm).to_host()
    after = as_host(feedback.residual)
    ranks = comm.size
    given = contributions(feedback.contributed, feedback.reducer.size)
    ours = (checksum(update), traffic.bytes_sent, traffic.header_bytes, traffic.messages, given)
    checksums, *columns, contributed = zip(*gather(comm, ours))
    if len(set(checksums)) > 1:
        measured.faults.append("the ranks have different results")
    # The update is the mean over the P ranks of what has left their residuals.
    left = arrays.summed(before - after) / before.dtype.type(ranks)
    magnitude = arrays.summed(np.abs(before) + np.abs(after)) / before.dtype.type(ranks)
    deviation = max(gather(comm, largest_deviation(update, left, magnitude, ranks, SUM)))
    if deviation > 1:
        measured.faults.append(f"the error of residuals and update is {deviation:.3g} times the rounding bound")
    for name, column in zip(("bytes_sent", "header_bytes", "messages"), columns):
        setattr(measured, name, getattr(measured, name) + np.array(column))
    measured.contributed += sum(contributed) / ranks
    measured.entries += update.nnz


def _timed_step(feedback: ErrorFeedback, arrays: _Arrays, step: int) -> tuple[float, float]:
    """Return the seconds of a step on this rank, and the part of them spent in selection."""
    gradient, comm, non_blocking = arrays.gradient(step), arrays.comm, arrays.setting.non_blocking

    def call() -> sar.SparseStream:
        update: sar.SparseStream = feedback.istep(gradient, comm).wait() if non_blocking else feedback.step(gradient, comm)
        arrays.finish()
        return update

    return timed(call, comm), feedback.reducer.select_seconds
