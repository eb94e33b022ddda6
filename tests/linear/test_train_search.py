"""`train --C 0.1,1,10 --folds 5`: what is compared, what is chosen, and what is refused."""

import json

import numpy as np
import pytest
from click_runner import CliRunner
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_diabetes, load_iris
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import Dataset
from sparseallreduce.linear.training.batches import Fold, divided

SETS = {"two": load_breast_cancer, "three": load_iris, "numbers": load_diabetes}
STRENGTHS = [0.01, 1.0, 100.0]
LIST = "0.01,1,100"


def standardised(name):
    X, y = SETS[name](return_X_y=True)
    return np.round(StandardScaler().fit_transform(X), 4).astype(np.float32), y


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    for name in SETS:
        dump_svmlight_file(*standardised(name), str(folder / f"{name}.svm"), zero_based=False)
    return folder


def run(path, *arguments, status=0):
    result = CliRunner().invoke(main, ["train", str(path), *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def folds_of(labels, codes, folds, seed=0):
    """The rows that each fold holds out, and the others."""
    data = Dataset.from_scipy(np.ones((len(labels), 1)), labels)
    parts = [divided(data, Fold(number, folds), seed, sar.SERIAL, codes) for number in range(folds)]
    return [(part.rows, part.held_out) for part in parts]


@pytest.mark.parametrize("name", ["two", "three"])
def test_the_figures_are_those_of_models_trained_without_the_fold(folder, tmp_path, name):
    X, y = standardised(name)
    run(folder / f"{name}.svm", "--C", LIST, "--folds", 4, "--gap", 1e-6, "--seed", 3, "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["search"]
    assert (found["parameter"], found["folds"]) == ("C", 4) and [each["C"] for each in found["candidates"]] == STRENGTHS
    for each in found["candidates"]:
        scores = [
            LogisticRegression(C=each["C"], max_iter=10_000, tol=1e-8).fit(X[rows], y[rows]).score(X[out], y[out])
            for rows, out in folds_of(y.astype(float), np.unique(y).astype(float), 4, seed=3)
        ]
        accuracy = each["validation_accuracy"]
        np.testing.assert_allclose(accuracy["folds"], scores, atol=0.008)  # a sample at the border
        assert (accuracy["mean"], accuracy["deviation"]) == (np.mean(accuracy["folds"]), np.std(accuracy["folds"]))
        assert len(each["validation_loss"]["folds"]) == 4 and each["seconds"] > 0
        assert ("validation_auc" in each) == (name == "two")


def test_numbers_are_compared_by_loss_and_have_an_r2(folder, tmp_path):
    X, y = standardised("numbers")
    run(folder / "numbers.svm", "--model", "linear", "--C", LIST, "--folds", 3, "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["search"]
    for each in found["candidates"]:
        scores = [Ridge(alpha=1 / each["C"]).fit(X[rows], y[rows]).score(X[out], y[out]) for rows, out in folds_of(y, None, 3)]
        np.testing.assert_allclose(each["validation_r2"]["folds"], scores, rtol=1e-3)
        assert "validation_accuracy" not in each
    losses = [each["validation_loss"]["mean"] for each in found["candidates"]]
    assert found["best"] == STRENGTHS[int(np.argmin(losses))]


WAYS = [
    ("two", ["--C", LIST]),
    ("two", ["--C", LIST, "--solver", "dual", "--model", "svm"]),
    ("three", ["--C", LIST, "--solver", "cocoa"]),
    ("two", ["--l2", "1e-4,0.1", "--solver", "sgd", "--epochs", 3]),
    ("two", ["--C", LIST, "--epochs", 8, "--early-stopping", "loss", "--tolerance", 0.01, "--patience", 1]),
]


@pytest.mark.parametrize("name,options", WAYS, ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else value)
def test_the_model_is_that_of_the_best_alone_on_all_samples(folder, tmp_path, name, options):
    given = options[0]
    output = run(folder / f"{name}.svm", *options, "--folds", 3, "--json", tmp_path / "a.json", "--model-out", tmp_path / "a.npz").output
    report = json.loads((tmp_path / "a.json").read_text())
    found = report["search"]
    means = [(-each["validation_accuracy"]["mean"], each["validation_loss"]["mean"]) for each in found["candidates"]]
    assert found["best"] == found["candidates"][means.index(min(means))][given.strip("-")] == report["results"][given.strip("-")]
    assert [line.split()[1] for line in output.splitlines() if line.endswith("  best")] == [f"{found['best']:g}"]
    alone = [given, found["best"], *options[2:]]
    run(folder / f"{name}.svm", *alone, "--json", tmp_path / "b.json", "--model-out", tmp_path / "b.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npz")["weights"], np.load(tmp_path / "b.npz")["weights"])
    assert report["results"]["samples"] == 569 or name == "three"


def test_search_tries_a_grid_with_five_folds(folder, tmp_path):
    run(folder / "three.svm", "--C", "search", "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["search"]
    tried = [each["C"] for each in found["candidates"]]
    assert found["folds"] == 5 and tried == sorted(tried) and (tried[0], tried[-1], len(tried)) == (0.001, 100.0, 11)


def test_samples_held_out_choose_between_several_C_as_between_several_l2(folder, tmp_path):
    output = run(folder / "two.svm", "--C", LIST, "--validation", 0.3, "--json", tmp_path / "out.json").output
    report = json.loads((tmp_path / "out.json").read_text())
    costs = {model["C"]: min(epoch["validation_loss"] for epoch in model["epochs"]) for model in report["models"]}
    assert list(costs) == STRENGTHS and report["results"]["C"] == min(costs, key=costs.get)
    assert "C 0.01, 1, 100" in output and "search" not in report


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--C", "0.1,1"], "choosing among several --C needs held-out samples: give --validation or --folds too"),
        (["--folds", "5"], "give them, as --C 0.01,0.1,1,10"),
        (["--folds", "1", "--C", "1,2"], "1 is not in the range"),
        (["--folds", "3", "--C", "1,2", "--validation", "0.1"], "--folds and --validation both"),
        (["--folds", "3", "--C", "1,2", "--checkpoint", "kept"], "--checkpoint stores the state of one run"),
        (["--folds", "3", "--C", "1,2", "--l2", "0.1"], "--C and --l2 both"),
        (["--folds", "3", "--C", "1,2", "--early-stopping", "validation_loss"], "give --validation too"),
        (["--folds", "3", "--C", "1,2", "--epochs", "0"], "raise --epochs"),
        (["--C", "1,1", "--folds", "3"], "contains a number twice"),
        (["--C", "1,zwei", "--folds", "3"], "'zwei' is not a valid float"),
        (["--C", "1,0", "--folds", "3"], "0.0 is not in the range"),
        (["--C", "1,inf", "--folds", "3"], "--C must be a finite number"),
    ],
)
def test_what_says_nothing_or_two_things_is_one_line_and_status_2(folder, arguments, message):
    refused = run(folder / "two.svm", *arguments, status=2)
    assert message in refused.stderr and refused.stderr.count("\n") == 1


def test_more_folds_than_samples_of_a_class_are_refused_by_its_name(folder, tmp_path):
    lines = (folder / "three.svm").read_text().splitlines(keepends=True)
    (tmp_path / "few.svm").write_text("".join(lines[:100] + lines[-4:]))
    refused = run(tmp_path / "few.svm", "--C", LIST, "--folds", 5, status=1)
    assert "--folds 5 needs as many samples of each class, but the class 2 has 4" in refused.stderr and refused.stderr.count("\n") == 1
