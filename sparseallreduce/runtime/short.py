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
from sparseallreduce.algorithms.agreement import Agreed, Intent, digest_of
from sparseallreduce.runtime import engine
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["allreduce"]

_WORD = struct.Struct(engine.PREFIX.format + agreement.RECORD.format.lstrip("<"))  # of a rank: all it says before its payload
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
        stored = call.stream._stored
        self.channel = channel
        self.arguments = tuple(call)[1:]  # behind the stream
        self.terms = intent.terms
        self.digest = digest_of(intent.terms)
        self.reduction = Reduction(call.op)
        self.room = long.room(channel.ranks)
        self.shape = (call.stream.size, *stored.shape[1:])
        self.zero = stored.dtype.type(0)
        self.native = engine.has_native_sum(call.op, stored.dtype, math.prod(self.shape))
        self.others = [rank for rank in range(channel.ranks) if rank != channel.rank]
        self._dense: dict[int, bool] = {}
        self.renew()

    def renew(self) -> None:
        """Take new memory for what the ranks say."""
        self.rows = np.empty((self.channel.ranks, _WORD.size + self.room), np.uint8)
        self.heard = [memoryview(row) for row in self.rows]  # type: ignore[arg-type]

    def dense(self, call: long.Call, entries: int) -> bool:
        """Whether MPI's own sum is expected to be chosen for streams of that many entries."""
        expected = self._dense.get(entries)
        if expected is None:
            _make_room(self._dense)
            channel = self.channel
            expected = self.native and long.expects_dense(call, channel.ranks, self.reduction, channel.machine)
            self._dense[entries] = expected
        return expected


class _Opening(NamedTuple):
    """What a rank has at hand before it says anything."""

    flags: int = 0
    payload: bytes = b""  # the stream, if it is packed
    array: NDArray[Any] | None = None  # zeros for its entries, or a copy of them if it is dense


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
    stored = stream._stored
    kind = channel.kinds.get((stream.size, stored.dtype, stored.shape[1:], op)) or _new_kind(stream, op, channel)
    if kind is None:
        return None
    call, entries, begun = long.Call(stream, *kind.arguments), len(stored), None
    requests: list[MPI.Request] = []
    try:
        opening = _opening(call, entries, kind, patient)
        begun = engine.Begun(channel.next_tag())
        word = _WORD.pack(channel.sound, len(opening.payload), True, opening.flags, kind.digest, entries) + opening.payload
        requests = _told(word, kind, begun.tag)
        if opening.array is not None and stream._array is None:
            kernels.scatter_set(*stream._entries(), 0, opening.array)
        agreed = _agreed(word, kind) if engine.done_within(requests) else None
        if agreed is None:
            steps = long.operation(call, Intent(kind.terms, entries), channel.rank, channel.ranks, channel.machine, patient)
            begun = engine.Begun(begun.tag, steps.send(None), requests, _taken(word, kind))  # a step which has been taken
        elif agreed.flags & long.PACKED:
            return kind.reduction.leave(kind.reduction.many(long.unpacked(agreed.payloads, agreed.entries, stream, kind.reduction)))
        elif agreed.flags & long.READY and opening.array is not None:
            channel.collectives.Allreduce(MPI.IN_PLACE, opening.array, MPI.SUM)
            return kind.reduction.leave(SparseStream._dense_form(opening.array, stream.size))
        else:
            steps = long.allreduce(call, agreed.entries, channel.rank, channel.ranks, channel.machine, Reduction(call.op))
    except Exception as error:
        steps = engine.failed(error)
        if begun is None:
            begun = engine.Begun(channel.next_tag())
        else:  # something may still be on its way into this memory
            begun = engine.Begun(begun.tag, None, requests, kind.rows)
            kind.renew()
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


def _opening(call: long.Call, entries: int, kind: _Kind, patient: bool) -> _Opening:
    """What this rank is ready for. Memory is taken before it says so, and filled while the others hear of it."""
    payload = long.packed(call, kind.room)
    if payload is not None:
        return _Opening(long.PACKED, payload)
    if not patient or not kind.dense(call, entries):
        return _Opening()
    dense = call.stream._array
    return _Opening(long.READY, array=memory.full(kind.shape, kind.zero) if dense is None else memory.copy(dense))


def _told(word: bytes, kind: _Kind, tag: int) -> list[MPI.Request]:
    """Tell all ranks, and begin to hear them."""
    comm = kind.channel.collectives
    requests = [comm.Irecv(kind.heard[other], other, tag) for other in kind.others]
    return requests + [comm.Isend(word, other, tag) for other in kind.others]


def _agreed(word: bytes, kind: _Kind) -> Agreed | None:
    """What all ranks have said, if they mean the same and nothing is wrong anywhere."""
    kind.heard[kind.channel.rank][: len(word)] = word
    entries, payloads, common = [], [], 0xFF
    for heard in kind.heard:
        sound, length, well, flags, digest, count = _WORD.unpack_from(heard)
        if not sound or not well or digest != kind.digest:
            return None
        common &= flags
        entries.append(count)
        payloads.append(heard[_WORD.size : _WORD.size + length].tobytes())
    return Agreed(tuple(entries), tuple(payloads), common)


def _taken(word: bytes, kind: _Kind) -> NDArray[np.uint8]:
    """The memory into which the ranks say their words, ours among them; the next operation has its own."""
    rows = kind.rows
    rows[kind.channel.rank, : len(word)] = np.frombuffer(word, np.uint8)
    kind.renew()
    return rows
