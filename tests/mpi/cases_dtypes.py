"""Sums of bfloat16, which MPI does not know, and of complex numbers, which have no order."""

from unittest import mock

import numpy as np
import pytest
from mpi_cases import each, on_ranks
from mpi_inputs import Inputs, check_usable, same_everywhere

import sparseallreduce as sar
from sparseallreduce.runtime import collectives
from sparseallreduce.streams.dtypes import BFLOAT16

RANKS = (1, 2, 3)
DTYPES = (*(() if BFLOAT16 is None else ("bfloat16",)), "complex64", "complex128")
OPERATORS = ("sum", "prod", "min", "max")


def operators_of(dtype):
    return OPERATORS[:2] if dtype.startswith("complex") else OPERATORS


def kinds(ranks, dtype):
    """Of every size, form and way: empty, of one entry, that travel with the agreement, in shared memory, dense, of rows."""
    yield from (Inputs(ranks, size, dtype, seed=size) for size in (0, 1, ranks + 1, 61, 5000))
    yield from (Inputs(ranks, 50, dtype, width=3), Inputs(ranks, 150_000, dtype, entries=300))
    yield Inputs(ranks, 10**5, dtype, entries=20_000)
    yield Inputs(ranks, 3000, dtype, entries=3000)
    yield Inputs(ranks, 10**5, dtype, entries=(10**5, *(2,) * (ranks - 1)))


@on_ranks(1, 2, 3, 5)
@each(dtype=DTYPES, algorithm=sar.algorithms())  # in this order the expected results are there from the last algorithm
def case_every_rank_holds_the_reduction(comm, algorithm, dtype):
    for op in operators_of(dtype):
        given = list(kinds(comm.size, dtype))[: None if op == "sum" else 6]
        requests = [sar.iallreduce(inputs.stream(comm.rank), comm, op, algorithm) for inputs in given]
        blocking = [sar.allreduce(inputs.stream(comm.rank), comm, op, algorithm) for inputs in given]
        later = sar.Request.waitall(requests)
        for inputs, ours, theirs in zip(given, blocking, later):
            inputs.check(ours, op)
            inputs.check(theirs, op)
        same_everywhere(comm, *blocking, *later)


@each(dtype=DTYPES)
def case_dense_vectors_of_every_length(comm, dtype):
    """Those for which memory is shared, and those that MPI adds up, if it knows the dtype."""
    for size in (16, 1000, 40_000, 300_000):
        inputs = Inputs(comm.size, size, dtype, entries=size)
        for _ in range(2):
            result = sar.allreduce(inputs.stream(comm.rank), comm)
            inputs.check(result)
            same_everywhere(comm, result)


@each(algorithm=["auto", "dense", "ssar_split_allgather"], dtype=DTYPES)
def case_mean(comm, algorithm, dtype):
    for size, entries in ((61, None), (5000, 40), (3000, 3000)):
        inputs = Inputs(comm.size, size, dtype, seed=size, entries=entries)
        total, mean = (sar.allreduce(inputs.stream(comm.rank), comm, op, algorithm) for op in ("sum", "mean"))
        assert mean.to_dense().tobytes() == (total.to_dense() / total.dtype.type(comm.size)).tobytes()
        same_everywhere(comm, mean)


@each(algorithm=["dsar_split_allgather", "dsar_early_switch"], dtype=DTYPES)
def case_many_ranks_gather_by_a_collective_of_mpi(comm, algorithm, dtype):
    """As more than 16 do."""
    with mock.patch.object(collectives, "DIRECT_RANKS", 0):
        for size, width in ((comm.size - 1, None), (1000, None), (50, 3)):
            inputs = Inputs(comm.size, size, dtype, width, seed=size)
            inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm))


@each(dtype=DTYPES)
def case_special_values_are_the_same_everywhere(comm, dtype):
    """But for MPI's own sum, of any dtype, of which each rank may have a NaN of another sign."""
    names = [name for name in sar.algorithms() if name != "dense"]
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0], dtype)
    for size in (20, 4000):
        values = np.roll(np.resize(special, size // 2), comm.rank)
        stream = sar.SparseStream(np.arange(size // 2) * 2 % size, values, size)
        results = [sar.allreduce(stream, comm, algorithm=algorithm) for algorithm in names]
        results += sar.Request.waitall([sar.iallreduce(stream, comm, algorithm=algorithm) for algorithm in names])
        same_everywhere(comm, *results)


@each(op=["min", "max"], dtype=["complex64", "complex128"])
def case_complex_numbers_have_no_order_on_any_rank(comm, op, dtype):
    stream = sar.SparseStream([comm.rank], np.ones(1, dtype), 9)
    for call in (lambda: sar.allreduce(stream, comm, op), lambda: sar.iallreduce(stream, comm, op).wait()):
        with pytest.raises(sar.StreamTypeError, match=f"have no order, and so no {op}"):
            call()
    check_usable(comm)


@on_ranks(2, 3)
@each(other=DTYPES)
def case_ranks_of_other_dtypes_are_told(comm, other):
    """Of one width in bytes, too."""
    mine = {"bfloat16": "float16", "complex64": "float64", "complex128": "float64"}[other] if comm.rank == 0 else other
    with pytest.raises(sar.MismatchError, match=other):
        sar.allreduce(sar.SparseStream([1], np.ones(1, mine), 9), comm)
    check_usable(comm)
