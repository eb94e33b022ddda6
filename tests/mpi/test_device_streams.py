"""Streams of a device on two ranks and on three, under numba's simulator, in one launch (device_checks.py)."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
SETTINGS = {
    "NUMBA_ENABLE_CUDASIM": "1",
    "NUMBA_DISABLE_JIT": "1",
    "PYTHONPATH": f"{HERE}:{HERE.parent / 'cuda'}",
    "PYTHONWARNINGS": "ignore",
}


def test_streams_of_a_device_over_mpi(mpi_run):
    run = mpi_run(3, "-c", "import simulated; simulated.prepare(); import device_checks; device_checks.main()", timeout=180, env=SETTINGS)
    assert run.stdout.count(": passed after") == 8, run.stdout + run.stderr
    assert run.stdout.count(" has 0 bytes in use") == 3, run.stdout


@pytest.mark.parametrize(
    "name,text",
    [
        ("SPARSEALLREDUCE_CUDA_MPI", "is 1 if MPI can use GPU memory"),
        pytest.param("SPARSEALLREDUCE_PINNED", "is a number of bytes", marks=pytest.mark.release),
    ],
)
def test_a_wrong_setting_on_one_rank_is_an_error_on_all(mpi_run, name, text):
    program = f"import simulated; simulated.prepare(); import device_checks; device_checks.wrong_setting({name!r})"
    run = mpi_run(2, "-c", program, env=SETTINGS)
    assert run.stdout.count(f"StreamError: rank 1 gave up: {name} {text}") == 2, run.stdout
    assert run.stdout.count("mean 6.0") == 2, run.stdout
