"""``check_reducer``: whether a lossy reducer keeps the promises of its kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.reducers import ErrorFeedback, Reducer
from sparseallreduce.runtime.simulator import same_bits, simulate
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.testing.report import Report, expect

__all__ = ["check_reducer"]

_STEPS = 3


def check_reducer(make: Callable[[int, int], Reducer], *, examples: int = 60, seed: int = 0) -> Report:
    """Check that a reducer's update is bitwise identical on every rank, and that error feedback around it loses nothing.

    Parameters
    ----------
    make : callable
        Returns a reducer of a size and a k: a subclass of :class:`~sparseallreduce.Reducer`, or a function.
    examples : int
        Sets of accumulators to try, each for three steps.
    seed : int
        Seed of the examples.

    Returns
    -------
    Report

    Raises
    ------
    CheckFailure
        For the first promise that does not hold. Examples with few ranks and short vectors come first.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> check_reducer(sar.TopkA, examples=5)
    Report("reducer 'topka'", 65 examples)
    """
    report, rng = Report(f"reducer {make(2, 1).name!r}"), np.random.default_rng(seed)
    drawn = [(int(rng.integers(1, 10)), int(rng.choice([1, 2, 9, 64, 500])), int(rng.integers(1 << 31))) for _ in range(examples)]
    for ranks, size, own in sorted(drawn):
        _check(report, make, ranks, size, own)
    return report


def _check(report: Report, make: Callable[[int, int], Reducer], ranks: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    k, dtype = int(rng.integers(1, size + 1)), np.dtype(("float32", "float64")[seed % 2])
    gradients = [[_gradient(rng, size, dtype) for _ in range(ranks)] for _ in range(_STEPS)]

    def described() -> str:
        return f"ranks={ranks}, size={size}, k={k}, dtype={dtype.name}, seed={seed}"

    reducers = [make(size, k) for _ in range(ranks)]
    twins: Sequence[Any] = copy.deepcopy(reducers)
    for step, given in enumerate(gradients):
        before = [accumulator.copy() for accumulator in given]
        with report.promise("the update is the same bits on every rank, in any order of delivery", described):
            outputs = simulate(given, reducers).outputs
            shuffled = simulate(given, twins, delivery=seed + step).outputs
            for output in (*outputs, *shuffled):
                expect(same_bits(output.update, outputs[0].update), f"step {step}: a rank has another update than rank 0")
        with report.promise("accumulators are left as they are", described):
            expect(all(np.array_equal(a, b) for a, b in zip(given, before)), f"step {step}: an accumulator has changed")
        with report.promise("the update is the sum of what the ranks have contributed and not returned", described):
            _expect_sum(outputs, given, reducers)
    with report.promise("a restored reducer goes on with the same bits", described):
        restored = [make(size, k) for _ in range(ranks)]
        for reducer, twin in zip(restored, reducers):
            reducer.restore(twin.state())
        ours, theirs = (simulate(gradients[0], each).outputs[0].update for each in (restored, reducers))
        expect(same_bits(ours, theirs), "the update of a restored reducer differs")
    feedbacks: Sequence[Any] = [ErrorFeedback(make(size, k), dtype) for _ in range(ranks)]
    applied = np.zeros(size)
    for given in gradients:
        with report.promise("error feedback loses nothing", described):
            applied += ranks * simulate(given, feedbacks).outputs[0].to_dense().astype(float)
            fed = np.sum([np.sum(each, axis=0, dtype=float) for each in gradients[: feedbacks[0].gradients]], axis=0)
            kept = np.sum([feedback.residual for feedback in feedbacks], axis=0, dtype=float)
            scale = float(np.abs(fed).max(initial=1.0))
            expect(np.allclose(applied + kept, fed, rtol=1e-4, atol=1e-5 * scale), "updates and residuals do not add up to the gradients")


def _gradient(rng: np.random.Generator, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    gradient = rng.normal(size=size).astype(dtype)
    gradient[rng.random(size) < rng.choice([0.0, 0.5, 0.95])] = 0
    return gradient


def _expect_sum(outputs: Sequence[Any], accumulators: Sequence[NDArray[Any]], reducers: Sequence[Reducer]) -> None:
    total = np.zeros(len(accumulators[0]))
    for output, accumulator, reducer in zip(outputs, accumulators, reducers):
        contributed = output.contributed
        if not isinstance(contributed, slice):
            places = np.asarray(contributed)
            expect(len(places) < 2 or (np.diff(places.astype(np.int64)) > 0).all(), "contributed indices are not increasing")
        total[contributed] += accumulator[contributed]
        if isinstance(reducer.returned, SparseStream):
            total -= reducer.returned.to_dense()
    update = outputs[0].update.to_dense()
    expect(np.allclose(update, total, rtol=1e-4, atol=1e-5), "the update differs from the sum of what was contributed")
