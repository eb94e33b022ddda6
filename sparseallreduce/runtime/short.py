"""The short way through a blocking allreduce by "auto", without any object that stands for an operation in flight.

An operation on a few kilobytes takes some twenty microseconds, and the agreement adds as much to MPI's allreduce of a dense vector.
Checked arguments, an intent, a schedule and a request would take more than that again, all the more where their code is not in the
cache, and nobody needs them while the ranks agree. Once something is out of the ordinary, this way leads into the long one. What
the ranks tell each other is the same on both, so that no rank needs to know which one another takes.
"""

from __future__ import annotations

import math
import struct
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms import AUTO, agreement
from sparseallreduce.algorithms import allreduce as long
from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.steps import DenseAllreduce
from sparseallreduce.runtime import engine
from sparseallreduce.streams import kernels, memory, packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["allreduce"]

_WORD = struct.Struct(engine.PREFIX.format + agreement.RECORD.format.lstrip("<"))  # of a rank: all it says before its payload
# Bytes up to which the dense form of a sparse stream is summed in place: 16 MiB took 0.7 of the time of a sum into other memory, 64 MiB
# under Open MPI 1.2. A dense stream is copied for that only where zeros come from the system.
_IN_PLACE = 1 << 25
_REMEMBERED = 256  # kinds of streams, and sizes of streams of a kind


class _Kind:
    """What operations on streams of one size, dtype and width have in common.

    Parameters
    ----------
    call, intent
        Of one of them.
    channel : Channel
    """

    def __init__(self, call: long.Call, intent: Intent, channel: engine.Channel) -> None:
        dtype = call.stream.dtype
        self.channel = channel
        self._call = call
        self.terms = intent.terms
        self.digest = digest_of(intent.terms)
        self.reduction = Reduction(call.op)
        self.streams = packed.Kind.of(call.stream, self.reduction)
        self.native = engine.has_native_sum(call.op, dtype, math.prod(self.streams.shape))
        self.others = [rank for rank in range(channel.ranks) if rank != channel.rank]
        self.beginnings: dict[int, int] = {}  # how operations on so many entries begin

    def call(self, stream: SparseStream) -> long.Call:
        """The call that is made for one of them."""
        return self._call._replace(stream=stream)

    def begins(self, stream: SparseStream) -> int:
        """How an operation begins: as :func:`~sparseallreduce.algorithms.allreduce.begins`; remembered by its entries."""
        channel = self.channel
        flags = long.begins(self.call(stream), channel.ranks, self.reduction, channel.machine)
        if flags == long.READY and not self.native:
            flags = 0
        _make_room(self.beginnings)
        self.beginnings[stream.stored] = flags
        return flags


class _Hearing:
    """Where the words of all ranks come into, for operations of a channel one after the other."""

    def __init__(self, ranks: int) -> None:
        self.rows = packed.Rows(ranks, _WORD.size, long.room(ranks))
        self.places = [memoryview(row) for row in self.rows.bytes]  # type: ignore[arg-type]


class _Agreed(NamedTuple):
    """What a rank knows of all ranks once they agree; what they have packed lies in the rows."""

    entries: list[int]
    lengths: list[int]  # of what they have packed, bytes
    flags: int  # that all have set


