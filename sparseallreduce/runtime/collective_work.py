"""The work of the collectives besides allreduce, kept between calls with the same arguments as that of sums is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms import AUTO
from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.collectives.allgather import DISJOINT, RANGES
from sparseallreduce.algorithms.collectives.call import CollectiveCall, Finish, collective_problem, entered, joined, run_collective
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.runtime.predictions import byte_limits, collective_beginning
from sparseallreduce.runtime.shortcuts.base import Shortcut
from sparseallreduce.runtime.shortcuts.sent import Sent
from sparseallreduce.runtime.signature import Choice, Signature
from sparseallreduce.runtime.work import OTHER, Work
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire import HEADER_BYTES, Encoding

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["Gathering", "Reducing", "sent_limit", "work_of"]


def work_of(made: CollectiveCall, intent: Intent, channel: Channel) -> Gathering | Reducing:
    """Return the work of an operation with these arguments."""
    is_gathered = made.collective.name == "bcast" or made.collective.join in (RANGES, DISJOINT)
    return (Gathering if is_gathered else Reducing)(made, intent, channel)


class Reducing(Signature):
    """The work of a reduce or a reduce_scatter, whose result, or a part of it, goes to this rank.

    It uses a shortcut of the sum of all streams, or an algorithm of its own.

    Parameters
    ----------
    made, intent
        The call and the intent of one such operation.
    channel : Channel
        The channel of the communicator.
    """

    def __init__(self, made: CollectiveCall, intent: Intent, channel: Channel) -> None:
        super().__init__(made.call, intent, channel)
        self._made = made._replace(call=self._call)
        self.finish: Finish = made.finish(channel.rank, channel.ranks)

    def takes_collectives(self) -> bool:
        return self._call.algorithm == AUTO

    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Schedule:
        if self._call.algorithm == AUTO:
            self.record_entries(stream, entries)
        return _schedule(self._made, stream, entries, self._channel)

    def note(self, stream: SparseStream | None) -> bytes:
        return b""  # none of these algorithms uses the positions of entries

    def _chosen(self, stream: SparseStream) -> Choice:
        if self._call.algorithm != AUTO:
            return OTHER, ()
        made, ranks = self._made._replace(call=self._call._replace(stream=stream)), self._channel.ranks
        problem = collective_problem(made, [stream.stored] * ranks, self._channel.hosts)
        name, machine = made.collective.name, self._machine
        return self._choice(collective_beginning(name, problem, stream, ranks, self._reduction, machine, **self._surroundings))


class Gathering(Work):
    """The work of an allgather or a broadcast, which sends streams unchanged.

    Parameters
    ----------
    made, intent
        The call and the intent of one such operation.
    channel : Channel
        The channel of the communicator.
    """

    digest: int
    encoding: Encoding

    def __init__(self, made: CollectiveCall, intent: Intent, channel: Channel) -> None:
        stream, self._channel = made.call.stream, channel
        self._made = made._replace(call=made.call._replace(stream=None))  # so that the stream is not kept as long as the channel
        self._intent, self.digest, self.encoding = intent, digest_of(intent.terms), made.call.encoding
        self.on_device = stream is not None and stream.on_device
        self.finish: Finish = made.finish(channel.rank, channel.ranks)
        self._others_fit = True  # whether the streams of the other ranks are short enough for the shortcut, as far as is known
        # A named algorithm takes no shortcut, and neither do GPU streams or values that every message quantises.
        self._takes_shortcut = made.call.algorithm == AUTO and self.encoding.is_exact and not self.on_device

    def intent(self, stream: SparseStream | None) -> Intent:
        return self._intent._replace(entries=self.entries(stream))

    def entries(self, stream: SparseStream | None) -> int:
        return self._made.collective.entries(stream, self._channel.rank)

    def takes_collectives(self) -> bool:
        return False

    def choose(self, stream: SparseStream | None, level: int) -> Sequence[Shortcut]:
        return (self._sent,) if self._takes_shortcut and self._others_fit else ()

    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Schedule:
        if self._made.collective.name != "bcast" and stream is not None:
            entry = stream._stored[:1].nbytes + index_dtype(stream.size).itemsize
            self._others_fit = HEADER_BYTES + max(entries) * entry <= sent_limit(self._channel)
        return _schedule(self._made, stream, entries, self._channel)

    def sends_with_record(self, stream: SparseStream | None) -> bool:
        """Return True if this rank's stream is short enough to be sent with its record, so that the shortcut is taken if all are."""
        return self._takes_shortcut and self._sent.arm(0, stream) != 0

    @cached_property
    def _sent(self) -> Sent:
        """The shortcut, once the channel is ready."""
        made, channel = self._made, self._channel
        reduction = Reduction(made.call.op, made.call.switch_density)
        return Sent(
            made.collective.name != "bcast" or channel.rank == made.collective.root,
            lambda stream: entered(made, stream, reduction),
            lambda streams: joined(made, streams, reduction),
            sent_limit(channel),
            channel.rank,
        )


def sent_limit(channel: Channel) -> int:
    """Return the largest message in bytes that is sent with the record of a rank: between hosts, one that MPI sends immediately."""
    always, room, _ = byte_limits(channel.ranks, channel.shares_memory, 0)
    return room if channel.shares_memory else always


def _schedule(made: CollectiveCall, stream: Any, entries: Sequence[int], channel: Channel) -> Schedule:
    call = made.call._replace(stream=stream)
    reduction = Reduction(call.op, call.switch_density)
    return run_collective(made._replace(call=call), entries, channel.rank, channel.ranks, channel.machine, reduction, channel.hosts)
