"""The programs for a real GPU: that for compute-sanitizer starts every kernel, and without a GPU all say so in one line."""

import subprocess
from pathlib import Path

import device_arrays as xp
import every_kernel
import pytest
from simulated import stand_in
from test_source import FILES, functions_of

from sparseallreduce.linear.kernels.cuda import losses, rows, weights
from sparseallreduce.streams.kernels.cuda import bitmap, dense, drawing, gaps, merging, norms, order, ranking, selection

ROOT = Path(__file__).parent.parent.parent
MODULES = (bitmap, dense, drawing, gaps, merging, norms, order, ranking, selection, losses, rows, weights)


@stand_in
def test_the_program_for_compute_sanitizer_starts_every_kernel(monkeypatch):
    started, right = set(), merging.launch

    def launch(function, threads, *rest):
        if threads > 0:
            started.add(function.fn.__name__)
        right(function, threads, *rest)

    for module in MODULES:
        monkeypatch.setattr(module, "launch", launch)
    every_kernel.run(xp, 60)
    kernels = {
        function.name for path in FILES for function in functions_of(path) if any(each.id == "kernel" for each in function.decorator_list)
    }
    assert started == kernels


@stand_in
@pytest.mark.parametrize("what", ["test", "bench"])
def test_without_a_gpu_that_is_one_line_and_status_2(what):
    ran = subprocess.run([ROOT / "tools/gpu.sh", what], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert "finds no GPU" in ran.stderr
