"""A pool of threads that share the work of one rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["Threads"]

T = TypeVar("T")


class Threads:
    """A pool of ``count`` threads, including the calling one.

    Work is divided in advance into parts, each done by one thread in a fixed order, so that results do not depend on timing.

    Examples
    --------
    >>> Threads(3).each(lambda part: 10 * part)
    [0, 10, 20]
    >>> Threads(3).cuts(10)
    [0, 3, 6, 10]
    """

    def __init__(self, count: int = 1) -> None:
        if count < 1:
            raise ValueError(f"there must be at least 1 thread, not {count}")
        self.count = count
        self._others = ThreadPoolExecutor(count - 1) if count > 1 else None

    def each(self, task: Callable[[int], T]) -> list[T]:
        """Call ``task(part)`` for parts 0 to count - 1, one in each thread, and return the results."""
        if self._others is None:
            return [task(0)]
        others = [self._others.submit(task, part) for part in range(1, self.count)]
        return [task(0), *(other.result() for other in others)]

    def cuts(self, length: int) -> list[int]:
        """Return count + 1 bounds that divide ``length`` items into parts of about equal size."""
        return [0, length] if self.count == 1 else [length * part // self.count for part in range(self.count + 1)]

    def share(self, bounds: list[int], task: Callable[[int, int], object]) -> None:
        """Call ``task(low, high)`` for each range between two neighbouring bounds, one in each thread."""
        if self._others is None:
            task(*bounds)
        else:
            self.each(lambda part: task(bounds[part], bounds[part + 1]))
