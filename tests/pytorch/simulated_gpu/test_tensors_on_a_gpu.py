"""What optimisers and hooks do with tensors on a GPU is what they do with those of the processor."""

import io
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import Stream, simulated, xp
from torch import nn

import sparseallreduce as sar
from sparseallreduce import torch as ours
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams.kernels.backend import on_device
from sparseallreduce.torch import LAMB, LARS, OkTopkSGD, TopKSGD, buckets, comm_hook, devices, distributed, header, parallel_operator

SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
CASES = {
    "OkTopkSGD": (ours.OkTopkSGD, {"lr": 0.1} | SGD),
    "GTopkSGD": (ours.GTopkSGD, {"lr": 0.1, "overlap": True}),
    "TopKSGD, clipped": (ours.TopKSGD, {"lr": 0.1, "clip_norm": 0.5, "momentum": 0.9}),
    "TopKSGD, corrected": (ours.TopKSGD, {"lr": 0.1, "momentum": 0.9, "momentum_correction": True}),
    "ApproximateTopKSGD": (ours.ApproximateTopKSGD, {"lr": 0.1}),
    "AutoSGD": (ours.AutoSGD, {"lr": 0.1, "candidates": ["gtopk"]}),
    "DenseSGD, clipped, overlap": (ours.DenseSGD, {"lr": 0.1, "clip_norm": 0.5, "overlap": True} | SGD),
    "AdamW": (distributed(torch.optim.AdamW, "topk"), {"lr": 0.01, "weight_decay": 0.1}),
    "LAMB": (distributed(LAMB, "oktopk"), {"lr": 0.01, "parallel": True}),
    "LARS": (distributed(LARS, "dense"), {"lr": 0.1, "momentum": 0.9}),
}


def network(dtype=torch.float32):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(5, 4, generator=generator).to(next(model.parameters()).dtype)).square().mean().backward()


def trained(kind, options, steps=2, model=None, optimizer=None, first=0):
    model = model or network()
    optimizer = optimizer or kind(model.parameters(), density=0.4, comm=sar.SERIAL, **options)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return model, optimizer


def same(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_the_processor(case):
    host, host_optimizer = trained(*CASES[case])
    with simulated() as gpu:
        model, optimizer = trained(*CASES[case])
        assert all(on_device(bucket.vector) for bucket in optimizer._buckets)
        assert {7, "GPU 0"} <= set(gpu.entered)
        held = [bucket.feedback.residual for bucket in optimizer._buckets if bucket.feedback is not None]
        assert all(map(on_device, held))
        for mine, theirs in zip(optimizer.residuals, host_optimizer.residuals, strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    same(model, host)


def test_an_explanation_of_the_choice_has_the_copies():
    for place, lies_there in ((simulated, True), (None, False)):
        with place() if place else nullcontext():
            (choice,) = ours.AutoSGD(network().parameters(), 0.1, candidates=["gtopk"]).explain()
        assert choice.on_device == lies_there


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes_are_converted_by_pytorch(dtype):
    host, _ = trained(OkTopkSGD, {"lr": 0.1, "momentum": 0.9}, model=network(dtype))
    with simulated():
        model, optimizer = trained(OkTopkSGD, {"lr": 0.1, "momentum": 0.9}, model=network(dtype))
        wide = "float64" if dtype == torch.float64 else "float32"
        assert {bucket.vector.dtype.name for bucket in optimizer._buckets} == {wide}
    same(model, host)


@pytest.mark.parametrize("correction", [False, True])
def test_states_lie_on_the_host_and_are_loaded_on_either_side(correction):
    options = {"lr": 0.1, "momentum": 0.9, "momentum_correction": correction}
    whole, _ = trained(OkTopkSGD, options, 4)
    with simulated():
        model, optimizer = trained(OkTopkSGD, options, 2)
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict(), optimizer.gather_state_dict()), file)
    for place in ("host", "GPU"):
        file.seek(0)
        parameters, state, gathered = torch.load(file)
        assert gathered["sums"]["residuals"][0].keys() == state["sums"]["residuals"][0].keys()
        resumed = network()
        resumed.load_state_dict(parameters)
        if place == "host":
            optimizer = OkTopkSGD(resumed.parameters(), density=0.4, comm=sar.SERIAL, **options)
            optimizer.load_state_dict(state)
            trained(None, None, 2, resumed, optimizer, first=2)
        else:
            with simulated():
                optimizer = OkTopkSGD(resumed.parameters(), density=0.4, comm=sar.SERIAL, **options)
                optimizer.load_state_dict(gathered)
                trained(None, None, 2, resumed, optimizer, first=2)
                optimizer.synchronize()
                assert all(each is None or each.device.type == "cpu" for each in optimizer.residuals)
        same(resumed, whole)


