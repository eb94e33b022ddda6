"""Cheap agreement of workers that take steps together on a request that one of them makes after a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from sparseallreduce.runtime.objects import gather

__all__ = ["Consensus"]

T = TypeVar("T")


class Consensus:
    """Collects the requests of all workers about every quarter of a second.

    The workers have no common clock but the steps that they take together. So at each exchange they also exchange the time of their
    steps, and schedule the next exchange after the number of steps that the slowest takes in the interval: the same on all workers.

    Parameters
    ----------
    comm : communicator
        Communicator of the workers.
    interval : float, optional
        Seconds between exchanges.
    before : callable, optional
        Function called before an exchange, which raises an error if a worker has failed and does not take part.
    """

    def __init__(self, comm: Any, interval: float = 0.25, before: Callable[[], object] | None = None) -> None:
        self._comm = comm
        self._before = before
        self._interval = interval
        self._waiting = 1  # steps from the last exchange to the next
        self._taken = 0  # steps since the last exchange
        self._last = time.monotonic()

    def after_step(self, wish: T | None) -> list[T]:
        """Return the requests of the workers, the same on all of them; empty between exchanges. Collective, after every step."""
        self._taken += 1
        if self._taken < self._waiting:
            return []
        if self._before is not None:
            self._before()
        now = time.monotonic()
        workers = gather(self._comm, (wish, (now - self._last) / self._taken))
        slowest = max(seconds for _, seconds in workers)
        # At most four times the last number of steps, because the first steps may be the fast ones.
        self._waiting = max(1, min(4 * self._taken, int(self._interval / max(slowest, 1e-9))))
        self._taken, self._last = 0, time.monotonic()
        return [wish for wish, _ in workers if wish is not None]
