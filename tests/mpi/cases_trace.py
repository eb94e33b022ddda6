"""`sar.trace()` counts what the simulator counts for the same streams, on each rank."""

from mpi_cases import each, skip
from mpi_inputs import Inputs, check_usable

import sparseallreduce as sar

POINT_TO_POINT = ("allgather", "ssar_recursive_doubling", "ssar_split_allgather", "ssar_ring")


@each(algorithm=POINT_TO_POINT)
def case_bytes_and_messages_equal_the_simulation(comm, algorithm):
    check_usable(comm)
    check_counts(comm, Inputs(comm.size, 1000, "float32"), algorithm, "sum")
    check_counts(comm, Inputs(comm.size, 2000, entries=50), algorithm, "sum")
    check_counts(comm, Inputs(comm.size, 100), algorithm, "max")
    check_counts(comm, Inputs(comm.size, 2000, entries=50), algorithm, "mean")


def case_bytes_of_what_mpi_has_no_collective_for(comm):
    """No reduction of float16 or of masked streams: the library's own, as in the simulation."""
    check_usable(comm)
    for inputs, op in ((Inputs(comm.size, 100, "float16"), "sum"), (Inputs(comm.size, 100), "prod")):
        for algorithm in ("dense", "dsar_split_allgather", "dsar_early_switch") if op == "prod" else ("dense",):
            check_counts(comm, inputs, algorithm, op)


def case_operations_in_flight_add_up(comm):
    check_usable(comm)
    expected, started = 0, []
    with sar.trace() as counts:
        for algorithm in POINT_TO_POINT:
            inputs = Inputs(comm.size, 500)
            expected += simulated(inputs, algorithm, "sum").bytes_sent[comm.rank]
            started.append(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
        results = sar.Request.waitall(started)
    assert counts.bytes_sent == expected
    assert counts.operations == len(POINT_TO_POINT)
    assert counts.entries_out == sum(result.stored for result in results)


def case_measuring_a_communicator_is_not_counted(comm):
    """Nor is anything else of an operation that the same operation does not do the second time."""
    duplicate = comm.Dup()
    inputs = Inputs(comm.size, 500)
    twice = []
    for _ in range(2):
        with sar.trace() as counts:
            sar.allreduce(inputs.stream(comm.rank), duplicate, algorithm="ssar_ring")
        twice.append((counts.bytes_sent, counts.bytes_received, counts.messages, counts.agreement_bytes, counts.operations))
    assert twice[0] == twice[1]
    duplicate.Free()


def case_nothing_is_counted_outside_a_trace(comm):
    if comm.size == 1:
        skip("nothing is sent")
    with sar.trace() as outer:
        check_usable(comm)
        with sar.trace() as inner:
            check_usable(comm)
        check_usable(comm)
    check_usable(comm)
    assert 3 * inner.messages == outer.messages > 0


def check_counts(comm, inputs, algorithm, op):
    with sar.trace() as counts:
        sar.allreduce(inputs.stream(comm.rank), comm, op, algorithm)
    simulation = simulated(inputs, algorithm, op)
    for name in ("bytes_sent", "bytes_received", "messages", "header_bytes"):
        assert getattr(counts, name) == getattr(simulation, name)[comm.rank], f"{name}, {algorithm}, {op}"
    totals = comm.allgather((counts.bytes_sent, counts.bytes_received))
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals)


def simulated(inputs, algorithm, op):
    return sar.simulate([inputs.stream(rank) for rank in range(inputs.ranks)], algorithm, op=op)
