"""Skewed sets between hosts: ranks take samples, cut the index space where their entries lie, and sums are right.

The ranks are on one host; each takes itself to be alone on a host of its own, so that they agree by messages.
"""

from contextlib import contextmanager
from unittest import mock

import numpy as np
from cases_promises import outcome_of_call
from mpi_cases import each, limit
from mpi_inputs import check_usable, raise_what_is_owed, same_everywhere
from world.hooks import hosts_of_their_own

import sparseallreduce as sar
from sparseallreduce.algorithms import overlap
from sparseallreduce.algorithms.allreduce import takes_samples
from sparseallreduce.algorithms.boundaries import Spread
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.runtime.overlaps import Overlaps

RANKS = (2, 3, 5)
SIZE, ENTRIES = 800_000, 60_000
SLOW = sar.Machine(alpha=1e-6, beta=1e-6, beta_dense=2e-6)
CUTTING = [name for name in sar.algorithms() if takes_samples(name) and name not in ("auto", "hierarchical")]


def skewed_stream(rank, ranks, dtype="float32"):
    """Two thirds of the entries are in the first twentieth of the positions."""
    rng = np.random.default_rng([rank, ranks])
    places = rng.choice(SIZE // 20, ENTRIES // 3, replace=False), rng.choice(SIZE, ENTRIES // 3, replace=False)
    indices = np.unique(np.concatenate(places))
    return sar.SparseStream(indices, rng.integers(1, 9, len(indices)).astype(dtype), SIZE)


def expected_sum(ranks):
    return sum(skewed_stream(rank, ranks).to_dense() for rank in range(ranks))


def check(comm, *results):
    expected = expected_sum(comm.size)
    for result in results:
        np.testing.assert_array_equal(result.to_dense(), expected)
    same_everywhere(comm, *results)


@contextmanager
def apart(comm):
    """A duplicate whose ranks take themselves to be on hosts of their own."""
    with hosts_of_their_own(comm.rank):
        made = comm.Dup()
        check_usable(made)
        assert channel_of(made).near == {comm.rank}
        yield made
        made.Barrier()
        made.Free()


@contextmanager
def noted(owner, name):
    """What a method returns, call by call."""
    original, found = getattr(owner, name), []

    def noting(*args):
        found.append(original(*args))
        return found[-1]

    with mock.patch.object(owner, name, noting):
        yield found


def summed(stream, comm, how, **options):
    if how == "blocking" or (how == "both" and comm.rank % 2):
        return sar.allreduce(stream, comm, **options)
    return sar.iallreduce(stream, comm, **options).wait()


@limit(30)
@each(algorithm=CUTTING, how=["blocking", "waited", "both"])
def case_skewed_sets_are_cut_where_their_entries_lie(comm, algorithm, how):
    stream, received = skewed_stream(comm.rank, comm.size), {}
    for positions in (overlap.MOST_POSITIONS, 0):  # beyond which all is cut in equal widths
        with apart(comm) as ours, mock.patch.object(overlap, "MOST_POSITIONS", positions):
            with noted(Overlaps, "note") as notes, noted(Spread, "parts") as cuts, sar.trace() as traced:
                check(comm, *[summed(stream, ours, how, algorithm=algorithm) for _ in range(4)])
            assert [len(note) > 9 for note in notes] == [True, False, False, True], notes  # samples, their digest twice, samples
            assert bool(cuts) == bool(positions)
            assert all(max(np.diff(bounds)) > 2 * min(np.diff(bounds)) for bounds, _ in cuts)
            received[positions] = max(comm.allgather(traced.bytes_received))
    assert received[overlap.MOST_POSITIONS] != received[0]


@limit(30)
@each(how=["blocking", "waited", "both"])
def case_auto_goes_by_samples_of_skewed_sets(comm, how):
    stream = skewed_stream(comm.rank, comm.size)
    with apart(comm) as ours, noted(Overlaps, "update") as learned, noted(Spread, "parts") as cuts:
        check(comm, *[summed(stream, ours, how, machine=SLOW) for _ in range(4)])
    assert len(learned) == 4 and learned[0] is not None and learned[:3] == learned[:1] * 3
    assert cuts and same_everywhere(comm, *[sar.SparseStream(np.unique(bounds), np.ones(len(set(bounds))), SIZE + 1) for bounds, _ in cuts])


@limit(30)
@each(how=["blocking", "waited"], algorithm=["auto", "ssar_split_allgather"], where=["_hashes", "_spread", "parts"])
def case_failure_over_a_sample_is_everyones(comm, how, algorithm, where):
    stream, culprit, options = skewed_stream(comm.rank, comm.size), comm.size - 1, {"algorithm": algorithm, "machine": SLOW}
    owner = Spread if where == "parts" else overlap
    original, calls = getattr(owner, where), []

    def fails(*args):
        calls.append(where)
        if comm.rank == culprit and len(calls) == 1:
            raise MemoryError("no room for a sample")
        return original(*args)

    with apart(comm) as ours:
        with mock.patch.object(owner, where, fails):
            outcome = outcome_of_call(lambda: summed(stream, ours, how, **options), MemoryError)
        assert calls or comm.rank != culprit  # another rank may have heard of it before
        raise_what_is_owed(ours, outcome)
        if comm.rank == culprit or not isinstance(outcome, sar.SparseStream):
            assert "no room for a sample" in str(outcome), outcome
        else:  # the culprit failed as it looked back at the sum, which this rank had by then
            np.testing.assert_array_equal(outcome.to_dense(), expected_sum(comm.size))
        check(comm, *[summed(stream, ours, how, **options) for _ in range(3)])
