"""Reading svmlight text: every sample once, on one rank, with the same number whatever the ranks; and what is refused."""

import bz2
import gzip
import lzma

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.linear import svmlight
from sparseallreduce.linear.datasets import DatasetError, load, two_classes

COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def samples(rows=97, features=50, seed=0):
    matrix = scipy.sparse.random_array((rows, features), density=0.2, rng=np.random.default_rng(seed), dtype=np.float32, format="csr")
    return matrix, np.where(np.arange(rows) % 3 == 0, 1.0, -1.0)


def joined(parts):
    """The samples and labels of all ranks, in the order of their numbers."""
    parts = sorted(parts, key=lambda part: part.first)
    return scipy.sparse.vstack([part.to_scipy() for part in parts]), np.concatenate([part.labels for part in parts])


@pytest.fixture
def svm_file(tmp_path):
    """A function that writes samples as svmlight text with a suffix, and returns its path."""

    def write(matrix, labels, suffix=""):
        plain = tmp_path / "plain.svm"
        dump_svmlight_file(matrix, labels, str(plain), zero_based=False)
        path = tmp_path / f"samples.svm{suffix}"
        path.write_bytes(COMPRESSORS[suffix](plain.read_bytes()))
        return path

    return write


@pytest.fixture
def text_file(tmp_path):
    def write(text, name="bad.svm"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_sample_is_on_one_rank_in_the_order_of_the_file(svm_file, suffix, ranks):
    matrix, labels = samples()
    path = svm_file(matrix, labels, suffix)

    parts = [train for train, _ in on_ranks(ranks, lambda comm: load(path, comm=comm, n_features=50))]

    read, read_labels = joined(parts)
    np.testing.assert_array_equal(read.toarray(), matrix.toarray())
    np.testing.assert_array_equal(read_labels, labels)
    assert [part.total for part in parts] == [97] * ranks
    assert [part.first for part in parts] == np.cumsum([0, *(part.rows for part in parts[:-1])]).tolist()


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12), ranks=st.integers(1, 9), end=st.sampled_from(["", "\n", "\n\n"]))
def test_lines_of_any_length_are_shared_without_loss_or_repetition(tmp_path_factory, lengths, ranks, end):
    path = tmp_path_factory.mktemp("lines") / "lines.svm"
    lines = [" ".join([str(number), *(f"{index}:1" for index in range(1, length + 1))]) for number, length in enumerate(lengths)]
    path.write_text("\n".join(lines) + end)

    parts = [train for train, _ in on_ranks(ranks, lambda comm: load(path, comm=comm, n_features=12))]

    read, labels = joined(parts)
    assert labels.tolist() == list(range(len(lengths)))
    assert np.diff(read.indptr).tolist() == lengths


def test_small_chunks_of_text_give_the_same_samples(svm_file, monkeypatch):
    matrix, labels = samples()
    path = svm_file(matrix, labels)
    monkeypatch.setattr(svmlight, "_CHUNK", 100)
    seen = []

    train, _ = load(path, comm=sar.SERIAL, n_features=50, progress=seen.append)

    np.testing.assert_array_equal(train.to_scipy().toarray(), matrix.toarray())
    assert len(seen) > 10
    assert sum(seen) == path.stat().st_size


def test_blocks_have_about_the_same_number_of_bytes(svm_file):
    matrix, labels = samples(rows=1000)
    path = svm_file(matrix, labels)
    parts = [train for train, _ in on_ranks(4, lambda comm: load(path, comm=comm, n_features=50))]
    np.testing.assert_allclose([part.nnz for part in parts], matrix.nnz / 4, rtol=0.02)


def test_features_are_the_highest_index_of_both_files_and_all_ranks(text_file):
    train, test = text_file("1 7:1\n-1 2:1\n", "a.svm"), text_file("1 1:1\n-1 9:1\n", "b.svm")
    for pair in on_ranks(2, lambda comm: load(train, test, comm=comm)):
        assert [part.features for part in pair] == [9, 9]
    assert load(train, comm=sar.SERIAL)[0].features == 7
    assert load(train, comm=sar.SERIAL, n_features=100)[0].features == 100


