"""NaNs have the same bits on every rank, however many ranks put one in, of whatever sign and payload."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
from cases_far import between_hosts
from mpi_cases import each, limit, on_ranks
from mpi_inputs import check_usable, same_everywhere
from strategies import some_nans

import sparseallreduce as sar
from sparseallreduce import linear
from sparseallreduce.algorithms import fixed
from sparseallreduce.algorithms.fixed import FIXED
from sparseallreduce.streams import merging

WAYS = (*sar.algorithms(), "auto, sparse")
DTYPES = ("float32", "float64", "float16", "complex64")


def stream_of(comm, size, dtype="float32", *, share=1.0, width=None, seed=0):
    """Every third value or so is a NaN of this rank's own, or an infinity; positions are the same on all ranks, and some of its own."""
    common, rng = np.random.default_rng([seed, size]), np.random.default_rng([seed, size, comm.rank])
    held = common.random(size) < share
    if share < 1:
        held |= rng.random(size) < share / 4
    indices = np.flatnonzero(held)
    shape = (len(indices),) if width is None else (len(indices), width)
    real = np.empty((*shape, 2), np.dtype(dtype).type(0).real.dtype)
    real[...] = rng.integers(-3, 4, real.shape)
    nans, infinite = rng.random(real.shape) < 0.4, rng.random(real.shape) < 0.1
    real[nans] = some_nans(rng, np.count_nonzero(nans), real.dtype)
    real[infinite] = rng.choice([np.inf, -np.inf], np.count_nonzero(infinite))
    values = real.view(dtype)[..., 0] if np.dtype(dtype).kind == "c" else np.ascontiguousarray(real[..., 0])
    return sar.SparseStream(indices, values, size)


@on_ranks(1, 2, 3, 5)
@limit(60)
@each(dtype=DTYPES)
def case_nans_are_the_same_by_every_algorithm(comm, dtype):
    """Short sums are those that MPI libraries make by recursive doubling, in which each rank adds in an order of its own."""
    for number, way in enumerate(WAYS):
        results = []
        for size in (1, 2, 3, 10, 100, 500, 5000):
            name, share = ("auto", 0.1) if way == "auto, sparse" else (way, 1.0 if number % 2 or way == "dense" else 0.3)
            stream = stream_of(comm, size, dtype, share=share)
            for op in ("sum", "mean", "prod") if size in (1, 100) else ("sum",):
                results.append(sar.allreduce(stream, comm, op, name))
            results.append(sar.iallreduce(stream, comm, algorithm=name).wait())
        same_everywhere(comm, *results)
    check_usable(comm)


@on_ranks(1, 2, 3, 5)
@each(far=[False, True])
def case_nans_are_the_same_between_hosts_and_in_rows(comm, far):
    """And those of the larger of two, as of a mean."""
    results = []
    with between_hosts(comm) if far else nullcontext():
        for algorithm in sar.algorithms():
            for width in (None, 1, 3):
                results.append(sar.allreduce(stream_of(comm, 300, width=width, share=0.5), comm, algorithm=algorithm))
            results.append(sar.allreduce(stream_of(comm, 300, share=0.9), comm, "max", algorithm))
    same_everywhere(comm, *results)


@on_ranks(2, 3, 4)
@each(algorithm=["ssar_recursive_doubling", "allgather", "hierarchical"], dtype=["float32", "float16", "complex64"])
def case_nans_are_the_same_when_messages_come_in_pieces(comm, algorithm, dtype):
    """What has come is added while the rest is on its way, and the last few values of a piece are added by another instruction."""
    results = []
    with between_hosts(comm, nbytes=200), mock.patch.object(merging, "_LEAST", 1):
        for size, share in ((3000, 0.3), (3000, 0.05), (3000, 1.0), (40_000, 0.02)):
            for op in ("sum", "prod"):
                results.append(sar.allreduce(stream_of(comm, size, dtype, share=share), comm, op, algorithm))
    same_everywhere(comm, *results)


@on_ranks(2, 3, 4)
@each(algorithm=FIXED, dtype=["float32", "complex64"])
def case_nans_are_the_same_in_plans_of_fixed_indices(comm, algorithm, dtype):
    results = []
    with between_hosts(comm, nbytes=200), mock.patch.object(fixed, "_LEAST", 1):
        for size, share in ((1, 1.0), (3000, 1.0), (3000, 0.3)):
            stream = stream_of(comm, size, dtype, share=share)
            plan = sar.allreduce_init(stream, comm, fixed_indices=True, algorithm=algorithm)
            plan.start(stream)
            results.append(plan.wait().copy())
            plan.free()
    same_everywhere(comm, *results)


@on_ranks(2, 3, 5)
@each(size=[1, 10, 500])
def case_nans_are_the_same_in_dense_training(comm, size):
    """Whose sums are MPI's own, on the user's communicator."""
    dataset = linear.Dataset.of_ranks(np.eye(size), np.where(np.arange(size) % 2, 1.0, -1.0), comm)
    strategy = linear.STRATEGIES["dense"](dataset, comm)
    strategy._given[:] = stream_of(comm, len(strategy._given), strategy._given.dtype.name).to_dense()
    strategy._sum()
    assert len(set(comm.allgather(strategy._total.tobytes()))) == 1
