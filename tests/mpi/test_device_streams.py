"""Streams of a device on two ranks and on three, under numba's simulator, in one launch (device_checks.py)."""

from pathlib import Path

HERE = Path(__file__).parent


def test_streams_of_a_device_over_mpi(mpi_run):
    path = f"{HERE}:{HERE.parent / 'cuda'}"
    settings = {"NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    run = mpi_run(3, "-c", "import simulated; simulated.prepare(); import device_checks; device_checks.main()", timeout=180, env=settings)
    assert run.stdout.count(": passed after") == 8, run.stdout + run.stderr
    assert run.stdout.count(" has 0 bytes in use") == 3, run.stdout
