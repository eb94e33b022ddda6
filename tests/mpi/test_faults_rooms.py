"""Promise 3 between the sums of estimators and trainers, for a selection of faults: `bench/faults.py --rooms` tries more."""

import pytest
from thoroughness import examples

SECONDS = 240  # within which mpiexec has to end, compiling included


@pytest.mark.parametrize(
    "named,faults",
    [
        ("score,partial_fit,read samples", examples(32)),
        ("fit by default,fit in rounds,train sparse", examples(32)),
        ("steps of", examples(60)),
    ],
)
def test_what_fails_between_sums_is_an_error_of_all_ranks(mpi_run, named, faults):
    run = mpi_run(2, strike, named, faults, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "faults struck, 0 left what is not promised" in run.stdout


def strike(named, faults):
    from world import rooms

    assert rooms.run(int(faults), seed=3, named=named) == 0
