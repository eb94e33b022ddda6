"""Sums that start while gradients are computed: the same bits, and errors where that cannot be right."""

from unittest import mock

import pytest
import torch
from mpi_cases import each
from nets import ALL, assert_alike, backward, bits, flat_gradient, mean_over, net
from torch import nn

import sparseallreduce as sar
from sparseallreduce.torch import DenseSGD, OkTopkSGD, TopKSGD
from sparseallreduce.torch import optimizer as optimizers

SETTINGS = {"density": 0.05, "momentum": 0.9, "bucket_bytes": 3000}


@each(kind=ALL)
def case_overlap_makes_the_same_steps_to_the_bit(comm, kind):
    models = net(), net()
    first, second = (kind(each.parameters(), 0.05, comm=comm, overlap=place == 1, **SETTINGS) for place, each in enumerate(models))
    for step in range(6):
        for model, optimizer in zip(models, (first, second)):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        assert bits(models[0]) == bits(models[1])
    if kind is not DenseSGD:
        assert all(torch.equal(*pair) for pair in zip(first.residuals, second.residuals) if pair[0] is not None)
    assert_alike(comm, models[1])


def case_sums_are_in_flight_when_backward_returns(comm):
    model = net()
    optimizer = OkTopkSGD(model.parameters(), 0.05, comm=comm, overlap=True, **SETTINGS)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        started = 0 if optimizer._flight is None else optimizer._flight.started
        assert started == (len(optimizer._buckets) if step else 0) and (not step or started > 3)
        optimizer.step()


@each(overlap=[False, True])
def case_gradients_add_up_over_several_passes(comm, overlap):
    model, other = net(), net()
    optimizer = TopKSGD(model.parameters(), 0.05, comm=comm, overlap=overlap, **SETTINGS)
    plain = TopKSGD(other.parameters(), 0.05, comm=comm, **SETTINGS)
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        with optimizer.no_sync():
            backward(model, comm.rank, step, "a")
            backward(model, comm.rank, step, "b")
        backward(model, comm.rank, step, "c")
        for part in "abc":
            backward(other, comm.rank, step, part)
        optimizer.step()
        plain.step()
        assert bits(model) == bits(other)
    assert_alike(comm, model)


@each(where=["all", "last"], what=["twice", "changed"])
def case_what_comes_after_a_sum_has_begun_is_an_error_on_all_ranks(comm, where, what):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.05, comm=comm, overlap=True, **SETTINGS)
    optimizer_steps(comm, model, optimizer, 2)
    before = bits(model)
    optimizer.zero_grad()
    backward(model, comm.rank, 2)
    if where == "all" or comm.rank == comm.size - 1:
        if what == "twice":
            backward(model, comm.rank, 3)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(sar.AlgorithmError, match="twice in a step" if what == "twice" else "was changed after its sum had begun"):
        optimizer.step()
    assert bits(model) == before
    optimizer_steps(comm, model, optimizer, 2)
    assert_alike(comm, model)


def optimizer_steps(comm, model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()


def case_a_failed_step_loses_nothing(comm):
    """The sums that were done by then are owed by all residuals, as are the gradients of this step."""
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.05, comm=comm, overlap=True, dense=False, density=0.05, bucket_bytes=3000)
    optimizer_steps(comm, model, optimizer, 2)
    held = mean_over(comm, torch.cat([each.reshape(-1) for each in optimizer.residuals]))
    optimizer.zero_grad()
    backward(model, comm.rank, 2)
    own = mean_over(comm, flat_gradient(model))
    if comm.rank == 0:
        optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(sar.MismatchError, match="settings of the groups"):
        optimizer.step()
    now = mean_over(comm, torch.cat([each.reshape(-1) for each in optimizer.residuals]))
    torch.testing.assert_close(now, held + own, rtol=1e-4, atol=1e-6)


def case_gradients_that_come_in_another_order_are_summed_in_the_same(comm):
    torch.manual_seed(0)
    layers = [nn.Parameter(torch.randn(8, 8)) for _ in range(6)]
    optimizer = TopKSGD(layers, 0.1, density=0.2, comm=comm, overlap=True, bucket_bytes=256)
    for step in range(4):
        optimizer.zero_grad()
        order = layers if (comm.rank + step) % 2 else layers[::-1]
        x = torch.ones(8)
        for layer in order:
            x = torch.tanh(layer @ x)
        x.sum().backward()
        optimizer.step()
        assert_alike(comm, layers)


