"""Reducers that are chosen, and periods that are found, over MPI: the same on all ranks, and what is chosen is what is done."""

import numpy as np
import pytest
from lossy import Vectors
from mpi_cases import each, on_ranks
from mpi_inputs import check_usable, same_everywhere
from oracle import bits

import sparseallreduce as sar
from sparseallreduce.reducers.cost import CANDIDATES
from sparseallreduce.reducers.dense import Dense

MAKE = {"topka": sar.TopkA, "topkdsa": sar.TopkDSA, "gtopk": sar.GTopk, "oktopk": sar.OkTopk, "hitopk": sar.HiTopK}


@on_ranks(1, 2, 4)
@each(names=[CANDIDATES, *([name] for name in CANDIDATES)], blocking=[True, False])
def case_what_is_chosen_is_done(comm, names, blocking):
    for size, k, dtype in ((3, 1, "float64"), (5_000, 50, "float32")):
        case = Vectors(comm.size, size, k, dtype, seed=size)
        ours = sar.ErrorFeedback(sar.Auto(size, k, candidates=names), dtype)
        told = sar.explain_reducer(size, k, comm, candidates=names, dtype=dtype)
        other = None
        for step in range(2):
            gradient = case.step(step)[comm.rank]
            mean = ours.step(gradient, comm) if blocking else ours.istep(gradient, comm).wait()
            chosen = ours.reducer.chosen
            assert chosen.name == told.choice and chosen.name in names
            if other is None:
                options = {"algorithm": told.predicted["topkdsa"].algorithm} if chosen.name == "topkdsa" else {}
                reducer = Dense(size, size) if chosen.name == "dense" else MAKE[chosen.name](size, k, **options)
                other = sar.ErrorFeedback(reducer, dtype)
            assert bits(mean) == bits(other.step(gradient, comm))
            np.testing.assert_array_equal(ours.residual, other.residual)
            same_everywhere(comm, mean)
        assert len({str(each) for each in comm.allgather(told)}) == 1


@on_ranks(2, 3)
def case_bad_arguments_of_one_rank_are_everyones(comm):
    with pytest.raises(sar.MismatchError, match="candidates"):
        sar.explain_reducer(100, 5, comm, candidates=["dense", "topka" if comm.rank else "gtopk"])
    with pytest.raises(sar.AlgorithmError, match="there is no candidate 'best'"):
        sar.explain_reducer(100, 5, comm, candidates=["topka" if comm.rank else "best"])
    reducer = sar.Auto(100, 5)
    with pytest.raises(sar.StreamError, match="takes arrays of shape"):
        reducer.allreduce(np.ones(100 - comm.rank), comm)
    assert reducer.chosen is None
    reducer.allreduce(np.ones(100), comm)
    check_usable(comm)


@on_ranks(1, 2, 3)
@each(hosts=[False, True])
def case_a_period_is_found_alike_on_all_ranks(comm, hosts):
    size, k = 3_000, 150
    noise = np.random.default_rng(comm.rank).standard_normal(size + 500)
    reducer = sar.OkTopk(size, k, threshold_period="auto", hosts=hosts)
    histories = []
    for step in range(70):
        update, _ = reducer.allreduce(1.01**step * noise[7 * step :][:size], comm)
        part = reducer._by_hosts.part if hosts else reducer
        histories.append(None if part is None else part._history.drift)
    same_everywhere(comm, update)
    if not hosts or comm.size == 1:
        assert len(set(comm.allgather(repr(histories)))) == 1
        assert len({each.period for each in histories}) > 1
