"""A rank that waits long says in what and for whom, in every way to wait; a default timeout ends each wait, on all ranks alike."""

import gzip
import logging
import os
import time
from contextlib import contextmanager
from unittest import mock

import numpy as np
from cases_handshake import duplicate
from mpi_cases import each, limit, on_ranks, shared_folder
from mpi_inputs import Inputs, check_usable

import sparseallreduce as sar
from sparseallreduce.linear import LogisticRegression, load
from sparseallreduce.runtime import stalls
from sparseallreduce.runtime.memory.meeting import Meeting, neighbours
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather

RANKS = (2, 3)
SECONDS = "0.1"


class Told(logging.Handler):
    """What is logged; the late rank of a communicator hears of the first that this rank waits."""

    def __init__(self, comm=None, late=0):
        super().__init__()
        self.texts, self._comm, self._late = [], comm, late

    def emit(self, record):
        text = record.getMessage()
        if self._comm is not None and self._comm.rank != self._late and not self.texts:
            self._comm.send(None, self._late, TAG)
        self.texts.append(text)


TAG = 77


def come_late(comm):
    """Come once all others have said that they wait, or that they have waited."""
    for rank in range(comm.size):
        while rank != comm.rank and not comm.iprobe(rank, TAG):
            time.sleep(0.01)
        if rank != comm.rank:
            comm.recv(source=rank, tag=TAG)


@contextmanager
def told(stall=SECONDS, timeout="", comm=None, late=0):
    """What the library logs, with these settings."""
    handler, logger = Told(comm, late), logging.getLogger("sparseallreduce")
    before, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    stalls._default_timeout.cache_clear()
    with (
        mock.patch.dict(os.environ, {stalls.STALL_VARIABLE: stall, stalls.TIMEOUT_VARIABLE: timeout}),
        mock.patch.object(stalls, "_CHECK_SECONDS", 0.05),
    ):
        try:
            yield handler.texts
        finally:
            logger.removeHandler(handler)
            logger.setLevel(before)
            logger.propagate = propagates


def check_told(comm, texts, late, *words):
    """Ranks that have waited for the late one say so; nothing is said on that one of itself."""
    if comm.rank != late:
        about = [text for text in texts if all(word in text for word in (f"rank {comm.rank} of {comm.size} has", *words))]
        assert about, texts
        assert all("\n" not in text for text in about)


def sum_of(ours, inputs, rank):
    return {
        "blocking": lambda: sar.allreduce(inputs.stream(rank), ours),
        "request": lambda: sar.iallreduce(inputs.stream(rank), ours).wait(),
        "list": lambda: sar.allreduce([inputs.stream(rank)] * 2, ours)[0],
        "timed": lambda: sar.allreduce(inputs.stream(rank), ours, timeout=600),
        "algorithm": lambda: sar.allreduce(inputs.stream(rank), ours, algorithm="ssar_ring"),
        "plan": lambda: sar.allreduce_init(inputs.stream(rank), ours, fixed_indices=True),
    }


@limit(60)
@each(shared=[True, False])
def case_who_waits_names_the_rank_that_has_not_come(comm, shared):
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    with duplicate(comm, shared) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours)
        for name, call in sum_of(ours, inputs, comm.rank).items():
            ours.Barrier()
            with told(comm=comm, late=late) as texts:
                if comm.rank == late:
                    come_late(comm)
                result = call()
            check_told(comm, texts, late, f"rank {late} has not started", "since")
            check_told(comm, texts, late, "allreduce" if name != "plan" else "plan")
            if comm.rank != late:
                assert sum("has waited" in text for text in texts) <= 6, texts  # at doubling intervals
                assert any(" went on in " in text for text in texts), texts
            if name not in ("plan",):
                inputs.check(result)
        check_usable(ours)


@limit(30)
def case_tests_and_reducers_and_values_that_wait(comm):
    late = 0
    with duplicate(comm) as ours:
        vector = np.arange(50, dtype=np.float32)
        sar.TopkA(50, 5).allreduce(vector, ours)

        def tested():
            request = sar.iallreduce(sar.SparseStream([1], [1.0], 8), ours)
            while not request.test()[0]:
                pass

        calls = {
            "has tested for": tested,
            "a sum of the reducer topka": lambda: sar.TopkA(50, 5).allreduce(vector, ours),
            "an exchange of values": lambda: gather(ours, comm.rank),
        }
        for words, call in calls.items():
            ours.Barrier()
            with told(comm=comm, late=late) as texts:
                if comm.rank == late:
                    come_late(comm)
                call()
            check_told(comm, texts, late, words, f"rank {late} has not started")
        ours.Barrier()
        with told(comm=comm, late=late) as texts:
            if comm.rank == late:
                come_late(comm)
            gather(ours, None, long_wait=True)
        check_told(comm, texts, late, "an exchange of values", f"rank {late} has not started")
        assert comm.rank == late or any(" went on in an exchange of values after" in text for text in texts), texts


