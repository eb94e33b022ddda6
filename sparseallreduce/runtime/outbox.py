"""The outgoing messages of an operation: sent uncompressed from memory inside a host, and in encoded pieces between hosts.

A few pieces are in flight at a time, each encoded when there is room for it, so that a message is never in memory as a whole. A message of
many megabytes that is passed to MPI in one call uses a link between hosts poorly: an exchange of 8 and then 16 MB in each direction at 200
Mbit/s, which takes 960 ms on the wire, took 1,180 to 2,090 ms, and 1,025 to 1,040 ms in pieces of 64 to 256 KiB with two to four in flight.

An operation with a lossy value codec sends all its messages in pieces: a receiver forwards a stream in the form in which it arrived, and
the next rank may be on another host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparseallreduce.runtime.mailbox import Failure, Sent, all_done
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.streams import wire
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import Bytes, Encoding

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import AnyChannel
    from sparseallreduce.streams.kernels.devices import Queue

__all__ = ["PIECES_IN_FLIGHT", "PIECES_OF_A_RANK", "Outbox"]

PIECES_IN_FLIGHT = 4  # for one message
PIECES_OF_A_RANK = 16  # for all messages of an operation


class _Message:
    """An outgoing message."""

    def __init__(self, dest: int, packets: Iterator[Bytes]) -> None:
        self.dest = dest
        self.packets: Iterator[Bytes] | None = packets  # None once the last is in flight
        self.in_flight: list[Sent] = []


class Outbox:
    """The outgoing messages of one operation.

    Parameters
    ----------
    channel : Channel
    tag : int
    encoding : Encoding
        How its messages are encoded.
    traces : list of Trace
        Traces that count the bytes sent.
    queue : Queue, optional
        Queue of the device, if GPU memory is passed to MPI directly.
    """

    def __init__(self, channel: AnyChannel, tag: int, encoding: Encoding, traces: list[Trace], queue: Queue | None = None) -> None:
        self._queue = queue
        self._channel, self._mailbox, self._tag, self._encoding, self._traces = channel, channel.mailbox, tag, encoding, traces
        self._sends: list[Sent] = []  # messages in flight that are sent uncompressed
        self._messages: list[_Message] = []  # messages that are sent in pieces

    def send(self, dest: int, streams: tuple[SparseStream, ...]) -> None:
        """Send streams in one message, after earlier messages to the same rank."""
        for counts in self._traces:
            counts.messages += 1
        if self._queue is not None and any(stream.on_device for stream in streams):
            with self._queue:
                self._count(*self._mailbox.send(dest, self._tag, streams, self._sends))
            return
        if self._encoding.is_exact and self._channel.is_near(dest):
            self._count(*self._mailbox.send(dest, self._tag, streams, self._sends))
            return
        byte_seconds = self._channel.byte_seconds
        codecs = [self._encoding.index_codec_for(stream, byte_seconds) for stream in streams]
        nbytes = sum(wire.estimated_bytes(stream, codec) for stream, codec in zip(streams, codecs, strict=True))
        self._messages.append(_Message(dest, wire.packets(streams, codecs, wire.piece_bytes(nbytes))))
        self.pump()

    def post(self, dest: int, message: Bytes) -> None:
        """Send an announcement of a failure."""
        self._mailbox.post(dest, self._tag, message, self._sends)

    def pump(self) -> None:
        """Encode and send as many pieces as there is room for."""
        if not self._messages:
            return
        for message in self._messages:
            message.in_flight = [sent for sent in message.in_flight if not all_done(sent.requests)]
        room = PIECES_OF_A_RANK - sum(len(message.in_flight) for message in self._messages)
        busy: set[int] = set()  # ranks with a message whose pieces are not all in flight
        for message in self._messages:
            while message.packets is not None and message.dest not in busy and room > 0 and len(message.in_flight) < PIECES_IN_FLIGHT:
                packet = next(message.packets, None)
                if packet is None:
                    message.packets = None
                else:
                    self._mailbox.post(message.dest, self._tag, packet, message.in_flight)
                    if self._traces:
                        self._count(len(packet), wire.HEADER_BYTES * len(wire.read_headers(packet)))
                    room -= 1
            if message.packets is not None:
                busy.add(message.dest)
        self._messages = [message for message in self._messages if message.packets is not None or message.in_flight]

    def has_unsent(self) -> bool:
        """Return True if a message has not been encoded completely."""
        return any(message.packets is not None for message in self._messages)

    def is_empty(self) -> bool:
        """Return True if everything has been sent. Large messages progress only while this rank calls MPI."""
        if self._sends:
            self._sends = [sent for sent in self._sends if not all_done(sent.requests)]
        self.pump()
        return not (self._sends or self._messages)

    def leave(self, sequence: int) -> None:
        """Detach the remaining messages from the operation; they are sent whenever this rank looks for messages.

        The remaining pieces are encoded now, since the user may change the stream afterwards. If this raises, nothing has changed.
        """
        for message in self._messages:
            if message.packets is not None:
                message.packets = iter(list(message.packets))
        rest = LeftOutbox(self._channel, self._tag, self._encoding, [])
        rest.sequence = sequence
        rest._sends, rest._messages = self._sends, self._messages
        self._sends, self._messages = [], []
        self._mailbox.leftovers.outboxes.append(rest)

    def abandon(self) -> None:
        """Encode no more pieces, and leave those in flight to the mailbox."""
        leftovers = self._mailbox.leftovers
        leftovers.keep_sent(self._sends)
        for message in self._messages:
            leftovers.keep_sent(message.in_flight)
        self._sends, self._messages = [], []

    def _count(self, nbytes: int, headers: int) -> None:
        for counts in self._traces:
            counts.bytes_sent += nbytes
            counts.header_bytes += headers


class LeftOutbox(Outbox):
    """The remaining messages of an operation that is done here. An error while sending fails the operation on waiting ranks."""

    sequence = 0  # number of the operation

    def pump(self) -> None:
        """Encode and send as many pieces as there is room for. Errors are reported to the receivers; only interrupts are raised."""
        try:
            super().pump()
        except BaseException as error:
            word = Failure.of(error, self.sequence, self._channel.rank).packed()
            for dest in {message.dest for message in self._messages if message.packets is not None}:
                self.post(dest, word)
            self.abandon()
            if not isinstance(error, Exception):
                raise
