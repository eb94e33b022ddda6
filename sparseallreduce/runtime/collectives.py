"""Track MPI's own collectives: which are usable, in which order ranks start them, and how ranks realign after missing some."""

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
    from sparseallreduce.runtime.interfaces import AnyChannel

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

DIRECT_RANKS = 16  # up to this number of ranks, every rank sends its dense block to every other
ALL = 1 << 62  # larger than any operation number
_COUNT_LIMIT = 2**31 - 1
_UNSPLIT, _UNSPLIT_PER_RANK = 1 << 14, 1 << 12  # bytes, in total and per rank, above which MPI splits a vector between ranks
_MPI_TYPES = {np.dtype(name) for name in ("float32", "float64", "int32", "int64", "complex64", "complex128")}


class Collectives:
    """The MPI collectives started on one duplicate of a communicator, in the same order on all ranks.

    A rank that gave up may have skipped some or left some unfinished. No further collective is then started until all ranks have exchanged
    which ones they started.
    """

    def __init__(self) -> None:
        self.comm: Any = None  # the duplicate, once it is there
        self.usable = True  # False while a rank that gave up may have left one unfinished
        self.usable_from = 0  # operation that last made them usable again; earlier ones start no more
        self.entered: _Entered = _Entered(0, [])
        self.unfinished: list[tuple[int, int, str, str, list[int]]] = []  # number, operation, kind, dtype and counts of each

    def enter(self, sequence: int, kind: str, dtype: np.dtype[Any], counts: list[int], call: Callable[[Any], MPI.Request]) -> MPI.Request:
        """Start an MPI collective. It is recorded as started even if an interrupt hits this rank during the call."""
        before, begun = self.entered
        self.unfinished.append((before + len(begun) + 1, sequence, kind, dtype.char, counts))
        begun.extend(map(call, (self.comm,)))  # one bytecode instruction, so that no interrupt can lose the request
        request: MPI.Request = begun[-1]
        return request

    def count(self) -> int:
        """Return the number of MPI collectives that this rank has started."""
        before, begun = self.entered
        return before + len(begun)

    def forget(self, number: int) -> None:
        """Discard the records of this collective and all before it, since all ranks have started them."""
        last = self.count()
        self.unfinished = [entry for entry in self.unfinished if number < entry[0] <= last]
        if not self.unfinished:
            self.entered = _Entered(last, [])


class _Entered(NamedTuple):
    """The MPI collectives that a rank has started: the number that were discarded, and the requests of the others."""

    before: int
    begun: list[Any]


class Until(NamedTuple):
    """A step of the runtime itself: wait until a condition holds that other operations or ranks in shared memory bring about."""

    condition: Callable[[], bool]
    missing: Callable[[], list[int]] | None = None  # returns the ranks that are waited for


def awaited_word() -> Generator[Step, Any, None]:
    """Wait for the announcement of a rank that gave up; it ends the operation."""
    yield Until(lambda: False)  # type: ignore[misc]


def recovery(channel: AnyChannel, before: int) -> Generator[Step, Any, None]:
    """Start the MPI collectives that other ranks started in failed operations and this rank did not, and ignore their results.

    After that all ranks have started the same collectives, and may start others again.
    """
    channel.collectives.usable = False  # from here on none is started until all ranks have reported
    # The collectives that ranks start below, in place of those they missed, produce no valid sum. A rank that waits for one must first be
    # told that its operation fails.
    yield Until(lambda: not any(other.sequence < before and other.awaits_mpi() for other in channel.in_flight))  # type: ignore[misc]
    last = channel.collectives.count()
    ours = json.dumps([last, [entry for entry in channel.collectives.unfinished if entry[0] <= last and entry[1] < before]]).encode()
    texts: list[bytes] = yield Share(ours.ljust(512 + 48 * channel.ranks))
    known = [json.loads(text) for text in texts]
    last = channel.collectives.count()  # an earlier operation may have recovered the channel meanwhile
    missing = {entry[0]: entry for _, entries in known for entry in entries if entry[0] > last}
    for number in sorted(missing):
        _, sequence, kind, code, counts = missing[number]
        total, dtype = np.zeros(sum(counts), code), np.dtype(code)
        call = methodcaller("Iallreduce", MPI.IN_PLACE, total, MPI.SUM)
        if kind == "allgatherv":
            block, places = np.zeros(counts[channel.rank], code), np.cumsum([0, *counts[:-1]]).tolist()
            call = methodcaller("Iallgatherv", block, [total, counts, places, typed(total)])
        channel.mailbox.leftovers.keep([channel.collectives.enter(sequence, kind, dtype, counts, call)], total)
    channel.collectives.forget(min(count for count, _ in known))  # other ranks may fail before they have started what they missed
    if before < ALL:
        channel.collectives.usable_from = max(channel.collectives.usable_from, before)
    channel.collectives.usable = True


