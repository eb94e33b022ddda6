"""Local steps over MPI: SparseLoCo, DiLoCo and local SGD against what their papers say, in NumPy; replicas, states and errors."""

import io

import numpy as np
import pytest
import torch
from mpi_cases import each
from nets import assert_alike, backward, bits, flat, flat_gradient, mean_over, net

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError
from sparseallreduce.torch import DiLoCo, LocalSGD, SparseLoCo

KINDS = {
    "SparseLoCo": lambda inner, comm, H=3, **how: SparseLoCo(inner, H, 0.05, chunk=256, comm=comm, **how),
    "DiLoCo": lambda inner, comm, H=3, **how: DiLoCo(inner, H, comm=comm, **how),
    "LocalSGD": lambda inner, comm, H=3, **how: LocalSGD(inner, H, comm=comm, **how),
}


def train(model, optimizer, rank, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()


def alone(before, rank, steps, first=0):
    """The change that SGD makes on a rank alone."""
    model = net()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(before.copy()).float(), model.parameters())
    train(model, torch.optim.SGD(model.parameters(), 0.05), rank, steps, first)
    return (before - flat(model).numpy()).astype(np.float32)


@each(kind=KINDS)
def case_ranks_have_the_same_parameters_after_each_sum_and_their_own_between(comm, kind):
    model = net(seed=comm.rank)
    optimizer = KINDS[kind](torch.optim.AdamW(model.parameters(), 1e-3), comm)
    assert len(set(comm.allgather(bits(model)))) == 1
    for round_ in range(2):
        train(model, optimizer, comm.rank, 2, 3 * round_)
        assert len(set(comm.allgather(bits(model)))) == comm.size
        train(model, optimizer, comm.rank, 1, 3 * round_ + 2)
        assert len(set(comm.allgather(bits(model)))) == 1
        optimizer.check_replicas()
    assert (optimizer.steps, optimizer.sums) == (6, 2)
    train(model, optimizer, comm.rank, 1, 6)
    optimizer.synchronize()
    assert len(set(comm.allgather(bits(model)))) == 1


def case_local_sgd_is_the_mean_of_what_ranks_come_to_alone(comm):
    model = net()
    before = flat(model).numpy()
    train(model, LocalSGD(torch.optim.SGD(model.parameters(), 0.05), 4, comm=comm), comm.rank, 4)
    changes = [alone(before, rank, 4) for rank in range(comm.size)]
    np.testing.assert_allclose(flat(model).numpy(), before - np.mean(changes, axis=0), atol=1e-6)


def case_diloco_is_an_outer_step_with_momentum_of_nesterov(comm):
    model, outer = net(), net()
    theirs = torch.optim.SGD(outer.parameters(), 0.7, momentum=0.9, nesterov=True)
    optimizer = DiLoCo(torch.optim.SGD(model.parameters(), 0.05), 2, comm=comm)
    for step in (0, 2, 4):
        before = flat(outer).numpy()
        mean = torch.from_numpy(np.mean([alone(before, rank, 2, step) for rank in range(comm.size)], axis=0))
        for parameter, part in zip(outer.parameters(), mean.split([weights.numel() for weights in outer.parameters()])):
            parameter.grad = part.float().reshape(parameter.shape)
        theirs.step()
        train(model, optimizer, comm.rank, 2, step)
        np.testing.assert_allclose(flat(model).numpy(), flat(outer).numpy(), atol=1e-5)


@each(average=["senders", "ranks"])
def case_sparseloco_is_the_algorithm_of_its_paper(comm, average):
    model = net()
    optimizer = SparseLoCo(torch.optim.SGD(model.parameters(), 0.05), 2, 0.1, 0.9, 0.8, "exact", 100, average, comm=comm)
    expected = flat(model).numpy()
    errors, selector = np.zeros((comm.size, len(expected)), np.float32), sar.streams.selection.ChunkTopK(round(0.1 * len(expected)), 100)
    for step in (0, 2, 4):
        sent = []
        for rank, error in enumerate(errors):
            error *= np.float32(0.9)
            sent.append(selector(error, alone(expected, rank, 2, step), clear=True).to_dense())
        divisor = comm.size if average == "ranks" else np.maximum(np.count_nonzero(sent, axis=0), 1).astype(np.float32)
        expected = expected - np.float32(0.8) * np.sum(sent, axis=0) / divisor
        train(model, optimizer, comm.rank, 2, step)
        np.testing.assert_allclose(flat(model).numpy(), expected, atol=1e-5)


