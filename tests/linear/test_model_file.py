"""Model files: what goes in comes out, without pickle, and nothing else is taken for one."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce.linear.encoding import BOOLEAN, CATEGORY, HASHED, Column, Encoding
from sparseallreduce.linear.model_file import FittedModel, ModelFileError, load_model, save_model

BINARY = FittedModel("logistic", np.float32([0.5, -2, 0]), 0.25, np.array([-1.0, 1.0]))
MULTI = FittedModel("svm", np.eye(3, 4), np.array([0.0, 0.5, 0.0]), np.array(["ant", "bee", "wasp"]))
REGRESSION = FittedModel("linear", np.float32([1, 2]), -1.0)
SAMPLES = np.array([[1.0, 0, 2, 0], [0, 1, 0, 0], [0, 0, 3, 1]])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.npz"


@pytest.mark.parametrize("model", [BINARY, MULTI, REGRESSION], ids=["binary", "multi", "regression"])
def test_a_model_comes_back_as_it_was(model, path):
    save_model(path, model)
    again = load_model(path)
    assert (again.model, again.library, again.n_features) == (model.model, model.library, model.n_features)
    for name in ("weights", "intercept", "classes"):
        before, after = getattr(model, name), getattr(again, name)
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(before, after)
    assert [entry.name for entry in path.parent.iterdir()] == ["model.npz"]


def test_numpy_alone_reads_the_documented_arrays(path):
    save_model(path, BINARY)
    with np.load(path, allow_pickle=False) as file:
        assert (str(file["model"]), int(file["n_features"]), file["classes"].tolist()) == ("logistic", 3, [-1, 1])
        assert file["weights"].shape == (3,)
        assert file["intercept"].shape == ()


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array, scipy.sparse.csr_matrix, scipy.sparse.csc_array])
def test_scores_and_labels_are_those_of_the_inner_products(form):
    scores = MULTI.decision_function(form(SAMPLES))
    np.testing.assert_allclose(scores, SAMPLES @ MULTI.weights.T + MULTI.intercept)
    assert MULTI.predict(form(SAMPLES)).tolist() == ["wasp", "bee", "wasp"]
    assert BINARY.predict(form(SAMPLES[:, :3])).tolist() == [1, -1, 1]
    np.testing.assert_allclose(REGRESSION.predict(form(SAMPLES[:, :2])), [0, 1, -1])


def test_probabilities_are_of_every_class_and_add_up_to_one():
    margins = np.array([-3.0, 0.0, 800.0])
    np.testing.assert_allclose(BINARY.probabilities_of(margins)[:, 1], 1 / (1 + np.exp(-margins)))
    logistic = FittedModel("logistic", MULTI.weights, MULTI.intercept, MULTI.classes)
    shares = logistic.predict_proba(np.vstack([SAMPLES, 1e5 * SAMPLES, -1e5 * np.ones((1, 4))]))
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    for model in (MULTI, REGRESSION):
        with pytest.raises(ModelFileError, match="only a logistic classifier"):
            model.predict_proba(np.zeros((1, model.n_features)))


def test_samples_of_another_width_are_refused():
    with pytest.raises(ModelFileError, match="the model has 3 features, the samples have 4"):
        BINARY.decision_function(SAMPLES)


@pytest.mark.parametrize(
    "what,arguments",
    [
        ("one score for 3 classes", (np.zeros(4), 0.0, [1, 2, 3])),
        ("2 scores and 3 classes", (np.zeros((2, 4)), np.zeros(2), [1, 2, 3])),
        ("intercept has the shape", (np.zeros((3, 4)), 0.0, [1, 2, 3])),
        ("int64", (np.zeros(4, int), 0.0, [])),
        ("not finite", (np.array([np.nan]), 0.0, [])),
        ("not finite", (np.zeros(1), np.inf, [])),
        ("classes have 2 dimensions", (np.zeros(1), 0.0, [[1, 2]])),
    ],
)
def test_what_is_no_linear_model_is_not_written(what, arguments, path):
    with pytest.raises(ModelFileError, match=what):
        save_model(path, FittedModel("linear", *arguments))
    assert not path.exists()


def test_object_labels_are_written_if_they_are_strings(path):
    save_model(path, FittedModel("svm", np.zeros(2), 0.0, np.array(["a", "bb"], object)))
    assert load_model(path).classes.tolist() == ["a", "bb"]
    with pytest.raises(ModelFileError, match="numbers or strings"):
        save_model(path, FittedModel("svm", np.zeros(2), 0.0, np.array([None, 1], object)))
    assert load_model(path).classes.tolist() == ["a", "bb"], "a failed write has touched the file"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("classes", [2, 3])
def test_weights_that_are_zero_are_left_out_where_that_is_smaller(path, dtype, classes):
    weights = np.zeros(500_000 if classes == 2 else (3, 200_000), dtype)
    weights.reshape(-1)[7::1000] = np.random.default_rng(0).standard_normal(len(weights.reshape(-1)[7::1000]))
    model = FittedModel("svm", weights, np.zeros(weights.shape[:-1]), np.arange(classes))
    save_model(path, model)
    assert path.stat().st_size < 10_000 + 600 * 12
    again = load_model(path)
    assert (again.weights.dtype, again.weights.shape) == (weights.dtype, weights.shape)
    np.testing.assert_array_equal(again.weights, weights)
    with np.load(path) as file:
        assert str(file["format"]).endswith(" 2") and "weights" not in file
    weights.reshape(-1)[:] = 1
    save_model(path, model)
    with np.load(path) as file:
        assert str(file["format"]).endswith(" 1") and "indices" not in file
    assert load_model(path).weights.all()


@pytest.mark.parametrize(
    "changes",
    [
        {"indices": np.uint32([5, 3])},
        {"indices": np.uint32([3, 3])},
        {"indices": np.uint32([3, 600_000])},
        {"indices": np.int64([-1, 3])},
        {"indices": np.uint32([3])},
        {"values": np.float32([[1, 2]])},
        {"values": np.array(["a", "b"])},
        {"values": np.float32([np.nan, 1])},
        {"n_features": 5},
        {"n_features": 2**62, "indices": np.uint64([3, 2**62])},
        {"n_features": -1},
    ],
    ids=str,
)
def test_places_of_weights_that_cannot_be_are_refused(path, changes):
    weights = np.zeros(600_000, np.float32)
    weights[[3, 5]] = 1
    save_model(path, FittedModel("svm", weights, 0.0, np.arange(2)))
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | changes))
    with pytest.raises(ModelFileError, match=str(path)):
        load_model(path)


def test_a_file_of_the_first_layout_is_read(path):
    arrays = {"library": "0.1.0", "model": "svm", "n_features": 2, "weights": np.float32([1, 0]), "intercept": 0.5, "classes": [0, 1]}
    np.savez(path, format="sparseallreduce linear model 1", **arrays)
    model = load_model(path)
    assert (model.weights.tolist(), model.loss, model.parameter, model.zero_based) == ([1, 0], "", None, None)


FOREIGN = {
    "absent": None,
    "empty": b"",
    "text": b"1 1:1 2:3\n",
    "npy": lambda path: np.save(path.open("wb"), np.zeros(3)),
    "another npz": lambda path: np.savez(path.open("wb"), weights=np.zeros(3)),
    "pickled": lambda path: np.savez(path.open("wb"), format=np.array([{}], object)),
    "later layout": lambda path: np.savez(path.open("wb"), format="sparseallreduce linear model 9"),
    "incomplete": lambda path: np.savez(path.open("wb"), format="sparseallreduce linear model 1", model="svm", weights=np.zeros(3)),
    "another zip": lambda path: zipfile.ZipFile(path, "w").writestr("letter.txt", "dear"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_foreign_files_are_refused_by_name(what, path):
    content = FOREIGN[what]
    if callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError, match=str(path)):
        load_model(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "model.npz"
    save_model(path, MULTI)
    return path


@given(st.data())
def test_a_damaged_file_is_refused_or_the_damage_is_outside_what_it_holds(written, data):
    content = bytearray(written.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    damaged = written.with_name("damaged.npz")
    damaged.write_bytes(content)
    try:
        model = load_model(damaged)
    except ModelFileError:
        return
    np.testing.assert_array_equal(model.weights, MULTI.weights)
    np.testing.assert_array_equal(model.classes, MULTI.classes)


def test_a_model_file_is_read_without_mpi(path):
    save_model(path, BINARY)
    code = f"import sys, sparseallreduce.linear as it; it.load_model({str(path)!r}); print('mpi4py.MPI' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


COLUMNS = Encoding(
    (
        Column("age", missing=True),
        Column("caf\u00e9, \"x\"", CATEGORY, ("", "a\nb", "\u65e5\u672c")),
        Column("paid", BOOLEAN, ("true",)),
        Column("user", HASHED, bits=3, missing=True),
    ),
    target="bought",
)


def test_the_names_of_columns_and_categories_come_back_with_a_model(path):
    save_model(path, FittedModel("linear", np.arange(COLUMNS.features, dtype=np.float32), encoding=COLUMNS))
    again = load_model(path)
    assert again.encoding == COLUMNS
    names = [again.name_of(index) for index in range(again.n_features)]
    assert names == list(COLUMNS.names())
    some = names[:2] + names[4:7] + names[-1:]
    assert some == ["age", "age (missing)", "caf\u00e9, \"x\"=\u65e5\u672c", "paid=true", "user#0", "user (missing)"]
    assert [COLUMNS.column_of(index) for index in (0, 1, 5, 14)] == ["age", "age", "paid", "user"]


@pytest.mark.parametrize("zero_based, name", [(None, "2"), (False, "3"), (True, "2")])
def test_a_feature_without_a_name_is_called_by_the_index_it_was_read_by(zero_based, name):
    assert FittedModel("linear", np.ones(3, np.float32), zero_based=zero_based).name_of(2) == name


@pytest.mark.parametrize("index", [-1, COLUMNS.features])
def test_a_feature_that_there_is_not_has_no_name(index):
    with pytest.raises(IndexError):
        COLUMNS.name_of(index)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"columns": [{"name": "a", "kind": "number"}], "target": 1}',
        b'{"columns": [{"name": "a", "kind": "word"}], "target": null}',
        b'{"columns": [{"name": "a", "kind": "hashed"}], "target": null}',
        b'{"columns": [{"name": "a", "kind": "category", "categories": ["b", "a"]}], "target": null}',
        b'{"columns": [{"name": "a", "kind": "number"}, {"name": "b", "kind": "number"}], "target": null}',
    ],
)
def test_a_damaged_encoding_of_columns_is_refused(content, path):
    save_model(path, FittedModel("linear", np.float32([1]), encoding=Encoding((Column("a"),))))
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"encoding": np.frombuffer(content, np.uint8)}))
    with pytest.raises(ModelFileError, match=r"damaged|cannot be read"):
        load_model(path)
