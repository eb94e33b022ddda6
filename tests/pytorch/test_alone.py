"""Optimisers on one rank, which needs no MPI: what PyTorch's own classes do, and what goes wrong."""

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from nets import ALL, LOSSY, backward, bits, flat, net
from torch import nn

import sparseallreduce as sar
from sparseallreduce import optim
from sparseallreduce import torch as ours
from sparseallreduce.optim import DensityWarmup
from sparseallreduce.torch import DenseSGD, OkTopkSGD, TopKSGD, distributed


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"maximize": True}])
def test_a_density_of_1_is_the_optimiser_of_pytorch(kind, settings):
    ours, theirs = net(), net()
    theirs_optimizer = torch.optim.SGD(theirs.parameters(), 0.1, **settings)
    optimizers = kind(ours.parameters(), 0.1, density=1.0, comm=sar.SERIAL, **settings), theirs_optimizer
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("kind", LOSSY)
def test_loss_falls_at_a_density_of_a_hundredth(kind):
    model = net()
    optimizer = kind(model.parameters(), 0.05, density=0.01, comm=sar.SERIAL)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(float(backward(model, 0).detach()))
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_the_density_may_warm_up_and_change():
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.1, density=DensityWarmup(0.01, 1, (0.5, 0.1)), comm=sar.SERIAL, dense=False)
    size = flat(model).numel()
    for share in (0.5, 0.1, 0.01, 0.01):
        optimizer.zero_grad()
        backward(model, 0)
        before = flat(model)
        optimizer.step()
        assert (flat(model) != before).sum() == pytest.approx(share * size, rel=0.1, abs=1)
    optimizer.param_groups[0]["density"] = 0.2
    before = flat(model)
    optimizer.step()
    assert (flat(model) != before).sum() == pytest.approx(0.2 * size, rel=0.1)


@pytest.mark.parametrize("kind", [OkTopkSGD, TopKSGD])
def test_residuals_of_parameters_that_become_dense_are_applied(kind):
    layer = nn.Parameter(torch.zeros(10, 10))
    optimizer = kind([layer], 0.5, density=0.05, comm=sar.SERIAL)
    layer.grad = torch.arange(100.0).reshape(10, 10)
    optimizer.step()
    owed = -0.5 * layer.grad
    optimizer.param_groups[0]["dense"] = True
    layer.grad = torch.zeros(10, 10)
    optimizer.step()
    torch.testing.assert_close(layer.detach(), owed)
    optimizer.step()
    torch.testing.assert_close(layer.detach(), owed)
    assert optimizer.residuals == [None]


def test_a_residual_that_waits_for_a_dense_sum_is_saved():
    layer = nn.Parameter(torch.zeros(10, 10))
    optimizer = TopKSGD([layer], 0.5, density=0.05, comm=sar.SERIAL)
    layer.grad = torch.arange(100.0).reshape(10, 10)
    optimizer.step()
    held = optimizer.residuals[0]
    again = TopKSGD([layer], 0.5, density=0.05, comm=sar.SERIAL, dense=True)
    again.load_state_dict(optimizer.state_dict())
    again.param_groups[0]["dense"] = True
    assert torch.equal(again.residuals[0], held)
    assert torch.equal(again.state_dict()["sums"]["residuals"][0][0], held.reshape(-1))


@pytest.mark.parametrize("name", ["TopKSGD", "OkTopkSGD", "HiTopKSGD"])
@pytest.mark.parametrize("masking", [True, False])
def test_momentum_correction_is_that_of_optim(name, masking):
    generator = torch.Generator().manual_seed(0)
    layer, array = nn.Parameter(torch.zeros(20, 10)), np.zeros((20, 10), np.float32)
    settings = {"density": 0.05, "momentum": 0.9, "momentum_correction": True, "momentum_masking": masking, "comm": sar.SERIAL}
    optimizer = getattr(ours, name)([layer], 0.1, **settings)
    theirs = getattr(optim, name)(array, 0.1, **settings)
    plain = nn.Parameter(torch.zeros(20, 10))
    uncorrected = getattr(ours, name)([plain], 0.1, density=0.05, momentum=0.9, comm=sar.SERIAL)
    for _ in range(12):
        layer.grad = torch.randn(20, 10, generator=generator)
        plain.grad = layer.grad.clone()
        optimizer.step()
        uncorrected.step()
        theirs.step(layer.grad.numpy())
        np.testing.assert_allclose(layer.detach().numpy(), array, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(layer, plain)


def test_momentum_correction_leaves_what_is_dense_to_pytorch_and_weight_decay_its_weight():
    weights, bias = nn.Parameter(torch.ones(10, 10)), nn.Parameter(torch.ones(10))
    theirs = nn.Parameter(torch.ones(10))
    settings = {"momentum": 0.5, "weight_decay": 0.1}
    optimizer = TopKSGD([weights, bias], 0.1, density=0.01, momentum_correction=True, comm=sar.SERIAL, **settings)
    reference = torch.optim.SGD([theirs], 0.1, **settings)
    for _ in range(3):
        weights.grad = torch.zeros(10, 10)
        weights.grad[0, 0] = 1e-3
        bias.grad = theirs.grad = torch.arange(10.0)
        optimizer.step()
        reference.step()
    assert torch.equal(bias, theirs)
    torch.testing.assert_close(weights[1:].detach(), torch.full((9, 10), (1 - 0.1 * 0.1 / 0.5) ** 3))


@pytest.mark.parametrize("wrong", [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}, {"momentum": 1.0}])
def test_momentum_correction_that_there_is_not(wrong):
    with pytest.raises(sar.AlgorithmError, match="momentum"):
        TopKSGD(net().parameters(), 0.1, momentum_correction=True, comm=sar.SERIAL, **wrong)
    with pytest.raises(sar.AlgorithmError, match="Adam"):
        distributed(torch.optim.Adam)(net().parameters(), momentum_correction=True, momentum=0.9, comm=sar.SERIAL)


