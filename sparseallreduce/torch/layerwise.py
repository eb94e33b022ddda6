"""LARS and LAMB, which adapt the learning rate of each layer.

The ranks can share the computation of the norms of the layers (CommLib section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.torch.devices import norms
from sparseallreduce.torch.parallel import parallel_map

__all__ = ["LAMB", "LARS"]

WORTH = 1_000_000  # the least number of elements for which ranks share the computation of norms by default


class _Layerwise(torch.optim.Optimizer):
    """The base class of LARS and LAMB.

    ``adapt`` of a parameter group says whether its layers have adapted rates. By default this holds for parameters with more than one
    dimension, and not for biases and the weights of normalisation layers.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], comm: Any, parallel: bool | None) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if float(defaults.get(name, 0)) < 0:
                raise AlgorithmError(f"{name} must be at least 0, not {defaults[name]}")
        super().__init__(params, defaults)
        self.comm = comm
        self.parallel = parallel

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one optimisation step.

        It is collective if the optimiser has a ``comm``, whose ranks must have the same parameters and gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [
            (parameter, group, self._direction(parameter, group))
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for (parameter, group, direction), ratio in zip(moved, self._ratios(moved)):
            self._move(parameter, group, direction, ratio)
        return loss

    def _ratios(self, moved: Sequence[tuple[torch.Tensor, dict[str, Any], torch.Tensor]]) -> list[float]:
        """Return the factor of the learning rate for each layer."""
        adapted = [
            place for place, (parameter, group, _) in enumerate(moved) if (parameter.ndim > 1 if group["adapt"] is None else group["adapt"])
        ]
        pairs = [(moved[place][0], moved[place][2]) for place in adapted]
        norms = self._norms(pairs)
        ratios = [1.0] * len(moved)
        for place, (of_weights, of_direction) in zip(adapted, norms):
            if of_weights > 0 and of_direction > 0:  # a layer of zeros would stay zero with a ratio of 0
                ratios[place] = self._ratio(moved[place][1], of_weights, of_direction)
        return ratios

    def _norms(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[list[float]]:
        """Return the L2 norms of the weights and of the direction for each layer."""
        elements = sum(weights.numel() for weights, _ in pairs)
        shared = elements >= WORTH if self.parallel is None else self.parallel
        if shared and self.comm is not None and self.comm.size > 1:
            return [each.tolist() for each in parallel_map(_two_norms, pairs, self.comm)]
        flat = norms(tensor for pair in pairs for tensor in pair)
        return [flat[place : place + 2] for place in range(0, len(flat), 2)]

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the direction of the step, whose norm is compared with that of the parameter."""
        raise NotImplementedError

    def _ratio(self, group: dict[str, Any], of_weights: float, of_direction: float) -> float:
        raise NotImplementedError

    def _move(self, parameter: torch.Tensor, group: dict[str, Any], direction: torch.Tensor, ratio: float) -> None:
        raise NotImplementedError


def _two_norms(weights: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in (weights, direction)])


class LARS(_Layerwise):
    """SGD with momentum whose learning rate is adapted to each layer (You et al., 2018; CommLib equation 11).

    ``velocity = momentum * velocity + ratio * (gradient + weight_decay * w); w -= lr * velocity``, where ``ratio`` is ``trust * |w| /
    (|gradient| + weight_decay * |w|)``. The learning rate multiplies the velocity, as in PyTorch's SGD.

    Parameters
    ----------
    params : iterable
        The parameters or parameter groups, as for any optimiser of PyTorch.
    lr : float
        The learning rate.
    momentum, weight_decay : float
        The momentum and weight decay of the formula above.
    trust : float
        The trust coefficient, γ in the paper.
    nesterov : bool
        Whether to use Nesterov momentum.
    adapt : bool, optional
        Whether the layers have adapted rates, which can be set for each group. By default this holds for parameters with more than one
        dimension.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        A communicator whose ranks have the same parameters and gradients. ``distributed(LARS, ...)`` passes its own.
    parallel : bool, optional
        Whether the ranks share the computation of the norms. By default they do if the layers have at least a million elements in all.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Parameter(torch.full((2, 2), 2.0))
    >>> layer.grad = torch.full((2, 2), 0.25)
    >>> LARS([layer], lr=0.5, trust=0.1).step()
    >>> layer[0]                                                          # 2 - 0.5 * (0.1 * 4 / 0.5) * 0.25
    tensor([1.9000, 1.9000], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        trust: float = 0.001,
        nesterov: bool = False,
        adapt: bool | None = None,
        comm: Any = None,
        parallel: bool | None = None,
    ) -> None:
        if not 0 <= momentum < 1:
            raise AlgorithmError(f"momentum must be at least 0 and below 1, not {momentum}")
        if nesterov and not momentum:
            raise AlgorithmError("Nesterov momentum requires a momentum")
        if not trust > 0:
            raise AlgorithmError(f"trust must be above 0, not {trust}")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "nesterov": nesterov, "adapt": adapt}
        super().__init__(params, defaults, comm, parallel)

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad

    def _ratio(self, group: dict[str, Any], of_weights: float, of_direction: float) -> float:
        return float(group["trust"] * of_weights / (of_direction + group["weight_decay"] * of_weights))

    def _move(self, parameter: torch.Tensor, group: dict[str, Any], direction: torch.Tensor, ratio: float) -> None:
        step = direction * ratio
        if group["weight_decay"]:
            step += parameter * (ratio * group["weight_decay"])
        if group["momentum"]:
            state = self.state[parameter]
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = step.clone()
            else:
                velocity.mul_(group["momentum"]).add_(step)
            step = step + velocity * group["momentum"] if group["nesterov"] else velocity
        parameter.sub_(step * float(group["lr"]))


class LAMB(_Layerwise):
    """AdamW whose learning rate is adapted to each layer (You et al., 2020, algorithm 2).

    ``w -= lr * |w| / |r| * r``, where ``r`` is the mean divided by the root of the second moment, both with bias correction, plus
    ``weight_decay * w``.

    Parameters
    ----------
    params : iterable
        The parameters or parameter groups, as for any optimiser of PyTorch.
    lr : float
        The learning rate.
    betas : (float, float)
        The decay rates of the first and the second moment.
    eps : float
        Added to the root of the second moment.
    weight_decay : float
        The weight decay of the formula above.
    clamp : float, optional
        An upper limit for the norm of the weights in the ratio (φ in the paper). There is none by default.
    adapt, comm, parallel
        See :class:`LARS`.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Parameter(torch.full((2, 2), 2.0))
    >>> layer.grad = torch.full((2, 2), 0.25)
    >>> LAMB([layer], lr=0.1, eps=0.0).step()
    >>> layer[0]                                                          # 2 - 0.1 * (4 / 2) * 1
    tensor([1.8000, 1.8000], grad_fn=<SelectBackward0>)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        clamp: float | None = None,
        adapt: bool | None = None,
        comm: Any = None,
        parallel: bool | None = None,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise AlgorithmError(f"betas must be at least 0 and below 1, not {betas}")
        if clamp is not None and not clamp > 0:
            raise AlgorithmError(f"clamp must be above 0, or None, not {clamp}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "clamp": clamp, "adapt": adapt}
        super().__init__(params, defaults, comm, parallel)

    def _direction(self, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        assert parameter.grad is not None
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].mul_(first).add_(gradient * (1 - first))
        state["exp_avg_sq"].mul_(second).add_(gradient * gradient * (1 - second))
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        direction = state["exp_avg"] / (1 - first ** state["step"]) / root
        return direction.add_(parameter * group["weight_decay"]) if group["weight_decay"] else direction

    def _ratio(self, group: dict[str, Any], of_weights: float, of_direction: float) -> float:
        return float((of_weights if group["clamp"] is None else min(of_weights, group["clamp"])) / of_direction)

    def _move(self, parameter: torch.Tensor, group: dict[str, Any], direction: torch.Tensor, ratio: float) -> None:
        parameter.sub_(direction * (float(group["lr"]) * ratio))
