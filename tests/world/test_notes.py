"""More ranks than tell each other with their records how their sets overlap, on two hosts: they do in messages of their own."""

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.algorithms import overlap
from sparseallreduce.algorithms.overlap import estimated, sample_of
from world import library
from world.world import RandomOrder, World

RANKS = 17
SIZE, ENTRIES = 1 << 20, 60_000  # so many that the samples of their indices are a hundredth of what travels
HOSTS = ["one"] * 9 + ["other"] * (RANKS - 9)


def stream_of(rank, entries=ENTRIES):
    """Half of the entries are at places that all ranks have."""
    rng = np.random.default_rng(rank + 1)
    shared = np.random.default_rng(0).choice(SIZE // 2, entries // 2, replace=False)
    own = SIZE // 2 + rng.choice(SIZE // 2, entries - len(shared), replace=False)
    indices = np.sort(np.concatenate([shared, own]))
    return sar.SparseStream(indices, rng.integers(1, 9, len(indices)).astype(np.float32), SIZE)


@pytest.fixture(scope="module")
def streams():
    return [stream_of(rank) for rank in range(RANKS)]


@pytest.fixture
def world(monkeypatch):
    """Ranks on a slow network, of which each notes in ``known`` by what overlap its sums were chosen."""
    monkeypatch.setattr(library, "MACHINE", library.MACHINE._replace(alpha=1e-6, beta=8e-9))
    made = World(RANKS, cores=2, hosts=HOSTS)
    for rank in made.ranks:
        rank.known = []
        signature = rank.library.load("sparseallreduce.runtime.signature")
        signature.allreduce = noting(rank, signature.allreduce)
    return made


def noting(rank, allreduce):
    def run(call, entries, number, ranks, machine, reduction, overlap=None, hosts=None):
        rank.known.append(overlap)
        return allreduce(call, entries, number, ranks, machine, reduction, overlap, hosts)

    return run


def check(results, streams):
    expected = sum(stream.to_dense() for stream in streams)
    for result in results:
        np.testing.assert_array_equal(result.to_dense(), expected)


def test_the_ranks_choose_by_how_their_sets_overlap(world, streams):
    found = world.run(lambda rank: [rank.sar.allreduce(streams[rank.number], rank.comm) for _ in range(2)], RandomOrder(1, 0.05))

    expected = estimated([sample_of(stream, rank, RANKS) for rank, stream in enumerate(streams)], SIZE)
    for rank in world.ranks:
        assert rank.known == [expected, expected]
    for number in range(2):
        check([results[number] for results in found], streams)


def test_some_block_and_some_do_not(world, streams):
    """With other operations in flight, whose messages are not taken for those in which the ranks tell each other."""
    few = [stream_of(rank, 400) for rank in range(RANKS)]

    def program(rank):
        first, second = (rank.sar.iallreduce(given[rank.number], rank.comm) for given in (streams, few))
        third = rank.sar.allreduce if rank.number % 2 else lambda *args: rank.sar.iallreduce(*args).wait()
        results = {2: third(streams[rank.number], rank.comm)}
        for number, request in sorted({0: first, 1: second}.items(), reverse=rank.number % 3 == 0):
            results[number] = request.wait()
        return results

    found = world.run(program, RandomOrder(2, 0.05))
    for number, given in enumerate((streams, few, streams)):
        check([results[number] for results in found], given)
    overlaps = world.ranks[0].known
    assert None in overlaps and sum(overlap is not None for overlap in overlaps) == 2
    assert all(sorted(rank.known, key=str) == sorted(overlaps, key=str) for rank in world.ranks)


def test_a_rank_that_is_dense_says_so(world, streams):
    given = [*streams[:-1], sar.SparseStream.from_dense(streams[-1].to_dense() + np.float32(1))]
    assert given[-1].is_dense

    found = world.run(lambda rank: rank.sar.allreduce(given[rank.number], rank.comm))

    check(found, given)
    expected = estimated([sample_of(stream, rank, RANKS) for rank, stream in enumerate(given)], SIZE)
    assert dict(expected.union)[RANKS] * sum(stream.stored for stream in given) == pytest.approx(SIZE, rel=0.1)
    assert all(rank.known == [expected] for rank in world.ranks)


def skewed_stream_of(rank):
    """Half of the entries are in the first 3 % of the positions."""
    rng = np.random.default_rng(rank + 1)
    places = (rng.choice(SIZE // 32, ENTRIES // 4, replace=False), rng.choice(SIZE, ENTRIES // 4, replace=False))
    indices = np.unique(np.concatenate(places))
    return sar.SparseStream(indices, np.full(len(indices), rank + 1.0, np.float32), SIZE)


@pytest.mark.parametrize("algorithm", ["ssar_split_allgather", "ssar_ring", "dsar_split_allgather", "dsar_early_switch"])
def test_skewed_sets_are_cut_where_their_entries_lie(world, algorithm):
    """Early switching has two groups of eight ranks and one in excess: each rank sends several parts in a message."""
    given = [skewed_stream_of(rank) for rank in range(RANKS)]

    found = world.run(lambda rank: rank.sar.allreduce(given[rank.number], rank.comm, algorithm=algorithm), RandomOrder(3, 0.05))

    check(found, given)
    spread = world.ranks[0].known[0].spread
    parts = spread.parts(0, SIZE, 16, 32, 8)
    assert max(np.diff(parts.bounds)) > 3 * min(np.diff(parts.bounds))
    assert len({result.to_dense().tobytes() for result in found}) == 1


@pytest.mark.parametrize("where", ["_add", "halve_streams", "places_of"])
def test_an_error_amid_an_exchange_of_several_parts_is_everyones(world, monkeypatch, where):
    """On the rank that comes there first: the algorithms' code is the same for all."""
    given, struck = [skewed_stream_of(rank) for rank in range(RANKS)], []
    module = world.ranks[0].library.load("sparseallreduce.algorithms.dsar_early_switch")
    original = getattr(module, where)

    def fails(*args):
        if not struck:
            struck.append(where)
            raise MemoryError("no room for a part")
        return original(*args)

    monkeypatch.setattr(module, where, fails)

    def program(rank):
        outcomes = []
        for _ in range(3):
            try:
                outcomes.append(rank.sar.allreduce(given[rank.number], rank.comm, algorithm="dsar_early_switch"))
            except sar.SparseAllreduceError as error:
                outcomes.append(str(error))
        return outcomes

    found = world.run(program)
    assert struck
    (told,) = {outcomes[0] for outcomes in found}
    assert "gave up: no room for a part" in told
    for number in (1, 2):
        check([outcomes[number] for outcomes in found], given)
    assert world.network.left() == 0


@pytest.mark.parametrize("where", ["note", "update"])
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "waited"])
def test_an_error_while_they_tell_each_other_is_everyones(world, streams, where, blocking):
    culprit = 5
    overlaps = world.ranks[culprit].library.load("sparseallreduce.runtime.overlaps").Overlaps
    original, struck = getattr(overlaps, where), []

    def fails(self, *args):
        if not struck:
            struck.append(where)
            raise MemoryError("no room for a sample")
        return original(self, *args)

    setattr(overlaps, where, fails)

    def program(rank):
        comm, outcomes = rank.comm.Dup(), []
        for _ in range(3):
            try:
                if blocking:
                    outcomes.append(rank.sar.allreduce(streams[rank.number], comm))
                else:
                    outcomes.append(rank.sar.iallreduce(streams[rank.number], comm).wait())
            except sar.SparseAllreduceError as error:
                outcomes.append(f"{type(error).__name__}: {error}")
        channel = rank.library.load("sparseallreduce.runtime.progress").channels[-1]
        channel.tidy()
        assert not channel.mailbox.leftovers
        comm.Free()
        return outcomes

    found = world.run(program)
    assert struck
    assert {outcomes[0] for outcomes in found} == {f"SparseAllreduceError: MemoryError: rank {culprit} gave up: no room for a sample"}
    for number in (1, 2):
        check([outcomes[number] for outcomes in found], streams)
    assert world.network.left() == 0
    assert all(rank.known[0] is not None and rank.known[0] == world.ranks[0].known[-1] for rank in world.ranks)


def test_a_sample_fits_in_what_travels():
    """However many hashes a set brings together."""
    indices = np.arange(1 << 20, dtype=np.uint64)
    chosen = indices[overlap._hashes(indices) < 1 << 20]
    assert len(sample_of(sar.SparseStream(chosen, np.ones(len(chosen), np.float32), 1 << 40), 0, 2)) <= overlap.sample_bytes(1 << 40)
