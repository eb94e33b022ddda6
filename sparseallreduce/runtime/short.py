"""The short way through a blocking allreduce by "auto", without any object that stands for an operation in flight.

An operation on a few kilobytes takes some twenty microseconds, and the agreement adds as much to MPI's allreduce of a dense vector.
Checked arguments, an intent, a schedule and a request would take more than that again, all the more where their code is not in the
cache, and nobody needs them while the ranks agree. Once something is out of the ordinary, this way leads into the long one. What
the ranks tell each other is the same on both, so that no rank needs to know which one another takes.
"""

from __future__ import annotations

import functools
import math
import struct
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms import AUTO, agreement
from sparseallreduce.algorithms import allreduce as long
from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.steps import DenseAllreduce, Schedule
from sparseallreduce.runtime.blocking import at_ease
from sparseallreduce.runtime.board import PREFIX, Board, Slot
from sparseallreduce.runtime.channel import Channel
from sparseallreduce.runtime.collectives import has_entered, has_native_sum
from sparseallreduce.runtime.operation import Begun, Operation, outcome
from sparseallreduce.runtime.part_sum import Joining, PartSum
from sparseallreduce.runtime.progress import done_within
from sparseallreduce.runtime.shared import SharedStep
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams import kernels, memory, packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["allreduce", "at_ease"]

_WORD = struct.Struct(PREFIX.format + agreement.RECORD.format.lstrip("<"))  # of a rank: all it says before its payload
# Bytes up to which a stream always travels with the agreement where that is on a board, if there is room.
_ALWAYS_ON_BOARD = 1 << 13
# Of the time for a byte of MPI's own dense sum, which is measured at 4 MiB, that of one by parts on a board where ranks share cores, for
# vectors of so many bytes at most, and for others. By the former, 20 % of 1 MiB took 539 microseconds by parts at P = 4, and 20 % of 4 MiB
# 2,919, where splits take 390 and 1,040; by the latter, 30 % of 256 KiB would take 214 by a split, and take 187 by parts.
_SHORT_PARTS, _PARTS_SHARES = 1 << 18, (0.35, 0.7)
_RETRIES = 3  # of the way to fail, which may be interrupted, too
_REMEMBERED = 256  # kinds of streams, and sizes of streams of a kind


class _Kind:
    """What operations on streams of one size, dtype and width have in common.

    Parameters
    ----------
    call, intent
        Of one of them.
    channel : Channel
    """

    def __init__(self, call: long.Call, intent: Intent, channel: Channel) -> None:
        dtype = call.stream.dtype
        self.channel = channel
        self._call = call._replace(stream=None)  # which would be kept as long as the channel
        self.terms = intent.terms
        self.digest = digest_of(intent.terms)
        self.reduction = Reduction(call.op)
        self.streams = packed.Kind.of(call.stream, self.reduction)
        self.native = has_native_sum(call.op, dtype, math.prod(self.streams.shape))
        self.itemsize = dtype.itemsize
        self.nbytes = math.prod(self.streams.shape) * dtype.itemsize
        self.polls = 1 if channel.board is None else channel.board.polls
        self.sums = self._part_sums(channel.board) if self.native else []
        self.beginnings: dict[int, int] = {}  # how operations on so many entries begin

    def _part_sums(self, board: Board | None) -> list[PartSum]:
        """Sums on each area of the board, if vectors of this kind fit there."""
        areas = [] if board is None else [area for area in board.areas if self.nbytes <= area.room]
        return [PartSum(area, self.streams.shape, self.streams.dtype) for area in areas]

    def call(self, stream: SparseStream) -> long.Call:
        """The call that is made for one of them."""
        return self._call._replace(stream=stream)

    def begins(self, stream: SparseStream) -> int:
        """How an operation begins: as :func:`~sparseallreduce.algorithms.allreduce.begins`; remembered by its entries."""
        channel = self.channel
        can_pack = self.reduction.op.is_sum or not stream.is_dense
        most = min(_ALWAYS_ON_BOARD, long.room(channel.ranks))
        nbytes, stage = packed.packed_bytes(stream), channel.stage
        if channel.board is not None and can_pack and nbytes <= most:
            flags = long.PACKED
        else:
            machine = channel.machine
            if machine is not None and self.sums and channel.crowded:
                beta = machine.beta_dense if machine.beta_blocking is None else machine.beta_blocking
                machine = machine._replace(beta_blocking=_PARTS_SHARES[self.nbytes > _SHORT_PARTS] * beta)
            flags = long.begins(self.call(stream), channel.ranks, self.reduction, machine, 0 if stage is None else stage.room)
        if flags == long.READY:
            reserved = all(part_sum.area.reserve(self.nbytes) for part_sum in self.sums)
            flags = long.WRITTEN if self.sums and reserved else flags if self.native else 0
        _make_room(self.beginnings)
        self.beginnings[stream.stored] = flags
        return flags


