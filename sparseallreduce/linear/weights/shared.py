"""One replica of the weights for all ranks of a host, in memory that they share: each changes a part of it, and all read the whole.

With a replica of its own every rank would make the same changes, to memory that competes with the others' for the same cache. Two
ranks on a core each, of whose weights (N = 3.2 million) a step reads 56,000 and changes 99,500, take 0.3 to 0.85 of the time for changing
them and 0.5 to 1.0 for reading; at the quietest moment that was seen, 1.2 to 1.4 and 1.4 to 1.5, which no whole training showed.

Ranks that take their steps together need to meet once a step for that, after they have changed the weights and before they read them
again, and do other things in between. Before they change them they need not: no rank has the sum of all gradients until every rank has
computed its own, and so has read the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.runtime.memory.meeting import Meeting, neighbours
from sparseallreduce.runtime.memory.words import LINE

__all__ = ["Replica", "shared_replica"]

Array = NDArray[Any]
Memory = NDArray[np.uint8]

_FEW = 1 << 20  # bytes of weights that lie in the cache of a core anyway


class Replica:
    """Arrays in shared memory, and where the ranks meet that change them.

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
    meeting : Meeting
        After its changes a rank comes, and says whether it is well; once it has waited it can read the changes of all.
    """

    def __init__(self, memory: Memory, arrays: list[Array], rank: int, threads: list[int], oversubscribed: bool, comm: Any) -> None:
        self.first, self.parts = sum(threads[:rank]), sum(threads)
        begin = Meeting.nbytes(len(threads))
        self.meeting = Meeting(memory[:begin], rank, len(threads), oversubscribed, comm)
        self.arrays: list[Array] = []
        for array in arrays:
            self.arrays.append(memory[begin : begin + array.nbytes].view(array.dtype))
            begin += _padded(array.nbytes)
            if rank == 0:
                self.arrays[-1][:] = array

    @staticmethod
    def nbytes(arrays: list[Array], ranks: int) -> int:
        """Bytes of memory that it takes."""
        return Meeting.nbytes(ranks) + sum(_padded(array.nbytes) for array in arrays)


def shared_replica(arrays: list[Array], comm: Any, threads: int = 1) -> Replica | None:
    """The arrays, which are the same on all ranks, in memory that the ranks of this host share; collective over ``comm``.

    None where that is of no use: for a rank alone on its host, and for arrays that fit into the cache; and where there is none to be
    had, on all ranks of the host.
    """
    if comm.size == 1 or sum(array.nbytes for array in arrays) < _FEW:
        return None
    sharing = neighbours(comm, threads, lambda ranks: Replica.nbytes(arrays, ranks))
    if sharing is None:
        return None
    replica = Replica(sharing.memory, arrays, sharing.rank, sharing.facts, sharing.oversubscribed, comm)
    replica.meeting.come()
    replica.meeting.wait()
    return replica


def _padded(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
