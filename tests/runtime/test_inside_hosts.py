"""Steps inside a host in memory that its ranks share, seen by all ranks of one process: the bits of messages, and nobody reads too far."""

from __future__ import annotations

import gc
import os
from collections import defaultdict, deque
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits
from strategies import DTYPES

import sparseallreduce as sar
from sparseallreduce.algorithms.steps import HostGather, HostReduceScatter, Recv, RecvAny, Send
from sparseallreduce.errors import StreamError
from sparseallreduce.runtime import inside_hosts
from sparseallreduce.runtime.collectives import Until
from sparseallreduce.runtime.inside_hosts import inside_host
from sparseallreduce.runtime.memory import host
from sparseallreduce.runtime.memory.host import GATHERING, KEPT, LEFT, PUBLISHED, REDUCING, SLOTS, HostMemory
from sparseallreduce.runtime.memory.mapping import Mapping, SharedFile
from sparseallreduce.runtime.memory.parts import PartsLayout, read_part, write_parts
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.streams import wire
from sparseallreduce.streams.operator import as_operator
from sparseallreduce.streams.partition import boundaries, slice_range
from sparseallreduce.streams.reduction import Reduction

CAPACITY = 1 << 22


@pytest.fixture(autouse=True)
def small():
    with mock.patch.object(host, "_BYTES", CAPACITY), mock.patch.object(inside_hosts, "_LEAST", 1):
        yield


class Host:
    """The ranks of a host, each with its memory, and what they send each other."""

    def __init__(self, ranks: int, shared: bool = True) -> None:
        file = os.memfd_create("host")
        os.ftruncate(file, HostMemory.nbytes(ranks))
        members = tuple(range(3, 3 + ranks))  # of some hosts
        self.files = [SharedFile(os.dup(file), HostMemory.nbytes(ranks)) for _ in members]
        os.close(file)
        self.members = members
        self.memories = [HostMemory(each, members, place) for place, each in enumerate(self.files)]
        each = zip(members, self.memories, strict=True)
        self.channels = [SimpleNamespace(host_memory=memory if shared else None, rank=rank, in_flight=[]) for rank, memory in each]
        self.mail = defaultdict(deque)

    def operation(self, place, sequence, stream, lanes, reduction):
        """A sum of the host's ranks, begun on one of them."""
        channel = self.channels[place]
        own = SimpleNamespace(channel=channel, sequence=sequence, steps_inside=0, ended=False, traces=[Trace()], value=None, step=None)
        own.stack, own.result = [summed(stream, self.members, tuple(boundaries(stream.size, lanes)), reduction)], None
        channel.in_flight.append(own)
        return own

    def advance(self, operation) -> bool:
        """Go on as far as it goes; whether that is anywhere."""
        went = False
        while not operation.ended:
            step = operation.step
            if step is not None:
                ready, operation.value = self._ready(operation, step)
                if not ready:
                    return went
            went, operation.step = True, None
            try:
                step = operation.stack[-1].send(operation.value)
                operation.value = None
            except StopIteration as stop:
                operation.stack.pop()
                operation.value = stop.value
                if not operation.stack:
                    operation.result, operation.ended = stop.value, True
                    operation.channel.in_flight.remove(operation)
                continue
            if isinstance(step, HostReduceScatter | HostGather):
                operation.stack.append(inside_host(step, operation))
            elif isinstance(step, Send):
                self.mail[operation.channel.rank, step.dest, operation.sequence].append(through_wire(step.stream))
            else:
                operation.step = step
        return went

    def _ready(self, operation, step):
        if isinstance(step, Until):
            return step.condition(), None
        sources = step.sources if isinstance(step, RecvAny) else [step.source]
        assert isinstance(step, Recv | RecvAny)
        for source in sources:
            letters = self.mail[source, operation.channel.rank, operation.sequence]
            if letters:
                return True, (source, letters.popleft()) if isinstance(step, RecvAny) else letters.popleft()
        return False, None

    def fail(self, operation) -> None:
        """What becomes of an operation that has failed."""
        operation.ended = True
        operation.channel.in_flight.remove(operation)
        for generator in reversed(operation.stack):
            generator.close()

    def sums(self, streams, sequence, lanes, reduction=None, order=None):
        """The result of each rank, which go on by turns in some order."""
        operations = [self.operation(place, sequence, stream, lanes, reduction or Reduction()) for place, stream in enumerate(streams)]
        self.finish(operations, order)
        return [operation.result for operation in operations]

    def finish(self, operations, order=None) -> None:
        while not all(operation.ended for operation in operations):
            went = [self.advance(operations[place]) for place in (range(len(operations)) if order is None else order)]
            assert any(went), "nobody gets on"


