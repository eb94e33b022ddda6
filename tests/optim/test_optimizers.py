"""The optimisers against plain NumPy: what they select, where the rate comes in, momentum, clipping, decay, Adam."""

import json
import pkgutil
import tracemalloc
from functools import partial
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas import SIZE, Replicas, top

import sparseallreduce as sar
from sparseallreduce import optim
from sparseallreduce.optim import Adam, DensityWarmup, GTopkSGD, OkTopkSGD, TopKSGD, simulated_step
from sparseallreduce.optim.descent import PackDescent
from sparseallreduce.reducers import base
from sparseallreduce.streams.selection import ExactTopK

ALL = [getattr(optim, name) for name in optim.__all__ if name.endswith("SGD") and name != "LocalSGD"]
LOSSY = [kind for kind in ALL if kind is not optim.DenseSGD]
KINDS = st.sampled_from(ALL)
RANKS = st.integers(1, 5)  # that more are summed aright is shown with the reducers
SEEDS = st.integers(0, 2**32 - 1)
DENSITIES = st.sampled_from([0.02, 0.1, 0.3, 1.0])


def count(density):
    return max(1, round(density * SIZE))


@given(kind=KINDS, by_layer=st.booleans(), momentum=st.sampled_from([0.0, 0.9]), ranks=RANKS, seed=SEEDS)
def test_with_density_1_every_optimiser_is_sgd_to_rounding(kind, by_layer, momentum, ranks, seed):
    options = {"threshold_period": 1} if kind is OkTopkSGD else {}  # a threshold of the step before would not let everything through
    replicas = Replicas(kind, ranks, 0.1, 1.0, seed=seed, momentum=momentum, by_layer=by_layer, **options)
    w, velocity = replicas.joined(), np.zeros(SIZE)
    for _ in range(3):
        gradients, _ = replicas.step()
        velocity = momentum * velocity + np.mean(gradients, axis=0)
        w -= 0.1 * velocity
    np.testing.assert_allclose(replicas.joined(), w, rtol=1e-9, atol=1e-12)
    replicas.assert_alike()


