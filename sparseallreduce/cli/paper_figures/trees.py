"""The sum by two binary trees over hosts, as in NCCL, and an allgather in a ring: what CommLib compares HiTopKComm with."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Recv, RecvAny, Send, Step
from sparseallreduce.streams.stream import SparseStream

__all__ = ["ring_allgather", "tree_allreduce"]

Array = NDArray[Any]
Schedule = Generator[Step, Any, Any]

_PIECES = 32  # of half a vector


def ring_allgather(stream: SparseStream, rank: int, ranks: int) -> Schedule:
    """Return the streams of all ranks; each is passed on from neighbour to neighbour."""
    streams, passed = [stream], stream
    for _ in range(ranks - 1):
        yield Send((rank + 1) % ranks, passed)
        passed = yield Recv((rank - 1) % ranks)
        streams.append(passed)
    return streams


def tree_allreduce(array: Array, rank: int, ranks: int, lanes: int) -> Schedule:
    """Return the sum of all ranks' arrays, made by two trees.

    Each tree has half of the values. Inside a host of ``lanes`` ranks it is a chain, and between hosts a binary tree; leaves of one are
    inner nodes of the other. Values travel in pieces, which follow one another.
    """
    return _Tree(array, rank, ranks, lanes).run()


class _Tree:
    """Adds the pieces of a vector along two trees, on one rank. A message holds the number of a piece, in four bytes, and its values."""

    def __init__(self, array: Array, rank: int, ranks: int, lanes: int) -> None:
        self.total = array.copy()
        places = [_place(rank, ranks, lanes, mirrored) for mirrored in (False, True)]
        pieces = np.array_split(self.total, 2 * _PIECES)  # of the two trees in turn
        self._pieces = [(piece, *places[number % 2]) for number, piece in enumerate(pieces)]
        self._missing = [len(children) for _, _, children in self._pieces]
        self._sources = {other for parent, children in places for other in (parent, *children) if other is not None}

    def run(self) -> Schedule:
        expected = sum(len(children) + (parent is not None) for _, parent, children in self._pieces)
        for number, missing in enumerate(self._missing):
            if not missing:
                yield from self._send_up(number)
        for _ in range(expected):
            source, message = yield RecvAny(self._sources)
            number = int.from_bytes(message[:4], "little")
            piece, parent, _ = self._pieces[number]
            values = np.frombuffer(message, piece.dtype, offset=4)
            if source == parent:
                piece[:] = values
                yield from self._send_down(number)
                continue
            piece += values
            self._missing[number] -= 1
            if not self._missing[number]:
                yield from self._send_up(number)
        return self.total

    def _send_up(self, number: int) -> Schedule:
        _, parent, _ = self._pieces[number]
        if parent is None:
            yield from self._send_down(number)
        else:
            yield Send(parent, self._message(number))

    def _send_down(self, number: int) -> Schedule:
        for child in self._pieces[number][2]:
            yield Send(child, self._message(number))

    def _message(self, number: int) -> Any:
        """Return the number of a piece and its values as bytes, which the simulator passes on as they are."""
        return number.to_bytes(4, "little") + self._pieces[number][0].tobytes()


def _place(rank: int, ranks: int, lanes: int, mirrored: bool) -> tuple[int | None, list[int]]:
    """Return the parent and the children of a rank. The mirrored tree counts hosts, and the first ranks of their chains, differently."""
    hosts = ranks // lanes
    host, lane = divmod(rank, lanes)
    first = int(mirrored) % lanes

    def head(number: int) -> int:
        return (hosts - 1 - number if mirrored else number) * lanes + first

    chain = [first, *(each for each in range(lanes) if each != first)]
    at = chain.index(lane)
    below = [host * lanes + chain[at + 1]] if at + 1 < lanes else []
    if at > 0:
        return host * lanes + chain[at - 1], below
    parent, children = _in_order(hosts - 1 - host if mirrored else host, hosts)
    return (None if parent is None else head(parent)), [head(child) for child in children] + below


def _in_order(node: int, nodes: int) -> tuple[int | None, list[int]]:
    """Return the parent and the children of a node of a binary tree whose leaves are the odd nodes (Sanders, Speck, Träff 2009).

    >>> _in_order(0, 8), _in_order(4, 8), _in_order(6, 8)
    ((None, [4]), (0, [2, 6]), (4, [5, 7]))
    """
    low = node & -node if node else 1 << (nodes - 1).bit_length()
    parent = None
    if node:
        parent = (node ^ low) | (low << 1)
        if parent >= nodes:
            parent = node ^ low
    children = []
    if node and low > 1:
        children.append(node - low // 2)
    step = low // 2
    while step and node + step >= nodes:
        step //= 2
    if step:
        children.append(node + step)
    return parent, children