def allreduce(stream: SparseStream, op: str, channel: engine.Channel, patient: bool) -> SparseStream | None:
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
    stored, dense = stream._stored, stream._array
    kind = channel.kinds.get((stream.size, stored.dtype, stored.shape[1:], op)) or _new_kind(stream, op, channel)
    if kind is None:
        return None
    entries, tag, payload = len(stored), channel.next_tag(), b""
    array: NDArray[Any] | None = None
    requests: list[MPI.Request] | None = None
    step = rows = None
    try:
        hearing = channel.hearing or _new_hearing(channel)
        flags = kind.beginnings.get(entries, -1)
        if flags < 0:
            flags = kind.begins(stream)
        # Memory is taken before this rank says that it is ready, and filled while the others hear of it: they may be waiting for that.
        if flags == long.PACKED:
            payload = packed.pack(stream)
        elif flags == long.READY and patient:
            array, source = _arrays(dense, kind)
        else:
            flags = 0
        word = _WORD.pack(channel.sound, len(payload), True, flags, kind.digest, entries) + payload
        requests = _told(word, kind, hearing.places, tag)
        if array is not None:
            _fill(source, stream, array)
        agreed = _agreed(word, flags, kind, hearing.places) if engine.done_within(requests, channel.crowded) else None
        if agreed is None:
            intent, ready = Intent(kind.terms, entries), None
            if array is not None:
                summand = kind.reduction.enter(stream) if source is dense else SparseStream._dense_form(source, stream.size)
                ready = DenseAllreduce(summand, kind.reduction.op, soon=True, into=None if source is array else array)
            steps = long.operation(kind.call(stream), intent, channel.rank, channel.ranks, channel.machine, patient, ready)
            step, rows = steps.send(None), _taken(word, channel, hearing)  # a step which has been taken
        elif agreed.flags == long.PACKED:
            return hearing.rows.reduced(agreed.entries, agreed.lengths, kind.streams, kind.reduction)
        elif agreed.flags == long.READY and array is not None:
            channel.collectives.Allreduce(MPI.IN_PLACE if source is array else source, array, MPI.SUM)
            array.flags.writeable = False
            return SparseStream._dense_form(array, stream.size)
        else:
            reduction, requests = Reduction(kind.reduction.op), None
            steps = long.allreduce(kind.call(stream), agreed.entries, channel.rank, channel.ranks, channel.machine, reduction)
    except Exception as error:
        steps = engine.failed(error)
        if requests is not None:  # something may still be on its way into this memory
            rows, channel.hearing = hearing.rows.bytes, None
    begun = engine.Begun(tag, step, requests, rows)
    result: SparseStream = engine.outcome(engine.Operation(channel, lambda: steps, entries, begun=begun))
    return result


def _new_kind(stream: SparseStream, op: str, channel: engine.Channel) -> _Kind | None:
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


def _new_hearing(channel: engine.Channel) -> _Hearing:
    channel.hearing = hearing = _Hearing(channel.ranks)
    return hearing


def _arrays(dense: NDArray[Any] | None, kind: _Kind) -> tuple[NDArray[Any], NDArray[Any]]:
    """Arrays for the sum and for what MPI adds up, which may be one, or a ``dense`` stream's own."""
    shape, dtype = kind.streams.shape, kind.streams.dtype
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes <= memory.FRESH:
        array = np.zeros(shape, dtype) if dense is None else np.empty(shape, dtype)
        return array, array
    array = memory.empty(shape, dtype)
    if dense is not None:
        return array, dense
    return array, array if nbytes <= _IN_PLACE else memory.empty(shape, dtype)


def _fill(source: NDArray[Any], stream: SparseStream, array: NDArray[Any]) -> None:
    """Write the stream into what MPI adds up, unless that is the stream's own."""
    dense = stream._array
    if dense is None:
        if source.nbytes > memory.FRESH:
            source.fill(0)
        kernels.scatter_set(*stream._entries(), 0, source)
    elif source is array:
        np.copyto(array, dense)


def _told(word: bytes, kind: _Kind, places: list[memoryview], tag: int) -> list[MPI.Request]:
    """Tell all ranks, and begin to hear them."""
    comm, others = kind.channel.collectives, kind.others
    requests = [comm.Irecv(places[other], other, tag) for other in others]
    return requests + [comm.Isend(word, other, tag) for other in others]


def _agreed(word: bytes, flags: int, kind: _Kind, places: list[memoryview]) -> _Agreed | None:
    """What all ranks have said, if they mean the same and nothing is wrong anywhere."""
    places[kind.channel.rank][: len(word)] = word
    entries, lengths = [], []
    for place in places:
        sound, length, well, theirs, digest, count = _WORD.unpack_from(place)
        if not sound or not well or digest != kind.digest:
            return None
        flags &= theirs
        entries.append(count)
        lengths.append(length)
    return _Agreed(entries, lengths, flags)


def _taken(word: bytes, channel: engine.Channel, hearing: _Hearing) -> NDArray[np.uint8]:
    """The memory into which the ranks say their words, ours among them; the next operation has its own."""
    rows = hearing.rows.bytes
    rows[channel.rank, : len(word)] = np.frombuffer(word, np.uint8)
    channel.hearing = None
    return rows
