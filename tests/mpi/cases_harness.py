"""The harness itself: every rank is there, under the MPI library that was asked for, with one thread."""

import os

from mpi_cases import each, skip


def case_every_rank_takes_part(comm):
    assert sorted(comm.allgather(comm.rank)) == list(range(comm.size))


@each(root=[0, 1])
def case_root_reaches_all(comm, root):
    if root >= comm.size:
        skip("needs two ranks")
    assert comm.bcast(comm.rank, root=root) == root


def case_ranks_have_one_thread(comm):
    assert os.environ["NUMBA_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