def embedded(clip=None):
    torch.manual_seed(4)
    table, unused = nn.Embedding(9, 3, sparse=True), nn.Embedding(5, 2, sparse=True)
    kind = distributed(torch.optim.SGD, "dense")
    optimizer = kind([table.weight, unused.weight], lr=0.5, comm=sar.SERIAL, clip_norm=clip, dense=True)
    for step, rows in enumerate([[1, 1, 7], [0, 8], [2]]):
        optimizer.zero_grad()
        loss = table(torch.tensor(rows)).square().sum()
        if step == 1:
            loss = loss + unused(torch.tensor([3])).sum()
        loss.backward()
        optimizer.step()
    return nn.ParameterList([table.weight, unused.weight])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_sparse_gradients_are_those_of_the_processor(clip):
    host = embedded(clip)
    with simulated():
        same(embedded(clip), host)


def test_a_grad_scaler_leaves_a_step_out_without_a_trace():
    def scaled():
        model = network()
        optimizer = OkTopkSGD(model.parameters(), lr=0.1, density=0.4, comm=sar.SERIAL)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for step in range(3):
            optimizer.zero_grad()
            factor = torch.inf if step == 1 else 1.0
            scaler.scale(model(torch.full((2, 4), 0.5 + step)).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.steps == 2
        return model

    host = scaled()
    with simulated():
        same(scaled(), host)


class Given:
    """A bucket of DistributedDataParallel's."""

    def __init__(self, parameters):
        self._parameters = list(parameters)
        self._buffer = torch.cat([parameter.grad.reshape(-1) for parameter in self._parameters])

    def buffer(self):
        return self._buffer

    def parameters(self):
        return self._parameters

    def gradients(self):
        return [
            part.view(parameter.shape)
            for part, parameter in zip(self._buffer.split([parameter.numel() for parameter in self._parameters]), self._parameters)
        ]

    def is_last(self):
        return True


def hooked():
    model, hook, means = network(), comm_hook("gtopk", sar.SERIAL, density=0.4, scaler=SimpleNamespace(get_scale=lambda: 2.0)), []
    for step in range(3):
        model.zero_grad()
        backward(model, step)
        bucket = Given(model.parameters())
        if step == 1:
            bucket.buffer()[0] = torch.inf
        means.append(hook(None, bucket).wait())
    return means, hook.state_dict()


def test_the_hook_of_distributed_data_parallel_is_that_of_the_processor():
    host, host_state = hooked()
    with simulated():
        means, state = hooked()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(means, host, strict=True))
    for index, residual in host_state["residuals"].items():
        assert torch.equal(state["residuals"][index], residual)


def test_a_stream_waits_for_the_one_before_and_parameters_lie_on_one_gpu():
    with simulated() as gpu:
        order = devices.Order(torch.device("cuda", 1))
        with order, order:
            assert gpu.entered == ["GPU 1", 7, "GPU 1", 7]
        gpu.current = Stream(9)
        with order:
            assert gpu.current.waited == [7]
        tensors = [SimpleNamespace(device=torch.device("cuda", number)) for number in (1, 1, 0)]
        assert order.of(tensors[:2]) is order and order.of([]).gpu is None
        with pytest.raises(StreamTypeError, match=r"several GPUs .cuda:1, cuda:0.: move them to one"):
            order.of(tensors)


def test_parameters_of_the_processor_and_of_a_gpu_are_in_buckets_of_their_own(monkeypatch):
    made = []
    monkeypatch.setattr(buckets, "Bucket", lambda members, *rest: made.append([member.index for member in members]))
    places = torch.device("cpu"), torch.device("cuda", 0)
    shaped = {"numel": lambda: 4, "dtype": torch.float32, "ndim": 2}
    members = [
        buckets.Member(index, SimpleNamespace(device=places[index % 2], **shaped), {"dense": False, "density": 0.1}) for index in range(4)
    ]
    buckets.arranged(members, 1 << 20, None, False)
    assert sorted(made) == [[2, 0], [3, 1]]


def test_norms_come_to_the_host_at_once(monkeypatch):
    copies, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: copies.append(tensor.shape) or tolist(tensor))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda tensor: pytest.fail("a number of its own came to the host"))
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 2.0]), (3,), check_invariants=True)
    assert header.norm_of([torch.full((2,), 3.0), None, sparse, torch.zeros(0)]) == pytest.approx(34**0.5)
    model = network()
    backward(model, 0)
    LAMB(model.parameters()).step()
    assert copies == [(3,), (4,)]


def test_operators_on_pieces_work_on_tensors_of_a_gpu():
    with simulated():
        assert parallel_operator(lambda rows: rows.norm(dim=1), torch.tensor([[3.0, 4.0], [0.0, 2.0]]), sar.SERIAL).tolist() == [5.0, 2.0]


def test_without_cupy_one_line_says_so(monkeypatch):
    with simulated():
        monkeypatch.setitem(sys.modules, "cupy", None)
        with pytest.raises(StreamError, match="CuPy"):
            trained(TopKSGD, {"lr": 0.1})
    assert xp is not None
