"""The commands `train` and `generate` on one rank, from their arguments to what they write."""

import io
import json

import numpy as np
import pytest
from click_runner import CliRunner
from tqdm import tqdm

from sparseallreduce.cli import main
from sparseallreduce.linear.model_file import load_model
from sparseallreduce.linear.models import model_of
from sparseallreduce.linear.training.picking import CANDIDATES


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
    assert lines[1].startswith("learning rate ")
    assert lines[2].split()[:4] == ["epoch", "loss", "train", "acc"]
    assert [line.split()[0] for line in lines[3:]] == ["1", "2", "3"]


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
        ("1 1:1\n1 2:1\n1 1:1\n", "needs two classes, but the labels are 1"),
        ("1 1:1\n2 1:1\nnan 1:1\n", "nan"),
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


def test_all_that_can_be_asked_for_goes_together(folder, tmp_path):
    asked = ["--test", folder / "test.svm", "--intercept", "--class-weight", "balanced", "--l1", "1e-6", "--l2", "1e-6"]
    asked += ["--momentum", "0.5", "--nesterov", "--average", "2", "--schedule", "bold-driver", "--decay", "0.7"]
    asked += ["--scale-with-batch", "25", "--warmup", "1"]
    asked += ["--early-stopping", "test_auc", "--patience", "2", "--tolerance", "1e-4", "--threads", "2", "--densities"]
    asked += ["--checkpoint", tmp_path / "checkpoints", "--checkpoint-every-steps", "20", "--learning-rate", "0.1"]
    run(folder, *asked, "--json", tmp_path / "out.json", "--model-out", tmp_path / "model.npz")

    epochs = json.loads((tmp_path / "out.json").read_text())["epochs"]

    assert epochs[-1]["test_auc"] > 0.8 and epochs[-1]["test_accuracy"] > 0.7
    assert {"train_auc", "test_loss", "learning_rate", "gradient_density"} <= epochs[0].keys()
    assert set(epochs[0]["seconds"]) == {"compute", "select", "communicate", "wait", "update", "checkpoint", "evaluate", "total"}
    assert epochs[0]["seconds"]["checkpoint"] > 0
    for epoch in epochs:
        assert len(epoch["gradient_densities"]) == len(epoch["total_densities"]) == epoch["steps"]
    with np.load(tmp_path / "model.npz") as file:
        assert file["intercept"] != 0
    assert "resumed after step 75, in epoch 3" in run(folder, *asked, "--resume").output


@pytest.mark.parametrize(
    "schedule", [[], ["inverse-scaling"], ["inverse-time", "--l2", "1e-3"], ["step-decay", "--decay-epochs", "2"], ["plateau"]]
)
def test_every_schedule_trains(folder, tmp_path, schedule):
    run(folder, *(["--schedule", *schedule] if schedule else []), "--json", tmp_path / "out.json")
    epochs = json.loads((tmp_path / "out.json").read_text())["epochs"]
    assert epochs[-1]["loss"] < epochs[0]["loss"]
    assert (epochs[-1]["learning_rate"] < 0.5) == (schedule[:1] not in ([], ["plateau"]))


def test_early_stopping_ends_a_run(folder, tmp_path):
    stopping = ["--early-stopping", "loss", "--patience", "1", "--tolerance", "10", "--epochs", "9"]
    run(folder, *stopping, "--json", tmp_path / "out.json")
    assert len(json.loads((tmp_path / "out.json").read_text())["epochs"]) == 2


def test_a_run_that_ends_before_it_averages_says_so(folder):
    stopping = ["--early-stopping", "loss", "--patience", "1", "--tolerance", "10", "--epochs", "9"]
    said = "training ended before the epoch at which --average starts"
    assert said in run(folder, *stopping, "--average", "9").output
    assert said not in run(folder, *stopping, "--average", "2").output