class _ByMessages:
    """What the ranks tell each other by messages, for operations of a channel one after the other."""

    def __init__(self, channel: Channel) -> None:
        self.rows = packed.Rows(channel.ranks, _WORD.size, long.room(channel.ranks))
        self.entries: list[int] = []  # of each rank, once they agree
        self.lengths: list[int] = []  # of what each has packed, in bytes
        self._places = [memoryview(row) for row in self.rows.bytes]
        self._channel = channel
        self._others = [rank for rank in range(channel.ranks) if rank != channel.rank]
        self._requests: list[MPI.Request] = []
        self._told = 0  # the last operation of which we have told
        self._telling: Any = None

    def is_free(self, turn: int) -> bool:
        """Whether we can tell the others anything."""
        return True

    def tell(self, turn: int, stream: SparseStream, flags: int, digest: int) -> None:
        """Tell all ranks what we have and, if that is the flag, the stream itself; and begin to hear them."""
        channel, places, tag = self._channel, self._places, self._channel.tag(turn)
        comm, payload = channel.native.comm, packed.pack(stream) if flags == long.PACKED else b""
        word = _WORD.pack(channel.native.usable, len(payload), True, flags, digest, len(stream._stored)) + payload
        places[channel.rank][: len(word)] = word
        requests: list[MPI.Request] = []
        self._requests, self._told = requests, turn
        self._telling = functools.partial(_tell, comm, word, places, self._others, tag, requests)
        self._telling()

    def has_told(self, turn: int) -> bool:
        """Whether we have told the others anything, or begun to."""
        return self._told == turn

    def commit(self, turn: int) -> bool:
        """All have said that they enter a collective of MPI: whether none has told us since that it does not."""
        mailbox, tag = self._channel.mailbox, self._channel.tag(turn)
        box = mailbox.box(tag)
        mailbox.take_in()
        if box.failures or box.error is not None:
            return False
        mailbox.close(tag)
        return True

    def begun(self, turn: int) -> Begun:
        """Where an operation stands that has told the others."""
        self._channel.hearings = []  # something may still be on its way into this memory
        return Begun(turn, requests=self._requests, received=self.rows.bytes, telling=self._telling)

    def agreed(self, turn: int, flags: int, kind: _Kind) -> int:
        """The flags that all ranks have set, or -1 if they do not agree, or not before long."""
        if not done_within(self._requests, self._channel.crowded):
            return -1
        self.entries, self.lengths = [], []
        for place in self._places:
            sound, length, well, theirs, of, count = _WORD.unpack_from(place)
            if not sound or not well or of != kind.digest:
                return -1
            flags &= theirs
            self.entries.append(count)
            self.lengths.append(length)
        return flags

    def counted(self, flags: int) -> tuple[NDArray[np.int64], int, int]:
        """The entries, to be kept, these flags, and the sum of the entries."""
        return np.array(self.entries, np.int64), flags, sum(self.entries)

    def reduced(self, kind: _Kind) -> SparseStream:
        """The reduction of what all have packed."""
        return self.rows.reduced(self.entries, self.lengths, kind.streams, kind.reduction)

    def leave(self, turn: int) -> None:
        """What they have told is no longer needed."""


