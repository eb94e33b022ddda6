"""The point-to-point messages of a channel: streams, and announcements that a rank has failed.

Every message carries the tag of its operation. Each call receives whatever has arrived: for operations that have started here, for those
that will start, and for those that are over. Messages for the latter are discarded, so that nothing remains in MPI's queues and no message
is taken for one of another operation.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.errors import WireError
from sparseallreduce.streams import memory, wire
from sparseallreduce.streams.kernels.devices import Queue
from sparseallreduce.streams.stream import SparseStream

__all__ = ["INLINE_BYTES", "PIECE_BYTES", "Box", "Failure", "Leftovers", "Mailbox", "Sent", "all_done"]

# The arrays of a stream are sent without packing, after an envelope with the headers, and received into arrays of their own: for 1.3 MB
# between two ranks of one host that took a quarter of the time of a packed message. Short messages are packed.
INLINE_BYTES = 1 << 14
PIECE_BYTES = 1 << 30  # largest piece of a part, since counts have 32 bits before MPI 4
_FAILURE = b"SARX"  # marks an announcement of a failure, in place of a stream
_NOTHING = np.empty(0, np.uint8)
_TEXT = 400  # largest number of characters of an error's text that are sent

Bytes = NDArray[np.uint8]


class Failure(NamedTuple):
    """An announcement that a rank has failed.

    ``number`` is the number of the operation, or of the attempt to prepare the channel; in the latter case ``through`` is the last
    operation that waited for it. With ``reply`` the sender had already completed the operation. With ``later`` it has completed the
    operation, and sent all that others need to complete it, too: the failure concerns the operations after it.
    """

    number: int
    culprit: int
    error: str
    text: str
    through: int = 0
    reply: bool = False
    later: bool = False

    @classmethod
    def of(cls, error: BaseException, number: int, culprit: int, through: int = 0) -> Failure:
        """Return the announcement of an error on this rank."""
        text = str(error)[:_TEXT]
        return cls(number, culprit, type(error).__name__[:100], f"rank {culprit} gave up" + (f": {text}" if text else ""), through)

    def announcement(self) -> dict[str, str]:
        """Return the form that :func:`~sparseallreduce.algorithms.agreement.common_error` takes."""
        return {"error": self.error, "text": self.text}

    def packed(self) -> Bytes:
        """Return the message as bytes."""
        return np.frombuffer(_FAILURE + json.dumps(self, ensure_ascii=False).encode("utf-8", "replace"), np.uint8)

    @classmethod
    def unpacked(cls, message: Bytes) -> Failure | None:
        """Return the announcement in a message, or None if the message is something else."""
        if message[:4].tobytes() != _FAILURE:
            return None
        return cls(*json.loads(message[4:].tobytes()))


@dataclass
class Sent:
    """An outgoing message, whose memory must be kept and whose requests must be tested until they are complete."""

    messages: list[Bytes]
    requests: list[MPI.Request] = field(default_factory=list)  # one for each message, or none if sending failed


class Arrival:
    """An incoming message, whose first part has arrived."""

    nbytes = 0  # bytes received
    requests: list[MPI.Request] = []  # noqa: RUF012 - never changed
    memory: Any = None  # arrays that they fill

    def complete(self) -> bool:
        """Return True if the whole message has arrived."""
        raise NotImplementedError

    def streams(self) -> list[SparseStream]:
        """Return the streams of a complete message."""
        raise NotImplementedError


class InPieces(Arrival):
    """A message whose packets are decoded as they arrive."""

    def __init__(self) -> None:
        self.assembly: wire.Assembly = wire.Assembly()

    def take(self, packet: Bytes) -> None:
        """Decode the next packet."""
        self.nbytes += len(packet)
        self.assembly.take(packet)

    def complete(self) -> bool:
        return self.assembly.complete

    def streams(self) -> list[SparseStream]:
        return self.assembly.streams


class InParts(Arrival):
    """A message whose headers have arrived, and whose parts are received into arrays of their own."""

    headers: list[wire.Header]
    memory: Any

    def __init__(self, headers: list[wire.Header], parts: list[Bytes], requests: list[MPI.Request], queue: Queue | None = None) -> None:
        self.headers, self.memory, self.requests, self._queue = headers, parts, requests, queue
        self.nbytes: int = wire.HEADER_BYTES * len(headers) + sum(map(len, parts))

    def streams(self) -> list[SparseStream]:
        with self._queue or nullcontext():
            return wire.join(self.headers, self.memory)

    def complete(self) -> bool:
        """Return True if all parts have arrived.

        Raises
        ------
        WireError
            If a part is shorter than its header says.
        """
        if not self.requests:
            return True
        statuses = [MPI.Status() for _ in self.requests]
        if not MPI.Request.Testall(self.requests, statuses):
            return False
        self.requests: list[MPI.Request] = []
        received, announced = sum(status.Get_count(MPI.BYTE) for status in statuses), sum(map(len, self.memory))
        if received != announced:
            raise WireError(f"a message announces a payload of {announced} bytes, but {received} bytes arrived: it was truncated")
        return True


@dataclass
class Box:
    """The messages that have arrived for one operation."""

    arrivals: dict[int, deque[Arrival]] = field(default_factory=dict)  # by source
    failures: dict[int, Failure] = field(default_factory=dict)  # by source
    queue: Queue | None = None  # queue of the device on which its parts are received
    error: BaseException | None = None  # error of this rank while it received a message for this operation

    def arriving(self, source: int) -> InPieces | None:
        """Return the next message of a source if it arrives in pieces, otherwise None."""
        arrivals = self.arrivals.get(source)
        first = arrivals[0] if arrivals else None
        return first if isinstance(first, InPieces) else None

    def first(self, sources: Iterable[int]) -> tuple[int, Arrival] | None:
        """Remove and return the first complete message from any of the sources, with its source; None if there is none."""
        for source in sources:
            arrivals = self.arrivals.get(source)
            if arrivals and arrivals[0].complete():
                return source, arrivals.popleft()
        return None


class Leftovers:
    """Messages in flight that failed operations have left behind: MPI accesses their memory until the requests are complete."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[MPI.Request], Any]] = []
        self._receives: list[MPI.Request] = []  # receives of messages that may never be sent
        self.outboxes: list[Any] = []  # outboxes of operations that were complete before their messages were sent

    def __len__(self) -> int:
        return len(self._kept) + len(self.outboxes)

    def keep(self, requests: Iterable[MPI.Request] | None, memory: Any) -> None:
        """Keep memory until the requests are complete."""
        if requests is not None:
            self._kept.append((list(requests), memory))

    def keep_sent(self, sends: list[Sent]) -> None:
        """Keep outgoing messages until they are sent."""
        for sent in sends:
            self.keep(sent.requests, sent.messages)

    def receive(self, requests: Iterable[MPI.Request], memory: Any) -> None:
        """Keep memory of receive requests, some of which may wait for messages that are never sent."""
        receives = list(requests)
        self._receives += receives
        self.keep(receives, memory)

    def tidy(self) -> None:
        """Release what is complete."""
        if self.outboxes:
            self.outboxes = [outbox for outbox in self.outboxes if not outbox.is_empty()]
        self._kept = [kept for kept in self._kept if not all_done(kept[0])]
        if not self._kept:
            self._receives.clear()

    def cancel(self) -> None:
        """Cancel receives whose messages will not be sent any more."""
        for request in self._receives:
            if not request.Test():
                request.Cancel()
        self._receives.clear()