def test_figures_that_were_not_evaluated_are_null(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "240")  # room for all columns
    for every in (0, 2):
        output = run(folder, "--test", folder / "test.svm", "--evaluate-every", every, "--json", tmp_path / "out.json").output
        epochs = json.loads((tmp_path / "out.json").read_text())["epochs"]
        for epoch in epochs:
            assert {"loss", "train_accuracy", "test_accuracy", "progressive_loss", "progressive_accuracy"} <= epoch.keys()
            known = every == 2 and epoch["epoch"] > 1
            assert (epoch["train_accuracy"] is not None) == (epoch["test_accuracy"] is not None) == epoch["evaluated"] == known
            assert epoch["progressive_accuracy"] > 0.6
            assert known or epoch["loss"] == epoch["progressive_loss"]
        first = next(line.split() for line in output.splitlines() if line.split()[:1] == ["1"])
        assert first[:6] == ["1", "-", "-", "-", "-", "-"]


def test_the_best_model_on_samples_held_out_is_written(folder, tmp_path):
    files = ["--json", tmp_path / "out.json", "--model-out", tmp_path / "model.npz", "--early-stopping", "validation_loss"]
    output = run(folder, "--validation", "0.2", "--epochs", "12", "--learning-rate", "20", *files).output
    report = json.loads((tmp_path / "out.json").read_text())
    losses = [epoch["validation_loss"] for epoch in report["epochs"]]
    best = int(np.argmin(losses))
    assert report["results"]["best_epoch"] == best + 1
    assert f"the model is that after epoch {best + 1}, the best on the held-out samples" in output
    assert report["epochs"][0]["steps"] == 20
    run(folder, "--validation", "0.2", "--epochs", best + 1, "--learning-rate", "20", "--model-out", tmp_path / "short.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "model.npz")["weights"], np.load(tmp_path / "short.npz")["weights"])


def test_of_several_penalties_the_best_on_samples_held_out_is_written(folder, tmp_path):
    files = ["--json", tmp_path / "out.json", "--model-out", tmp_path / "model.npz"]
    output = run(folder, "--l2", "1e-6,0.5,1e-3", "--validation", "0.2", *files).output
    report = json.loads((tmp_path / "out.json").read_text())
    models = report["models"]
    assert [model["l2"] for model in models] == report["arguments"]["l2"] == [1e-6, 0.5, 1e-3]
    costs = [min(epoch["validation_loss"] for epoch in model["epochs"]) for model in models]
    best = models[int(np.argmin(costs))]
    assert (report["results"]["l2"], report["epochs"]) == (best["l2"], best["epochs"]) and best["l2"] != 0.5
    assert [line.split()[0] for line in output.splitlines()[-4:]] == ["l2", "1e-06", "0.5", "0.001"]
    assert [line.split()[0] for line in output.splitlines() if line.endswith("best")] == [f"{best['l2']:.4g}"]
    run(folder, "--l2", best["l2"], "--validation", "0.2", "--model-out", tmp_path / "alone.npz")
    np.testing.assert_array_equal(np.load(tmp_path / "model.npz")["weights"], np.load(tmp_path / "alone.npz")["weights"])


@pytest.mark.parametrize("strategy", ["sparse", "ps-sync", "oktopk"])
def test_a_run_starts_from_a_model(folder, tmp_path, strategy):
    run(folder, "--intercept", "--model-out", tmp_path / "first.npz", "--features", "3000")
    again = ["--initial-model", tmp_path / "first.npz", "--intercept", "--features", "4000", "--strategy", strategy]
    run(folder, *again, "--epochs", "0", "--model-out", tmp_path / "same.npz")
    first, same = np.load(tmp_path / "first.npz"), np.load(tmp_path / "same.npz")
    np.testing.assert_array_equal(same["weights"], np.concatenate([first["weights"], np.zeros(1000, np.float32)]))
    np.testing.assert_allclose(same["intercept"], first["intercept"], rtol=1e-6)
    run(folder, *again, "--json", tmp_path / "out.json", "--checkpoint", tmp_path / "kept")
    assert json.loads((tmp_path / "out.json").read_text())["epochs"][0]["progressive_accuracy"] > 0.85
    refused = run(folder, *again[2:], "--checkpoint", tmp_path / "kept", "--resume", status=1)
    assert "its initial weights is" in refused.stderr
    run(folder, *again, "--checkpoint", tmp_path / "kept", "--resume", "--epochs", "4")


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--no-intercept"], "it has an intercept: leave --no-intercept out"),
        (["--intercept", "--model", "svm"], "it is a 'logistic' model with 1 score, but --model is svm"),
        (["--intercept", "--features", "3000"], "give --features 4000"),
        (["--intercept", "--initial-model", "nowhere.npz"], "there is no model file nowhere.npz"),
    ],
)
def test_a_model_that_does_not_suit_is_not_started_from(folder, tmp_path, arguments, message):
    run(folder, "--intercept", "--features", "4000", "--model-out", tmp_path / "first.npz")
    refused = run(folder, "--features", "4000", "--initial-model", tmp_path / "first.npz", *arguments, status=1)
    assert message in refused.stderr and refused.stderr.count("\n") == 1