@given(ranks=RANKS, density=DENSITIES, seed=SEEDS)
def test_topk_sgd_is_algorithm_2_of_the_thesis(ranks, density, seed):
    replicas = Replicas(TopKSGD, ranks, 0.1, density, seed=seed)
    w, residuals = replicas.joined(), np.zeros((ranks, SIZE))
    for _ in range(4):
        gradients, _ = replicas.step()
        residuals += gradients
        chosen = np.array([top(residual, count(density)) for residual in residuals])
        w -= 0.1 * np.where(chosen, residuals, 0).sum(0) / ranks  # the thesis's rate is that of a sum
        residuals[chosen] = 0
    np.testing.assert_allclose(replicas.joined(), w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([optimizer.residuals[0] for optimizer in replicas.optimizers], residuals, atol=1e-12)


@given(ranks=RANKS, density=DENSITIES, seed=SEEDS)
def test_gtopk_sgd_is_algorithm_4_of_its_paper(ranks, density, seed):
    replicas = Replicas(GTopkSGD, ranks, 0.1, density, seed=seed, form="allgather")
    w, residuals, k = replicas.joined(), np.zeros((ranks, SIZE)), count(density)
    for _ in range(4):
        gradients, _ = replicas.step()
        residuals += gradients
        sent = np.array([np.where(top(residual, k), residual, 0) for residual in residuals])
        total = sent.sum(0)
        chosen = top(total, k) & (total != 0)
        w -= 0.1 * np.where(chosen, total, 0) / ranks
        residuals += np.where(chosen, 0, sent) - sent  # line 8, and line 10: what was sent in vain is put back
    np.testing.assert_allclose(replicas.joined(), w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([optimizer.residuals[0] for optimizer in replicas.optimizers], residuals, atol=1e-12)


@given(ranks=RANKS, density=DENSITIES, seed=SEEDS)
def test_oktopk_sgd_is_algorithm_2_of_its_paper(ranks, density, seed):
    rates = [0.4, 0.2, 0.1, 0.05]
    replicas = Replicas(OkTopkSGD, ranks, rates.__getitem__, density, seed=seed, threshold_period=1, boundary_period=1)
    w, residuals, k = replicas.joined(), np.zeros((ranks, SIZE)), count(density)
    for rate in rates:
        gradients, _ = replicas.step()
        residuals += rate * np.array(gradients)
        sent = np.array([np.where(top(residual, k), residual, 0) for residual in residuals])
        total = sent.sum(0)
        chosen = top(total, k)
        w -= np.where(chosen, total, 0) / ranks
        residuals[chosen & (sent != 0)] = 0
    np.testing.assert_allclose(replicas.joined(), w, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([optimizer.residuals[0] for optimizer in replicas.optimizers], residuals, atol=1e-12)


@given(masking=st.booleans(), ranks=RANKS, density=DENSITIES, seed=SEEDS)
def test_momentum_correction_is_that_of_dgc(masking, ranks, density, seed):
    replicas = Replicas(
        TopKSGD, ranks, 0.1, density, seed=seed, momentum=0.9, momentum_correction=True, momentum_masking=masking
    )
    w, velocity, residuals = replicas.joined(), np.zeros((ranks, SIZE)), np.zeros((ranks, SIZE))
    for _ in range(4):
        gradients, _ = replicas.step()
        velocity = 0.9 * velocity + gradients
        residuals += velocity
        chosen = np.array([top(residual, count(density)) for residual in residuals])
        w -= 0.1 * np.where(chosen, residuals, 0).mean(0)
        residuals[chosen] = 0
        if masking:
            velocity[chosen] = 0
    np.testing.assert_allclose(replicas.joined(), w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    "settings", [{"momentum": 0.9}, {"momentum": 0.5, "momentum_correction": True, "weight_decay": 0.1, "clip_norm": 3.0}]
)
def test_nothing_is_lost_and_replicas_stay_alike(kind, settings):
    """What came in is what was applied and what the residuals hold, over more than a hundred steps."""
    replicas = Replicas(kind, 3, lambda step: 1 / (1 + step), 0.05, **settings)
    fed, applied = np.zeros(SIZE), np.zeros(SIZE)
    for step in range(120):
        gradients = [replicas.drawn() for _ in range(3)]
        for rank, optimizer in enumerate(replicas.optimizers):
            fed += optimizer.prepare(replicas.shaped(gradients[rank]), None, 3)[0].vector
        _, (out,) = replicas.step(gradients)
        applied += 3 * out.outputs[0].to_dense()
        if step % 60 == 59:
            held = sum(optimizer.residuals[0] for optimizer in replicas.optimizers)
            np.testing.assert_allclose(applied + held, fed, rtol=1e-9, atol=1e-9)
            replicas.assert_alike()


@given(kind=KINDS, ranks=RANKS, seed=SEEDS)
def test_packed_layers_are_one_vector_to_the_bit(kind, ranks, seed):
    settings = {"momentum": 0.9, "momentum_correction": True}
    packed, vector = (Replicas(kind, ranks, 0.1, 0.1, seed=seed, flat=flat, dtype=np.float32, **settings) for flat in (False, True))
    for _ in range(3):
        gradients, _ = packed.step()
        vector.step(gradients)
    assert packed.joined().tobytes() == vector.joined().tobytes()


@given(kind=KINDS, correction=st.booleans(), ranks=st.integers(1, 3), seed=SEEDS)
def test_by_layer_every_parameter_goes_its_own_way(kind, correction, ranks, seed):
    settings = {"momentum": 0.9, "momentum_correction": correction, "weight_decay": 0.01}
    together = Replicas(kind, ranks, 0.1, 0.2, seed=seed, by_layer=True, **settings)
    alone = Replicas(kind, ranks, 0.1, 0.2, seed=seed, by_layer=True, **settings)
    layers = [[kind(own, 0.1, 0.2, sar.SERIAL, **settings) for own in parameters] for parameters in zip(*alone.parameters)]
    for _ in range(3):
        gradients, _ = together.step()
        for optimizers, own in zip(layers, zip(*map(alone.shaped, gradients))):
            simulated_step(optimizers, own)
    assert together.joined().tobytes() == alone.joined().tobytes()


@given(ranks=RANKS, seed=SEEDS, limit=st.sampled_from([0.5, 5.0, 1e6]))
def test_each_rank_clips_to_its_share_of_the_norm(ranks, seed, limit):
    replicas = Replicas(TopKSGD, ranks, 0.1, 1.0, seed=seed, clip_norm=limit)
    w = replicas.joined()
    gradients, _ = replicas.step()
    share = limit / np.sqrt(ranks)
    clipped = [gradient * min(1, share / np.linalg.norm(gradient)) for gradient in gradients]
    np.testing.assert_allclose(replicas.joined(), w - 0.1 * np.mean(clipped, axis=0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ALL)
def test_weight_decay_adds_to_every_gradient(kind):
    replicas = Replicas(kind, 2, 0.1, 1.0, weight_decay=0.3, clip_norm=1e-9)
    w = replicas.joined()
    replicas.step()
    np.testing.assert_allclose(replicas.joined(), w * (1 - 0.1 * 0.3), atol=1e-9)


@given(correction=st.booleans(), decay=st.sampled_from([0.0, 0.01]), ranks=RANKS, density=DENSITIES, seed=SEEDS)
def test_adam_has_the_sums_for_gradients(decay, correction, ranks, density, seed):
    adam = Adam(0.8, 0.95, 1e-6, bias_correction=correction)
    replicas = Replicas(TopKSGD, ranks, 0.1, density, seed=seed, adam=adam, weight_decay=decay)
    w, first, second = replicas.joined(), np.zeros(SIZE), np.zeros(SIZE)
    for step in range(1, 5):
        _, (out,) = replicas.step()
        update = out.outputs[0].to_dense()
        first = 0.8 * first + 0.2 * update
        second = 0.95 * second + 0.05 * update**2
        scale = ((1 - 0.8**step), (1 - 0.95**step)) if correction else (1, 1)
        w -= 0.1 * (first / scale[0] / (np.sqrt(second / scale[1]) + 1e-6) + decay * w)
    np.testing.assert_allclose(replicas.joined(), w, rtol=1e-9, atol=1e-12)
    replicas.assert_alike()


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "momentum_correction": True}, {"adam": Adam()}], ids=str)
@pytest.mark.parametrize("kind", ALL)
def test_a_rate_of_zero_moves_no_parameter(kind, settings):
    """As with PyTorch: the step counts, velocity and moments go on."""
    still = Replicas(kind, 2, lambda step: 0.0 if step < 2 else 0.1, 0.3, **settings)
    before = still.joined()
    for _ in range(2):
        still.step()
        assert still.joined().tobytes() == before.tobytes()
    assert [optimizer.steps for optimizer in still.optimizers] == [2, 2]
    still.step()
    assert still.joined().tobytes() != before.tobytes()
    still.assert_alike()


def test_velocity_goes_on_at_a_rate_of_zero():
    w = np.zeros(3)
    optimizer = TopKSGD(w, 0.0, 1.0, sar.SERIAL, momentum=0.5)
    for rate in (None, 1.0):
        optimizer.step(np.ones(3), rate)
    assert w.tolist() == [-1.5] * 3


@pytest.mark.parametrize("kind", LOSSY)
def test_the_density_warms_up(kind):
    density = DensityWarmup(0.02, epoch_steps=2)
    replicas = Replicas(kind, 2, 0.1, density)
    seen = []
    for _ in range(10):
        replicas.step()
        seen.append(replicas.optimizers[0]._descents[0].feedback.reducer.k)
    expected = [count(share) for share in (0.25, 0.25, 0.0725, 0.0725, 0.015, 0.015, 0.004, 0.004, 0.02, 0.02)]
    assert seen == expected


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.9}, {"momentum": 0.9, "momentum_correction": True, "by_layer": True}, {"adam": Adam()}]
)
@pytest.mark.parametrize("kind", ALL)
def test_a_restored_optimiser_goes_on_to_the_bit(kind, settings):
    density = DensityWarmup(0.05, epoch_steps=3, densities=(0.5, 0.2))
    first = Replicas(kind, 3, lambda step: 1 / (1 + step), density, **settings)
    for _ in range(8):
        first.step()
    states = [stored(optimizer.state()) for optimizer in first.optimizers]
    second = Replicas(kind, 3, lambda step: 1 / (1 + step), density, **settings)
    for rank, (optimizer, state) in enumerate(zip(second.optimizers, states)):
        for ours, theirs in zip(second.parameters[rank], first.parameters[rank]):
            ours[...] = theirs
        optimizer.restore(state)
    for _ in range(26):  # behind the next evaluation of thresholds, in step 33
        gradients, _ = first.step()
        second.step(gradients)
    assert second.joined(2).tobytes() == first.joined().tobytes()
    assert all(np.array_equal(a, b) for a, b in zip(first.optimizers[1].residuals, second.optimizers[1].residuals))


