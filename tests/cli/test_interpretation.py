"""`weights` and `explain`: what a model has learned and what a score is made of, by the names of features."""

import csv
import io
import json

import numpy as np
import pytest
from click_runner import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import FittedModel, load, load_model, save_model
from sparseallreduce.linear.data.feature_names import read_names
from sparseallreduce.linear.interpretation import contributions, largest_weights

WEIGHTS = np.float32([0.5, 0, -3, 3, 1e-3])
TWO = FittedModel("logistic", WEIGHTS, 0.25, np.array([0.0, 1.0]), zero_based=False)
THREE = FittedModel("multinomial", np.stack([WEIGHTS, -2 * WEIGHTS, WEIGHTS[::-1]]), np.array([1.0, 2, 3]), np.array(["a", "b", "c"]))
VW = """\
1 'tag|ns foo:2 bar 17 |other:0.5 foo color:red
-1 |ns bar :3 :4 | plain x:1e-3 nul:0
"""
# As `vw --invert_hash` of Vowpal Wabbit 9.11 numbers them.
VW_NAMES = {
    "ns^bar": 67427, "ns^foo": 71642, "ns^[0]": 120344, "ns^[1]": 120345, "ns^17": 120361, "other^color^red": 146913, "x": 170779,
    "other^foo": 232558, "plain": 256121,
}  # fmt: skip


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def files(tmp_path):
    save_model(tmp_path / "two.npz", TWO)
    save_model(tmp_path / "three.npz", THREE)
    (tmp_path / "data.svm").write_text("1 1:2 3:1 5:4\n0 4:0.5\n1\n")
    return tmp_path


def test_weights_are_shown_by_magnitude_and_called_as_in_the_text(files):
    said = command("weights", files / "two.npz", "--top", 3).output.splitlines()
    assert said[0] == "logistic, 5 features; the score of class 1, intercept 0.25"
    assert [line.split() for line in said[1:]] == [["feature", "weight"], ["3", "-3"], ["4", "3"], ["1", "0.5"]]
    first = command("weights", files / "two.npz", "--class", "0", "--csv").output
    assert list(csv.reader(io.StringIO(first))) == [
        ["feature", "weight"],
        ["3", "3.0"],
        ["4", "-3.0"],
        ["1", "-0.5"],
        ["5", str(-WEIGHTS[4].item())],
    ]
    assert max(map(len, command("weights", files / "three.npz").output.splitlines())) <= 80


def test_weights_of_several_classes_name_theirs(files):
    report = json.loads(command("weights", files / "three.npz", "--json").output)
    assert [(each["feature"], each["class"], each["weight"]) for each in report["weights"][:3]] == [
        ("2", "b", 6),
        ("3", "b", -6),
        ("1", "c", 3),
    ]
    assert report["schema"] == 1 and report["intercept"] == [1, 2, 3]
    command("weights", files / "three.npz", "--class", "c", "--top", 0, "--json", files / "c.json", "--csv", files / "c.csv")
    assert {each["class"] for each in json.loads((files / "c.json").read_text())["weights"]} == {"c"}
    assert (files / "c.csv").read_text().startswith("feature,class,weight\n")
    refused = command("weights", files / "three.npz", "--class", "d", status=2)
    assert "the model has no class d: its classes are a, b, c" in refused.stderr


@given(st.integers(1, 3), st.integers(0, 12), st.booleans(), st.integers(0, 2**32))
def test_the_largest_weights_are_those_of_a_full_sort(rows, top, sparse, seed):
    rng = np.random.default_rng(seed)
    dense = rng.integers(-2, 3, (rows, 6)).astype(float)
    shape = dense if rows > 2 else dense[0]
    classes = np.arange(3) if rows > 2 else np.arange(2)
    model = FittedModel("svm", csr_array(dense[: len(dense) if rows > 2 else 1]) if sparse else shape, np.zeros(shape.shape[:-1]), classes)
    every = [(-abs(w), f, n, w) for n, row in enumerate(np.atleast_2d(shape)) for f, w in enumerate(row.tolist()) if w]
    found = [(-abs(each.weight), each.feature, each.number if rows > 2 else 0, each.weight) for each in largest_weights(model, top or None)]
    assert found == sorted(every)[: top or None]


