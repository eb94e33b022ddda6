"""All of the folder simulated_gpu, in a process of its own under numba's CUDA simulator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
FOLDER = "tests/pytorch/simulated_gpu"


def test_tensors_on_a_gpu_under_the_simulator():
    left_out = ("PYTEST", "TEST_SECONDS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {"NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1"}  # the processor's functions in plain NumPy
    command = [sys.executable, "-m", "pytest", FOLDER, "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout


def test_two_ranks_whose_tensors_are_on_a_gpu(mpi_run):
    ran = mpi_run(2, ROOT / FOLDER / "two_ranks.py", env={"NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1"}, timeout=300)
    assert ran.stdout.count("is done") == 2