@each(kind=KINDS, delay=[0, 2], dtype=[torch.float32, torch.bfloat16])
def case_a_state_goes_through_a_file_and_on_to_the_bit(comm, kind, delay, dtype):
    def fresh():
        model = net().to(dtype)
        return model, KINDS[kind](torch.optim.AdamW(model.parameters(), 1e-3), comm, delay=delay)

    model, optimizer = fresh()
    train(model, optimizer, comm.rank, 7)  # one step behind a sum
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, comm.rank, 8, 7)
    again, other = fresh()
    train(again, other, comm.rank, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(again, other, comm.rank, 8, 7)
    assert bits(again) == bits(model)
    assert (other.steps, other.sums) == (optimizer.steps, optimizer.sums)


@each(kind=KINDS)
def case_states_of_different_steps_are_an_error_on_all_ranks(comm, kind):
    model = net()
    optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), 0.05), comm)
    train(model, optimizer, comm.rank, 3)
    early = optimizer.state_dict()
    train(model, optimizer, comm.rank, 3)
    with pytest.raises(CheckpointError, match="different steps"):
        optimizer.load_state_dict(early if comm.rank == 0 else optimizer.state_dict())
    with pytest.raises(CheckpointError, match="has H 3"):
        KINDS[kind](torch.optim.SGD(model.parameters(), 0.05), comm, 4).load_state_dict(early)


@each(where=range(2))
def case_what_the_inner_optimiser_raises_on_one_rank_is_raised_on_all(comm, where):
    model = net()
    optimizer = SparseLoCo(torch.optim.SGD(model.parameters(), 0.05), 2, comm=comm)

    def closure():
        if comm.rank == where and optimizer.steps == 1:
            raise ValueError("no more data")
        return backward(model, comm.rank)

    optimizer.step(closure)
    with pytest.raises((ValueError, sar.SparseAllreduceError), match="no more data"):
        optimizer.step(closure)
    optimizer.synchronize()
    assert len(set(comm.allgather(bits(model)))) == 1


@each(kind=KINDS)
def case_a_step_that_a_scaler_skips_on_one_rank_counts_there_too(comm, kind):
    models = [net(), net()]
    optimizers = [KINDS[kind](torch.optim.SGD(model.parameters(), 0.05), comm, 2) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    for step in range(4):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            for parameter in model.parameters() if step == 1 and comm.rank == 0 else ():
                parameter.grad.fill_(torch.inf if model is models[0] else 0.0)
        for parameter in models[0].parameters():
            parameter.grad.mul_(scaler.get_scale())
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[1].step()
    assert [(optimizer.steps, optimizer.sums) for optimizer in optimizers] == [(4, 2)] * 2
    assert scaler.get_scale() == (32 if comm.rank == 0 else 64)
    assert bits(models[0]) == bits(models[1])


@each(kind=KINDS, closure=[False, True])
def case_a_warm_up_is_the_inner_optimiser_on_the_mean_gradient(comm, kind, closure):
    """Also if a rank lacks a gradient, and if a scaler finds infinite ones on a rank."""
    model = net(seed=comm.rank)
    optimizer = KINDS[kind](torch.optim.AdamW(model.parameters(), 1e-2), comm, 2, warmup=3)
    theirs = net(seed=0)
    reference = torch.optim.AdamW(theirs.parameters(), 1e-2)
    first, *_, last = model.parameters()

    def gradients(step):
        optimizer.zero_grad()
        loss = backward(model, comm.rank, step)
        first.grad, last.grad = None if step == 1 and comm.rank == 0 else first.grad, None
        for own, parameter in zip(model.parameters(), theirs.parameters()):
            parameter.grad = mean_over(comm, torch.zeros_like(own) if own.grad is None else own.grad).float()
        parameter.grad = None
        return loss

    for step in range(3):
        if closure:
            optimizer.step(lambda step=step: gradients(step))
        else:
            gradients(step)
            optimizer.step()
        reference.step()
        assert_alike(comm, model)
        torch.testing.assert_close(flat(model), flat(theirs), rtol=1e-4, atol=1e-4)
    assert optimizer.sums == 0
    train(model, optimizer, comm.rank, 2, 3)
    assert optimizer.sums == 1
    optimizer.check_replicas()


def case_a_warm_up_leaves_out_a_step_with_infinite_gradients_on_any_rank(comm):
    model = net()
    optimizer = SparseLoCo(torch.optim.SGD(model.parameters(), 0.05), 2, 0.05, warmup=3, comm=comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        expected = flat(model) - (0 if step == 1 else 0.05 * mean_over(comm, flat_gradient(model)))
        for parameter in model.parameters():
            parameter.grad.mul_(torch.inf if step == 1 and comm.rank == 0 else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(flat(model), expected, rtol=1e-5, atol=1e-6)
        assert_alike(comm, model)
    assert optimizer.steps == 3


def case_a_warm_up_without_the_mean_is_an_error_on_all_ranks_at_its_end(comm):
    weights = np.zeros(100, np.float32)
    local = sar.optim.SparseLoCo(weights, 2, warmup=2, comm=comm)
    mean = local.mean(np.full((2, 50), comm.rank, np.float32))
    assert np.array_equal(mean, np.full((2, 50), (comm.size - 1) / 2))
    local.step()
    weights += comm.rank
    with pytest.raises(sar.MismatchError, match="replicas differ"):
        local.step()


@each(where=range(2))
def case_a_sparse_gradient_in_a_warm_up_is_an_error_on_all_ranks(comm, where):
    table = torch.nn.Embedding(10, 3, sparse=comm.rank == where)
    optimizer = LocalSGD(torch.optim.SGD(table.parameters(), 0.1), 2, warmup=2, comm=comm)
    table(torch.tensor([1, 2])).sum().backward()
    before = bits(table)
    with pytest.raises(sar.StreamTypeError, match="dense gradients"):
        optimizer.step()
    assert bits(table) == before and optimizer.steps == 0


@each(kind=KINDS)
def case_a_sum_that_fails_loses_nothing_and_counts_nothing_twice(comm, kind):
    models = [net(), net()]
    for fails, model in zip((True, False), models):
        optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), 0.05), comm, 2)
        train(model, optimizer, comm.rank, 3)
        if fails:
            weight = model[0].weight.detach().view(-1)[:1].clone()
            if comm.rank == 1:
                with torch.no_grad():
                    model[0].weight.view(-1)[0] = float("inf")
            if kind == "SparseLoCo":
                with pytest.raises(sar.StreamError, match="beyond what value_codec"):
                    optimizer.synchronize()
            if comm.rank == 1:
                with torch.no_grad():
                    model[0].weight.view(-1)[:1] = weight
        train(model, optimizer, comm.rank, 3, 3)
    assert bits(models[0]) == bits(models[1])


