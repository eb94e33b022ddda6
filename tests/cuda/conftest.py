"""Tests of the CUDA kernels, which only numba's simulator runs here: without NUMBA_ENABLE_CUDASIM=1 nothing is collected."""

import os
import threading
import time

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
collect_ignore_glob = [] if SIMULATED else ["*.py"]

if SIMULATED:
    from device_streams import watched
    from numba.cuda.simulator import kernel

    from sparseallreduce.streams.kernels.cuda import launching

    launching.launch = watched(launching.launch)  # before the files of kernels take it

    from sparseallreduce.streams.kernels.cuda import ranking

    def is_alive(self):
        """As any thread's; the simulator, which asks again and again, lets those run meanwhile that it waits for."""
        time.sleep(0)
        return threading.Thread.is_alive(self)

    kernel.BlockThread.is_alive = is_alive

    @pytest.fixture(autouse=True, scope="module")
    def few_digits(request):
        """Histograms of 32 counts for others than their own tests: each takes as many turns of a loop of Python, twice."""
        with pytest.MonkeyPatch.context() as patch:
            if request.module.__name__ not in ("test_ranking", "test_source"):
                patch.setattr(ranking, "DIGIT", 5)
                patch.setattr(ranking, "DIGITS", 2**5)
            yield
