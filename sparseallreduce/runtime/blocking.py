"""The way of a blocking operation by the name of an algorithm: an object that can wait among others is made only where it has to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

from sparseallreduce.algorithms.steps import Schedule, Share, Step
from sparseallreduce.runtime import collectives, progress
from sparseallreduce.runtime.channel import Channel
from sparseallreduce.runtime.handshake import heard, rows_for, tell, text_of
from sparseallreduce.runtime.operation import Begun, Operation, outcome
from sparseallreduce.runtime.progress import done_within
from sparseallreduce.runtime.states import READY
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams.stream import SparseStream

__all__ = ["at_ease", "carry_out"]


def carry_out(channel: Channel, schedule: Callable[[], Schedule], entries: int, collective: Callable[[], bool]) -> Any:
    """The result of an operation that this rank waits for; parameters and exceptions are those of :class:`Operation`.

    That object, which can wait among others, is made only where there is more to wait for than what the ranks tell each other
    first: for little data it would take half of the time. See also :mod:`~sparseallreduce.runtime.short`.
    """
    if traces or not at_ease(channel):
        return outcome(Operation(channel, schedule, entries, collective=collective))
    before, begun = channel.turn, Begun(channel.turn + 1, shared=False, taken=False)
    requests: list[MPI.Request] = []
    steps: Any = None
    try:
        steps = schedule()
        turn, board = channel.next_turn(), channel.board
        channel.beginning = turn
        slot = None if board is None else board.slot(turn)
        share = steps.send(None)
        assert isinstance(share, Share)
        told = False
        if board is None or slot is None:
            rows = rows_for(share, channel, True)
            telling = partial(tell, share, channel, channel.tag(turn), True, rows, requests)
            begun = Begun(turn, share, requests, rows, telling=telling, promise=share.ready)
            telling()
            told = done_within(requests, channel.crowded)
        elif slot.is_free(turn):
            slot.post(turn, text_of(share, channel))
            begun = begun._replace(step=share, shared=True, promise=share.ready)
            told = slot.is_complete(turn, board.polls)
        else:
            begun = begun._replace(step=share)
        if told and share.ready is None:
            said, sound = heard(share, map(memoryview, rows) if slot is None else slot.texts)
            if sound:
                if slot is not None:
                    slot.take(turn)
                begun = Begun(turn)
                steps = _resumed(steps.send(said), steps)
    except StopIteration as stop:
        return stop.value
    except BaseException as error:
        if channel.turn == before:
            channel.next_turn()
        begun = begun._replace(hit=error)
    return outcome(Operation(channel, lambda: steps, entries, collective=collective, begun=begun))


def at_ease(channel: Channel) -> bool:
    """Whether an operation on this channel can do without an object of its own: nothing is in flight or prepared."""
    return channel.state == READY and channel.ranks <= collectives.DIRECT_RANKS and not (progress.operations or progress.preparing)


def _resumed(step: Step, steps: Schedule) -> Schedule:
    """A schedule that goes on with a step which it has asked for already."""
    try:
        while True:
            step = steps.send((yield step))
    except StopIteration as stop:
        result: SparseStream = stop.value
        return result
