"""Exchanges of values between ranks whose actions have exchanges of their own: a failure anywhere is raised by all ranks."""

import pytest
from mpi_cases import each, skip

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.runtime.objects import agreed, gather, gather_results, together

RANKS = (1, 3)


@each(where=["before", "between", "after"], error=[RuntimeError, DatasetError, KeyboardInterrupt])
def case_a_rank_that_fails_between_the_exchanges_of_an_action_is_not_taken_for_one_of_them(comm, where, error):
    if comm.size == 1:
        skip("needs two ranks")
    struck = comm.rank == comm.size - 1

    def failing(place):
        if struck and where == place:
            raise error("struck")

    def action():
        failing("before")
        assert gather(comm, comm.rank) == list(range(comm.size))
        failing("between")
        agreed(comm, lambda: comm.rank)
        failing("after")

    expected = error if struck and error is KeyboardInterrupt else sar.SparseAllreduceError if error is KeyboardInterrupt else Exception
    with pytest.raises(expected, match="struck"):
        together(comm, lambda: gather_results(comm, action))
    assert gather_results(comm, lambda: comm.rank) == list(range(comm.size))


@each(depth=[1, 3])
def case_an_error_of_a_nested_exchange_keeps_its_class_and_text(comm, depth):
    if comm.size == 1:
        skip("needs two ranks")

    def nested(depth):
        if depth == 0:
            if comm.rank == 0:
                raise DatasetError("line 3: no number")
            return comm.rank
        return agreed(comm, lambda: nested(depth - 1))

    with pytest.raises(DatasetError, match=r"^line 3: no number$"):
        nested(depth)
    assert agreed(comm, lambda: 5) == 5
