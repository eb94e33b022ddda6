"""One schedule on its way over MPI, moved on by whoever tests or waits for any operation.

This is what LibNBC is to the thesis (section 4.1.5): a collective is a schedule, and one small engine executes any schedule.

Ranks of one host agree on an operation on a :mod:`~sparseallreduce.runtime.board`, others by messages. Messages of an operation
carry its number as tag, on a duplicate of the user's communicator. Collectives of the MPI library run on a second duplicate, each
operation's after those of all operations started before it, because MPI asks that all ranks start the collectives of a communicator
in the same order. All are of the non-blocking kind: a rank that waits inside MPI burns the core that the others need where ranks
outnumber cores (MPICH's Allgatherv of 64 MiB took 8.5 s with 8 ranks on 2 cores, the same polled 0.12 s). The exception is the dense
sum that all ranks of a blocking operation are ready for: it is what the user would call, and on 2 cores, from 4 KiB to 16 MiB, takes
0.64 to 1.0 of the polled one's time at P = 4 and 8, and 0.7 to 1.5 at P = 3. Smaller ones are made on the board, and sums of sparse
streams on a :mod:`~sparseallreduce.runtime.stage` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from operator import methodcaller
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.steps import Clock, DenseAllgather, DenseAllreduce, Exchange, Recv, RecvAny, Send, Share, Shift, Step
from sparseallreduce.runtime import progress
from sparseallreduce.runtime.board import Slot
from sparseallreduce.runtime.collectives import exchange, has_entered, is_native, recovery, typed
from sparseallreduce.runtime.failing import Alike, Failing, GivenUp, by_culprit
from sparseallreduce.runtime.handshake import all_ready, heard, rows_for, tell, text_of
from sparseallreduce.runtime.mailbox import all_done
from sparseallreduce.runtime.progress import done_within
from sparseallreduce.runtime.shared import SharedStep
from sparseallreduce.runtime.states import FAILED, READY, SETTLING
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams import memory, wire
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["Begun", "Operation", "outcome"]

_NO_TRACES: list[Trace] = []
_BEHIND = "an operation that was in flight before this one failed inside a collective: start it again"
_PREPARATION = {"error": "SparseAllreduceError", "text": "another rank gave up while the ranks prepared the communicator"}


class Begun(NamedTuple):
    """Where an operation stands in its first step, or behind it."""

    turn: int
    step: Step | None = None  # under way, with
    requests: list[MPI.Request] | None = None
    received: Any = None
    native: bool = True  # whether collectives of MPI may be used
    shared: bool = True  # whether the others have been told anything
    taken: bool = True  # whether it has left its slot of the board, if there is one
    telling: Callable[[], None] | None = None  # tells by messages those who have not been told yet, if any
    promise: DenseAllreduce | None = None  # the collective of MPI which the others have been told that we enter
    committed: bool = False  # whether all ranks enter it
    entered: bool = False  # and we have
    hit: BaseException | None = None  # what has hit this rank there


class Operation(Failing):
    """One schedule on its way.

    Parameters
    ----------
    channel : Channel
    schedule : callable
        Makes the schedule, once the channel is ready.
    entries : int
        Of our stream, for traces.
    counted : bool
        Whether traces count it.
    collective : callable
        Whether other ranks may be inside a collective of MPI when this operation fails.
    own : bool
        Whether it belongs to the preparation of the channel, which other operations wait for.
    begun : Begun, optional
        How far it has come without this object.
    """

    def __init__(
        self,
        channel: Channel,
        schedule: Callable[[], Generator[Step, Any, Any]],
        entries: int = 0,
        counted: bool = True,
        collective: Callable[[], bool] = lambda: True,
        own: bool = False,
        begun: Begun | None = None,
    ) -> None:
        super().__init__()
        self.channel = channel
        self.schedule = schedule
        self.traces = traces if counted else _NO_TRACES
        self.stack: list[Any] = []
        self.entries = entries
        self.own = own
        self.begun = begun
        self.native = True  # whether collectives of MPI may be used
        self.collective = collective
        self.result: Any = None
        self.advancing = False
        self.turn = begun.turn if begun is not None else channel.next_own() if own else channel.next_turn()
        progress.operations.append(self)
        self.advance()

    def advance(self) -> None:
        """Move on as far as finished messages and collectives allow."""
        channel = self.channel
        if self.done or self.advancing or not channel.lock.acquire(blocking=False):
            return  # another thread is at it
        self.advancing = True
        try:
            if channel.state == SETTLING and not (self.own or self.ended):
                return  # ends with the preparation
            if self.ended:
                self._flush()
            elif self.failure is not None:
                self._settle()
            elif self.started or self._start():
                self._run()
        except GivenUp as other:
            self.fail(other)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self.advancing = False
            channel.lock.release()

    def _start(self) -> bool:
        """Begin if the channel is ready: in the order of the calls, which is that of all ranks."""
        channel = self.channel
        if not self.own:
            if self.turn <= channel.failed_through:
                self.end(channel.error or common_error([_PREPARATION]))
                return False
            if channel.state == FAILED:
                channel.restart()
            if channel.state != READY or self._earlier():
                return False
        taken = self.own
        if self.begun is not None:
            begun = self.begun
            self.step, self.requests, self.received, taken = begun.step, begun.requests, begun.received, begun.taken
            self.native, self.shared, self.telling = begun.native, begun.shared, begun.telling
            self.promise, self.committed, self.entered = begun.promise, begun.committed, begun.entered
        self.slot = None if taken or channel.board is None else channel.board.slot(self.turn)
        self.tag = channel.tag(self.turn)
        self.box = channel.mailbox.box(self.tag)
        channel.in_flight.append(self)
        if not self.own:
            channel.beginning = self.turn
        self.started = True
        channel.tidy()
        if self.begun is not None and self.begun.hit is not None:
            raise self.begun.hit
        self.stack.append(self.schedule())
        return True

    def _run(self) -> None:
        value: Any = None
        if self.step is not None:
            ready, value = self._ready()
            if not ready or self.ended:  # by word of a preparation that failed elsewhere
                return
        while self.stack:
            try:
                step = self.stack[-1].send(value)
            except StopIteration as stop:
                self.stack.pop()
                value = stop.value
                continue
            value = None
            if isinstance(step, Send):
                self._send(step.dest, step.stream)
            elif isinstance(step, Clock):
                value = perf_counter()
            elif isinstance(step, DenseAllreduce) and not (self.native and is_native(step)):
                self.stack.append(rabenseifner(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op)))
            elif isinstance(step, DenseAllgather) and not (self.native and is_native(step)):
                self.stack.append(join_blocks(step.stream, self.channel.rank, self.channel.ranks, Reduction(step.op)))
            else:
                if isinstance(step, Exchange):
                    self._send(step.partner, step.stream)
                elif isinstance(step, Shift):
                    self._send(step.dest, step.stream)
                self.step = step
                for counts in self.traces:
                    counts.rounds += 1
                ready, value = self._ready()
                if not ready or self.ended:
                    return
        self.result = value
        self._close()

    def _ready(self) -> tuple[bool, Any]:
        """Whether the step that the schedule waits for is complete, and its result."""
        step = self.step
        if isinstance(step, Share) and self.slot is not None:
            if not self._posted(step, self.slot):
                self._probe()  # likewise
                return False, None
            value = self._taken(step, self.slot)
        elif isinstance(step, SharedStep):
            value = step.result()
            if value is None:
                self._probe()
                return False, None
            if self.traces:
                self._count_moved(*step.moved())
        elif isinstance(step, Share | DenseAllreduce | DenseAllgather):
            if self.requests is None:
                self.requests = self._start_collective(step)
            crowded = self.channel.crowded
            if self.requests is None or not done_within(self.requests, crowded, 1 if crowded else progress.COLLECTIVE_SPINS):
                self._probe()  # a rank that has given up will not take part
                return False, None
            value = self._collected(step)
            self.requests, self.received = None, None
        else:
            message = self._message(step)
            if message is None:
                return False, None
            source, streams = message
            if isinstance(step, RecvAny):
                value = source, streams[0]
            else:
                value = tuple(streams) if isinstance(step, Exchange | Shift) and isinstance(step.stream, tuple) else streams[0]
        self.step = None
        return True, value

    def _message(self, step: Step | None) -> tuple[int, list[SparseStream]] | None:
        """The next message from where ``step`` expects one, if it is there."""
        if isinstance(step, RecvAny):
            wanted = step.sources
        else:
            assert isinstance(step, Recv | Exchange | Shift)
            wanted = frozenset((step.partner if isinstance(step, Exchange) else step.source,))
        self._probe()
        found = self.box.first(wanted)
        if found is None:
            return None
        source, arrival = found
        for counts in self.traces:
            counts.bytes_received += wire.HEADER_BYTES * len(arrival.headers) + sum(map(len, arrival.parts))
        return source, wire.join(arrival.headers, arrival.parts)

    def _probe(self) -> None:
        """Take in whatever has arrived, and raise if any rank of this operation has given up."""
        channel, box = self.channel, self.box
        channel.mailbox.take_in()
        channel.look()
        if channel.untaken:
            channel.tidy()
        if box.error is not None:
            raise box.error
        if box.failures:
            raise GivenUp(min(box.failures.values(), key=by_culprit))

    def _send(self, dest: int, payload: SparseStream | tuple[SparseStream, ...]) -> None:
        streams = payload if isinstance(payload, tuple) else (payload,)
        for stream in streams:
            Reduction.freeze(stream)
        nbytes, headers = self.channel.mailbox.send(dest, self.tag, streams, self.sends)
        for counts in self.traces:
            counts.bytes_sent += nbytes
            counts.header_bytes += headers
            counts.messages += 1

    def _start_collective(self, step: Share | DenseAllreduce | DenseAllgather) -> list[MPI.Request] | None:
        """The requests of the collective, or None while it is not this operation's turn."""
        channel = self.channel
        if self._is_direct(step):
            return self._gather_directly(step)
        if isinstance(step, Share):
            return self._share(step)
        array = step.stream._stored
        if isinstance(step, DenseAllreduce) and step.soon:
            if not self.committed:
                return None  # one of those that have said so takes it back, and will tell us
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            self.received = array if step.into is None else step.into
            self._enter(step)
            return []
        if not channel.native.usable or (not self.own and self.turn < channel.native.usable_from):
            raise Alike(_BEHIND)
        if channel.in_flight[0] is not self:
            return None
        if isinstance(step, DenseAllreduce):
            self._count_collective(2 * array.nbytes * (channel.ranks - 1) // channel.ranks, 2)
            source, self.received = (MPI.IN_PLACE, array) if step.into is None else (array, step.into)
            call = methodcaller("Iallreduce", source, self.received, MPI.SUM)
            return [channel.native.enter(self.turn, "allreduce", array.dtype, [array.size], call)]
        raw, blocks = self._raw_blocks(step)
        lengths, places = [len(block) for block in blocks], [lo * (step.stream.width or 1) for lo, _ in step.ranges]
        call = methodcaller("Iallgatherv", raw, [self.received.reshape(-1).view(raw.dtype), lengths, places, typed(raw)])
        return [channel.native.enter(self.turn, "allgatherv", raw.dtype, lengths, call)]

    def _enter(self, step: DenseAllreduce) -> None:
        """Enter MPI's own sum, as all ranks do now, and stay until it is done."""
        array, comm = step.stream._stored, self.channel.native.comm
        source, into = (MPI.IN_PLACE, array) if step.into is None else (array, step.into)
        try:
            comm.Allreduce(source, into, MPI.SUM)
        except BaseException as error:
            self.entered = has_entered(error)
            raise
        self.entered = True

    def _posted(self, step: Share, slot: Slot) -> bool:
        """Whether all ranks have posted what they tell the others first, we too once the slot is free."""
        if not self.shared and slot.is_free(self.turn):
            self._count_share(step)
            self.promise = step.ready
            slot.post(self.turn, text_of(step, self.channel))
            self.shared = True
        return self.shared and slot.is_complete(self.turn)

    def _taken(self, step: Share, slot: Slot) -> Any:
        said, sound = heard(step, slot.texts)
        if step.ready is not None:
            self.committed = all_ready(said, sound) and slot.commit(self.turn)
            self.promise = step.ready if self.committed else None
        slot.take(self.turn)
        self.slot = None
        return self._told(step, said, sound)

    def _share(self, step: Share) -> list[MPI.Request]:
        first, self.shared = not self.shared, True
        self._count_share(step)
        if first:
            self.promise = step.ready
        requests: list[MPI.Request] = []
        rows = rows_for(step, self.channel, first)
        self.requests, self.received = requests, rows
        if first:
            self.telling = partial(tell, step, self.channel, self.tag, True, rows, requests)
        tell(step, self.channel, self.tag, first, rows, requests)
        return requests

    def _count_share(self, step: Share) -> None:
        for counts in self.traces:
            counts.share(len(step.record), len(step.payload), self.channel.ranks)

    def _told(self, step: Share, said: list[bytes], sound: bool) -> list[bytes] | None:
        """What the ranks have said; None if it is to wait until the channel is sound again, as it then has to become first."""
        record, ours = len(step.record), len(said[self.channel.rank])
        for counts in self.traces:
            counts.bytes_received += sum(len(message) - record for message in said) - (ours - record)
        if not sound and not self.own and self.native:
            self.native = False
            self.stack.append(_recovered(self, said))
            return None
        return said

    def _gather_directly(self, step: DenseAllgather) -> list[MPI.Request]:
        """Blocks sent straight from and to their places: half the time of the MPI libraries' rings in shared memory."""
        ours, places = self._raw_blocks(step)
        requests: list[MPI.Request] = []
        self.requests = requests
        exchange(ours, places, self.channel, self.tag, requests)
        return requests

    def _raw_blocks(self, step: DenseAllgather) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Our block, and the places of all blocks in the array to be filled, as unsigned integers that any MPI knows."""
        array, width = step.stream._stored, step.stream.width or 1
        self.received = memory.empty((step.stream.size, *array.shape[1:]), array.dtype)
        self._count_collective(self.received.nbytes - array.nbytes, 1)
        unsigned = np.dtype(f"u{array.itemsize}")
        places = self.received.reshape(-1).view(unsigned)
        return array.reshape(-1).view(unsigned), [places[lo * width : hi * width] for lo, hi in step.ranges]

    def _collected(self, step: Share | DenseAllreduce | DenseAllgather) -> Any:
        if isinstance(step, Share):
            self.telling = None
            said, sound = heard(step, map(memoryview, self.received))
            if step.ready is not None:
                self._probe()  # a rank that has given up in the meantime does not take part
                self.committed = all_ready(said, sound)
                self.promise = step.ready if self.committed else None
            return self._told(step, said, sound)
        entered = [number for number, turn, *_ in self.channel.native.unfinished if turn == self.turn]
        if entered:  # it could not be complete without all of them
            self.channel.native.forget(entered[-1])
        return SparseStream._dense_form(self.received, step.stream.size, density=step.stream.switch_density)

    def _count_collective(self, nbytes: int, passes: int) -> None:
        self._count_moved(nbytes, nbytes, passes * (self.channel.ranks - 1).bit_length())

    def _count_moved(self, sent: int, received: int, messages: int) -> None:
        for counts in self.traces:
            counts.move(sent, received, messages)

    def _close(self) -> None:
        """The schedule has ended, and with it the operation once its last messages are out."""
        self.channel.in_flight.remove(self)
        self.ended = True
        for counts in self.traces:
            counts.complete(self.entries, self.result)
        self._flush()

    def _flush(self) -> None:
        mailbox = self.channel.mailbox
        if self.slot is not None and (self.shared or self.slot.is_free(self.turn)):
            self.slot.take(self.turn)  # what no longer concerns us
            self.slot = None
        # Large messages leave only while this rank calls MPI, so that an operation is not done before they are out.
        self.sends = [sent for sent in self.sends if not all_done(sent.requests)]
        if self.sends:
            mailbox.take_in()
            if self.box.failures:  # who gave up takes no more of our messages before it calls the library again; we have our result
                mailbox.leftovers.keep_sent(self.sends)
                self.sends = []
        if not self.sends and self.slot is None:
            mailbox.close(self.tag)
            self.done = True
            progress.operations.remove(self)


def _recovered(operation: Operation, said: list[bytes]) -> Generator[Step, Any, list[bytes]]:
    """Make the channel sound again, before the schedule of an operation goes on with what the ranks have said."""
    yield from recovery(operation.channel, operation.turn)
    return said


def outcome(operation: Operation) -> Any:
    """The result of an operation, when it is done.

    Raises
    ------
    SparseAllreduceError
        If the operation failed, on all ranks the same.
    """
    progress.finish(operation)
    if operation.error is not None:
        raise operation.error
    return operation.result
