"""The measurements of training: what they print, write and draw, on a few steps."""

import json

import lossy_training
import numpy as np
import pytest
from click.testing import CliRunner
from lossy_tasks import Digits, replicas, training

from sparseallreduce import optim


def run(*arguments):
    result = CliRunner().invoke(lossy_training.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    "command,options,said",
    [
        ("convergence", ("--ranks", 2, "--densities", 0.01, "--ways", "plain,warm-up+correction"), "MSTopK SGD, warm-up+correction"),
        ("assumption", ("--ranks", 3, "--densities", 0.01), "xi by tenths of the training"),
        ("selection", ("--ranks", 2, "--densities", 0.01), "Ok-Topk, global"),
    ],
)
def test_a_measurement_is_printed_written_and_drawn(command, options, said, tmp_path):
    report, picture = tmp_path / "report.json", tmp_path / "picture.png"
    output = run(command, "--epochs", 1, "--batch", 750, *options, "--json", report, "--plot", picture)
    assert said in output
    assert json.loads(report.read_text())["results"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_recorded_is_what_ranks_select_from(tmp_path):
    run("record", "--epochs", 1, "--batch", 300, "--ranks", 3, "--every", 2, "--out", tmp_path / "kept.npz")
    kept = np.load(tmp_path / "kept.npz")
    assert kept["steps"].tolist() == [0, 2, 4]
    assert kept["accumulators"].shape == (3, 3, 50826)


def test_an_update_that_lets_everything_through_has_no_xi():
    """At density 1, Ok-Topk's update is the mean itself."""
    task = Digits(epochs=1, batch=500, widths=(64, 8, 6, 10))
    assert max(lossy_training.empirical_xi(task, 2, 1.0)) < 1e-5


def test_a_replica_learns():
    task = Digits(epochs=4, widths=(64, 32, 16, 10))
    measures = list(training(task, replicas(task, optim.GTopkSGD, 2, 0.1, task.settings)))
    assert measures[-1].loss < measures[0].loss / 2
