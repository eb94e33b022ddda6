"""Send the stream of one rank, the root, to all ranks."""

from __future__ import annotations

from sparseallreduce.algorithms.collectives.trees import tree_of
from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import Quantise, Recv, Schedule, Send
from sparseallreduce.streams.partition import boundaries, concatenate, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["bcast_scatter", "bcast_tree"]


def bcast_tree(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, root: int) -> Schedule:
    """Send the stream down a binomial tree, beginning with the largest subtree.

    Latency log2(P) alpha, which is optimal; bandwidth log2(P) k beta. Only the root's ``stream`` is used.
    """
    parent, children = tree_of(rank, ranks, root)
    stream = (yield Quantise(stream, rank, rank)) if parent is None else (yield Recv(parent))
    for child in reversed(children):
        yield Send(child, stream)
    return stream


def bcast_scatter(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, root: int) -> Schedule:
    """Scatter the stream in parts with equal numbers of entries, and gather them (van de Geijn's broadcast of long vectors).

    Latency (P - 1 + log2(P)) alpha, bandwidth 2 (P - 1)/P k beta. Only the root's ``stream`` is used.
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
    """Return bounds that divide a stream into parts with equal numbers of entries."""
    if stream.is_dense or not stream.stored:
        return boundaries(stream.size, parts)
    indices = stream._entries()[0]
    return [0, *(int(indices[place]) for place in boundaries(stream.stored, parts)[1:-1]), stream.size]
