"""The vocabulary of the algorithms: what a rank asks of the network, and nothing of how it travels.

An algorithm is a generator. It yields one of these steps, is resumed with the step's result, and returns the reduced stream.
Between one pair of ranks, messages arrive in the order in which they were sent.

====================================== =========================================================================================
step                                   result
====================================== =========================================================================================
``Send(dest, stream)``                 None, at once; the stream is frozen and travels in the background
``Recv(source)``                       the next stream from ``source``
``RecvAny(sources, ...)``              ``(source, stream)``, the first that arrives from any of ``sources``
``Exchange(partner, stream, merging)`` the stream that ``partner`` exchanges for it
``Shift(dest, stream, source, ...)``   the stream from ``source``, while ours travels to ``dest``
``DenseAllreduce(stream, op, ...)``    the reduction of the dense streams of all ranks
``DenseAllgather(stream, ranges, op)`` the dense stream that the dense blocks of all ranks make up
``HostReduceScatter(stream, ...)``     our part of the reduction of the streams of a host's ranks; None for a rank without one
``HostGather(part, members, ...)``     the stream that the parts of a host's ranks make up
``Quantise(stream, holder, place)``    the stream as receivers will know it, at once
``Layout()``                           which ranks are on which host, at once, as a ``Hosts``
``Constants()``                        of the cost model, at once and the same on all ranks, as a ``Machine``; None if unknown
``Share(record)``                      the list of the records of all ranks
``Clock()``                            the time in seconds, as a float
``DeviceMessages()``                   whether messages may carry streams as they lie on a device, at once
====================================== =========================================================================================

In a ``Send``, an ``Exchange`` or a ``Shift``, a tuple of streams may stand for one: they travel in one message and arrive as a tuple, if
the other side gives a tuple too, or waits for several streams. With a ``merging``, the result is the reduction that it makes of the stream
which arrives, on whose pieces it may begin before all are there.
"""

from __future__ import annotations

from collections.abc import Generator, Set
from typing import Any, NamedTuple, TypeAlias

from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "Asked",
    "Clock",
    "Constants",
    "DenseAllgather",
    "DenseAllreduce",
    "DeviceMessages",
    "Exchange",
    "HostGather",
    "HostReduceScatter",
    "Layout",
    "Payload",
    "Quantise",
    "Recv",
    "RecvAny",
    "Schedule",
    "Send",
    "Share",
    "Shift",
    "Step",
]

Payload: TypeAlias = "SparseStream | tuple[SparseStream, ...]"


class Send(NamedTuple):
    """Send to ``dest`` and go on."""

    dest: int
    stream: Payload


class Recv(NamedTuple):
    """Wait for the next message from ``source``."""

    source: int


class RecvAny(NamedTuple):
    """Wait for a message from any of ``sources``."""

    sources: Set[int]
    several: bool = False  # whether it is of several streams, and a tuple of them is the result


class Exchange(NamedTuple):
    """Send to ``partner``, and wait for what it sends."""

    partner: int
    stream: Payload
    merging: Merging | None = None


class Shift(NamedTuple):
    """Send to ``dest``, and wait for what ``source`` sends: a step of a ring."""

    dest: int
    stream: Payload
    source: int
    merging: Merging | None = None


class Quantise(NamedTuple):
    """Take a stream as its receivers will know it, which is another where values are sent with loss.

    An algorithm does so before it sends what it goes on with itself, or what others hand on. What is drawn at random is the same wherever
    the last two fields are: on ranks that hold the same stream they have to be.
    """

    stream: SparseStream
    holder: int  # the rank, or the first of those that hold this stream
    place: int  # tells apart the streams of one holder


class DenseAllreduce(NamedTuple):
    """Reduce dense streams, on one range, over all ranks.

    The array of the stream is the algorithm's own, and where the reduction goes: up to some megabytes, MPI's sum in place took from
    0.7 to 0.9 of the time.
    """

    stream: SparseStream
    op: Operator


class DenseAllgather(NamedTuple):
    """Join the dense blocks of all ranks; rank r holds the range ``ranges[r]``, which may be empty, and all cover the whole."""

    stream: SparseStream
    ranges: tuple[tuple[int, int], ...]
    op: Operator


class HostReduceScatter(NamedTuple):
    """Reduce the streams of a host's ranks; the rank at place l gets the part on ``[bounds[l], bounds[l + 1])``.

    In memory that they share where there is any, and else by messages.
    """

    stream: SparseStream
    members: tuple[int, ...]  # the ranks of the host, at least as many as there are parts
    bounds: tuple[int, ...]
    reduction: Reduction


class HostGather(NamedTuple):
    """Join the parts that a host's ranks hold, as :class:`HostReduceScatter` has left them; ranks without one give None."""

    part: SparseStream | None
    members: tuple[int, ...]
    bounds: tuple[int, ...]
    reduction: Reduction


class Layout(NamedTuple):
    """Ask where the ranks are."""


class Constants(NamedTuple):
    """Ask for the constants of the network and of the processors on it."""


class Share(NamedTuple):
    """Tell all ranks a few bytes, as many on every rank."""

    record: bytes


class Clock(NamedTuple):
    """Read the clock, real or virtual."""


class DeviceMessages(NamedTuple):
    """Ask whether messages may carry streams as they lie on a device; then those that come may lie there, too."""


Host: TypeAlias = HostReduceScatter | HostGather
Asked: TypeAlias = Layout | Constants | Clock | DeviceMessages
Step: TypeAlias = Send | Recv | RecvAny | Exchange | Shift | Quantise | DenseAllreduce | DenseAllgather | Host | Asked | Share
Schedule: TypeAlias = Generator[Step, Any, SparseStream]
