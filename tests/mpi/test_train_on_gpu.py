"""Training on a GPU by two ranks, under numba's simulator: see tests/cuda_training/two_ranks.py."""

from pathlib import Path

import pytest
from mpi_launch import ROOT, mpi_run

PROGRAM = Path(ROOT, "tests/cuda_training/two_ranks.py")


@pytest.mark.mpi
def test_two_ranks_train_on_the_device_as_on_the_host():
    ran = mpi_run(2, PROGRAM, env={"NUMBA_ENABLE_CUDASIM": "1"}, timeout=120)
    assert ran.stdout.count("is done") == 2
