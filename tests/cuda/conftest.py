"""Tests of the CUDA kernels: under numba's simulator with NUMBA_ENABLE_CUDASIM=1, or with SPARSEALLREDUCE_TEST_GPU=1 on a GPU, with CuPy in
the place of what stands for it (`make test-gpu`). Without either nothing is collected.
"""

import os
import sys

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_DEVICE = os.environ.get("SPARSEALLREDUCE_TEST_GPU") == "1"
STAND_IN = ["device_arrays.py", "device_streams.py", "test_devices.py", "test_transport.py"]  # what stands for CuPy, and its own tests
collect_ignore_glob = [] if SIMULATED else STAND_IN if ON_DEVICE else ["*.py"]

if ON_DEVICE:
    import cupy

    sys.modules["device_arrays"] = cupy
elif SIMULATED:
    import simulated

    simulated.prepare()

    from sparseallreduce.streams.kernels.cuda import ranking

    @pytest.fixture(autouse=True, scope="module")
    def few_digits(request):
        """Histograms of 32 counts for others than their own tests: each takes as many turns of a loop of Python, twice."""
        with pytest.MonkeyPatch.context() as patch:
            if request.module.__name__ not in ("test_ranking", "test_source"):
                patch.setattr(ranking, "DIGIT", 5)
                patch.setattr(ranking, "DIGITS", 2**5)
            yield
