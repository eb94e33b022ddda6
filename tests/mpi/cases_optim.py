"""The optimisers over MPI: the same as simulated, errors that all ranks raise, and sums of layers that overlap."""

from contextlib import nullcontext, suppress
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from cases_faults import failing
from mpi_cases import each, skip

import sparseallreduce as sar
from sparseallreduce import optim
from sparseallreduce.optim import Adam, DensityWarmup, TopKSGD, simulated_step
from sparseallreduce.optim import optimizer as optimizer_module
from sparseallreduce.optim.descent import PackDescent
from sparseallreduce.runtime.request import Request
from sparseallreduce.runtime.serial import SerialCommunicator
from sparseallreduce.streams import selection

RANKS = (1, 3)
ALL = [getattr(optim, name) for name in optim.__all__ if name.endswith("SGD") and name != "LocalSGD"]
SHAPES = [(20, 30), (30,), (7, 5)]


class Simulated(SerialCommunicator):
    """One process that stands for a rank: random selections are those of the rank."""

    def __init__(self, rank):
        self.rank = rank


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def gradients(rank, step):
    return parameters((1, rank, step))


@each(kind=ALL, settings=["momentum", "by layer", "adam"])
def case_a_step_is_the_simulated_one(comm, kind, settings):
    settings = {
        "momentum": {"momentum": 0.9, "clip_norm": 10.0},
        "by layer": {"by_layer": True, "momentum": 0.9, "momentum_correction": True, "weight_decay": 0.01},
        "adam": {"adam": Adam(), "weight_decay": 0.01},
    }[settings]
    if kind is optim.AutoSGD:
        settings["candidates"] = ["oktopk"]  # what is chosen of several depends on the network
    arguments = (lambda step: 0.1 / (1 + step), DensityWarmup(0.03, 2, (0.3, 0.1)))
    ours, simulated = parameters(), [parameters() for _ in range(comm.size)]
    optimizer = kind(ours, *arguments, comm, **settings)
    replicas = [kind(replica, *arguments, Simulated(rank), **settings) for rank, replica in enumerate(simulated)]
    for step in range(8):
        optimizer.step(gradients(comm.rank, step))
        network = sar.Network(hosts=comm.size)  # all on one host, as here
        simulated_step(replicas, [gradients(rank, step) for rank in range(comm.size)], network=network)
    assert len(set(comm.allgather(joined(ours).tobytes()))) == 1, "replicas have drifted apart"
    if kind is optim.DenseSGD:  # MPI adds in an order of its own
        np.testing.assert_allclose(joined(ours), joined(simulated[0]), rtol=1e-4, atol=1e-5)
    else:
        assert joined(ours).tobytes() == joined(simulated[0]).tobytes()


@each(kind=ALL)
def case_layers_that_are_started_one_by_one_make_the_same_step(comm, kind):
    at_once, one_by_one = parameters(), parameters()
    first, second = (kind(own, 0.1, 0.05, comm, by_layer=True, momentum=0.9) for own in (at_once, one_by_one))
    for step in range(4):
        own = gradients(comm.rank, step)
        first.step(own)
        for layer in reversed(range(len(own))):
            second.start(layer, own[layer])
        second.finish()
    assert joined(at_once).tobytes() == joined(one_by_one).tobytes()


@each(kind=ALL)
def case_a_restored_optimiser_goes_on_to_the_bit(comm, kind):
    settings = {"momentum": 0.9, "momentum_correction": True}
    ours = parameters()
    first = kind(ours, 0.1, 0.05, comm, **settings)
    for step in range(5):
        first.step(gradients(comm.rank, step))
    resumed = [parameter.copy() for parameter in ours]
    second = kind(resumed, 0.1, 0.05, comm, **settings)
    second.restore(first.state())
    for step in range(5, 9):
        first.step(gradients(comm.rank, step))
        second.step(gradients(comm.rank, step))
    assert joined(ours).tobytes() == joined(resumed).tobytes()


def wrong_gradient(optimizer, own):
    optimizer.step(own[:2])


def wrong_shape(optimizer, own):
    optimizer.step([*own[:2], own[2].T])


def wrong_rate(optimizer, own):
    optimizer.step(own, rate=-1)


def other_rate(optimizer, own):
    optimizer.step(own, rate=0.2)


WRONG = {
    wrong_gradient: (sar.StreamError, "each of the 3 parameters, not 2"),
    wrong_shape: (sar.StreamError, "parameter 2 has to have its shape"),
    wrong_rate: (sar.AlgorithmError, "learning rate must be a number, at least 0"),
    other_rate: (sar.MismatchError, "learning rate: 0.1 on rank"),
}


