"""The command `train` on several classes at once, and `predict` of what it writes."""

import json

import numpy as np
import pytest
from click_runner import CliRunner

from sparseallreduce.cli import main
from sparseallreduce.linear import LOSSY, load_model
from sparseallreduce.linear.data import occurring
from sparseallreduce.linear.strategies import STRATEGIES

LABELS = (-3.0, 0.5, 2.0, 7.0)


def written(path, labels, seed, samples=400, features=300):
    """Samples of classes that differ in some of their features."""
    rng = np.random.default_rng(seed)
    lines = []
    for number in rng.permutation(np.arange(samples) % len(labels)):
        common, own = rng.choice(features, 8, replace=False), 10 * number + rng.choice(10, 3, replace=False)
        entries = dict.fromkeys(np.r_[common, own].tolist(), 1.0)
        lines.append(f"{labels[number]:g} " + " ".join(f"{index + 1}:{value:g}" for index, value in sorted(entries.items())) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("classes")
    written(folder / "train.svm", LABELS, 1)
    written(folder / "test.svm", LABELS, 2)
    written(folder / "two.svm", LABELS[:2], 3)
    return folder


def run(*arguments, status=0):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == status, result.output + result.stderr
    return result


def train(folder, tmp_path, *arguments, data="train.svm"):
    """The model and the report of a run."""
    given = ["--features", 300, "--epochs", 6, "--batch-size", 20, "--learning-rate", "0.3", *arguments]
    files = ["--model-out", tmp_path / "model.npz", "--json", tmp_path / "out.json"]
    run("train", folder / data, *given, *files)
    return load_model(tmp_path / "model.npz"), json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model, kind", [("logistic", "multinomial"), ("svm", "svm")])
def test_every_strategy_tells_all_classes_apart(folder, tmp_path, strategy, model, kind):
    options = ["--density", "0.1", "--learning-rate", "0.1"] if strategy in LOSSY else []
    asked = ["--model", model, "--strategy", strategy, "--intercept", "--l2", "1e-4", "--test", folder / "test.svm"]
    fitted, report = train(folder, tmp_path, *asked, *options)
    assert fitted.model == kind and fitted.weights.shape == (4, 300) and fitted.intercept.shape == (4,)
    assert fitted.classes.tolist() == list(LABELS) and report["results"]["classes"] == 4
    last = report["epochs"][-1]
    assert last["train_accuracy"] > 0.9 and last["test_accuracy"] > 0.8
    assert last["train_auc"] is None and last["test_auc"] is None
    assert last["loss"] < report["epochs"][0]["loss"]


def test_all_classes_at_once_are_those_of_one_training_after_the_other(folder, tmp_path):
    options = ["--multiclass", "ovr", "--l2", "1e-3", "--l1", "1e-4", "--momentum", "0.5", "--intercept"]
    together, _ = train(folder, tmp_path, *options)
    assert together.model == "logistic"
    text = (folder / "train.svm").read_text()
    for number, label in enumerate(LABELS):
        lines = (line.partition(" ") for line in text.splitlines())
        (tmp_path / "one.svm").write_text("".join(f"{1 if float(own) == label else -1} {rest}\n" for own, _, rest in lines))
        alone, _ = train(tmp_path, tmp_path, *options, data="one.svm")
        np.testing.assert_allclose(together.weights[number], alone.weights, rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(together.intercept[number], alone.intercept, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("choice", ["auto", "ovr"])
def test_two_classes_have_one_score_whatever_is_chosen(folder, tmp_path, choice):
    plain, _ = train(folder, tmp_path, data="two.svm")
    chosen, _ = train(folder, tmp_path, "--multiclass", choice, data="two.svm")
    assert chosen.model == "logistic" and chosen.weights.shape == (300,)
    assert chosen.weights.tobytes() == plain.weights.tobytes()


def test_two_classes_by_softmax_are_kept_as_one_score(folder, tmp_path):
    softmax, report = train(folder, tmp_path, "--multiclass", "multinomial", "--intercept", data="two.svm")
    assert softmax.model == "logistic" and softmax.weights.shape == (300,) and softmax.classes.tolist() == [-3, 0.5]
    # Both scores move: their difference goes twice as far as a single score at that rate.
    single, _ = train(folder, tmp_path, "--learning-rate", "0.6", "--intercept", data="two.svm")
    np.testing.assert_allclose(softmax.weights, single.weights, rtol=1e-3, atol=1e-5)
    assert report["epochs"][-1]["train_accuracy"] > 0.9


@pytest.mark.parametrize("choice", ["multinomial", "ovr"])
def test_predictions_are_labels_of_the_file_with_their_probabilities(folder, tmp_path, choice):
    _, report = train(folder, tmp_path, "--multiclass", choice, "--test", folder / "test.svm")
    told = run("predict", tmp_path / "model.npz", folder / "test.svm", "--out", tmp_path / "out.txt", "--probabilities")
    header, *lines = (tmp_path / "out.txt").read_text().splitlines()
    assert header == "labels -3 0.5 2 7"
    rows = np.array([line.split() for line in lines], float)
    np.testing.assert_allclose(rows[:, 1:].sum(axis=1), 1, atol=1e-4)
    assert (np.array(LABELS)[rows[:, 1:].argmax(axis=1)] == rows[:, 0]).mean() > 0.99
    truth = [float(line.split()[0]) for line in (folder / "test.svm").read_text().splitlines()]
    assert (rows[:, 0] == truth).mean() == report["epochs"][-1]["test_accuracy"]
    assert f"accuracy {report['epochs'][-1]['test_accuracy']:.4f}" in told.output


def test_weights_of_classes_count_as_repetitions_do(folder, tmp_path):
    lines = (folder / "train.svm").read_text().splitlines(keepends=True)
    (tmp_path / "more.svm").write_text("".join(line * (3 if line.startswith("7 ") else 1) for line in lines))
    options = ["--batch-size", 10_000, "--epochs", 20, "--l2", "1e-3", "--intercept"]  # the whole set a step
    weighted, _ = train(folder, tmp_path, *options, "--class-weight", "7=3")
    repeated, _ = train(tmp_path, tmp_path, *options, data="more.svm")
    np.testing.assert_allclose(weighted.weights, repeated.weights, rtol=1e-3, atol=1e-5)
    balanced, _ = train(folder, tmp_path, *options, "--class-weight", "balanced")
    assert np.isfinite(balanced.weights).all()
    refused = run("train", folder / "train.svm", "--class-weight", "5=2", status=2)
    assert "names the label 5, but the labels are -3, 0.5, 2 and 7" in refused.stderr


@pytest.mark.parametrize("strategy", ["sparse", "overlapped", "oktopk", "ps-sync"])
def test_a_resumed_run_ends_at_the_same_bits(folder, tmp_path, strategy):
    asked = ["--strategy", strategy, "--intercept", "--l1", "1e-5", "--momentum", "0.5", "--average", "2"]
    whole, _ = train(folder, tmp_path, *asked)
    kept = [*asked, "--checkpoint", tmp_path / "checkpoints", "--checkpoint-every-steps", "7"]
    train(folder, tmp_path, *kept, "--epochs", "2")
    resumed, _ = train(folder, tmp_path, *kept, "--resume")
    assert resumed.weights.tobytes() == whole.weights.tobytes()
    other = run("train", folder / "train.svm", "--features", 300, "--batch-size", 20, "--learning-rate", "0.3", *kept, "--resume",
                "--multiclass", "ovr", status=1)  # fmt: skip
    assert "the checkpoint is of another run: its model is multinomial, and here it is logistic" in other.stderr


def test_test_sets_have_the_classes_of_the_training_set(folder, tmp_path):
    (tmp_path / "test.svm").write_text("7 1:1\n4 1:1\n")
    refused = run("train", folder / "train.svm", "--test", tmp_path / "test.svm", status=1)
    assert "label 4 is not one of the training set's 4 classes" in refused.stderr
    (tmp_path / "test.svm").write_text("7 1:1\n")  # nor all of them
    run("train", folder / "train.svm", "--test", tmp_path / "test.svm", "--epochs", "1")


def test_weights_that_no_memory_holds_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(occurring, "_MANY", 2**60)  # else weights are those of features that occur
    (tmp_path / "wide.svm").write_text("".join(f"{label} {label + 1}:1\n" for label in range(1000)))
    refused = run("train", tmp_path / "wide.svm", "--features", 2**45, status=1)
    assert "times 1,000 columns of weights take 1.41e+17 bytes, and there is no memory for them" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("data, choice", [("train.svm", "multinomial"), ("train.svm", "ovr"), ("two.svm", "multinomial")])
def test_a_run_starts_from_the_scores_of_a_model(folder, tmp_path, data, choice):
    asked = ["--multiclass", choice, "--intercept"]
    first, _ = train(folder, tmp_path, *asked, data=data)
    (tmp_path / "model.npz").rename(tmp_path / "first.npz")
    still, _ = train(folder, tmp_path, *asked, "--initial-model", tmp_path / "first.npz", "--learning-rate", "0", data=data)
    np.testing.assert_array_equal(still.weights, first.weights)
    np.testing.assert_allclose(still.intercept, first.intercept, rtol=1e-6)
    refused = run("train", folder / "train.svm", "--features", 300, "--model", "svm", *asked[2:], "--initial-model", tmp_path / "first.npz",
                  status=1)  # fmt: skip
    assert "first.npz: it is a" in refused.stderr and "--model is svm, with 4, one per class" in refused.stderr


@pytest.mark.parametrize("more", [["--validation", "0.2", "--early-stopping", "validation_accuracy"], ["--evaluate-every", "0"]], ids=str)
def test_samples_are_held_out_and_scored_before_their_steps(folder, tmp_path, more):
    fitted, report = train(folder, tmp_path, *more, "--epochs", "8")
    last = report["epochs"][-1]
    assert fitted.weights.shape == (4, 300) and last["progressive_accuracy"] > 0.5 and 0 < last["progressive_loss"] < 1.4
    if "--validation" in more:
        assert last["validation_accuracy"] > 0.7 and last["validation_auc"] is None
    else:
        assert last["train_accuracy"] is None and last["loss"] == last["progressive_loss"]


@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_rounds_take_each_class_against_the_rest(folder, tmp_path, model):
    files = ["--model-out", tmp_path / "model.npz", "--json", tmp_path / "out.json", "--test", folder / "test.svm"]
    run("train", folder / "train.svm", "--features", 300, "--solver", "cocoa", "--model", model, "--intercept", *files)
    fitted, report = load_model(tmp_path / "model.npz"), json.loads((tmp_path / "out.json").read_text())
    assert fitted.model == model and fitted.weights.shape == (4, 300) and fitted.classes.tolist() == list(LABELS)
    last = report["epochs"][-1]
    assert last["train_accuracy"] > 0.9 and last["test_accuracy"] > 0.8 and last["train_auc"] is None
    assert last["gap"] <= 1e-3 * last["loss"]