def test_comments_blank_lines_and_windows_line_ends_are_skipped(text_file):
    train, _ = load(text_file("# head\r\n1 2:3 # the first\r\n\r\n-1 1:0.5\r\n"), comm=sar.SERIAL)
    np.testing.assert_array_equal(train.to_scipy().toarray(), [[0, 3], [0.5, 0]])


@pytest.mark.parametrize(
    "line,reason",
    [
        ("abc 2:1", "could not convert string to float"),
        ("1 x:1", "invalid literal for int"),
        ("1 2:x", "could not convert string to float"),
        ("1 2", "not of the form index:value"),
        ("1 2:1:3", "could not convert string to float"),
        ("1 1.5:1", "invalid literal for int"),
        ("1 0:1", "invalid index 0"),
        ("1 -4:1", "invalid index -4"),
        ("1 3:1 2:1", "should be sorted and unique"),
        ("1 3:1 3:1", "should be sorted and unique"),
        ("1 11:1", "index 11 is above the number of features, 10"),
        ("1 99999999999999999999:1", "index is above 2147483647"),
        ("1 2147483648:1", "index is above 2147483647"),
        ("1 2:nan", "not a finite float32"),
        ("1 2:1e39", "not a finite float32"),
        ("inf 2:1", "label is not a finite number"),
        (b"\xff\xfe 2:1", "could not convert string to float"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_malformed_line_is_named_on_every_rank(text_file, line, reason, ranks):
    good = b"1 1:1 5:0.25\n-1 2:1\n" * 20
    path = text_file(good + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good)

    errors = on_ranks(ranks, lambda comm: load(path, comm=comm, n_features=10))

    assert all(isinstance(error, DatasetError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert f"{path}, line 41: " in str(errors[0])
    assert reason in str(errors[0])
    assert "\n" not in str(errors[0])


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_truncated_and_foreign_compressed_files_are_named(text_file, svm_file, suffix, ranks):
    whole = svm_file(*samples(), suffix).read_bytes()
    for content in (whole[: len(whole) // 2], b"1 1:1\n" * 50):
        path = text_file(content, f"broken.svm{suffix}")
        errors = on_ranks(ranks, lambda comm, path=path: load(path, comm=comm))
        assert all(isinstance(error, DatasetError) and f"cannot read {path}: " in str(error) for error in errors)


@pytest.mark.parametrize("ranks", [1, 3])
def test_missing_and_empty_files_are_named(text_file, tmp_path, ranks):
    missing, empty = tmp_path / "missing.svm", text_file("\n# nothing\n", "empty.svm")
    for error in on_ranks(ranks, lambda comm: load(missing, comm=comm)):
        assert str(error) == f"cannot read {missing}: No such file or directory"
    for error in on_ranks(ranks, lambda comm: load(empty, comm=comm)):
        assert str(error) == f"{empty}: no samples in it"


def test_the_lower_label_becomes_minus_one_on_all_ranks(text_file):
    path = text_file("3 1:1\n3 1:1\n7 1:1\n7 1:1\n")

    def signed(comm):
        train, classes = two_classes(load(path, comm=comm)[0], comm)
        return train.labels.tolist(), classes

    assert on_ranks(2, signed) == [([-1.0, -1.0], (3.0, 7.0)), ([1.0, 1.0], (3.0, 7.0))]


@pytest.mark.parametrize("text,found", [("1 1:1\n1 1:1\n", "the labels are 1"), ("0 1:1\n1 1:1\n2 1:1\n", "the labels are 0, 1, 2")])
def test_other_than_two_classes_are_refused_on_every_rank(text_file, text, found):
    path = text_file(text)
    for error in on_ranks(2, lambda comm: two_classes(load(path, comm=comm)[0], comm)):
        assert isinstance(error, DatasetError)
        assert found in str(error)
        assert str(path) in str(error)


def test_a_test_label_that_training_has_not_is_refused(text_file):
    train, test = load(text_file("0 1:1\n1 1:1\n", "a.svm"), text_file("0 1:1\n4 1:1\n", "b.svm"), comm=sar.SERIAL)
    _, classes = two_classes(train, sar.SERIAL)
    with pytest.raises(DatasetError, match=r"b\.svm: label 4 is none of the training set's, 0 and 1"):
        two_classes(test, sar.SERIAL, classes)