def _tell(comm: MPI.Intracomm, word: bytes, places: list[memoryview], others: list[int], tag: int, requests: list[MPI.Request]) -> None:
    """Receive from all others, and send to them; called again with the same list, it goes on where it was interrupted."""
    sources = others[len(requests) :]
    requests.extend(map(comm.Irecv, [places[other] for other in sources], sources, repeat(tag)))  # no interrupt loses a request here
    requests.extend(map(comm.Isend, repeat(word), others[len(requests) - len(others) :], repeat(tag)))


class _OnBoard:
    """The same on a slot of the channel's board."""

    def __init__(self, channel: Channel, slot: Slot, polls: int) -> None:
        self._channel = channel
        self._slot, self._polls = slot, polls
        self.is_free, self.leave, self.commit, self.has_told = slot.is_free, slot.take, slot.commit, slot.has_posted

    def tell(self, turn: int, stream: SparseStream, flags: int, digest: int) -> None:
        slot = self._slot
        length = packed.pack_into(stream, slot.payload) if flags == long.PACKED else 0
        slot.post_word(turn, self._channel.native.usable, length, flags, digest, len(stream._stored))

    def begun(self, turn: int) -> Begun:
        return Begun(turn, taken=False)

    def agreed(self, turn: int, flags: int, kind: _Kind) -> int:
        return self._slot.agreed(turn, self._polls, flags, kind.digest, kind.itemsize)

    @property
    def entries(self) -> list[int]:
        return self._slot.entries.tolist()

    def counted(self, flags: int) -> tuple[NDArray[np.int64], int, int]:
        slot = self._slot  # in which nobody is heard again before this operation is over: nothing else is in flight
        return slot.entries, flags, int(slot.sums[0])

    @property
    def lengths(self) -> list[int]:
        return self._slot.lengths.tolist()

    def reduced(self, kind: _Kind) -> SparseStream:
        slot = self._slot
        if not kind.streams.plain:
            return slot.rows.reduced(self.entries, self.lengths, kind.streams, kind.reduction)
        total, dense = slot.sums.tolist()
        return slot.rows.summed(slot.counts, total, dense > 0, kind.streams, kind.reduction)


