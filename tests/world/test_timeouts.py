"""Ranks whose time is over at any moment: every rank has the right sum or raises the same, at the latest in the next operation, and those
behind that are right.
"""

import random

import numpy as np
import pytest

import sparseallreduce as sar
from world import hooks
from world.hooks import DENSE, MESSAGES, PACKED, SPARSE_SHARED
from world.world import RandomOrder, World

SECONDS = (None, 2e-6, 1e-5, 3e-5, 1e-4)


def stream_of(number, rank, size):
    rng = random.Random(f"{number} {rank}")
    return sar.SparseStream(np.array(sorted(rng.sample(range(size), size // 5)), np.uint32), np.ones(size // 5, np.float32), size)


@pytest.mark.parametrize("hosts", [False, True], ids=["shared", "messages"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_whoever_waits_no_longer_leaves_the_others_right_or_with_one_error(ranks, hosts):
    struck, rng = 0, random.Random(ranks)
    world = World(ranks, hosts=[f"host {rank}" for rank in range(ranks)] if hosts else None)
    with hooks.hooked(lambda: None):
        world.run(lambda rank: rank.sar.allreduce(stream_of("first", rank.number, PACKED), rank.comm))
        for seed in range(80):
            sizes = [rng.choice((PACKED, DENSE, MESSAGES, SPARSE_SHARED)) for _ in range(6)]
            algorithm = rng.choice(("auto", "auto", "ssar_ring", "dense", "ssar_recursive_doubling"))
            waits = [[rng.choice(SECONDS) for _ in range(3)] for _ in range(ranks)]

            def program(rank, sizes=sizes, algorithm=algorithm, waits=waits, seed=seed):
                outcomes = []
                for number, size in enumerate(sizes):
                    stream = stream_of(f"{seed} {number}", rank.number, size)
                    try:
                        if number >= 3:
                            outcomes.append(rank.sar.allreduce(stream, rank.comm, algorithm=algorithm))
                        elif seed % 3:
                            outcomes.append(rank.sar.iallreduce(stream, rank.comm, algorithm=algorithm).wait(waits[rank.number][number]))
                        else:
                            outcomes.append(rank.sar.allreduce(stream, rank.comm, algorithm=algorithm, timeout=waits[rank.number][number]))
                    except sar.SparseAllreduceError as error:
                        outcomes.append((type(error), str(error)))
                return outcomes

            found = world.run(program, RandomOrder(seed, 0.1))
            owed = set()  # what the operation before has raised on some ranks alone, so that this one raises it on all
            for number, size in enumerate(sizes):
                said = [outcomes[number] for outcomes in found]
                errors = {each for each in said if isinstance(each, tuple)}
                assert len(errors) <= 1, (seed, number, errors)
                assert all(kind.__name__ == "WaitTimeoutError" for kind, _ in errors), (seed, number, errors)
                if owed:
                    assert all(isinstance(each, tuple) for each in said), (seed, number, owed, said)
                assert not errors or number < 3 or errors == owed, (seed, number, errors, owed)
                owed = errors if not all(isinstance(each, tuple) for each in said) else set()
                struck += len(errors)
                expected = sum(stream_of(f"{seed} {number}", rank, size).to_dense() for rank in range(ranks))
                for each in said:
                    if not isinstance(each, tuple):
                        np.testing.assert_array_equal(each.to_dense(), expected)
    assert struck > 20


@pytest.mark.parametrize("hosts", [False, True], ids=["shared", "messages"])
@pytest.mark.parametrize("size", [PACKED, SPARSE_SHARED, MESSAGES])
def test_who_comes_after_another_has_given_up_raises_the_same(hosts, size):
    """Although all records are there, and behind them all that a short sum needs."""
    world = World(2, hosts=["one", "other"] if hosts else None)
    over = []  # operations that rank 0 has given up

    def program(rank):
        outcomes = []
        stream = sar.SparseStream([rank.number], np.ones(1, np.float32), size)
        rank.sar.allreduce(stream, rank.comm)
        for number in range(3):
            while rank.number == 1 and len(over) <= number:
                world.wait("late")
            try:
                rank.sar.iallreduce(stream, rank.comm).wait(5e-3 if rank.number == 0 else None)
                outcomes.append("a result")
            except sar.WaitTimeoutError as error:
                outcomes.append(str(error))
            over.extend([number] * (rank.number == 0))
        return [*outcomes, rank.sar.allreduce(stream, rank.comm).to_dense()[:2].tolist()]

    with hooks.hooked(lambda: None):
        found = world.run(program)
    assert found[0] == found[1] and found[0][3] == [1.0, 1.0]
    assert all("rank 0 gave up" in text and "rank 1 has not started" in text for text in found[0][:3]), found
