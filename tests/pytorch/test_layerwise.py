"""LARS and LAMB on one rank: the papers' formulas, and layers that have no rate of their own."""

import pytest

torch = pytest.importorskip("torch")

from nets import backward, net
from torch import nn

import sparseallreduce as sar
from sparseallreduce.torch import LAMB, LARS, parallel_operator


def layer_of(values, gradient):
    layer = nn.Parameter(torch.tensor(values))
    layer.grad = torch.tensor(gradient)
    return layer


def test_lars_follows_equation_11_of_commlib():
    layer = layer_of([[3.0, 4.0]], [[0.6, 0.8]])
    LARS([layer], lr=2.0, weight_decay=0.1, trust=0.5).step()
    ratio = 0.5 * 5 / (1 + 0.1 * 5)
    expected = torch.tensor([[3.0, 4.0]]) - 2.0 * ratio * (torch.tensor([[0.6, 0.8]]) + 0.1 * torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(layer.detach(), expected)


def test_lamb_follows_algorithm_2():
    layer = layer_of([[3.0, 4.0]], [[0.5, -2.0]])
    optimizer = LAMB([layer], lr=0.1, weight_decay=0.1, eps=1e-6)
    w, m, v = torch.tensor([[3.0, 4.0]]).double(), 0.0, 0.0
    for step in range(1, 4):
        g = layer.grad.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        r = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-6) + 0.1 * w
        w = w - 0.1 * w.norm() / r.norm() * r
        optimizer.step()
        layer.grad *= -0.7
        torch.testing.assert_close(layer.detach().double(), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_biases_zeros_and_parameters_without_gradients(kind):
    bias = nn.Parameter(torch.full((3,), 2.0))
    zeros, without, frozen = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    bias.grad, zeros.grad, frozen.grad = torch.full((3,), 0.5), torch.full((2, 2), 0.5), torch.zeros(2, 2)
    kind([bias, zeros, without, frozen], lr=0.1).step()
    moved = 0.05 if kind is LARS else 0.1  # by their gradient times the rate; or by one, as Adam
    torch.testing.assert_close(bias.detach(), torch.full((3,), 2.0 - moved), rtol=1e-4, atol=0)
    torch.testing.assert_close(zeros.detach(), torch.full((2, 2), -moved), rtol=1e-4, atol=0)
    assert torch.equal(without, torch.ones(2, 2)) and torch.equal(frozen, torch.ones(2, 2))


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_state_round_trips_and_loss_falls(kind):
    model = net()
    optimizer = kind(model.parameters(), lr=0.5 if kind is LARS else 0.01, **({"momentum": 0.9, "trust": 0.02} if kind is LARS else {}))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(float(optimizer.step(lambda: backward(model, 0)).detach()))
    assert losses[-1] < 0.6 * losses[0]
    other = kind(net().parameters())
    other.load_state_dict(optimizer.state_dict())
    assert str(other.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize(
    "kind,settings",
    [
        (LARS, {"lr": -1.0}),
        (LARS, {"momentum": 1.0}),
        (LARS, {"nesterov": True}),
        (LARS, {"trust": 0.0}),
        (LAMB, {"betas": (1.0, 0.9)}),
        (LAMB, {"eps": -1.0}),
        (LAMB, {"clamp": 0.0}),
    ],
)
def test_wrong_settings_are_named(kind, settings):
    with pytest.raises(ValueError, match=r"must be|requires"):
        kind(net().parameters(), **settings)


def test_a_tensor_without_dimensions_has_no_pieces():
    with pytest.raises(TypeError, match="cannot be divided"):
        parallel_operator(torch.abs, torch.tensor(1.0), sar.SERIAL)
