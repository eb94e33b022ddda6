"""Samples of the ranks' sets tell the size of their union, and where their entries lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce import Machine, SparseStream
from sparseallreduce.algorithms.choose import choose, problem_of
from sparseallreduce.algorithms.cost import predicted_time
from sparseallreduce.algorithms.overlap import estimated, sample_bytes, sample_of
from sparseallreduce.streams.reduction import Reduction


def stream_of(indices, size):
    return SparseStream(indices, np.ones(len(indices), np.float32), size)


def estimate(streams):
    return estimated([sample_of(stream, rank, len(streams)) for rank, stream in enumerate(streams)], streams[0].size)


def drawn(kind, rank, size, count, seed):
    rng = np.random.default_rng((seed, 0 if kind == "same" else rank))
    if kind == "disjoint":
        return np.sort(rng.choice(size // 8, count, replace=False)) * 8 + rank
    if kind == "clustered":
        return np.unique((rng.choice(size // 64, count // 64, replace=False)[:, None] * 64 + np.arange(64)).ravel())
    if kind == "skewed":
        return np.unique((size * rng.random(2 * count) ** 6).astype(np.int64))[:count]
    return np.sort(rng.choice(size, count, replace=False))


@pytest.mark.parametrize("kind", ["uniform", "same", "disjoint", "clustered", "skewed"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_union_is_estimated_within_a_tenth(kind, ranks):
    size, count, errors = 1 << 18, 6400, []
    for seed in range(20):
        sets = [drawn(kind, rank, size, count, seed) for rank in range(ranks)]
        overlap = estimate([stream_of(indices, size) for indices in sets])
        put_in = sum(map(len, sets))
        shares = dict(overlap.union)
        assert shares[1] == 1.0
        errors.append(shares[ranks] * put_in / len(np.unique(np.concatenate(sets))) - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.1
    assert abs(np.mean(errors)) < 0.05


def test_sets_that_are_the_same_or_have_nothing_in_common_are_known_for_sure():
    size, ranks = 1 << 20, 4
    for kind, share in (("same", 1 / ranks), ("disjoint", 1.0)):
        overlap = estimate([stream_of(drawn(kind, rank, size, 5000, 1), size) for rank in range(ranks)])
        assert dict(overlap.union)[ranks] == pytest.approx(share)


def test_what_lies_close_together_is_known_and_chance_makes_no_difference():
    size, machine = 1 << 20, Machine(alpha=1e-6, beta=8e-9, beta_dense=8e-9, codec=4e-9, overlap=0.9)
    even, low = ([drawn("uniform", rank, size, 20_000, 3) for rank in range(4)], [np.arange(rank, 80_000, 4) for rank in range(4)])
    times = []
    for sets, clustered in ((even, False), (low, True)):
        streams = [stream_of(indices, size) for indices in sets]
        problem = problem_of(streams[0], 20_000, 4, Reduction(), overlap=estimate(streams))
        assert (problem.occupancy[0] < 0.1) == clustered
        assert max(problem.parts[:3]) < 1.1
        times.append(predicted_time("ssar_split_allgather", problem, machine))
    assert times[1] < times[0]  # since gaps take fewer bytes


def test_a_dense_stream_among_others_makes_the_sum_dense():
    size = 1 << 16
    streams = [stream_of(drawn("uniform", rank, size, 1000, 0), size) for rank in range(3)]
    streams.append(SparseStream.from_dense(np.ones(size, np.float32)))
    problem = problem_of(streams[0], size / 4, 4, Reduction(), overlap=estimate(streams))
    assert problem.held(4) == pytest.approx(size, rel=0.05) and problem.imbalance > 3


@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    size=st.sampled_from([5000, 2**32, 2**32 + 1, 2**60]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sets_have_samples_and_all_ranks_the_same_overlap(counts, size, seed):
    rng = np.random.default_rng(seed)
    streams = [stream_of(np.unique(rng.integers(0, size, count, np.uint64)), size) for count in counts]
    samples = [sample_of(stream, rank, len(counts)) for rank, stream in enumerate(streams)]
    assert all(len(sample) <= sample_bytes(size) for sample in samples)
    overlap = estimated(samples, size)
    if overlap is None:
        return
    assert estimated(samples, size) == overlap and estimated(samples, size).digest == overlap.digest
    assert [width for width, _ in overlap.union] == sorted({width for width, _ in overlap.union})
    assert overlap.union[-1][0] == len(counts)
    assert all(1 / width - 1e-9 <= share <= 1 for width, share in overlap.union)
    problem = problem_of(stream_of([0], size), sum(counts) / len(counts), len(counts), Reduction(), overlap=overlap)
    assert all(problem.held(ranks) <= problem.held(ranks + 1) * 1.3 for ranks in range(1, len(counts)))


def test_sets_that_overlap_more_are_split_sooner():
    size, count, machine = 1 << 22, 40_000, Machine(alpha=1e-5, beta=8e-9, beta_dense=8e-9, codec=4e-9, overlap=0.9)
    chosen = {}
    for kind in ("uniform", "same"):
        streams = [stream_of(drawn(kind, rank, size, count, 0), size) for rank in range(4)]
        overlap = estimate(streams)
        chosen[kind] = choose(problem_of(streams[0], count, 4, Reduction(), overlap=overlap), machine)
    assert chosen == {"uniform": "ssar_recursive_doubling", "same": "ssar_split_allgather"}