@pytest.mark.parametrize("model", [TWO, THREE, FittedModel("linear", csr_array(WEIGHTS[None]), -1.0)], ids=["two", "three", "sparse"])
def test_contributions_add_up_to_the_score(model):
    sample = csr_array(np.float32([[2, 0, 1, 0, 4]]))
    made, scores = contributions(model, sample), model.decision_function(sample)[0]
    assert made.score == pytest.approx(made.products.sum() + made.intercept)
    assert made.score == pytest.approx(np.max(scores), rel=1e-6)
    assert (np.abs(made.products)[:-1] >= np.abs(made.products)[1:]).all()
    if len(model.classes) == 2:
        assert contributions(model, sample, 0).score == -made.score


def test_explain_shows_samples_in_the_order_asked_for(files):
    said = command("explain", files / "two.npz", files / "data.svm", "--rows", "2,1").stdout
    second, first = said.split("\n\n")
    assert second.startswith("sample 2, predicted 1, label 0, probability of 1 0.8520\n"[:46])
    lines = [line.split() for line in first.splitlines()]
    assert lines[2:] == [
        ["3", "1", "-3", "-3"],
        ["1", "2", "0.5", "1"],
        ["5", "4", "0.001", "0.004"],
        ["(intercept)", "0.25"],
        ["score", "of", "1", "-1.746"],
    ]
    shortened = command("explain", files / "two.npz", files / "data.svm", "--top", 1).output
    assert "(2 more)" in shortened and "1.004" in shortened
    report = json.loads(command("explain", files / "three.npz", files / "data.svm", "--zero-based", "no", "--rows", "1-3", "--json").output)
    assert [sample["sample"] for sample in report["samples"]] == [1, 2, 3]
    for sample in report["samples"]:
        assert sum(each["contribution"] for each in sample["contributions"]) + sample["intercept"] == pytest.approx(sample["score"])
        assert sample["class"] == sample["predicted"]
    assert report["samples"][2]["contributions"] == []


@pytest.mark.parametrize(
    "rows,said",
    [
        ("0", "'0' is neither a sample number from 1"),
        ("5-2", "is neither a sample number from 1"),
        ("a", "is neither a sample number from 1"),
        ("4", "no sample 4"),
        ("1-1e6", "is neither a sample number from 1"),
        ("1-999999", "at most 10,000 samples"),
    ],
)
def test_rows_that_there_are_none_of_are_said(files, rows, said):
    assert said in command("explain", files / "two.npz", files / "data.svm", "--rows", rows, status=2).stderr


def test_explain_refuses_features_that_the_model_does_not_have(files):
    (files / "more.svm").write_text("1 1:2 9:1\n")
    assert "index 9 is above" in command("explain", files / "two.npz", files / "more.svm", status=1).stderr
    assert "score of 1" in command("explain", files / "two.npz", files / "more.svm", "--ignore-unknown").output


def test_a_dictionary_has_every_feature_of_the_data_as_vowpal_wabbit_names_it(tmp_path):
    (tmp_path / "a.vw").write_text(VW)
    train = ("train", tmp_path / "a.vw", "--epochs", 1, "--names", tmp_path / "names.txt", "--model-out", tmp_path / "model.npz")
    assert "the names of 10 features" in command(*train).output
    names = read_names(tmp_path / "names.txt")
    dataset, _ = load(tmp_path / "a.vw", comm=sar.SERIAL)
    assert {name: index for index, name in names.items() if name != "nul"} == VW_NAMES
    assert set(dataset.indices.tolist()) == set(VW_NAMES.values())
    said = command("weights", tmp_path / "model.npz", "--names", tmp_path / "names.txt").output
    assert set(VW_NAMES) == {line.split()[0] for line in said.splitlines()[2:]}
    said = command("explain", tmp_path / "model.npz", tmp_path / "a.vw", "--names", tmp_path / "names.txt").output
    assert "other^color^red" in said