@each(kind=KINDS, error=[MemoryError, KeyboardInterrupt])
def case_a_rank_that_fails_as_it_writes_parameters_leaves_replicas_alike(comm, kind, error):
    model = net()
    optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), 0.05), comm, 2)
    train(model, optimizer, comm.rank, 3)
    before, vector = flat(model), optimizer.local._vector
    write = vector.write

    def fails(lo, hi, values):
        vector.write = write
        write(lo, hi, values)
        raise error("struck")

    if comm.rank == 1:
        vector.write = fails
    with pytest.raises((error, sar.SparseAllreduceError)):
        optimizer.synchronize()
    torch.testing.assert_close(flat(model), before, rtol=0, atol=1e-6)
    try:
        optimizer.synchronize()
    except sar.SparseAllreduceError:  # of ranks that had not heard of it
        optimizer.synchronize()
    optimizer.check_replicas()
    assert len(set(comm.allgather(bits(model)))) == 1


def case_settings_that_differ_are_an_error_on_all_ranks(comm):
    model = net()
    with pytest.raises(sar.MismatchError, match="the ranks differ: H is 2 on rank 0"):
        DiLoCo(torch.optim.SGD(model.parameters(), 0.05), 2 + comm.rank, comm=comm)
    with pytest.raises(sar.AlgorithmError, match="H is the number of steps"):
        DiLoCo(torch.optim.SGD(model.parameters(), 0.05), 0 if comm.rank == 1 else 2, comm=comm)
    with pytest.raises(sar.AlgorithmError, match="decay"):
        SparseLoCo(torch.optim.SGD(model.parameters(), 0.05), 2, beta=1.5, comm=comm)


@each(kind=KINDS, dtype=[torch.float32, torch.bfloat16])
def case_sums_in_flight_and_fragments_come_together_at_the_end(comm, kind, dtype):
    model = net(seed=comm.rank).to(dtype)
    optimizer = KINDS[kind](torch.optim.SGD(model.parameters(), 0.05), comm, 4, delay=3, fragments=2)
    train(model, optimizer, comm.rank, 11)
    assert optimizer.sums == 4
    optimizer.check_replicas()
    optimizer.synchronize()
    optimizer.check_replicas()
    assert len(set(comm.allgather(bits(model)))) == 1


def case_a_rank_that_joins_late_gets_the_weights(comm):
    first = comm.Split(comm.rank < comm.size - 1, comm.rank)
    model = net(seed=comm.rank)
    inner = torch.optim.SGD(model.parameters(), 0.05)
    if comm.rank < comm.size - 1:
        optimizer = SparseLoCo(inner, 3, comm=first)
        train(model, optimizer, comm.rank, 6)
        optimizer.set_communicator(comm)
    else:
        optimizer = SparseLoCo(inner, 3, comm=comm)
    assert (optimizer.steps, optimizer.sums, len(set(comm.allgather(bits(model))))) == (6, 2, 1)
    train(model, optimizer, comm.rank, 3, 6)
    assert len(set(comm.allgather(bits(model)))) == 1
    first.Free()


def case_parameters_in_another_order_in_memory_are_written_where_they_lie(comm):
    weights = [torch.ones(6, 4).t(), torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.ones(5, 2)[:, 1]]
    weights = [torch.nn.Parameter(weight.add_(comm.rank)) for weight in weights]
    optimizer = LocalSGD(torch.optim.SGD(weights, 1.0), 1, fragments=1, comm=comm)
    for weight in weights:
        assert torch.equal(weight, torch.ones_like(weight))
        weight.grad = torch.arange(float(weight.numel())).reshape(weight.shape) * comm.rank
    optimizer.step()
    share = sum(range(comm.size)) / comm.size
    for weight in weights:
        torch.testing.assert_close(weight.detach(), 1 - share * torch.arange(float(weight.numel())).reshape(weight.shape))