def summed(stream, members, bounds, reduction):
    """The two steps, with nothing between hosts."""
    part = yield HostReduceScatter(reduction.enter(stream), members, bounds, reduction)
    return (yield HostGather(part, members, bounds, reduction))


def through_wire(stream):
    """What its receiver has: memory of its own, which may be written to."""
    Reduction.freeze(stream)
    envelope, parts = wire.enclose((stream,))
    (arrived,) = wire.join(wire.read_headers(envelope), [part.copy() for part in parts])
    return arrived


def is_shared(array):
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, Mapping)


def streams_of(rng, ranks, size, dtype="float32", width=None, fills=(0.0, 0.01, 0.3, 3.0)):
    found = []
    for _ in range(ranks):
        indices = np.unique(rng.integers(0, max(size, 1), int(min(size, 2000) * rng.choice(fills)))) if size else []
        shape = (len(indices),) if width is None else (len(indices), width)
        found.append(sar.SparseStream(indices, rng.integers(1, 9, shape).astype(dtype), size))
    return found


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ranks, size = draw(st.integers(2, 7)), draw(st.sampled_from([0, 1, 5, 300, 3000, 2**33]))
    dtype, width = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([None, None, 3]))
    fills = draw(st.sampled_from([(0.0, 0.01), (0.3,), (0.2, 3.0), (5.0,)])) if size <= 3000 else (0.0, 0.3)
    streams = streams_of(rng, ranks, size, dtype, width, fills)
    return streams, draw(st.integers(1, ranks)), draw(st.permutations(range(ranks)))


@given(cases(), st.sampled_from(["sum", "max", "prod"]), st.sampled_from([None, 0.1]), st.data())
def test_the_result_is_that_of_messages_to_the_bit(case, op, density, data):
    """Also where some ranks have no memory, or cannot map what others have written."""
    streams, lanes, order = case
    if np.issubdtype(streams[0].dtype, np.complexfloating) and op == "max":
        op = "sum"
    density = density if streams[0].size <= 3000 else None
    reduction = Reduction(as_operator(op), density)
    expected = Host(len(streams), shared=False).sums(streams, 1, lanes, reduction)
    ranks = Host(len(streams))
    for file in ranks.files:
        if data.draw(st.booleans()):
            file.reserve = lambda *_: False
        if data.draw(st.booleans()):
            file.map = mock.Mock(side_effect=OSError)
    for sequence in (1, 2):
        results = ranks.sums(streams, sequence, lanes, Reduction(as_operator(op), density), order)
        assert [bits(reduction.leave(result)) for result in results] == [bits(reduction.leave(result)) for result in expected]


def test_a_sum_writes_nothing_to_what_ranks_passed_in():
    streams = streams_of(np.random.default_rng(0), 3, 500, fills=(0.3, 5.0))
    before = [bits(stream) for stream in streams]
    Host(3).sums(streams, 1, 2)
    assert [bits(stream) for stream in streams] == before


def test_results_lie_where_they_are_and_nobody_can_write_there():
    streams = streams_of(np.random.default_rng(1), 3, 5000, fills=(0.1,))
    ranks = Host(3)
    results = ranks.sums(streams, 1, 2)
    for result in results:
        assert is_shared(result._indices) and is_shared(result._values)
        for array in (result._indices, result._values):
            assert not array.flags.writeable
            with pytest.raises(ValueError):
                array.flags.writeable = True
    block = ranks.memories[1].get(ranks.memories[1].block_at(0), 0, 4).view(np.float32)
    assert block[0] == results[0]._values[0] == results[2]._values[0]


def test_a_part_that_nobody_else_adds_to_is_no_view_of_what_another_wrote():
    """The row that it lies in is used again before the part is sent on."""
    empty = sar.SparseStream([], np.empty(0, np.float32), 100)
    ranks, streams = Host(2), [empty, sar.SparseStream([3, 60], np.float32([1, 2]), 100)]
    operations = [ranks.operation(place, 1, stream, 2, Reduction()) for place, stream in enumerate(streams)]
    ranks.advance(operations[0])
    ranks.advance(operations[1])
    ranks.finish(operations)
    assert operations[0].result.to_dense()[[3, 60]].tolist() == [1, 2]
    part = Reduction()
    first, second = (inside_host(HostReduceScatter(part.enter(stream), ranks.members, (0, 50, 100), part),
                                 SimpleNamespace(channel=channel, sequence=2, steps_inside=0, traces=[], ended=False))
                     for stream, channel in zip(streams, ranks.channels))
    step = next(first)
    with pytest.raises(StopIteration):
        next(second)
    assert step.condition()
    with pytest.raises(StopIteration) as stop:
        first.send(None)
    assert stop.value.value._indices.tolist() == [3] and not is_shared(stop.value.value._indices)


