"""NaNs have the same bits on every rank: of sums that several ranks make, each from what comes to it in pieces of its own.

Which of two NaNs a sum is depends on the order of the operands, and that on whether values are added many at a time, or the last few.
"""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import bits
from strategies import deliveries, some_nans
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.algorithms import fixed
from sparseallreduce.algorithms.fixed import Doubling, Kind
from sparseallreduce.algorithms.ssar_recursive_doubling import ssar_recursive_doubling
from sparseallreduce.algorithms.steps import Exchange
from sparseallreduce.streams import dtypes, merging
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.reduction import Reduction

FLOATS = [dtype.name for dtype in dtypes.DTYPES if dtype.kind != "i"]
REDUCERS = (sar.OkTopk, sar.GTopk, sar.TopkA, sar.TopkDSA, sar.GaussianK, sar.HiTopK)


class Coming:
    """A message of which the first entries are here."""

    masked = False

    def __init__(self, stream):
        self._stream, self.stored, self.arrived = stream, stream.stored, 0

    def prefix(self):
        indices = None if self._stream.is_dense else self._stream._entries()[0][: self.arrived]
        return indices, self._stream._stored[: self.arrived]


def nans_of(rank, count, dtype, seed=0):
    dtype = np.dtype(dtype)
    if dtype.kind != "c":
        return some_nans(np.random.default_rng([seed, rank]), count, dtype)
    values = np.empty(count, dtype)
    values.real, values.imag = (nans_of(2 * rank + part + 5, count, values.real.dtype, seed) for part in range(2))
    return values


def exchanged(schedule, theirs, step):
    """The result of a schedule of two ranks, to which the other's stream comes so many entries at a time."""
    value = None
    try:
        while True:
            taken = schedule.send(value)
            value = getattr(taken, "stream", None)
            if isinstance(taken, Exchange):
                coming = Coming(theirs)
                for arrived in range(step, theirs.stored, step):
                    coming.arrived = arrived
                    taken.merging.advance(coming)
                value = taken.merging.finish(theirs)
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=examples(40))
@given(
    entries=st.tuples(st.sampled_from([1, 40, 1000, 3000]), st.sampled_from([1, 30, 90, 1000])),
    steps=st.tuples(st.integers(1, 3000), st.integers(1, 100)),
    density=st.sampled_from([0.0, 0.1, None]),
)
def test_nans_do_not_depend_on_how_a_stream_arrives(dtype, entries, steps, density):
    size, rng, streams = 4000, np.random.default_rng(entries), []
    for rank, count in enumerate(entries):
        streams.append(sar.SparseStream(np.sort(rng.choice(size, count, False)), nans_of(rank, count, dtype), size))
    results = []
    with mock.patch.object(merging, "_LEAST", 1):
        for rank, step in enumerate(steps):
            reduction = Reduction(SUM, density)
            entered = [Reduction(SUM, density).enter(stream) for stream in streams]
            results.append(exchanged(ssar_recursive_doubling(entered[rank], rank, 2, reduction), entered[1 - rank], step))
    assert bits(results[0]) == bits(results[1])


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=examples(20))
@given(count=st.integers(1, 300), steps=st.tuples(st.integers(1, 100), st.integers(1, 300)))
def test_nans_do_not_depend_on_how_values_of_a_plan_arrive(dtype, count, steps):
    indices, results = np.arange(count, dtype=np.uint32), []
    values = [nans_of(rank, count, dtype) for rank in range(2)]
    with mock.patch.object(fixed, "_LEAST", 1):
        for rank, step in enumerate(steps):
            stage = Doubling(rank, 2, Kind(SUM, np.dtype(dtype), ()))
            exchanged_sets = stage.configure(indices, count)
            next(exchanged_sets)
            with pytest.raises(StopIteration):
                exchanged_sets.send(fixed.set_of(indices, count))
            theirs = fixed.stream_of(values[1 - rank])
            results.append(exchanged(stage.run(values[rank].copy()), theirs, step).tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("algorithm", sar.algorithms())
@settings(max_examples=examples(30))
@given(
    ranks=st.integers(1, 8),
    size=st.sampled_from([1, 2, 9, 100, 500]),
    dtype=st.sampled_from(FLOATS),
    op=st.sampled_from(["sum", "mean", "prod", "min", "max"]),
    codec=st.sampled_from(["exact", "exact", "float16", "bfloat16"]),
    seed=st.integers(0, 2**32),
    delivery=deliveries(),
)
def test_simulated_ranks_have_the_same_nans(algorithm, ranks, size, dtype, op, codec, seed, delivery):
    rng = np.random.default_rng(seed)
    options = {} if codec == "exact" or dtype not in ("float32", "float64") or op not in ("sum", "mean") else {"value_codec": codec}
    op = op if np.dtype(dtype).kind != "c" else "sum"
    streams = []
    for rank in range(ranks):
        indices = np.flatnonzero(rng.random(size) < rng.choice([0.1, 0.5, 1.0]))
        values = nans_of(rank, len(indices), dtype, seed)
        values[rng.random(len(indices)) < 0.3] = rng.choice([1.0, np.inf, -np.inf] if not options else [1.0])
        streams.append(sar.SparseStream(indices, values, size))
    out = sar.simulate(streams, algorithm, op=op, delivery=delivery, through_wire=True, **options)
    assert len({bits(result) for result in out.outputs}) == 1


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_updates_of_reducers_have_the_same_nans_on_all_ranks(reducer, ranks):
    size, k = 300, 60
    for seed in range(4):
        rng = np.random.default_rng(seed)
        accumulators = []
        for rank in range(ranks):
            accumulator = rng.normal(size=size).astype(np.float32)
            some = rng.random(size) < (0.02, 0.1, 0.5, 1.0)[seed]
            accumulator[some] = nans_of(rank, np.count_nonzero(some), "float32", seed)
            accumulators.append(accumulator)
        options = {"hosts": 2} if reducer is sar.HiTopK and ranks % 2 == 0 else {}
        network = sar.Network(hosts=options["hosts"]) if options else sar.Network()
        out = sar.simulate(accumulators, algorithm=[reducer(size, k) for _ in range(ranks)], network=network)
        assert len({bits(output.update) for output in out.outputs}) == 1
