"""Aggregation strategies by name, one file each (thesis section 4.2.2)."""

import inspect

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.strategies.dense import DenseStrategy
from sparseallreduce.linear.strategies.local_steps import LocalStepsStrategy
from sparseallreduce.linear.strategies.lossy import (
    AutoStrategy,
    GaussianKStrategy,
    GTopkStrategy,
    HiTopKStrategy,
    LossyStrategy,
    OkTopkStrategy,
    TopkAStrategy,
    TopkDSAStrategy,
)
from sparseallreduce.linear.strategies.overlapped import OverlappedStrategy
from sparseallreduce.linear.strategies.parameter_server import (
    AsynchronousParameterServer,
    ParameterServer,
    SynchronousParameterServer,
    read_on_workers,
)
from sparseallreduce.linear.strategies.sparse import SparseStrategy

__all__ = [
    "LOSSY",
    "STRATEGIES",
    "AsynchronousParameterServer",
    "AutoStrategy",
    "DenseStrategy",
    "GTopkStrategy",
    "GaussianKStrategy",
    "HiTopKStrategy",
    "LocalStepsStrategy",
    "LossyStrategy",
    "OkTopkStrategy",
    "OverlappedStrategy",
    "ParameterServer",
    "SparseStrategy",
    "Strategy",
    "SynchronousParameterServer",
    "TopkAStrategy",
    "TopkDSAStrategy",
    "read_on_workers",
    "register_strategy",
]

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        DenseStrategy,
        SparseStrategy,
        OverlappedStrategy,
        LocalStepsStrategy,
        SynchronousParameterServer,
        AsynchronousParameterServer,
        OkTopkStrategy,
        GTopkStrategy,
        TopkAStrategy,
        TopkDSAStrategy,
        GaussianKStrategy,
        HiTopKStrategy,
        AutoStrategy,
    )
}

_OWN = frozenset(STRATEGIES)

#: Names of the strategies that sum only a fraction of the entries, which users can choose.
LOSSY = tuple(name for name, kind in STRATEGIES.items() if issubclass(kind, LossyStrategy))


def register_strategy(kind: type[Strategy]) -> None:
    """Add an aggregation strategy by its ``name``, which ``strategy=`` of the estimators and ``train --strategy`` then take.

    A package can register its strategies without a call, by entry points of the group ``sparseallreduce.strategies``.

    Parameters
    ----------
    kind : type
        A subclass of :class:`~sparseallreduce.linear.strategies.base.Strategy` with a ``name``, which implements ``gradient`` and
        ``update``; or of :class:`LossyStrategy`, which implements ``new_reducer``. A name that has been registered before gets the new
        class.

    Raises
    ------
    AlgorithmError
        If it is no such class, is abstract, or has the name of a strategy of the library.
    """
    if not (isinstance(kind, type) and issubclass(kind, Strategy)) or inspect.isabstract(kind):
        raise AlgorithmError(f"a strategy is a subclass of Strategy that implements its abstract methods, not {kind!r}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name or name in _OWN:
        raise AlgorithmError(f"the name of a strategy is a text that is none of {', '.join(sorted(_OWN))}, not {name!r}")
    STRATEGIES[name] = kind
