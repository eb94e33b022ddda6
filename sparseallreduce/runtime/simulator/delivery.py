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
    LEAVES = "the latency of a message has passed; the link of its host may be busy"
    HEAD = "the first byte of a message is at its receiver, whose port may be busy"
    TAIL = "the last byte of a message has been received and read"


class ByTime:
    """Messages arrive when the network brings them; of two events at one time, that which was made first comes first."""

    def __init__(self, network: Network, ranks: int) -> None:
        self._ports = Ports(network, ranks)
        self._numbers = count()
        self._events: list[tuple[float, int, _Event, int | Message]] = []
        # Of each rank, messages in the order in which they leave. Only the first of them is among the events, which are few then however
        # many messages there are.
        self._leaving: list[deque[tuple[int, float, Message]]] = [deque() for _ in range(ranks)]

    def send(self, message: Message, ready: float) -> None:
        """Take a message, which leaves when the sender's port is free."""
        leaving = self._leaving[message.source]
        leaving.append((next(self._numbers), ready, message))
        if len(leaving) == 1:
            self._first_leaves(message.source)

    def run(self, ranks: int, resume: Resume, deliver: Callable[[Message], bool]) -> None:
        """Go from event to event."""
        for rank in range(ranks):
            self._at(0.0, _Event.RESUME, rank)
        while self._events:
            now, _, event, what = heapq.heappop(self._events)
            if not isinstance(what, Message):
                resume(what, now)
            elif event is _Event.LEAVES:
                head = self._ports.depart(what.source, what.dest, what.nbytes, now)
                self._leaving[what.source].popleft()
                self._first_leaves(what.source)
                if head > now:
                    self._at(head, _Event.HEAD, what)
                else:
                    self._arrives(what, now)
            elif event is _Event.HEAD:
                self._arrives(what, now)
            elif deliver(what):
                self._at(now, _Event.RESUME, what.dest)

    def _first_leaves(self, source: int) -> None:
        """Make an event of the first message that a rank has not sent yet, if any."""
        if self._leaving[source]:
            number, ready, message = self._leaving[source][0]
            time = self._ports.leaves(source, message.dest, ready)
            heapq.heappush(self._events, (time, number, _Event.LEAVES, message))

    def _arrives(self, message: Message, head: float) -> None:
        tail = self._ports.arrive(message.source, message.dest, message.nbytes, head)
        self._at(tail + message.coding, _Event.TAIL, message)

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
