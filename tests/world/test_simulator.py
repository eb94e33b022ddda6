"""An error anywhere in a simulation leaves it as it is: nothing is kept of it, and the next one is right."""

import gc
import random
import weakref
from collections import Counter
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.reducers.base import ReducerOperation
from sparseallreduce.runtime.simulator import api
from world import hooks

RANKS = 4
FAULTS = 8  # of each algorithm
REDUCERS = ("OkTopk", "GTopk", "TopkA", "TopkDSA", "GaussianK", "HiTopK")


@pytest.fixture(autouse=True)
def frozen():
    """What is there by now is not looked through for each fault."""
    gc.freeze()
    yield
    gc.unfreeze()


class Points:
    """Counts points by kind, and raises at one of them."""

    def __init__(self, kind="", number=0, error=None):
        self.calls, self.kind, self.number, self.error = Counter(), kind, number, error

    def point(self, kind):
        self.calls[kind] += 1
        if kind == self.kind and self.calls[kind] == self.number:
            raise self.error


def streams(seed):
    rng = np.random.default_rng(seed)
    given = []
    for _ in range(RANKS):
        indices = np.sort(rng.choice(96, 20, replace=False))
        given.append(sar.SparseStream(indices, rng.integers(1, 50, 20).astype(np.float32), 96))
    return given


def accumulators(seed):
    return list(np.random.default_rng(seed).standard_normal((RANKS, 96)).astype(np.float32))


def simulated(given, algorithm, points, delivery):
    exact, lossy = api.allreduce, ReducerOperation.run
    with ExitStack() as patches:
        patches.enter_context(hooks.hooked(lambda: points))
        patches.enter_context(mock.patch.object(api, "allreduce", lambda *args: hooks.resumable(lambda: points, exact(*args))))
        patches.enter_context(mock.patch.object(ReducerOperation, "run", lambda *args: hooks.resumable(lambda: points, lossy(*args))))
        return sar.simulate(given, algorithm, delivery=delivery, through_wire=delivery is not None)


@pytest.mark.parametrize("delivery", [None, 3])
@pytest.mark.parametrize("name", [*sar.algorithms(), *REDUCERS])
def test_an_error_in_a_simulation_is_raised_and_leaves_nothing(name, delivery):
    is_reducer = name in REDUCERS
    make = accumulators if is_reducer else streams

    def algorithm():
        return [getattr(sar, name)(96, 12) for _ in range(RANKS)] if is_reducer else name

    counted = Points()
    simulated(make(1), algorithm(), counted, delivery)
    faults = [(kind, number) for kind, count in counted.calls.items() for number in range(1, count + 1)]
    rng = random.Random(name)
    expected = [bits(output) for output in sar.simulate(make(2), algorithm()).outputs]
    for number, (kind, at) in enumerate(rng.sample(faults, min(FAULTS, len(faults)))):
        error = [MemoryError("struck"), KeyboardInterrupt("struck"), sar.StreamError("struck")][number % 3]
        given, chosen = make(1), algorithm()
        arrays = [weakref.ref(each if is_reducer else each._values) for each in given]
        with pytest.raises(type(error), match="struck") as raised:
            simulated(given, chosen, Points(kind, at, error), delivery)
        assert raised.value is error, (kind, at)
        del raised, given, error
        gc.collect()
        assert not any(array() is not None for array in arrays), (kind, at)
        if is_reducer:
            assert [reducer.state()["steps"] <= 1 for reducer in chosen]  # none is busy
        again = sar.simulate(make(2), algorithm())  # with new reducers, as some ranks had done their operation
        assert [bits(output) for output in again.outputs] == expected, (kind, at)


def bits(output):
    stream = getattr(output, "update", output)
    return stream.to_dense().tobytes()
