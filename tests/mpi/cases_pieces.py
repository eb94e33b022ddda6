"""Messages above the piece size travel in pieces; a small piece size stands for the gigabyte that it is otherwise."""

from contextlib import contextmanager
from unittest import mock

from mpi_cases import each
from mpi_inputs import Inputs, check_usable, same_everywhere

import sparseallreduce as sar
from sparseallreduce.runtime import mailbox


@each(algorithm=sar.algorithms(), piece=[64, 1000])
def case_pieces_make_the_same_result(comm, algorithm, piece):
    for inputs in (Inputs(comm.size, 300, "float32"), Inputs(comm.size, 3000, seed=1, entries=100)):
        options = {"machine": sar.Machine()} if algorithm == "auto" else {}
        whole = sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, **options)
        with pieces_of(piece, comm, inline=200 if piece == 1000 else 0):
            result = sar.allreduce(inputs.stream(comm.rank), comm, algorithm=algorithm, **options)
        inputs.check(result)
        same_everywhere(comm, whole, result)


@each(pieces=[1, 2, 3])
def case_part_that_is_an_exact_multiple_of_the_piece(comm, pieces):
    inputs = Inputs(comm.size, 3000, "int32", seed=comm.size, entries=64 * pieces)
    stream = inputs.stream(comm.rank)
    assert stream.indices.nbytes == stream.values.nbytes == 256 * pieces
    with pieces_of(256, comm):
        inputs.check(sar.allreduce(stream, comm, algorithm="ssar_recursive_doubling"))
        inputs.check(sar.allreduce(stream, comm, algorithm="allgather"))


def case_pieces_of_several_operations_keep_apart(comm):
    names = ("ssar_ring", "allgather", "ssar_split_allgather", "ssar_recursive_doubling")
    with pieces_of(128, comm):
        started = [
            (inputs, sar.iallreduce(inputs.stream(comm.rank), comm, algorithm=names[inputs.seed % 4]))
            for inputs in (Inputs(comm.size, 400, seed=number) for number in range(8))
        ]
        for inputs, request in reversed(started):
            inputs.check(request.wait())


@contextmanager
def pieces_of(nbytes, comm, inline=0):
    """Every rank cuts its messages so, and packs those that are shorter than `inline`."""
    check_usable(comm)  # with whole messages, if this is the communicator's first operation
    comm.Barrier()
    with mock.patch.multiple(mailbox, PIECE_BYTES=nbytes, INLINE_BYTES=inline):
        yield
        comm.Barrier()
