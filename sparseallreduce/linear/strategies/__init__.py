"""Aggregation strategies by name, one file each (thesis section 4.2.2)."""

from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.strategies.dense import DenseStrategy
from sparseallreduce.linear.strategies.overlapped import OverlappedStrategy
from sparseallreduce.linear.strategies.parameter_server import (
    AsynchronousParameterServer,
    ParameterServer,
    SynchronousParameterServer,
    read_on_workers,
)
from sparseallreduce.linear.strategies.sparse import SparseStrategy

__all__ = [
    "STRATEGIES",
    "AsynchronousParameterServer",
    "DenseStrategy",
    "OverlappedStrategy",
    "ParameterServer",
    "SparseStrategy",
    "Strategy",
    "SynchronousParameterServer",
    "read_on_workers",
]

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (DenseStrategy, SparseStrategy, OverlappedStrategy, SynchronousParameterServer, AsynchronousParameterServer)
}
