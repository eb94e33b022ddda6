"""The messages of a channel: streams between two ranks, and word that a rank has given up.

Every message carries the tag of its operation. Whoever looks takes in whatever has arrived, for operations that have begun here, for
those that will begin, and for those that are over: the latter is received and dropped, so that nothing is left in MPI's queues and no
message is ever taken for one of another operation.
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

# The parts of a stream go out as they lie in memory, behind an envelope of the headers, and arrive in arrays of their own: for
# 1.3 MB between two ranks of one host that took a quarter of the time of a message packed and unpacked. Short ones are packed.
INLINE_BYTES = 1 << 14
PIECE_BYTES = 1 << 30  # a part goes out in pieces of this size, since MPI counts in 32 bits before version 4
_FAILURE = b"SARX"  # in place of a stream: a rank has given up, and says why
_NOTHING = np.empty(0, np.uint8)
_TEXT = 400  # characters of an error's text that travel

Bytes = NDArray[np.uint8]


class Failure(NamedTuple):
    """Word that a rank has given up.

    ``number`` is that of the operation, or of the attempt to prepare the channel; then ``through`` is the last operation that waited for
    it. A ``reply`` says that the operation was over where it comes from.
    """

    number: int
    culprit: int
    error: str
    text: str
    through: int = 0
    reply: bool = False

    @classmethod
    def of(cls, error: BaseException, number: int, culprit: int, through: int = 0) -> Failure:
        """Of an error that a rank has met by itself."""
        said = str(error)[:_TEXT]
        return cls(number, culprit, type(error).__name__[:100], f"rank {culprit} gave up" + (f": {said}" if said else ""), through)

    def announcement(self) -> dict[str, str]:
        """As :func:`~sparseallreduce.algorithms.agreement.common_error` takes it."""
        return {"error": self.error, "text": self.text}

    def packed(self) -> Bytes:
        """As a message."""
        return np.frombuffer(_FAILURE + json.dumps(self, ensure_ascii=False).encode("utf-8", "replace"), np.uint8)

    @classmethod
    def unpacked(cls, message: Bytes) -> Failure | None:
        """What a message says, if it is one of these."""
        if message[:4].tobytes() != _FAILURE:
            return None
        return cls(*json.loads(message[4:].tobytes()))


@dataclass
class Sent:
    """A message on its way out: its memory has to stay, and its requests to be tested, until these are done."""

    messages: list[Bytes]
    requests: list[MPI.Request] = field(default_factory=list)  # one for each, or none if it does not go out


class Arrival:
    """A message on its way in, of which the first is here."""

    nbytes = 0  # that have come
    requests: list[MPI.Request] = []  # noqa: RUF012 - never changed
    memory: Any = None  # which they fill

    def complete(self) -> bool:
        """Whether all of it is here."""
        raise NotImplementedError

    def streams(self) -> list[SparseStream]:
        """What it carries, once it is complete."""
        raise NotImplementedError


class InPieces(Arrival):
    """A message whose packets are read as they come."""

    def __init__(self) -> None:
        self.assembly = wire.Assembly()

    def take(self, packet: Bytes) -> None:
        """Read the next packet."""
        self.nbytes += len(packet)
        self.assembly.take(packet)

    def complete(self) -> bool:
        return self.assembly.complete

    def streams(self) -> list[SparseStream]:
        return self.assembly.streams


class InParts(Arrival):
    """A message whose headers are here, and whose parts come to arrays of their own."""

    def __init__(
        self, headers: list[wire.Header], parts: list[Bytes], requests: list[MPI.Request], queue: Queue | None = None
    ) -> None:
        self.headers, self.memory, self.requests, self._queue = headers, parts, requests, queue
        self.nbytes = wire.HEADER_BYTES * len(headers) + sum(map(len, parts))

    def streams(self) -> list[SparseStream]:
        with self._queue or nullcontext():
            return wire.join(self.headers, self.memory)

    def complete(self) -> bool:
        """Whether all parts are here.

        Raises
        ------
        WireError
            If one came shorter than its header says.
        """
        if not self.requests:
            return True
        statuses = [MPI.Status() for _ in self.requests]
        if not MPI.Request.Testall(self.requests, statuses):
            return False
        self.requests = []
        came, announced = sum(status.Get_count(MPI.BYTE) for status in statuses), sum(map(len, self.memory))
        if came != announced:
            raise WireError(f"a message announces a payload of {announced} bytes, but {came} came: it was truncated")
        return True


@dataclass
class Box:
    """What has arrived for one operation."""

    arrivals: dict[int, deque[Arrival]] = field(default_factory=dict)  # by source
    failures: dict[int, Failure] = field(default_factory=dict)  # likewise
    queue: Queue | None = None  # of the device that its parts are to come to
    error: BaseException | None = None  # that hit this rank while it took in a message for this operation

    def arriving(self, source: int) -> InPieces | None:
        """The next message of a source, if it comes in pieces."""
        arrivals = self.arrivals.get(source)
        first = arrivals[0] if arrivals else None
        return first if isinstance(first, InPieces) else None

    def first(self, sources: Iterable[int]) -> tuple[int, Arrival] | None:
        """The next message of any of the sources, if it is complete."""
        for source in sources:
            arrivals = self.arrivals.get(source)
            if arrivals and arrivals[0].complete():
                return source, arrivals.popleft()
        return None


class Leftovers:
    """What operations that gave up have left under way: memory that MPI reads or writes until the requests are done."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[MPI.Request], Any]] = []
        self._receives: list[MPI.Request] = []  # of messages that may never be sent
        self.outboxes: list[Any] = []  # of operations whose result was there before their messages were out

    def __len__(self) -> int:
        return len(self._kept) + len(self.outboxes)

    def keep(self, requests: Iterable[MPI.Request] | None, memory: Any) -> None:
        """Keep memory until the requests are done."""
        if requests is not None:
            self._kept.append((list(requests), memory))

    def keep_sent(self, sends: list[Sent]) -> None:
        """Keep messages until they are out."""
        for sent in sends:
            self.keep(sent.requests, sent.messages)

    def receive(self, requests: Iterable[MPI.Request], memory: Any) -> None:
        """The same of receives, some of which may be waiting for messages that are never sent."""
        receives = list(requests)
        self._receives += receives
        self.keep(receives, memory)

    def tidy(self) -> None:
        """Let go what is done."""
        if self.outboxes:
            self.outboxes = [outbox for outbox in self.outboxes if not outbox.is_empty()]
        self._kept = [kept for kept in self._kept if not all_done(kept[0])]
        if not self._kept:
            self._receives.clear()

    def cancel(self) -> None:
        """Call off receives that nobody will send to any more."""
        for request in self._receives:
            if not request.Test():
                request.Cancel()
        self._receives.clear()


