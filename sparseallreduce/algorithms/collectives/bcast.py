"""The stream of one rank, the root, on all of them."""

from __future__ import annotations

from sparseallreduce.algorithms.collectives.trees import tree_of
from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import Quantise, Recv, Schedule, Send
from sparseallreduce.streams.partition import boundaries, concatenate, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["bcast_scatter", "bcast_tree"]


def bcast_tree(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, root: int) -> Schedule:
    """Send the stream down a binomial tree, first to the rank that has most of the others below it.

    Latency log2(P) alpha, the optimum; bandwidth log2(P) k beta. ``stream`` counts on the root alone.
    """
    parent, children = tree_of(rank, ranks, root)
    stream = (yield Quantise(stream, rank, rank)) if parent is None else (yield Recv(parent))
    for child in reversed(children):
        yield Send(child, stream)
    return stream


def bcast_scatter(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, root: int) -> Schedule:
    """Scatter the stream in parts of as many entries each, and gather them (van de Geijn's broadcast of long vectors).

    Latency (P - 1 + log2(P)) alpha, bandwidth 2 (P - 1)/P k beta. ``stream`` counts on the root alone.
    """
    if rank == root:
        parts = split(stream, _even_bounds(stream, ranks))
        for distance in range(1, ranks):
            other = (root + distance) % ranks
            yield Send(other, (yield Quantise(parts[other], root, other)))
        part = yield Quantise(parts[root], root, root)
    else:
        part = yield Recv(root)
    return concatenate((yield from gather_parts(part, rank, ranks)), reduction)


def _even_bounds(stream: SparseStream, parts: int) -> list[int]:
    """The bounds that cut a stream into parts of as many entries each."""
    if stream.is_dense or not stream.stored:
        return boundaries(stream.size, parts)
    indices = stream._entries()[0]
    return [0, *(int(indices[place]) for place in boundaries(stream.stored, parts)[1:-1]), stream.size]
