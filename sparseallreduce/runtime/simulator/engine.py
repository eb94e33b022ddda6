"""The engine that executes the steps of P schedules in one process and counts what they send."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from sparseallreduce.algorithms.hierarchical import gather_in_host, reduce_scatter_in_host
from sparseallreduce.algorithms.steps import (
    Clock,
    Constants,
    DenseAllgather,
    DenseAllreduce,
    DeviceMessages,
    Exchange,
    HostGather,
    HostReduceScatter,
    Layout,
    Payload,
    Quantise,
    Send,
    Shift,
    Step,
)
from sparseallreduce.errors import DeadlockError
from sparseallreduce.runtime.simulator.collectives import COLLECTIVES, collective
from sparseallreduce.runtime.simulator.delivery import Delivery, Order, delivery_of
from sparseallreduce.runtime.simulator.message import Content, Message
from sparseallreduce.runtime.simulator.network import Network, coding_time, machine_of
from sparseallreduce.runtime.simulator.rank import Rank
from sparseallreduce.runtime.simulator.result import Simulation
from sparseallreduce.runtime.simulator.sharing import Outputs
from sparseallreduce.streams import wire
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import Encoding

__all__ = ["run"]

_AS_IT_IS = Encoding(index_codec="plain")


def run(
    schedules: Sequence[Generator[Step, Any, Any]],
    network: Network | None = None,
    *,
    delivery: Order | None = None,
    through_wire: bool = False,
    reductions: Sequence[Reduction] = (),
    encoding: Encoding = _AS_IT_IS,
) -> Simulation:
    """Run one schedule for each rank to its end. The work of ``reductions`` is converted to time by the network's gamma.

    Raises
    ------
    DeadlockError
        If every unfinished rank waits for a message that no rank has sent, or if messages are left over at the end.
    """
    network = network or Network()
    engine = _Engine(schedules, network, delivery_of(delivery, network, len(schedules)), through_wire, reductions, encoding)
    return engine.run()


class _Engine:
    """The P ranks, the counters of what each has sent and received, and the delivery of messages."""

    def __init__(
        self,
        schedules: Sequence[Generator[Step, Any, Any]],
        network: Network,
        delivery: Delivery,
        through_wire: bool,
        reductions: Sequence[Reduction],
        encoding: Encoding,
    ) -> None:
        self._network, self._hosts = network, network.layout(len(schedules))
        self._host = {rank: number for number, members in enumerate(self._hosts.members) for rank in members}
        self._machine = machine_of(network, self._hosts)
        self._ranks = [Rank(schedule) for schedule in schedules]
        for rank, reduction in zip(self._ranks, reductions):
            rank.charged = reduction.work, reduction.dense_work
        self._delivery = delivery
        self._encoding = encoding
        self._through_wire = through_wire
        self._reductions = reductions
        self._outputs = Outputs()
        self._bytes_sent, self._bytes_received, self._messages, self._header_bytes = np.zeros((4, len(schedules)), np.int64)

    def run(self) -> Simulation:
        self._delivery.run(len(self._ranks), self._resume, self._deliver)
        self._check_end()
        times = np.array([rank.clock for rank in self._ranks])
        return Simulation(
            [rank.output for rank in self._ranks],
            float(times.max()),
            times,
            self._bytes_sent,
            self._bytes_received,
            self._messages,
            self._header_bytes,
        )

    def _resume(self, number: int, now: float) -> None:
        """Run a rank until it waits."""
        rank = self._ranks[number]
        rank.clock = max(rank.clock, now)
        value, rank.value = rank.value, None
        while rank.stack:
            try:
                step = rank.stack[-1].send(value)
            except StopIteration as stop:
                rank.stack.pop()
                value = stop.value
                self._charge(number)
                continue
            self._charge(number)
            value = None
            if isinstance(step, Send):
                self._send(number, step.dest, step.stream)
            elif isinstance(step, Quantise):
                value = self._encoding.quantised(step.stream, step.holder, step.place)
            elif isinstance(step, Clock):
                value = rank.clock
            elif isinstance(step, Layout):
                value = self._hosts
            elif isinstance(step, Constants):
                value = self._machine
            elif isinstance(step, DeviceMessages):
                value = False
            elif isinstance(step, HostReduceScatter):
                rank.stack.append(reduce_scatter_in_host(step, number))
            elif isinstance(step, HostGather):
                rank.stack.append(gather_in_host(step, number))
            elif isinstance(step, COLLECTIVES):
                rank.native = isinstance(step, DenseAllreduce)
                if isinstance(step, DenseAllgather):
                    rank.join_by(Reduction(step.op))
                rank.stack.append(collective(step, number, len(self._ranks), rank.joining))
            else:
                if isinstance(step, Exchange):
                    self._send(number, step.partner, step.stream)
                elif isinstance(step, Shift):
                    self._send(number, step.dest, step.stream)
                if not rank.wait(step):
                    return
                value, rank.value = rank.value, None
        rank.output, rank.done = self._outputs.once(value), True

    def _charge(self, number: int) -> None:
        """Advance a rank's clock by the work of its reduction since the last call."""
        if self._reductions:
            rank = self._ranks[number]
            reduction, (sparse, dense) = self._reductions[number], rank.charged
            rank.charged = reduction.work + rank.joining.work, reduction.dense_work + rank.joining.dense_work
            rank.clock += (rank.charged[0] - sparse) * self._machine.gamma + (rank.charged[1] - dense) * self._machine.gamma_dense

    def _send(self, source: int, dest: int, payload: Payload | bytes) -> None:
        content: Content
        if isinstance(payload, bytes):
            content, nbytes, frames, coding = payload, len(payload), 0, 0.0
        else:
            streams = payload if isinstance(payload, tuple) else (payload,)
            encoding = _AS_IT_IS if self._encoding.is_exact and self._is_plain(source, dest) else self._encoding
            nbytes, frames, content = self._carried(streams, encoding)
            coding = self._coding_time(streams, encoding, nbytes)
        self._bytes_sent[source] += nbytes
        self._bytes_received[dest] += nbytes
        self._messages[source] += 1
        self._header_bytes[source] += frames * wire.HEADER_BYTES
        self._delivery.send(Message(source, dest, content, nbytes, coding), self._ranks[source].clock)

    def _is_plain(self, source: int, dest: int) -> bool:
        """Return True if a message is sent without encoding: inside a host, and in MPI's own collectives.

        Between hosts, blocks are gathered by the library's messages.
        """
        rank = self._ranks[source]
        return (rank.native and len(rank.stack) > 1) or self._host[source] == self._host[dest]

    def _carried(self, streams: tuple[SparseStream, ...], encoding: Encoding) -> tuple[int, int, tuple[SparseStream, ...]]:
        """Return the bytes and frames of a message, and its streams as they arrive."""
        for stream in streams:
            Reduction.freeze(stream)
        codecs = [encoding.index_codec_for(stream, self._machine.beta) for stream in streams]
        plain = all(codec is wire.PLAIN and not isinstance(stream, wire.CodedStream) for codec, stream in zip(codecs, streams, strict=True))
        if plain and not self._through_wire:
            return wire.message_bytes(streams), len(streams), streams
        assembly, nbytes, frames = wire.Assembly(), 0, 0
        size = wire.piece_bytes(sum(wire.estimated_bytes(stream, codec) for stream, codec in zip(streams, codecs, strict=True)))
        for packet in wire.packets(streams, codecs, size):
            nbytes += len(packet)
            frames += len(wire.read_headers(packet))
            if self._through_wire:
                assembly.take(packet)
        if plain:  # the counted size must not depend on `through_wire`
            nbytes, frames = wire.message_bytes(streams), len(streams)
        return nbytes, frames, tuple(assembly.streams) if self._through_wire else streams

    def _coding_time(self, streams: tuple[SparseStream, ...], encoding: Encoding, nbytes: int) -> float:
        """Return the time to encode and decode the dense streams that are sent as non-zeros and a bitmap."""
        coded = (stream for stream in streams if stream.is_dense and encoding.index_codec_for(stream, self._machine.beta) is wire.BITMAP)
        return coding_time(self._network, nbytes, sum(stream._stored.size for stream in coded))

    def _deliver(self, message: Message) -> bool:
        """Pass a message to its receiver; return True if the receiver can continue."""
        return self._ranks[message.dest].receive(message.source, message.content)

    def _check_end(self) -> None:
        """Raise if a rank waits for ever, or has not received all its messages."""
        stuck = [f"rank {number} waits in {rank.described_wait()}" for number, rank in enumerate(self._ranks) if not rank.done]
        if stuck:
            shown = "; ".join(stuck[:16]) + (f"; ... ({len(stuck)} ranks in all)" if len(stuck) > 16 else "")
            raise DeadlockError(f"no message is in transit, but {shown}")
        left = [
            f"{messages} from rank {source} to rank {dest}"
            for dest, rank in enumerate(self._ranks)
            for source, messages in rank.unread().items()
        ]
        if left:
            raise DeadlockError(f"messages were sent that nobody received: {'; '.join(left[:16])}")