def test_the_bar_counts_all_steps_of_all_epochs(folder, tmp_path, monkeypatch):
    bars = []

    class Bar(tqdm):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options | {"disable": False, "file": io.StringIO()})
            bars.append(self)

    for kind in ("tqdm", "_PipedBar"):  # for a terminal, and for anything else
        monkeypatch.setattr(f"sparseallreduce.cli.progress.{kind}", Bar)
    run(folder, "--validation", "0.2", "--checkpoint", tmp_path, "--batch-size", "100")
    run(folder, "--validation", "0.2", "--checkpoint", tmp_path, "--resume", "--epochs", "5", "--batch-size", "100")
    training = [bar for bar in bars if bar.desc == "training"]
    assert [(bar.initial, bar.n, bar.total) for bar in training] == [(0, 60, 60), (60, 100, 100)]


def test_threads_change_no_bit(folder, tmp_path):
    for threads in (1, 3):
        run(folder, "--threads", threads, "--model-out", tmp_path / f"{threads}.npz")
    one, three = (np.load(tmp_path / f"{threads}.npz")["weights"] for threads in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_a_run_resumes_from_its_folder_and_no_other(folder, tmp_path):
    kept = ["--checkpoint", tmp_path / "kept"]
    assert "starting from the beginning" in run(folder, *kept, "--resume").output
    refused = run(folder, *kept, status=1)
    assert "use --resume to continue, or choose another folder" in refused.stderr
    refused = run(folder, *kept, "--resume", "--l2", "0.1", status=1)
    assert "its l2 is 0.0, and here it is 0.1" in refused.stderr
    refused = run(folder, *kept, "--resume", "--batch-size", "10", status=1)
    assert "its batch of all ranks is 39, and here it is 10" in refused.stderr


def test_a_divergent_run_is_one_line_with_step_and_rate(folder):
    failed = run(folder, "--model", "linear", "--learning-rate", "1e6", status=1)
    assert "lower the learning rate" in failed.stderr and "after step" in failed.stderr
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [["--schedule", "inverse-time"], ["--schedule", "bold-driver"], ["--strategy", "oktopk"]])
def test_a_learning_rate_of_zero_is_a_dry_run(folder, tmp_path, options):
    run(folder, "--learning-rate", "0", "--l2", "0.1", *options, "--model-out", tmp_path / "model.npz", "--json", tmp_path / "out.json")
    assert not np.load(tmp_path / "model.npz")["weights"].any()
    assert [epoch["loss"] for epoch in json.loads((tmp_path / "out.json").read_text())["epochs"]] == pytest.approx([np.log(2)] * 3)


def test_only_the_ratio_of_class_weights_counts_as_in_the_estimators(folder, tmp_path):
    for name, weights in (("none", "-1=1,1=1"), ("alike", "-1=4,1=4"), ("ratio", "-1=1,1=3"), ("same ratio", "-1=2,1=6")):
        run(folder, "--class-weight", weights, "--l2", "1e-2", "--model-out", tmp_path / f"{name}.npz")
    none, alike, ratio, same = (np.load(tmp_path / f"{name}.npz")["weights"] for name in ("none", "alike", "ratio", "same ratio"))
    np.testing.assert_array_equal(none, alike)
    np.testing.assert_allclose(ratio, same, rtol=1e-5)
    assert np.abs(none - ratio).max() > 0.01
    refused = run(folder, "--class-weight", "-1=0,1=0", status=1)
    assert "no rank has a sample with a weight" in refused.stderr and refused.stderr.count("\n") == 1


