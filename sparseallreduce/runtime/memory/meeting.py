"""A repeated barrier of the ranks of a host in shared memory, at which each rank also reports success or failure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent, named_ranks
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime.hosts import count_cores, same_host, same_memory, this_place
from sparseallreduce.runtime.launching import agree
from sparseallreduce.runtime.memory.mapping import shared_memory
from sparseallreduce.runtime.memory.words import LINE, spinning, word_kernels
from sparseallreduce.runtime.objects import gather, leaves_on_failure
from sparseallreduce.runtime.stalls import LongWait

__all__ = ["Meeting", "Neighbours", "neighbours"]

T = TypeVar("T")
Memory = NDArray[np.uint8]

_LEFT = 1 << 62  # in place of a number of barriers: this rank has failed
_LEAVING = Intent((("operation", "a rank has left a meeting"),), 0)
_REACHED, _SUCCEEDED = 0, 1  # words of a rank: the last barrier that it has reached, and the last that it reached with success


class Meeting:
    """A barrier in shared memory, as one of its ranks sees it.

    Parameters
    ----------
    memory : ndarray of uint8
        The same memory on all ranks, initially zero, of size :meth:`nbytes`.
    rank, ranks : int
        Among the ranks that share the memory.
    oversubscribed : bool
        Whether ranks share cores.
    comm : communicator
        Communicator whose messages may be in flight while the ranks wait; they progress meanwhile.
    """

    def __init__(self, memory: Memory, rank: int, ranks: int, oversubscribed: bool, comm: Any) -> None:
        self._rank, self._ranks, self._comm = rank, ranks, comm
        self._words, self._step = memory.view(np.uint64), LINE // 8
        self._spins, self._yield_core = spinning(oversubscribed)
        self._all_reached, self._set = word_kernels()
        self._meetings = 0
        leaves_on_failure(self, comm)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Return the size of the memory in bytes."""
        return ranks * LINE

    def arrive(self, succeeded: bool = True) -> None:
        """Publish that this rank has reached the barrier, and whether its part succeeded."""
        self._meetings += 1
        own = self._rank * self._step
        if succeeded:
            self._set(self._words, own + _SUCCEEDED, self._meetings)
        self._set(self._words, own + _REACHED, self._meetings)

    def leave(self) -> None:
        """Publish that this rank has failed and reaches no further barrier. Ranks that wait learn the error in the next operation."""
        self._set(self._words, self._rank * self._step + _REACHED, _LEFT)

    def wait(self) -> bool:
        """Wait until all ranks have reached the barrier, and return True if all of them succeeded. Their earlier writes are then visible.

        Raises
        ------
        SparseAllreduceError
            The error of a rank that has failed and left.
        """
        from sparseallreduce.runtime.progress import advance

        at, polls = (self._step, self._ranks, self._meetings), (self._spins, self._yield_core)
        wait: LongWait | None = None
        while not self._all_reached(self._words, _REACHED, *at, *polls):
            self._comm.Iprobe()
            advance()
            if wait is None:
                wait = LongWait(self._describe, limited=True)
            wait.check()
        if wait is not None:
            wait.over()
        if self._words[_REACHED :: self._step][: self._ranks].max() >= _LEFT:
            agree(self._comm, _LEAVING, blocking=True)
            raise SparseAllreduceError("a rank has failed in an earlier step: start again with a new strategy")
        return bool(self._all_reached(self._words, _SUCCEEDED, *at, 1, 0))

    def _describe(self) -> tuple[str, str]:
        """Return who waits, and for whom."""
        step, meetings = self._step, self._meetings
        missing = [rank for rank in range(self._ranks) if not self._all_reached(self._words, rank * step + _REACHED, 1, 1, meetings, 1, 0)]
        where = "" if self._ranks == self._comm.size else " of this host"
        behind = f"{named_ranks(missing)}{where} {'has' if len(missing) == 1 else 'have'} not started it"
        return f"rank {self._comm.rank} of {self._comm.size}", f"a meeting of the ranks{where}, who change the weights together: {behind}"


class Neighbours(NamedTuple, Generic[T]):
    """The ranks that share memory with this one, including itself."""

    memory: Memory
    rank: int  # index of this rank among them
    facts: list[T]  # the fact of each of them
    oversubscribed: bool  # whether this host has more ranks than cores


def neighbours(comm: Any, fact: T, nbytes: Callable[[int], int]) -> Neighbours[T] | None:
    """Return memory for the ranks that can share it with this one, initially zero. Collective over ``comm``.

    It has ``nbytes(number of ranks)`` bytes. Return None for a single rank, and on all ranks of a group that cannot get the memory.
    """
    gathered = gather(comm, (this_place(), fact))
    places = [place for place, _ in gathered]
    here, on_host = same_memory(places, comm.rank), same_host(places, comm.rank)
    rank, facts = here.index(comm.rank), [gathered[other][1] for other in here]
    memory = _shared(shared_memory(rank, nbytes(len(here))), here, comm)
    if memory is None or len(here) == 1:
        return None
    return Neighbours(memory, rank, facts, len(on_host) > count_cores(places[other] for other in on_host))


def _shared(steps: Generator[Step, Any, Memory | None], here: list[int], comm: Any) -> Memory | None:
    """Run steps in which the ranks of a host share records, and return their result."""
    try:
        step = next(steps)
        while True:
            assert isinstance(step, Share)
            records = gather(comm, step.record)
            step = steps.send([records[rank] for rank in here])
    except StopIteration as stop:
        memory: Memory | None = stop.value
        return memory
