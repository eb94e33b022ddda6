"""Threads that share the work of one rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Team"]

T = TypeVar("T")


class Team:
    """As many threads as were asked for, the calling one among them.

    What they do is cut in parts beforehand, each of which is done by one thread in a fixed order: so results do not depend on timing.

    Examples
    --------
    >>> Team(3).each(lambda part: 10 * part)
    [0, 10, 20]
    >>> Team(3).cuts(10)
    [0, 3, 6, 10]
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"there must be at least 1 thread, not {threads}")
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def each(self, task: Callable[[int], T]) -> list[T]:
        """What ``task(part)`` returns for part 0 to threads - 1, each called by one thread."""
        if self._others is None:
            return [task(0)]
        others = [self._others.submit(task, part) for part in range(1, self.threads)]
        return [task(0), *(other.result() for other in others)]

    def cuts(self, length: int) -> list[int]:
        """Where to cut so many things into parts of about the same number: threads + 1 bounds."""
        return [length * part // self.threads for part in range(self.threads + 1)]

    def share(self, bounds: list[int], task: Callable[[int, int], object]) -> None:
        """Call ``task(low, high)`` for each range between two neighbouring bounds, one a thread."""
        self.each(lambda part: task(bounds[part], bounds[part + 1]))
