"""The optimisers of this package: each reducer with PyTorch's SGD, and :func:`distributed` for other optimisers."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, overload

import torch

from sparseallreduce import optim
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.optim import Optimizer as Recipe
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
    """Return an optimiser, or a class of optimisers, whose steps use the mean gradient of all ranks.

    Parameters
    ----------
    base : torch.optim.Optimizer or type
        An existing optimiser, or a class of optimisers. Its step must read ``.grad`` only once. This holds for all classes in
        ``torch.optim`` except LBFGS, and for most others.
    reducer : str
        What sums the gradients: "oktopk", "gtopk", "topk", "approximate-topk", "mstopk", "hitopk" or "dense"; or "auto", which chooses the
        fastest for each bucket: see :class:`AutoSGD`.
    **options
        With an existing optimiser: ``density``, ``comm``, ``overlap`` and the other keyword arguments of :class:`DistributedOptimizer`.

    Returns
    -------
    DistributedOptimizer or type
        For an optimiser, one that takes its place with its groups and its state, which are set to those of rank 0. Learning rate schedulers
        of the given optimiser continue to work. Construction is collective. For a class, a class whose constructor takes the arguments of
        ``base`` and of :class:`DistributedOptimizer`.

    Raises
    ------
    AlgorithmError
        If there is no such reducer or option, or if ``base`` calls its closure several times.

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
    """Return the class of optimisers that sums with the given reducer and applies the means with ``base``."""
    recipe = recipe_of(reducer)
    if issubclass(base, torch.optim.LBFGS):
        raise AlgorithmError("LBFGS calls its closure several times in each step: use another optimiser")
    name = recipe.__name__.removesuffix("SGD") + base.__name__
    described = f"``{base.__name__}`` by the sums of :class:`~sparseallreduce.optim.{recipe.__name__}`; see :class:`DistributedOptimizer`."
    kind = ChoosingOptimizer if recipe is optim.AutoSGD else DistributedOptimizer
    return type(name, (kind,), {"recipe": recipe, "base": base, "__doc__": described})


class OkTopkSGD(DistributedOptimizer):
    """Ok-Topk SGD (Ok-Topk section 4, algorithm 2): sends O(k) words per rank, and applies the largest values of the sum.

    Residuals hold gradients multiplied by the learning rate of their step. It takes the parameters of :class:`DistributedOptimizer`, of
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

    recipe: ClassVar[type[Recipe]] = optim.OkTopkSGD


class GTopkSGD(DistributedOptimizer):
    """gTop-k S-SGD (gTop-k section III-E, algorithm 4): selects the k largest values along a tree of ranks.

    Values that the tree drops return to the residual.
    """

    recipe: ClassVar[type[Recipe]] = optim.GTopkSGD


class TopKSGD(DistributedOptimizer):
    """TopK SGD (thesis section 2.4, algorithm 2): an exact sparse allreduce of each rank's k largest values."""

    recipe: ClassVar[type[Recipe]] = optim.TopKSGD


class ApproximateTopKSGD(DistributedOptimizer):
    """TopK SGD with the thesis's approximate selection. See :class:`sparseallreduce.optim.ApproximateTopKSGD`.

    It works best with little momentum.
    """

    recipe: ClassVar[type[Recipe]] = optim.ApproximateTopKSGD


class MSTopKSGD(DistributedOptimizer):
    """Top-k SGD with MSTopK, which selects by a search for a threshold, and an allgather (CommLib section 3.1, algorithm 1)."""

    recipe: ClassVar[type[Recipe]] = optim.MSTopKSGD


class HiTopKSGD(DistributedOptimizer):
    """Top-k SGD with HiTopKComm (CommLib section 3.2).

    It makes dense sums inside each host, selects with MSTopK, and gathers the values between hosts.
    """

    recipe: ClassVar[type[Recipe]] = optim.HiTopKSGD


class DenseSGD(DistributedOptimizer):
    """Data-parallel SGD with a dense allreduce, as a baseline. It ignores the density."""

    recipe: ClassVar[type[Recipe]] = optim.DenseSGD


class AutoSGD(ChoosingOptimizer):
    """Top-k SGD with the reducer that is expected to be fastest for each bucket. See :class:`~sparseallreduce.Auto`.

    It takes the parameters of :class:`DistributedOptimizer`, of ``torch.optim.SGD`` and of :class:`~sparseallreduce.Auto`. ``candidates``
    restricts the choice. :meth:`explain` returns the choice and its reasons.

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

    recipe: ClassVar[type[Recipe]] = optim.AutoSGD
