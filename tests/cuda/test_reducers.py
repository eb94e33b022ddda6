"""Reducers and error feedback on arrays of the device, against the same on the host."""

import pickle

import device_arrays as xp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy import INTEGERS, REAL, REDUCERS, Vectors
from simulated import same_bits

import sparseallreduce as sar
from sparseallreduce import MismatchError, SparseStream, StreamError, StreamTypeError
from sparseallreduce.reducers.dense import Dense
from sparseallreduce.reducers.oktopk import thresholds

MAKE = {
    **REDUCERS,
    "oktopk, every threshold new": lambda size, k: sar.OkTopk(size, k, threshold_period=1, boundary_period=1),
    "oktopk, found period": lambda size, k: sar.OkTopk(size, k, threshold_period="auto", max_imbalance=1.0),
    "oktopk by hosts": lambda size, k: sar.OkTopk(size, k, hosts=True),
    "hitopk": sar.HiTopK,
    "dense": lambda size, k: Dense(size, size),
    "auto": sar.Auto,
}
ROUNDED = ("gaussiank", "hitopk", "auto")  # which sum up magnitudes in another order: numbers of few digits, whose sums are exact


def moved(vectors):
    return [xp.asarray(vector) for vector in vectors]


def same_contributed(ours, theirs):
    if isinstance(theirs, slice):
        assert ours == theirs
    else:
        same_bits(ours.get(), theirs)


def same_streams(ours, theirs):
    assert ours.on_device
    assert ours.is_dense == theirs.is_dense
    same_bits(ours.indices.get(), theirs.indices)
    same_bits(ours.values.get(), theirs.values)


@pytest.mark.parametrize("name", MAKE)
@settings(max_examples=3, deadline=None)
@given(
    ranks=st.integers(1, 5),
    size=st.integers(0, 40),
    places=st.sampled_from(["anywhere", "same", "disjoint", "region"]),
    dtype=st.sampled_from(["float32", "float64"]),
    through_wire=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_steps_have_the_bits_and_the_bytes_of_the_host(name, ranks, size, places, dtype, through_wire, seed):
    contents = INTEGERS if name in ROUNDED else REAL
    case = Vectors(ranks, size, min(size, 1 + size // 6), dtype, contents, places, seed)
    network = sar.Network(hosts=2)
    ours, theirs = ([sar.ErrorFeedback(reducer, dtype) for reducer in case.reducers(MAKE[name])] for _ in range(2))
    for number in range(3):
        gradients = case.step(number)
        device = sar.simulate(moved(gradients), ours, network, through_wire=through_wire)
        host = sar.simulate(gradients, theirs, network, through_wire=through_wire)
        for rank in range(ranks):
            same_streams(device.outputs[rank], host.outputs[rank])
            same_bits(ours[rank].residual.get(), theirs[rank].residual)
            same_contributed(ours[rank].contributed, theirs[rank].contributed)
        np.testing.assert_array_equal(device.bytes_sent, host.bytes_sent)
        np.testing.assert_array_equal(device.messages, host.messages)


@pytest.mark.parametrize("copied", [0, 2**15])
def test_levels_around_a_threshold_have_the_bits_of_the_host(monkeypatch, copied):
    monkeypatch.setattr(thresholds, "COPIED", copied)
    case = Vectors(2, 300, thresholds.FEW, seed=11)
    ours, theirs = ([sar.ErrorFeedback(reducer) for reducer in case.reducers(MAKE["oktopk"])] for _ in range(2))
    for number in range(3):
        gradients = case.step(number)
        for one, other in zip(sar.simulate(moved(gradients), ours).outputs, sar.simulate(gradients, theirs).outputs):
            same_streams(one, other)


@pytest.mark.parametrize("name", ["topka", "gtopk", "oktopk", "dense"])
def test_accumulators_stay_as_they_are_and_one_rank_needs_no_network(name):
    vector = Vectors(1, 30, 4, seed=3).first[0]
    ours, theirs = xp.asarray(vector), vector.copy()
    device, host = (MAKE[name](30, 4).allreduce(given, sar.SERIAL) for given in (ours, theirs))
    same_streams(device.update, host.update)
    same_contributed(device.contributed, host.contributed)
    same_bits(ours.get(), vector)
    assert sar.simulate([ours] * 2, [MAKE[name](30, 4) for _ in range(2)]).outputs[1].update.on_device


def test_a_gradient_may_be_a_stream_and_a_state_goes_from_device_to_host_and_back():
    case = Vectors(1, 30, 4, seed=5)
    ours, theirs = sar.ErrorFeedback(sar.OkTopk(30, 4)), sar.ErrorFeedback(sar.OkTopk(30, 4))
    stream = SparseStream.from_dense(case.step(0)[0])
    same_streams(ours.step(stream.to_device(xp), sar.SERIAL), theirs.step(stream, sar.SERIAL))
    for number in range(1, 4):
        state = pickle.loads(pickle.dumps(ours.state()))
        assert type(state["residual"]) is np.ndarray
        ours = sar.ErrorFeedback(sar.OkTopk(30, 4))
        ours.restore(state)
        gradient, there = case.step(number)[0], number % 2 == 0
        mean, wanted = ours.step(xp.asarray(gradient) if there else gradient, sar.SERIAL), theirs.step(gradient, sar.SERIAL)
        same_bits((mean.to_host() if there else mean).values, wanted.values)
        same_bits(ours.residual.get() if there else ours.residual, theirs.residual)
    ours.reset()
    assert ours.step(xp.asarray(case.step(9)[0]), sar.SERIAL).on_device


def test_what_does_not_fit_is_told_to_all_and_changes_nothing():
    host, device = np.float32([1, 2, 3, 4]), xp.asarray(np.float32([1, 2, 3, 4]))
    with pytest.raises(MismatchError, match="memory of the accumulators: the host's on rank 0; a GPU's on rank 1"):
        sar.simulate([host, device], [sar.TopkA(4, 1) for _ in range(2)])
    feedbacks = [sar.ErrorFeedback(sar.TopkA(4, 1)) for _ in range(2)]
    with pytest.raises(MismatchError, match="memory of the accumulators"):
        sar.simulate([host, device], feedbacks)
    sar.simulate([device, device], feedbacks)  # nothing was settled by that
    for wrong, text in ((host, "to_device"), (SparseStream.from_dense(host), "to_device")):
        with pytest.raises(StreamTypeError, match=text):
            sar.simulate([device, wrong], feedbacks)
    with pytest.raises(StreamError, match="shape"):
        sar.simulate([device, xp.zeros(5, np.float32)], feedbacks)
    with pytest.raises(StreamTypeError, match="float64"):
        sar.simulate([device, xp.zeros(4)], feedbacks)
    with pytest.raises(StreamError, match="memory with the residual"):
        feedbacks[0].step(feedbacks[0].residual, sar.SERIAL)
    assert [feedback.gradients for feedback in feedbacks] == [1, 1]
    same_bits(feedbacks[0].residual.get(), np.float32([1, 2, 3, 0]))


def test_a_choice_of_a_zero_that_makes_a_dense_stream_is_dense_as_on_the_host():
    vectors = [np.float32([value]) for value in (0, 1)]
    for make in (sar.TopkA, sar.GTopk):
        device, host = (sar.simulate(given, [make(1, 1) for _ in vectors]) for given in (moved(vectors), vectors))
        same_streams(device.outputs[0].update, host.outputs[0].update)
        np.testing.assert_array_equal(device.bytes_sent, host.bytes_sent)


@pytest.mark.parametrize("name", ["gtopk", "oktopk, every threshold new"])
def test_sums_that_are_counted_late_count_as_much_work(name):
    case = Vectors(4, 60, 6, seed=8)
    ours, theirs = case.reducers(MAKE[name]), case.reducers(MAKE[name])
    sar.simulate(moved(case.first), ours)
    sar.simulate(case.first, theirs)
    assert [one.reduction.work for one in ours] == [one.reduction.work for one in theirs] != [0] * 4
