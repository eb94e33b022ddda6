"""Execute the two steps of a schedule inside a host, in memory that its ranks share, or by messages.

To reduce, each rank writes the parts that other ranks add to a row of its own and publishes it. Each of the first ranks then adds its part
from the rows of the others, in the tree order used for messages, so that the result is bitwise identical. A rank without memory for its row
publishes that and sends its parts as messages; the parts of the other ranks are still read from memory.

To gather, each rank that has a part publishes its number of entries. The first rank then publishes where the parts belong, all ranks write
their parts there, and that memory is the result of all ranks, without a copy. If the first rank has no memory for it, or expects messages
to be faster, it publishes that instead.

Both wait only by steps of the schedule, so that other operations progress meanwhile, and an operation that fails on another rank, or is
interrupted here, ends like any other. However it ends, this rank then publishes that it no longer accesses the memory of the step. An
operation uses the same words of memory as the operation four before it, and waits until that one is over on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.hierarchical import gather_in_host, reduce_scatter_in_host
from sparseallreduce.algorithms.steps import HostGather, HostReduceScatter, Recv, Send, Step
from sparseallreduce.runtime.collectives import Until
from sparseallreduce.runtime.memory.host import GATHERING, LEFT, PUBLISHED, REDUCING, SETTLING, SLOTS, HostMemory
from sparseallreduce.runtime.memory.parts import PartsLayout, form_of, read_part, row_bytes, write_parts
from sparseallreduce.streams.partition import split
from sparseallreduce.streams.reduction import Tree
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import AnyOperation

__all__ = ["inside_host"]

# Words of a step: two values that a rank publishes with its number, and the last number for which it has written its part.
_FIRST, _SECOND, _WRITTEN = range(LEFT + 1, LEFT + 4)
_STEPS = 16  # low bits that number a step in its operation; the bits above number the operation
_LAID = 5  # words that describe where a result is placed; all zero if it is not placed in memory
_LEAST = 1 << 12  # smallest row or result, in bytes, for which memory is faster than messages

Steps = Generator[Step, Any, Any]


def inside_host(step: HostReduceScatter | HostGather, operation: AnyOperation) -> Steps:
    """Return the schedule of the step: in shared memory if the host's ranks have it, otherwise by messages."""
    channel = operation.channel
    host = channel.host_memory
    if host is None or step.members != host.members:
        return reduce_scatter_in_host(step, channel.rank) if isinstance(step, HostReduceScatter) else gather_in_host(step, channel.rank)
    operation.steps_inside += 1
    for counts in operation.traces:
        counts.rounds += 1
    number = operation.sequence << _STEPS | operation.steps_inside
    if isinstance(step, HostReduceScatter):
        return _reduce_scatter(step, operation, host, number)
    return _gather(step, operation, host, number)


def _reduce_scatter(step: HostReduceScatter, operation: AnyOperation, host: HostMemory, number: int) -> Steps:
    line, lanes, place = host.line_of(operation.sequence, REDUCING), len(step.bounds) - 1, host.place
    yield from _until(lambda: _is_next(operation))
    try:
        yield from _until(lambda: host.is_free(line, number))
        parts = dict(enumerate(split(step.stream, step.bounds)))
        own = parts.pop(place, None)
        nbytes = row_bytes(parts, lanes)
        row = host.take_row(nbytes, line, number) if parts and nbytes >= _LEAST else None
        if row is not None:
            write_parts(host, row, parts, lanes)
            _count(operation, sum(part.nbytes for part in parts.values()), 0, len(parts))
        host.publish(line, number, [0 if row is None else row + 1])
        if row is None:
            for lane, part in sorted(parts.items(), key=lambda found: (found[0] - place) % lanes):
                yield Send(step.members[lane], part)
        if own is None:
            return None
        result = yield from _summed(step, operation, host, number, own)
        return _copied(result) if host.holds(result) else result
    finally:
        host.leave(line, number)