class Mailbox:
    """The messages of one channel.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Of the library's own.
    is_over : callable
        Whether the operation of a tag, which is not in flight here, has been before.
    """

    def __init__(self, comm: MPI.Intracomm, is_over: Callable[[int], bool]) -> None:
        self.comm = comm
        self.boxes: dict[int, Box] = {}  # by tag
        self.strays: list[tuple[int, Failure]] = []  # source and word of ranks that gave up in operations that are over here
        self.warned: set[int] = set()  # tags of boxes that word of a rank which gave up has come to
        self.leftovers = Leftovers()
        self._is_over = is_over
        self._incoming: tuple[MPI.Request, Bytes, int, int] | None = None  # an envelope, its source and tag

    def box(self, tag: int) -> Box:
        """That of an operation, which it has to close."""
        box = self.boxes.get(tag)
        if box is None:
            box = self.boxes[tag] = Box()
        return box

    def close(self, tag: int) -> None:
        """The operation is over: drop what has come for it."""
        box = self.boxes.pop(tag, None)
        if box is not None:
            for arrivals in box.arrivals.values():
                for arrival in arrivals:
                    self.leftovers.receive(arrival.requests, arrival.memory)

    def finish(self, tag: int) -> None:
        """The operation has its result: who has given up in it, as far as that has come, is to be answered."""
        box = self.boxes.get(tag)
        if box is not None:
            self.strays += box.failures.items()
            self.close(tag)

    def send(self, dest: int, tag: int, streams: tuple[SparseStream, ...], sends: list[Sent]) -> tuple[int, int]:
        """Send streams in one message, which ``sends`` keeps, and return the bytes of all and of the headers."""
        envelope, parts = wire.enclose(streams)
        nbytes = len(envelope) + sum(map(len, parts))
        messages = [envelope, *(piece for part in parts for piece in _pieces(part))]
        if nbytes - len(envelope) <= INLINE_BYTES:
            messages = [np.concatenate(messages)]
        self._post(dest, tag, messages, sends)
        return nbytes, len(envelope)

    def post(self, dest: int, tag: int, message: Bytes, sends: list[Sent]) -> None:
        """Send bytes, which ``sends`` keeps: before they go out, so that no interrupt can free memory that MPI reads."""
        self._post(dest, tag, [message], sends)

    def _post(self, dest: int, tag: int, messages: list[Bytes], sends: list[Sent]) -> None:
        """Send an envelope and its parts, in one call that no interrupt divides: a rank that has the envelope waits for all parts.

        If MPI refuses one, the others go out empty, so that who receives them finds the message truncated.
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
        """Take in whatever has arrived."""
        for outbox in self.leftovers.outboxes:
            outbox.pump()
        while True:
            if self._incoming is None:
                status = MPI.Status()  # of any tag, which is below 0
                try:
                    matched = self.comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                    if matched is None:
                        return
                    envelope = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    self._incoming = matched.Irecv([envelope, MPI.BYTE]), envelope, status.Get_source(), status.Get_tag()
                except BaseException as error:
                    self._lose(status.Get_tag(), error)
                    raise
            # Until it is known what follows this envelope, its parts must not be taken for envelopes.
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
        """A message could not be taken in: its operation, which need not be the one that is waited for, has failed."""
        if tag >= 0 and (tag in self.boxes or not self._is_over(tag)):
            box = self.box(tag)
            box.error = box.error or error  # the first: parts of a message whose envelope was damaged are taken for envelopes

    def _sort(self, envelope: Bytes, source: int, tag: int) -> None:
        """Put a message whose envelope has come where it belongs, and receive its parts."""
        over = tag not in self.boxes and self._is_over(tag)
        failure = Failure.unpacked(envelope)
        if failure is not None:
            if over:
                self.strays.append((source, failure))
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
        """Those of a message; None for parts of one whose envelope was damaged, if its operation is over."""
        try:
            return wire.read_headers(envelope)
        except WireError:
            if over:
                return None
            raise

    def _in_parts(self, headers: list[wire.Header], source: int, tag: int, queue: Queue | None) -> InParts:
        """The message whose headers have come, its parts on their way."""
        if queue is not None and sum(header.payload for header in headers) > INLINE_BYTES:
            parts = queue.room(wire.part_lengths(headers))
        else:
            queue, parts = None, [memory.empty(length, np.uint8) for length in wire.part_lengths(headers)]
        requests: list[MPI.Request] = []
        try:
            pieces = [[piece, MPI.BYTE] for part in parts for piece in _pieces(part)]
            requests.extend(map(self.comm.Irecv, pieces, repeat(source), repeat(tag)))  # no interrupt loses a request here
        except BaseException:
            self.leftovers.receive(requests, parts)
            raise
        return InParts(headers, parts, requests, queue)

    def drain(self) -> None:
        """Receive and drop everything that has arrived."""
        self.take_in()
        for tag in list(self.boxes):
            self.close(tag)
        self.strays.clear()
        self.leftovers.tidy()


def all_done(requests: list[MPI.Request]) -> bool:
    """Whether all of them are."""
    return bool(MPI.Request.Testall(requests))


def _pieces(part: Bytes) -> list[Bytes]:
    return [part[at : at + PIECE_BYTES] for at in range(0, len(part), PIECE_BYTES)]
