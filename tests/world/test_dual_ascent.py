"""Dual coordinate ascent of several ranks, over the stand-in for MPI, in any order of the ranks: what they add up is an ascent."""

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from sparseallreduce.linear import Dataset, Hinge, Logistic, SquaredHinge
from world import hooks
from world.world import RandomOrder, World

WORLDS: dict[int, World] = {}
ROUNDS = 4


def duals(ranks, dataset, model, order, **options):
    """Return the dual objective after every round, and the weights, of each rank."""
    world = WORLDS.setdefault(ranks, World(ranks))

    def program(rank):
        solver = rank.library.load("sparseallreduce.linear.solvers.cocoa").CoCoA
        found = solver(dataset, model, comm=rank.comm, tolerance=1e-12, **options)
        for _ in range(ROUNDS):
            found.advance()
        return [each.dual for each in found.history], found.weights_of(None)

    with hooks.hooked(lambda: None):
        return world.run(program, RandomOrder(order, 0.05))


@settings(max_examples=examples(8))
@given(
    ranks=st.sampled_from([2, 3, 5]),
    model=st.sampled_from([Hinge(), SquaredHinge(), Logistic()]),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 30)),
    density=st.sampled_from([0.05, 0.3, 1.0]),
    same=st.booleans(),
    exponent=st.integers(-6, 1),
    free_intercept=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_dual_objective_never_falls_and_is_the_same_on_all_ranks(ranks, model, shape, density, same, exponent, free_intercept, seed):
    """Equal rows on all ranks make equal changes, whose sum overshoots most; a weak penalty makes long steps."""
    rng = np.random.default_rng(seed)
    X = np.where(rng.random(shape) < density, rng.standard_normal(shape), 0.0)
    if same:
        X[:] = X[0]
    dataset = Dataset.from_scipy(scipy.sparse.csr_array(X), np.where(rng.random(len(X)) < 0.5, 1.0, -1.0))
    options = {"l2": 10.0**exponent, "seed": seed, "free_intercept": free_intercept}

    found = duals(ranks, dataset, model, seed, **options)

    objectives, weights = found[0]
    if not free_intercept:  # whose centre moves, and with it the objective
        assert np.all(np.diff(objectives) >= -1e-11 * np.abs(objectives[1:])), objectives
    for theirs, others in found[1:]:
        assert theirs == objectives
        np.testing.assert_array_equal(others, weights)


@pytest.mark.parametrize("model", [Hinge(), Logistic()])
def test_the_order_of_the_ranks_does_not_matter(model):
    X = scipy.sparse.random_array((60, 30), density=0.2, rng=np.random.default_rng(1), format="csr")
    dataset = Dataset.from_scipy(X, np.where(np.arange(60) % 3 == 0, 1.0, -1.0))

    first, *others = (duals(3, dataset, model, order, l2=1e-3)[0] for order in (1, 2, 3))

    for each in others:
        assert each[0] == first[0]
        np.testing.assert_array_equal(each[1], first[1])
