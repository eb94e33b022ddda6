"""The optimisers of this room: each way to sum gradients, with PyTorch's SGD, Adam and AdamW; and with any other of its optimisers."""

from __future__ import annotations

from functools import cache
from typing import Any, overload

import torch

from sparseallreduce import optim
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.torch.choices import ChoosingOptimizer
from sparseallreduce.torch.optimizer import DistributedOptimizer
from sparseallreduce.torch.recipes import recipe_of

__all__ = ["distributed"]


@overload
def distributed(base: type[torch.optim.Optimizer], reducer: str = "oktopk") -> type[DistributedOptimizer]: ...


@overload
def distributed(base: torch.optim.Optimizer, reducer: str = "oktopk", **options: Any) -> DistributedOptimizer: ...


def distributed(
    base: type[torch.optim.Optimizer] | torch.optim.Optimizer, reducer: str = "oktopk", **options: Any
) -> type[DistributedOptimizer] | DistributedOptimizer:
    """Return an optimiser, or a class of optimisers, that takes its steps by the mean of all ranks' gradients.

    Parameters
    ----------
    base : torch.optim.Optimizer or type
        An optimiser that exists, or a class of optimisers. Its step reads ``.grad`` once: this holds for all of ``torch.optim`` but LBFGS,
        and for most of other packages.
    reducer : str
        What sums the gradients: "oktopk", "gtopk", "topk", "approximate-topk", "mstopk", "hitopk" or "dense"; or "auto", which
        takes the fastest of some for each bucket: see :class:`AutoSGD`.
    **options
        With an optimiser: ``density``, ``comm``, ``overlap`` and the other parameters of :class:`DistributedOptimizer` but its first two.

    Returns
    -------
    DistributedOptimizer or type
        With an optimiser, one that takes its place: it has its groups and its state, which are set to those of rank 0, and learning rate
        schedulers of the former go on working. Construction is collective. With a class, a class whose constructor takes the arguments of
        ``base``, and those of :class:`DistributedOptimizer`.

    Raises
    ------
    AlgorithmError
        If there is no such reducer or option, or ``base`` calls its closure several times.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> layer = torch.nn.Linear(4, 3)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
    >>> optimizer = distributed(optimizer, "oktopk", density=0.5, comm=sar.SERIAL)          # under mpiexec without comm
    >>> layer(torch.ones(4)).sum().backward()
    >>> optimizer.step()

    >>> kind = distributed(torch.optim.RMSprop, "gtopk")
    >>> optimizer = kind(layer.parameters(), lr=0.01, alpha=0.9, density=0.5, comm=sar.SERIAL)
    """
    if isinstance(base, torch.optim.Optimizer):
        kind: type[DistributedOptimizer] = _kind(type(base), reducer)  # type: ignore[arg-type]
        return kind(base, **options)
    for name in options:
        raise AlgorithmError(f"{name} is for the constructor of the class: distributed({base.__name__}, {reducer!r})(params, {name}=...)")
    return _kind(base, reducer)  # type: ignore[arg-type]


@cache
def _kind(base: type[torch.optim.Optimizer], reducer: str) -> type[DistributedOptimizer]:
    """Return the class of optimisers that applies the means of a reducer by ``base``."""
    recipe = recipe_of(reducer)
    if issubclass(base, torch.optim.LBFGS):
        raise AlgorithmError("LBFGS calls its closure several times a step, each with gradients of its own: take another optimiser")
    name = recipe.__name__.removesuffix("SGD") + base.__name__
    described = f"``{base.__name__}`` by the sums of :class:`~sparseallreduce.optim.{recipe.__name__}`; see :class:`DistributedOptimizer`."
    kind = ChoosingOptimizer if recipe is optim.AutoSGD else DistributedOptimizer
    return type(name, (kind,), {"recipe": recipe, "base": base, "__doc__": described})


class OkTopkSGD(DistributedOptimizer):
    """Ok-Topk SGD (Ok-Topk section 4, algorithm 2): the largest of the sum of the ranks' largest, for O(k) words a rank.

    Residuals are of gradients times the learning rate of their step. Parameters are those of :class:`DistributedOptimizer`, of
    ``torch.optim.SGD`` (``momentum``, ``dampening``, ``weight_decay``, ``nesterov``, ``maximize``) and of :class:`~sparseallreduce.OkTopk`.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = OkTopkSGD(model.parameters(), lr=0.1, density=0.1, momentum=0.9, comm=sar.SERIAL)    # under mpiexec without comm
    >>> for _ in range(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(4)).square().sum().backward()
    ...     optimizer.step()
    """

    recipe = optim.OkTopkSGD


class GTopkSGD(DistributedOptimizer):
    """gTop-k S-SGD (gTop-k section III-E, algorithm 4): the k largest along a tree of ranks; what was sent in vain is put back."""

    recipe = optim.GTopkSGD


class TopKSGD(DistributedOptimizer):
    """TopK SGD (thesis section 2.4, algorithm 2): each rank's k largest magnitudes, summed by an exact sparse allreduce."""

    recipe = optim.TopKSGD


class ApproximateTopKSGD(DistributedOptimizer):
    """TopK SGD with the thesis's approximate selection: see :class:`sparseallreduce.optim.ApproximateTopKSGD`. Take little momentum."""

    recipe = optim.ApproximateTopKSGD


class MSTopKSGD(DistributedOptimizer):
    """Top-k SGD with MSTopK's selection by a search of thresholds, and an allgather (CommLib section 3.1, algorithm 1)."""

    recipe = optim.MSTopKSGD


class HiTopKSGD(DistributedOptimizer):
    """Top-k SGD by HiTopKComm: dense sums inside every host, MSTopK of them, and an allgather between hosts (CommLib section 3.2)."""

    recipe = optim.HiTopKSGD


class DenseSGD(DistributedOptimizer):
    """Data-parallel SGD by a dense allreduce: the baseline. Its density is that of nothing."""

    recipe = optim.DenseSGD


class AutoSGD(ChoosingOptimizer):
    """Top-k SGD by the reducer that is expected to take the least time for each bucket: see :class:`~sparseallreduce.Auto`.

    Parameters are those of :class:`DistributedOptimizer`, of ``torch.optim.SGD`` and of :class:`~sparseallreduce.Auto`: ``candidates``
    restricts the choice. :meth:`explain` says what is chosen, and why.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> model = torch.nn.Linear(4, 3)
    >>> optimizer = AutoSGD(model.parameters(), lr=0.1, density=0.1, candidates=["oktopk", "topka"], comm=sar.SERIAL)
    >>> model(torch.ones(4)).square().sum().backward()
    >>> optimizer.step()
    >>> [each.size for each in optimizer.explain()]
    [12]
    """

    recipe = optim.AutoSGD