@each(mistake=WRONG, by_layer=[False, True])
def case_a_mistake_on_one_rank_is_raised_on_all_and_changes_nothing(comm, mistake, by_layer):
    if comm.size == 1:
        skip("needs two ranks")
    kind, message = WRONG[mistake]
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, momentum=0.9, momentum_correction=True, by_layer=by_layer)
    optimizer.step(gradients(comm.rank, 0))
    before, kept = optimizer.state(), joined(ours)
    with pytest.raises(kind, match=message):
        (mistake if comm.rank == comm.size - 1 else TopKSGD.step)(optimizer, gradients(comm.rank, 1))
    after = optimizer.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert np.array_equal(kept, joined(ours))
    optimizer.step(gradients(comm.rank, 1))
    assert len(set(comm.allgather(joined(ours).tobytes()))) == 1


def function(k):
    return selection.NonZeroTopK(k)


class Chooser:
    def method(self, k):
        return selection.NonZeroTopK(k)


SELECTORS = {"function": function, "lambda": lambda k: selection.NonZeroTopK(k), "partial": partial(function), "method": Chooser().method}


@each(selector=SELECTORS)
def case_a_selector_may_be_any_callable(comm, selector):
    """Which lies at another address on each rank."""
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, selector=SELECTORS[selector])
    optimizer.step(gradients(comm.rank, 0))
    assert len(set(comm.allgather(joined(ours).tobytes()))) == 1


def case_layers_started_in_another_order_are_an_error_on_all_ranks(comm):
    if comm.size == 1:
        skip("needs two ranks")
    optimizer = TopKSGD(parameters(), 0.1, 0.05, comm, by_layer=True)
    own = gradients(comm.rank, 0)
    for layer in (0, 1) if comm.rank else (1, 0):
        optimizer.start(layer, own[layer])
    with pytest.raises(sar.MismatchError):
        optimizer.finish()
    optimizer.step(own)


@each(layer=[0, 2], error=[KeyboardInterrupt, MemoryError])
def case_a_layer_whose_start_is_interrupted_fails_the_step_on_all_ranks(comm, layer, error):
    if comm.size == 1:
        skip("needs two ranks")
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, momentum=0.9, momentum_correction=True, by_layer=True)
    optimizer.step(gradients(comm.rank, 0))
    here, own = comm.rank == comm.size - 1, gradients(comm.rank, 1)
    for number in range(len(SHAPES)):
        struck = here and number == layer
        with failing(PackDescent, "fed", error, struck), pytest.raises(error) if struck and error is KeyboardInterrupt else nullcontext():
            optimizer.start(number, own[number])
    with pytest.raises(sar.SparseAllreduceError, match=f"{error.__name__}.*"):
        optimizer.finish()
    assert optimizer.steps == 1 and len(set(comm.allgather(joined(ours).tobytes()))) == 1
    optimizer.step(gradients(comm.rank, 2))
    assert optimizer.steps == 2 and len(set(comm.allgather(joined(ours).tobytes()))) == 1


@each(layer=[0, 1, 2])
def case_an_error_behind_the_start_of_a_layer_fails_the_step_on_all_ranks(comm, layer):
    """The last rank raises an error that is none of the gradient's, and goes on to the next step without finishing this one."""
    if comm.size == 1:
        skip("needs two ranks")
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, by_layer=True)
    own, struck = gradients(comm.rank, 0), comm.rank == comm.size - 1
    complete = layer == len(SHAPES) - 1  # every rank has all sums then
    for number in range(layer):
        optimizer.start(number, own[number])
    if struck:
        with patch.object(optimizer_module, "suppress", raising_once(MemoryError)), pytest.raises(MemoryError):
            optimizer.start(layer, own[layer])
    else:
        for number in range(layer, len(SHAPES)):
            optimizer.start(number, own[number])
        with nullcontext() if complete else pytest.raises(sar.SparseAllreduceError, match="MemoryError"):
            optimizer.finish()
    if complete:
        with pytest.raises(sar.SparseAllreduceError, match="MemoryError"):
            optimizer.step(gradients(comm.rank, 1))
    optimizer.step(gradients(comm.rank, 2))
    assert len(set(comm.allgather(joined(ours).tobytes()))) == 1