def allreduce(stream: SparseStream, op: str, channel: Channel, patient: bool) -> SparseStream | None:
    """The reduction, or None if the arguments are wrong, which the long way tells the other ranks.

    Parameters
    ----------
    stream : SparseStream
    op : str
    channel : Channel
        At ease.
    patient : bool
        Whether this rank may block inside MPI.

    Raises
    ------
    SparseAllreduceError
        On all ranks the same.
    """
    before, turn, flags, entries = channel.turn, 0, 0, 0
    array: NDArray[Any] | None = None
    source: Any = None
    hearing: Any = None
    kind: Any = None
    step: Any = None
    steps: Any = None
    taken: Any = None  # a step which has been
    promise: DenseAllreduce | None = None
    left = committed = entering = entered = False
    try:
        stored, dense = stream._stored, stream._array
        kind = channel.kinds.get((stream.size, stored.dtype, stored.shape[1:], op)) or _new_kind(stream, op, channel)
        if kind is None:
            return None
        hearings = channel.hearings or _new_hearings(channel)
        hearing = hearings[(before + 1) % len(hearings)]
        if not hearing.is_free(before + 1):
            return None
        entries, turn = len(stored), channel.next_turn()
        flags = kind.beginnings.get(entries, -1)
        if flags < 0:
            flags = kind.begins(stream)
        # What can fail is done before this rank says that it is ready: then others may be where nothing but this rank ends their wait.
        if flags > long.PACKED and not patient:
            flags = 0
        if flags == long.WRITTEN:
            part_sum = kind.sums[turn % len(kind.sums)]
            part_sum.area.leave(turn - 1)  # also if an operation failed before it came here
            if part_sum.area.is_free():
                part_sum.write(stream)
                step = Joining(part_sum, turn)
            else:
                flags = long.READY
        if flags == long.READY:
            array, source = _arrays(dense, kind)
            _fill(source, stream, array)
        if flags == long.STAGED and channel.stage is not None:
            step = channel.stage.offer(turn, stream, kind.streams, kind.reduction)
            flags = 0 if step is None else step.flags
        hearing.tell(turn, stream, flags, kind.digest)
        if traces:
            _count_told(stream, flags, channel)
        agreed = hearing.agreed(turn, flags, kind)
        if agreed < 0:
            if array is not None:
                step = promise = _entry(kind, stream, array, source)
            said = step.told() if isinstance(step, SharedStep) else long.Told(flags, lambda *_: step, enters=promise)
            intent = Intent(kind.terms, entries)
            steps = long.operation(kind.call(stream), intent, channel.rank, channel.ranks, channel.machine, patient, said)
            taken = steps.send(None)
        elif agreed == long.PACKED:
            result: SparseStream = hearing.reduced(kind)
            if traces:
                _count_result(entries, result, 0, sum(hearing.lengths) - packed.packed_bytes(stream))
            hearing.leave(turn)
            return result
        else:
            if agreed == long.READY:
                committed = hearing.commit(turn)
            hearing.leave(turn)
            left = True
            if agreed == long.READY and array is not None:
                if committed:
                    entering = True
                    channel.native.comm.Allreduce(MPI.IN_PLACE if source is array else source, array, MPI.SUM)
                    entered = True
                    array.flags.writeable = False
                    result = SparseStream._dense_form(array, stream.size)
                    if traces:
                        nbytes, rounds = 2 * array.nbytes * (channel.ranks - 1) // channel.ranks, (channel.ranks - 1).bit_length()
                        _count_result(entries, result, nbytes, nbytes, 2 * rounds)
                    return result
                steps = _awaited(_entry(kind, stream, array, source))  # of which we are told that it is not to be
                taken = steps.send(None)
            elif agreed & (long.WRITTEN | long.STAGED):
                if agreed & long.STAGED:
                    step.begin(*hearing.counted(agreed))
                joined: SparseStream | None = step.result(kind.polls)
                if joined is not None:
                    if traces:
                        _count_result(entries, joined, *step.moved())
                    return joined
                steps = _awaited(step)
                taken = steps.send(None)
                for counts in traces:
                    counts.rounds += 1  # the rest is counted when the step has been
            else:
                if step is not None:
                    step.decline()
                reduction = Reduction(kind.reduction.op)
                steps = long.allreduce(kind.call(stream), hearing.entries, channel.rank, channel.ranks, channel.machine, reduction)
        begun = (Begun(turn) if left else hearing.begun(turn))._replace(step=taken, promise=promise)
    except BaseException as error:
        if channel.turn == before:
            channel.next_turn()
        entered = entered or (entering and has_entered(error))
        reached = _Reached(channel.turn, hearing, kind, stream, step, promise, (array, source), flags, left, committed, entered)
        begun = reached.begun(error)
    operation = Operation(channel, lambda: steps, entries, begun=begun)  # which sees to errors itself
    reduced: SparseStream = outcome(operation)
    return reduced


