"""The two steps of a schedule inside a host, in memory that its ranks share, or by messages.

To reduce, each rank writes to a row of its own what others are to add up, and publishes that. Each of the first ranks then adds up its part
where the others' lie, in the order of the tree in which it would add up what comes by messages: the result is the same to the bit. A rank
that has no memory for its row says so, and sends its parts; the others' come through memory all the same.

To gather, each rank that has a part publishes how many entries that has. The first rank then says where they are to lie, all write their
parts there, and what lies there is the result of all of them, without a copy. If the first rank has no memory for that, or expects messages
to take less time, it says that instead.

Both wait only by steps of the schedule, so that any number of operations go on meanwhile, and an operation that fails on another rank, or
is interrupted here, ends in a wait like any other. However it ends, this rank then says that it reads and writes nothing more of it.

Operations of which four lie between take the same words of the memory, one after the other; so each waits until the one before is over on
this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.hierarchical import gather_in_host, reduce_scatter_in_host
from sparseallreduce.algorithms.steps import HostGather, HostReduceScatter, Recv, Send, Step
from sparseallreduce.runtime.collectives import Until
from sparseallreduce.runtime.memory.host import GATHERING, LEFT, PUBLISHED, REDUCING, SETTLING, SLOTS, HostMemory
from sparseallreduce.runtime.memory.parts import Laid, form_of, read_part, row_bytes, write_parts
from sparseallreduce.streams.partition import split
from sparseallreduce.streams.reduction import Tree
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.operation import Operation

__all__ = ["inside_host"]

# Words of a step: what a rank has of it, behind the numbers; and the last number for which it has written its part of a result.
_FIRST, _SECOND, _WRITTEN = range(LEFT + 1, LEFT + 4)
_STEPS = 16  # bits of the number of a step in its operation, above which is that of the operation
_LAID = 5  # words that say where a result is to lie, behind whether it does
_LEAST = 1 << 12  # bytes of a row or a result from which on memory takes less time than messages

Steps = Generator[Step, Any, Any]


def inside_host(step: HostReduceScatter | HostGather, operation: Operation) -> Steps:
    """The schedule of the step."""
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


def _reduce_scatter(step: HostReduceScatter, operation: Operation, host: HostMemory, number: int) -> Steps:
    line, lanes, place = host.line_of(operation.sequence, REDUCING), len(step.bounds) - 1, host.place
    yield from _until(lambda: _is_turn(operation))
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


def _summed(step: HostReduceScatter, operation: Operation, host: HostMemory, number: int, own: SparseStream) -> Steps:
    """The sum of our part, of which each rank's is added as it comes."""
    line, lanes, place = host.line_of(operation.sequence, REDUCING), len(step.bounds) - 1, host.place
    sums = Tree(step.reduction, host.ranks)
    sums.add(place, own)
    missing = set(range(host.ranks)) - {place}
    while missing:
        come = [other for other in missing if host.is_at(other, line, PUBLISHED, number)]
        if not come:
            yield from _until_at(host, missing, line, PUBLISHED, number, some=True)
        for other in come:
            row = host.word(other, line, _FIRST)
            part = (yield Recv(step.members[other])) if not row else read_part(host, other, row - 1, place, lanes, own)
            if row:
                _count(operation, 0, part.nbytes, 0)
            missing.remove(other)
            sums.add(other, part)
    return sums.result()


def _gather(step: HostGather, operation: Operation, host: HostMemory, number: int) -> Steps:
    line, settling = (host.line_of(operation.sequence, which) for which in (GATHERING, SETTLING))
    place, part, owners = host.place, step.part, range(len(step.bounds) - 1)
    yield from _until(lambda: _is_turn(operation))
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
        laid = Laid.found(host, words, [host.word(owner, line, _SECOND) for owner in owners], step.bounds)
        if part is not None:
            laid.write(part, place, step.reduction)
            host.store(line, _WRITTEN, number)
        yield from _until_at(host, owners, line, _WRITTEN, number)
        result = laid.stream(step.reduction.switch_density)
        others, ours = host.ranks - 1, 0 if part is None else part.nbytes
        _count(operation, others * ours, result.nbytes - ours, others if part is not None else 0)
        return result
    finally:
        host.leave(line, number)


def _settled(step: HostGather, host: HostMemory, line: int, number: int, part: SparseStream) -> list[int]:
    """What the first rank says of the result: where it is to lie, or zeros."""
    owners = range(len(step.bounds) - 1)
    forms, counts = ([host.word(owner, line, word) for owner in owners] for word in (_FIRST, _SECOND))
    laid = Laid.planned(host, forms, counts, step.bounds, part, step.reduction)
    if laid is None or laid.nbytes < _LEAST:
        return [0] * _LAID
    block = host.take_block(laid.nbytes, line, number)
    return [0] * _LAID if block is None else laid._replace(block=block).words()


def _is_turn(operation: Operation) -> bool:
    """Whether the operation before in this slot is over on this rank."""
    ours, others = operation.sequence, operation.channel.in_flight
    return not any(0 < other.sequence < ours and not other.ended and (ours - other.sequence) % SLOTS == 0 for other in others)


def _until(condition: Callable[[], bool]) -> Steps:
    """Wait, unless the condition holds already."""
    if not condition():
        yield Until(condition)  # type: ignore[misc]


def _until_at(host: HostMemory, places: Sequence[int] | set[int], line: int, word: int, number: int, some: bool = False) -> Steps:
    """Wait until all of these ranks of the host, or some, have come to a number."""

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


def _count(operation: Operation, sent: int, received: int, messages: int) -> None:
    """Count what would have gone by messages."""
    for counts in operation.traces:
        counts.move(sent, received, messages)
