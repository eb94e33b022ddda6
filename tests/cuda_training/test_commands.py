"""``train`` and ``predict`` with ``--device gpu``."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from sparseallreduce.cli import main
from sparseallreduce.linear import load_model


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    command("generate", "url-like", folder / "data.svm", "--samples", 30, "--features", 40)
    rng = np.random.default_rng(5)
    rows = [" ".join(f"{index + 1}:{rng.random():.4f}" for index in np.flatnonzero(rng.random(8) < 0.5)) for _ in range(24)]
    (folder / "classes.svm").write_text("".join(f"{number % 3} {row}\n" for number, row in enumerate(rows)))
    return folder


@pytest.mark.parametrize(
    "samples, options",
    [
        ("data", ["--l2", 1e-3]),
        ("data", ["--model", "svm", "--strategy", "oktopk", "--density", 0.5, "--schedule", "inverse-time", "--intercept"]),
        ("classes", ["--strategy", "dense", "--learning-rate", 0.5]),
    ],
)
def test_models_and_predictions_are_those_of_the_host(folder, tmp_path, samples, options):
    data, said = folder / f"{samples}.svm", {}
    for device in ("cpu", "gpu"):
        model = tmp_path / f"{device}.npz"
        common = ("--epochs", 1, "--batch-size", 12, "--test", data, "--json", tmp_path / f"{device}.json", "--model-out", model)
        said[device] = command("train", data, *options, *common, "--device", device).output
        command("predict", model, data, "--out", tmp_path / f"{device}.txt", "--device", device)
    assert "worth it from 65,536 on" in said["gpu"] and "worth it" not in said["cpu"]
    ours, theirs = (load_model(tmp_path / f"{device}.npz") for device in ("gpu", "cpu"))
    np.testing.assert_allclose(ours.weights, theirs.weights, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(ours.intercept, theirs.intercept, rtol=1e-3, atol=1e-5)
    records = [json.loads((tmp_path / f"{device}.json").read_text()) for device in ("gpu", "cpu")]
    assert [each["arguments"]["device"] for each in records] == ["gpu", "cpu"]
    accuracies = [[epoch[name] for name in ("train_accuracy", "test_accuracy")] for each in records for epoch in each["epochs"]]
    assert accuracies[0] == accuracies[1]
    assert (tmp_path / "gpu.txt").read_text() == (tmp_path / "cpu.txt").read_text()


def test_features_that_a_model_does_not_have_count_nothing(folder, tmp_path):
    command("train", folder / "data.svm", "--epochs", 1, "--batch-size", 30, "--model-out", tmp_path / "model.npz")
    (tmp_path / "wide.svm").write_text((folder / "data.svm").read_text().replace("\n", " 900:2.5\n"))
    common = ("predict", tmp_path / "model.npz", tmp_path / "wide.svm", "--ignore-unknown")
    assert command(*common, "--device", "gpu").stdout == command(*common).stdout