@given(st.integers(0, 2**32), st.integers(2, 4), st.sampled_from([2, 7]))
def test_operations_in_flight_keep_apart(seed, ranks, operations):
    """Each rank moves them on in an order of its own, and more of them are under way than there are slots."""
    rng = np.random.default_rng(seed)
    own = Host(ranks)
    given = [streams_of(rng, ranks, 3000) for _ in range(operations)]
    begun = [[own.operation(place, 1 + number, streams[place], 2, Reduction()) for place in range(ranks)]
             for number, streams in enumerate(given)]
    left = [operation for each in begun for operation in each]
    while left:
        went = [own.advance(left[place]) for place in rng.permutation(len(left))]
        assert any(went)
        left = [operation for operation in left if not operation.ended]
    for each, streams in zip(begun, given, strict=True):
        total = sum(stream.to_dense() for stream in streams)
        for operation in each:
            np.testing.assert_array_equal(operation.result.to_dense(), total)


@given(st.integers(0, 2**32), st.integers(2, 4))
def test_what_fails_on_some_ranks_at_any_step_leaves_those_behind_it_right(seed, ranks):
    rng = np.random.default_rng(seed)
    own = Host(ranks)
    for sequence in range(1, 3 * SLOTS):
        streams = streams_of(rng, ranks, 800)
        operations = [own.operation(place, sequence, stream, 2, Reduction()) for place, stream in enumerate(streams)]
        fails = sequence % 3 != 0
        for place in rng.permutation(ranks).repeat(rng.integers(1, 4)) if fails else ():
            own.advance(operations[place])
        if fails:
            for place in rng.permutation(ranks):
                if not operations[place].ended:
                    own.fail(operations[place])
            continue
        own.finish(operations, rng.permutation(ranks))
        for operation in operations:
            np.testing.assert_array_equal(operation.result.to_dense(), sum(stream.to_dense() for stream in streams))


def test_a_rank_that_is_further_on_is_not_taken_for_one_that_has_come():
    """It has failed in the operation that another is still in, and published for one behind it."""
    own, streams = Host(2), streams_of(np.random.default_rng(3), 2, 500, fills=(0.3,))
    waiting = own.operation(0, 1, streams[0], 2, Reduction())
    own.advance(waiting)
    later = own.operation(1, 1 + SLOTS, streams[1], 2, Reduction())
    own.advance(later)
    line = own.memories[1].line_of(1, REDUCING)
    assert own.memories[1].word(1, line, PUBLISHED) > own.memories[0].word(0, line, PUBLISHED)
    assert not own.advance(waiting) and not waiting.ended
    assert waiting.step.missing() == [own.members[1]]


def test_a_row_is_not_written_while_another_rank_may_read_it():
    own, rng = Host(2), np.random.default_rng(4)
    slow = own.operation(0, 1, streams_of(rng, 1, 3000, fills=(0.3,))[0], 2, Reduction())
    rows = set()
    for sequence in range(1, 1 + SLOTS):
        ahead = own.operation(1, sequence, streams_of(rng, 1, 3000, fills=(0.3,))[0], 2, Reduction())
        own.advance(ahead)
        rows.add(own.memories[1].word(1, own.memories[1].line_of(sequence, REDUCING), LEFT + 1))
    assert rows == {1, 2, 3, 4}
    fifth = own.operation(1, 1 + SLOTS, streams_of(rng, 1, 3000, fills=(0.3,))[0], 2, Reduction())
    own.advance(fifth)
    assert fifth.step is not None and not fifth.step.condition()
    assert not slow.ended


def test_results_that_are_kept_stay_as_they_are_and_blocks_come_back():
    own, rng, kept = Host(3), np.random.default_rng(5), []
    for sequence in range(1, KEPT + 6):
        streams = streams_of(rng, 3, 3000, fills=(0.05,))
        kept.append((sum(stream.to_dense() for stream in streams), own.sums(streams, sequence, 2)))
    shared = [sum(is_shared(result._values) for result in results) for _, results in kept]
    assert shared == [3] * KEPT + [0] * 5  # the last were copied
    for total, results in kept:
        for result in results:
            np.testing.assert_array_equal(result.to_dense(), total)
    del result, results
    kept[4][1].clear()
    gc.collect()
    streams = streams_of(rng, 3, 3000, fills=(0.05,))
    own.sums(streams, KEPT + 6, 2)  # with which the other ranks say so
    results = own.sums(streams, KEPT + 7, 2)
    assert all(is_shared(result._values) for result in results)
    assert [memory._leases.held() for memory in own.memories] == [2**KEPT - 1] * 3


