"""The stand-in for MPI does what MPI does, as far as the library relies on it."""

import numpy as np
import pytest

from world.network import Exception_
from world.world import Preemptions, RandomOrder, Stuck, World


def on(ranks, program, order=None, **options):
    return World(ranks, **options).run(lambda rank: program(rank.MPI, rank.comm), order)


@pytest.mark.parametrize("eager", [0, 100])
def test_messages_of_a_sender_and_a_tag_keep_their_order(eager):
    def program(MPI, comm):
        if comm.rank == 0:
            arrays = [np.array([number], np.int64) for number in range(6)]
            requests = [comm.Isend([array, MPI.BYTE], 1, tag=number % 2) for number, array in enumerate(arrays)]
            return MPI.Request.Waitall(requests)
        came = []
        for tag in (1, 0, 0, 1, 1, 0):
            place = np.empty(1, np.int64)
            comm.Recv([place, MPI.BYTE], 0, tag)
            came.append(int(place[0]))
        return came

    assert on(2, program, eager=eager)[1] == [1, 0, 2, 3, 5, 4]


def test_a_long_message_leaves_when_it_is_received_and_a_short_one_at_once():
    def program(MPI, comm):
        if comm.rank == 0:
            array = np.array([7], np.int64)
            request = comm.Isend([array, MPI.BYTE], 1)
            done = request.Test()
            array[0] = 8  # what nobody may do before it is done
            comm.Barrier()
            return done
        comm.Barrier()
        place = np.empty(1, np.int64)
        comm.Recv([place, MPI.BYTE], 0)
        return int(place[0])

    assert on(2, program, eager=100) == [True, 7]
    assert on(2, program, eager=0) == [False, 8]


def test_a_message_that_is_too_long_raises_when_the_receive_is_tested():
    def program(MPI, comm):
        if comm.rank == 0:
            comm.Isend(bytes(8), 1)
            return None
        request = comm.Irecv(np.empty(7, np.uint8), 0)
        with pytest.raises(Exception_, match="TRUNCATE"):
            request.Wait()

    on(2, program)


def test_a_probe_takes_the_message_that_it_has_matched():
    def program(MPI, comm):
        if comm.rank:
            comm.Isend(bytes([comm.rank] * comm.rank), 0, tag=5)
            return None
        came, status = [], MPI.Status()
        while len(came) < 2:
            matched = comm.Improbe(MPI.ANY_SOURCE, 5, status)
            if matched is not None:
                place = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                matched.Recv(place)
                came.append((status.Get_source(), place.tolist()))
        return sorted(came)

    assert on(3, program)[0] == [(1, [1]), (2, [2, 2])]


def test_communicators_do_not_hear_each_other():
    def program(MPI, comm):
        other, request = comm.Idup()
        while not request.Test():
            pass
        if comm.rank == 0:
            comm.Isend(bytes([1]), 1)
            other.Isend(bytes([2]), 1)
            return None
        places = [np.empty(1, np.uint8) for _ in range(2)]
        other.Recv(places[0], 0)
        comm.Recv(places[1], 0)
        return [int(place[0]) for place in places]

    assert on(2, program)[1] == [2, 1]


@pytest.mark.parametrize("seed", range(5))
def test_collectives_are_matched_in_their_order(seed):
    def program(MPI, comm):
        sums = [np.full(3, comm.rank + number, np.float32) for number in range(3)]
        requests = [comm.Iallreduce(MPI.IN_PLACE, array, MPI.SUM) for array in sums]
        gathered = np.empty(comm.size, np.uint8)
        comm.Allgather(np.array([comm.rank], np.uint8), gathered)
        assert MPI.Request.Waitall(requests)
        varying = np.empty(6, np.int32)
        lengths, places = [1, 2, 3], [0, 1, 3]
        comm.Iallgatherv(np.full(comm.rank + 1, comm.rank, np.int32), [varying, lengths, places, None]).Wait()
        return [int(array[0]) for array in sums], gathered.tolist(), varying.tolist(), comm.allgather(comm.rank)

    assert on(3, program, RandomOrder(seed, 0.5)) == [([3, 6, 9], [0, 1, 2], [0, 1, 1, 2, 2, 2], [0, 1, 2])] * 3


def test_ranks_in_different_collectives_are_reported():
    with pytest.raises(Stuck, match="enters Barrier where another has entered Allreduce"):
        on(2, lambda MPI, comm: comm.Barrier() if comm.rank else comm.Allreduce(MPI.IN_PLACE, np.ones(1), MPI.SUM))


def test_ranks_that_wait_for_each_other_are_reported_at_once():
    with pytest.raises(Stuck, match="cannot return"):
        on(2, lambda MPI, comm: comm.Recv(np.empty(1, np.uint8), 1 - comm.rank))

    def polling(MPI, comm):
        if comm.rank:
            comm.Barrier()
        while comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG) is None:
            pass

    with pytest.raises(Stuck, match="nothing changes"):
        on(2, polling)


def test_a_collective_that_a_rank_waits_in_ends_when_the_last_one_has_entered():
    events = []

    def program(MPI, comm):
        for _ in range(comm.rank * 3):
            comm.Iprobe()
        events.append(("enters", comm.rank))
        comm.Barrier()
        events.append(("leaves", comm.rank))

    on(3, program)
    assert [what for what, _ in events] == ["enters"] * 3 + ["leaves"] * 3


def test_every_preemption_is_taken():
    """Of two ranks that count up a number between two points, one sees the other's step for some preemption."""
    seen = set()
    for at in range(1, 8):
        held = [0]

        def program(MPI, comm, held=held):
            comm.Iprobe()
            before = held[0]
            comm.world.point("between")
            held[0] = before + 1

        on(2, program, Preemptions({at: 1}))
        seen.add(held[0])
    assert seen == {1, 2}
