"""How workers in step agree, now and then and cheaply, on something that one of them wants after a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from sparseallreduce.runtime.objects import gather

__all__ = ["Consensus"]

T = TypeVar("T")


class Consensus:
    """Asks all workers for their wishes about every quarter of a second.

    The workers have no common clock but the steps that they take together. So at each meeting they tell each other how long their
    steps take, too, and put the next meeting off by as many steps as the slowest takes in that time: all by the same number.

    Parameters
    ----------
    comm : communicator
        Of the workers.
    interval : float, optional
        Seconds between meetings.
    before : callable, optional
        Called before a meeting: raises if a worker has failed, which then does not come.
    """

    def __init__(self, comm: Any, interval: float = 0.25, before: Callable[[], object] | None = None) -> None:
        self._comm = comm
        self._before = before
        self._interval = interval
        self._waiting = 1  # steps until the next meeting
        self._taken = 0  # steps since the last
        self._last = time.monotonic()

    def after_step(self, wish: T | None) -> list[T]:
        """What the workers wish for, the same on all of them; nothing between meetings. Collective, after every step."""
        self._taken += 1
        if self._taken < self._waiting:
            return []
        if self._before is not None:
            self._before()
        now = time.monotonic()
        told = gather(self._comm, (wish, (now - self._last) / self._taken))
        slowest = max(seconds for _, seconds in told)
        # At most four times as many as before, because the first steps may be the fast ones.
        self._waiting = max(1, min(4 * self._taken, int(self._interval / max(slowest, 1e-9))))
        self._taken, self._last = 0, time.monotonic()
        return [wish for wish, _ in told if wish is not None]
