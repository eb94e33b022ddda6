"""Reduce the streams of all ranks on one rank, the root."""

from __future__ import annotations

from sparseallreduce.algorithms.collectives.trees import tree_of
from sparseallreduce.algorithms.exchange import exchange_parts
from sparseallreduce.algorithms.steps import Quantise, Recv, RecvAny, Schedule, Send
from sparseallreduce.streams.partition import concatenate, parts_of
from sparseallreduce.streams.reduction import Reduction, Tree
from sparseallreduce.streams.stream import SparseStream

__all__ = ["reduce_split", "reduce_tree"]


def reduce_tree(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, root: int) -> Schedule:
    """Reduce along a binomial tree: a rank adds the sums of its children to its stream, and sends the result to its parent.

    Latency log2(P) alpha, which is optimal; bandwidth into the root from log2(P) k beta (the same k indices on all ranks) to (P - 1) k beta
    (disjoint indices). Every rank except the root sends once. Returns None on all ranks except the root.
    """
    parent, children = tree_of(rank, ranks, root)
    for child in children:
        stream = reduction.pair(stream, (yield Recv(child)))
    if parent is None:
        return stream
    yield Send(parent, (yield Quantise(stream, rank, parent)))
    return None  # type: ignore[return-value]


def reduce_split(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, root: int) -> Schedule:
    """Reduce one P-th of the index space on every rank, and send the sums to the root.

    The algorithm has two steps:

    1. Split, as in SSAR_Split_AlGa (thesis figure 3.11): every part goes straight to the rank that reduces it.
    2. The ranks send their parts to the root, which concatenates them.

    Latency 2 (P - 1) alpha; bandwidth into the root from 2 (P - 1)/P k beta (the same k indices on all ranks) to (P - 1) (k/P + k) beta
    (disjoint ones). Returns None on all ranks but the root.
    """
    sums = Tree(reduction, ranks)
    yield from exchange_parts(stream, parts_of(stream, ranks), rank, 0, sums.add)
    part = sums.result()
    if rank != root:
        yield Send(root, (yield Quantise(part, rank, ranks)))
        return None  # type: ignore[return-value]
    parts, missing = {root: part}, set(range(ranks)) - {root}
    while missing:
        source, part = yield RecvAny(missing)
        missing.remove(source)
        parts[source] = part
    return concatenate([parts[number] for number in range(ranks)], reduction)
