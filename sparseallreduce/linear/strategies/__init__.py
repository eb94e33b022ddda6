"""Aggregation strategies by name, one file each (thesis section 4.2.2)."""

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

#: Names of the strategies that sum only a fraction of the entries, which users can choose.
LOSSY = tuple(name for name, kind in STRATEGIES.items() if issubclass(kind, LossyStrategy))