def takes_collective(channel: AnyChannel, steps: Collection[type]) -> bool:
    """Return True if an algorithm with these dense steps calls MPI collectives."""
    return DenseAllreduce in steps or (DenseAllgather in steps and channel.ranks > DIRECT_RANKS)


def is_native(step: DenseAllreduce | DenseAllgather) -> bool:
    """Return True if MPI has this collective. It gathers any dtype, and reduces dtypes that have an MPI type.

    A completed collective must imply that all ranks have entered it. MPI may complete a gather without a rank that contributes nothing, so
    MPI is used for it only if every block is non-empty.
    """
    stream = step.stream
    if stream._present is not None or stream._stored.size > _COUNT_LIMIT:
        return False
    if isinstance(step, DenseAllgather):
        return len(step.ranges) <= DIRECT_RANKS or all(low < high for low, high in step.ranges)
    return has_native_sum(step.op, stream.dtype, stream._stored.size)


def is_near_and_native(step: DenseAllgather, channel: AnyChannel) -> bool:
    """Return True if all ranks share a host and blocks are gathered uncompressed, by MPI or directly into their places."""
    return len(channel.near) == channel.ranks and is_native(step)


def has_native_sum(op: Operator, dtype: np.dtype[Any], count: int) -> bool:
    """Return True if MPI reduces ``count`` values of this type by this operator."""
    return op.is_sum and dtype in _MPI_TYPES and count <= _COUNT_LIMIT


def unify_nans(step: Step | None, total: NDArray[Any], ranks: int) -> None:
    """Replace all NaNs of an MPI sum by NumPy's NaN, if several ranks may have computed it in different orders.

    They do so in recursive doubling, which MPICH uses up to 2 KiB, and Open MPI up to 16 KiB on few ranks, 256 KiB on 64 ranks and 2 MiB on
    1,000 ranks. Longer vectors are split into parts, each reduced by one rank. Nothing is done after other kinds of steps.
    """
    if (step is None or isinstance(step, DenseAllreduce)) and total.nbytes <= max(_UNSPLIT, _UNSPLIT_PER_RANK * ranks):
        kernels.unify_nans(total)


def has_entered(error: BaseException) -> bool:
    """Return True if an MPI collective that raised was entered: after MPI's errors and interrupts, but not if memory ran out before."""
    return not isinstance(error, Exception) or isinstance(error, MPI.Exception)


def exchange(comm: MPI.Intracomm, ours: Any, places: Sequence[Any], others: Sequence[int], tag: int, requests: list[MPI.Request]) -> None:
    """Send this rank's bytes or array to all other ranks and receive theirs; receive requests come first in the list.

    Received data may be shorter than its place. If the call was interrupted, call it again with the same list to continue.
    """
    sources = [other for other in others if len(places[other])]
    received = len(sources)
    sources = sources[len(requests) :]
    requests.extend(map(comm.Irecv, [places[other] for other in sources], sources, repeat(tag)))  # no interrupt can lose a request here
    if len(ours):
        requests.extend(map(comm.Isend, repeat(ours), others[len(requests) - received :], repeat(tag)))


def raw_blocks(step: DenseAllgather, received: NDArray[Any]) -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Return this rank's block, and the places of all blocks in the output array, viewed as unsigned integers, which MPI supports."""
    array, width = step.stream._stored, step.stream.width or 1
    unsigned = np.dtype(f"u{array.itemsize}") if array.itemsize <= 8 else array.dtype  # NumPy has no 16-byte integers
    places = received.reshape(-1).view(unsigned)
    return array.reshape(-1).view(unsigned), [places[lo * width : hi * width] for lo, hi in step.ranges]


def typed(array: NDArray[Any]) -> MPI.Datatype:
    return MPI.Datatype.fromcode(array.dtype.char)
