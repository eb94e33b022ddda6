"""DistributedDataParallel with our communication hook, over gloo for what it does besides."""

import copy
import gc
import io
import tempfile
from functools import partial, wraps
from pathlib import Path

import pytest
import torch
from mpi_cases import each
from nets import assert_alike, backward, bits, flat, flat_gradient, mean_over, net
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import sparseallreduce as sar
from sparseallreduce.torch import comm_hook

REDUCERS = ["oktopk", "gtopk", "topk", "approximate-topk", "mstopk", "hitopk", "dense"]


def in_process_group(case):
    """A case among whose ranks is gloo; they find each other through a file.

    What the case has made is gone before the group: PyTorch's threads may wait for the interpreter while one that goes last waits for them.
    """

    @wraps(case)
    def run(comm, **arguments):
        folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        distributed.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=comm.rank, world_size=comm.size)
        try:
            case(comm, **arguments)
        finally:
            gc.collect()
            distributed.destroy_process_group()

    return run


def wrapped(model, hook, **settings):
    parallel = DistributedDataParallel(model, **{"bucket_cap_mb": 0.003} | settings)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    return parallel


@each(reducer=["dense", "topk", "gtopk"])
@in_process_group
def case_with_all_values_it_is_what_is_without_the_hook(comm, reducer):
    model, other = net(), net()
    ours = wrapped(model, comm_hook(reducer, comm, density=1.0))
    theirs = wrapped(other, None)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, other)]
    for step in range(4):
        for parallel, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            backward(parallel, comm.rank, step)
            optimizer.step()
        torch.testing.assert_close(flat(model), flat(other), rtol=1e-5, atol=1e-6)
    assert_alike(comm, model)


@each(reducer=REDUCERS)
@in_process_group
def case_nothing_is_lost_though_buckets_change_after_the_first_step(comm, reducer):
    model = net()
    hook = comm_hook(reducer, comm, density=0.03, **({} if reducer != "oktopk" else {"threshold_period": 4}))
    parallel = wrapped(model, hook)
    given = copy.deepcopy(model)
    fed = came = 0
    for step in range(6):
        model.zero_grad()
        given.zero_grad()
        backward(parallel, comm.rank, step)
        given.load_state_dict(model.state_dict())
        backward(given, comm.rank, step)
        fed, came = fed + flat_gradient(given), came + flat_gradient(model)
        assert len(set(comm.allgather(flat_gradient(model).numpy().tobytes()))) == 1
    assert hook.steps == 6
    held = sum(float(each.double().sum()) for each in hook.state_dict()["residuals"].values())
    held = mean_over(comm, torch.tensor([held]))
    torch.testing.assert_close(came.sum() + held[0], mean_over(comm, fed).sum(), rtol=1e-3, atol=1e-4)


@in_process_group
def case_a_reducer_may_be_any_callable(comm):
    model = net()
    parallel = wrapped(model, comm_hook(partial(sar.GTopk, form="allgather"), comm, density=0.1, dense=False))
    for step in range(3):
        model.zero_grad()
        backward(parallel, comm.rank, step)
    assert len(set(comm.allgather(flat_gradient(model).numpy().tobytes()))) == 1


@each(view=[False, True])
@in_process_group
def case_a_saved_hook_goes_on_to_the_bit(comm, view):
    results = []
    for interrupted in (False, True):
        model = net()
        hook = comm_hook("oktopk", comm, density=0.05)
        parallel = wrapped(model, hook, bucket_cap_mb=25, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            if interrupted and step == 3:
                file = io.BytesIO()
                torch.save([model.state_dict(), hook.state_dict()], file)
                file.seek(0)
                saved = torch.load(file, weights_only=True)
                model, hook = net(), comm_hook("oktopk", comm, density=0.05)
                model.load_state_dict(saved[0])
                hook.load_state_dict(saved[1])
                parallel = wrapped(model, hook, bucket_cap_mb=25, gradient_as_bucket_view=view)
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
            optimizer.zero_grad()
            backward(parallel, comm.rank, step)
            optimizer.step()
        results.append(bits(model))
    assert len(set(results)) == 1
    with pytest.raises(ValueError, match="this state is of rank"):
        comm_hook("oktopk", comm).load_state_dict({**saved[1], "rank": comm.rank + 1})


@in_process_group
def case_gradients_that_are_not_synchronised_add_up(comm):
    model, other = net(), net()
    ours, theirs = wrapped(model, comm_hook("topk", comm, density=1.0)), wrapped(other, None)
    for _ in range(3):
        for parallel in (ours, theirs):
            parallel.zero_grad()
            with parallel.no_sync():
                backward(parallel, comm.rank, 0)
            backward(parallel, comm.rank, 1)
        torch.testing.assert_close(flat_gradient(model), flat_gradient(other), rtol=1e-4, atol=1e-6)


@each(dtype=["float32", "bfloat16"])
@in_process_group
def case_a_step_with_infinite_gradients_on_any_rank_leaves_no_trace(comm, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 3)).to(getattr(torch, dtype))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    hook = comm_hook("topk", comm, density=0.1, scaler=scaler)
    parallel = wrapped(model, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * step + comm.rank)).to(getattr(torch, dtype))
        struck = step in (0, 3)
        if struck and comm.rank == comm.size - 1:
            x[1, 2] = float("inf")
        before, held = bits(model), hook.state_dict()
        scaler.scale(parallel(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if struck:
            assert bits(model) == before
            now = hook.state_dict()
            if step:
                assert str(now) == str(held)
            assert not any(each.any() for each in now["residuals"].values()) or step
        assert len(set(comm.allgather(scaler.get_scale()))) == 1, "the gradients are infinite on all ranks"
    assert hook.steps == 4
    assert_alike(comm, model)


@in_process_group
def case_another_number_of_ranks_is_an_error(comm):
    alone = comm.Split(comm.rank)
    parallel = wrapped(net(), comm_hook("topk", alone))
    with pytest.raises(Exception, match=r"the process group has \d ranks, and the communicator 1"):
        backward(parallel, comm.rank)
    alone.Free()


@in_process_group
def case_an_error_on_one_rank_is_raised_by_backward_on_all(comm):
    parallel = wrapped(net(), comm_hook("topk", comm, density=lambda step: 2.0 if comm.rank == 0 else 0.1))
    with pytest.raises(Exception, match="density is a share"):
        backward(parallel, comm.rank)