class Mailbox:
    """The messages of one channel.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        A duplicate that only the library uses.
    is_over : callable
        Takes a tag with no operation in flight here; returns True if that operation has ended, False if it has not started.
    """

    def __init__(self, comm: MPI.Intracomm, is_over: Callable[[int], bool]) -> None:
        self.comm = comm
        self.boxes: dict[int, Box] = {}  # by tag
        self.late_failures: list[tuple[int, Failure]] = []  # source and announcement of ranks that failed in operations that are over here
        self.warned: set[int] = set()  # tags of boxes with announcements of failures
        self.leftovers: Leftovers = Leftovers()
        self._is_over = is_over
        self._incoming: tuple[MPI.Request, Bytes, int, int] | None = None  # envelope being received, with its source and tag

    def box(self, tag: int) -> Box:
        """Return the box of an operation, which must be closed later."""
        box = self.boxes.get(tag)
        if box is None:
            box = self.boxes[tag] = Box()
        return box

    def close(self, tag: int) -> None:
        """Discard what has arrived for an operation that is over."""
        box = self.boxes.pop(tag, None)
        if box is not None:
            for arrivals in box.arrivals.values():
                for arrival in arrivals:
                    self.leftovers.receive(arrival.requests, arrival.memory)

    def finish(self, tag: int) -> None:
        """Close the box of a completed operation; announcements of failed ranks in it are kept, to be answered."""
        box = self.boxes.get(tag)
        if box is not None:
            self.late_failures += box.failures.items()
            self.close(tag)

    def send(self, dest: int, tag: int, streams: tuple[SparseStream, ...], sends: list[Sent]) -> tuple[int, int]:
        """Send streams in one message, kept in ``sends``; return the total size and the size of the headers in bytes."""
        envelope, parts = wire.enclose(streams)
        nbytes = len(envelope) + sum(map(len, parts))
        messages = [envelope, *(piece for part in parts for piece in _pieces(part))]
        if nbytes - len(envelope) <= INLINE_BYTES:
            messages = [np.concatenate(messages)]
        self._post(dest, tag, messages, sends)
        return nbytes, len(envelope)

    def post(self, dest: int, tag: int, message: Bytes, sends: list[Sent]) -> None:
        """Send bytes. They are stored in ``sends`` before they are sent, so that no interrupt can free memory that MPI reads."""
        self._post(dest, tag, [message], sends)

    def _post(self, dest: int, tag: int, messages: list[Bytes], sends: list[Sent]) -> None:
        """Send an envelope and its parts in one call that no interrupt can divide, since the receiver waits for all parts.

        If MPI refuses a part, the remaining ones are sent empty, so that the receiver finds the message truncated.
        """
        sent = Sent(messages)
        sends.append(sent)
        buffers = [[message, MPI.BYTE] for message in messages]
        try:
            sent.requests.extend(map(self.comm.Isend, buffers, repeat(dest), repeat(tag)))
        except BaseException:
            missing = len(buffers) - len(sent.requests) if sent.requests else 0
            sent.requests.extend(map(self.comm.Isend, repeat([_NOTHING, MPI.BYTE], missing), repeat(dest), repeat(tag)))
            raise

    def take_in(self) -> None:
        """Receive whatever has arrived."""
        for outbox in self.leftovers.outboxes:
            outbox.pump()
        while True:
            if self._incoming is None:
                status = MPI.Status()  # its tag is negative until something is matched
                try:
                    matched = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                    if matched is None:
                        return
                    envelope = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    self._incoming = matched.Irecv([envelope, MPI.BYTE]), envelope, status.Get_source(), status.Get_tag()
                except BaseException as error:
                    self._lose(status.Get_tag(), error)
                    raise
            # Until the envelope is decoded, its parts must not be taken for envelopes.
            request, envelope, source, tag = self._incoming
            if not request.Test():
                return
            try:
                self._sort(envelope, source, tag)
            except BaseException as error:
                self._lose(tag, error)
                if not isinstance(error, Exception):
                    raise
            finally:
                self._incoming = None

    def _lose(self, tag: int, error: BaseException) -> None:
        """Record the error of a message that could not be received; its operation fails, which need not be the current one."""
        if tag >= 0 and (tag in self.boxes or not self._is_over(tag)):
            box = self.box(tag)
            box.error = box.error or error  # keep the first: after a damaged envelope, its parts are taken for envelopes

    def _sort(self, envelope: Bytes, source: int, tag: int) -> None:
        """Put a message whose envelope has arrived into its box, and start to receive its parts."""
        over = tag not in self.boxes and self._is_over(tag)
        failure = Failure.unpacked(envelope)
        if failure is not None:
            if over or failure.later:
                self.late_failures.append((source, failure))
            else:
                self.box(tag).failures[source] = failure
                self.warned.add(tag)
            return
        headers = self._headers(envelope, over)
        if headers is None:
            return
        box = None if over else self.box(tag)
        at = wire.HEADER_BYTES * len(headers)
        if at < len(envelope) or not any(header.payload for header in headers):
            if box is not None:
                arrivals = box.arrivals.setdefault(source, deque())
                if not arrivals or not isinstance(arrivals[-1], InPieces) or arrivals[-1].complete():
                    arrivals.append(InPieces())
                arrivals[-1].take(envelope)  # type: ignore[attr-defined]
            return
        arrival = self._in_parts(headers, source, tag, None if box is None else box.queue)
        if box is None:
            self.leftovers.receive(arrival.requests, arrival.memory)
        else:
            box.arrivals.setdefault(source, deque()).append(arrival)

    def _headers(self, envelope: Bytes, over: bool) -> list[wire.Header] | None:
        """Return the headers of a message; None for a stray part of a damaged message whose operation is over."""
        try:
            return wire.read_headers(envelope)
        except WireError:
            if over:
                return None
            raise

    def _in_parts(self, headers: list[wire.Header], source: int, tag: int, queue: Queue | None) -> InParts:
        """Start to receive the parts of a message whose headers have arrived."""
        if queue is not None and sum(header.payload for header in headers) > INLINE_BYTES:
            parts = queue.room(wire.part_lengths(headers))
        else:
            queue, parts = None, [memory.empty(length, np.uint8) for length in wire.part_lengths(headers)]
        requests: list[MPI.Request] = []
        try:
            pieces = [[piece, MPI.BYTE] for part in parts for piece in _pieces(part)]
            requests.extend(map(self.comm.Irecv, pieces, repeat(source), repeat(tag)))  # no interrupt can lose a request here
        except BaseException:
            self.leftovers.receive(requests, parts)
            raise
        return InParts(headers, parts, requests, queue)

    def drain(self) -> None:
        """Receive and discard everything that has arrived."""
        self.take_in()
        for tag in list(self.boxes):
            self.close(tag)
        self.late_failures.clear()
        self.leftovers.tidy()


def all_done(requests: list[MPI.Request]) -> bool:
    """Return True if all requests are complete."""
    return bool(MPI.Request.Testall(requests))


def _pieces(part: Bytes) -> list[Bytes]:
    return [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
