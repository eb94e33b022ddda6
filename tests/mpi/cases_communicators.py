"""Any intracommunicator will do, nothing of it is left behind, and whatever is none is refused by name."""

import os
import socket
from unittest import mock

import numpy as np
import pytest
from mpi4py import MPI
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import Inputs, check_usable

import sparseallreduce as sar
from sparseallreduce.runtime import freeing, progress, setup
from sparseallreduce.runtime.communicators import measured, shares_memory
from sparseallreduce.runtime.hosts import Limit, this_place, usable_cores
from sparseallreduce.runtime.objects import gather


def case_communicator_of_one(comm):
    stream = sar.SparseStream([1, comm.rank + 2], [1.0, 2.0], 20)
    for alone in (MPI.COMM_SELF, sar.SERIAL):
        for algorithm in sar.algorithms():
            for result in (sar.allreduce(stream, alone, algorithm=algorithm), sar.iallreduce(stream, alone, algorithm=algorithm).wait()):
                assert result.to_dense().tolist() == stream.to_dense().tolist()


def case_world_by_default(comm):
    result = sar.allreduce(sar.SparseStream([comm.rank], [1], comm.size), algorithm="ssar_ring")
    assert result.to_dense().tolist() == [1] * comm.size
    assert sar.iallreduce(sar.SparseStream([comm.rank], [1], comm.size)).wait().to_dense().tolist() == [1] * comm.size