@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.parametrize("kind", ALL)
def test_a_checkpoint_may_be_of_any_step_of_the_warm_up(kind, stop):
    """Also of the last of an epoch, behind which the density is another."""
    density = DensityWarmup(0.05, epoch_steps=2, densities=(0.5, 0.2))
    first, second = (Replicas(kind, 2, 0.1, density, momentum=0.9) for _ in range(2))
    for _ in range(stop):
        first.step()
    for rank, optimizer in enumerate(second.optimizers):
        for ours, theirs in zip(second.parameters[rank], first.parameters[rank]):
            ours[...] = theirs
        optimizer.restore(stored(first.optimizers[rank].state()))
    for _ in range(4):
        gradients, _ = first.step()
        second.step(gradients)
    assert second.joined(1).tobytes() == first.joined(1).tobytes()


def test_a_state_that_is_refused_changes_nothing():
    optimizer, other = (TopKSGD([np.zeros(30), np.zeros(9)], 0.1, share, sar.SERIAL, by_layer=True, momentum=0.9) for share in (0.1, 0.4))
    for one in (optimizer, other):
        one.step([np.arange(30.0), np.arange(9.0)])
    other.step([np.ones(30), np.ones(9)])
    damaged = optimizer.state()
    del damaged["1.velocity"]
    before = optimizer.state()
    for state, message in ((other.state(), "with k 12, and this one has 3"), (damaged, "velocity"), ({"optimizer": "topk"}, "other")):
        with pytest.raises(sar.errors.CheckpointError, match=message):
            optimizer.restore(state)
        after = optimizer.state()
        assert before.keys() == after.keys() and all(np.array_equal(before[name], after[name]) for name in before)