def test_a_loop_takes_the_first_blocks_and_rows_again_and_asks_for_memory_once():
    own, rng, results = Host(2), np.random.default_rng(6), None
    with mock.patch.object(SharedFile, "reserve", autospec=True, side_effect=SharedFile.reserve) as reserve:
        for sequence in range(1, 20):
            results = own.sums(streams_of(rng, 2, 3000, fills=(0.05,)), sequence, 2)
            if sequence == 4:
                reserve.reset_mock()
        assert not reserve.called
    assert len(own.memories[0]._secured) <= 4
    assert results is not None


def test_memory_that_was_refused_is_asked_for_again_later():
    own, rng = Host(2), np.random.default_rng(7)
    refused = mock.Mock(return_value=False)
    own.files[0].reserve = refused
    with mock.patch.object(host, "_LATER", 5):
        for sequence in range(1, 13):
            own.sums(streams_of(rng, 2, 3000, fills=(0.05,)), sequence, 2)
    assert 2 <= refused.call_count <= 6


def test_what_is_larger_than_a_row_goes_by_messages():
    own, rng = Host(2), np.random.default_rng(8)
    with mock.patch.object(host, "_BYTES", 1 << 13):
        own = Host(2)
        streams = streams_of(rng, 2, 60_000, fills=(1.0,))
        results = own.sums(streams, 1, 2)
    assert not any(is_shared(result._values) for result in results)
    np.testing.assert_array_equal(results[1].to_dense(), sum(stream.to_dense() for stream in streams))


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("number", [0, 1, 3, 2**31, 2**63, 2**64 - 1])
def test_no_number_in_a_row_leads_out_of_it(place, number):
    """Whatever another process writes there, an error at worst."""
    own, stream = Host(2), sar.SparseStream(np.arange(0, 400, 3), np.ones(134, np.float32), 400)
    parts = {0: slice_range(stream, 0, 200)}
    row = own.memories[1].take_row(4096, 1, 1)
    write_parts(own.memories[1], row, parts, 2)
    mine = slice_range(stream, 0, 200)
    assert bits(read_part(own.memories[0], 1, row, 0, 2, mine)) == bits(mine)
    own.memories[1].put(own.memories[1].row_at(1, row), 8 * place, np.array([number], np.uint64))
    try:
        found = read_part(own.memories[0], 1, row, 0, 2, mine)
    except (StreamError, ValueError, OSError):
        return
    begin = own.memories[0]._maps[own.memories[0].row_at(1, row), True]
    first = begin.ctypes.data
    for array in found._arrays:
        assert array is None or first <= array.ctypes.data <= array.ctypes.data + array.nbytes <= first + len(begin)


def test_a_row_changed_meanwhile_writes_nothing_outside_the_sum():
    """Positions in disorder, or out of range, in what others have written."""
    rng = np.random.default_rng(9)
    for sequence in range(1, 30):
        own = Host(2)
        streams = streams_of(rng, 2, 3000, fills=(0.3, 5.0))
        operations = [own.operation(place, sequence, stream, 2, Reduction()) for place, stream in enumerate(streams)]
        own.advance(operations[1])
        begin = own.memories[1].row_at(1, own.memories[1].word(1, own.memories[1].line_of(sequence, REDUCING), LEFT + 1) - 1)
        own.memories[1].put(begin, 64, rng.integers(0, 2**32, 500, np.uint32))
        try:
            own.finish(operations)
        except sar.SparseAllreduceError:
            continue
        assert operations[0].result.size == 3000


def test_a_result_is_laid_out_as_parts_are_joined():
    own = Host(2)
    sparse = sar.SparseStream([1, 7], np.float32([1, 2]), 100)
    for forms, counts, op, form in [
        ([0, 0], [2, 3], "sum", 0),
        ([0, 0], [30, 30], "sum", 1),
        ([1, 0], [50, 3], "sum", 1),
        ([1, 1], [50, 50], "sum", 1),
        ([2, 0], [50, 3], "max", 2),
        ([0, 0], [30, 30], "max", 2),
    ]:
        laid = PartsLayout.planned(own.memories[0], forms, counts, (0, 50, 100), sparse, Reduction(as_operator(op)))
        assert laid is not None and laid.form == form
    for forms, counts, op in [([2, 1], [50, 50], "sum"), ([1, 2], [50, 50], "max"), ([1, 0], [10, 0], "sum")]:
        assert PartsLayout.planned(own.memories[0], forms, counts, (0, 50, 100), sparse, Reduction(as_operator(op))) is None


def test_lines_of_slots_do_not_meet():
    own = Host(2).memories[0]
    lines = [own.line_of(sequence, step) for sequence in range(SLOTS) for step in range(3)]
    assert len(set(lines)) == 3 * SLOTS and 0 not in lines
    assert own.line_of(5, GATHERING) == own.line_of(5 + SLOTS, GATHERING)
