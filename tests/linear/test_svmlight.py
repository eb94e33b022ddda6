"""Reading svmlight text: every sample once, on one rank, with the same number whatever the ranks; and what is refused."""

import bz2
import gzip
import lzma
import math

import numpy as np
import pytest
import scipy.sparse
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file, load_svmlight_file
from thoroughness import examples
from thread_ranks import joined, on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data import line_blocks
from sparseallreduce.linear.data.labels import two_classes
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.data.parts import Source
from sparseallreduce.linear.data.svmlight import reader as svmlight
from sparseallreduce.linear.data.svmlight.reader import svmlight_blocks

COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def samples(rows=97, features=50, seed=0):
    matrix = scipy.sparse.random_array((rows, features), density=0.2, rng=np.random.default_rng(seed), dtype=np.float32, format="csr")
    return matrix, np.where(np.arange(rows) % 3 == 0, 1.0, -1.0)


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


@settings(max_examples=examples(30))
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
    monkeypatch.setattr(line_blocks, "_BLOCK", 100)
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


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_malformed_line_far_in_is_named_on_every_rank(text_file, monkeypatch, suffix, ranks):
    monkeypatch.setattr(line_blocks, "_BLOCK", 64)  # so that the compressed text is not a short one
    good = b"1 1:1 5:0.25\n-1 2:1\n"
    path = text_file(COMPRESSORS[suffix](good * 500 + b"1 2:x\n" + good * 200 + b"1 0:1\n" + good * 100), f"bad.svm{suffix}")

    errors = on_ranks(ranks, lambda comm: load(path, comm=comm))

    assert {str(error) for error in errors} == {f"{path}, line 1001: the value 'x' of index 2 is not a number: '1 2:x'"}


def test_a_rank_that_cannot_go_on_stops_the_reader(text_file, monkeypatch):
    """A rank that leaves its share, for whatever reason, neither hangs the others nor keeps rank 0 reading to the end."""
    monkeypatch.setattr(line_blocks, "_BLOCK", 64)
    text = b"".join(b"1 1:%d\n" % (number * 7919 % 99991) for number in range(100_000))
    path = text_file(gzip.compress(text), "long.svm.gz")
    pieces = []

    def leave_early(comm):
        for block in svmlight_blocks(Source(str(path), (path,)), comm):
            pieces.append(len(block.labels))
            if comm.rank == 1:
                return "left"
        return "end"

    assert on_ranks(3, leave_early) == ["end", "left", "end"]
    assert sum(pieces) < 60_000


def test_a_line_without_an_end_is_no_svmlight_text(text_file, monkeypatch):
    monkeypatch.setattr(line_blocks, "_BLOCK", 64)
    monkeypatch.setattr(line_blocks, "_LONGEST_LINE", 500)
    path = text_file("1 1:1\n" + "1 " * 400)
    with pytest.raises(DatasetError, match=r"a line of more than 500 bytes: '1 1 1 .*'\.\.\.; this is not a text of samples"):
        load(path, comm=sar.SERIAL)


def test_an_empty_folder_and_a_device_are_refused(tmp_path):
    with pytest.raises(DatasetError, match=f"{tmp_path}: it contains no files"):
        load(tmp_path, comm=sar.SERIAL)
    with pytest.raises(DatasetError, match="cannot read /dev/zero: it is neither a file nor a pipe"):
        load("/dev/zero", comm=sar.SERIAL)


@pytest.mark.parametrize("suffix", ["", ".bz2"])
def test_the_share_of_a_rank_is_its_part_of_the_file(text_file, suffix):
    text = b"".join(b"%d 1:%d\n" % (number % 2, number * 7919 % 99991) for number in range(300_000))
    path = text_file(COMPRESSORS[suffix](text), f"long.svm{suffix}")
    rows = [part.rows for part, _ in on_ranks(4, lambda comm: load(path, comm=comm))]
    assert sum(rows) == 300_000
    assert max(rows) < 1.2 * 300_000 / 4


