"""NaNs have the same bits on every rank, over a stand-in for MPI in whose short sums each rank adds its own value first."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import bits
from strategies import some_nans

import sparseallreduce as sar
from sparseallreduce.algorithms import fixed
from sparseallreduce.algorithms.fixed import FIXED
from sparseallreduce.streams import dtypes, merging
from world import hooks
from world.world import RandomOrder, World

FLOATS = [dtype.name for dtype in dtypes.DTYPES if dtype.kind != "i"]
WORLDS = {}


def world_of(ranks, hosts):
    """One that is used again; the hosts share no memory."""
    if (ranks, hosts) not in WORLDS:
        WORLDS[ranks, hosts] = World(ranks, hosts=[f"host {rank}" for rank in range(ranks)] if hosts else None)
    return WORLDS[ranks, hosts]


def streams_of(ranks, size, dtype, width, seed, lopsided):
    """Positions that all ranks have and some of each one's own; most values are NaNs of any kind, or infinities.

    If ``lopsided``, rank 0 has more than thirty times the entries of others, so that kernels merge in one way or another.
    """
    rng = np.random.default_rng(seed)
    real = np.dtype(dtype).type(0).real.dtype if np.dtype(dtype).kind == "c" else np.dtype(dtype)
    common, streams = rng.random(size) < 0.7, []
    for rank in range(ranks):
        indices = np.flatnonzero(common | (rng.random(size) < 0.1))
        if lopsided and rank:
            indices = indices[rng.random(len(indices)) < 0.03]
        shape = (len(indices),) if width is None else (len(indices), width)
        parts = []
        for _ in range(1 + (real != dtype)):
            values = rng.integers(-3, 4, shape).astype(real)
            values[rng.random(shape) < 0.1] = np.inf
            nans = rng.random(shape) < 0.7
            values[nans] = some_nans(rng, np.count_nonzero(nans), real)
            parts.append(values)
        values = parts[0]
        if real != dtype:
            values = np.empty(shape, dtype)
            values.real, values.imag = parts
        streams.append(sar.SparseStream(indices, values, size))
    return streams


problems = st.builds(
    streams_of,
    ranks=st.shared(st.sampled_from([2, 3, 5]), key="ranks"),
    size=st.sampled_from([1, 2, 10, 100, 700]),
    dtype=st.sampled_from(FLOATS),
    width=st.sampled_from([None, None, 1, 3]),
    seed=st.integers(0, 2**32),
    lopsided=st.booleans(),
)



@pytest.mark.parametrize("algorithm", sar.algorithms())
@settings(max_examples=15)
@given(streams=problems, hosts=st.booleans(), op=st.sampled_from(["sum", "sum", "mean", "prod", "min", "max"]), seed=st.integers(0, 2**32))
def test_nans_have_the_same_bits_on_all_ranks(algorithm, streams, hosts, op, seed):
    if streams[0].dtype.kind == "c":
        op = "sum"
    world = world_of(len(streams), hosts)

    def program(rank):
        given = streams[rank.number], rank.comm, op, algorithm
        return rank.sar.allreduce(*given), rank.sar.iallreduce(*given).wait()

    with hooks.hooked(lambda: None), mock.patch.object(merging, "_LEAST", 1):
        found = world.run(program, RandomOrder(seed, 0.1))
    for blocking in (True, False):
        assert len({bits(results[blocking]) for results in found}) == 1


@pytest.mark.parametrize("algorithm", FIXED)
@settings(max_examples=15)
@given(streams=problems, hosts=st.booleans(), op=st.sampled_from(["sum", "mean", "max"]), seed=st.integers(0, 2**32))
def test_nans_of_plans_have_the_same_bits_on_all_ranks(algorithm, streams, hosts, op, seed):
    if streams[0].dtype.kind == "c":
        op = "sum"
    world = world_of(len(streams), hosts)

    def program(rank):
        stream = streams[rank.number]
        plan = rank.sar.allreduce_init(stream, rank.comm, op, algorithm, fixed_indices=True)
        plan.start(stream)
        result = plan.wait().copy()
        plan.free()
        return result

    with hooks.hooked(lambda: None), mock.patch.object(fixed, "_LEAST", 1):
        found = world.run(program, RandomOrder(seed, 0.1))
    assert len({bits(result) for result in found}) == 1
