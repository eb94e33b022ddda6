"""TopkA whose values travel in few bits, and error feedback that decays: what is not sent is kept, to the rounding of additions."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from lossy import Vectors
from oracle import bits
from strategies import deliveries

import sparseallreduce as sar
from sparseallreduce.streams.selection import ChunkTopK, ExactTopK

CODECS = ("float16", "bfloat16", "qsgd8", "qsgd4", "qsgd2")
SELECTORS = {"exact": ExactTopK, "chunks": partial(ChunkTopK, chunk=100)}
every_codec = pytest.mark.parametrize("codec", CODECS)


def feedbacks(case, codec, selector="chunks", average="ranks", **options):
    return [
        sar.ErrorFeedback(reducer, case.dtype, **options)
        for reducer in case.reducers(sar.TopkA, selector=SELECTORS[selector], value_codec=codec, seed=5, average=average)
    ]


@every_codec
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_nothing_is_lost(ranks, selector, codec):
    case = Vectors(ranks, 1000, 40, "float64", seed=1)
    group = feedbacks(case, codec, selector)
    came_in, applied = np.zeros((2, case.size))
    for step in range(20):
        gradients = case.step(step)
        out = sar.simulate(gradients, group)
        assert len({bits(mean) for mean in out.outputs}) == 1
        came_in += np.sum(gradients, axis=0)
        applied += ranks * out.outputs[0].to_dense()
        assert all(feedback.reducer.returned.nnz for feedback in group), "this test is to see what coding has lost"
    np.testing.assert_allclose(applied + sum(feedback.residual for feedback in group), came_in, rtol=0, atol=1e-10)
    assert applied.any()


@pytest.mark.parametrize("size, k", [(0, 0), (1, 1), (3, 3), (7, 5)])
@every_codec
def test_vectors_of_any_size(size, k, codec):
    case = Vectors(3, size, k, "float32")
    group = feedbacks(case, codec)
    out = sar.simulate(case.first, group)
    assert len({bits(mean) for mean in out.outputs}) == 1
    left = sum(feedback.residual.astype(np.float64) for feedback in group)
    np.testing.assert_allclose(3.0 * out.outputs[0].to_dense() + left, np.sum(case.first, axis=0, dtype=np.float64), rtol=1e-5, atol=1e-5)


@every_codec
def test_a_checkpoint_goes_on_to_the_bit(codec):
    case = Vectors(3, 1000, 40, seed=2)
    group, restored = feedbacks(case, codec, decay=0.9), feedbacks(case, codec, decay=0.9)
    for step in range(3):
        sar.simulate(case.step(step), group)
    for old, new in zip(group, restored):
        new.restore(old.state())
    for step in range(3, 6):
        first, second = sar.simulate(case.step(step), group), sar.simulate(case.step(step), restored)
        assert bits(first.outputs[0]) == bits(second.outputs[0])


@given(deliveries())
@settings(max_examples=10, deadline=None)
def test_the_order_of_delivery_changes_no_bit(delivery):
    case = Vectors(5, 2000, 60, seed=3)
    found = [sar.simulate(case.first, feedbacks(case, "qsgd2"), delivery=order).outputs for order in (None, delivery)]
    assert len({bits(mean) for outputs in found for mean in outputs}) == 1


def test_two_bits_a_value_take_a_tenth_of_pairs_of_index_and_value():
    case = Vectors(2, 1 << 18, (1 << 18) // 50, seed=4)
    slow = sar.Network(latency=1e-5, bandwidth=1.25e8)
    coded, plain = (sar.simulate(case.first, feedbacks(case, codec), network=slow) for codec in ("qsgd2", "exact"))
    pairs = 8 * case.k
    assert coded.bytes_received.max() < 0.16 * pairs < 0.7 * plain.bytes_received.max()


def test_what_is_old_decays():
    case = Vectors(2, 50, 3, "float64", seed=6)
    group = [sar.ErrorFeedback(sar.TopkA(case.size, case.k), "float64", decay=0.5) for _ in range(2)]
    expected = np.zeros((2, case.size))
    for step in range(5):
        gradients = case.step(step)
        sar.simulate(gradients, group)
        for residual, gradient in zip(expected, gradients):
            residual *= 0.5
            residual += gradient
            residual[np.argsort(-np.abs(residual), kind="stable")[: case.k]] = 0
    np.testing.assert_array_equal([feedback.residual for feedback in group], expected)


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.1, float("nan")])
def test_a_decay_that_is_none_is_an_error(decay):
    with pytest.raises(sar.AlgorithmError, match="above 0 and at most 1"):
        sar.ErrorFeedback(sar.TopkA(4, 1), decay=decay)


@pytest.mark.parametrize("codec", ["exact", "qsgd2"])
@pytest.mark.parametrize("ranks, k", [(1, 40), (3, 40), (4, 40), (4, 700), (3, 1000)])
def test_the_mean_over_senders_divides_a_value_by_the_ranks_that_sent_it(ranks, k, codec):
    """Also where the sum is dense, or each rank's own values are."""
    case = Vectors(ranks, 1000, k, seed=4)
    means = {}
    for average in ("ranks", "senders"):
        group = feedbacks(case, codec, average=average)
        out = sar.simulate(case.first, group)
        assert len({bits(mean) for mean in out.outputs}) == 1
        means[average] = out.outputs[0].to_dense()
        sent = np.array([gradient - feedback.residual for gradient, feedback in zip(case.first, group)])
    senders = np.maximum(np.count_nonzero(np.abs(sent) > 1e-6, axis=0), 1)
    np.testing.assert_allclose(means["senders"], sent.sum(axis=0) / senders, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(means["senders"] * senders, means["ranks"] * ranks, rtol=1e-5, atol=1e-6)
    assert ranks == 1 or (senders > 1).any()


def test_senders_of_values_that_hosts_add_are_not_known():
    with pytest.raises(sar.AlgorithmError, match="hides the senders"):
        sar.TopkA(100, 5, hosts=True, average="senders")


def test_ranks_that_code_or_decay_differently_are_told_so():
    case = Vectors(2, 100, 5)
    one, other = (sar.ErrorFeedback(sar.TopkA(100, 5), decay=decay) for decay in (0.5, 0.6))
    with pytest.raises(sar.MismatchError, match="decay of the residual"):
        sar.simulate(case.first, [one, other])
    with pytest.raises(sar.MismatchError, match="value codec"):
        sar.simulate(case.first, [sar.TopkA(100, 5, value_codec=codec) for codec in ("qsgd2", "qsgd4")])
    with pytest.raises(sar.MismatchError, match="average"):
        sar.simulate(case.first, [sar.TopkA(100, 5, average=average) for average in ("ranks", "senders")])


def test_a_value_that_has_no_code_is_an_error_on_all_ranks_that_loses_nothing():
    case = Vectors(2, 100, 5)
    group = feedbacks(case, "qsgd2")
    gradients = [each.copy() for each in case.first]
    gradients[1][7] = np.inf
    with pytest.raises(sar.StreamError, match="index 7 is beyond"):
        sar.simulate(gradients, group)
    np.testing.assert_array_equal(group[0].residual, gradients[0])


def test_codecs_that_are_not_right_on_the_mean_are_for_reducers_alone():
    with pytest.raises(sar.AlgorithmError, match="qsgd2"):
        sar.allreduce(sar.SparseStream([1], [1.0], 4), sar.SERIAL, value_codec="qsgd2")
    with pytest.raises(sar.AlgorithmError, match="there is no value_codec 'qsgd3' of reducers"):
        sar.TopkA(4, 1, value_codec="qsgd3")
