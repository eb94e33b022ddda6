"""Training under mpiexec that is killed or told to stop in the middle, and resumed: the weights are those of an undisturbed run."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from kill_test import Run, rank_processes
from mpi_launch import SETTINGS

from sparseallreduce.linear import generate

pytestmark = [pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks in /proc"), pytest.mark.slow]


@pytest.fixture
def data(mpi_run, tmp_path, monkeypatch):
    """The samples of a run of some seconds."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    generate("url-like", tmp_path / "train.svm", samples=6000, features=20_000)
    return tmp_path / "train.svm"


def run(data, name, ranks=2, checkpoints=True):
    folder = data.parent / name
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_and_a_resumption_end_at_the_same_bits(data, rank):
    undisturbed = run(data, "whole", checkpoints=False)
    undisturbed.finish()
    killed = run(data, "killed")
    for _ in range(2):
        kill(killed, rank)
    killed.finish("--resume")
    assert killed.weights() == undisturbed.weights()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_at_one_rank_ends_all_with_a_checkpoint(data, sent, rank):
    undisturbed = run(data, "whole", checkpoints=False)
    undisturbed.finish()
    stopped = run(data, "stopped")
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


def test_another_number_of_ranks_resumes_to_the_same_weights_within_rounding(data):
    undisturbed = run(data, "whole", checkpoints=False)
    undisturbed.finish()
    stopped = run(data, "stopped")
    kill(stopped, 1)
    stopped.ranks = 3
    assert "a step takes 40 samples, as before, now of 3 ranks" in stopped.finish("--resume")
    with np.load(stopped.folder / "model.npz") as ours, np.load(undisturbed.folder / "model.npz") as expected:
        np.testing.assert_allclose(ours["weights"], expected["weights"], rtol=1e-3, atol=1e-5)


def test_the_bench_compares_as_often_as_it_is_asked(data):
    bench = os.path.join(os.path.dirname(__file__), "..", "..", "bench", "kill_test.py")
    command = [sys.executable, bench, "--kills", "1", "--samples", "4000", "--", "--batch-size", "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "1 ended with the bits of the undisturbed run" in done.stdout