def test_words_of_plain_text_have_names(tmp_path):
    (tmp_path / "a.tsv").write_text("good\tA fine film, really FINE\nbad\tdull é plot\n")
    command("convert", tmp_path / "a.tsv", tmp_path / "a.csr", "--names", tmp_path / "names.txt", status=1)  # labels are names
    (tmp_path / "a.tsv").write_text("1\tA fine film, really FINE\n-1\tdull café plot\n")
    command("convert", tmp_path / "a.tsv", tmp_path / "a.csr", "--hash-bits", 10, "--names", tmp_path / "names.txt")
    names = read_names(tmp_path / "names.txt")
    assert set(" or ".join(names.values()).split(" or ")) == {"fine", "film", "really", "dull", "café", "plot"}
    assert set(load(tmp_path / "a.csr", comm=sar.SERIAL)[0].indices.tolist()) == set(names)


def test_names_that_are_hashed_alike_are_all_shown(tmp_path):
    (tmp_path / "names").write_text("3\tant\n3\tbee\n5\tcat\n")
    assert read_names(tmp_path / "names") == {3: "ant or bee", 5: "cat"}


def test_the_dictionary_of_vowpal_wabbit_is_read(tmp_path):
    (tmp_path / "inv").write_text("Version 9.11.9\nMin label:-1\n:1\nmin_label -1\nns^bar:67427:0.0138679 10.1047 1\nns^a:b:7:-1e-3\n")
    assert read_names(tmp_path / "inv") == {67427: "ns^bar", 7: "ns^a:b"}


@pytest.mark.parametrize("text", ["", "a word\n", "3\tant\nbee\n"])
def test_what_is_no_dictionary_is_refused(tmp_path, text):
    (tmp_path / "names").write_text(text)
    with pytest.raises(DatasetError, match="dictionary"):
        read_names(tmp_path / "names")


def test_names_are_of_formats_that_hash(files):
    refused = command("train", files / "data.svm", "--names", files / "names.txt", status=1)
    assert "--names is for formats with hashed features, vw and text" in refused.stderr


@pytest.mark.parametrize("name", ["weights", "explain"])
def test_they_have_help(name):
    assert command(name, "--help").output.startswith("Usage: ")


def test_models_written_by_train_are_called_as_in_their_text(tmp_path):
    (tmp_path / "a.svm").write_text("1 7:1\n0 2:1\n1 7:2\n0 2:3\n")
    command("train", tmp_path / "a.svm", "--model-out", tmp_path / "m.npz")
    assert load_model(tmp_path / "m.npz").zero_based is False
    assert {line.split()[0] for line in command("weights", tmp_path / "m.npz").output.splitlines()[2:]} == {"2", "7"}


def test_columns_of_a_table_have_names(tmp_path):
    (tmp_path / "a.csv").write_text("age,color,bought\n31,red,yes\n,blue,no\n40,red,yes\n20,blue,no\n")
    command("train", tmp_path / "a.csv", "--target", "bought", "--model-out", tmp_path / "m.npz")
    names = {"age", "age (missing)", "color=blue", "color=red"}
    report = json.loads(command("weights", tmp_path / "m.npz", "--json").output)
    assert {each["feature"] for each in report["weights"]} <= names and report["weights"]
    sample = json.loads(command("explain", tmp_path / "m.npz", tmp_path / "a.csv", "--rows", "2", "--json").output)["samples"][0]
    assert {each["feature"] for each in sample["contributions"]} == {"age (missing)", "color=blue"}
    assert sample["label"] == "no"
    refused = command("train", tmp_path / "a.csv", "--target", "bought", "--names", tmp_path / "names", status=1)
    assert "is for formats with hashed features" in refused.stderr