@pytest.mark.parametrize("l1", [0, 1e-3])
def test_weights_that_are_no_numbers_are_told_with_and_without_l1(tmp_path, l1):
    (tmp_path / "train.svm").write_text("1 1:1e20 2:-1e20\n1 1:1e20 2:1e20\n")
    failed = run(tmp_path, "--model", "linear", "--update", "sgd", "--batch-size", "1", "--l1", l1, status=1)
    assert "lower the learning rate" in failed.stderr
    assert failed.stderr.count("\n") == 1


@pytest.mark.parametrize("l1", [0, 1e-3])
def test_samples_of_any_length_train_by_default(tmp_path, l1):
    (tmp_path / "train.svm").write_text("1 1:1e15 2:-1e15\n1 1:1e15 2:1e15\n")
    run(tmp_path, "--model", "linear", "--batch-size", "1", "--l1", l1, "--json", tmp_path / "out.json", "--epochs", "20")
    assert json.loads((tmp_path / "out.json").read_text())["epochs"][-1]["loss"] < 1e-3 + 10 * l1


OF_SGD = {
    "momentum": ["--momentum", "0.9"],
    "averages": ["--average", "1"],
    "schedule": ["--schedule", "inverse-time"],
    "batch": ["--scale-with-batch", "50"],
}
WITH_SGD = OF_SGD | {"rate": ["--learning-rate", "0.5"], "lossy": ["--strategy", "oktopk"]}


@pytest.mark.parametrize("options", WITH_SGD.values(), ids=WITH_SGD)
def test_options_of_sgd_choose_it_and_those_of_it_alone_go_with_no_other_update(folder, tmp_path, options):
    models = []
    for number, update in enumerate(([], ["--update", "sgd"])):
        run(folder, *options, *update, "--model-out", tmp_path / f"{number}.npz", "--json", tmp_path / "out.json")
        models.append(np.load(tmp_path / f"{number}.npz")["weights"])
        assert json.loads((tmp_path / "out.json").read_text())["arguments"]["update"] == "sgd"
    np.testing.assert_array_equal(*models)
    if options not in OF_SGD.values():
        run(folder, *options, "--update", "ftrl", "--model-out", tmp_path / "adaptive.npz")
        assert (np.load(tmp_path / "adaptive.npz")["weights"] != models[0]).any()
        return
    refused = run(folder, *options, "--update", "ftrl", status=2)
    assert f"{options[0]}" in refused.stderr and "is for --update sgd" in refused.stderr


def test_a_model_to_start_from_is_trained_on_by_sgd_unless_told_otherwise(folder, tmp_path):
    first, second = tmp_path / "first.npz", tmp_path / "second.npz"
    run(folder, "--model-out", first, "--json", tmp_path / "out.json")
    chosen = json.loads((tmp_path / "out.json").read_text())["arguments"]
    assert (chosen["update"], chosen["learning_rate"], chosen["beta"], chosen["intercept"]) == ("ftrl", 5.0, 20.0, True)
    for update, options in (("sgd", []), ("ftrl", ["--update", "ftrl"])):
        run(folder, "--initial-model", first, *options, "--model-out", second, "--json", tmp_path / "out.json")
        chosen = json.loads((tmp_path / "out.json").read_text())["arguments"]
        assert (chosen["update"], chosen["intercept"]) == (update, True)


def test_an_intercept_is_learned_by_adaptive_steps_and_from_a_model_that_has_one(folder, tmp_path):
    def learned(*arguments):
        run(folder, *arguments, "--model-out", tmp_path / "model.npz")
        return bool(np.any(np.load(tmp_path / "model.npz")["intercept"]))

    assert learned() and learned("--update", "arow") and learned("--update", "sgd", "--intercept")
    assert not learned("--no-intercept") and not learned("--update", "sgd") and not learned("--solver", "cocoa")
    (tmp_path / "model.npz").rename(tmp_path / "without.npz")
    assert not learned("--initial-model", tmp_path / "without.npz")
    assert learned("--initial-model", tmp_path / "without.npz", "--intercept")