def test_velocity_goes_with_its_parameters_when_buckets_are_arranged_anew():
    layers = [nn.Parameter(torch.zeros(10, 10)) for _ in range(2)]
    optimizer = TopKSGD(layers, 0.5, density=0.05, momentum=0.5, momentum_correction=True, momentum_masking=False, comm=sar.SERIAL)
    for layer in layers:
        layer.grad = torch.arange(100.0).reshape(10, 10)
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(5, 5))]})
    held = optimizer.state_dict()["sums"]["velocities"][0]
    assert torch.equal(held[1], layers[1].grad.reshape(-1))
    optimizer.step()
    velocities = optimizer.state_dict()["sums"]["velocities"][0]
    assert torch.equal(velocities[0], 1.5 * layers[0].grad.reshape(-1)) and not velocities[2].any()


def test_odd_parameters():
    """None, of no elements, of one, of no dimensions, and frozen."""
    parameters = [nn.Parameter(torch.ones(shape)) for shape in [(0, 3), (1, 1), (), (2, 3)]]
    frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
    optimizer = OkTopkSGD([*parameters, frozen], 0.1, density=0.5, comm=sar.SERIAL, momentum=0.9, weight_decay=0.1, overlap=True)
    for _ in range(3):
        optimizer.zero_grad()
        sum(each.sum() for each in parameters).backward()
        optimizer.step()
    assert torch.equal(frozen, torch.ones(3, 3))
    assert all((each != 1).all() for each in parameters)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()


def test_a_step_without_any_gradient_changes_nothing():
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1, comm=sar.SERIAL)
    before = bits(model)
    optimizer.step()
    assert bits(model) == before and not optimizer.state


def test_lr_may_be_a_tensor():
    model = net()
    optimizer = TopKSGD(model.parameters(), torch.tensor(0.1), density=0.1, comm=sar.SERIAL)
    backward(model, 0)
    before = bits(model)
    optimizer.step()
    assert bits(model) != before


def test_hooks_of_steps_are_called_once():
    torch.optim.SGD([nn.Parameter(torch.ones(2))])  # which has its class call hooks, too
    model = net()
    optimizer = OkTopkSGD(model.parameters(), 0.1, comm=sar.SERIAL)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    backward(model, 0)
    optimizer.step()
    assert calls == ["before", "after"]