def stored(state):
    """A state on its way through a file: arrays, and what JSON can express."""
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    return arrays | json.loads(json.dumps({name: value for name, value in state.items() if name not in arrays}))


def test_a_state_of_something_else_is_refused():
    flat = Replicas(TopKSGD, 1, 0.1, flat=True).optimizers[0]
    other = TopKSGD(np.zeros(SIZE + 1), 0.1, comm=sar.SERIAL)
    moving = Replicas(TopKSGD, 1, 0.1, flat=True, momentum=0.9).optimizers[0]
    gtopk = Replicas(GTopkSGD, 1, 0.1, flat=True).optimizers[0]
    for optimizer, message in ((other, "residual of shape"), (moving, "other parameters or settings"), (gtopk, "'topk'.*'gtopk'")):
        with pytest.raises(sar.errors.CheckpointError, match=message):
            optimizer.restore(flat.state())


def test_started_layer_by_layer_a_step_is_the_same():
    at_once, by_layer = (Replicas(TopKSGD, 1, 0.1, 0.2, by_layer=True) for _ in range(2))
    for _ in range(3):
        gradients = at_once.shaped(at_once.drawn())
        at_once.optimizers[0].step(gradients)
        for layer in reversed(range(len(gradients))):
            by_layer.optimizers[0].start(layer, gradients[layer])
        by_layer.optimizers[0].finish()
    assert by_layer.joined().tobytes() == at_once.joined().tobytes()
    assert by_layer.optimizers[0].steps == 3


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"momentum_correction": True}, "needs a momentum"),
        ({"momentum": 0.9, "adam": Adam()}, "leave one of them out"),
        ({"weight_decay": -1}, "weight_decay must be at least 0"),
        ({"clip_norm": 0}, "clip_norm must be above 0"),
        ({"density": 0}, "above 0 and at most 1, not 0"),
        ({"density": lambda step: 2}, "above 0 and at most 1, not 2"),
    ],
)
def test_settings_out_of_range_are_errors(settings, message):
    with pytest.raises(sar.AlgorithmError, match=message):
        TopKSGD(np.zeros(4), 0.1, comm=sar.SERIAL, **settings)


