"""One simulated rank: its schedule, its inbox, and the step that it waits in."""

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
        The schedule, with the schedules of collectives in progress on top.
    native : bool
        Whether the topmost of these is a collective that MPI would execute itself.
    value : object
        The value with which the schedule is resumed.
    clock : float
        The time up to which the rank has run, in seconds.
    joining : Reduction
        The reduction that joins gathered dense blocks.
    charged : tuple of int
        Work of this and the rank's own reduction that is included in the clock: entries read, and values of dense arrays written.
    output : object
        The return value of the schedule, once ``done`` is True.
    """

    def __init__(self, schedule: Generator[Step, Any, Any]) -> None:
        self.stack: list[Any] = [schedule]
        self.value: Any = None
        self.native = False
        self.clock: float = 0.0
        self.joining: Reduction = Reduction()
        self.charged: tuple[int, int] = 0, 0
        self.output: Any = None
        self.done = False
        self._waits_for: Waiting | None = None
        self._inbox: dict[int, deque[Content]] = {}  # by source

    def join_by(self, joining: Reduction) -> None:
        """Join dense blocks by another reduction, which continues the counts of the last one."""
        joining.work, joining.dense_work = self.joining.work, self.joining.dense_work
        self.joining = joining

    def wait(self, step: Waiting) -> bool:
        """Wait for the message that ends a step; return True if it has already arrived."""
        self._waits_for = step
        return self._taken(step)

    def receive(self, source: int, content: Content) -> bool:
        """Put a message into the inbox; return True if the rank can then continue."""
        self._inbox.setdefault(source, deque()).append(content)
        return self._waits_for is not None and self._taken(self._waits_for)

    def unread(self) -> dict[int, int]:
        """Return the number of unreceived messages from each source."""
        return {source: len(messages) for source, messages in self._inbox.items()}

    def described_wait(self) -> str:
        """Return a description of the step in which the rank waits, for error messages."""
        step = self._waits_for
        if isinstance(step, RecvAny):
            return f"RecvAny(sources={sorted(step.sources)})"
        if isinstance(step, Exchange):
            return f"Exchange(partner={step.partner})"
        return "no step" if step is None else f"{type(step).__name__}(source={step.source})"

    def _taken(self, step: Waiting) -> bool:
        """Take the awaited message out of the inbox and return True, or return False if it has not arrived."""
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
        """Return the rank whose message would end the step; with several candidates, the one whose first message arrived first."""
        if isinstance(step, RecvAny):
            return next((source for source in self._inbox if source in step.sources), None)
        return step.partner if isinstance(step, Exchange) else step.source
