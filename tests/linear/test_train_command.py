"""The commands `train` and `generate` on one rank, from their arguments to what they write."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from sparseallreduce.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A training and a test file from one true model."""
    folder = tmp_path_factory.mktemp("train")
    sizes = ["--samples", "3000", "--features", "3000"]
    result = CliRunner().invoke(main, ["generate", "url-like", str(folder / "all.svm"), *sizes, "--seed", "2"])
    assert result.exit_code == 0, result.output
    lines = (folder / "all.svm").read_text().splitlines(keepends=True)
    (folder / "train.svm").write_text("".join(lines[:2500]))
    (folder / "test.svm").write_text("".join(lines[2500:]))
    return folder


def run(folder, *arguments, status=0):
    result = CliRunner().invoke(main, ["train", str(folder / "train.svm"), "--epochs", "3", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def test_json_holds_what_the_contract_names(folder, tmp_path):
    run(folder, "--test", folder / "test.svm", "--l2", "1e-6", "--batch-size", "20", "--json", tmp_path / "out.json")

    report = json.loads((tmp_path / "out.json").read_text())

    assert report["schema"] == 1
    assert report["command"] == "train"
    assert report["arguments"]["batch_size"] == 20
    assert report["arguments"]["data"] == str(folder / "train.svm")
    assert report["environment"]["ranks"] == 1
    assert report["results"]["samples"] == 2500
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2, 3]
    for epoch in report["epochs"]:
        assert {"loss", "train_accuracy", "test_accuracy", "seconds", "bytes_sent"} <= epoch.keys()
        assert {"compute", "communicate", "update", "total"} <= epoch["seconds"].keys()
    assert report["epochs"][-1]["train_accuracy"] > 0.85
    assert report["epochs"][-1]["loss"] < report["epochs"][0]["loss"]


def test_without_a_test_file_there_is_no_test_accuracy(folder, tmp_path):
    run(folder, "--json", tmp_path / "out.json")
    assert "test_accuracy" not in json.loads((tmp_path / "out.json").read_text())["epochs"][0]


@pytest.mark.parametrize("model", ["logistic", "svm", "linear"])
def test_both_strategies_write_the_same_model(folder, tmp_path, model):
    rate = "0.02" if model == "linear" else "0.5"
    files = []
    for strategy in ("dense", "sparse"):
        path = tmp_path / f"{strategy}.npz"
        run(folder, "--model", model, "--strategy", strategy, "--learning-rate", rate, "--features", 4000, "--model-out", path)
        files.append(np.load(path))
    np.testing.assert_allclose(files[0]["weights"], files[1]["weights"], rtol=1e-4, atol=1e-6)
    assert np.any(files[0]["weights"])
    for file in files:
        assert (str(file["model"]), int(file["n_features"]), len(file["weights"])) == (model, 4000, 4000)
        assert file["classes"].tolist() == ([] if model == "linear" else [-1, 1])


def test_a_line_is_printed_for_every_epoch(folder):
    lines = run(folder, "--test", folder / "test.svm").output.splitlines()
    assert "2,500 samples" in lines[0]
    assert lines[1].split()[:4] == ["epoch", "loss", "train", "acc"]
    assert [line.split()[0] for line in lines[2:]] == ["1", "2", "3"]


def test_the_same_seed_gives_the_same_weights(folder, tmp_path):
    weights = []
    for number, seed in enumerate([7, 7, 8]):
        run(folder, "--seed", seed, "--model-out", tmp_path / f"{number}.npz")
        weights.append(np.load(tmp_path / f"{number}.npz")["weights"].tobytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    "content,message",
    [
        ("1 1:1\n-1 2:x\n", "line 2: the value 'x' of index 2 is not a number: '-1 2:x'"),
        ("1 1:1\n2 2:1\n3 1:1\n", "needs two classes, but the labels are 1, 2, 3"),
        ("", "no samples in it"),
        (None, "No such file or directory"),
    ],
)
def test_bad_data_is_one_line_and_status_1(tmp_path, content, message):
    path = tmp_path / "bad.svm"
    if content is not None:
        path.write_text(content)
    result = CliRunner().invoke(main, ["train", str(path)])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert str(path) in result.stderr
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_output_that_cannot_be_written_is_known_before_training(folder, tmp_path):
    result = run(folder, "--json", tmp_path / "nowhere" / "out.json", status=1)
    assert "cannot write" in result.stderr
    assert "epoch" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "forest"],
        ["--batch-size", "0"],
        ["--learning-rate", "0"],
        ["--strategy", "dense", "--algorithm", "ssar_ring"],
        ["--l2", "-1"],
        ["--l2", "3"],
    ],
)
def test_bad_arguments_are_status_2(folder, arguments):
    run(folder, *arguments, status=2)


def test_generate_names_the_file_that_it_cannot_write(tmp_path):
    result = CliRunner().invoke(main, ["generate", "uniform", str(tmp_path / "nowhere" / "x.svm")])
    assert result.exit_code == 1
    assert "cannot write" in result.stderr
