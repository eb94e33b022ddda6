"""Tests of training and predicting on a GPU, under numba's simulator, beside compiled loops of the host: collected there alone."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1" and os.environ.get("NUMBA_DISABLE_JIT", "0") == "0"
collect_ignore_glob = [] if SIMULATED else ["*.py"]

if SIMULATED:
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cuda")]  # bench/ has a simulated.py, too
    import device_arrays as xp
    import simulated

    simulated.prepare()

    from sparseallreduce.linear.kernels.cuda import rows

    @pytest.fixture(autouse=True)
    def gpu(monkeypatch):
        """A GPU with the simulator's memory, for CuPy's stand-in; few threads a row, each of which is one of Python's."""
        monkeypatch.setitem(sys.modules, "cupy", xp)
        monkeypatch.setattr(rows, "LANES", 2)
        monkeypatch.setattr(rows, "SEGMENT", 3)
        monkeypatch.setattr(xp.cuda.Device, "mem_info", (1 << 30, 1 << 30), raising=False)
        monkeypatch.setattr(xp.cuda, "runtime", SimpleNamespace(getDeviceCount=lambda: 1), raising=False)
        return xp
