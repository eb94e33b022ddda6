"""In which order messages arrive and ranks go on: that of the virtual clock, or any that a chooser picks."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import count
from typing import Protocol, TypeAlias

from sparseallreduce.runtime.simulator.message import Message
from sparseallreduce.runtime.simulator.network import Network, Ports

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
    HEAD = "the first byte of a message is at its receiver, whose port may be busy"
    TAIL = "the last byte of a message has been received and read"


class ByTime:
    """Messages arrive when the network brings them; of two events at one time, that which was made first comes first."""

    def __init__(self, network: Network, ranks: int) -> None:
        self._ports = Ports(network, ranks)
        self._numbers = count()
        self._events: list[tuple[float, int, _Event, int | Message]] = []
        # Of each rank, heads of messages in the order in which they leave. Only the first of them is among the events, which are few then
        # however many messages there are.
        self._leaving: list[deque[tuple[float, int, _Event, Message]]] = [deque() for _ in range(ranks)]

    def send(self, message: Message, ready: float) -> None:
        """Take a message, which leaves when the sender's port is free."""
        head = self._ports.depart(message.source, message.dest, message.nbytes, ready)
        leaving = self._leaving[message.source]
        leaving.append((head, next(self._numbers), _Event.HEAD, message))
        if len(leaving) == 1:
            heapq.heappush(self._events, leaving[0])

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Go from event to event."""
        for rank in range(ranks):
            self._at(0.0, _Event.RESUME, rank)
        while self._events:
            now, _, event, what = heapq.heappop(self._events)
            if not isinstance(what, Message):
                resume(what, now)
            elif event is _Event.HEAD:
                self._next_leaves(what.source)
                self._at(self._ports.arrive(what.source, what.dest, what.nbytes, now) + what.coding, _Event.TAIL, what)
            elif deliver(what):
                self._at(now, _Event.RESUME, what.dest)

    def _next_leaves(self, source: int) -> None:
        leaving = self._leaving[source]
        leaving.popleft()
        if leaving:
            heapq.heappush(self._events, leaving[0])

    def _at(self, time: float, event: _Event, what: int | Message) -> None:
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
