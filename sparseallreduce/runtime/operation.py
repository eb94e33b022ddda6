"""One operation over MPI, progressed by any call that tests or waits for an operation.

This is the role of LibNBC in the thesis (section 4.1.5): a collective is a schedule, and one small engine executes any schedule. An
operation passes through these states in order, and may fail in any of them (:mod:`~sparseallreduce.runtime.failing`):

======== =========================================================================================================================
called   it has its number; it starts when the channel is ready and all operations called before it have started
begun    this rank has armed a shortcut, if any, and published its record; it waits for the records of the other ranks
agreed   the ranks take the shortcut that all have armed, or run a schedule
ended    the result is complete; last messages to other ranks may still be in flight
done     only the result is kept
======== =========================================================================================================================

Messages of an operation carry its number as tag, on a duplicate of the user's communicator. MPI collectives run on a second duplicate, each
operation's after those of all operations started before it, because MPI requires that all ranks start the collectives of a communicator in
the same order. All are non-blocking: a rank that waits inside MPI occupies the core that other ranks need if there are more ranks than
cores (MPICH's Allgatherv of 64 MiB took 8.5 s with 8 ranks on 2 cores; polled, it took 0.12 s). The exception is the shortcut
:mod:`~sparseallreduce.runtime.shortcuts.mpi_sum`.
"""

from __future__ import annotations

from operator import methodcaller
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import common_error, explain
from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.staging import queued
from sparseallreduce.algorithms.steps import (
    Asked,
    DenseAllgather,
    DenseAllreduce,
    Exchange,
    HostGather,
    HostReduceScatter,
    Quantise,
    Recv,
    RecvAny,
    Send,
    Share,
    Shift,
    Step,
)
from sparseallreduce.runtime import progress
from sparseallreduce.runtime.answers import answer
from sparseallreduce.runtime.collectives import (
    Until,
    awaited_word,
    exchange,
    is_native,
    is_near_and_native,
    raw_blocks,
    recovery,
    typed,
    unify_nans,
)
from sparseallreduce.runtime.failing import SETTLING_SECONDS, CommonError, Failing, RemoteFailure, by_culprit
from sparseallreduce.runtime.handshake.base import DISAGREED, PENDING, RECORD, UNUSABLE, WITHDRAWN, Handshake
from sparseallreduce.runtime.inside_hosts import inside_host
from sparseallreduce.runtime.late_errors import LateError
from sparseallreduce.runtime.mailbox import Failure
from sparseallreduce.runtime.progress import done_within
from sparseallreduce.runtime.shortcuts.base import PACKED
from sparseallreduce.runtime.states import FAILED, READY, SETTLING
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.runtime.work import BLOCKING, FIRST, OTHER, Work
from sparseallreduce.streams import memory
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import AnyChannel

__all__ = ["Operation"]

_BEHIND = "an operation that was in flight before this one failed inside a collective: start it again"
_PREPARATION = {"error": "SparseAllreduceError", "text": "another rank gave up while the ranks prepared the communicator"}


