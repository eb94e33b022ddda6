"""LARS and LAMB, and the parallel tensor operator: each rank computes a part, and all have the same bits."""

import copy

import pytest
import torch
from mpi_cases import each
from nets import assert_alike, backward, bits, flat, mean_over, net

import sparseallreduce as sar
from sparseallreduce.torch import LAMB, LARS, distributed, parallel_map, parallel_operator

FORMS = {
    "LARS": (LARS, {"lr": 1.0, "momentum": 0.9, "weight_decay": 0.01, "trust": 0.01}),
    "nesterov": (LARS, {"lr": 1.0, "momentum": 0.9, "nesterov": True}),
    "LAMB": (LAMB, {"lr": 0.01, "weight_decay": 0.01}),
    "clamped": (LAMB, {"lr": 0.01, "clamp": 0.5}),
}


@each(form=FORMS, reducer=["dense", "mstopk", "oktopk"], parallel=[True, False, None])
def case_ranks_that_share_norms_out_come_to_the_same(comm, form, reducer, parallel):
    kind, settings = FORMS[form]
    model, other = net(), net()
    optimizer = distributed(kind, reducer)(model.parameters(), density=0.1, comm=comm, parallel=parallel, **settings)
    alone = distributed(kind, reducer)(other.parameters(), density=0.1, comm=comm, parallel=False, **settings)
    before = bits(model)
    for step in range(4):
        for own, each_optimizer in ((model, optimizer), (other, alone)):
            each_optimizer.zero_grad()
            backward(own, comm.rank, step)
            each_optimizer.step()
        assert bits(model) == bits(other) != before
    assert_alike(comm, model)


@each(form=FORMS)
def case_a_dense_sum_is_the_optimiser_on_the_mean_gradient(comm, form):
    kind, settings = FORMS[form]
    model = net()
    reference = copy.deepcopy(model)
    optimizer = distributed(kind, "dense")(model.parameters(), comm=comm, **settings)
    theirs = kind(reference.parameters(), **settings)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        for parameter, own in zip(reference.parameters(), model.parameters()):
            parameter.grad = mean_over(comm, own.grad).float()
        optimizer.step()
        theirs.step()
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-3, atol=1e-3)


@each(rows=[0, 1, 2, 7, 1000], dtype=["float32", "float64", "bfloat16", "int64", "bool"])
def case_an_operator_on_a_tensor_is_computed_in_pieces(comm, rows, dtype):
    tensor = (torch.arange(rows * 3).reshape(rows, 3) % 7).to(getattr(torch, dtype))
    given = []

    def operator(piece):
        given.append(len(piece))
        return piece * 2 if dtype != "bool" else ~piece

    result = parallel_operator(operator, tensor, comm)
    assert torch.equal(result, tensor * 2 if dtype != "bool" else ~tensor) and result.dtype == tensor.dtype
    assert sum(comm.allgather(given[0])) == rows and len(given) == 1


@each(layers=[0, 1, 2, 161])
def case_layers_are_shared_out_by_their_elements(comm, layers):
    torch.manual_seed(0)
    tensors = [torch.randn(1 + place % 13, 5) for place in range(layers)]
    computed = []

    def operator(tensor):
        computed.append(tensor.numel())
        return tensor.sum(0)

    results = parallel_map(operator, tensors, comm)
    assert len(results) == layers and all(torch.equal(result, tensor.sum(0)) for result, tensor in zip(results, tensors))
    elements = comm.allgather(sum(computed))
    assert sum(elements) == sum(tensor.numel() for tensor in tensors)
    if layers > 100:
        assert max(elements) <= min(elements) + 2 * 65


def failing(tensor):
    raise ZeroDivisionError("there is nothing to divide by")


@each(mistake=["raises", "no tensor", "other rows", "other shape"])
def case_a_mistake_on_one_rank_is_raised_on_all(comm, mistake):
    last = comm.rank == comm.size - 1
    operator, tensor = torch.abs, torch.ones(6, 2)
    if last:
        operator = {"raises": failing, "no tensor": lambda piece: 3, "other rows": lambda piece: piece[:1]}.get(mistake, operator)
        tensor = torch.ones(7, 2) if mistake == "other shape" else tensor
    with pytest.raises(sar.SparseAllreduceError) as raised:
        parallel_operator(operator, tensor, comm)
    assert len(set(comm.allgather(f"{type(raised.value)} {raised.value}"))) == 1
    assert torch.equal(parallel_operator(torch.abs, torch.ones(6, 2), comm), torch.ones(6, 2))


def case_layers_that_differ_are_an_error_on_all_ranks(comm):
    with pytest.raises(sar.MismatchError, match="shapes"):
        parallel_map(torch.sum, [torch.ones(2 + comm.rank)], comm)
