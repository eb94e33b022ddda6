"""Steps of error feedback on synthetic gradients, timed and checked: what `sparseallreduce bench --lossy` reports."""

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

_SHIFT = 613  # positions that the gradient of a step lies beside that of the step before
_TURNS = 101  # steps until the gradients come again


class LossySetting(NamedTuple):
    """What is measured."""

    size: int
    density: float
    dtype: str
    experiments: int  # each with new data
    repeats: int  # timed steps of every reducer in an experiment
    seed: int
    non_blocking: bool

    @property
    def k(self) -> int:
        """How many values to sum."""
        return min(self.size, max(1, entries_of(self.size, self.density)))


@dataclass
class MeasuredReducer:
    """What a reducer came to; the same on all ranks."""

    seconds: list[list[float]] = field(default_factory=list)  # by experiment and repeat, each of the slowest rank
    select_seconds: list[list[float]] = field(default_factory=list)  # of these, likewise
    bytes_sent: Any = 0  # by rank, over the steps that were checked
    header_bytes: Any = 0  # of these
    messages: Any = 0
    contributed: float = 0.0  # entries of a rank that were in the sum, over these steps and the ranks
    entries: float = 0.0  # of the sum, over these steps
    faults: list[str] = field(default_factory=list)


def measure(
    setting: LossySetting, names: list[str], comm: Any, on_step: Callable[[], object] = lambda: None, xp: Any = None
) -> tuple[list[float], list[float], dict[str, MeasuredReducer]]:
    """Run the experiments; collective over ``comm``. With ``xp``, which is CuPy, gradients and residuals lie on the device.

    Returns
    -------
    copies, dense : list of float
        Seconds of a copy of N values on one rank, where gradients lie, and of their allreduce by MPI, on the host, on the slowest.
    measured : dict
        Of every reducer in ``names``.
    """
    arrays = _Arrays(setting, comm, xp)
    feedbacks = {name: ErrorFeedback(REDUCERS[name](setting.size, setting.k), setting.dtype) for name in names}
    measured = {name: MeasuredReducer() for name in names}
    copies: list[float] = []
    dense: list[float] = []
    for experiment in range(setting.experiments):
        arrays.draw(experiment)
        timed(arrays.reduce, comm)  # the first one takes longer
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
    """What this rank puts in: gradients, and the residual that it starts with."""

    def __init__(self, setting: LossySetting, comm: Any, xp: Any = None) -> None:
        self.setting = setting
        self.comm = comm
        self._xp = xp
        self._noise = np.empty(0, setting.dtype)
        self._given: Any = self._noise  # the same where gradients lie
        self._total = np.empty(setting.size, setting.dtype)
        self._copied: Any = self._total if xp is None else xp.empty(setting.size, setting.dtype)

    def draw(self, experiment: int) -> None:
        """Make the gradients of an experiment: standard normal values."""
        rng = np.random.default_rng((self.setting.seed, experiment, self.comm.rank))
        self._noise = draw_values(rng, self.setting.size + _SHIFT * (_TURNS - 1), self.setting.dtype)
        self._given = self._noise if self._xp is None else self._xp.asarray(self._noise)

    def gradient(self, step: int) -> Any:
        """That of a step: the values of the others, but elsewhere, at the cost of drawing them once."""
        start = _SHIFT * (step % _TURNS)
        return self._given[start : start + self.setting.size]

    def finish(self) -> None:
        """Wait until the device has nothing more to do, if there is one."""
        if self._xp is not None:
            self._xp.cuda.Device().synchronize()

    def residual(self) -> Array:
        """A residual as after very many steps, so that as many values come to be chosen as go on waiting.

        Each value is a random walk of unit variance a step, which starts anew from zero when it is chosen, beyond +-T. Its stationary
        distribution is a triangle over that range, and it is chosen every T**2 steps: so T is 1 / sqrt(density).
        """
        rng = np.random.default_rng((self.setting.seed, self.comm.rank))
        dtype = np.float64 if self.setting.dtype == "float64" else np.float32
        triangle: Array = rng.random(self.setting.size, dtype)
        triangle -= rng.random(self.setting.size, dtype)
        triangle *= self.setting.density**-0.5
        return triangle

    def copy(self) -> None:
        """What everything is compared with: read N values, and write N."""
        self._copied[:] = self.gradient(0)
        self.finish()

    def reduce(self) -> None:
        """The dense sum by MPI, on the host; for a process alone, a copy there."""
        if self.comm.size == 1:
            np.copyto(self._total, self._noise[: self.setting.size])
        else:
            self.comm.Allreduce(self._noise[: self.setting.size], self._total)

    def summed(self, array: Array) -> Array:
        """The dense sum of arrays, on every rank."""
        total = array.copy()
        if self.comm.size > 1:
            self.comm.Allreduce(array, total)
        return total


def _check(feedback: ErrorFeedback, arrays: _Arrays, comm: Any, measured: MeasuredReducer) -> None:
    """A step that is not timed: whether all ranks have the same bits, whether nothing is lost, and what was sent."""
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
        measured.faults.append("the ranks hold different bits")
    # What has left the residuals is what came to the weights, P times over, since those get the mean.
    left = arrays.summed(before - after) / before.dtype.type(ranks)
    magnitude = arrays.summed(np.abs(before) + np.abs(after)) / before.dtype.type(ranks)
    deviation = max(gather(comm, largest_deviation(update, left, magnitude, ranks, SUM)))
    if deviation > 1:
        measured.faults.append(f"residuals and update are off by {deviation:.3g} times what rounding explains")
    for name, column in zip(("bytes_sent", "header_bytes", "messages"), columns):
        setattr(measured, name, getattr(measured, name) + np.array(column))
    measured.contributed += sum(contributed) / ranks
    measured.entries += update.nnz


def _timed_step(feedback: ErrorFeedback, arrays: _Arrays, step: int) -> tuple[float, float]:
    """Seconds of a step on this rank, and those of selection among them."""
    gradient, comm, non_blocking = arrays.gradient(step), arrays.comm, arrays.setting.non_blocking

    def call() -> sar.SparseStream:
        update: sar.SparseStream = feedback.istep(gradient, comm).wait() if non_blocking else feedback.step(gradient, comm)
        arrays.finish()
        return update

    return timed(call, comm), feedback.reducer.select_seconds
