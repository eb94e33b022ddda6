"""One simulated rank: its schedule, what it has been sent, and what it waits for."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, TypeAlias

from sparseallreduce.algorithms.steps import Exchange, Recv, RecvAny, Shift, Step
from sparseallreduce.runtime.simulator.message import Content
from sparseallreduce.streams.reduction import Reduction

__all__ = ["Rank", "Waiting"]

Waiting: TypeAlias = Recv | RecvAny | Exchange | Shift  # steps that end when a message is there
_SENDING = (Exchange, Shift)  # those in which a tuple of streams may stand for one


class Rank:
    """One simulated rank.

    Parameters
    ----------
    schedule : generator

    Attributes
    ----------
    stack : list of generator
        The schedule, with those of the collectives that it is in on top.
    native : bool
        Whether the last of these is one that MPI would do itself.
    value : object
        What the schedule is resumed with.
    clock : float
        Seconds; the time up to which it has run.
    joining : Reduction
        What joins dense blocks that are gathered.
    charged : tuple of int
        What this and its own reduction had done up to then: entries read, and values of dense arrays written.
    output : object
        What the schedule returned, once it is ``done``.
    """

    def __init__(self, schedule: Generator[Step, Any, Any]) -> None:
        self.stack: list[Any] = [schedule]
        self.value: Any = None
        self.native = False
        self.clock = 0.0
        self.joining = Reduction()
        self.charged = 0, 0
        self.output: Any = None
        self.done = False
        self._waits_for: Waiting | None = None
        self._inbox: dict[int, deque[Content]] = {}  # by source

    def join_by(self, joining: Reduction) -> None:
        """Join dense blocks by another reduction, which goes on counting where the last one ended."""
        joining.work, joining.dense_work = self.joining.work, self.joining.dense_work
        self.joining = joining

    def wait(self, step: Waiting) -> bool:
        """Wait for the message that ends a step; whether it is there already."""
        self._waits_for = step
        return self._taken(step)

    def receive(self, source: int, content: Content) -> bool:
        """Put a message into the inbox; whether that lets the rank go on."""
        self._inbox.setdefault(source, deque()).append(content)
        return self._waits_for is not None and self._taken(self._waits_for)

    def unread(self) -> dict[int, int]:
        """How many messages of each source it has not received."""
        return {source: len(messages) for source, messages in self._inbox.items()}

    def described_wait(self) -> str:
        """The step in which it waits, as errors show it."""
        step = self._waits_for
        if isinstance(step, RecvAny):
            return f"RecvAny(sources={sorted(step.sources)})"
        if isinstance(step, Exchange):
            return f"Exchange(partner={step.partner})"
        return "no step" if step is None else f"{type(step).__name__}(source={step.source})"

    def _taken(self, step: Waiting) -> bool:
        """Take what the rank waits for out of its inbox, if it is there."""
        source = self._source_of(step)
        if source is None or source not in self._inbox:
            return False
        content = self._inbox[source].popleft()
        if not self._inbox[source]:
            del self._inbox[source]
        message: Any = content
        several = step.several if isinstance(step, RecvAny) else isinstance(step, _SENDING) and isinstance(step.stream, tuple)
        if isinstance(content, tuple) and not several:
            message = content[0]
        if isinstance(step, _SENDING) and step.merging is not None:
            message = step.merging.finish(message)
        self.value = (source, message) if isinstance(step, RecvAny) else message
        self._waits_for = None
        return True

    def _source_of(self, step: Waiting) -> int | None:
        """The rank whose message would end the step; of several, that whose first message came first."""
        if isinstance(step, RecvAny):
            return next((source for source in self._inbox if source in step.sources), None)
        return step.partner if isinstance(step, Exchange) else step.source
