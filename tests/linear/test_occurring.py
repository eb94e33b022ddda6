"""Weights that live on the features that occur: numbering, models with sparse weights, and training for any number of features."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import Dataset, load_model, save_model
from sparseallreduce.linear.data import occurring
from sparseallreduce.linear.data.occurring import Occurring, only_occurring
from sparseallreduce.linear.model_file import FittedModel, ModelFileError


def run(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def dataset(rng, features, rows=20, entries=6, known=None):
    """Samples with some of few features among many."""
    known = np.unique(rng.integers(0, features, 40, dtype=np.uint64)) if known is None else known
    chosen = [np.sort(rng.choice(known, rng.integers(0, min(entries, len(known)) + 1), replace=False)) for _ in range(rows)]
    indices = np.concatenate(chosen).astype(np.uint64 if features > 2**32 else np.uint32)
    indptr = np.append(0, np.cumsum([len(each) for each in chosen]))
    return Dataset(indptr, indices, rng.standard_normal(len(indices)).astype(np.float32), np.ones(rows), features)


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 64, 1000, 2**20, 2**31, 2**40]), st.booleans())
def test_features_are_numbered_in_their_order_and_others_left_out(seed, features, few):
    rng = np.random.default_rng(seed)
    training, test = dataset(rng, features), dataset(rng, features, rows=1 if few else 30)
    found = Occurring(training, sar.SERIAL)
    np.testing.assert_array_equal(found.features, np.unique(training.indices))
    own, other = found.renumbered(training), found.renumbered(test)
    np.testing.assert_array_equal(found.features[own.indices] if len(found) else [], training.indices)
    np.testing.assert_array_equal(own.values, training.values)
    for row in range(test.rows):
        part = slice(test.indptr[row], test.indptr[row + 1])
        known = np.isin(test.indices[part], found.features)
        mine = slice(other.indptr[row], other.indptr[row + 1])
        np.testing.assert_array_equal(found.features[other.indices[mine]] if known.any() else [], test.indices[part][known])
        np.testing.assert_array_equal(other.values[mine], test.values[part][known])
    assert own.dimension == features and own.features == max(1, len(found))


def test_few_features_and_those_that_nearly_all_occur_keep_their_numbers():
    rng = np.random.default_rng(0)
    assert only_occurring(dataset(rng, 1000), sar.SERIAL) is None
    every = Dataset([0, 1 << 17], np.arange(1 << 17, dtype=np.uint32), np.ones(1 << 17, np.float32), [1.0], 1 << 17)
    assert only_occurring(every, sar.SERIAL) is None
    assert only_occurring(dataset(rng, 1 << 17), sar.SERIAL) is not None


@pytest.mark.parametrize("scores", [None, 3])
def test_sparse_weights_say_what_dense_ones_say(tmp_path, monkeypatch, scores):
    rng = np.random.default_rng(1)
    data = dataset(rng, 5000)
    found = Occurring(data, sar.SERIAL)
    shape = (len(found),) if scores is None else (scores, len(found))
    small = FittedModel(
        "svm", rng.standard_normal(shape).astype(np.float32), 0.5 if scores is None else np.arange(3.0), np.arange(scores or 2)
    )
    assert isinstance(found.restored(small.weights, 0), np.ndarray)  # so few are dense in any case
    monkeypatch.setattr(occurring, "_SMALL", 0)
    dense, sparse = (replace(small, weights=found.restored(small.weights, nonzeros)) for nonzeros in (10**6, 0))
    assert isinstance(dense.weights, np.ndarray)
    assert scipy.sparse.issparse(sparse.weights) and sparse.n_features == dense.n_features == 5000
    new = dataset(rng, 5000, known=np.append(found.features[::3], [1, 17, 4999]).astype(np.uint64))
    for samples in (data.to_scipy(), new.to_scipy(), new.to_scipy().toarray()):
        np.testing.assert_allclose(sparse.decision_function(samples), dense.decision_function(samples), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(sparse.predict(samples), dense.predict(samples))
    for number, model in enumerate((dense, sparse)):
        save_model(tmp_path / f"{number}.npz", model)
        again = load_model(tmp_path / f"{number}.npz")
        np.testing.assert_array_equal(again.weights, dense.weights)
        assert again.intercept.tolist() == dense.intercept.tolist()


def test_a_file_of_many_features_is_read_without_room_for_them(tmp_path):
    features = 2**40
    weights = scipy.sparse.csr_array((np.float32([1, -2]), np.array([5, features - 1]), np.array([0, 2])), shape=(1, features))
    save_model(tmp_path / "model.npz", FittedModel("svm", weights, 0.25, np.array([0, 1])))
    found = load_model(tmp_path / "model.npz")
    assert scipy.sparse.issparse(found.weights) and found.n_features == features
    samples = scipy.sparse.csr_array((np.ones(2), np.array([features - 1, 7]), np.array([0, 1, 2])), shape=(2, features))
    np.testing.assert_array_equal(found.decision_function(samples), [-1.75, 0.25])
    bad = scipy.sparse.csr_array((np.float32([np.nan]), np.array([5]), np.array([0, 1])), shape=(1, features))
    with pytest.raises(ModelFileError, match="not finite"):
        save_model(tmp_path / "bad.npz", FittedModel("svm", bad, 0.0, np.array([0, 1])))


def text(rng, known, rows, truth):
    lines = []
    for _ in range(rows):
        chosen = np.sort(rng.choice(len(known), 20, replace=False))
        lines.append(f"{1 if truth[chosen].sum() > 0 else -1} " + " ".join(f"{known[each]}:1" for each in chosen))
    return "\n".join(lines) + "\n"


def written(folder, features):
    rng = np.random.default_rng(2)
    known = np.sort(rng.choice(min(features, 2**30), 300, replace=False) * max(1, features // 2**30) + 1)
    truth = rng.standard_normal(300)
    (folder / "train.svm").write_text(text(rng, known, 300, truth))
    (folder / "test.svm").write_text(text(rng, np.minimum(known + (np.arange(300) % 50 == 0), features), 60, truth))


@pytest.mark.parametrize("options", [[], ["--l2", "1e-3"], ["--update", "sgd", "--momentum", "0.5"], ["--solver", "cocoa"]], ids=str)
def test_numbered_features_change_no_bit_of_a_model(tmp_path, options):
    written(tmp_path, 1 << 17)
    models, reports = [], []
    for many in (1 << 16, 1 << 30):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(occurring, "_MANY", many)
            files = ["--test", tmp_path / "test.svm", "--model-out", tmp_path / "m.npz", "--json", tmp_path / "out.json"]
            run("train", tmp_path / "train.svm", "--features", 1 << 17, "--epochs", 3, *files, *options)
        models.append(load_model(tmp_path / "m.npz"))
        reports.append(json.loads((tmp_path / "out.json").read_text()))
    np.testing.assert_array_equal(*(model.weights for model in models))
    for name in ("loss", "test_loss", "test_accuracy", *(["gradient_density", "total_density"] if "--solver" not in options else [])):
        ours, theirs = ([epoch[name] for epoch in report["epochs"]] for report in reports)
        assert ours == pytest.approx(theirs, rel=1e-6)  # scores of all samples are sums of another order
    assert [report["results"]["features"] for report in reports] == [1 << 17] * 2


@pytest.mark.parametrize("bits", [26, 31, 40])
def test_hashed_features_of_any_number_of_bits_are_trained_on_and_predicted(tmp_path, bits):
    written(tmp_path, 1 << bits)
    files = ["--model-out", tmp_path / "m.npz", "--json", tmp_path / "out.json"]
    for _ in range(2):  # the second is compiled
        began = time.perf_counter()
        run("train", tmp_path / "train.svm", "--features", 1 << bits, *files)
        seconds = time.perf_counter() - began
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["results"]["features"] == 1 << bits and report["epochs"][-1]["train_accuracy"] > 0.9
    assert report["results"]["seconds"]["train"] < 1 and seconds < 5
    found = run("predict", tmp_path / "m.npz", tmp_path / "train.svm", "--out", tmp_path / "predicted.txt")
    assert "300 samples, accuracy" in found.output