@pytest.mark.parametrize("loss", ["squared", "huber", "quantile", "poisson"])
def test_adaptive_steps_lower_every_loss_of_numbers(tmp_path, loss):
    rng = np.random.default_rng(8)
    rows, weights = rng.random((200, 6)), rng.standard_normal(6)
    labels = rng.poisson(np.exp(3 + rows @ weights))
    lines = (" ".join([str(label), *(f"{i + 1}:{value:.6f}" for i, value in enumerate(row))]) for label, row in zip(labels, rows))
    (tmp_path / "train.svm").write_text("\n".join(lines) + "\n")
    run(tmp_path, "--model", "linear", "--loss", loss, "--batch-size", "10", "--json", tmp_path / "out.json", "--epochs", "40")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["arguments"]["update"] == "ftrl"
    untrained = model_of("linear", loss).loss(np.zeros(200), labels.astype(float)).mean()
    assert report["epochs"][-1]["loss"] < untrained / 2


@pytest.mark.parametrize("strategy", ["dense", "sparse", "overlapped", "ps-sync", "oktopk"])
def test_every_strategy_takes_adaptive_steps(folder, tmp_path, strategy):
    run(folder, "--strategy", strategy, "--json", tmp_path / "out.json", "--update", "ftrl", "--l2", "1e-4", "--l1", "1e-5")
    losses = [epoch["loss"] for epoch in json.loads((tmp_path / "out.json").read_text())["epochs"]]
    assert losses[-1] < np.log(2)
    refused = run(folder, "--strategy", "ps-async", "--update", "ftrl", status=2)
    assert "--strategy ps-async is for --update sgd" in refused.stderr


