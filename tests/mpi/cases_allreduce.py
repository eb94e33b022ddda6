"""The result is the dense reduction, for every algorithm, blocking or not, and the same to the bit on every rank and in every run."""

import random
import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
from mpi4py import MPI
from mpi_cases import each, on_ranks
from mpi_inputs import DTYPES, FLOATS, Inputs, same_everywhere
from oracle import bits

import sparseallreduce as sar
from sparseallreduce.runtime import collectives
from sparseallreduce.streams import memory


def greater(a, b, out=None):
    """Not one of the operators that are known by name, nor a ufunc."""
    return np.fmax(a, b, out=out)


OPERATORS = ("sum", "prod", "min", "max", sar.Operator("greater", greater, lambda dtype: -100))


@each(algorithm=sar.algorithms())
def case_result_equals_the_dense_reduction(comm, algorithm):
    for inputs in sizes(comm.size):
        inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))


@each(algorithm=sar.algorithms())
def case_result_without_blocking_equals_the_dense_reduction(comm, algorithm):
    requests = [(inputs, sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm)) for inputs in sizes(comm.size)]
    for inputs, request in requests:
        inputs.check(request.wait())


@on_ranks(1, 2, 5)
@each(algorithm=sar.algorithms(), dtype=DTYPES)
def case_every_operator_and_dtype(comm, algorithm, dtype):
    started = []
    for op in OPERATORS:
        for size in (comm.size - 1, 61) if op in ("sum", "min") else (61,):
            inputs = Inputs(comm.size, size, dtype, seed=size)
            started.append((inputs, op, sar.iallreduce(inputs.stream(comm.rank), comm, op, algorithm)))
    for inputs, op, request in started:
        inputs.check(request.wait(), op)


@on_ranks(1, 2, 3)
@each(algorithm=sar.algorithms())
def case_mean(comm, algorithm):
    """To the bit the sum divided by the number of ranks, blocking or not, the first time and the next, however often it is asked for."""
    for number, (size, width) in enumerate(((comm.size - 1, None), (61, None), (5000, None), (50, 3))):
        dtype = FLOATS[(number + comm.size) % 3]  # of one, two and three ranks, each size has all
        inputs = Inputs(comm.size, size, dtype, width, seed=size)
        for _ in range(2):
            stream, before = inputs.stream(comm.rank), bits(inputs.stream(comm.rank))
            pairs = [[sar.allreduce(stream, comm, op, algorithm) for op in ("sum", "mean")]]
            requests = []
            for op in ("sum", "mean"):  # one after the other: of two in flight the second may add in another order
                requests.append(sar.iallreduce(stream, comm, op, algorithm))
                requests[-1].wait()
            pairs.append([request.wait() for request in requests])
            for total, mean in pairs:
                assert mean.to_dense().tobytes() == (total.to_dense() / total.dtype.type(comm.size)).tobytes()
                assert mean.is_dense == total.is_dense and not mean.values.flags.writeable
                assert not mean.overlaps(stream)
            assert requests[1].wait() is requests[1].test()[1] is pairs[1][1]
            assert bits(stream) == before
            same_everywhere(comm, *pairs[0], *pairs[1])


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms())
def case_rows(comm, algorithm):
    started = []
    for op, dtype in (("sum", "float32"), ("sum", "int64"), ("max", "float64")):
        for seed in range(2):
            inputs = Inputs(comm.size, 50, dtype, width=3, seed=seed)
            started.append((inputs, op, sar.iallreduce(inputs.stream(comm.rank), comm, op, algorithm)))
    for inputs, op, request in started:
        inputs.check(request.wait(), op)


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms())
def case_streams_from_arrays(comm, algorithm):
    for op in ("sum", "min"):
        inputs = Inputs(comm.size, 1000, "float32", seed=2)
        inputs.check(sar.allreduce(inputs.dense_form(comm.rank), comm, op, algorithm), op)


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms())
def case_lower_switch_point(comm, algorithm):
    inputs = Inputs(comm.size, 1000, entries=30)
    for density in (0, 0.05, 1):
        result = sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, switch_density=density)
        inputs.check(result)
        if density == 0:
            assert result.is_dense


@each(group_size=[1, 2, 3, 8])
def case_early_switch_in_groups_of_any_size(comm, group_size):
    for size in (comm.size - 1, 1001):
        inputs = Inputs(comm.size, size, seed=group_size)
        inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm="dsar_early_switch", group_size=group_size))


@each(algorithm=["dsar_split_allgather", "dsar_early_switch"])
def case_many_ranks_gather_by_a_collective_of_mpi(comm, algorithm):
    """As more than 16 do."""
    with mock.patch.object(collectives, "DIRECT_RANKS", 0):
        for number, dtype in enumerate(DTYPES):
            for size, width in ((comm.size - 1, None), (1000, None), (50, 3)):
                inputs = Inputs(comm.size, size, dtype, width, seed=number)
                inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))


@each(op=["SUM", "PROD", "MIN", "MAX"])
def case_operator_of_mpi(comm, op):
    inputs = Inputs(comm.size, 100)
    inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, getattr(MPI, op)), op.lower())


def case_empty_streams_on_all_ranks(comm):
    for algorithm in sar.algorithms():
        result = sar.allreduce(sar.SparseStream([], np.empty(0, np.float32), 10**9), comm, algorithm="auto")
        assert (result.nnz, result.size, result.dtype) == (0, 10**9, np.float32), algorithm


