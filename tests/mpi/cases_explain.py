"""`explain` says the same on every rank, and what `allreduce` then does."""

import numpy as np
import pytest
from mpi_cases import each, on_ranks
from mpi_inputs import Inputs

import sparseallreduce as sar


@on_ranks(1, 2, 3, 5)
@each(entries=[0, 10, 4000, 200_000])
def case_every_rank_is_told_the_same(comm, entries):
    rng = np.random.default_rng(comm.rank)
    size = 1 << 20
    indices = np.sort(rng.choice(size, entries, replace=False))
    stream = sar.SparseStream(indices, np.ones(entries, np.float32), size)
    explanation = sar.explain(stream, comm)
    assert len({str(one) for one in comm.allgather(explanation)}) == 1
    assert explanation.choice in explanation.predicted and explanation.predicted.keys() == explanation.bytes.keys()
    assert explanation.entries == [entries] * comm.size
    union = len(np.unique(np.concatenate(comm.allgather(indices))))
    assert explanation.union == pytest.approx(union, rel=0.4, abs=1)
    assert f"auto takes {explanation.choice}" in str(explanation)
    if comm.size > 1:
        assert explanation.predicted.keys() >= set(sar.algorithms()) - {"auto", "hierarchical", "dense_torus"}  # which is of several hosts


@on_ranks(2, 3)
def case_what_is_said_is_done(comm):
    """Of algorithms by their messages, which traces count: of streams too long to travel with the agreement."""
    inputs = Inputs(comm.size, 200_000, "float32", entries=60_000)
    machine = sar.Machine(alpha=1e-9, beta=1e-12, beta_dense=1.0)
    for op in ("sum", "max"):
        explanation = sar.explain(inputs.stream(comm.rank), comm, op, machine=machine)
        if explanation.choice in sar.algorithms():
            counts = []
            for algorithm in ("auto", explanation.choice):
                with sar.trace() as traffic:
                    options = {"machine": machine} if algorithm == "auto" else {}
                    sar.allreduce(inputs.stream(comm.rank), comm, op, algorithm, **options)
                counts.append((traffic.messages, traffic.bytes_sent))
            assert counts[0] == counts[1]


@on_ranks(2, 3)
def case_bad_arguments_are_everyones(comm):
    stream = sar.SparseStream([comm.rank], [1.0], 10 + comm.rank)
    with pytest.raises(sar.MismatchError, match="size"):
        sar.explain(stream, comm)
    with pytest.raises(sar.StreamTypeError, match="takes a SparseStream"):
        sar.explain(stream if comm.rank else "none", comm)
    assert sar.explain(sar.SparseStream([comm.rank], [1.0], 10), comm).union >= 1
