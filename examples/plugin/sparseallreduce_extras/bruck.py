"""Bruck's allgather of whole streams (Bruck et al., IEEE TPDS 1997, section 4), as an allreduce: log2(P) messages a rank, for any P."""

from sparseallreduce.algorithms import Algorithm
from sparseallreduce.algorithms.steps import Quantise, Shift


def bruck(stream, rank, ranks, reduction):
    """Gather the streams of all ranks in ceil(log2 P) steps, and add them up.

    Before the step of distance d a rank holds the streams of d ranks, from its own on; it receives those of the next d ranks, or of as
    many as are missing. All ranks then add the streams in the order of ranks, so that their results are bitwise identical.
    """
    held, distance = [(yield Quantise(stream, rank, 0))], 1
    while distance < ranks:
        count = min(distance, ranks - distance)
        held += yield Shift((rank - distance) % ranks, tuple(held[:count]), (rank + distance) % ranks)
        distance *= 2
    in_order = [held[(other - rank) % ranks] for other in range(ranks)]
    return reduction.same_nans(reduction.many(in_order))


def seconds(problem, machine):
    """Return the expected time: log2 P messages, which bring P - 1 streams, and as many additions."""
    steps, received = (problem.ranks - 1).bit_length(), (problem.ranks - 1) * problem.entries
    entry = problem.index_bytes + problem.value_bytes
    return steps * machine.alpha + received * (entry * machine.beta + steps * machine.gamma)


#: What the entry point names: the schedule with its cost, so that "auto" can select it.
BRUCK = Algorithm(bruck, cost=seconds)
