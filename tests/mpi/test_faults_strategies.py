"""A parameter server or a worker that is killed ends the run."""

import os
import signal

import pytest

SECONDS = 90  # within which mpiexec has to end, compiling included


@pytest.mark.parametrize(
    "kind, victim",
    [
        ("ps-sync", 0),
        ("ps-async", 2),
        pytest.param("ps-sync", 2, marks=pytest.mark.release),
        pytest.param("ps-async", 0, marks=pytest.mark.release),
    ],
)
def test_killed_rank_ends_the_run(mpi_run, kind, victim):
    run = mpi_run(3, train_until_the_end_of_a_rank, kind, victim, timeout=SECONDS, check=False)
    assert run.returncode != 0
    assert f"rank {victim} goes" in run.stdout


def train_until_the_end_of_a_rank(kind, victim):
    from threading import Timer

    from mpi4py import MPI
    from scipy.sparse import eye_array

    from sparseallreduce.linear import STRATEGIES, Constant, Dataset, Descent, Logistic, Options, Trainer

    comm, victim = MPI.COMM_WORLD, int(victim)
    rows = 50 if comm.rank < 2 else 0
    labels = [(-1.0) ** row for row in range(rows)]
    dataset = Dataset.from_scipy(eye_array(50, format="csr")[:rows], labels, first_sample=50 * comm.rank, total_samples=100)
    trainer = Trainer(Logistic(), STRATEGIES[kind](dataset, comm, Descent()), Constant(0.1), Options(10**6, 5))
    for number, _ in enumerate(trainer.run()):
        if comm.rank == victim and number == 1:
            Timer(0.2, lambda: (print(f"rank {victim} goes", flush=True), os.kill(os.getpid(), signal.SIGKILL))).start()