@each(by_layer=[True, False])
def case_an_error_before_a_step_is_finished_is_raised_by_the_next_step(comm, by_layer):
    """The last rank raises it once all sums are started, which the other ranks complete and apply."""
    if comm.size == 1:
        skip("needs two ranks")
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, by_layer=by_layer)
    struck = comm.rank == comm.size - 1
    with failing(TopKSGD, "finish", MemoryError, struck), pytest.raises(MemoryError) if struck else nullcontext():
        optimizer.step(gradients(comm.rank, 0))
    with pytest.raises(sar.SparseAllreduceError, match="MemoryError"):
        optimizer.step(gradients(comm.rank, 1))
    optimizer.step(gradients(comm.rank, 2))
    assert optimizer.steps == 2 and len(set(comm.allgather(joined(ours).tobytes()))) == 1


def raising_once(error):
    """Return a replacement of suppress whose first use raises that error."""
    errors = [error]

    def used(*kinds):
        if errors:
            raise errors.pop()
        return suppress(*kinds)

    return used


@each(momentum=[0.0, 0.9])
def case_a_sum_that_an_interrupted_rank_lacks_is_applied_by_none(comm, momentum):
    """The last rank loses its result, as if it had been interrupted once it had sent all that the others need, and is interrupted then."""
    if comm.size == 1:
        skip("needs two ranks")
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, momentum=momentum, momentum_correction=momentum > 0, by_layer=True)
    optimizer.step(gradients(comm.rank, 0))
    before, kept, struck = joined(ours), optimizer.residuals[0].copy(), comm.rank == comm.size - 1
    optimizer.start(0, gradients(comm.rank, 1)[0])
    first = optimizer._pending[0]
    while not first.has_succeeded():
        first.test()
    if struck:
        first.descent.feedback.put_back()
        first.request = Request(None, error=sar.SparseAllreduceError("KeyboardInterrupt on the last rank"))
    with failing(PackDescent, "fed", KeyboardInterrupt, struck), pytest.raises(KeyboardInterrupt) if struck else nullcontext():
        optimizer.start(1, gradients(comm.rank, 1)[1])
    optimizer.start(2, gradients(comm.rank, 1)[2])
    with pytest.raises(sar.SparseAllreduceError, match="KeyboardInterrupt"):
        optimizer.finish()
    assert joined(ours).tobytes() == before.tobytes() and optimizer.steps == 1
    if not momentum:
        np.testing.assert_allclose(optimizer.residuals[0], kept + gradients(comm.rank, 1)[0].ravel(), rtol=1e-6)
    optimizer.step(gradients(comm.rank, 2))
    assert optimizer.steps == 2 and len(set(comm.allgather(joined(ours).tobytes()))) == 1


def case_ranks_of_which_one_has_not_applied_a_step_do_not_go_on(comm):
    """Rank 0 loses a sum that is complete on the other ranks, as if it had been interrupted while it waited for it."""
    if comm.size == 1:
        skip("needs two ranks")
    ours = parameters()
    optimizer = TopKSGD(ours, 0.1, 0.05, comm, by_layer=True)
    for layer, own in enumerate(gradients(comm.rank, 0)):
        optimizer.start(layer, own)
    for pending in optimizer._pending:
        pending.request.wait()
    comm.Barrier()
    if comm.rank == 0:
        optimizer._pending[1].request = Request(None, error=sar.SparseAllreduceError("KeyboardInterrupt on this rank"))
        with pytest.raises(sar.SparseAllreduceError, match="KeyboardInterrupt"):
            optimizer.finish()
        assert joined(ours).tobytes() == joined(parameters()).tobytes()
    else:
        optimizer.finish()
    for error in ("KeyboardInterrupt", "the ranks disagree on"):
        with pytest.raises(sar.SparseAllreduceError, match=error):
            optimizer.step(gradients(comm.rank, 1))


@each(what=["parameters", "settings", "arguments"])
def case_replicas_that_differ_are_an_error_on_all_ranks(comm, what):
    if comm.size == 1:
        skip("needs two ranks")
    ours, settings = parameters(), {}
    if comm.rank == 0:
        if what == "parameters":
            ours[1][3] += 1
        else:
            settings = {"momentum": 0.9 if what == "settings" else 1.5}
    expected = sar.AlgorithmError if what == "arguments" else sar.MismatchError
    with pytest.raises(expected, match=r"on rank 0" if what == "arguments" else "parameters, whose digest is|settings"):
        TopKSGD(ours, 0.1, 0.05, comm, **settings)


def joined(arrays):
    return np.concatenate([array.ravel() for array in arrays])
