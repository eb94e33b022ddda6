"""The order in which messages arrive and ranks run: that of the virtual clock, or one that a chooser picks."""

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

__all__ = ["AnyOrder", "ByTime", "Chooser", "Delivery", "Order", "delivery_of"]

Chooser: TypeAlias = Callable[[int], int]  # picks one of n possibilities
Resume: TypeAlias = Callable[[int, float], None]  # lets a rank go on, at a time


class Delivery(Protocol):
    """Delivers messages from running ranks to waiting ranks."""

    def send(self, message: Message, ready: float) -> None:
        """Accept a message that its sender has ready at time ``ready``."""

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Run all ranks until no message is in flight.

        ``resume(rank, time)`` runs a rank until it waits; ``deliver(message)`` returns True if its receiver can then continue.
        """


def delivery_of(order: Order | None, network: Network, ranks: int) -> Delivery:
    """Return delivery by time if ``order`` is None, otherwise in the order of a seed or a chooser, or the delivery that is given."""
    if isinstance(order, ByTime | AnyOrder):
        return order
    if order is None:
        return ByTime(network, ranks)
    return AnyOrder(random.Random(order).randrange if isinstance(order, int) else order)


class _Event(Enum):
    RESUME = "a rank goes on"
    LEAVES = "a piece leaves, of the first the latency has passed; the link of its host may be busy"
    HEAD = "the first byte of a piece is at its receiver, whose port may be busy"
    TAIL = "the last byte of a message has been received and read"


class _Piece(NamedTuple):
    """A piece of a message, which occupies a port or a link at a time."""

    message: Message
    nbytes: int
    is_first: bool
    is_last: bool


class ByTime:
    """Delivery at the times of the network model; simultaneous events are processed in the order of their creation.

    Long messages travel in pieces, like those of the runtime between hosts. An early message therefore does not block its receiver for the
    awaited one: the two share the port, piece by piece.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self._ports = Ports(network, ranks)
        self._numbers = count()
        self._events: list[tuple[float, int, _Event, int | _Piece]] = []
        # For each rank, its pieces in the order in which they leave. Only the first has an event, which keeps the number of events small.
        self._leaving: list[deque[tuple[int, float, _Piece]]] = [deque() for _ in range(ranks)]

    def send(self, message: Message, ready: float) -> None:
        """Queue a message, which leaves when the sender's port is free."""
        leaving = self._leaving[message.source]
        is_free = not leaving
        count = max(1, -(-message.nbytes // piece_bytes(message.nbytes)))
        ends = boundaries(message.nbytes, count)
        for number, (low, high) in enumerate(pairwise(ends)):
            leaving.append((next(self._numbers), ready, _Piece(message, high - low, number == 0, number == count - 1)))
        if is_free:
            self._first_leaves(message.source)

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Process all events in order of time."""
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
        """Create the departure event of a rank's next piece, if there is one."""
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
    """Delivery in the order that a chooser picks, without time. Messages from one rank to another keep their order."""

    def __init__(self, pick: Chooser) -> None:
        self._pick = pick
        self._in_flight: dict[tuple[int, int], deque[Message]] = {}  # by source and dest

    def send(self, message: Message, ready: float) -> None:
        """Queue a message."""
        self._in_flight.setdefault((message.source, message.dest), deque()).append(message)

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Pick a rank that can run, or a pair of ranks with a message in flight, until there are none."""
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


Order: TypeAlias = int | Chooser | ByTime | AnyOrder
