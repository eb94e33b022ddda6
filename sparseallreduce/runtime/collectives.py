"""MPI's own collectives: which it has, in which order the ranks begin them, and how they get into step again when some have missed one."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Sequence
from itertools import repeat
from operator import methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Share, Step
from sparseallreduce.streams import kernels
from sparseallreduce.streams.operator import Operator

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = [
    "ALL",
    "DIRECT_RANKS",
    "Collectives",
    "Until",
    "awaited_word",
    "exchange",
    "has_entered",
    "has_native_sum",
    "is_native",
    "is_near_and_native",
    "raw_blocks",
    "recovery",
    "takes_collective",
    "typed",
    "unify_nans",
]

DIRECT_RANKS = 16  # up to which every rank sends its dense block to every other
ALL = 1 << 62  # more than there are operations
_COUNT_LIMIT = 2**31 - 1
_ALIKE, _ALIKE_A_RANK = 1 << 14, 1 << 12  # bytes of a vector, in all and a rank, above which ranks share out the values of a sum by MPI
_MPI_TYPES = {np.dtype(name) for name in ("float32", "float64", "int32", "int64", "complex64", "complex128")}


class Collectives:
    """Those on one duplicate of a communicator, which all ranks begin in the same order.

    A rank that gave up may have left some out, or unfinished: then none is begun until all ranks have told each other which.
    """

    def __init__(self) -> None:
        self.comm: Any = None  # the duplicate, once it is there
        self.usable = True  # whether none was left unfinished by a rank that gave up
        self.usable_from = 0  # the operation that has made them usable again last: those before it begin no more
        self.entered = _Entered(0, [])
        self.unfinished: list[tuple[int, int, str, str, list[int]]] = []  # of those: number, operation, kind, dtype and counts

    def enter(self, sequence: int, kind: str, dtype: np.dtype[Any], counts: list[int], call: Callable[[Any], MPI.Request]) -> MPI.Request:
        """Begin a collective of MPI that others wait for, so that it is known whether it was begun whatever interrupts this rank."""
        before, begun = self.entered
        self.unfinished.append((before + len(begun) + 1, sequence, kind, dtype.char, counts))
        begun.extend(map(call, (self.comm,)))  # one instruction of the interpreter
        request: MPI.Request = begun[-1]
        return request

    def count(self) -> int:
        """How many collectives of MPI this rank has begun."""
        before, begun = self.entered
        return before + len(begun)

    def forget(self, number: int) -> None:
        """All ranks have begun this collective, and those before it."""
        last = self.count()
        self.unfinished = [entry for entry in self.unfinished if number < entry[0] <= last]
        if not self.unfinished:
            self.entered = _Entered(last, [])


class _Entered(NamedTuple):
    """Collectives of MPI that a rank has begun: how many before, and the requests of the others."""

    before: int
    begun: list[Any]


class Until(NamedTuple):
    """A step of the runtime's own: wait for what other operations of this rank, or other ranks in shared memory, come to."""

    condition: Callable[[], bool]
    missing: Callable[[], list[int]] | None = None  # the ranks that are waited for


def awaited_word() -> Generator[Step, Any, None]:
    """Wait for word of a rank that has given up, which ends the operation."""
    yield Until(lambda: False)  # type: ignore[misc]


def recovery(channel: Channel, before: int) -> Generator[Step, Any, None]:
    """Begin, and leave to themselves, the collectives of MPI which other ranks have begun in operations that failed, and this one has not.

    Then all ranks have begun the same ones, and may begin others again.
    """
    channel.collectives.usable = False  # from here on, none is begun before all have told
    # What others begin below in place of what they did not come to is no sum: whoever waits for one has to hear first that it fails.
    yield Until(lambda: not any(other.sequence < before and other.awaits_mpi() for other in channel.in_flight))  # type: ignore[misc]
    last = channel.collectives.count()
    ours = json.dumps([last, [entry for entry in channel.collectives.unfinished if entry[0] <= last and entry[1] < before]]).encode()
    texts: list[bytes] = yield Share(ours.ljust(512 + 48 * channel.ranks))
    known = [json.loads(text) for text in texts]
    last = channel.collectives.count()  # an operation before this one may have made the channel sound since
    missing = {entry[0]: entry for _, entries in known for entry in entries if entry[0] > last}
    for number in sorted(missing):
        _, sequence, kind, code, counts = missing[number]
        total, dtype = np.zeros(sum(counts), code), np.dtype(code)
        call = methodcaller("Iallreduce", MPI.IN_PLACE, total, MPI.SUM)
        if kind == "allgatherv":
            block, places = np.zeros(counts[channel.rank], code), np.cumsum([0, *counts[:-1]]).tolist()
            call = methodcaller("Iallgatherv", block, [total, counts, places, typed(total)])
        channel.mailbox.leftovers.keep([channel.collectives.enter(sequence, kind, dtype, counts, call)], total)
    channel.collectives.forget(min(count for count, _ in known))  # others may fail before they have begun what they miss
    if before < ALL:
        channel.collectives.usable_from = max(channel.collectives.usable_from, before)
    channel.collectives.usable = True


