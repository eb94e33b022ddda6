"""Which backend an array has, and the tests of the CUDA kernels under numba's simulator, in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sparseallreduce import SparseStream
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams.kernels import backend
from sparseallreduce.streams.kernels.backend import array_module, backend_of, cuda_kernels

ROOT = Path(__file__).resolve().parents[2]


class OnDevice:
    """What an array on a GPU shows of itself."""

    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint32", "uint64", "complex64"])
def test_arrays_of_compiled_dtypes_are_for_numba(dtype, monkeypatch):
    from numba.core import config

    assert backend_of(np.zeros(2, dtype)) == ("numpy" if config.DISABLE_JIT else "numba")
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert backend_of(np.zeros(2, dtype)) == "numpy"
    assert array_module(np.zeros(2, dtype)) is np


def test_other_arrays():
    assert backend_of(np.zeros(2, np.float16)) == "numpy"
    assert backend_of(OnDevice()) == "cuda"
    with pytest.raises(StreamTypeError, match="list"):
        backend_of([1.0])


def python(code, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    return subprocess.run([sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True, check=True).stdout


def test_where_there_is_no_gpu_one_line_says_so(monkeypatch):
    from numba import cuda

    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(backend, "_loaded", None)
    one_line = r"^there is no GPU here[^\n]*$"
    with pytest.raises(StreamError, match=one_line):
        SparseStream([1], [2.0], 4).to_device()
    with pytest.raises(StreamError, match=one_line):
        SparseStream.from_dense(OnDevice())
    with pytest.raises(StreamError, match=one_line):
        cuda_kernels()


def test_arrays_of_the_host_are_an_error_unless_the_device_is_simulated():
    code = "import numpy as np; from sparseallreduce.errors import StreamError; from sparseallreduce.streams.kernels.cuda import merging\n"
    code += "from sparseallreduce.streams.operator import SUM; entries = np.arange(3, dtype=np.uint32), np.ones(3)\n"
    code += "try: merging.merge(*entries, *entries, SUM, np)\n"
    code += "except StreamError as error: print(error)"
    assert "under numba's simulator alone" in python(code)


def test_nothing_of_cuda_is_imported_until_it_is_asked_for():
    code = "import sys, numpy as np; from sparseallreduce import SparseStream; from sparseallreduce.streams.kernels import backend\n"
    code += "backend.backend_of(np.zeros(2)); SparseStream([1], [2.0], 4) + SparseStream([1], [2.0], 4)\n"
    code += "device = ('numba.cuda.cudadrv', 'cupy', 'sparseallreduce.streams.kernels.cuda')\n"
    code += "print(*(name for name in sys.modules if name.startswith(device)))"
    assert python(code).split() == []


def test_the_simulator_counts_as_a_gpu():
    code = "from sparseallreduce.streams.kernels.backend import cuda_kernels; print(cuda_kernels().__name__)"
    assert python(code, NUMBA_ENABLE_CUDASIM="1").strip() == "sparseallreduce.streams.kernels.cuda.functions"


def test_the_cuda_kernels_under_the_simulator():
    """All of tests/cuda. The CPU's functions run in plain NumPy there, whose bits those that are compiled have (test_kernels.py)."""
    left_out = ("PYTEST", "TEST_SECONDS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    environment |= {"NUMBA_ENABLE_CUDASIM": "1", "NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-m", "pytest", "tests/cuda", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout
