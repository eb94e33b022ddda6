"""Optimisers whose parameters lie on the device, against the same on the host."""

import pickle

import device_arrays as xp
import numpy as np
import pytest
from simulated import same_bits, stand_in

import sparseallreduce as sar
from sparseallreduce import MismatchError, StreamTypeError, optim
from sparseallreduce.errors import DivergenceError

CASES = {
    "oktopk": (optim.OkTopkSGD, {}),
    "momentum": (optim.TopKSGD, {"momentum": 0.5}),
    "correction": (optim.GTopkSGD, {"momentum": 0.5, "momentum_correction": True, "weight_decay": 0.01}),
    "clipped": (optim.TopKSGD, {"clip_norm": 1.0, "by_layer": True}),
    "clipped adam": (optim.OkTopkSGD, {"adam": optim.Adam(bias_correction=False), "clip_norm": 0.5}),
    "warm-up": (optim.TopKSGD, {"density": lambda step: 0.5 / (step + 1)}),
    "adam": (optim.OkTopkSGD, {"adam": optim.Adam(), "weight_decay": 0.01}),
    "dense": (optim.DenseSGD, {"weight_decay": 0.1, "momentum": 0.9}),
    "unmasked": (optim.MSTopKSGD, {"momentum": 0.5, "momentum_correction": True, "momentum_masking": False}),
    "approximate": (optim.ApproximateTopKSGD, {"bucket": 4}),
    "hitopk": (optim.HiTopKSGD, {"momentum": 0.5}),
    "auto": (optim.AutoSGD, {"candidates": ["gtopk", "oktopk"]}),
}
SHAPES = (8,), (3, 4)


def replicas(name, place, ranks=2):
    make, options = CASES[name]
    if make is not optim.DenseSGD:
        options = {"density": 0.3, **options}
    return [make([place(np.ones(shape, np.float32)) for shape in SHAPES], 0.1, comm=sar.SERIAL, **options) for _ in range(ranks)]


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_states_are_those_of_the_host(name):
    rng = np.random.default_rng(4)
    ours, theirs = replicas(name, xp.asarray), replicas(name, np.array)
    for _ in range(3):
        gradients = [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in ours]
        optim.simulated_step(ours, [[xp.asarray(each) for each in own] for own in gradients])
        optim.simulated_step(theirs, gradients)
        fresh = replicas(name, xp.asarray)
        for one, other, host in zip(ours, fresh, theirs, strict=True):
            for our, their in zip(one.parameters, host.parameters, strict=True):
                same_bits(our.get(), their)
            state = pickle.loads(pickle.dumps(one.state()))
            wanted = host.state()
            assert state.keys() == wanted.keys()
            for term, value in wanted.items():
                np.testing.assert_array_equal(state[term], value)
            other.restore(state)
            for new, old in zip(other.parameters, one.parameters, strict=True):
                new[:] = old
        ours = fresh


def test_one_array_is_a_parameter_and_what_lies_elsewhere_is_refused():
    parameter = xp.asarray(np.ones(4, np.float32))
    optimizer = optim.TopKSGD(parameter, 0.5, density=0.25, comm=sar.SERIAL)
    optimizer.step(xp.asarray(np.float32([0, 2, 0, 1])))
    same_bits(parameter.get(), np.float32([1, 0, 1, 1]))
    with pytest.raises(StreamTypeError, match="one place"):
        optimizer.step(np.ones(4, np.float32))
    with pytest.raises(StreamTypeError, match="move some of them"):
        optim.TopKSGD([parameter, np.ones(4, np.float32)], 0.5, comm=sar.SERIAL)
    mixed = [optim.TopKSGD(place(np.ones(4, np.float32)), 0.5, comm=sar.SERIAL) for place in (xp.asarray, np.array)]
    with pytest.raises(MismatchError, match="memory"):
        optim.simulated_step(mixed, [xp.asarray(np.ones(4, np.float32)), np.ones(4, np.float32)])


@stand_in
def test_clipping_waits_for_the_norms_of_all_gradients_once(monkeypatch):
    copies, get = [], xp.ndarray.get
    gradients = [xp.asarray(np.full(shape, 2, np.float32)) for shape in SHAPES]
    optimizer = optim.TopKSGD([xp.zeros(shape, np.float32) for shape in SHAPES], 1.0, density=1.0, comm=sar.SERIAL, clip_norm=1.0)
    monkeypatch.setattr(xp.ndarray, "get", lambda array: copies.append(array.shape) or get(array))
    monkeypatch.setattr(xp.ndarray, "__float__", lambda array: pytest.fail("a number of its own came to the host"))
    optimizer.prepare(gradients, None, 1)
    assert copies == [(2,)]


def test_an_infinite_gradient_leaves_no_trace_where_it_is_clipped():
    optimizer = optim.OkTopkSGD([xp.zeros(4, np.float32)], 1.0, density=0.5, comm=sar.SERIAL, clip_norm=1.0, momentum=0.5)
    optimizer.step([xp.asarray(np.float32([3, 0, 0, 4]))])
    before, parameters = optimizer.state(), optimizer.parameters[0].get()
    with pytest.raises(DivergenceError, match="norm of a gradient"):
        optimizer.step([xp.asarray(np.float32([np.inf, 0, 0, 1]))])
    same_bits(optimizer.parameters[0].get(), parameters)
    assert pickle.dumps(optimizer.state()) == pickle.dumps(before)


@stand_in
def test_layers_may_lie_on_the_host_and_on_one_gpu_and_not_on_two(monkeypatch):
    mixed = [np.ones(4, np.float32), xp.asarray(np.ones(4, np.float32))]
    optimizer = optim.TopKSGD(mixed, 0.5, density=0.5, comm=sar.SERIAL, by_layer=True, clip_norm=10.0)
    optimizer.step([np.float32([0, 2, 0, 1]), xp.asarray(np.float32([0, 2, 0, 1]))])
    same_bits(mixed[0], np.float32([1, 0, 1, 0.5]))
    same_bits(mixed[1].get(), mixed[0])
    monkeypatch.setattr(xp.ndarray, "device", property(lambda array: f"<CUDA Device {array.size - 4}>"), raising=False)
    apart = [xp.asarray(np.ones(size, np.float32)) for size in (4, 5)]
    for by_layer in (True, False):
        with pytest.raises(StreamTypeError, match="several GPUs"):
            optim.TopKSGD(apart, 0.5, comm=sar.SERIAL, by_layer=by_layer)


def test_an_explanation_of_the_automatic_choice_knows_where_parameters_lie():
    for place, lies_there in ((xp.asarray, True), (np.array, False)):
        (choice,) = optim.AutoSGD(place(np.zeros(8, np.float32)), 0.1, comm=sar.SERIAL, density=0.3).explain()
        assert choice.on_device == lies_there and ("copies" in str(choice)) == lies_there
