"""Frames of pandas, polars, Arrow and Hugging Face in the estimators: encoded as files are, by the names of columns."""

import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import MismatchError
from sparseallreduce.linear import LinearRegression, LogisticRegression, load, shard
from sparseallreduce.linear.data.tables.frames import encoded_frame

FRAME = pd.DataFrame(
    {
        "age": [31.0, np.nan, 50.0, 18.0] * 5,
        "color": ["red", "blue", None, "red"] * 5,
        "member": [True, False, True, True] * 5,
        "size": pd.Categorical(["s", "m", "s", "s"] * 5, categories=["s", "m", "never"]),
    }
)
NAMES = ["age", "age (missing)", "color=blue", "color=red", "color (missing)", "member=false", "member=true", "size=m", "size=s"]
Y = np.array(["yes", "no", "no", "yes"] * 5)
NEW = pd.DataFrame({"size": ["m", "new"], "age": [np.nan, 20.0], "extra": [1, 2], "member": [None, True], "color": ["green", "blue"]})


def polars_frame(frame):
    return pytest.importorskip("polars").from_pandas(frame)


def datasets_frame(frame):
    return pytest.importorskip("datasets").Dataset.from_pandas(frame, preserve_index=False)


KINDS = {"pandas": lambda frame: frame, "arrow": pa.Table.from_pandas, "polars": polars_frame, "datasets": datasets_frame}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_is_encoded_as_the_file_it_is_written_to(kind, tmp_path):
    FRAME.assign(y=Y).to_csv(tmp_path / "a.csv", index=False)
    from_file = load(tmp_path / "a.csv", target="y", comm=sar.SERIAL)[0]
    model = LogisticRegression(comm=sar.SERIAL).fit(KINDS[kind](FRAME), Y)
    assert list(model.encoding_.names()) == list(from_file.encoding.names()) == NAMES
    assert model.feature_names_in_.tolist() == list(FRAME.columns) and model.n_features_in_ == 4
    assert model.coef_.shape == (1, len(NAMES))
    assert model.score(KINDS[kind](FRAME), Y) == 1.0
    encoded = from_file.to_scipy()
    np.testing.assert_allclose(model.decision_function(encoded), model.decision_function(FRAME), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_found_by_name_and_unseen_categories_are_zero(kind):
    model = LogisticRegression(comm=sar.SERIAL).fit(FRAME, Y)
    expected = np.zeros((2, len(NAMES)))
    expected[0, [NAMES.index("age (missing)"), NAMES.index("size=m")]] = 1
    expected[1, [NAMES.index("color=blue"), NAMES.index("member=true")]], expected[1, 0] = 1, 20
    np.testing.assert_allclose(model.decision_function(KINDS[kind](NEW)), expected @ model.coef_[0] + model.intercept_)


def test_missing_columns_and_strange_values_are_named():
    model = LogisticRegression(comm=sar.SERIAL).fit(FRAME, Y)
    with pytest.raises(ValueError, match="X: there are no columns 'age' and 'size', which the model was trained on"):
        model.predict(FRAME[["color", "member"]])
    with pytest.raises(ValueError, match="X, row 1: the column 'age' is 'old', which is not a number"):
        model.predict(NEW.assign(age=["1", "old"]))
    with pytest.raises(ValueError, match="was fitted on a frame of 4 columns, which are 9 features: pass a frame"):
        model.predict(np.ones((1, 4)))
    with pytest.raises(ValueError, match=r"X, row 0: the column 'when' holds dates"):
        LogisticRegression(comm=sar.SERIAL).fit(FRAME.assign(when=pd.Timestamp("2020-01-01")), Y)
    with pytest.raises(ValueError, match=r"X cannot be converted to a table.*odd"):
        LogisticRegression(comm=sar.SERIAL).fit(FRAME.assign(odd=[1, "a"] * 10), Y)


def test_the_encoding_travels_with_files_and_pickles(tmp_path):
    model = LogisticRegression(comm=sar.SERIAL).fit(FRAME, Y)
    model.to_file(tmp_path / "model.npz")
    for again in (LogisticRegression.from_file(tmp_path / "model.npz"), pickle.loads(pickle.dumps(model))):
        assert again.encoding_ == model.encoding_ and again.feature_names_in_.tolist() == list(FRAME.columns)
        np.testing.assert_array_equal(again.decision_function(NEW), model.decision_function(NEW))


def test_a_frame_of_numbers_alone_is_taken_as_scikit_learn_takes_it():
    numbers = pd.DataFrame({"a": [1.0, 2.0, 3.0], "b": [3, 1, 2]})
    model = LinearRegression(comm=sar.SERIAL).fit(FRAME, np.arange(20)).fit(numbers, [1, 2, 3])
    assert model.encoding_ is None and model.feature_names_in_.tolist() == ["a", "b"]
    with pytest.raises(ValueError, match="same order"):
        model.predict(numbers[["b", "a"]])


def test_later_calls_of_partial_fit_are_encoded_as_the_first():
    model = LogisticRegression(comm=sar.SERIAL).partial_fit(FRAME, Y, classes=["no", "yes"])
    model.partial_fit(FRAME[:3].assign(color="green"), Y[:3])
    assert list(model.encoding_.names()) == NAMES and model.coef_.shape == (1, len(NAMES))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_parts_of_a_frame_agree_on_its_encoding(ranks):
    whole = LinearRegression(comm=sar.SERIAL).fit(FRAME, np.arange(20))
    parts = on_ranks(ranks, lambda comm: encoded_frame(FRAME[:1] if comm.rank == 0 else FRAME[1:1] if comm.rank > 1 else FRAME[1:], comm))
    assert all(encoding == whole.encoding_ for _, encoding in parts)
    assert np.vstack([rows.toarray() for rows, _ in parts]).tolist() == encoded_frame(FRAME, sar.SERIAL)[0].toarray().tolist()


@pytest.mark.parametrize("kind", [*KINDS, "list", "array"])
def test_rows_that_every_rank_holds_are_dealt_out_in_their_order(kind):
    given = {"list": FRAME["age"].fillna(0).tolist(), "array": FRAME["age"].to_numpy()}.get(kind)
    given = KINDS[kind](FRAME) if given is None else given
    parts = on_ranks(3, lambda comm: shard(given, Y, comm))
    assert [len(labels) for _, labels in parts] == [6, 7, 7]
    assert np.concatenate([labels for _, labels in parts]).tolist() == Y.tolist()
    assert all(type(rows) is type(given) and len(rows) == len(labels) for rows, labels in parts)


@pytest.mark.parametrize("wrong", ["rows", "values", "labels"])
def test_rows_that_differ_between_ranks_are_not_dealt(wrong):
    def deal(comm):
        frame, labels = (FRAME, Y) if comm.rank == 0 else (FRAME[::-1], Y)
        if wrong == "rows":
            frame, labels = FRAME[comm.rank :], Y[comm.rank :]
        elif wrong == "labels":
            frame, labels = FRAME, Y if comm.rank == 0 else np.roll(Y, 1)
        return shard(frame, labels, comm)

    errors = on_ranks(2, deal)
    assert all(isinstance(error, MismatchError) and "every rank must hold the same rows" in str(error) for error in errors)
    assert str(errors[0]) == str(errors[1])
