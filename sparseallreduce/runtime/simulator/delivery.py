"""In which order messages arrive and ranks go on: that of the virtual clock, or any that a chooser picks."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import count, pairwise
from typing import NamedTuple, Protocol, TypeAlias

from sparseallreduce.runtime.simulator.message import Message
from sparseallreduce.runtime.simulator.network import Network, Ports
from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.wire import piece_bytes

__all__ = ["AnyOrder", "ByTime", "Chooser", "Delivery", "delivery_of"]

Chooser: TypeAlias = Callable[[int], int]  # picks one of n possibilities
Resume: TypeAlias = Callable[[int, float], None]  # lets a rank go on, at a time


class Delivery(Protocol):
    """Takes messages from ranks that run, and brings them to ranks that wait."""

    def send(self, message: Message, ready: float) -> None:
        """Take a message that its sender has ready at a time."""

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Let all ranks run until no message is on its way.

        ``resume(rank, time)`` runs a rank until it waits, and ``deliver(message)`` says whether its receiver can then go on.
        """


def delivery_of(order: int | Chooser | None, network: Network, ranks: int) -> Delivery:
    """By time if ``order`` is None, or else in the order that a seed or a chooser gives."""
    if order is None:
        return ByTime(network, ranks)
    return AnyOrder(random.Random(order).randrange if isinstance(order, int) else order)


class _Event(Enum):
    RESUME = "a rank goes on"
    LEAVES = "a piece leaves, of the first the latency has passed; the link of its host may be busy"
    HEAD = "the first byte of a piece is at its receiver, whose port may be busy"
    TAIL = "the last byte of a message has been received and read"


class _Piece(NamedTuple):
    """A part of a message that takes a port, or a link, at a time."""

    message: Message
    nbytes: int
    is_first: bool
    is_last: bool


class ByTime:
    """Messages arrive when the network brings them; of two events at one time, that which was made first comes first.

    Long messages travel in pieces, as those of the runtime between hosts do. So a message that is early does not keep a receiver from the
    one that it waits for: the two share the port, piece by piece.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self._ports = Ports(network, ranks)
        self._numbers = count()
        self._events: list[tuple[float, int, _Event, int | _Piece]] = []
        # Of each rank, pieces in the order in which they leave. Only the first of them is among the events, which are few then however
        # many messages there are.
        self._leaving: list[deque[tuple[int, float, _Piece]]] = [deque() for _ in range(ranks)]

    def send(self, message: Message, ready: float) -> None:
        """Take a message, which leaves when the sender's port is free."""
        leaving = self._leaving[message.source]
        is_free = not leaving
        count = max(1, -(-message.nbytes // piece_bytes(message.nbytes)))
        ends = boundaries(message.nbytes, count)
        for number, (low, high) in enumerate(pairwise(ends)):
            leaving.append((next(self._numbers), ready, _Piece(message, high - low, number == 0, number == count - 1)))
        if is_free:
            self._first_leaves(message.source)

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Go from event to event."""
        for rank in range(ranks):
            self._at(0.0, _Event.RESUME, rank)
        while self._events:
            now, _, event, what = heapq.heappop(self._events)
            if not isinstance(what, _Piece):
                resume(what, now)
                continue
            message = what.message
            if event is _Event.LEAVES:
                head = self._ports.depart(message.source, message.dest, what.nbytes, now)
                self._leaving[message.source].popleft()
                self._first_leaves(message.source)
                if head > now:
                    self._at(head, _Event.HEAD, what)
                else:
                    self._arrives(what, now)
            elif event is _Event.HEAD:
                self._arrives(what, now)
            elif deliver(message):
                self._at(now, _Event.RESUME, message.dest)

    def _first_leaves(self, source: int) -> None:
        """Make an event of the first piece that a rank has not sent yet, if any."""
        if self._leaving[source]:
            number, ready, piece = self._leaving[source][0]
            time = self._ports.leaves(source, piece.message.dest, ready, piece.is_first)
            heapq.heappush(self._events, (time, number, _Event.LEAVES, piece))

    def _arrives(self, piece: _Piece, head: float) -> None:
        message = piece.message
        tail = self._ports.arrive(message.source, message.dest, piece.nbytes, head)
        if piece.is_last:
            self._at(tail + message.coding, _Event.TAIL, piece)

    def _at(self, time: float, event: _Event, what: int | _Piece) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event, what))


class AnyOrder:
    """Ranks run and messages arrive as a chooser picks, and no time passes; messages from one rank to another stay in their order."""

    def __init__(self, pick: Chooser) -> None:
        self._pick = pick
        self._in_flight: dict[tuple[int, int], deque[Message]] = {}  # by source and dest

    def send(self, message: Message, ready: float) -> None:
        """Take a message."""
        self._in_flight.setdefault((message.source, message.dest), deque()).append(message)

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Pick a rank that can run or a pair of ranks with a message between them, until there are none."""
        runnable = list(range(ranks))
        while runnable or self._in_flight:
            pairs = list(self._in_flight)
            choice = self._pick(len(runnable) + len(pairs))
            if choice < len(runnable):
                resume(runnable.pop(choice), 0.0)
                continue
            message = self._next(pairs[choice - len(runnable)])
            if deliver(message):
                runnable.append(message.dest)

    def _next(self, pair: tuple[int, int]) -> Message:
        messages = self._in_flight[pair]
        message = messages.popleft()
        if not messages:
            del self._in_flight[pair]
        return message