def _summed(step: HostReduceScatter, operation: AnyOperation, host: HostMemory, number: int, own: SparseStream) -> Steps:
    """Return the sum of this rank's part; the part of each rank is added when it arrives."""
    line, lanes, place = host.line_of(operation.sequence, REDUCING), len(step.bounds) - 1, host.place
    sums = Tree(step.reduction, host.ranks)
    sums.add(place, own)
    missing = set(range(host.ranks)) - {place}
    while missing:
        published = [other for other in missing if host.is_at(other, line, PUBLISHED, number)]
        if not published:
            yield from _until_at(host, missing, line, PUBLISHED, number, some=True)
        for other in published:
            row = host.word(other, line, _FIRST)
            part = (yield Recv(step.members[other])) if not row else read_part(host, other, row - 1, place, lanes, own)
            if row:
                _count(operation, 0, part.nbytes, 0)
            missing.remove(other)
            sums.add(other, part)
    return sums.result()


def _gather(step: HostGather, operation: AnyOperation, host: HostMemory, number: int) -> Steps:
    line, settling = (host.line_of(operation.sequence, which) for which in (GATHERING, SETTLING))
    place, part, owners = host.place, step.part, range(len(step.bounds) - 1)
    yield from _until(lambda: _is_next(operation))
    try:
        yield from _until(lambda: host.is_free(line, number))
        host.publish(line, number, [] if part is None else [form_of(part), part.stored])
        if place == 0:
            assert part is not None
            yield from _until_at(host, owners, line, PUBLISHED, number)
            host.publish(settling, number, _settled(step, host, line, number, part))
        yield from _until_at(host, (0,), settling, PUBLISHED, number)
        words = [host.word(0, settling, _FIRST + word) for word in range(_LAID)]
        if not any(words):
            return (yield from gather_in_host(step, operation.channel.rank))
        layout = PartsLayout.found(host, words, [host.word(owner, line, _SECOND) for owner in owners], step.bounds)
        if part is not None:
            layout.write(part, place, step.reduction)
            host.store(line, _WRITTEN, number)
        yield from _until_at(host, owners, line, _WRITTEN, number)
        result = layout.stream(step.reduction.switch_density)
        others, ours = host.ranks - 1, 0 if part is None else part.nbytes
        _count(operation, others * ours, result.nbytes - ours, others if part is not None else 0)
        return result
    finally:
        host.leave(line, number)


def _settled(step: HostGather, host: HostMemory, line: int, number: int, part: SparseStream) -> list[int]:
    """Return where the first rank places the result in memory, or zeros for messages."""
    owners = range(len(step.bounds) - 1)
    forms, counts = ([host.word(owner, line, word) for owner in owners] for word in (_FIRST, _SECOND))
    layout = PartsLayout.planned(host, forms, counts, step.bounds, part, step.reduction)
    if layout is None or layout.nbytes < _LEAST:
        return [0] * _LAID
    block = host.take_block(layout.nbytes, line, number)
    return [0] * _LAID if block is None else layout._replace(block=block).words()


def _is_next(operation: AnyOperation) -> bool:
    """Return True if the previous operation in this slot has ended on this rank."""
    ours, others = operation.sequence, operation.channel.in_flight
    return not any(0 < other.sequence < ours and not other.ended and (ours - other.sequence) % SLOTS == 0 for other in others)


def _until(condition: Callable[[], bool]) -> Steps:
    """Wait until the condition holds."""
    if not condition():
        yield Until(condition)  # type: ignore[misc]


def _until_at(host: HostMemory, places: Sequence[int] | set[int], line: int, word: int, number: int, some: bool = False) -> Steps:
    """Wait until all of these ranks of the host (or any, with ``some``) have published ``number`` in this word."""

    def missing() -> list[int]:
        return [host.members[place] for place in places if not host.is_at(place, line, word, number)]

    def there() -> bool:
        found = len(missing())
        return found < len(places) if some else not found

    if not there():
        yield Until(there, missing)  # type: ignore[misc]


def _copied(stream: SparseStream) -> SparseStream:
    copied = stream.copy()
    copied._owned = False
    return copied


def _count(operation: AnyOperation, sent: int, received: int, messages: int) -> None:
    """Count the bytes in traces as if they had been sent in messages."""
    for counts in operation.traces:
        counts.move(sent, received, messages)
