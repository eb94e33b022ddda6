"""Run any algorithm among some of the ranks, with partners renumbered."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.exchange import gather_parts
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Exchange, Quantise, Recv, RecvAny, Send, Share, Shift, Step
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["on_group"]

_WORD = 4  # bytes


def on_group(
    schedule: Generator[Step, Any, Any], members: Sequence[int], place: int, reduction: Reduction, *, quantises: bool = True
) -> Generator[Step, Any, Any]:
    """Run a schedule of ranks 0 to G - 1 on the ranks ``members``, as the one at index ``place``.

    Collectives become schedules of messages, since MPI's involve all ranks. The group's ranks must run the schedule together, and no rank
    may be in two groups at the same time. Messages between two ranks keep their order from group to group.

    Parameters
    ----------
    schedule : generator
        Names ranks by their indices in the group.
    members : sequence of int
        Distinct ranks.
    place : int
    reduction : Reduction
        Reduction of the schedule.
    quantises : bool
        Whether values may be quantised, if those of the operation are.
    """
    places = {rank: number for number, rank in enumerate(members)}
    stack, value = [schedule], None
    while stack:
        try:
            step = stack[-1].send(value)
        except StopIteration as stop:
            stack.pop()
            value = stop.value
            continue
        value = None
        match step:
            case Send():
                yield step._replace(dest=members[step.dest])
            case Recv():
                value = yield step._replace(source=members[step.source])
            case RecvAny():
                source, stream = yield step._replace(sources=frozenset(members[source] for source in step.sources))
                value = places[source], stream
            case Exchange():
                value = yield step._replace(partner=members[step.partner])
            case Shift():
                value = yield step._replace(dest=members[step.dest], source=members[step.source])
            case Quantise():
                value = (yield step._replace(holder=members[step.holder])) if quantises else step.stream
            case Share():
                stack.append(_shared(step.record, place, len(members)))
            case DenseAllreduce():
                stack.append(rabenseifner(step.stream, place, len(members), reduction))
            case DenseAllgather():
                stack.append(join_blocks(step.stream, place, len(members), reduction, step.in_step))
            case _:
                value = yield step
    return value


def _shared(record: bytes, place: int, ranks: int) -> Generator[Step, Any, list[bytes]]:
    """Exchange the records of all ranks of a group, sent as the values of streams."""
    words = np.frombuffer(record.ljust(-(-len(record) // _WORD) * _WORD, b"\0"), np.int32)
    parts = yield from gather_parts(SparseStream._dense_form(words, len(words)), place, ranks)
    return [part._stored.tobytes()[: len(record)] for part in parts]
