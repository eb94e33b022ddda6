"""Reducers with every selector: the rules hold whatever is chosen, and however many."""

from functools import partial

import numpy as np
import pytest
from lossy import Vectors
from oracle import bits

import sparseallreduce as sar
from sparseallreduce.streams import selection

SELECTORS = {
    "exact": selection.ExactTopK,
    "chunks": partial(selection.ChunkTopK, chunk=64),
    "without zeros": selection.NonZeroTopK,
    "threshold": lambda k: selection.Threshold(3.0),
    "threshold reuse": partial(selection.ThresholdReuse, period=4),
    "Gaussian": selection.Gaussian,
    "MSTopK": selection.MSTopK,
    "double sampling": selection.DoubleSampling,
    "approximate": selection.ApproximateTopK,
    "random": partial(selection.RandomK, seed=7),
}
REDUCERS = {"topka": sar.TopkA, "topkdsa": sar.TopkDSA, "gtopk": sar.GTopk}
every_selector = pytest.mark.parametrize("chosen", SELECTORS)
every_reducer = pytest.mark.parametrize("name", REDUCERS)


def feedbacks(case, name, chosen):
    return [sar.ErrorFeedback(reducer, case.dtype) for reducer in case.reducers(REDUCERS[name], selector=SELECTORS[chosen])]


@every_reducer
@every_selector
def test_nothing_is_lost_with_any_selector(name, chosen):
    case = Vectors(3, 2000, 40, "float64", seed=1)
    group = feedbacks(case, name, chosen)
    came_in, applied = np.zeros((2, case.size))
    for step in range(12):
        gradients = case.step(step)
        out = sar.simulate(gradients, group)
        assert len({bits(mean) for mean in out.outputs}) == 1
        came_in += np.sum(gradients, axis=0)
        applied += 3 * out.outputs[0].to_dense()
        assert out.outputs[0].nnz <= (40 if name == "gtopk" else 2000)
    np.testing.assert_allclose(applied + sum(feedback.residual for feedback in group), came_in, rtol=0, atol=1e-10)
    assert applied.any()


@every_reducer
@every_selector
def test_steps_with_any_selector_go_on_from_a_checkpoint_to_the_bit(name, chosen):
    case = Vectors(2, 2000, 40, seed=2)
    group, restored = feedbacks(case, name, chosen), feedbacks(case, name, chosen)
    for step in range(6):
        sar.simulate(case.step(step), group)
    for new, old in zip(restored, group):
        state = old.state()
        assert all(isinstance(value, bool | int | float | str | np.ndarray) for value in state.values()), "what a checkpoint can hold"
        new.restore(state)
    for step in range(6, 12):
        first, second = sar.simulate(case.step(step), group), sar.simulate(case.step(step), restored)
        assert bits(first.outputs[0]) == bits(second.outputs[0])


@every_selector
def test_a_reset_selector_is_a_new_one(chosen):
    case = Vectors(1, 2000, 40, seed=3)
    reducer, new = (sar.TopkA(2000, 40, selector=SELECTORS[chosen]) for _ in range(2))
    for step in range(3):
        reducer.allreduce(case.step(step)[0], sar.SERIAL)
    reducer.reset()
    for step in range(3, 6):
        (vector,) = case.step(step)
        assert bits(reducer.allreduce(vector, sar.SERIAL).update) == bits(new.allreduce(vector, sar.SERIAL).update)


def test_gaussiank_gathers_what_gaussian_selects():
    case = Vectors(4, 3000, 60, seed=4)
    out = sar.simulate(case.first, case.reducers(sar.GaussianK))
    chosen = [selection.Gaussian(60)(vector) for vector in case.first]
    lower, upper = chosen[0].to_dense() + chosen[1].to_dense(), chosen[2].to_dense() + chosen[3].to_dense()
    np.testing.assert_array_equal(out.outputs[0].update.to_dense(), lower + upper)
    for reduced, ours in zip(out.outputs, chosen):
        np.testing.assert_array_equal(reduced.contributed, ours.indices)


def test_gaussiank_passes_its_options_on():
    vector = np.random.default_rng(5).normal(size=3000) ** 3  # with a longer tail than a normal distribution: too few are beyond
    few = sar.GaussianK(3000, 300, least=0).allreduce(vector, sar.SERIAL).update
    more = sar.GaussianK(3000, 300, least=0.9, scale=0.5).allreduce(vector, sar.SERIAL).update
    assert few.nnz < 270 < more.nnz
    with pytest.raises(sar.StreamError, match="scale"):
        sar.GaussianK(3000, 300, scale=2)


def test_a_random_choice_is_the_same_on_all_ranks():
    """So that the sum has k entries, each from all ranks."""
    case = Vectors(5, 1000, 30, seed=6)
    out = sar.simulate(case.first, case.reducers(sar.TopkA, selector=SELECTORS["random"]))
    assert out.outputs[0].update.nnz == 30
    assert all((reduced.contributed == out.outputs[0].contributed).all() for reduced in out.outputs)
    np.testing.assert_allclose(out.outputs[0].update.values, np.sum(case.first, axis=0)[out.outputs[0].contributed], rtol=1e-5)
