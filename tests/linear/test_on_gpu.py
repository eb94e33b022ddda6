"""Training and predicting on a GPU: all of tests/cuda_training under numba's simulator, and what is said where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click_runner import CliRunner

from sparseallreduce.cli import main

ROOT = Path(__file__).parents[2]


def test_the_tests_under_the_simulator():
    left_out = ("PYTEST", "TEST_SECONDS", "NUMBA_DISABLE_JIT")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)} | {"NUMBA_ENABLE_CUDASIM": "1"}
    command = [sys.executable, "-m", "pytest", "tests/cuda_training", "-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout and "skipped" not in ran.stdout, ran.stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (["--solver", "cocoa"], "--device gpu does not support --solver cocoa: use --solver sgd"),
        (["--strategy", "overlapped"], "--device gpu does not support --strategy overlapped: use sparse, dense or one of oktopk"),
        (["--strategy", "ps-sync"], "--device gpu does not support --strategy ps-sync"),
        (["--update", "arow"], "--device gpu does not support --update arow: use ftrl or sgd"),
        (["--momentum", "0.5"], "--device gpu does not support --momentum"),
        (["--momentum", "0.5", "--nesterov"], "--device gpu does not support --momentum"),
        (["--average", "1"], "--device gpu does not support --average"),
        (["--l1", "0.1", "--update", "sgd"], "--device gpu does not support --l1 with --update sgd: use --update ftrl"),
        (["--threads", "2"], "--device gpu does not support --threads"),
        ([], "--device gpu: "),
    ],
)
def test_what_is_of_the_host_is_one_line_and_status_2(tmp_path, monkeypatch, options, said):
    monkeypatch.setitem(sys.modules, "cupy", None)  # also where there is one
    data = tmp_path / "data.svm"
    data.write_text("1 1:1\n-1 2:1\n")
    result = CliRunner().invoke(main, ["train", str(data), "--device", "gpu", *options])
    assert result.exit_code == 2 and said in result.output, result.output
    assert "Traceback" not in result.output


def test_predicting_without_a_gpu_is_one_line_and_status_2(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    (tmp_path / "data.svm").write_text("1 1:1\n")
    result = CliRunner().invoke(main, ["predict", str(tmp_path / "model.npz"), str(tmp_path / "data.svm"), "--device", "gpu"])
    assert result.exit_code == 2 and "--device gpu: " in result.output, result.output