class _Reached(NamedTuple):
    """How far an operation has come that was hit by an error."""

    turn: int
    hearing: Any
    kind: Any
    stream: SparseStream
    step: Any
    promise: DenseAllreduce | None
    arrays: tuple[NDArray[Any] | None, Any]
    flags: int
    left: bool
    committed: bool
    entered: bool

    def begun(self, hit: BaseException) -> Begun:
        """Where the operation stands. Of what else hits this rank here, interrupts alone are raised in the end."""
        for _ in range(_RETRIES):
            try:
                return self._begun(hit)
            except BaseException as another:
                hit = hit if isinstance(another, Exception) else another
        return Begun(self.turn, shared=False, taken=False, hit=hit)

    def _begun(self, hit: BaseException) -> Begun:
        if isinstance(self.step, SharedStep):
            self.step.abandon()
        promise, (array, source) = self.promise, self.arrays
        if array is not None and self.flags == long.READY and promise is None:
            promise = _entry(self.kind, self.stream, array, source)
        if self.left:
            begun = Begun(self.turn)
        elif self.hearing is not None and self.hearing.has_told(self.turn):
            begun = self.hearing.begun(self.turn)
        else:
            begun = Begun(self.turn, shared=False, taken=False)
        return begun._replace(promise=promise, committed=self.committed, entered=self.entered, hit=hit)


def _entry(kind: _Kind, stream: SparseStream, array: NDArray[Any], source: NDArray[Any]) -> DenseAllreduce:
    """The step in which this rank enters MPI's own sum, of an array into another or in place."""
    if source is array:
        return DenseAllreduce(SparseStream._dense_form(array, stream.size), kind.reduction.op, soon=True)
    summand = kind.reduction.enter(stream) if stream._array is not None else SparseStream._dense_form(source, stream.size)
    return DenseAllreduce(summand, kind.reduction.op, soon=True, into=array)


def _count_told(stream: SparseStream, flags: int, channel: Channel) -> None:
    """Count what we have told the others, and that we wait for what they tell."""
    payload = packed.packed_bytes(stream) if flags == long.PACKED else 0
    for counts in traces:
        counts.share(agreement.RECORD.size, payload, channel.ranks)
        counts.rounds += 1


def _count_result(entries: int, result: SparseStream, sent: int, received: int, messages: int = 0) -> None:
    """Count what else an operation moved, waiting once more if it sent anything."""
    for counts in traces:
        counts.move(sent, received, messages)
        counts.rounds += messages > 0
        counts.complete(entries, result)


def _awaited(step: Any) -> Schedule:
    result: SparseStream = yield step
    return result


def _new_kind(stream: SparseStream, op: str, channel: Channel) -> _Kind | None:
    call, intent = long.make_call(stream, op, AUTO, {})
    if call is None:
        return None
    kind = _Kind(call, intent, channel)
    _make_room(channel.kinds)
    channel.kinds[stream.size, stream.dtype, stream._stored.shape[1:], op] = kind
    return kind


def _make_room(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= _REMEMBERED:
        remembered.clear()


def _new_hearings(channel: Channel) -> list[Any]:
    board = channel.board
    channel.hearings = [_ByMessages(channel)] if board is None else [_OnBoard(channel, slot, board.polls) for slot in board.slots]
    return channel.hearings


def _arrays(dense: NDArray[Any] | None, kind: _Kind) -> tuple[NDArray[Any], NDArray[Any]]:
    """Arrays for the sum and for what MPI adds up, which may be one, or a ``dense`` stream's own.

    A sum in place takes 0.78 to 0.92 of the time of one into other memory: 32 and 128 MiB at P = 2 and 4, 64 MiB at P = 2, 3, 4 and 8. A
    dense stream is copied for that only where zeros come from the system.
    """
    shape, dtype = kind.streams.shape, kind.streams.dtype
    if kind.nbytes <= memory.FRESH:
        array = np.zeros(shape, dtype) if dense is None else np.empty(shape, dtype)
        return array, array
    array = memory.empty(shape, dtype)
    return array, array if dense is None else dense


def _fill(source: NDArray[Any], stream: SparseStream, array: NDArray[Any]) -> None:
    """Write the stream into what MPI adds up, unless that is the stream's own."""
    dense = stream._array
    if dense is None:
        if source.nbytes > memory.FRESH:
            source.fill(0)
        kernels.scatter_set(*stream._entries(), 0, source)
    elif source is array:
        np.copyto(array, dense)