def test_beta_is_of_ftrl_and_of_classes_by_default(folder, tmp_path):
    weights = {}
    for name, options in {"default": [], "given": ["--beta", "20"], "rate": ["--learning-rate", "5"], "none": ["--beta", "0"]}.items():
        run(folder, "--update", "ftrl", *options, "--model-out", tmp_path / "model.npz", "--json", tmp_path / "out.json")
        weights[name] = np.load(tmp_path / "model.npz")["weights"]
    assert json.loads((tmp_path / "out.json").read_text())["arguments"]["learning_rate"] == 0.5
    np.testing.assert_array_equal(weights["given"], weights["rate"])
    assert (weights["none"] != weights["given"]).any()
    run(folder, "--update", "ftrl", "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["results"]["picked"]
    assert (found["rate"], found["beta"], found["power"]) in CANDIDATES
    run(folder, "--model", "linear", "--json", tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["results"]["picked"] is None
    assert json.loads((tmp_path / "out.json").read_text())["arguments"]["beta"] == 0
    for update in ("sgd", "arow"):
        assert "--beta is for --update ftrl" in run(folder, "--update", update, "--beta", "1", status=2).stderr
    assert "--beta is for --solver sgd" in run(folder, "--solver", "cocoa", "--beta", "1", status=2).stderr


@pytest.mark.parametrize("update,steps", [("ftrl", 65), ("arow", 65), ("sgd", 25)])
def test_few_samples_are_dealt_into_steps_enough(folder, tmp_path, update, steps):
    run(folder, "--update", update, "--json", tmp_path / "out.json", "--checkpoint", tmp_path / "kept")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["results"]["batch_size"] == (100 if update == "sgd" else 2500 // 64)
    assert report["epochs"][0]["steps"] == steps
    # A batch that was chosen by the samples stays what it was.
    resumed = run(folder, "--update", update, "--checkpoint", tmp_path / "kept", "--resume", "--epochs", "4")
    assert "resumed after step" in resumed.output


def test_arow_is_of_svm_and_refuses_what_means_nothing_to_it(folder, tmp_path):
    for options in ([], ["--model", "svm"], ["--model", "svm", "--loss", "squared_hinge"], ["--strategy", "dense"]):
        run(folder, "--update", "arow", *options, "--json", tmp_path / "out.json", "--model-out", tmp_path / "model.npz")
        report = json.loads((tmp_path / "out.json").read_text())
        assert (report["arguments"]["model"], report["arguments"]["learning_rate"]) == ("svm", 1.0)
        assert report["epochs"][-1]["train_accuracy"] > 0.8
        assert str(np.load(tmp_path / "model.npz")["model"]) == "svm"
    for name in ("logistic", "linear"):
        assert f"leave --model {name} out" in run(folder, "--update", "arow", "--model", name, status=2).stderr
    for name in ("overlapped", "ps-sync", "ps-async", "oktopk"):
        assert f"--strategy {name}" in run(folder, "--update", "arow", "--strategy", name, status=2).stderr
    for options in OF_SGD.values():
        assert "is for --update sgd" in run(folder, "--update", "arow", *options, status=2).stderr
    assert "--update is for --solver sgd" in run(folder, "--solver", "cocoa", "--update", "arow", status=2).stderr


def test_arow_tells_two_classes_apart(tmp_path):
    (tmp_path / "train.svm").write_text("".join(f"{number % 3} {1 + number % 3}:1\n" for number in range(30)))
    refused = run(tmp_path, "--update", "arow", status=2)
    assert "--update arow supports two classes, but there are 3" in refused.stderr


def test_a_resumed_run_of_arow_goes_on_to_the_same_bits(folder, tmp_path):
    options = ["--update", "arow", "--l1", "1e-5", "--l2", "1e-4", "--intercept", "--batch-size", "7"]
    kept = ["--checkpoint", tmp_path / "kept"]
    run(folder, *options, "--epochs", "4", "--model-out", tmp_path / "whole.npz")
    run(folder, *options, "--epochs", "2", *kept)
    run(folder, *options, "--epochs", "4", *kept, "--resume", "--model-out", tmp_path / "again.npz")
    np.testing.assert_array_equal(*(np.load(tmp_path / name)["weights"] for name in ("whole.npz", "again.npz")))


@pytest.mark.parametrize("scale", [1e-4, 1e6])
def test_the_scale_of_all_features_changes_no_score(folder, tmp_path, scale):
    lines = (folder / "train.svm").read_text().splitlines()
    scaled = [
        " ".join([label, *(f"{index}:{float(value) * scale!r}" for index, value in (pair.split(":") for pair in pairs))])
        for label, *pairs in (line.split() for line in lines)
    ]
    (tmp_path / "train.svm").write_text("\n".join(scaled) + "\n")
    losses = []
    for where in (folder, tmp_path):
        run(where, "--json", tmp_path / "out.json")
        losses.append([epoch["loss"] for epoch in json.loads((tmp_path / "out.json").read_text())["epochs"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--model", "forest"], "'forest' is not one of"),
        (["--batch-size", "0"], "0 is not in the range"),
        (["--learning-rate", "-1"], "-1.0 is not in the range"),
        (["--learning-rate", "nan"], "finite"),
        (["--strategy", "dense", "--algorithm", "ssar_ring"], "--algorithm is for the strategies"),
        (["--servers", "2"], "--servers is for the strategies"),
        (["--l2", "-1"], "-1.0 is not in the range"),
        (["--l2", "3", "--update", "sgd"], "must be below 1"),
        (["--l2", "3", "--learning-rate", "0.5"], "must be below 1"),
        (["--update", "adam"], "'adam' is not one of"),
        (["--l2", "0.5", "--scale-with-batch", "10"], "must be below 1"),
        (["--l2", "0.5", "--scale-with-batch", "10", "--warmup", "1"], "must be below 1"),
        (["--l2", "0.1", "--momentum", "0.9", "--scale-with-batch", "50", "--learning-rate", "0.8"], "must be below 1 minus --momentum"),
        (["--momentum", "1"], "1.0 is not in the range"),
        (["--nesterov"], "give --momentum too"),
        (["--decay", "0.5"], "--decay is for all schedules but constant"),
        (["--decay-epochs", "3", "--schedule", "bold-driver"], "--decay-epochs is for"),
        (["--schedule", "step-decay", "--decay", "2"], "must be above 0 and at most 1"),
        (["--warmup", "2"], "give --scale-with-batch too"),
        (["--patience", "2"], "give --early-stopping too"),
        (["--early-stopping", "test_auc"], "give --test too"),
        (["--average", "20", "--epochs", "10"], "--average starts after the last of 10 epochs"),
        (["--resume"], "need --checkpoint"),
        (["--validation", "0"], "0.0 is not in the range"),
        (["--validation", "0.1", "--evaluate-every", "0"], "--evaluate-every 0 turns off"),
        (["--early-stopping", "train_auc", "--evaluate-every", "0"], "--evaluate-every 0 turns off"),
        (["--early-stopping", "validation_auc"], "give --validation too"),
        (["--l2", "0.1,0.2"], "give --validation or --folds too"),
        (["--l2", "0.1,0.1", "--validation", "0.2"], "contains a number twice"),
        (["--l2", "0.1,x", "--validation", "0.2"], "'x' is not a valid float"),
        (["--l2", "0.1,-2", "--validation", "0.2"], "-2.0 is not in the range"),
        (["--l2", "0.1,nan", "--validation", "0.2"], "finite"),
        (["--l2", "0.1,3", "--validation", "0.2", "--learning-rate", "0.5"], "must be below 1"),
        (["--l2", "0.1,0.2", "--validation", "0.2", "--checkpoint", "kept"], "give one --l2"),
        (["--checkpoint-minutes", "1"], "need --checkpoint"),
        (["--model", "linear", "--class-weight", "balanced"], "--class-weight is for classes"),
        (["--class-weight", "1:2"], "neither 'balanced' nor of the form"),
        (["--class-weight", "1=-2"], "must be at least 0"),
        (["--class-weight", "5=2"], "names the label 5, but the labels are -1 and 1"),
        (["--model", "linear", "--multiclass", "ovr"], "--multiclass is for classes"),
        (["--model", "svm", "--multiclass", "multinomial"], "--multiclass multinomial is a logistic model"),
        (["--multiclass", "one"], "'one' is not one of"),
        (["--threads", "0"], "0 is not in the range"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(folder, arguments, message):
    refused = run(folder, *arguments, status=2)
    assert message in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_generate_names_the_file_that_it_cannot_write(tmp_path):
    result = CliRunner().invoke(main, ["generate", "uniform", str(tmp_path / "nowhere" / "x.svm")])
    assert result.exit_code == 1
    assert "cannot write" in result.stderr


def test_cocoa_tells_of_every_round_and_ends_by_the_gap(folder, tmp_path):
    arguments = ["--solver", "cocoa", "--test", folder / "test.svm", "--json", tmp_path / "out.json", "--model-out", tmp_path / "model.npz"]
    result = CliRunner().invoke(main, ["train", str(folder / "train.svm"), *map(str, arguments)])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["arguments"]["epochs"] == 1000 and report["results"]["l2"] == 1 / 2500
    for epoch in report["epochs"]:
        assert {"loss", "gap", "dual", "train_accuracy", "test_accuracy", "seconds", "bytes_sent", "active"} <= epoch.keys()
        assert {"prepare", "compute", "communicate", "evaluate", "total"} <= epoch["seconds"].keys()
    last = report["epochs"][-1]
    assert last["epoch"] == len(report["epochs"]) < 1000 and last["gap"] <= 1e-3 * last["loss"]
    files = [tmp_path / "model.npz", folder / "test.svm", "--out", tmp_path / "labels"]
    predicted = CliRunner().invoke(main, ["predict", *map(str, files)])
    assert predicted.exit_code == 0, predicted.output
    assert f"accuracy {report['epochs'][report['results']['best_epoch'] - 1]['test_accuracy']:.4f}" in predicted.output
    drawn = CliRunner().invoke(main, ["plot", str(tmp_path / "out.json"), str(tmp_path / "out.png")])
    assert drawn.exit_code == 0, drawn.output


def test_cocoa_chooses_between_penalties_by_samples_held_out(folder, tmp_path):
    penalties = "1e-2,1e-4,1e-6"
    result = run(folder, "--solver", "cocoa", "--model", "svm", "--l2", penalties, "--validation", 0.2, "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    costs = {model["l2"]: min(epoch["validation_loss"] for epoch in model["epochs"]) for model in report["models"]}
    assert list(costs) == [1e-2, 1e-4, 1e-6]
    assert report["results"]["l2"] == min(costs, key=costs.get)
    assert "best" in result.output and "raise --epochs, or --gap" in result.output


def test_cocoa_that_never_evaluates_has_no_figures(folder, tmp_path):
    run(folder, "--solver", "cocoa", "--evaluate-every", 0, "--json", tmp_path / "out.json", "--model-out", tmp_path / "model.npz")
    epochs = json.loads((tmp_path / "out.json").read_text())["epochs"]
    assert [epoch["train_accuracy"] for epoch in epochs] == [None] * 3 and epochs[-1]["loss"] > 0
    drawn = CliRunner().invoke(main, ["plot", str(tmp_path / "out.json"), str(tmp_path / "out.png")])
    assert drawn.exit_code == 0, drawn.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--learning-rate", "1"], "--learning-rate is for --solver sgd"),
        (["--batch-size", "100"], "--batch-size is for --solver sgd"),
        (["--strategy", "sparse"], "--strategy is for --solver sgd"),
        (["--checkpoint", "folder"], "--checkpoint is for --solver sgd"),
        (["--model", "linear"], "no loss of --model linear"),
        (["--l2", "0"], "needs a penalty"),
        (["--l2", "1e-3,0", "--validation", "0.1"], "needs a penalty"),
        (["--early-stopping", "progressive_loss"], "is for --solver sgd"),
        (["--gap", "inf"], "finite"),
    ],
)
def test_what_means_nothing_to_cocoa_is_refused(folder, arguments, said):
    assert said in run(folder, "--solver", "cocoa", *arguments, status=2).output


def test_a_gap_is_of_cocoa(folder):
    assert "--gap is for --solver dual" in run(folder, "--gap", 0.1, status=2).output


@pytest.mark.parametrize("options", [[], ["--model", "svm", "--solver", "sgd"], ["--model", "linear"]], ids=["dual", "sgd", "numbers"])
def test_metrics_are_of_the_test_set_or_else_of_the_training_set(folder, tmp_path, options):
    name = "rmse" if "linear" in options else "accuracy"
    said = run(folder, "--test", folder / "test.svm", *options, "--metrics", name, "--json", tmp_path / "out.json").output
    report = json.loads((tmp_path / "out.json").read_text())
    last, measured = report["epochs"][-1], report["results"]["metrics"]
    assert list(measured) == ["test"] and list(measured["test"]) == [name] and f"test set:\n{name}  " in said
    wanted = np.sqrt(2 * last["test_loss"]) if name == "rmse" else last["test_accuracy"]
    assert measured["test"][name] == pytest.approx(wanted, rel=1e-6)
    run(folder, *options, "--metrics", "all", "--json", tmp_path / "out.json")
    assert list(json.loads((tmp_path / "out.json").read_text())["results"]["metrics"]) == ["train"]
    refused = run(folder, *options, "--metrics", "r2" if name == "accuracy" else "f1", status=2)
    assert "the metric" in refused.stderr


def raw_columns(path, seed=0, rows=400):
    """Write samples whose columns have units from 1e-3 to 1e6, and return them in the units of the file and their labels."""
    rng = np.random.default_rng(seed)
    true, units = rng.standard_normal(8), 10.0 ** np.linspace(-3, 6, 8)
    X = rng.standard_normal((rows, 8))
    y = np.where(X @ true + rng.standard_normal(rows) > 0, 1, -1)
    entries = (" ".join(f"{place + 1}:{value:.9g}" for place, value in enumerate(row * units)) for row in X)
    path.write_text("".join(f"{label} {row}\n" for label, row in zip(y, entries, strict=True)))
    return X * units, y


def test_penalties_of_steps_act_on_columns_of_any_unit_and_weights_have_the_units_of_the_data(tmp_path):
    X, y = raw_columns(tmp_path / "raw.svm")
    losses, accuracies = [], []
    for C in (1e-4, 100):
        arguments = [tmp_path / "raw.svm", "--solver", "sgd", "--C", C, "--model-out", tmp_path / "m.npz", "--json", tmp_path / "m.json"]
        result = CliRunner().invoke(main, ["train", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        epoch = json.loads((tmp_path / "m.json").read_text())["epochs"][-1]
        model = load_model(tmp_path / "m.npz")
        scores = X @ np.ravel(model.weights) + np.ravel(model.intercept)
        accuracies.append(np.mean((scores > 0) == (y > 0)))
        assert accuracies[-1] == pytest.approx(epoch["train_accuracy"], abs=0.01)
        losses.append(epoch["loss"])
    assert losses[0] > losses[1] + 0.1  # a strong penalty leaves small weights
    assert accuracies[1] > 0.8
