"""Whole operations of any kind, over the stand-in for MPI, in any order of the ranks: the sum of all, to the same bits, on every rank."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import cases

import sparseallreduce as sar
from world import hooks
from world.world import RandomOrder, World

WORLDS = {(ranks, hosts): None for ranks in (2, 3, 5) for hosts in (False, True)}


def world_of(ranks, hosts):
    """One that is used again, with all its memory; the hosts share none."""
    if WORLDS[ranks, hosts] is None:
        WORLDS[ranks, hosts] = World(ranks, hosts=[f"host {rank}" for rank in range(ranks)] if hosts else None)
    return WORLDS[ranks, hosts]


@settings(max_examples=60)
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
