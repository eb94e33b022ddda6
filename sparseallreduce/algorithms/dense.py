"""The dense baseline: MPI's own allreduce, or Rabenseifner's algorithm if MPI has none (thesis section 3.3.1, figure 3.8)."""

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
    """Convert the stream to dense and reduce it by the network's dense allreduce.

    Latency 2 log2(P) alpha, bandwidth 2 (P - 1)/P N beta with Rabenseifner's algorithm (thesis table 3.1).
    """
    result: SparseStream = yield DenseAllreduce(reduction.densify(stream), reduction.op)
    return result


def rabenseifner(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
    """Reduce a dense stream by Rabenseifner's algorithm: a reduce-scatter by recursive halving, an allgather by recursive doubling.

    Ranks in excess of a power of two send their stream first and receive the result last.
    """
    core = lower_power_of_two(ranks)
    mine = yield from fold(stream, rank, ranks, core, reduction)
    if mine is not None:
        mine = yield from halve(mine, rank, [rank ^ distance for distance in halvings(core)], reduction)
        mine = yield from join_blocks(mine, rank, core, reduction)
    return (yield from unfold(mine, rank, ranks, core))


def join_blocks(
    block: SparseStream, rank: int, ranks: int, reduction: Reduction, in_step: bool = False
) -> Generator[Step, Any, SparseStream]:
    """Gather dense blocks that together cover the whole range, in any order of the ranks; in step as :func:`gather_parts` does."""
    blocks = yield from gather_parts(block, rank, ranks, in_step=in_step)
    filled = sorted((other for other in blocks if other.extent), key=lambda other: other.lo)
    return reduction.densify(concatenate(filled, reduction)) if filled else block