@limit(60)
def case_score_and_fit_say_that_they_are_collective(comm):
    rng = np.random.default_rng(comm.rank)
    X, y, late = rng.normal(size=(40, 5)), np.arange(40) % 2, comm.size - 1
    model = LogisticRegression(max_iter=2, tol=None, comm=comm)
    gather(comm, None)
    with told(comm=comm, late=late) as texts:
        if comm.rank == late:
            come_late(comm)
        model.fit(X, y)
    check_told(comm, texts, late, f"in fit, in an exchange of values: rank {late} has not started", "fit is collective: every rank")
    with told(comm=comm, late=late) as texts:
        if comm.rank == late:
            model.predict(X)
            come_late(comm)
        model.score(X, y)
    words = "score is collective: every rank of the communicator must call it; predict is local"
    check_told(comm, texts, late, f"in score, in an exchange of values: rank {late} has not started", words)


@limit(30)
def case_ranks_that_share_weights_and_those_that_block_in_mpi_say_so(comm):
    sharing, late = neighbours(comm, None, Meeting.nbytes), 0
    if sharing is not None:
        meeting = Meeting(sharing.memory, sharing.rank, comm.size, sharing.oversubscribed, comm)
        with told(comm=comm, late=late) as texts:
            if comm.rank == late:
                come_late(comm)
            meeting.arrive()
            meeting.wait()
        check_told(comm, texts, late, "a meeting of the ranks", f"rank {late} has not started it")
    with told(comm=comm, late=late) as texts, mock.patch.object(stalls, "_watch", stalls._Watch()):
        if comm.rank == late:
            come_late(comm)
        with stalls.blocked(comm.rank, comm.size, "a barrier of MPI"):
            comm.Barrier()
    check_told(comm, texts, late, "a barrier of MPI")


@limit(60)
@each(shared=[True, False])
def case_the_default_timeout_ends_every_wait_on_all_ranks_alike(comm, shared):
    inputs, late = Inputs(comm.size, 100, "float32"), comm.size - 1
    with duplicate(comm, shared) as ours:
        sar.allreduce(inputs.stream(comm.rank), ours)
        calls = {
            **{name: call for name, call in sum_of(ours, inputs, comm.rank).items() if name != "timed"},
            "waitall": lambda: sar.Request.waitall([sar.iallreduce(inputs.stream(comm.rank), ours)]),
            "reducer": lambda: sar.TopkA(100, 5).allreduce(np.zeros(100, np.float32), ours),
            "values": lambda: gather(ours, 1),
            "agreed": lambda: agreed(ours, lambda: 1),
        }
        for name, call in calls.items():
            ours.Barrier()
            with told("0", "0.2"):
                if comm.rank == late:
                    come_late(ours)
                try:
                    call()
                    outcome = None
                except sar.WaitTimeoutError as error:
                    outcome = str(error)
                if comm.rank != late:
                    ours.send(None, late, TAG)
            outcomes = ours.allgather(outcome)
            assert None not in outcomes, (name, outcomes)
            assert len({text[text.index("not done") :] for text in outcomes}) == 1, (name, outcomes)
            assert f"rank {late} has not started" in outcomes[0], (name, outcomes)
            inputs.check(sar.allreduce(inputs.stream(comm.rank), ours))
        check_usable(ours)


@limit(60)
def case_a_timeout_holds_in_score(comm):
    rng = np.random.default_rng(comm.rank)
    X, y = rng.normal(size=(40, 5)), np.arange(40) % 2
    model = LogisticRegression(max_iter=2, tol=None, comm=comm).fit(X, y)
    with told("0", "0.2"):
        if comm.rank == 0:
            come_late(comm)
        try:
            model.score(X, y)
            outcome = None
        except sar.WaitTimeoutError as error:
            outcome = str(error)
        if comm.rank != 0:
            comm.send(None, 0, TAG)
    assert all(text and "rank 0 has not started" in text for text in comm.allgather(outcome))
    assert 0 <= model.score(X, y) <= 1


@on_ranks(2)
@limit(30)
def case_a_value_that_cannot_be_written_is_an_error_on_all_ranks(comm):
    try:
        gather(comm, (lambda: 0) if comm.rank == 1 else 0)
    except sar.SparseAllreduceError as error:
        outcome = str(error)
    assert comm.allgather(outcome)[0] == outcome
    assert gather(comm, comm.rank) == list(range(comm.size))
    given = {"array": np.arange(5)} if comm.rank == 0 else None
    received = broadcast_arrays(comm, given)
    assert received["array"].tolist() == [0, 1, 2, 3, 4]


@limit(30)
def case_values_of_unequal_length_and_traces_of_them(comm):
    said = ["x" * 10 ** (rank + 2) for rank in range(comm.size)]
    with sar.trace() as counts:
        assert gather(comm, said[comm.rank]) == said
    assert counts.bytes_sent == counts.messages == 0


@on_ranks(2)
@limit(30)
def case_a_dealt_text_names_the_rank_that_hands_it_on(comm):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            (folder / "a.svm.gz").write_bytes(gzip.compress(b"1 1:1\n-1 2:1\n" * 50))
        comm.Barrier()
        with told(comm=comm, late=0) as texts:
            if comm.rank == 0:
                come_late(comm)
            dataset, _ = load(folder / "a.svm.gz", comm=comm)
        check_told(comm, texts, 0, "rank 0 has not")
        assert dataset.total_samples == 100
