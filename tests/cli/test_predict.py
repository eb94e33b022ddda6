"""`predict`: what train has learned says of other samples, in the order of the file and by the labels of the data."""

import json

import numpy as np
import pytest
from click_runner import CliRunner
from sklearn.metrics import f1_score

from sparseallreduce.cli import main
from sparseallreduce.linear import FittedModel, LogisticRegression, load_model, save_model

FEATURES = 500


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Samples, and models of each kind trained on them."""
    folder = tmp_path_factory.mktemp("predict")
    command("generate", "url-like", folder / "data.svm", "--samples", 600, "--features", FEATURES)
    for model, rate in (("logistic", 0.5), ("svm", 0.2), ("linear", 0.02)):
        train = ("train", folder / "data.svm", "--model", model, "--learning-rate", rate, "--epochs", 5, "--batch-size", 20)
        command(*train, "--features", FEATURES, "--model-out", folder / f"{model}.npz", "--json", folder / f"{model}.json")
    return folder


def lines(path):
    return path.read_text().splitlines()


@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_predictions_are_labels_in_the_order_of_the_file(folder, tmp_path, model):
    said = command("predict", folder / f"{model}.npz", folder / "data.svm", "--out", tmp_path / "out.txt").output
    predicted = lines(tmp_path / "out.txt")
    labels = [line.split()[0].removeprefix("+") for line in lines(folder / "data.svm")]
    accuracy = np.mean([one == other for one, other in zip(predicted, labels, strict=True)])
    assert f"600 samples, accuracy {accuracy:.4f}" in said
    trained = json.loads((folder / f"{model}.json").read_text())["epochs"][-1]["train_accuracy"]
    assert accuracy == pytest.approx(trained, abs=1e-9)
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_predictions_go_to_the_terminal_and_the_verdict_beside_them(folder, tmp_path):
    result = command("predict", folder / "svm.npz", folder / "data.svm")
    assert result.stdout.splitlines() and set(result.stdout.splitlines()) == {"1", "-1"}
    assert "accuracy" in result.stderr


def test_a_regression_predicts_numbers(folder, tmp_path):
    said = command("predict", folder / "linear.npz", folder / "data.svm", "--out", tmp_path / "out.txt").output
    numbers = np.array(lines(tmp_path / "out.txt"), float)
    labels = np.array([line.split()[0] for line in lines(folder / "data.svm")], float)
    assert f"mean squared error {np.mean((numbers - labels) ** 2):.5}"[:-1] in said


def test_probabilities_are_of_every_label(folder, tmp_path):
    command("predict", folder / "logistic.npz", folder / "data.svm", "--probabilities", "--out", tmp_path / "out.txt")
    header, *rows = lines(tmp_path / "out.txt")
    assert header == "labels -1 1"
    table = np.array([row.split() for row in rows], float)
    np.testing.assert_allclose(table[:, 1] + table[:, 2], 1, atol=1e-5)
    np.testing.assert_array_equal(np.where(table[:, 2] > 0.5, 1, -1), table[:, 0])
    refused = command("predict", folder / "svm.npz", folder / "data.svm", "--probabilities", status=2)
    assert "--probabilities is for logistic models" in refused.stderr


def test_a_model_of_an_estimator_predicts_its_own_labels(folder, tmp_path):
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 3))
    y = np.array(["ant", "bee", "wasp"])[X.argmax(axis=1)]
    model = LogisticRegression().fit(X, y)
    model.to_file(tmp_path / "model.npz")
    (tmp_path / "data.svm").write_text("".join(f"0 1:{a:.17g} 2:{b:.17g} 3:{c:.17g}\n" for a, b, c in X))
    said = command("predict", tmp_path / "model.npz", tmp_path / "data.svm", "--out", tmp_path / "out.txt").output
    assert lines(tmp_path / "out.txt") == model.predict(X).tolist()
    assert "no accuracy" in said


def test_labels_come_back_as_they_were(tmp_path):
    save_model(tmp_path / "model.npz", FittedModel("svm", np.float32([1, -1]), 0.0, np.array([0.5, 3.0])))
    (tmp_path / "data.svm").write_text("3 1:1\n0.5 2:1\n7 1:1\n")
    command("predict", tmp_path / "model.npz", tmp_path / "data.svm", "--out", tmp_path / "out.txt")
    assert lines(tmp_path / "out.txt") == ["3", "0.5", "3"]


LABELS = ["", '"a"', "a", "a b", "a\nb", "v1", "v1.0", "v1.00"]


def test_labels_of_text_are_told_apart(tmp_path):
    save_model(tmp_path / "model.npz", FittedModel("logistic", np.eye(8, dtype=np.float32), np.zeros(8), np.array(LABELS)))
    (tmp_path / "data.svm").write_text("".join(f"0 {index + 1}:1\n" for index in range(8)))
    command("predict", tmp_path / "model.npz", tmp_path / "data.svm", "--out", tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text().split("\n") == ['""', '"\\"a\\""', "a", "a b", '"a\\nb"', "v1", "v1.0", "v1.00", ""]
    command("predict", tmp_path / "model.npz", tmp_path / "data.svm", "--probabilities", "--out", tmp_path / "out.txt")
    header, *rows = lines(tmp_path / "out.txt")
    assert header == 'labels "" "\\"a\\"" a "a b" "a\\nb" v1 v1.0 v1.00'
    assert [row.rsplit(" ", 8)[0] for row in rows] == ['""', '"\\"a\\""', "a", '"a b"', '"a\\nb"', "v1", "v1.0", "v1.00"]


def test_features_that_the_model_does_not_have_are_an_error_or_left_out(folder, tmp_path):
    text = (folder / "data.svm").read_text()
    (tmp_path / "more.svm").write_text(text.replace("\n", f" {FEATURES + 7}:5\n", 1))
    refused = command("predict", folder / "svm.npz", tmp_path / "more.svm", "--out", tmp_path / "out.txt", status=1)
    assert f"index {FEATURES + 7} is above" in refused.stderr
    assert "line 1" in refused.stderr
    assert not (tmp_path / "out.txt").exists()
    command("predict", folder / "svm.npz", tmp_path / "more.svm", "--ignore-unknown", "--out", tmp_path / "out.txt")
    command("predict", folder / "svm.npz", folder / "data.svm", "--out", tmp_path / "expected.txt")
    assert lines(tmp_path / "out.txt") == lines(tmp_path / "expected.txt")


def test_a_file_with_fewer_features_is_fine(folder, tmp_path):
    (tmp_path / "few.svm").write_text("1 1:1 2:0.5\n")
    model = load_model(folder / "svm.npz")
    score = model.weights[0] + 0.5 * model.weights[1] + model.intercept
    for extra in ([], ["--ignore-unknown"]):
        command("predict", folder / "svm.npz", tmp_path / "few.svm", *extra, "--out", tmp_path / "out.txt")
        assert lines(tmp_path / "out.txt") == ["1" if score > 0 else "-1"]


def test_errors_name_the_file(folder, tmp_path):
    assert "there is no model file" in command("predict", tmp_path / "absent.npz", folder / "data.svm", status=1).stderr
    assert "is not a model file" in command("predict", folder / "data.svm", folder / "data.svm", status=1).stderr
    assert "absent.svm" in command("predict", folder / "svm.npz", tmp_path / "absent.svm", status=1).stderr
    assert "cannot write" in command("predict", folder / "svm.npz", folder / "data.svm", "--out", tmp_path / "no" / "out", status=1).stderr


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.release), 3])
def test_any_number_of_ranks_writes_the_same_file(folder, tmp_path, mpi_run, ranks):
    command("predict", folder / "logistic.npz", folder / "data.svm", "--probabilities", "--out", tmp_path / "alone.txt")
    arguments = ("predict", folder / "logistic.npz", folder / "data.svm", "--probabilities", "--out", tmp_path / "shared.txt")
    run = mpi_run(ranks, "-m", "sparseallreduce", *arguments)
    assert run.stdout.count("accuracy") == 1
    assert (tmp_path / "shared.txt").read_text() == (tmp_path / "alone.txt").read_text()
    refused = mpi_run(ranks, "-m", "sparseallreduce", "predict", folder / "data.svm", folder / "data.svm", check=False)
    assert refused.returncode == 1
    assert refused.stderr.count("is not a model file") == 1


def test_metrics_are_shown_and_written(folder, tmp_path):
    out = ("--out", tmp_path / "out.txt")
    said = command("predict", folder / "logistic.npz", folder / "data.svm", "--metrics", "f1,roc_auc,confusion_matrix", *out).output
    assert "f1  " in said and "roc_auc  " in said and "true \\ predicted" in said and "log_loss" not in said
    command("predict", folder / "logistic.npz", folder / "data.svm", "--json", tmp_path / "all.json", *out)
    results = json.loads((tmp_path / "all.json").read_text())["results"]
    labels = [line.split()[0].removeprefix("+") for line in lines(folder / "data.svm")]
    predicted = lines(tmp_path / "out.txt")
    assert results["metrics"]["f1"] == pytest.approx(f1_score(labels, predicted, pos_label="1"))
    assert results["metrics"]["labels"] == [-1, 1]
    assert np.sum(results["metrics"]["confusion_matrix"]) == results["samples"] == 600
    trained = json.loads((folder / "logistic.json").read_text())
    assert trained["results"]["metrics"] == {}
    refused = command("predict", folder / "svm.npz", folder / "data.svm", "--metrics", "log_loss", *out, status=2)
    assert "needs the probabilities" in refused.stderr
    refused = command("predict", folder / "svm.npz", folder / "data.svm", "--metrics", "f2", *out, status=2)
    assert "there is no metric 'f2'" in refused.stderr


def test_samples_without_labels_have_no_metrics(tmp_path):
    save_model(tmp_path / "model.npz", FittedModel("svm", np.float32([1, -1]), 0.0, np.array([0.0, 1.0])))
    (tmp_path / "data.svm").write_text("1 1:1\n7 2:1\n")
    out = ("--out", tmp_path / "out.txt", "--json", tmp_path / "out.json")
    command("predict", tmp_path / "model.npz", tmp_path / "data.svm", *out)
    assert json.loads((tmp_path / "out.json").read_text())["results"]["metrics"] is None
    refused = command("predict", tmp_path / "model.npz", tmp_path / "data.svm", "--metrics", "all", *out, status=1)
    assert "the label of sample 1, 7.0, is none of the model's classes" in refused.stderr
