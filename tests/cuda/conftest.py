"""Tests of the CUDA kernels: under numba's simulator with NUMBA_ENABLE_CUDASIM=1, or with SPARSEALLREDUCE_TEST_GPU=1 on a GPU, with CuPy in
the place of what stands for it (`make test-gpu`). Without either nothing is collected.
"""

import os
import sys
import threading
import time

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
ON_DEVICE = os.environ.get("SPARSEALLREDUCE_TEST_GPU") == "1"
collect_ignore_glob = [] if SIMULATED else ["device_arrays.py"] if ON_DEVICE else ["*.py"]

if ON_DEVICE:
    import cupy

    sys.modules["device_arrays"] = cupy
elif SIMULATED:
    from numba.cuda.simulator import kernel, kernelapi

    from sparseallreduce.streams.kernels.cuda import ranking

    def is_alive(self):
        """As any thread's; the simulator, which asks again and again, lets those run meanwhile that it waits for."""
        time.sleep(0)
        return threading.Thread.is_alive(self)

    kernel.BlockThread.is_alive = is_alive
    right, making = kernelapi.FakeCUDAShared.array, threading.Lock()

    def array(self, shape, dtype):
        """One array for all threads of a block, of which no kernel has two: the simulator makes another where two threads ask at once."""
        with making:
            return right(self, shape, dtype)

    kernelapi.FakeCUDAShared.array = array

    @pytest.fixture(autouse=True, scope="module")
    def few_digits(request):
        """Histograms of 32 counts for others than their own tests: each takes as many turns of a loop of Python, twice."""
        with pytest.MonkeyPatch.context() as patch:
            if request.module.__name__ not in ("test_ranking", "test_source"):
                patch.setattr(ranking, "DIGIT", 5)
                patch.setattr(ranking, "DIGITS", 2**5)
            yield