@pytest.mark.parametrize("make,message", [(lambda: Adam(beta1=1), "beta1"), (lambda: Adam(epsilon=0), "epsilon")])
def test_constants_of_adam_out_of_range_are_errors(make, message):
    with pytest.raises(sar.AlgorithmError, match=message):
        make()


@pytest.mark.parametrize("make", [lambda: DensityWarmup(0.1, 0), lambda: DensityWarmup(0, 1), lambda: DensityWarmup(0.1, 1, (1.5,))])
def test_a_warm_up_out_of_range_is_an_error(make):
    with pytest.raises(sar.AlgorithmError, match=r"warm-up lasts|above 0 and at most 1"):
        make()


@pytest.mark.parametrize(
    "gradients,rate,message",
    [
        ([np.zeros((2, 2))], None, "each of the 2 parameters, not 1"),
        ([np.zeros((2, 2)), np.zeros(4)], None, r"parameter 1 has to have its shape, \(3,\), not \(4,\)"),
        ([np.zeros((2, 2)), np.zeros(3, np.float32)], None, "parameter 1 has to be of its dtype, float64, not float32"),
        ([np.zeros((2, 2)), "no array"], None, "not str"),
        ([np.zeros((2, 2)), np.zeros(3)], -0.1, "learning rate must be a number, at least 0, not -0.1"),
        ([np.zeros((2, 2)), np.zeros(3)], np.nan, "learning rate must be a number, at least 0, not nan"),
        ([np.full((2, 2), np.nan), np.zeros(3)], None, "norm of a gradient is nan"),
        ([np.full((2, 2), 1.7e308), np.zeros(3)], None, "norm of a gradient is inf: .* too large for the norm"),
    ],
)
def test_a_step_with_what_does_not_fit_changes_nothing(gradients, rate, message):
    parameters = [np.ones((2, 2)), np.ones(3)]
    optimizer = TopKSGD(parameters, 0.1, 0.2, sar.SERIAL, momentum=0.9, momentum_correction=True, clip_norm=100)
    optimizer.step([np.ones((2, 2)), np.ones(3)])
    before, kept = optimizer.state(), [parameter.copy() for parameter in parameters]
    with pytest.raises(sar.SparseAllreduceError, match=message):
        optimizer.step(gradients, rate)
    after = optimizer.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(np.array_equal(parameter, was) for parameter, was in zip(parameters, kept))


@pytest.mark.parametrize("dtype,value", [(np.float32, 3e30), (np.float64, 3e200)])
def test_a_gradient_whose_squares_overflow_is_clipped(dtype, value):
    parameters = np.zeros(4, dtype)
    TopKSGD(parameters, 1.0, 1.0, sar.SERIAL, clip_norm=2.0).step(np.full(4, value, dtype))
    np.testing.assert_allclose(parameters, -1.0, rtol=1e-6)


def test_a_packed_or_clipped_step_is_not_started_by_layer():
    with pytest.raises(sar.AlgorithmError, match="by_layer=True"):
        TopKSGD([np.zeros(3)], 0.1, comm=sar.SERIAL).start(0, np.zeros(3))
    with pytest.raises(sar.AlgorithmError, match="norm over all"):
        TopKSGD([np.zeros(3)], 0.1, comm=sar.SERIAL, by_layer=True, clip_norm=1).start(0, np.zeros(3))