def test_progress_adds_up_to_the_file(svm_file):
    for suffix in ("", ".gz"):
        path = svm_file(*samples(rows=3000), suffix)
        for ranks in (1, 3):
            seen = []
            on_ranks(ranks, lambda comm, path=path, seen=seen: load(path, comm=comm, progress=seen.append))
            assert sum(seen) == path.stat().st_size


@given(value=st.floats(allow_nan=False, allow_infinity=False), style=st.sampled_from(["{!r}", "{:.3e}", "{:.17g}", "{:f}", "{:+.9E}"]))
def test_numbers_are_converted_as_python_does(value, style):
    word = style.format(value)
    assume(math.isfinite(float(word)))
    parser = svmlight._Parser(None, False, np.dtype(np.float64))
    block = parser.parse(f"{word} 1:{word} 7:{word}# {word}\n".encode())
    assert block.labels.tobytes() == np.float64([float(word)]).tobytes()
    assert block.values.tobytes() == np.float64([float(word)] * 2).tobytes()


@pytest.mark.parametrize("word", ["1.", ".5", "-.5e-3", "+7", "007", "1E+05", "0e999", "123456789012345678901234567890", "1e-400", "-0.0"])
def test_all_forms_of_numbers_are_read(text_file, word):
    train, _ = load(text_file(f"{word} 3:{word}\n"), comm=sar.SERIAL)
    assert train.labels.tolist() == [float(word)]
    assert train.values.tolist() == [np.float32(float(word))]


def test_what_scikit_learn_writes_and_reads_is_read_alike(tmp_path):
    matrix, labels = samples(rows=200, features=3000, seed=4)
    path = tmp_path / "written.svm"
    dump_svmlight_file(matrix, labels, str(path), zero_based=False, comment="of scikit-learn", query_id=np.arange(200))
    theirs, their_labels = load_svmlight_file(str(path), n_features=3000, zero_based=False, dtype=np.float32)

    train, _ = load(path, comm=sar.SERIAL, n_features=3000)

    np.testing.assert_array_equal(train.labels, their_labels)
    np.testing.assert_array_equal(train.indptr, theirs.indptr)
    np.testing.assert_array_equal(train.indices, theirs.indices)
    np.testing.assert_array_equal(train.values, theirs.data)


def test_indices_beyond_32_bits(text_file):
    train, _ = load(text_file("1 5000000000:1\n"), comm=sar.SERIAL, n_features=5_000_000_000)
    assert (train.indices.dtype, train.indices.tolist()) == (np.uint64, [4_999_999_999])
    train, _ = load(text_file("1 4294967296:1\n"), comm=sar.SERIAL)
    assert (train.indices.dtype, train.indices.tolist(), train.features) == (np.uint32, [2**32 - 1], 2**32)
    with pytest.raises(DatasetError, match="index 4294967297 is above 4294967296, the highest allowed unless"):
        load(text_file("1 4294967297:1\n"), comm=sar.SERIAL)


def test_the_lower_label_becomes_minus_one_on_all_ranks(text_file):
    path = text_file("3 1:1\n3 1:1\n7 1:1\n7 1:1\n")

    def signed(comm):
        train, classes = two_classes(load(path, comm=comm)[0], comm)
        return train.labels.tolist(), classes

    assert on_ranks(2, signed) == [([-1.0, -1.0], (3.0, 7.0)), ([1.0, 1.0], (3.0, 7.0))]


def test_a_test_label_that_training_has_not_is_refused(text_file):
    train, test = load(text_file("0 1:1\n1 1:1\n", "a.svm"), text_file("0 1:1\n4 1:1\n", "b.svm"), comm=sar.SERIAL)
    _, classes = two_classes(train, sar.SERIAL)
    with pytest.raises(DatasetError, match=r"b\.svm: label 4 is not one of the training set's, 0 and 1"):
        two_classes(test, sar.SERIAL, classes)
