"""Aggregation strategies by name, one file each (thesis section 4.2.2)."""

from sparseallreduce.linear.strategies.base import Strategy
from sparseallreduce.linear.strategies.dense import DenseStrategy
from sparseallreduce.linear.strategies.sparse import SparseStrategy

__all__ = ["STRATEGIES", "DenseStrategy", "SparseStrategy", "Strategy"]

STRATEGIES: dict[str, type[Strategy]] = {strategy.name: strategy for strategy in (DenseStrategy, SparseStrategy)}
