"""Gradients that are sparse tensors, as of embeddings, and those of 16 bits."""

import copy
from unittest import mock

import pytest
import torch
from mpi_cases import each
from nets import assert_alike, backward, bits, mean_over, net
from torch import nn

import sparseallreduce as sar
from sparseallreduce.torch import DenseSGD, OkTopkSGD, TopKSGD, distributed
from sparseallreduce.torch import optimizer as optimizer_module


def words(rank, step, count=12, most=200):
    return torch.randint(0, most, (count,), generator=torch.Generator().manual_seed(100 * step + rank))


class Reader(nn.Module):
    """An embedding of words, and a linear layer."""

    def __init__(self, sparse=True, bag=False):
        super().__init__()
        torch.manual_seed(0)
        self.bag = bag
        self.table = nn.EmbeddingBag(200, 6, sparse=sparse) if bag else nn.Embedding(200, 6, sparse=sparse)
        self.layer = nn.Linear(6, 4)

    def forward(self, text):
        return self.layer(self.table(text.reshape(3, -1)) if self.bag else self.table(text)).square().mean()


def case_a_rank_that_is_interrupted_as_it_makes_rows_tells_the_others(comm):
    model = Reader()
    optimizer = TopKSGD(model.parameters(), 0.1, density=0.5, comm=comm)

    def backward(step):
        optimizer.zero_grad()
        model(words(comm.rank, step)).backward()

    backward(0)
    optimizer.step()
    before = bits(model)
    backward(1)
    if comm.rank == 0:
        with mock.patch.object(optimizer_module, "as_stream", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            optimizer.step()
    else:
        with pytest.raises(sar.SparseAllreduceError, match="KeyboardInterrupt"):
            optimizer.step()
    assert bits(model) == before
    backward(2)
    optimizer.step()
    assert bits(model) != before
    assert_alike(comm, model)


BASES = {"SGD": torch.optim.SGD, "momentum": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


@each(base=BASES, bag=[False, True], overlap=[False, True])
def case_rows_of_an_embedding_are_summed_exactly(comm, base, bag, overlap):
    model = Reader(bag=bag)
    reference = Reader(sparse=False, bag=bag)
    settings = {"lr": 0.1} | ({"momentum": 0.9} if base == "momentum" else {})
    optimizer = distributed(BASES[base], "topk")(model.parameters(), density=1.0, comm=comm, overlap=overlap, **settings)
    theirs = BASES[base](reference.parameters(), **settings)
    for step in range(4):
        optimizer.zero_grad()
        model(words(comm.rank, step)).backward()
        assert model.table.weight.grad.is_sparse
        for parameter, own in zip(reference.parameters(), model.parameters()):
            parameter.grad = mean_over(comm, own.grad.to_dense()).float()
        optimizer.step()
        theirs.step()
        torch.testing.assert_close(model.table.weight, reference.table.weight, rtol=1e-4, atol=1e-5)
    assert_alike(comm, model)


@each(most=[3, 200])
def case_sparse_adam_moves_the_rows_that_some_rank_has(comm, most):
    table, reference = nn.Embedding(200, 6, sparse=True), nn.Embedding(200, 6, sparse=True)
    reference.load_state_dict(table.state_dict())
    optimizer = distributed(torch.optim.SparseAdam, "topk")(table.parameters(), lr=0.1, comm=comm)
    reference.load_state_dict(table.state_dict())
    theirs = torch.optim.SparseAdam(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        table(words(comm.rank, step, most=most)).square().sum().backward()
        first, *others = comm.allgather(table.weight.grad.double())
        reference.weight.grad = (sum(others, first) / comm.size).float().coalesce()
        optimizer.step()
        theirs.step()
        torch.testing.assert_close(table.weight, reference.weight, rtol=1e-4, atol=1e-5)
    assert_alike(comm, table)


def case_a_rank_without_rows_and_none_with_rows(comm):
    table = nn.Embedding(50, 3, sparse=True)
    optimizer = OkTopkSGD(table.parameters(), 0.5, comm=comm)
    before = table.weight.detach().clone()
    optimizer.step()
    assert not optimizer.state
    for step in range(2):
        optimizer.zero_grad()
        if comm.rank == 0:
            table(torch.tensor([4, 4, 9])).sum().backward()
        optimizer.step()
        changed = (table.weight != before).any(1).nonzero().reshape(-1).tolist() if step else None
    assert changed == [4, 9]
    optimizer.zero_grad()
    table(torch.empty(0, dtype=torch.int64)).sum().backward()  # a gradient of no rows
    optimizer.step()
    assert_alike(comm, table)


def case_indices_of_several_dimensions_and_none_dense(comm):
    shapes = {1: (10, 4, 3), 2: (10, 4, 3), 3: (10, 4, 3)}
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
    optimizer = DenseSGD(parameters, 1.0, comm=comm)
    torch.manual_seed(comm.rank)
    gradients = [torch.randn(10, 4, 3) * (torch.rand(10, 1, 1) < 0.4) for _ in parameters]
    for dims, parameter, gradient in zip(shapes, parameters, gradients):
        parameter.grad = gradient.to_sparse(dims)
    optimizer.step()
    for parameter, gradient in zip(parameters, gradients):
        torch.testing.assert_close(parameter.detach(), -mean_over(comm, gradient).float())


def case_sparse_gradients_count_in_the_clipped_norm(comm):
    model = Reader()
    optimizer = DenseSGD(model.parameters(), 1.0, comm=comm, clip_norm=1e-3)
    model(words(comm.rank, 0)).backward()
    before = [each.detach().double() for each in model.parameters()]
    optimizer.step()
    moved = sum(float((old - new.detach().double()).square().sum()) for old, new in zip(before, model.parameters()))
    assert moved**0.5 == pytest.approx(1e-3, rel=1e-2)


def case_an_embedding_that_is_not_sparse_any_more_is_an_error_on_all_ranks_once(comm):
    model = Reader()
    optimizer = TopKSGD(model.parameters(), 0.1, density=0.5, comm=comm)
    model(words(comm.rank, 0)).backward()
    optimizer.step()
    if comm.rank == 0:
        model.table.weight.grad = model.table.weight.grad.to_dense()
    with pytest.raises(sar.StreamTypeError, match="parameter 0 is sparse on some ranks and not on others"):
        optimizer.step()


@each(dtype=["float16", "bfloat16"], kind=[DenseSGD, OkTopkSGD, TopKSGD])
def case_parameters_of_16_bits_have_masters_in_float32(comm, dtype, kind):
    """Steps that are lost in 16 bits add up."""
    half = getattr(torch, dtype)
    layer = nn.Parameter(torch.ones(8, 8, dtype=half))
    optimizer = kind([layer], 1.0, density=1.0, comm=comm, momentum=0.5)
    for _ in range(64):
        layer.grad = torch.full((8, 8), 2.0**-13, dtype=half)
        optimizer.step()
    torch.testing.assert_close(layer.detach().float(), torch.full((8, 8), 1 - 2 * 63 * 2.0**-13).to(half).float())
    assert optimizer.state[layer]["momentum_buffer"].dtype == torch.float32
    assert all(residual is None or residual.dtype == torch.float32 for residual in optimizer.residuals)
    state = copy.deepcopy(optimizer.state_dict())
    again = nn.Parameter(layer.detach().clone())
    resumed = kind([again], 1.0, density=1.0, comm=comm, momentum=0.5)
    resumed.load_state_dict(state)
    for _ in range(5):
        for own, each_optimizer in ((layer, optimizer), (again, resumed)):
            own.grad = torch.full((8, 8), 2.0**-13, dtype=half)
            each_optimizer.step()
    assert torch.equal(layer, again)
    assert torch.equal(optimizer.state[layer]["momentum_buffer"], resumed.state[again]["momentum_buffer"])
    with torch.no_grad():
        layer.fill_(3.0)  # as load_state_dict of a model does
    optimizer.zero_grad()
    optimizer.param_groups[0]["momentum"] = 0.0
    layer.grad = torch.full((8, 8), 0.5, dtype=half)
    optimizer.step()
    assert torch.equal(layer.detach().float(), torch.full((8, 8), 2.5))


@each(dtype=["float32", "float16", "bfloat16"], unscaled=[False, True], overlap=[False, True])
def case_a_step_with_infinite_gradients_on_any_rank_is_skipped_by_all(comm, dtype, unscaled, overlap):
    if dtype == "float16" and unscaled:
        dtype = "float32"  # a GradScaler does not unscale float16 in place
    half = getattr(torch, dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 3)).to(half)
    twin = copy.deepcopy(model)
    optimizer, plain = (TopKSGD(own.parameters(), 0.1, density=0.1, comm=comm, momentum=0.9, overlap=overlap) for own in (model, twin))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + comm.rank)
        x = torch.randn(4, 10, generator=generator).to(half)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        struck = step in (0, 2)
        if struck and comm.rank == comm.size - 1:
            model[0].weight.grad[2, 3] = float("inf") if step else float("nan")
        if unscaled:
            scaler.unscale_(optimizer)
        before, held = bits(model), optimizer.residuals
        kept = copy.deepcopy(optimizer.state_dict()["state"])
        scaler.step(optimizer)
        scaler.update()
        if struck:
            assert bits(model) == before
            assert all(torch.equal(*pair) for pair in zip(held, optimizer.residuals) if pair[0] is not None)
            assert str(kept) == str(optimizer.state_dict()["state"])
        else:
            plain.zero_grad()
            twin(x).square().mean().backward()
            plain.step()
    assert optimizer.steps == plain.steps == 3
    assert_alike(comm, model)
    if dtype == "float32":
        torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-4, atol=1e-5)


def case_a_scaler_after_overlapped_steps_is_an_error_on_all_ranks(comm):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.1, density=0.1, comm=comm, overlap=True)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(backward_loss(model, comm)).backward()
    with pytest.raises(sar.AlgorithmError, match="a GradScaler is used after steps without one"):
        scaler.step(optimizer)


def backward_loss(model, comm):
    return model(torch.ones(2, 3, 6, 6) * (1 + comm.rank)).square().mean()
