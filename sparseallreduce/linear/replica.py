"""One replica of the weights for all ranks of a host, in memory that they share: each changes a part of it, and all read the whole.

With a replica of its own every rank would make the same changes, to memory that competes with the others' for the same cache. Two
ranks on a core each, of whose weights (N = 3.2 million) a step reads 56,000 and changes 99,500, take 0.3 to 0.85 of the time for changing
them and 0.5 to 1.0 for reading; at the quietest moment that was seen, 1.2 to 1.4 and 1.4 to 1.5, which no whole training showed.

Ranks that take their steps together need to meet once a step for that, after they have changed the weights and before they read them
again, and do other things in between. Before they change them they need not: no rank has the sum of all gradients until every rank has
computed its own, and so has read the weights.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.linear.collective import gather
from sparseallreduce.runtime.hosts import count_cores, same_host, same_memory, this_place
from sparseallreduce.runtime.memory.mapping import shared_memory
from sparseallreduce.runtime.memory.words import LINE, spinning, word_kernels

__all__ = ["Replica", "shared_replica"]

Array = NDArray[Any]
Memory = NDArray[np.uint8]

_FEW = 1 << 20  # bytes of weights that lie in the cache of a core anyway
_COME, _WELL = 0, 1  # words of a rank: the last meeting that it has come to, and the last that it came to with nothing to report


class Replica:
    """Arrays in shared memory, and a place for the ranks to meet.

    Parameters
    ----------
    memory : ndarray of uint8
        The same for all ranks, zeros at first; of :meth:`nbytes`.
    arrays : list of ndarray
        Of rank 0, what the arrays hold at first; of the others, arrays like them.
    rank : int
    threads : list of int
        Of each rank: all of them share what is to be changed.
    oversubscribed : bool
        Whether ranks share cores.
    comm : communicator
        Of which messages may be under way while the ranks wait for each other.

    Attributes
    ----------
    arrays : list of ndarray
    first, parts : int
        Of how many parts each change is made, and which of them is the first of this rank's.
    """

    def __init__(self, memory: Memory, arrays: list[Array], rank: int, threads: list[int], oversubscribed: bool, comm: Any) -> None:
        self._rank, self._ranks, self._comm = rank, len(threads), comm
        self.first, self.parts = sum(threads[:rank]), sum(threads)
        self._words, self._step = memory[: len(threads) * LINE].view(np.uint64), LINE // 8
        self._spins, self._yield_core = spinning(oversubscribed)
        self._have_come, self._set = word_kernels()
        self._meetings = 0
        self.arrays: list[Array] = []
        begin = len(threads) * LINE
        for array in arrays:
            self.arrays.append(memory[begin : begin + array.nbytes].view(array.dtype))
            begin += _padded(array.nbytes)
            if rank == 0:
                self.arrays[-1][:] = array

    @staticmethod
    def nbytes(arrays: list[Array], ranks: int) -> int:
        """Bytes of memory that it takes."""
        return ranks * LINE + sum(_padded(array.nbytes) for array in arrays)

    def come(self, well: bool = True) -> None:
        """Tell the others that this rank has made its changes, and whether it is well."""
        self._meetings += 1
        own = self._rank * self._step
        if well:
            self._set(self._words, own + _WELL, self._meetings)
        self._set(self._words, own + _COME, self._meetings)

    def wait(self) -> bool:
        """Wait until all ranks have come as often as this one: then their changes can be read. Returns whether all are well."""
        from sparseallreduce.runtime.progress import advance

        at, polls = (self._step, self._ranks, self._meetings), (self._spins, self._yield_core)
        while not self._have_come(self._words, _COME, *at, *polls):
            self._comm.Iprobe()
            advance()
        return bool(self._have_come(self._words, _WELL, *at, 1, 0))


def shared_replica(arrays: list[Array], comm: Any, threads: int = 1) -> Replica | None:
    """The arrays, which are the same on all ranks, in memory that the ranks of this host share; collective over ``comm``.

    None where that is of no use: for a rank alone on its host, and for arrays that fit into the cache; and where there is none to be
    had, on all ranks of the host.
    """
    if comm.size == 1 or sum(array.nbytes for array in arrays) < _FEW:
        return None
    told = gather(comm, (this_place(), threads))
    places = [place for place, _ in told]
    here, neighbours = same_memory(places, comm.rank), same_host(places, comm.rank)
    rank, everyones = here.index(comm.rank), [told[other][1] for other in here]
    memory = _shared(shared_memory(rank, Replica.nbytes(arrays, len(here))), here, comm)
    if memory is None or len(here) == 1:
        return None
    oversubscribed = len(neighbours) > count_cores(places[other] for other in neighbours)
    replica = Replica(memory, arrays, rank, everyones, oversubscribed, comm)
    replica.come()
    replica.wait()
    return replica


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


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
