"""Samples of the ranks' sets tell the size of their union, and which parts of the index space are fuller than others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce import Machine, SparseStream
from sparseallreduce.algorithms.choose import choose, problem_of
from sparseallreduce.algorithms.overlap import SAMPLE_BYTES, Overlap, estimated, sample_of
from sparseallreduce.streams.reduction import Reduction


def stream_of(indices, size):
    return SparseStream(indices, np.ones(len(indices), np.float32), size)


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
        overlap = estimated([sample_of(stream_of(indices, size)) for indices in sets], size)
        put_in = sum(map(len, sets))
        shares = dict(overlap.union)
        assert shares[1] == 1.0
        errors.append(shares[ranks] * put_in / len(np.unique(np.concatenate(sets))) - 1)
    assert np.sqrt(np.mean(np.square(errors))) < 0.1
    assert abs(np.mean(errors)) < 0.05


def test_sets_that_are_the_same_or_have_nothing_in_common_are_known_for_sure():
    size, ranks = 1 << 20, 4
    for kind, share in (("same", 1 / ranks), ("disjoint", 1.0)):
        samples = [sample_of(stream_of(drawn(kind, rank, size, 5000, 1), size)) for rank in range(ranks)]
        assert dict(estimated(samples, size).union)[ranks] == pytest.approx(share)


def test_a_part_that_is_fuller_than_others_is_known_and_chance_makes_none():
    size = 1 << 20
    even = [sample_of(stream_of(drawn("uniform", rank, size, 20_000, 3), size)) for rank in range(4)]
    assert estimated(even, size).imbalance == 1.0
    low = [sample_of(stream_of(np.arange(rank, 80_000, 4), size)) for rank in range(4)]
    assert estimated(low, size).imbalance > 3
    problem = problem_of(stream_of(np.arange(20_000), size), 20_000, 4, Reduction(), overlap=estimated(low, size))
    assert choose(problem, Machine(alpha=1e-6, beta=8e-9, beta_dense=8e-9, codec=4e-9, overlap=0.9)) == "ssar_recursive_doubling"


@given(
    counts=st.lists(st.integers(0, 3000), min_size=1, max_size=20),
    size=st.sampled_from([5000, 2**32, 2**32 + 1, 2**60]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_sets_have_samples_and_all_ranks_the_same_overlap(counts, size, seed):
    rng = np.random.default_rng(seed)
    samples = [sample_of(stream_of(np.unique(rng.integers(0, size, count, np.uint64)), size)) for count in counts]
    assert all(len(sample) <= SAMPLE_BYTES for sample in samples)
    overlap = estimated(samples, size)
    if overlap is None:
        return
    assert Overlap.unpack(overlap.pack()) == overlap
    assert [width for width, _ in overlap.union] == sorted({width for width, _ in overlap.union})
    assert overlap.union[-1][0] == len(counts) and overlap.imbalance >= 1
    assert all(1 / width - 1e-9 <= share <= 1 for width, share in overlap.union)
    problem = problem_of(stream_of([0], size), sum(counts) / len(counts), len(counts), Reduction(), overlap=overlap)
    assert all(problem.held(ranks) <= problem.held(ranks + 1) * 1.3 for ranks in range(1, len(counts)))


def test_sets_that_overlap_more_are_split_sooner():
    size, count, machine = 1 << 22, 40_000, Machine(alpha=1e-5, beta=8e-9, beta_dense=8e-9, codec=4e-9, overlap=0.9)
    chosen = {}
    for kind in ("uniform", "same"):
        streams = [stream_of(drawn(kind, rank, size, count, 0), size) for rank in range(4)]
        overlap = estimated([sample_of(stream) for stream in streams], size)
        chosen[kind] = choose(problem_of(streams[0], count, 4, Reduction(), overlap=overlap), machine)
    assert chosen == {"uniform": "ssar_recursive_doubling", "same": "ssar_split_allgather"}
