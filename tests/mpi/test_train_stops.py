"""Training under mpiexec that is killed or told to stop in the middle, and resumed: the weights are those of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from functools import cache

import numpy as np
import pytest
from kill_test import Run, rank_processes
from mpi_launch import SETTINGS

from sparseallreduce.linear import generate, load_model

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc")


@pytest.fixture(autouse=True)
def settings(mpi_run, monkeypatch):
    """Of a launch, as elsewhere; and there is a launcher."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The samples of a run of a second or two, checkpoints not counted."""
    path = tmp_path_factory.mktemp("stops") / "train.svm"
    generate("url-like", path, samples=2000, features=20_000)
    return path


@pytest.fixture(scope="module")
def finished(data):
    """A function that makes the undisturbed run when first called: the settings of a launch are those of a test."""

    @cache
    def finish():
        whole = run(data, data.parent / "whole", checkpoints=False)
        whole.finish()
        return whole

    return finish


@pytest.fixture
def undisturbed(settings, finished):
    """A run to its end on two ranks, which all tests share."""
    return finished()


def run(data, folder, ranks=2, checkpoints=True):
    folder.mkdir(exist_ok=True)
    options = ["--checkpoint", str(folder / "checkpoints"), "--checkpoint-every-steps", "7"] if checkpoints else []
    return Run(ranks, data, folder, ["--l1", "1e-6", "--momentum", "0.5", "--average", "3", "--batch-size", "20", *options])


def kill(started, rank):
    """Start or resume a run, and kill a rank after the next checkpoint."""
    process = started.start("--resume")
    try:
        wait_for_a_checkpoint(process, started.folder)
        os.kill(rank_processes(process.pid)[rank], signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0


def wait_for_a_checkpoint(process, folder):
    before = set(folder.glob("checkpoints/step-*.npz"))
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if set(folder.glob("checkpoints/step-*.npz")) - before:
            return
        time.sleep(0.005)
    raise AssertionError(f"no checkpoint within a minute; status {process.poll()}")


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.release)])
def test_a_killed_rank_and_a_resumption_end_at_the_same_bits(data, undisturbed, tmp_path, rank):
    killed = run(data, tmp_path)
    for _ in range(2):
        kill(killed, rank)
    killed.finish("--resume")
    assert killed.weights() == undisturbed.weights()


@pytest.mark.parametrize(
    "sent, rank",
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 1),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.release),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.release),
    ],
)
def test_a_signal_at_one_rank_ends_all_with_a_checkpoint(data, undisturbed, tmp_path, sent, rank):
    stopped = run(data, tmp_path)
    process = stopped.start()
    try:
        wait_for_a_checkpoint(process, stopped.folder)
        os.kill(rank_processes(process.pid)[rank], sent)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode not in (0, -signal.SIGKILL)
    assert f"Error: stopped by {sent.name} after step" in output
    assert "a checkpoint is in" in output
    assert "Traceback" not in output
    resumed = stopped.finish("--resume")
    assert "resumed after step" in resumed
    assert stopped.weights() == undisturbed.weights()


def test_another_number_of_ranks_resumes_to_the_same_weights_within_rounding(data, undisturbed, tmp_path):
    stopped = run(data, tmp_path)
    kill(stopped, 1)
    stopped.ranks = 3
    assert "a step uses 40 samples, as before, now from 3 ranks" in stopped.finish("--resume")
    ours, expected = (load_model(each.folder / "model.npz") for each in (stopped, undisturbed))
    np.testing.assert_allclose(ours.weights, expected.weights, rtol=1e-3, atol=1e-5)


@pytest.mark.release
def test_the_bench_compares_as_often_as_it_is_asked():
    bench = os.path.join(os.path.dirname(__file__), "..", "..", "bench", "kill_test.py")
    command = [sys.executable, bench, "--kills", "1", "--samples", "4000", "--", "--batch-size", "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "1 ended with the bits of the undisturbed run" in done.stdout
