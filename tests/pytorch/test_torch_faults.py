"""Promise 3 between the sums of PyTorch's optimisers and hooks, for a selection of faults: `bench/faults.py --rooms` tries more."""

import pytest
from thoroughness import examples

pytest.importorskip("torch")

SECONDS = 240  # within which mpiexec has to end, compiling included


def test_what_fails_in_a_step_is_an_error_of_all_ranks(mpi_run):
    run = mpi_run(2, strike, examples(30), timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "faults struck, 0 left what is not promised" in run.stdout


def strike(faults):
    from world import rooms

    assert rooms.run(int(faults), seed=4, named="torch ") == 0
