"""Ranks under mpiexec that share one device."""

from pathlib import Path

import pytest
from simulated import ON_DEVICE


@pytest.mark.parametrize("ranks", [1, 2, 4] if ON_DEVICE else [2])
def test_ranks_that_share_a_device_have_the_sums_of_the_host(mpi_run, ranks):
    environment = {} if ON_DEVICE else {"NUMBA_DISABLE_JIT": "0"}  # what the ranks of a host share in memory is compiled code's
    ran = mpi_run(ranks, Path(__file__).parent / "ranks.py", timeout=240, env=environment)
    assert ran.stdout.strip() == f"{ranks} rank(s) agree"