def test_a_step_that_was_started_has_to_be_finished():
    optimizer = TopKSGD([np.zeros(3)], 0.1, comm=sar.SERIAL, by_layer=True)
    optimizer.start(0, np.ones(3))
    for call in (optimizer.state, lambda: optimizer.restore({}), lambda: optimizer.step([np.ones(3)])):
        with pytest.raises(sar.AlgorithmError, match="finish"):
            call()
    optimizer.start(0, np.ones(3))
    with pytest.raises(sar.AlgorithmError, match="parameter 0 was started"):
        optimizer.finish()


def two_layers(count=1, **settings):
    """Optimisers of two layers, each with parameters of its own, and gradients for five steps."""
    rng = np.random.default_rng(3)
    optimizers = [TopKSGD([np.ones(30), np.ones(9)], 0.1, 0.2, sar.SERIAL, by_layer=True, **settings) for _ in range(count)]
    return [*optimizers, [[rng.normal(size=30), rng.normal(size=9)] for _ in range(5)]]


def assert_same_state(first, second):
    ours, theirs = first.state(), second.state()
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert all(np.array_equal(one, other) for one, other in zip(first.parameters, second.parameters))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("where", ["sparseallreduce.runtime.request.Request.wait", "sparseallreduce.optim.packs.Pack.descend"])
def test_a_step_that_is_interrupted_goes_on_where_it_stopped(where, call, error):
    """No sum that is there is lost, or applied twice."""
    if where.endswith("wait") and error is MemoryError:
        pytest.skip("an operation that fails is over")
    optimizer, twin, gradients = two_layers(2, momentum=0.5, momentum_correction=True)
    for number, own in enumerate(gradients):
        expected = twin.step(own)
        if number % 2:
            got = optimizer.step(own)
        else:
            owner, name = pkgutil.resolve_name(where.rpartition(".")[0]), where.rpartition(".")[2]
            original, calls = getattr(owner, name), iter(range(1, 9))

            def failing(*arguments, original=original, calls=calls):
                if next(calls) == call:
                    raise error
                return original(*arguments)

            with mock.patch.object(owner, name, failing), pytest.raises(error):
                optimizer.step(own)
            with pytest.raises(sar.AlgorithmError, match="call finish first"):
                optimizer.step(own)
            got = optimizer.finish()
        assert [update.indices.tolist() for update in got] == [update.indices.tolist() for update in expected]
        assert_same_state(optimizer, twin)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("call", [1, 2])