def test_copies_are_refused_with_a_remedy():
    optimizer = OkTopkSGD(net().parameters(), 0.1, comm=sar.SERIAL)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="use state_dict"):
            copying(optimizer)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_and_its_optimiser_are_forgotten(overlap):
    model = net()
    optimizer = OkTopkSGD(model.parameters(), 0.1, comm=sar.SERIAL, overlap=overlap)
    for _ in range(2):
        backward(model, 0)
        optimizer.step()
        optimizer.zero_grad()
    forgotten = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert forgotten() is None
    backward(model, 0)  # the hooks are gone, too


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimiser_that_exists_goes_on_with_its_state_and_its_scheduler(base, dtype):
    """The same steps are taken over at the beginning, or half-way: nothing is lost, and the scheduler knows nothing of it."""
    runs = []
    for moment in (0, 3, None):
        model = net().to(dtype)
        optimizer = base(model.parameters(), 0.01, **({"momentum": 0.9} if base is torch.optim.SGD else {}))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(6):
            if step == moment:
                optimizer = distributed(optimizer, "topk", density=1.0, comm=sar.SERIAL)
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            scheduler.step()
        runs.append(flat(model))
    tolerance = 1e-6 if dtype == torch.float32 else 0.05  # PyTorch alone has no master copies of parameters of 16 bits
    assert torch.equal(runs[0], runs[1]) or dtype == torch.bfloat16
    for each in runs[:2]:
        torch.testing.assert_close(each.float(), runs[2].float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "wrap, message",
    [
        (lambda optimizer: distributed(optimizer, lr=0.2, comm=sar.SERIAL), "lr is a setting of the existing optimiser"),
        (lambda optimizer: distributed(optimizer, weight_decay=0.2, comm=sar.SERIAL), "weight_decay is a setting"),
        (lambda optimizer: distributed(optimizer, dennsity=0.2, comm=sar.SERIAL), "dennsity"),
        (lambda optimizer: distributed(distributed(optimizer, comm=sar.SERIAL), comm=sar.SERIAL), "sums gradients over the ranks already"),
        (lambda optimizer: OkTopkSGD(torch.optim.Adam(net().parameters()), comm=sar.SERIAL), "takes over a SGD, not a Adam"),
        (lambda _: distributed(torch.optim.SGD, density=0.1), "density is for the constructor of the class"),
        (lambda _: distributed(torch.optim.LBFGS(net().parameters()), comm=sar.SERIAL), "LBFGS calls its closure several times"),
    ],
)
def test_an_optimiser_that_cannot_be_taken_over_is_an_error_that_says_why(wrap, message):
    with pytest.raises((sar.AlgorithmError, TypeError), match=message):
        wrap(torch.optim.SGD(net().parameters(), 0.1))


def test_a_class_of_a_base_and_a_reducer_is_made_once():
    assert distributed(torch.optim.Adam, "gtopk") is distributed(torch.optim.Adam, "gtopk")
    assert distributed(torch.optim.AdamW).__name__ == "OkTopkAdamW"
    with pytest.raises(ValueError, match="there is no reducer 'top'"):
        distributed(torch.optim.Adam, "top")
    with pytest.raises(ValueError, match="closure several times"):
        distributed(torch.optim.LBFGS)


@pytest.mark.parametrize("base", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_optimisers_of_pytorch_work_beneath(base):
    ours, theirs = net(), net()
    kind = getattr(torch.optim, base)
    optimizers = distributed(kind, "topk")(ours.parameters(), density=1.0, comm=sar.SERIAL), kind(theirs.parameters())
    for step in range(3):
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
    torch.testing.assert_close(flat(ours), flat(theirs))


def test_a_wrong_density_on_the_way_is_an_error_that_changes_nothing():
    model = net()
    optimizer = DenseSGD(model.parameters(), 0.1, comm=sar.SERIAL)
    lossy = TopKSGD(model.parameters(), 0.1, comm=sar.SERIAL)
    backward(model, 0)
    lossy.step()
    before = bits(model)
    lossy.param_groups[0]["density"] = lambda step: 2.0
    with pytest.raises(ValueError, match="density is a share"):
        lossy.step()
    assert bits(model) == before
    lossy.param_groups[0]["density"] = 0.1
    lossy.step()
    optimizer.step()
    assert bits(model) != before


def test_complex_parameters_are_refused():
    with pytest.raises(TypeError, match="floating-point"):
        TopKSGD([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], 0.1, comm=sar.SERIAL)


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_bits_do_not_depend_on_the_number_of_threads(base):
    found = set()
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(1)
            sizes = (100_003, 7, 65_537)
            parameters = [nn.Parameter(torch.randn(1, size, generator=generator)) for size in sizes]
            optimizer = distributed(base, "topk")(parameters, lr=0.1, weight_decay=0.01, density=0.1, comm=sar.SERIAL)
            for _ in range(3):
                for each in parameters:
                    each.grad = torch.randn(each.shape, generator=generator)
                optimizer.step()
            found.add(bits(parameters))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_the_library_is_imported_without_torch():
    program = "import sys, sparseallreduce, sparseallreduce.optim, sparseallreduce.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_a_callable_density_is_left_to_the_program():
    settings = {"lr": 0.1, "density": DensityWarmup(0.01, 1, (0.5, 0.1)), "comm": sar.SERIAL}
    optimizer, again = (TopKSGD(net().parameters(), **settings) for _ in range(2))
    state = optimizer.state_dict()
    assert "density" not in state["param_groups"][0]
    again.load_state_dict(state)
    assert again.param_groups[0]["density"] == settings["density"]