class Operation(Failing):
    """A collective operation on a channel, as this rank takes part in it.

    Parameters
    ----------
    channel, work : Channel, Work
    stream : SparseStream or None
        This rank's stream.
    sequence : int
        The operation's number.
    level : int
        The shortcuts that it may take: one of the levels of :mod:`~sparseallreduce.runtime.work`.
    """

    channel: AnyChannel  # repeated from the base class, so that type checkers know the types of what __init__ sets
    work: Work
    sequence: int
    level: int
    traces = traces
    uses_collectives: bool = True  # whether collectives of MPI may be used
    advancing: bool = False
    flags: int = 0  # flags that this rank has published
    comparing: Any = None  # the schedule in which the ranks compare earlier failures
    explaining: float = 0.0  # time until which disagreeing ranks wait for each other's texts, even if one fails

    def __init__(self, channel: AnyChannel, work: Work, stream: SparseStream | None, sequence: int, level: int = OTHER) -> None:
        self.channel, self.work, self.stream, self.sequence, self.level = channel, work, stream, sequence, level

    # The transitions from state to state. Callers pass every exception that these raise to `fail`.

    def begin(self, handshake: Handshake) -> None:
        """Arm a shortcut and publish this rank's record. Whatever can fail is done before the record is published."""
        channel, work, sequence, stream, flags = self.channel, self.work, self.sequence, self.stream, 0
        self.handshake, channel.begun, self.begun = handshake, sequence, True
        if work.error is not None and not isinstance(work.error, Exception):
            raise work.error  # an interrupt does not wait for other ranks
        for shortcut in work.choose(stream, self.level):
            self.shortcut = shortcut
            flags = shortcut.arm(sequence, stream)  # type: ignore[arg-type]
            if flags:
                break
        else:
            self.shortcut = None
        self.flags = flags
        if handshake.carries_notes:
            handshake.note = work.note(stream) if flags != PACKED else b""
        packed, entries = self.shortcut.payload(stream) if flags == PACKED else None, work.entries(stream)  # type: ignore[union-attr,arg-type]
        usable = channel.collectives.usable and not channel.late.unshared
        length = handshake.publish(sequence, usable, flags, work.digest, entries, packed, work.error is None)
        if self.traces:
            for counts in self.traces:
                counts.share(RECORD.size, length, channel.ranks)
                counts.rounds += 1

    def agree(self, spins: int) -> bool:
        """Return True if all ranks have published, polling ``spins`` times, and continue with a shortcut, a schedule or the result."""
        handshake, shortcut, work, sequence = self.handshake, self.shortcut, self.work, self.sequence
        assert handshake is not None
        common = handshake.agree(sequence, spins, self.flags, work.digest, work.itemsize)
        if common == PENDING:
            return False
        result = None
        if shortcut is not None and 0 < common < UNUSABLE:
            result = shortcut.commit(sequence, common, handshake)
            if work.uneven is not None:
                work.record_entries(self.stream, handshake.entries())
        else:
            if shortcut is not None:
                shortcut.decline(sequence)
                self.shortcut = None
            if common == WITHDRAWN:
                self.stack = [awaited_word()]
            elif common == DISAGREED:
                self.stack, self.explaining = [explain(work.intent(self.stream))], perf_counter() + SETTLING_SECONDS
            else:
                self.stack = [queued(work.schedule(self.stream, handshake.entries(), handshake.notes()), self.queue)]
                if common >= UNUSABLE:
                    self.uses_collectives = False
                    self.stack.append(recovery(self.channel, sequence))
            if common == DISAGREED or common >= UNUSABLE:  # ranks that differ may do so because of an error that some have missed
                self.stack.append(self.channel.late.compare(sequence))
                self.comparing = self.stack[-1]
        handshake.release(sequence)
        self.handshake = None
        if result is not None:
            self._complete(result)
        return True

    def poll(self, spins: int) -> bool:
        """Poll the shortcut up to ``spins`` times; complete the operation and return True if it has a result."""
        shortcut = self.shortcut
        assert shortcut is not None
        result = shortcut.poll(self.sequence, spins)
        if result is not None:
            self._complete(result)
        return result is not None

    def _enter(self, handshake: Handshake | None) -> None:
        """Mark the operation as started, so that no operation called before it can start later."""
        self.handshake = handshake
        self.channel.begun = max(self.channel.begun, self.sequence)
        self.begun: bool = True

    def _complete(self, result: Any) -> None:
        """Store the result."""
        if self.traces:
            self._count(result)
        self.result = result
        self.shortcut = self.stream = None
        self.ended = True
        if not self.listed:
            self.done = True
            if not self.channel.slots:  # with slots, the handshake never reads messages
                self.channel.mailbox.finish(self.tag)

    def _count(self, result: Any) -> None:
        entries, (sent, received, messages) = self.work.entries(self.stream), (0, 0, 0) if self.shortcut is None else self.shortcut.moved()
        for counts in self.traces:
            counts.complete(entries, result)
            counts.move(sent, received, messages)
            counts.rounds += messages > 0

    def advance(self, spin: bool = False) -> None:
        """Progress as far as possible; with ``spin`` poll for longer, as the caller has nothing else to do."""
        channel = self.channel
        if self.done or self.advancing or not channel.lock.acquire(blocking=False):
            return  # another thread is progressing it
        self.advancing = True
        try:
            if channel.state == SETTLING and not (self.own or self.ended):
                return  # it ends with the preparation
            if self.ended:
                self._leave()
            elif self.failure is not None:
                self._settle()
            elif self.begun or self._begin_in_order():
                self._run(spin)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.advancing = False
            channel.lock.release()

    def _begin_in_order(self) -> bool:
        """Start if the channel is ready and all earlier operations have started, so that the order is the same on all ranks."""
        channel = self.channel
        if self.own:
            self._enter(None)
            self.enlist()
            self.stack: list[Any] = [self.work.schedule(None, ())]
            return True
        if self.sequence <= channel.failed_through:
            self.end(channel.error or common_error([_PREPARATION]))
            return False
        if channel.state == FAILED:
            channel.restart()
        if channel.state != READY or self.earlier():
            return False
        handshake = channel.handshake_of(self.sequence)
        if not handshake.is_free(self.sequence):
            self._check_messages()
            return False
        channel.tidy()
        if self.level == BLOCKING and not progress.alone():
            self.level = FIRST
        self.begin(handshake)
        self.enlist()
        return True

    def _run(self, spin: bool) -> None:
        if self.handshake is not None and not self.agree(self.handshake.spins if spin else 1):
            self._check_messages()  # a rank that has failed publishes nothing
            return
        if self.shortcut is not None and not self.poll(self.shortcut.spins if spin else 1):
            self._check_messages()
            return
        if self.ended:
            self._leave()
            return
        value: Any = None
        if self.step is not None:
            ready, value = self._ready()
            if not ready or self.ended:  # ended by the announcement of a failed preparation
                return
        self._resume(value)

    def _resume(self, value: Any) -> None:
        """Run the schedule until it has to wait."""
        stack, native = self.stack, self.uses_collectives and self.work.encoding.is_exact
        while stack:
            try:
                step = stack[-1].send(value)
            except StopIteration as stop:
                stack.pop()
                value = stop.value
                continue
            value = None
            if isinstance(step, Send):
                self._send(step.dest, step.stream)
            elif isinstance(step, Quantise):
                value = self.work.encoding.quantised(step.stream, self.sequence, step.holder, step.place)
            elif isinstance(step, Asked):
                value = answer(step, self)
            elif isinstance(step, DenseAllreduce) and not (native and is_native(step)):
                stack.append(rabenseifner(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op)))
            elif isinstance(step, DenseAllgather) and not (native and is_near_and_native(step, self.channel)):
                stack.append(join_blocks(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op), step.in_step))
            elif isinstance(step, HostReduceScatter | HostGather):
                stack.append(inside_host(step, self))
            else:
                if isinstance(step, Exchange):
                    self._send(step.partner, step.stream)
                elif isinstance(step, Shift):
                    self._send(step.dest, step.stream)
                self.step = step
                for counts in self.traces:
                    counts.rounds += not isinstance(step, Until)
                ready, value = self._ready()
                if not ready or self.ended:
                    return
        self._complete(value)
        self._leave()

    def _ready(self) -> tuple[bool, Any]:
        """Return whether the current step is complete, and its result."""
        step, value = self.step, None
        if isinstance(step, Until):
            if not step.condition():
                self._check_messages()
                return False, None
        elif isinstance(step, Share | DenseAllreduce | DenseAllgather):
            if self.requests is None:
                self.requests = self._start_collective(step)
            oversubscribed = self.channel.oversubscribed
            if self.requests is None or not done_within(self.requests, oversubscribed, 1 if oversubscribed else progress.COLLECTIVE_SPINS):
                self._check_messages()  # a rank that has failed does not take part
                return False, None
            value = self._collected(step)
            self.requests, self.received = None, None
        else:
            message = self._message(step)
            if message is None:
                return False, None
            source, streams = message
            if isinstance(step, RecvAny):
                value = source, tuple(streams) if step.several else streams[0]
            else:
                value = tuple(streams) if isinstance(step, Exchange | Shift) and isinstance(step.stream, tuple) else streams[0]
                if isinstance(step, Exchange | Shift) and step.merging is not None:
                    value = step.merging.finish(streams[0])
        self.step = None
        return True, value

    def _message(self, step: Step | None) -> tuple[int, list[SparseStream]] | None:
        """Return the source and streams of the next message that ``step`` waits for, or None if it has not arrived."""
        if isinstance(step, RecvAny):
            wanted = step.sources
        else:
            assert isinstance(step, Recv | Exchange | Shift)
            wanted = frozenset((step.partner if isinstance(step, Exchange) else step.source,))
        self._check_messages()
        box = self.channel.mailbox.box(self.tag)
        merging = step.merging if isinstance(step, Exchange | Shift) else None
        found = box.first(wanted)
        if found is None:
            if merging is not None:
                arrival = box.arriving(*wanted)
                if arrival is not None and arrival.assembly.growing is not None:
                    merging.advance(arrival.assembly.growing)
            return None
        source, arrival = found
        for counts in self.traces:
            counts.bytes_received += arrival.nbytes
        return source, arrival.streams()

    def _check_messages(self) -> None:
        """Receive whatever has arrived, and raise if any rank of this operation has failed."""
        channel = self.channel
        if self.outbox is not None:
            self.outbox.pump()
        channel.mailbox.take_in()
        channel.process_alarms()
        if channel.orphaned or channel.mailbox.late_failures or channel.mailbox.warned:
            channel.tidy()
        explaining = self.explaining and perf_counter() < self.explaining
        comparing = self.stack and self.stack[-1] is self.comparing
        if not (self.own or explaining or comparing):
            channel.late.check(self.sequence)
        box = channel.mailbox.boxes.get(self.tag)
        if box is None:
            return
        if box.error is not None:
            if not isinstance(box.error, Exception):  # the interrupt itself has been raised already
                raise LateError(Failure.of(box.error, self.sequence, channel.rank))
            raise box.error
        if box.failures and not explaining:
            raise RemoteFailure(min(box.failures.values(), key=by_culprit))

    def _send(self, dest: int, payload: SparseStream | tuple[SparseStream, ...]) -> None:
        streams = payload if isinstance(payload, tuple) else (payload,)
        for stream in streams:
            Reduction.freeze(stream)
        self.outgoing().send(dest, streams)

    def _start_collective(self, step: Share | DenseAllreduce | DenseAllgather) -> list[MPI.Request] | None:
        """Start a collective and return its requests, or None if earlier operations must come first."""
        channel = self.channel
        if self._is_direct(step):
            return self._gather_directly(step)
        if isinstance(step, Share):
            return self._share(step)
        if not channel.collectives.usable or (not self.own and self.sequence < channel.collectives.usable_from):
            raise CommonError(_BEHIND)
        if channel.in_flight[0] is not self:
            return None
        if isinstance(step, DenseAllreduce):
            self.received = array = step.stream._stored
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            call = methodcaller("Iallreduce", MPI.IN_PLACE, array, MPI.SUM)
            return [channel.collectives.enter(self.sequence, "allreduce", array.dtype, [array.size], call)]
        raw, blocks = self._blocks(step)
        lengths, places = [len(block) for block in blocks], [lo * (step.stream.width or 1) for lo, _ in step.ranges]
        call = methodcaller("Iallgatherv", raw, [self.received.reshape(-1).view(raw.dtype), lengths, places, typed(raw)])
        return [channel.collectives.enter(self.sequence, "allgatherv", raw.dtype, lengths, call)]

    def _share(self, step: Share) -> list[MPI.Request]:
        """Exchange records by messages. In an MPI collective, a rank that failed would be matched with its next collective instead."""
        channel, ours = self.channel, np.frombuffer(step.record, np.uint8)
        for counts in self.traces:
            counts.share(len(step.record), 0, channel.ranks)
        self.received = rows = np.empty((channel.ranks, len(step.record)), np.uint8)
        self.requests = requests = list[MPI.Request]()
        rows[channel.rank] = ours
        exchange(channel.collectives.comm, ours, list(rows), channel.others, self.tag, requests)
        return requests

    def _gather_directly(self, step: DenseAllgather) -> list[MPI.Request]:
        """Send blocks from and to their places without copies, in half the time of MPI libraries' rings in shared memory."""
        channel = self.channel
        ours, places = self._blocks(step)
        requests: list[MPI.Request] = []
        self.requests = requests
        places[channel.rank][:] = ours
        exchange(channel.collectives.comm, ours, places, channel.others, self.tag, requests)
        return requests

    def _blocks(self, step: DenseAllgather) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        array = step.stream._stored
        self.received: Any = memory.empty((step.stream.size, *array.shape[1:]), array.dtype)
        self._count_collective(self.received.nbytes - array.nbytes, 1)
        return raw_blocks(step, self.received)

    def _collected(self, step: Share | DenseAllreduce | DenseAllgather) -> Any:
        if isinstance(step, Share):
            return [row.tobytes() for row in self.received]
        entered = [number for number, sequence, *_ in self.channel.collectives.unfinished if sequence == self.sequence]
        if entered:  # its completion implies that all ranks have entered it
            self.channel.collectives.forget(entered[-1])
        unify_nans(step, self.received, self.channel.ranks)
        return SparseStream._dense_form(self.received, step.stream.size, density=step.stream.switch_density, owned=True)

    def _count_collective(self, nbytes: int, passes: int) -> None:
        for counts in self.traces:
            counts.move(nbytes, nbytes, passes * (self.channel.ranks - 1).bit_length())
