"""Processes that ranks start are no ranks: they compute alone, whatever they inherit, and the ranks go on undisturbed."""

from pathlib import Path

import pytest
from mpi_launch import launcher

CALL = "import children, sys; getattr(children, sys.argv[1])(*sys.argv[2:])"
HERE = {"PYTHONPATH": str(Path(__file__).parent)}


@pytest.fixture
def ranks_run(mpi_run):
    """Run a function of children.py on some ranks, all of which have to come to its end."""

    def run(ranks, name, *arguments, mpi=None):
        ran = mpi_run(ranks, "-c", CALL, name, *arguments, env=HERE, mpi=mpi, timeout=240)
        assert ran.stdout.count("done") == ranks, (ran.stdout, ran.stderr)

    return run


@pytest.mark.parametrize("mpi, ranks", [("mpich", 1), ("mpich", 2), pytest.param("openmpi", 2, marks=pytest.mark.release)])
def test_a_forked_child_computes_alone_and_has_nothing_of_its_parents(ranks_run, mpi, ranks):
    if launcher(mpi) is None:
        pytest.skip(f"no {mpi} here: `make test` installs it")
    ranks_run(ranks, "run_forked", mpi=mpi)


def test_workers_compute_alone_however_they_are_started(ranks_run):
    ranks_run(2, "run_workers")


@pytest.mark.parametrize(
    "ranks, backends",
    [
        (2, ["loky"]),
        pytest.param(2, ["multiprocessing"], marks=pytest.mark.release),
        pytest.param(1, ["loky", "threading"], marks=pytest.mark.release),
    ],
)
def test_a_search_of_scikit_learn_in_workers(ranks_run, ranks, backends):
    pytest.importorskip("sklearn")
    ranks_run(ranks, "run_grid_search", *backends)


def test_programs_of_a_rank_are_no_ranks_unless_an_mpiexec_starts_them(ranks_run):
    ranks_run(1, "run_programs", launcher().mpiexec)
