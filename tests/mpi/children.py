"""What test_children.py runs under mpiexec: ranks that start other processes, by each way there is, and what those do."""

import contextlib
import multiprocessing
import os
import subprocess
import sys
import traceback

import numpy as np
import pytest

import sparseallreduce as sar

SIZE = 16
PLACE = 5  # of the entry that every child has


def stream(place, value=1.0):
    return sar.SparseStream([place], [value], SIZE)


def summed_alone(value):
    """What a child computes: sums without ``comm`` of every kind, which are its own; and that MPI has not been started for them."""
    own = stream(PLACE, float(value))
    results = [
        sar.allreduce(own),
        sar.iallreduce(own).wait(),
        sar.allreduce([own, own])[1],
        sar.ErrorFeedback(sar.OkTopk(SIZE, 1)).step(own.to_dense().astype(np.float32)),
        sar.TopkA(SIZE, 1).allreduce(own.to_dense()).update,
    ]
    plan = sar.allreduce_init(own, fixed_indices=True)
    plan.start(own)
    results.append(plan.wait())
    assert sar.explain(own).choice == "alone"
    return {(stream.nnz, float(stream.to_dense()[PLACE])) for stream in results}


def alone(value):
    """The same, from a process that nobody has forked from a rank: MPI is not even loaded."""
    found = summed_alone(value)
    assert "mpi4py.MPI" not in sys.modules, "a child has loaded MPI"
    return found


def check_sum(comm):
    """The ranks still add up what is theirs."""
    from mpi4py import MPI

    for given in [comm, None] if comm is MPI.COMM_WORLD else [comm]:
        found = sar.allreduce(stream(comm.rank), given).to_dense()
        assert np.array_equal(found, (np.arange(SIZE) < comm.size) * 1.0), found


def expect_forked(call, *arguments, **named):
    with pytest.raises(sar.ForkError, match="forked"):
        call(*arguments, **named)


@contextlib.contextmanager
def forked():
    """Run a block in a forked process, which is waited for outside of it: ``with forked() as child: if child: ...``."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            yield True
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    yield False
    assert os.waitpid(process, 0)[1] == 0, "the child has failed"


def run_forked():
    """A forked child computes alone, and nothing of its parent's is of use to it."""
    from mpi4py import MPI

    from sparseallreduce.optim import TopKSGD

    comm = MPI.COMM_WORLD
    sub = comm.Split(0, comm.rank)
    check_sum(comm)
    check_sum(sub)
    mean = sar.ErrorFeedback(sar.TopkA(SIZE, 1))
    mean.step(np.ones(SIZE, np.float32))
    used = sar.OkTopk(SIZE, 2)
    used.allreduce(np.ones(SIZE, np.float32))
    plans = [sar.allreduce_init(stream(comm.rank), fixed_indices=fixed) for fixed in (False, True)]
    ready = sar.iallreduce(stream(comm.rank))
    expected = ready.wait()
    optimizer = TopKSGD([np.ones(SIZE, np.float32)], learning_rate=0.1, density=0.5)
    optimizer.step([np.ones(SIZE, np.float32)])

    for rank in range(comm.size):
        comm.Barrier()
        pending = None
        if comm.size > 1 and comm.rank == rank:  # the others have not come yet, so that it cannot be done
            pending = sar.iallreduce(stream(comm.rank))
            for plan in plans:
                plan.start(stream(comm.rank))
        if comm.rank == rank:
            with forked() as child:
                if child:
                    in_child(comm, sub, pending, plans, [used, mean.reducer], mean, optimizer)
        comm.Barrier()
        if comm.size > 1:
            requests = [pending or sar.iallreduce(stream(comm.rank))]
            for plan in plans:
                if comm.rank != rank:
                    plan.start(stream(comm.rank))
            for result in (requests[0].wait(), *(plan.wait() for plan in plans)):
                assert np.array_equal(result.to_dense(), expected.to_dense())
        check_sum(comm)
        check_sum(sub)
        mean.step(np.ones(SIZE, np.float32))
        used.allreduce(np.ones(SIZE, np.float32))
        optimizer.step([np.ones(SIZE, np.float32)])
    print("done", flush=True)


