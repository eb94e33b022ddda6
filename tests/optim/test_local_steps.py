"""Local steps in the simulator: against their algorithms in NumPy, with sums in flight and fragments in turn; states; errors."""

import copy

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError
from sparseallreduce.optim import DiLoCo, LocalSGD, SparseLoCo, simulated_local_step
from sparseallreduce.streams.selection import ChunkTopK

RANKS, SIZE, H = 3, 700, 4
KINDS = {
    "SparseLoCo": lambda own, **how: SparseLoCo(own, H, 0.1, 0.9, 0.8, "exact", 100, comm=sar.SERIAL, **how),
    "SparseLoCo, mean over ranks": lambda own, **how: SparseLoCo(own, H, 0.1, 0.9, 0.8, "exact", 100, "ranks", comm=sar.SERIAL, **how),
    "DiLoCo": lambda own, **how: DiLoCo(own, H, comm=sar.SERIAL, **how),
    "LocalSGD": lambda own, **how: LocalSGD(own, H, comm=sar.SERIAL, **how),
}
WHENS = [{}, {"delay": 1}, {"delay": H}, {"fragments": 3}, {"fragments": 2, "delay": 3}, {"fragments": 4, "delay": 4}]


def drift(rank, step, size=SIZE):
    """What a step of a rank adds to its parameters."""
    return np.random.default_rng((rank, step)).standard_normal(size).astype(np.float32) / 10


def replicas_of(kind, dtype=np.float32, **how):
    weights = [np.ones(SIZE, dtype) for _ in range(RANKS)]
    return weights, [KINDS[kind](own, **how) for own in weights]


def advance(weights, replicas, steps, first=0):
    outs = []
    for step in range(first, first + steps):
        for rank, own in enumerate(weights):
            own += drift(rank, step)
        outs += simulated_local_step(replicas)
    return outs


class Reference:
    """The algorithms of one fragment in float64, a sum at a time."""

    def __init__(self, kind, size):
        self.kind, self.velocity, self.waiting = kind, np.zeros(size), np.zeros((RANKS, size))

    def applied(self, changes):
        if self.kind == "LocalSGD":
            return np.mean(changes, axis=0)
        if self.kind == "DiLoCo":
            mean = np.mean(changes, axis=0)
            self.velocity = 0.9 * self.velocity + mean
            return 0.7 * (mean + 0.9 * self.velocity)
        selector, sent = ChunkTopK(round(0.1 * len(self.velocity)), 100), []
        for waiting, change in zip(self.waiting, changes):
            waiting *= 0.9
            sent.append(selector(waiting, change.astype(np.float64), clear=True).to_dense())
        senders = RANKS if self.kind.endswith("ranks") else np.maximum(np.count_nonzero(sent, axis=0), 1)
        return 0.8 * np.sum(sent, axis=0) / senders