def takes_collective(channel: Channel, steps: Collection[type]) -> bool:
    """Whether an algorithm that takes these dense steps enters collectives of MPI."""
    return DenseAllreduce in steps or (DenseAllgather in steps and channel.ranks > DIRECT_RANKS)


def is_native(step: DenseAllreduce | DenseAllgather) -> bool:
    """Whether MPI has this collective: any dtype is gathered, a sum of what MPI has a type for is reduced.

    What is complete must tell that all ranks have entered it. MPI may gather without one that has nothing to give, so that is left to it
    only where all have something.
    """
    stream = step.stream
    if stream._present is not None or stream._stored.size > _COUNT_LIMIT:
        return False
    if isinstance(step, DenseAllgather):
        return len(step.ranges) <= DIRECT_RANKS or all(low < high for low, high in step.ranges)
    return has_native_sum(step.op, stream.dtype, stream._stored.size)


def is_near_and_native(step: DenseAllgather, channel: Channel) -> bool:
    """Whether blocks are gathered as they are, by MPI or straight from and to their places; between hosts they travel in pieces."""
    return len(channel.near) == channel.ranks and is_native(step)


def has_native_sum(op: Operator, dtype: np.dtype[Any], count: int) -> bool:
    """Whether MPI reduces ``count`` values of this type by this operator."""
    return op.is_sum and dtype in _MPI_TYPES and count <= _COUNT_LIMIT


def unify_nans(step: Step | None, total: NDArray[Any], ranks: int) -> None:
    """Make all NaNs of a sum by MPI NumPy's, where several ranks may have made it, each in an order of its own.

    By recursive doubling they do: MPICH up to 2 KiB, and Open MPI up to 16 KiB on few ranks, 256 KiB on 64 and 2 MiB on a thousand. Longer
    vectors are cut in parts, each of which one rank adds up, since all ranks would move all of them log2(P) times. A step of another kind
    is left as it is.
    """
    if (step is None or isinstance(step, DenseAllreduce)) and total.nbytes <= max(_ALIKE, _ALIKE_A_RANK * ranks):
        kernels.unify_nans(total)


def has_entered(error: BaseException) -> bool:
    """Whether a collective of MPI that has raised was entered: not for want of memory for its arguments; interrupts come behind it."""
    return not isinstance(error, Exception) or isinstance(error, MPI.Exception)


def exchange(
    comm: MPI.Intracomm, ours: Any, places: Sequence[Any], others: Sequence[int], tag: int, requests: list[MPI.Request]
) -> None:
    """Send our bytes or array to all others, and receive theirs, which may be shorter than their places; receives come first in the list.

    Called again with the same list, it goes on where it was interrupted.
    """
    sources = [other for other in others if len(places[other])]
    received = len(sources)
    sources = sources[len(requests) :]
    requests.extend(map(comm.Irecv, [places[other] for other in sources], sources, repeat(tag)))  # no interrupt loses a request here
    if len(ours):
        requests.extend(map(comm.Isend, repeat(ours), others[len(requests) - received :], repeat(tag)))


def raw_blocks(step: DenseAllgather, received: NDArray[Any]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Return this rank's block, and the places of all blocks in the array to be filled, as numbers that any MPI knows."""
    array, width = step.stream._stored, step.stream.width or 1
    unsigned = np.dtype(f"u{array.itemsize}") if array.itemsize <= 8 else array.dtype  # there are none of 16 bytes
    places = received.reshape(-1).view(unsigned)
    return array.reshape(-1).view(unsigned), [places[lo * width : hi * width] for lo, hi in step.ranges]


def typed(array: NDArray[Any]) -> MPI.Datatype:
    return MPI.Datatype.fromcode(array.dtype.char)
