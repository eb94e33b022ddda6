"""Tests of optimisers whose tensors are taken for a GPU's: collected under numba's simulator alone."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "cuda"), str(Path(__file__).parents[1])]  # bench/ has a simulated.py, too
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
collect_ignore_glob = [] if SIMULATED else ["*.py"]

if SIMULATED:
    import pytest

    from sparseallreduce.streams.kernels.cuda import ranking

    @pytest.fixture(autouse=True, scope="session")
    def few_digits():
        """Histograms of 32 counts, each of which takes turns of a loop of Python."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ranking, "DIGIT", 5)
            patch.setattr(ranking, "DIGITS", 2**5)
            yield