def case_parameters_that_are_used_on_some_ranks_only_do_not_hang(comm):
    layers = [nn.Parameter(torch.ones(8, 8)) for _ in range(4)]
    optimizer = TopKSGD(layers, 0.1, density=0.2, comm=comm, overlap=True, bucket_bytes=256)
    for step in range(4):
        optimizer.zero_grad()
        used = [layer for number, layer in enumerate(layers) if (number + step) % comm.size == comm.rank]
        sum((layer * layer).sum() for layer in used).backward() if used else None
        optimizer.step()
        assert_alike(comm, layers)


def case_frozen_layers_do_not_hold_sums_up(comm):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.05, comm=comm, overlap=True, **SETTINGS)
    optimizer_steps(comm, model, optimizer, 2)
    for parameter in model[4].parameters():
        parameter.requires_grad_(False)
    before = bits(model[4])
    for step in range(60):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    after = bits(model[4])
    optimizer_steps(comm, model, optimizer, 3)
    assert after != before, "its residuals are still applied, and its momentum with them"
    assert_alike(comm, model)


class Interrupted(BaseException):
    """As a KeyboardInterrupt."""


def case_an_interrupted_step_is_finished_by_the_next(comm):
    """The other ranks have applied it by then, and hear of the interrupt in the next."""
    model = net()
    optimizer = OkTopkSGD(model.parameters(), 0.05, comm=comm, **SETTINGS)
    optimizer_steps(comm, model, optimizer, 2)
    optimizer.zero_grad()
    backward(model, comm.rank, 2)
    if comm.rank == 0:
        flight_class = type(optimizer._open())
        original = flight_class.wait

        def interrupted(self):
            flight_class.wait = original
            for _, request, _ in self._pending:  # of which the others have the results
                request.wait()
            raise Interrupted

        flight_class.wait = interrupted
        with pytest.raises(Interrupted):
            optimizer.step()
    else:
        optimizer.step()
    optimizer.zero_grad()
    backward(model, comm.rank, 3)
    with pytest.raises(sar.SparseAllreduceError, match="rank 0 gave up"):
        optimizer.step()
    assert_alike(comm, model)
    optimizer.zero_grad()
    backward(model, comm.rank, 4)
    optimizer.step()
    assert len(set(comm.allgather(optimizer.steps))) == 1
    assert_alike(comm, model)


def case_a_rank_that_is_interrupted_in_backward_tells_the_others(comm):
    model = net()
    optimizer = OkTopkSGD(model.parameters(), 0.05, comm=comm, overlap=True, **SETTINGS)
    optimizer_steps(comm, model, optimizer, 2)
    before = bits(model)
    optimizer.zero_grad()
    if comm.rank == 0:
        handle = model[0].weight.register_hook(interrupt)
        with pytest.raises(Interrupted):
            backward(model, comm.rank, 2)
        handle.remove()
        optimizer._flight.broken = True  # as an interrupt inside one of our hooks leaves it
        optimizer._flight.abandon()
        optimizer._flight = None
    else:
        backward(model, comm.rank, 2)
        with pytest.raises(sar.SparseAllreduceError, match="interrupted"):
            optimizer.step()
    assert bits(model) == before
    optimizer.zero_grad()
    optimizer._arranged = None
    optimizer_steps(comm, model, optimizer, 2)
    assert_alike(comm, model)


def case_a_rank_that_leaves_behind_a_step_is_waited_for_by_none(comm):
    """It is interrupted as it applies the step, and makes the next one only when the others have raised in that."""
    model = net()
    optimizer = OkTopkSGD(model.parameters(), 0.05, comm=comm, overlap=True, **SETTINGS)
    optimizer_steps(comm, model, optimizer, 2)
    optimizer.zero_grad()
    backward(model, comm.rank, 2)
    if comm.rank == 0:
        with mock.patch.object(optimizers, "apply", side_effect=Interrupted), pytest.raises(Interrupted):
            optimizer.step()
        comm.Barrier()
    else:
        optimizer.step()
    optimizer.zero_grad()
    backward(model, comm.rank, 3)
    with pytest.raises(sar.SparseAllreduceError, match="rank 0 gave up"):
        optimizer.step()
    if comm.rank != 0:
        comm.Barrier()
    optimizer.synchronize()
    optimizer_steps(comm, model, optimizer, 2)
    assert_alike(comm, model)


def interrupt(_):
    raise Interrupted