def test_a_step_whose_start_fails_can_be_followed_by_others(monkeypatch, call, error):
    optimizer, gradients = two_layers()
    optimizer.step(gradients[0])
    launch, calls = base.launch, iter(range(1, 9))

    def failing(*arguments, **options):
        if next(calls) == call:
            raise error
        return launch(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(base, "launch", failing)
        with pytest.raises(error):
            optimizer.step(gradients[1])
        if error is KeyboardInterrupt:
            with pytest.raises(sar.SparseAllreduceError, match="interrupted before it had started"):
                optimizer.finish()
    assert optimizer.steps == 1
    for own in gradients[2:]:
        optimizer.step(own)
    assert optimizer.steps == 4


def test_a_velocity_goes_on_with_the_residual_of_a_step_that_fails():
    """The gradient is part of both, and reaches the parameters with the next step."""
    ours, twins = np.zeros(6), np.zeros(6)
    settings = {"momentum": 0.5, "momentum_correction": True, "momentum_masking": False}
    optimizer, twin = (TopKSGD(w, 1.0, 1.0, sar.SERIAL, **settings) for w in (ours, twins))
    for number, gradient in enumerate(np.random.default_rng(1).integers(-8, 8, (4, 6)).astype(float)):
        twin.step(gradient)
        if number == 2:
            with mock.patch("sparseallreduce.reducers.feedback._divided", side_effect=MemoryError), pytest.raises(MemoryError):
                optimizer.step(gradient)
        else:
            optimizer.step(gradient)
    assert ours.tolist() == twins.tolist()
    assert (optimizer.steps, twin.steps) == (3, 4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_fails_before_its_sums_start_may_be_made_again(monkeypatch, error):
    optimizer, twin, gradients = two_layers(2)
    told = mock.Mock(wraps=optimizer._agree)
    with monkeypatch.context() as patch:
        patch.setattr(PackDescent, "fed", mock.Mock(side_effect=error))
        patch.setattr(optimizer, "_agree", told)
        with pytest.raises(error if error is KeyboardInterrupt else sar.SparseAllreduceError):
            optimizer.step(gradients[0])
    assert [call.args[0].error is not None for call in told.call_args_list] == [True, True]
    assert_same_state(optimizer, twin)
    optimizer.step(gradients[0])


def test_empty_parameters_take_part():
    parameters = [np.zeros((0, 3)), np.zeros(2)]
    for by_layer in (False, True):
        TopKSGD(parameters, 1.0, 1.0, sar.SERIAL, by_layer=by_layer).step([np.zeros((0, 3)), np.ones(2)])
    np.testing.assert_array_equal(parameters[1], [-2, -2])


def test_packed_parameters_are_of_one_dtype():
    parameters = [np.zeros(2, np.float32), np.zeros(3, np.float64)]
    with pytest.raises(sar.StreamTypeError, match="of one dtype"):
        TopKSGD(parameters, 1.0, comm=sar.SERIAL)
    TopKSGD(parameters, 1.0, 1.0, sar.SERIAL, by_layer=True).step([np.ones(2, np.float32), np.ones(3)])
    assert all((parameter == -1).all() for parameter in parameters)


class Chooser:
    def __call__(self, k):
        return ExactTopK(k)

    def method(self, k):
        return ExactTopK(k)


def makers():
    """Callables that make a selector, as another rank makes them: others at other addresses, with the same names."""

    def function(k, *_, **__):
        return ExactTopK(k)

    named = {"function": function, "lambda": lambda k: ExactTopK(k), "class": ExactTopK, "object": Chooser()}
    return named | {"partial": partial(partial(function, option=function), option=named["lambda"]), "method": Chooser().method}


@pytest.mark.parametrize("name", makers())
def test_the_same_callable_makes_the_same_terms_on_all_ranks(name):
    ours, theirs = (TopKSGD(np.zeros(8), 0.1, comm=sar.SERIAL, selector=makers()[name]) for _ in range(2))
    assert ours.options["selector"] is not theirs.options["selector"] or name == "class"
    assert ours._terms() == theirs._terms()
    others = [makers()[other] for other in makers() if other != name]
    assert all(TopKSGD(np.zeros(8), 0.1, comm=sar.SERIAL, selector=other)._terms() != ours._terms() for other in others)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "momentum_correction": True}])
def test_the_dense_sum_takes_one_copy_and_no_indices(settings):
    """What others are compared with does no work of theirs."""
    w = np.zeros(1_000_000)
    optimizer = optim.DenseSGD(w, 0.5, comm=sar.SERIAL, **settings)
    gradient = np.ones_like(w)
    optimizer.step(gradient)
    tracemalloc.start()
    optimizer.step(gradient)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * w.nbytes, "the sum, and the step of the parameters"
    assert not isinstance(optimizer._descents[0].feedback.contributed, np.ndarray)
    assert (optimizer.residuals[0] == 0).all()


def test_only_what_is_there_is_started():
    optimizer = TopKSGD([np.zeros(3)], 0.1, comm=sar.SERIAL, by_layer=True)
    optimizer.start(-1, np.ones(3))
    with pytest.raises(sar.AlgorithmError, match="no parameter -1: they are numbered from 0 to 0"):
        optimizer.finish()


def test_there_have_to_be_parameters():
    with pytest.raises(sar.StreamError, match="needs parameters"):
        TopKSGD([], 0.1, comm=sar.SERIAL)
