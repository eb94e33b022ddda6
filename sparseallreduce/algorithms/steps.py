"""The steps of the algorithms: what a rank requests of the network, independent of the transport.

An algorithm is a generator. It yields one of these steps, is resumed with the step's result, and returns the reduced stream. Messages
between a pair of ranks arrive in the order in which they were sent.

====================================== =========================================================================================
step                                   result
====================================== =========================================================================================
``Send(dest, stream)``                 None, immediately; the stream is frozen and sent in the background
``Recv(source)``                       the next stream from ``source``
``RecvAny(sources, ...)``              ``(source, stream)``, the first that arrives from any of ``sources``
``Exchange(partner, stream, merging)`` the stream that ``partner`` sends in exchange
``Shift(dest, stream, source, ...)``   the stream from ``source``, while this rank's is sent to ``dest``
``DenseAllreduce(stream, op, ...)``    the reduction of the dense streams of all ranks
``DenseAllgather(stream, ranges, op)`` the dense stream that consists of the dense blocks of all ranks
``HostReduceScatter(stream, ...)``     this rank's part of the reduction of the streams of its host's ranks; None without a part
``HostGather(part, members, ...)``     the stream that consists of the parts of a host's ranks
``Quantise(stream, holder, place)``    the stream as its receivers decode it, immediately
``Layout()``                           the layout of ranks on hosts as a ``Hosts``, immediately
``Constants()``                        the ``Machine`` of the cost model, equal on all ranks, immediately; None if unknown
``Share(record)``                      the list of the records of all ranks
``Clock()``                            the time in seconds, as a float
``DeviceMessages()``                   whether messages may carry streams in device memory, immediately
====================================== =========================================================================================

In a ``Send``, an ``Exchange`` or a ``Shift``, a tuple of streams may replace one: they are sent in one message and arrive as a tuple, if
the other side also passes a tuple, or waits for several streams. With a ``merging``, the result is its reduction of the arriving stream,
which it may start before all pieces have arrived.
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
    """Send to ``dest`` and continue."""

    dest: int
    stream: Payload


class Recv(NamedTuple):
    """Wait for the next message from ``source``."""

    source: int


class RecvAny(NamedTuple):
    """Wait for a message from any of ``sources``."""

    sources: Set[int]
    several: bool = False  # whether the message has several streams, returned as a tuple


class Exchange(NamedTuple):
    """Send to ``partner``, and wait for its message."""

    partner: int
    stream: Payload
    merging: Merging | None = None


class Shift(NamedTuple):
    """Send to ``dest``, and wait for the message of ``source``: a step of a ring."""

    dest: int
    stream: Payload
    source: int
    merging: Merging | None = None


class Quantise(NamedTuple):
    """Convert a stream to the values that its receivers decode, which differ if the value codec is lossy.

    An algorithm does so before it sends a stream that it also uses itself, or that other ranks forward. Random numbers depend on the last
    two fields, which must be equal on ranks that hold the same stream.
    """

    stream: SparseStream
    holder: int  # the rank that holds this stream, or the lowest of several
    place: int  # distinguishes the streams of one holder


class DenseAllreduce(NamedTuple):
    """Reduce dense streams, on one range, over all ranks.

    The array of the stream must be owned by the algorithm, and receives the result: up to some megabytes, MPI's sum in place took 0.7 to
    0.9 of the time.
    """

    stream: SparseStream
    op: Operator


class DenseAllgather(NamedTuple):
    """Join the dense blocks of all ranks; rank r holds the range ``ranges[r]``, possibly empty, and together they cover the whole.

    ``in_step`` is that of :func:`~sparseallreduce.algorithms.exchange.gather_parts`, for blocks that it gathers.
    """

    stream: SparseStream
    ranges: tuple[tuple[int, int], ...]
    op: Operator
    in_step: bool = False


class HostReduceScatter(NamedTuple):
    """Reduce the streams of a host's ranks; the rank at place l gets the part on ``[bounds[l], bounds[l + 1])``.

    It uses shared memory if available, otherwise messages.
    """

    stream: SparseStream
    members: tuple[int, ...]  # the ranks of the host, at least as many as there are parts
    bounds: tuple[int, ...]
    reduction: Reduction


class HostGather(NamedTuple):
    """Join the parts that a host's ranks hold after :class:`HostReduceScatter`; ranks without a part pass None."""

    part: SparseStream | None
    members: tuple[int, ...]
    bounds: tuple[int, ...]
    reduction: Reduction


class Layout(NamedTuple):
    """Request the layout of ranks on hosts."""


class Constants(NamedTuple):
    """Request the constants of the network and of its processors."""


class Share(NamedTuple):
    """Send a record to all ranks; it has the same length on every rank."""

    record: bytes


class Clock(NamedTuple):
    """Read the clock, real or virtual."""


class DeviceMessages(NamedTuple):
    """Ask whether messages may carry streams in device memory; arriving streams may then be there, too."""


Host: TypeAlias = HostReduceScatter | HostGather
Asked: TypeAlias = Layout | Constants | Clock | DeviceMessages
Step: TypeAlias = Send | Recv | RecvAny | Exchange | Shift | Quantise | DenseAllreduce | DenseAllgather | Host | Asked | Share
Schedule: TypeAlias = Generator[Step, Any, SparseStream]