def expected(kind, steps, delay=0, fragments=1):
    """The parameters of all ranks after so many steps: each step counts once, in the sum that begins behind it or later."""
    whole = []
    for part in range(fragments):
        lo, hi = SIZE * part // fragments, SIZE * (part + 1) // fragments
        reference, anchor = Reference(kind, hi - lo), np.ones(hi - lo)
        now, begun = np.ones((RANKS, hi - lo)), {}
        offset = (part + 1) * H // fragments
        for step in range(1, steps + 1):
            now += [drift(rank, step - 1)[lo:hi] for rank in range(RANKS)]
            if step in begun:
                then, update = begun.pop(step)
                now, anchor = anchor - update + (now - then), anchor - update
                base = np.broadcast_to(anchor, now.shape)
            if step == offset:
                base = np.broadcast_to(anchor, now.shape)
            if (step - offset) % H == 0:
                then = now.copy()
                update = reference.applied(base - then)
                if delay:
                    begun[step + delay] = then, update
                else:
                    anchor = anchor - update
                    now = np.tile(anchor, (RANKS, 1))
                    base = np.broadcast_to(anchor, now.shape)
        whole.append(now)
    return np.hstack(whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", WHENS, ids=str)
def test_ranks_do_what_the_algorithm_says(kind, when):
    weights, replicas = replicas_of(kind, **when)
    advance(weights, replicas, 19)
    np.testing.assert_allclose(weights, expected(kind, 19, **when), atol=2e-5)
    assert len({replica._anchor.tobytes() for replica in replicas}) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", WHENS, ids=str)
def test_steps_of_a_warm_up_come_before_those_of_the_algorithm(kind, when):
    """They leave neither residuals nor momenta, and no sum."""
    weights, replicas = replicas_of(kind, warmup=5, **when)
    for _ in range(5):
        for own in weights:
            own += 1
        assert all(replica.warming_up for replica in replicas)
        assert simulated_local_step(replicas) == []
    assert not replicas[0].warming_up and replicas[0].mean(weights[0]) is weights[0]
    advance(weights, replicas, 19)
    np.testing.assert_allclose(weights, expected(kind, 19, **when) + 5, atol=2e-5)


@pytest.mark.parametrize("when", WHENS, ids=str)
def test_nothing_that_a_rank_has_changed_is_lost_or_counts_twice(when):
    weights = [np.zeros(SIZE) for _ in range(RANKS)]
    replicas = [SparseLoCo(own, H, 0.05, beta=1.0, chunk=100, average="ranks", comm=sar.SERIAL, **when) for own in weights]
    advance(weights, replicas, 20)  # behind which every fragment has begun a sum, or had one
    for replica in replicas:
        replica.finish()
    fragments = zip(replicas[0]._ranges, range(replicas[0].fragments))
    for (lo, hi), part in fragments:
        waiting = sum(replica._sums[part].feedback.residual for replica in replicas)
        since = sum(own[lo:hi] - replica._anchor[lo:hi] for own, replica in zip(weights, replicas))
        changed = sum(drift(rank, step)[lo:hi].astype(np.float64) for rank in range(RANKS) for step in range(20))
        np.testing.assert_allclose(RANKS * replicas[0]._anchor[lo:hi] - waiting + since, changed, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", WHENS, ids=str)
def test_a_state_goes_on_to_the_bit_with_sums_in_flight(kind, when):
    weights, replicas = replicas_of(kind, **when)
    advance(weights, replicas, 6)
    saved = copy.deepcopy([(own, replica.state()) for own, replica in zip(weights, replicas)])
    advance(weights, replicas, 9, 6)
    again, others = replicas_of(kind, **when)
    advance(again, others, 3)
    for own, replica, (parameters, state) in zip(again, others, saved):
        own[:] = parameters
        replica.restore(state)
    advance(again, others, 9, 6)
    assert [own.tobytes() for own in again] == [own.tobytes() for own in weights]
    assert [replica.sums for replica in others] == [replica.sums for replica in replicas]


def test_a_fragment_sends_its_share_and_all_send_as_much():
    whole, parts = ([out.bytes_sent.sum() for out in advance(*replicas_of("LocalSGD", fragments=f), 8)] for f in (1, 4))
    assert (len(whole), len(parts)) == (2, 8)
    assert max(parts) < whole[0] / 3
    assert sum(parts) == pytest.approx(sum(whole), rel=0.2)


def test_parameters_of_several_shapes_and_dtypes_are_one_vector():
    arrays = [np.ones((3, 4), np.float32), np.zeros((0, 2), np.float64), np.float64(2).reshape(()).copy()]
    local = LocalSGD(arrays, 2, fragments=2, comm=sar.SERIAL)
    for _ in range(2):
        arrays[0] += 1 / 3
        arrays[2] += 1 / 3
        local.step()
    np.testing.assert_array_equal(arrays[0], np.full((3, 4), 1, np.float32) + np.float32(1 / 3) + np.float32(1 / 3))
    assert arrays[2] == pytest.approx(2 + 2 / 3, abs=1e-12) and local.sums == 2


def test_a_sum_that_fails_is_made_up_for():
    weights = np.zeros(200, np.float32)
    local = SparseLoCo(weights, 2, 0.1, chunk=100, comm=sar.SERIAL)
    for step in range(4):
        weights += drift(0, step, 200)
        if step == 1:
            kept, weights[7] = weights[7], np.inf
            with pytest.raises(sar.StreamError, match="value_codec"):
                local.step()
            assert weights[7] == np.inf and local.sums == 0
            weights[7] = kept
        else:
            local.step()
    assert local.sums == 1 and np.isfinite(local._sums[0].feedback.residual).all()
    np.testing.assert_allclose(weights - local._sums[0].feedback.residual, sum(drift(0, step, 200) for step in range(4)), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"H": 0}, "H is the number of steps"),
        ({"delay": 31}, "delay is a number of steps, from 0 to H, 30"),
        ({"delay": -1}, "delay"),
        ({"fragments": 0}, "fragments"),
        ({"fragments": 31}, "fragments is the number of parts"),
        ({"progress": "magic"}, "progress"),
        ({"warmup": -1}, "warmup is a number of steps"),
        ({"density": 0}, "density"),
        ({"beta": 2}, "decay"),
        ({"codec": "morse"}, "value_codec"),
        ({"average": "votes"}, "average is 'ranks' or 'senders'"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong, message):
    with pytest.raises((sar.AlgorithmError, sar.StreamError), match=message):
        SparseLoCo(np.zeros(10, np.float32), comm=sar.SERIAL, **wrong)


def test_parameters_that_cannot_be_changed_are_refused():
    with pytest.raises(sar.StreamError, match="need parameters"):
        LocalSGD([], comm=sar.SERIAL)
    with pytest.raises(sar.StreamTypeError, match="float32 or float64"):
        LocalSGD(np.zeros(3, np.int32), comm=sar.SERIAL)


@pytest.mark.parametrize("change", [{"H": 5}, {"delay": 1}, {"fragments": 2}, {"warmup": 3}])
def test_a_state_of_other_settings_is_refused_and_named(change):
    state = LocalSGD(np.zeros(8), 4, comm=sar.SERIAL).state()
    with pytest.raises(CheckpointError, match=f"this state has {next(iter(change))} "):
        LocalSGD(np.zeros(8), **({"H": 4} | change), comm=sar.SERIAL).restore(state)
    with pytest.raises(CheckpointError, match="8 parameters"):
        LocalSGD(np.zeros(9), 4, comm=sar.SERIAL).restore(state)
