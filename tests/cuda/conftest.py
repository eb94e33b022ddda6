"""Tests of the CUDA kernels, which only numba's simulator runs here: without NUMBA_ENABLE_CUDASIM=1 nothing is collected."""

import os

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
collect_ignore_glob = [] if SIMULATED else ["*.py"]

if SIMULATED:
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
