"""Row-wise Adagrad: a separate rate for each row of an embedding table. A step reads and writes only the rows of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparseallreduce.errors import AlgorithmError

__all__ = ["RowwiseAdagrad"]


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number a row, the sum of the mean squares of its gradients, as recommendation models train their tables with.

    Of a sparse gradient, the rows that it has are read and written once; all others stay as they are, and cost nothing. The state takes 4
    bytes a row, where Adagrad's takes as much as the table.

    Parameters
    ----------
    params : iterable of tensors or of dicts
        Of one dimension or more; rows are those of the first.
    lr : float
    eps : float
        Added to the root of the sum.
    initial_accumulator_value : float
        What the sums begin with.

    Raises
    ------
    AlgorithmError
        If a setting is below 0.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> from sparseallreduce.torch import distributed
    >>> table = torch.nn.EmbeddingBag(1000, 8, mode="sum", sparse=True)
    >>> optimizer = distributed(RowwiseAdagrad)(table.parameters(), lr=0.1, comm=sar.SERIAL)      # under mpiexec without comm
    >>> before = table.weight.detach().clone()
    >>> table(torch.tensor([[3, 5]])).sum().backward()
    >>> optimizer.step()
    >>> (table.weight != before).any(1).nonzero().flatten()
    tensor([3, 5])
    """

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-8, initial_accumulator_value: float = 0.0) -> None:
        for name, value in {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}.items():
            if float(value) < 0:
                raise AlgorithmError(f"{name} must be at least 0, not {value}")
        super().__init__(params, {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimisation step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        rows = parameter.shape[0] if parameter.ndim else 1
        if "sum" not in state:
            state["sum"] = torch.full((rows,), group["initial_accumulator_value"], dtype=parameter.dtype, device=parameter.device)
        if gradient.is_sparse and gradient.sparse_dim() == 1:
            gradient = gradient.coalesce()
            touched, values = gradient.indices()[0], gradient.values()
        else:
            touched, values = torch.arange(rows, device=parameter.device), gradient.to_dense().reshape(rows, *parameter.shape[1:])
        if not values.numel():
            return
        squares = values.reshape(len(touched), -1).square().mean(1)
        sums = state["sum"].index_add_(0, touched, squares)[touched]
        scale = sums.sqrt_().add_(group["eps"]).reciprocal_().reshape(-1, *[1] * (values.ndim - 1))
        parameter.view(rows, *parameter.shape[1:]).index_add_(0, touched, values * scale, alpha=-float(group["lr"]))