def in_child(comm, sub, pending, plans, reducers, mean, optimizer):
    from mpi4py import MPI

    from sparseallreduce.linear import Dataset
    from sparseallreduce.optim import TopKSGD

    assert summed_alone(7) == {(1, 7.0)}
    own = stream(PLACE)
    ones = np.ones(SIZE, np.float32)
    for given in (comm, sub, MPI.COMM_WORLD, MPI.COMM_SELF):
        expect_forked(sar.allreduce, own, given)
        expect_forked(sar.allreduce, [own, own], given)
        expect_forked(sar.iallreduce, own, given)
        expect_forked(sar.allreduce, own, given, algorithm="ssar_ring", timeout=1.0)
        expect_forked(sar.allreduce_init, own, given)
        expect_forked(sar.allreduce_init, own, given, fixed_indices=True)
        expect_forked(sar.explain, own, given)
        expect_forked(sar.explain_reducer, SIZE, 1, given)
        expect_forked(sar.TopkA(SIZE, 1).allreduce, ones, given)
        expect_forked(sar.ErrorFeedback(sar.TopkA(SIZE, 1)).step, ones, given)
        expect_forked(TopKSGD, [ones], learning_rate=0.1, density=0.5, comm=given)
        expect_forked(Dataset.of_ranks, np.eye(4), [0, 1, 0, 1], given)
    for reducer in reducers:
        expect_forked(reducer.allreduce, ones)
        expect_forked(reducer.iallreduce(ones, sar.SERIAL).wait)
        expect_forked(reducer.reset)
    expect_forked(mean.step, ones)
    expect_forked(optimizer.step, [ones])
    for plan in plans:
        if pending is not None:
            expect_forked(plan.test)
            expect_forked(plan.wait)
        expect_forked(plan.start, own)
        plan.free()
    if pending is not None:
        expect_forked(pending.test)
        expect_forked(pending.wait)
        expect_forked(pending.wait, timeout=1.0)
        expect_forked(sar.Request.waitall, [pending])
    with forked() as child:
        if child:
            assert summed_alone(8) == {(1, 8.0)}
            expect_forked(sar.allreduce, own, comm)


def run_workers():
    """Workers of a process that mpiexec has started, by each way there is, before it has MPI running and then."""
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(alone, [3, 4]) == [{(1, 3.0)}, {(1, 4.0)}], method
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    check_sum(comm)
    for method, work in (("fork", summed_alone), ("forkserver", alone)):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(work, [3, 4]) == [{(1, 3.0)}, {(1, 4.0)}], method
        check_sum(comm)
    print("done", flush=True)


def run_grid_search(*backends):
    """scikit-learn's search, in workers: each rank's own on its own samples; the fit with what is found is that of all ranks."""
    import joblib
    from mpi4py import MPI
    from sklearn.model_selection import GridSearchCV

    from sparseallreduce.linear import LogisticRegression

    draws = np.random.default_rng(0)
    X = draws.standard_normal((200, 4))
    y = (X[:, 0] > 0).astype(int)
    for backend in backends:
        with joblib.parallel_backend(backend):
            search = GridSearchCV(LogisticRegression(max_iter=20), {"l2": [1e-4]}, n_jobs=2, cv=2, error_score="raise")
            search.fit(X, y)
        assert search.best_score_ > 0.7, search.best_score_
        check_sum(MPI.COMM_WORLD)
    print("done", flush=True)


def run_programs(mpiexec):
    """Python programs that a rank starts: one is no rank; those that an mpiexec of its own starts are."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    check_sum(comm)
    if comm.rank == 0:
        child = "import children; print(children.alone(3)); from sparseallreduce.cli import main; main(['doctor'])"
        ran = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=False)
        assert ran.stdout.startswith("{(1, 3.0)}\n"), (ran.stdout, ran.stderr)
        assert "this process is a child of an MPI rank" in ran.stdout
        rank = "from mpi4py import MPI; import children; children.check_sum(MPI.COMM_WORLD); print(MPI.COMM_WORLD.size)"
        for ranks in (1, 2):
            wrapped = ["sh", "-c", 'exec "$@"', "sh", sys.executable, "-c", rank]
            ran = subprocess.run([mpiexec, "-n", str(ranks), *wrapped], capture_output=True, text=True, check=False)
            assert ran.stdout.count(str(ranks)) == ranks, (ran.stdout, ran.stderr)
    comm.Barrier()
    check_sum(comm)
    print("done", flush=True)