def case_dimension_above_32_bits(comm):
    size = 2**40
    stream = sar.SparseStream([comm.rank, 2**33, size - 1 - comm.rank], [1.0, 2.0, 3.0], size)
    for algorithm in ("allgather", "ssar_recursive_doubling", "ssar_split_allgather", "ssar_ring"):
        result = sar.allreduce(stream, comm, algorithm=algorithm)
        assert result.indices.tolist() == [*range(comm.size), 2**33, *range(size - comm.size, size)]
        assert result.values.tolist() == [1.0] * comm.size + [2.0 * comm.size] + [3.0] * comm.size


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms())
def case_inputs_are_left_as_they_were(comm, algorithm):
    for entries in (20, 1000):
        inputs = Inputs(comm.size, 1000, entries=entries)
        stream = inputs.stream(comm.rank)
        before = stream.indices.tobytes(), stream.values.tobytes(), stream.is_dense
        first = sar.allreduce(stream, comm, algorithm=algorithm)
        kept = first.to_dense()
        second = sar.allreduce(stream, comm, algorithm=algorithm)
        assert (stream.indices.tobytes(), stream.values.tobytes(), stream.is_dense) == before
        assert first.to_dense().tobytes() == kept.tobytes() == second.to_dense().tobytes()


@each(algorithm=sar.algorithms())
def case_every_rank_holds_the_same_bits(comm, algorithm):
    requests = []
    for dtype in FLOATS:
        for seed, size, entries in ((0, 20_000, 1_000), (1, 2_000, None), (2, 500, 100)):
            inputs = Inputs(comm.size, size, dtype, seed=seed, entries=entries)
            requests.append(sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))
    same_everywhere(comm, *sar.Request.waitall(requests))


@each(where=["counted", "late", "waiting"], entries=[20, 700, 1500, 8000])
def case_ranks_that_go_different_ways_get_the_same_bits(comm, where, entries):
    """One rank is counted, comes late, or has a request in flight, which may keep it from the short way of a blocking operation."""
    inputs = Inputs(comm.size, 10_000, "float32", entries=entries)
    stream = inputs.stream(comm.rank)
    for apart in range(comm.size):
        pending = sar.iallreduce(stream, comm)
        if comm.rank != apart or where != "waiting":
            pending.wait()  # for which the one that is waiting moves on in the next operation
        if comm.rank == apart and where == "late":
            time.sleep(2e-3)
        with sar.trace() if comm.rank == apart and where == "counted" else nullcontext():
            result = sar.allreduce(stream, comm)
        inputs.check(result)
        same_everywhere(comm, result, pending.wait())


@each(late=[False, True], step=[1, 2])
def case_large_sums_lie_in_memory_of_former_ones(comm, late, step):
    size = 100_000
    positions, held = np.arange(comm.rank, size, step), np.zeros(size, np.float32)
    for rank in range(comm.size):
        held[rank::step] += 1
    with mock.patch.object(memory, "FRESH", 0):
        for run in range(1, 4):
            stream = sar.SparseStream(positions, np.full(len(positions), run, np.float32), size)
            if late and comm.rank == run % comm.size:
                time.sleep(2e-3)
            result = sar.allreduce(stream, comm)
            assert np.array_equal(result.to_dense(), held * run)
            assert np.array_equal(stream.values, np.full(len(positions), run))


@on_ranks(2, 3, 5)
@each(size=[10_000, 300_000], op=["sum", "max"])
def case_streams_that_travel_with_the_agreement_on_some_ranks_only(comm, size, op):
    """Since others hold more, or are dense."""
    for longer in {0, comm.size - 1}:
        for entries in (0, 40, 3000, size // 3, size):
            inputs = Inputs(comm.size, size, "float32", entries=tuple(entries if rank == longer else 40 for rank in range(comm.size)))
            result = sar.allreduce(inputs.stream(comm.rank), comm, op=op)
            inputs.check(result, op)
            same_everywhere(comm, result)


@on_ranks(1, 2, 3, 5)
@each(algorithm=sar.algorithms())
def case_every_run_gives_the_same_bits(comm, algorithm):
    """Whichever rank is late."""
    streams = [Inputs(comm.size, 4_000, dtype, seed=3, entries=600).stream(comm.rank) for dtype in FLOATS]
    lateness = random.Random(f"{comm.rank} {algorithm}")
    # "auto" may take another algorithm on another machine, or for a rank that does not block, but not in another run of the same.
    options = {"machine": sar.Machine()} if algorithm == "auto" else {}
    runs = []
    for run in range(6):
        time.sleep(lateness.choice([0, 0, 0.002, 0.005]))
        if run % 2:
            results = [sar.allreduce(stream, comm, algorithm=algorithm, **options) for stream in streams]
        else:
            requests = [sar.iallreduce(stream, comm, algorithm=algorithm, **options) for stream in streams]
            time.sleep(lateness.choice([0, 0, 0.002, 0.005]))
            results = sar.Request.waitall(requests)
        runs.append([bits(result) for result in results])
    first = runs[0], runs[1] if algorithm == "auto" else runs[0]
    assert all(run == first[number % 2] for number, run in enumerate(runs))
    same_everywhere(comm, *results)


def sizes(ranks):
    """Dimensions 0, 1, below P, not divisible by P, and large; k different on each rank, from 0 to N."""
    return [
        Inputs(ranks, size, dtype, seed=seed)
        for size, dtype, seed in (
            (0, "float64", 0),
            (1, "float32", 0),
            (1, "int64", 1),
            (ranks - 1, "float64", 2),
            (ranks + 1, "float32", 3),
            (7 * ranks + 3, "int32", 4),
            (1000, "float16", 5),
            (10**5, "float32", 6),
            (10**5, "float64", 1),
        )
    ]