def case_parts_of_a_communicator_work_at_the_same_time(comm):
    """Of different sizes, with the ranks in reverse, each reducing its own."""
    part = comm.Split(0 if comm.rank < comm.size // 3 else 1, key=-comm.rank)
    started = []
    for algorithm in sar.algorithms():
        inputs = Inputs(part.size, 500, seed=part.size)
        started.append((inputs, sar.iallreduce(inputs.stream(part.rank), part, algorithm=algorithm)))
    whole = Inputs(comm.size, 100)
    whole.check(sar.allreduce(whole.stream(comm.rank), comm))
    for inputs, request in reversed(started):
        inputs.check(request.wait())
    part.Free()


def case_duplicates_are_communicators_of_their_own(comm):
    check_usable(comm)
    duplicate = comm.Dup()
    check_usable(duplicate)
    of_duplicate = duplicate.Dup()
    check_usable(of_duplicate)
    duplicate.Free()
    check_usable(of_duplicate)
    of_duplicate.Free()
    check_usable(comm)


@on_ranks(1, 2, 3, 4)
def case_ranks_know_the_cores_they_may_use(comm):
    """Not those of the host: bound to one together they share it, and to one each they do not, as far as there are so many."""
    before = os.sched_getaffinity(0)
    allowed = sorted(before)[: usable_cores()]
    for core, cores in ((allowed[0], 1), (allowed[comm.rank % len(allowed)], min(comm.size, len(allowed)))):
        os.sched_setaffinity(0, {core})
        try:
            duplicate = comm.Dup()
            check_usable(duplicate)
            if comm.size > 1:
                channel = progress.channels[-1]
                assert (channel.cores, channel.oversubscribed) == (cores, comm.size > cores)
            duplicate.Free()
        finally:
            os.sched_setaffinity(0, before)


def case_host_names_do_not_tell_hosts_apart(comm):
    """Processes of one machine and PID namespace share memory and cores, whatever each takes for the name of its host."""
    with mock.patch.object(socket, "gethostname", return_value=f"host {comm.rank}"):
        duplicate = comm.Dup()
        check_usable(duplicate)
    if comm.size > 1:
        assert shares_memory(duplicate)
    duplicate.Free()


@on_ranks(1, 2, 3, 4)
@each(boots=[1, 2], namespaces=[1, 2])
def case_boot_and_namespace_tell_hosts_apart(comm, boots, namespaces):
    """Ranks of one boot share cores, and of them those of one namespace of process ids memory; the names are all the same."""
    host, memory = bytes([comm.rank % boots]) * 8, bytes([comm.rank % boots, comm.rank % namespaces]) * 4
    here = this_place()._replace(host=host, memory=memory)
    with mock.patch.object(setup, "this_place", return_value=here):
        duplicate = comm.Dup()
        check_usable(duplicate)
    if comm.size > 1:
        channel, ranks = progress.channels[-1], len(range(comm.rank % boots, comm.size, boots))
        assert channel.shares_memory == shares_memory(duplicate) == (boots == namespaces == 1)
        assert (channel.cores, channel.oversubscribed) == (usable_cores(), ranks > usable_cores())
    duplicate.Free()


@on_ranks(1, 2, 3, 4)
@each(cgroups=[1, 2])
def case_limits_of_cgroups_count(comm, cgroups):
    """All in a cgroup that may use a core and a half, or each half of them in one that may use half of one."""
    limits = (Limit(1, 1500),) if cgroups == 1 else (Limit(1 + comm.rank % 2, 500),)
    here = this_place()._replace(affinity=b"\xff" + bytes(255), limits=limits)
    with mock.patch.object(setup, "this_place", return_value=here):
        duplicate = comm.Dup()
        check_usable(duplicate)
    if comm.size > 1:
        channel, cores = progress.channels[-1], 2 if cgroups == 1 else 1
        assert (channel.cores, channel.oversubscribed) == (cores, comm.size > cores)
        assert shares_memory(duplicate)
    duplicate.Free()


def case_communicator_with_a_topology(comm):
    ring = comm.Create_cart([comm.size], periods=[True])
    check_usable(ring)
    ring.Free()


def case_freed_communicators_leave_nothing_behind(comm):
    """Two duplicates each would use up what is left of MPICH's 2048 before the end; on more ranks the calls are counted instead."""
    others, times = [comm.Dup() for _ in range(1850 if comm.size == 2 else 0)], 110 if comm.size == 2 else 10
    freeing.finish()  # with what other cases have freed
    before, open_before = len(progress.channels), 0
    with mock.patch.object(freeing, "note_channel", side_effect=freeing.note_channel) as noted:
        for number in range(times):
            duplicate = comm.Dup()
            check_usable(duplicate)
            duplicate.Free()
            if number == 5:
                open_before = open_files()
    assert noted.call_count == (times if comm.size > 1 else 0)
    assert open_files() <= open_before, "descriptors are not given back with the communicator"
    freeing.finish()
    assert not progress.recall_freed() and len(progress.channels) == before
    for other in others:
        other.Free()
    assert not progress.operations


@on_ranks(2, 3)
@limit(30)
def case_a_communicator_is_freed_amid_the_users_own_operations(comm):
    """MPICH calls back when the last of them is done, inside of that call; Open MPI at once.

    On three ranks Open MPI itself ends in a segmentation fault if a barrier is under way on a communicator that is freed.
    """
    inputs = Inputs(comm.size, 200)
    barrier = [] if comm.size > 2 and MPI.get_vendor()[0] == "Open MPI" else ["barrier"]
    for kind in (*barrier, "receive", "never used", "in flight"):
        ours = comm.Dup()
        if kind != "never used":
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        place, source = np.zeros(1), (comm.rank - 1) % comm.size
        user = ours.Ibarrier() if kind == "barrier" else ours.Irecv(place, source) if kind == "receive" else MPI.REQUEST_NULL
        if kind == "receive":
            ours.Send(np.ones(1), (comm.rank + 1) % comm.size)
        request = sar.iallreduce(inputs.stream(comm.rank), ours) if kind in ("never used", "in flight") else None
        ours.Free()
        inputs.check(sar.allreduce(inputs.stream(comm.rank), comm))
        user.Wait()
        assert kind != "receive" or place[0] == 1
        if request is not None:
            with pytest.raises(sar.SparseAllreduceError, match="the communicator was freed while an operation on it was in flight"):
                request.wait()
        assert "COMM_NULL" in refusal(lambda ours=ours: sar.allreduce(inputs.stream(comm.rank), ours))
    check_usable(comm)


@on_ranks(2, 3)
@limit(30)
def case_communicators_are_freed_in_any_order(comm):
    """In another one on each rank, and so is what the library keeps for them."""
    duplicates = [comm.Dup() for _ in range(3)]
    for duplicate in duplicates:
        check_usable(duplicate)
        gather(duplicate, comm.rank)  # of which there is another duplicate
    for place in range(3):
        duplicates[(comm.rank + place) % 3].Free()
        check_usable(comm)
    freeing.finish()
    assert not progress.recall_freed()


@on_ranks(1, 2, 3)
def case_communicators_in_use_at_once(comm):
    duplicates = [comm.Dup() for _ in range(6)]
    inputs = Inputs(comm.size, 200)
    requests = [sar.iallreduce(inputs.stream(comm.rank), duplicate, algorithm="ssar_ring") for duplicate in duplicates]
    for request, duplicate in reversed(list(zip(requests, duplicates, strict=True))):
        inputs.check(request.wait())
        duplicate.Free()


@limit(30)
def case_new_communicators_are_first_used_in_any_order(comm):
    """On each rank in an order of its own; both are set up while operations on them wait."""
    duplicates = [comm.Dup() for _ in range(3)]
    order = [(comm.rank + place) % 3 for place in range(3)]
    inputs = Inputs(comm.size, 200)
    requests = {place: sar.iallreduce(inputs.stream(comm.rank), duplicates[place]) for place in order}
    for place in reversed(order):
        inputs.check(requests[place].wait())
    for duplicate in duplicates:
        check_usable(duplicate)
        duplicate.Free()


@on_ranks(2, 3)
def case_the_network_between_the_same_processes_is_measured_once(comm):
    """In whatever communicator they are; and again when one of them does not know, when they stand in another order, or elsewhere."""

    def measurements(make):
        own = make()
        with mock.patch.object(setup, "measure", side_effect=setup.measure) as measure:
            machine = measured(own)
        own.Free()
        assert len(set(comm.allgather((machine, measure.called)))) == 1
        return measure.call_count

    def swapped():
        return comm.Split(0, -comm.rank)

    with mock.patch.dict(setup._remembered, clear=True):
        assert measurements(comm.Dup) >= 1
        assert measurements(comm.Dup) == measurements(lambda: comm.Split(0, comm.rank)) == 0
        assert measurements(swapped) >= 1 and measurements(swapped) == measurements(comm.Dup) == 0
        if comm.rank == 1:
            setup._remembered.clear()
        assert measurements(comm.Dup) >= 1 and measurements(comm.Dup) == 0
        if comm.rank == 1:
            setup._remembered.update({group: machine._replace(alpha=1.0) for group, machine in setup._remembered.items()})
        assert measurements(comm.Dup) >= 1
        with mock.patch.object(setup, "this_place", return_value=this_place()._replace(memory=bytes([comm.rank]) * 8)):
            assert measurements(comm.Dup) >= 1
        with mock.patch.object(setup, "_GROUPS", 1):
            measurements(swapped)
            assert measurements(swapped) == 0 and measurements(comm.Dup) >= 1 and measurements(swapped) >= 1


def case_what_is_no_communicator_is_refused(comm):
    stream = sar.SparseStream([1], [1.0], 5)
    null = comm.Dup()
    null.Free()
    for wrong in (7, "world", np.ones(3), MPI.COMM_NULL, null, MPI.SUM, sar.SparseStream):
        for function in (sar.allreduce, sar.iallreduce):
            assert "comm must be an " in refusal(lambda call=function, wrong=wrong: call(stream, wrong))
    check_usable(comm)


def case_intercommunicator_is_refused(comm):
    if comm.size == 1:
        skip("needs two ranks")
    half = comm.Split(comm.rank % 2)
    both = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    assert "merge the intercommunicator" in refusal(lambda: sar.allreduce(sar.SparseStream([1], [1.0], 5), both))
    merged = both.Merge()
    check_usable(merged)
    for made in (merged, both, half):
        made.Free()


def refusal(function):
    """The text of the StreamTypeError that a call raises."""
    try:
        function()
    except sar.StreamTypeError as error:
        return str(error)
    raise AssertionError("no error was raised")


def open_files():
    """The number of descriptors that this process has open, before garbage is collected."""
    return len(os.listdir("/proc/self/fd"))
