"""Whole operations of any kind, over the stand-in for MPI, in any order of the ranks: the sum of all, to the same bits, on every rank."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import cases
from thoroughness import examples

import sparseallreduce as sar
from world import hooks
from world.world import RandomOrder, World

WORLDS = {(ranks, hosts): None for ranks in (2, 3, 5) for hosts in (False, True)}


def world_of(ranks, hosts):
    """One that is used again, with all its memory; the hosts share none."""
    if WORLDS[ranks, hosts] is None:
        WORLDS[ranks, hosts] = World(ranks, hosts=[f"host {rank}" for rank in range(ranks)] if hosts else None)
    return WORLDS[ranks, hosts]


@settings(max_examples=examples(60))
@given(
    data=st.data(),
    place=st.sampled_from(list(WORLDS)),
    seed=st.integers(0, 2**32),
    algorithm=st.sampled_from(["auto", "auto", *sar.algorithms()]),
    calls=st.lists(st.booleans(), min_size=1, max_size=5),
)
def test_every_rank_gets_the_reduction_whoever_waits(data, place, seed, algorithm, calls):
    """Each rank makes every call in a row, some blocking and some waited for at the end, another rank others."""
    ranks, hosts = place
    case = data.draw(cases(ranks=st.just(ranks)))
    before = [bits(stream) for stream in case.streams]
    world = world_of(ranks, hosts)

    def program(rank):
        results = [None] * len(calls)
        for number, blocking in enumerate(calls):
            given = case.streams[rank.number], rank.comm, case.operator, algorithm
            if blocking != (rank.number == number):
                results[number] = rank.sar.allreduce(*given)
            else:
                results[number] = rank.sar.iallreduce(*given)
        return [result.wait() if hasattr(result, "wait") else result for result in results]

    with hooks.hooked(lambda: None):
        found = world.run(program, RandomOrder(seed, 0.1))
    assert_reduction(found[0][0], case.entries, case.size, case.operator, case.exact)
    for number in range(len(calls)):
        assert len({bits(results[number]) for results in found}) == 1
        assert np.shape(found[0][number].to_dense())[0] == case.size
    assert [bits(stream) for stream in case.streams] == before


def test_an_interrupt_between_a_result_and_what_follows_bars_nothing():
    """The operation is over then, and those behind it begin their collectives of MPI."""
    world = World(2)

    def program(rank):
        comm, stream = rank.comm.Dup(), sar.SparseStream([rank.number], np.ones(1, np.float32), 80)
        rank.sar.allreduce(stream, comm)
        operation = rank.library.load("sparseallreduce.runtime.operation").Operation
        complete, struck = operation._complete, []

        def interrupted(self, result):
            complete(self, result)
            if rank.number == 0 and not struck:
                struck.append(self)
                raise KeyboardInterrupt

        operation._complete = interrupted
        request = rank.sar.iallreduce(stream, comm, algorithm="ssar_ring")
        try:
            results = [request.wait()]
        except KeyboardInterrupt:
            results = []
        assert bool(struck) == (rank.number == 0)
        with pytest.raises(rank.sar.SparseAllreduceError, match="KeyboardInterrupt: rank 0 gave up"):
            rank.sar.iallreduce(stream, comm, algorithm="dense").wait()
        for _ in range(3):
            results.append(rank.sar.iallreduce(stream, comm, algorithm="dense").wait())
        return [result.to_dense()[:2].tolist() for result in results]

    with hooks.hooked(lambda: None):
        assert world.run(program) == [[[1.0, 1.0]] * 3, [[1.0, 1.0]] * 4]


def test_who_comes_after_another_has_withdrawn_does_not_enter_mpis_sum():
    """All have published that they are armed by then, and word of the one that gave up is there, too."""
    constants = {"sparseallreduce.runtime.handshake.messages": {"WITHDRAWAL_SECONDS": 0.0}}
    world, armed, struck = World(2, hosts=["one", "other"], constants=constants), [], []
    over = []  # ranks that have their first outcome

    def inject(rank, kind):
        if rank.number == 1 and kind == "MPI.Testall" and armed and not struck:
            struck.append(kind)
            raise MemoryError("no room")

    def program(rank):
        comm, results = rank.comm.Dup(), []
        rank.sar.allreduce(sar.SparseStream([rank.number], np.ones(1, np.float32), hooks.DENSE), comm)
        while rank.number == 0 and not over:
            world.wait("late")
        armed.append(rank.number)
        for _ in range(3):
            try:
                results.append(rank.sar.allreduce(sar.SparseStream([rank.number], np.ones(1, np.float32), hooks.DENSE), comm).nnz)
            except sar.SparseAllreduceError as error:
                results.append(str(error))
            over.append(rank.number)
        return results

    with hooks.hooked(lambda: world):
        world.injector = inject
        found = world.run(program)
    assert struck
    assert found == [["MemoryError: rank 1 gave up: no room", 2, 2]] * 2


def test_who_fails_enters_mpis_sum_if_all_records_say_that_all_do_and_otherwise_withdraws():
    """Where the records are messages: whoever has all of them, and finds that they say so, is inside or on its way there."""

    def withdraws(messages, **others):
        record = {"usable": True, "length": 0, "valid": True, "flags": 2, "digest": 7, "entries": 3}
        handshake = messages.MessageHandshake.__new__(messages.MessageHandshake)
        handshake._channel, handshake._requests = SimpleNamespace(rank=0), []  # all have come
        handshake._places = [messages.RECORD.pack(*each.values()) for each in (record, record | others)]
        return handshake.withdraw(1)

    def program(rank):
        messages = rank.library.load("sparseallreduce.runtime.handshake.messages")
        others = ({}, {"flags": 3}, {"flags": 1}, {"usable": False}, {"valid": False}, {"digest": 8})
        return [withdraws(messages, **each) for each in others]

    assert World(1).run(program) == [[False, False, True, True, True, True]]


def test_an_interrupt_behind_an_operation_leaves_those_on_other_communicators_alone():
    world, sizes = World(2), (80, 96)

    def program(rank):
        comms = [rank.comm.Dup() for _ in sizes]
        streams = [sar.SparseStream([rank.number], np.ones(1, np.float32), size) for size in sizes]
        for comm, stream in zip(comms, streams):
            rank.sar.allreduce(stream, comm)
        operation = rank.library.load("sparseallreduce.runtime.operation").Operation
        complete, struck = operation._complete, []

        def interrupted(self, result):
            complete(self, result)
            if rank.number == 0 and result.size == sizes[0] and not struck:
                struck.append(self)
                raise KeyboardInterrupt

        operation._complete = interrupted
        other = rank.sar.iallreduce(streams[1], comms[1], algorithm="ssar_ring") if rank.number == 0 else None
        try:
            rank.sar.iallreduce(streams[0], comms[0], algorithm="ssar_ring").wait()
        except KeyboardInterrupt:
            assert struck
        operation._complete = complete
        other = other or rank.sar.iallreduce(streams[1], comms[1], algorithm="ssar_ring")
        return bool(struck), other.wait().to_dense()[:2].tolist()

    with hooks.hooked(lambda: None):
        assert world.run(program) == [(True, [1.0, 1.0]), (False, [1.0, 1.0])]
