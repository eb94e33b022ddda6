"""Row-wise Adagrad against its formula; sparse and dense gradients, rows that nobody has, settings, and sums over ranks of one."""

import pytest

torch = pytest.importorskip("torch")

import sparseallreduce as sar
from sparseallreduce.torch import RowwiseAdagrad, distributed


def expected(weights, gradients, lr, eps, first):
    weights, sums = weights.double(), torch.full((len(weights),), first, dtype=torch.float64)
    for gradient in gradients:
        gradient = gradient.double().to_dense()
        sums += gradient.reshape(len(weights), -1).square().mean(1)
        scale = lr / (sums.sqrt() + eps)
        weights = weights - scale.reshape(-1, *[1] * (weights.ndim - 1)) * gradient
    return weights.float()


@pytest.mark.parametrize("shape", [(20, 4), (20,), (20, 2, 3)])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("sums", [True, False])
def test_each_row_has_a_rate_by_its_own_gradients(shape, sparse, sums):
    generator = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(shape, generator=generator))
    gradients = [torch.randn(shape, generator=generator) for _ in range(4)]
    for gradient in gradients:
        gradient[torch.rand(20, generator=generator) < 0.6] = 0
    settings = {"lr": 0.3, "eps": 1e-3, "initial_accumulator_value": 0.1}
    wanted = expected(weights.detach(), gradients, 0.3, 1e-3, 0.1)
    kind, more = (distributed(RowwiseAdagrad, "dense"), {"comm": sar.SERIAL}) if sums else (RowwiseAdagrad, {})
    optimizer = kind([weights], **settings, **more)
    for gradient in gradients:
        weights.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()
    torch.testing.assert_close(weights.detach(), wanted, rtol=1e-5, atol=1e-6)
    assert optimizer.state[weights]["sum"].shape == (20,)


def test_rows_that_come_twice_count_with_their_sum_and_no_rows_change_nothing():
    table = torch.nn.Embedding(10, 3, sparse=True)
    optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    before = table.weight.detach().clone()
    wanted = expected(before, [torch.zeros(10, 3).index_fill_(0, torch.tensor([4]), 2.0)], 0.1, 1e-8, 0.0)
    table(torch.tensor([4, 4])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table.weight[4], wanted[4])
    assert torch.equal(table.weight[:4], before[:4]) and torch.equal(table.weight[5:], before[5:])
    optimizer.zero_grad()
    table(torch.empty(0, dtype=torch.int64)).sum().backward()
    before = table.weight.detach().clone()
    optimizer.step()
    assert torch.equal(table.weight, before)


@pytest.mark.parametrize("wrong", [{"lr": -1}, {"eps": -1}, {"initial_accumulator_value": -1}])
def test_settings_below_0_are_refused_by_name(wrong):
    with pytest.raises(sar.AlgorithmError, match=next(iter(wrong))):
        RowwiseAdagrad([torch.nn.Parameter(torch.zeros(3))], **wrong)
