"""The dense baseline: MPI's own allreduce, and Rabenseifner's algorithm where there is none (thesis section 3.3.1, figure 3.8)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from sparseallreduce.algorithms.exchange import fold, gather_parts, halve, halvings, lower_power_of_two, unfold
from sparseallreduce.algorithms.steps import DenseAllreduce, Schedule, Step
from sparseallreduce.streams.partition import concatenate
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["dense", "join_blocks", "rabenseifner"]


def dense(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
    """Make the stream dense, and leave it to the network's dense allreduce.

    Latency 2 log2(P) alpha, bandwidth 2 (P - 1)/P N beta with Rabenseifner's algorithm (thesis table 3.1).
    """
    result: SparseStream = yield DenseAllreduce(reduction.densify(stream), reduction.op)
    return result


def rabenseifner(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
    """Rabenseifner's allreduce of a dense stream: a reduce-scatter by recursive halving, an allgather by recursive doubling.

    Ranks in excess of a power of two hand over their stream first and receive the result last.
    """
    core = lower_power_of_two(ranks)
    mine = yield from fold(stream, rank, ranks, core, reduction)
    if mine is not None:
        mine = yield from halve(mine, rank, [rank ^ distance for distance in halvings(core)], reduction)
        mine = yield from join_blocks(mine, rank, core, reduction)
    return (yield from unfold(mine, rank, ranks, core))


def join_blocks(block: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Generator[Step, Any, SparseStream]:
    """The allgather of dense blocks that cover the whole range between them, in any order of the ranks."""
    blocks = yield from gather_parts(block, rank, ranks)
    filled = sorted((other for other in blocks if other.extent), key=lambda other: other.lo)
    return reduction.densify(concatenate(filled, reduction)) if filled else block
