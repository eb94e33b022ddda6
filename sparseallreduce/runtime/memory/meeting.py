"""Where the ranks of a host meet again and again, in memory that they share: each comes, says whether it is well, and waits for all."""

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

_LEFT = 1 << 62  # in place of a number of meetings: this rank has failed, and comes to no other
_LEAVING = Intent((("operation", "a rank has left a meeting"),), 0)
_COME, _WELL = 0, 1  # words of a rank: the last meeting that it has come to, and the last that it came to with nothing to report


class Meeting:
    """One rank's place among those that meet.

    Parameters
    ----------
    memory : ndarray of uint8
        The same for all ranks, zeros at first; of :meth:`nbytes`.
    rank, ranks : int
        Of those that meet.
    oversubscribed : bool
        Whether ranks share cores.
    comm : communicator
        Of which messages may be under way while the ranks wait for each other.
    """

    def __init__(self, memory: Memory, rank: int, ranks: int, oversubscribed: bool, comm: Any) -> None:
        self._rank, self._ranks, self._comm = rank, ranks, comm
        self._words, self._step = memory.view(np.uint64), LINE // 8
        self._spins, self._yield_core = spinning(oversubscribed)
        self._have_come, self._set = word_kernels()
        self._meetings = 0
        leaves_on_failure(self, comm)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of memory that it takes."""
        return ranks * LINE

    def come(self, well: bool = True) -> None:
        """Tell the others that this rank has done its part, and whether it is well."""
        self._meetings += 1
        own = self._rank * self._step
        if well:
            self._set(self._words, own + _WELL, self._meetings)
        self._set(self._words, own + _COME, self._meetings)

    def leave(self) -> None:
        """Have nobody wait for this rank any more, which has failed: who meets learns that, and of what, in the next operation."""
        self._set(self._words, self._rank * self._step + _COME, _LEFT)

    def wait(self) -> bool:
        """Wait until all ranks have come as often as this one: then what they did before is there. Return whether all are well.

        Raises
        ------
        SparseAllreduceError
            If a rank has left because something has failed there: that error.
        """
        from sparseallreduce.runtime.progress import advance

        at, polls = (self._step, self._ranks, self._meetings), (self._spins, self._yield_core)
        wait: LongWait | None = None
        while not self._have_come(self._words, _COME, *at, *polls):
            self._comm.Iprobe()
            advance()
            if wait is None:
                wait = LongWait(self._said, limited=True)
            wait.look()
        if wait is not None:
            wait.over()
        if self._words[_COME :: self._step][: self._ranks].max() >= _LEFT:
            agree(self._comm, _LEAVING, blocking=True)
            raise SparseAllreduceError("a rank has failed in these steps before: begin anew, with a new strategy")
        return bool(self._have_come(self._words, _WELL, *at, 1, 0))


    def _said(self) -> tuple[str, str]:
        """Who waits, and for whom."""
        step, meetings = self._step, self._meetings
        missing = [rank for rank in range(self._ranks) if not self._have_come(self._words, rank * step + _COME, 1, 1, meetings, 1, 0)]
        where = "" if self._ranks == self._comm.size else " of this host"
        behind = f"{named_ranks(missing)}{where} {'has' if len(missing) == 1 else 'have'} not come to it"
        return f"rank {self._comm.rank} of {self._comm.size}", f"a meeting of the ranks{where}, who change the weights together: {behind}"


class Neighbours(NamedTuple, Generic[T]):
    """The ranks that share memory with this one, itself among them."""

    memory: Memory
    rank: int  # this one's number among them
    facts: list[T]  # what each of them has said
    oversubscribed: bool  # whether the ranks of this host, also of other memory, outnumber its cores


def neighbours(comm: Any, fact: T, nbytes: Callable[[int], int]) -> Neighbours[T] | None:
    """Memory for the ranks that can share it with this one, of ``nbytes(how many they are)``, zeros at first; collective over ``comm``.

    None for a rank alone, and on all ranks that would share it where there is none to be had.
    """
    told = gather(comm, (this_place(), fact))
    places = [place for place, _ in told]
    here, on_host = same_memory(places, comm.rank), same_host(places, comm.rank)
    rank, facts = here.index(comm.rank), [told[other][1] for other in here]
    memory = _shared(shared_memory(rank, nbytes(len(here))), here, comm)
    if memory is None or len(here) == 1:
        return None
    return Neighbours(memory, rank, facts, len(on_host) > count_cores(places[other] for other in on_host))


def _shared(steps: Generator[Step, Any, Memory | None], here: list[int], comm: Any) -> Memory | None:
    """What comes of steps in which the ranks of a host share records."""
    try:
        step = next(steps)
        while True:
            assert isinstance(step, Share)
            records = gather(comm, step.record)
            step = steps.send([records[rank] for rank in here])
    except StopIteration as stop:
        memory: Memory | None = stop.value
        return memory
