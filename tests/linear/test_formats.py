"""Samples in other formats than our own: the same data as their own libraries read, on any number of ranks; hashes as Vowpal Wabbit's."""

import gzip
import io
import json
import sys

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from sklearn.datasets import dump_svmlight_file
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.utils.murmurhash import murmurhash3_bytes_u32
from thread_ranks import joined, on_ranks

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import DatasetError, load, load_model
from sparseallreduce.linear.data import line_blocks, npz
from sparseallreduce.linear.data.convert import convert
from sparseallreduce.linear.data.vowpal_wabbit import kernels

RANKS = [1, 2, 5]


def matrix(rows=97, features=50, seed=0):
    rng = np.random.default_rng(seed)
    X = scipy.sparse.random_array((rows, features), density=0.1, rng=rng, format="csr").astype(np.float32)
    return X, np.where(rng.random(rows) < 0.5, 1.0, -1.0)


def read(path, ranks=1, **options):
    return joined(on_ranks(ranks, lambda comm: load(path, comm=comm, **options)[0]))


def command(*arguments, status=0, **options):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    assert result.exit_code == status, result.output
    return result


def expect(found, X, y):
    rows, labels = found
    assert rows.shape == X.shape
    np.testing.assert_array_equal(rows.toarray(), X.toarray())
    np.testing.assert_array_equal(labels, y)




@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_npz_is_read_as_scipy_reads_it(tmp_path, monkeypatch, ranks, compressed, small):
    if small:
        monkeypatch.setattr(npz, "_ROWS", 7)
        monkeypatch.setattr(npz, "NONZEROS_AT_ONCE", 11)
        monkeypatch.setattr(npz, "_PIECE", 64)
    X, y = matrix()
    scipy.sparse.save_npz(tmp_path / "X.npz", X, compressed=compressed)
    np.save(tmp_path / "X.labels.npy", y)
    expect(read(tmp_path / "X.npz", ranks), X, y)


@pytest.mark.parametrize("name", ["labels", "y"])
def test_labels_may_be_in_the_npz_itself(tmp_path, name):
    X, y = matrix()
    parts = {"format": b"csr", "shape": X.shape, "data": X.data, "indices": X.indices, "indptr": X.indptr, name: y.astype(int)}
    np.savez(tmp_path / "X.npz", **parts)
    expect(read(tmp_path / "X.npz"), X, y)


def test_npz_features_out_of_order_and_twice_are_sorted_and_added_up(tmp_path):
    X = scipy.sparse.csr_array((np.float64([1, 2, 4, 8]), [3, 0, 3, 1], [0, 3, 4]), shape=(2, 5))
    scipy.sparse.save_npz(tmp_path / "X.npz", X)
    np.save(tmp_path / "X.labels.npy", [1, 2])
    train = load(tmp_path / "X.npz", comm=sar.SERIAL)[0]
    assert (train.indices.tolist(), train.values.tolist(), train.indptr.tolist()) == ([0, 3, 1], [2, 5, 8], [0, 2, 3])
    assert (train.values.dtype, train.features) == (np.float32, 5)


def arrays(**changes):
    X, y = matrix(6, 5)
    given = {"format": b"csr", "shape": X.shape, "data": X.data, "indices": X.indices, "indptr": X.indptr, "labels": y}
    return given | changes


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"format": b"csc"}, "the matrix is of format 'csc', not compressed rows: save X.tocsr()"),
        ({"shape": (7, 5)}, "the file is damaged"),
        ({"shape": (6,)}, "is not that of a matrix"),
        ({"labels": np.ones(5)}, "there are 5 labels for 6 samples"),
        ({"labels": np.full(6, np.nan)}, "sample 0: the label is not finite"),
        ({"labels": np.array(["a"] * 6)}, "the array labels is <U1"),
        ({"labels": np.array([{}] * 6, object)}, "the array labels is object"),
        ({"data": np.ones(2)}, "the file is damaged"),
        ({"shape": (6, 2)}, "is not below the 2 features"),
        ({"indptr": np.array([0, 3, 2, 3, 3, 3, 3])}, "sample 1: it ends at non-zero 2 of 3, but starts at 3"),
        ({"indptr": np.array([1, 3, 3, 3, 3, 3, 3])}, "sample 0: it starts at non-zero 1 of 3"),
        ({"indptr": np.array([0, 2, 2, 2, 2, 2, 2])}, "the samples end at non-zero 2 of 3"),
        ({"data": np.float64([1, 2, np.inf])}, "the value of index"),
        ({"data": np.float64([1, 2, 1e39])}, "the value of index"),
        ({"data": np.array([1, 2, 1j])}, "the array data is complex128"),
        ({"indices": np.array([0, 1, -1])}, "index -1 is below 0"),
        ({"indices": np.array([0.0, 1, 2])}, "the array indices is float64"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_npz_that_is_no_data_set_is_refused_on_every_rank(tmp_path, changes, says, ranks):
    given = arrays(**{"data": np.ones(3), "indices": np.array([0, 1, 2]), "indptr": np.array([0, 1, 2, 3, 3, 3, 3])} | changes)
    np.savez(tmp_path / "X.npz", **given)
    errors = on_ranks(ranks, lambda comm: load(tmp_path / "X.npz", comm=comm))
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], DatasetError) and "X.npz" in str(errors[0]) and says in str(errors[0]), errors[0]


def test_an_npz_without_labels_says_where_they_may_be_and_predict_needs_none(tmp_path):
    X, y = matrix()
    scipy.sparse.save_npz(tmp_path / "train.npz", X)
    with pytest.raises(DatasetError, match=r"no labels: put an array 'labels' into it, or write them to .*train\.labels\.npy by numpy"):
        load(tmp_path / "train.npz", comm=sar.SERIAL)
    scipy.sparse.save_npz(tmp_path / "new.npz", X)
    np.save(tmp_path / "train.labels.npy", y)
    command("train", tmp_path / "train.npz", "--epochs", 2, "--model-out", tmp_path / "m.npz")
    said = command("predict", tmp_path / "m.npz", tmp_path / "new.npz", "--out", tmp_path / "out").output
    assert "not all of which have labels" in said
    command("predict", tmp_path / "m.npz", tmp_path / "train.npz", "--out", tmp_path / "out2")
    assert (tmp_path / "out").read_text() == (tmp_path / "out2").read_text()




def parquet(path, X, y, groups=13, **columns):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet as pq

    rows = [X.indptr[row : row + 2] for row in range(X.shape[0])]
    given = {
        "label": pa.array(y),
        "indices": pa.array([X.indices[a:b] for a, b in rows], pa.list_(pa.int32())),
        "values": pa.array([X.data[a:b] for a, b in rows], pa.list_(pa.float32())),
        "name": pa.array(["a"] * len(y)),
    } | columns
    pq.write_table(pa.table({name: column for name, column in given.items() if column is not None}), path, row_group_size=groups)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("groups", [1, 13, 1000])
def test_parquet_rows_are_shared_by_the_ranks(tmp_path, ranks, groups):
    X, y = matrix()
    parquet(tmp_path / "X.parquet", X, y, groups)
    expect(read(tmp_path / "X.parquet", ranks, n_features=50), X, y)


def test_parquet_that_is_no_data_set_is_refused(tmp_path):
    pa = pytest.importorskip("pyarrow")
    X, y = matrix(3)

    def refused(says, **columns):
        parquet(tmp_path / "X.parquet", X, y, **columns)
        errors = on_ranks(2, lambda comm: load(tmp_path / "X.parquet", comm=comm, n_features=50))
        assert {str(error) for error in errors} == {str(errors[0])}
        assert isinstance(errors[0], DatasetError) and says in str(errors[0]) and "X.parquet" in str(errors[0]), errors[0]

    refused("there is no column 'label' but indices, values, name", label=None)
    refused("double>, not a list of integers per sample", indices=pa.array([[1.0]] * 3))
    refused("the column 'values' is double, not a list of numbers", values=pa.array([1.0] * 3))
    refused("sample 0: there are 1 indices and 2 values", indices=pa.array([[1]] * 3), values=pa.array([[1.0, 2.0]] * 3))
    refused("sample 1: there are no indices", indices=pa.array([[1], None, [1]]), values=pa.array([[1.0], None, [1.0]]))
    refused("are null", indices=pa.array([[1]] * 3), values=pa.array([[None]] * 3, pa.list_(pa.float32())))
    refused("sample 2: there is no label", label=pa.array([1.0, 2, None]))
    refused("sample 1: the label is nan", label=pa.array([1.0, float("nan"), 2]))
    refused("sample 0: index 50 is not below the 50 features", indices=pa.array([[50]] * 3), values=pa.array([[1.0]] * 3))
    (tmp_path / "X.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DatasetError, match=r"cannot read .*X\.parquet"):
        load(tmp_path / "X.parquet", comm=sar.SERIAL)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "X.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DatasetError, match=r"install sparseallreduce\[parquet\]"):
        load(tmp_path / "X.parquet", comm=sar.SERIAL)




@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_the_hash_is_murmur_hash_3(seed):
    rng = np.random.default_rng(0)
    for length in (*range(20), 100):
        word = rng.bytes(length)
        assert kernels.murmur3(np.frombuffer(word, np.uint8), 0, length, seed) == murmurhash3_bytes_u32(word, seed)


VW = """\
1 2.0 'tag|a x y:2 z:0 3 |b:0.5 x 12:3 |12 7 x | plain 5 :1.5 :2 |a :3 :4
1 |a cat:red
-1 0.5 0.1 tag|f a#b:2 \u00e9
1 |a a a:2

-1\t|a  x\t y:-1e-3 \r
1 |ns:1.23456789012345678e0 x:2 |
1 third|ns:3
"""

#: As vw 9.11 prints them with --noconstant -b 18: (index, value) of each sample, and label and importance.
HASHED = [
    ({55432: 1, 42847: 2, 92597: 1, 1009084850 % 2**18: 3, 1009084851 % 2**18: 4, 143313: 0.5, 163343: 1.5, 19: 1, 98015: 1, 256121: 1}
     | {5: 1, 0: 1.5, 1: 2}, 1, 2),
    ({225151: 1}, 1, 1),
    ({83090: 2, 238967: 1}, -1, 0.5),
    ({128920: 3}, 1, 1),
    ({55432: 1, 42847: -1e-3}, -1, 1),
    (None, 1, 1),
    ({}, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("suffix", [".vw", ".vw.gz"])
def test_features_are_hashed_as_vw_does(tmp_path, ranks, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(VW.encode()) if suffix.endswith("gz") else VW.encode())
    parts = on_ranks(ranks, lambda comm: load(path, comm=comm)[0])
    rows, labels = joined(parts)
    assert rows.shape == (7, 2**18)
    weights = np.concatenate([part.weights for part in parts])
    for row, (features, label, weight) in zip(range(7), HASHED, strict=True):
        inside = slice(*rows.indptr[row : row + 2])
        found = dict(zip(rows.indices[inside].tolist(), rows.data[inside].tolist()))
        if features is not None:
            assert found == {index: np.float32(value) for index, value in features.items()}
        assert (labels[row], weights[row]) == (label, weight)
    assert rows.data[slice(*rows.indptr[5:7])].tolist() == [np.float32(1.23456789012345678 * 2)]


def test_vw_itself_reads_the_same(tmp_path):
    pyvw = pytest.importorskip("vowpalwabbit.pyvw")
    rng = np.random.default_rng(1)
    words = ["x", "12", "a-b", "\u00fc", "007", "99999999999", "long" * 9, "\U0001f600"]
    lines = []
    for _ in range(200):
        parts = []
        for _ in range(rng.integers(1, 4)):
            namespace = rng.choice(["", "ns", "42", "ns2:0.25"])
            features = [f"{word}{rng.choice(['', ':2', ':-.5', ':1e2', ':red'])}" for word in rng.choice(words, rng.integers(0, 5))]
            parts.append(f"|{namespace} {' '.join(features)}")
        lines.append(f"{rng.choice(['1 ', '-1 0.5 ', '1 3 t', '1 tag'])}{' '.join(parts)}")
    (tmp_path / "a.vw").write_text("\n".join(lines))
    ours = load(tmp_path / "a.vw", comm=sar.SERIAL, hash_bits=10)[0].to_scipy().tocsr()
    vw = pyvw.Workspace("--quiet -b 10 --noconstant")
    for row, line in enumerate(lines):
        example = vw.parse(line)
        theirs = np.zeros(1024)
        for namespace in range(example.num_namespaces()):
            for place in range(example.num_features_in(namespace)):
                theirs[example.feature(namespace, place) % 1024] += example.feature_weight(namespace, place)
        vw.finish_example(example)
        np.testing.assert_allclose(ours[[row]].toarray()[0], theirs, rtol=1e-6, err_msg=line)


@pytest.mark.parametrize(
    "line,says",
    [
        ("1 2 3", "there is no | before the features: '1 2 3'"),
        ("x |a b", "the label 'x' is not a number"),
        ("|a b", "there is no label"),
        ("1 -2 |a b", "the importance '-2' is below 0"),
        ("nan |a b", "the label 'nan' is not a number"),
        ("1e999 |a b", "the label '1e999' is too large for float64"),
        ("1 2 3 4 |a b", "'4' is more than label, importance, base and tag"),
        ("1 |a b: c", "the feature 'b:' has no number"),
        ("1 |a :x", "the feature ':x' has no number"),
        ("1 |a:x b", "the weight of the namespace 'a:x' is not a finite number"),
        ("1 |a: b", "the weight of the namespace 'a:' is not a finite number"),
        ("1 |a b:1e39", "a value is too large for float32"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_malformed_line_is_named(tmp_path, monkeypatch, line, says, ranks):
    monkeypatch.setattr(line_blocks, "_BLOCK", 50)
    (tmp_path / "a.vw").write_text("1 |a b\n" * 20 + line + "\n" + "1 |a b\n" * 20)
    errors = on_ranks(ranks, lambda comm: load(tmp_path / "a.vw", comm=comm))
    assert {str(error) for error in errors} == {str(errors[0])}
    assert f"a.vw, line 21: {says}" in str(errors[0])


def test_importances_weigh_samples_and_cannot_be_converted(tmp_path):
    text = "".join(f"{label} {weight} |a x:{x}\n" for label, weight, x in [(1, 3, 1), (-1, 1, 1), (-1, 1, -1)])
    (tmp_path / "weighted.vw").write_text(text)
    (tmp_path / "repeated.vw").write_text("1 |a x:1\n" * 3 + "-1 |a x:1\n-1 |a x:-1\n")
    for name in ("weighted", "repeated"):
        given = ("train", tmp_path / f"{name}.vw", "--batch-size", 10, "--epochs", 20, "--hash-bits", 5)
        command(*given, "--model-out", tmp_path / f"{name}.npz", "--json", tmp_path / f"{name}.json")
    one, other = (load_model(tmp_path / f"{name}.npz") for name in ("weighted", "repeated"))
    np.testing.assert_allclose(one.weights, other.weights, rtol=1e-5)
    losses = [json.loads((tmp_path / f"{name}.json").read_text())["epochs"][-1]["loss"] for name in ("weighted", "repeated")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    with pytest.raises(DatasetError, match="sample 0 of rank 0 has the importance 3, but the binary format has none"):
        convert(tmp_path / "weighted.vw", tmp_path / "a.csr", sar.SERIAL)



TEXTS = ["a good, GOOD film", "bad", "", "caf\u00e9 \U0001f600 na\u00efve", "tab\tin the text"]


@pytest.mark.parametrize("ranks", RANKS)
def test_text_is_hashed_as_scikit_learn_does(tmp_path, ranks):
    labels = [1, -1, 2.5, 0, 1]
    (tmp_path / "a.tsv").write_text("".join(f"{label}\t{text}\n" for label, text in zip(labels, TEXTS)) + "\n")
    expected = HashingVectorizer(n_features=2**12, dtype=np.float32).transform(TEXTS)
    expect(read(tmp_path / "a.tsv", ranks, hash_bits=12), expected, labels)


@pytest.mark.parametrize(
    "line,says",
    [
        (b"1 no tab", "there is no tab between label and text: '1 no tab'"),
        (b"x\ttext", "the label 'x' is not a finite number"),
        (b"\ttext", "the label '' is not a finite number"),
        (b"1e999\ttext", "the label '1e999' is not a finite number"),
        (b"1\t\xff", "invalid start byte of UTF-8"),
    ],
)
def test_malformed_text_is_named(tmp_path, line, says):
    (tmp_path / "a.tsv").write_bytes(b"1\ta\n" * 3 + line + b"\n")
    with pytest.raises(DatasetError) as caught:
        load(tmp_path / "a.tsv", comm=sar.SERIAL)
    assert f"a.tsv, line 4: {says}" in str(caught.value)




def test_format_and_the_number_of_features_overrule_the_name(tmp_path):
    (tmp_path / "a.txt").write_text("1 |a x\n-1 |a y\n")
    assert load(tmp_path / "a.txt", comm=sar.SERIAL, format="vw")[0].features == 2**18
    assert load(tmp_path / "a.txt", comm=sar.SERIAL, format="vw", n_features=1024)[0].features == 1024
    with pytest.raises(DatasetError, match="features hashed to 18 bits are 262144, not 1000: give a power of two"):
        load(tmp_path / "a.txt", comm=sar.SERIAL, format="vw", n_features=1000)
    with pytest.raises(DatasetError, match="features hashed to 4 bits are 16, not 1024: leave one of the two out"):
        load(tmp_path / "a.txt", comm=sar.SERIAL, format="vw", n_features=1024, hash_bits=4)
    with pytest.raises(DatasetError, match="there is no format 'arff': choose one of svmlight, binary"):
        load(tmp_path / "a.txt", comm=sar.SERIAL, format="arff")
    with pytest.raises(DatasetError, match="is not in the binary format, but format is binary"):
        load(tmp_path / "a.txt", comm=sar.SERIAL, format="binary")


@pytest.mark.parametrize("name", ["a.npz", "a.parquet", "a.vw", "a.tsv"])
def test_convert_takes_all_of_them_and_predict_what_was_trained_on(tmp_path, name):
    X, y = matrix(60, 32)
    if name == "a.npz":
        scipy.sparse.save_npz(tmp_path / name, X)
        np.save(tmp_path / "a.labels.npy", y)
    elif name == "a.parquet":
        parquet(tmp_path / name, X, y)
    else:
        bar = {"a.vw": " |", "a.tsv": "\t"}[name]
        words = [" ".join(f"w{index}" for index in X.indices[slice(*X.indptr[row : row + 2])]) for row in range(60)]
        (tmp_path / name).write_text("".join(f"{int(label)}{bar} {text}\n" for label, text in zip(y, words)))
    bits = ("--hash-bits", 9) if name in ("a.vw", "a.tsv") else ()
    command("convert", tmp_path / name, tmp_path / "a.csr", *bits)
    for data in (tmp_path / name, tmp_path / "a.csr"):
        extra = bits if data.name == name else ()
        command("train", data, *extra, "--epochs", 3, "--model-out", tmp_path / f"{data.name}.model")
        command("predict", tmp_path / f"{data.name}.model", data, "--out", tmp_path / f"{data.name}.out")
    assert (tmp_path / f"{name}.out").read_text() == (tmp_path / "a.csr.out").read_text()
    one, other = (load_model(tmp_path / f"{each}.model").weights for each in (name, "a.csr"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("ranks", RANKS)
def test_standard_input_is_shared_by_the_ranks(tmp_path, monkeypatch, ranks, compress):
    monkeypatch.setattr(line_blocks, "_BLOCK", 64)
    X, y = matrix()
    text = io.BytesIO()
    dump_svmlight_file(X, y, text, zero_based=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(compress(text.getvalue()))))
    rows, labels = read("-", ranks, n_features=50)
    np.testing.assert_allclose(rows.toarray(), X.toarray(), rtol=1e-6)
    np.testing.assert_array_equal(labels, y)


def test_commands_take_standard_input(tmp_path):
    text = "1 1:1 2:0.5\n-1 2:1\n" * 30
    (tmp_path / "a.svm").write_text(text)
    command("train", "-", "--epochs", 3, "--model-out", tmp_path / "a.npz", input=text)
    command("train", tmp_path / "a.svm", "--epochs", 3, "--model-out", tmp_path / "b.npz")
    np.testing.assert_array_equal(load_model(tmp_path / "a.npz").weights, load_model(tmp_path / "b.npz").weights)
    command("convert", "-", tmp_path / "a.csr", input=text)
    command("predict", tmp_path / "a.npz", "-", "--out", tmp_path / "out", input=text)
    refused = command("train", "-", input="1 1:1\n1 x:1\n", status=1)
    assert refused.stderr.strip() == "Error: standard input, line 2: the index 'x' is not a whole number: '1 x:1'"
    assert "can be read only once" in command("train", "-", "--test", "-", input=text, status=2).stderr
    assert "pipes are only for text" in command("train", "-", "--format", "npz", input=text, status=1).stderr




def test_a_zero_based_test_file_follows_the_training_file(tmp_path):
    (tmp_path / "train.svm").write_text("1 0:1 2:1\n-1 1:1\n")
    (tmp_path / "test.svm").write_text("1 2:1\n")  # no index 0 in it
    for ranks in (1, 2):
        for zero_based in ("yes", "auto"):

            def load_both(comm, how=zero_based):
                return load(tmp_path / "train.svm", tmp_path / "test.svm", comm=comm, zero_based=how)

            parts = on_ranks(ranks, load_both)
            assert [part[0].zero_based for part in parts] == [True] * ranks
            assert [index for part in parts for index in part[1].indices.tolist()] == [2]
            assert {part[0].features for part in parts} == {3}
    (tmp_path / "one.svm").write_text("1 1:1\n")
    assert load(tmp_path / "one.svm", comm=sar.SERIAL, zero_based="auto")[0].indices.tolist() == [0]
    assert load(tmp_path / "one.svm", comm=sar.SERIAL, zero_based="yes")[0].indices.tolist() == [1]
    (tmp_path / "test_zero.svm").write_text("1 0:1\n")
    with pytest.raises(DatasetError, match=r"test_zero\.svm, line 1: index 0, but indices count from 1; .* use zero_based=True"):
        load(tmp_path / "one.svm", tmp_path / "test_zero.svm", comm=sar.SERIAL, zero_based="auto")


def test_predict_counts_indices_as_the_training_file_did(tmp_path):
    (tmp_path / "train.svm").write_text("1 0:1\n-1 1:1\n" * 20)
    (tmp_path / "test.svm").write_text("-1 1:1\n")
    command("train", tmp_path / "train.svm", "--zero-based", "auto", "--epochs", 3, "--model-out", tmp_path / "m.npz")
    assert "accuracy 1.0000" in command("predict", tmp_path / "m.npz", tmp_path / "test.svm", "--out", tmp_path / "out").output
    said = command("predict", tmp_path / "m.npz", tmp_path / "test.svm", "--zero-based", "no", "--out", tmp_path / "out").output
    assert "accuracy 0.0000" in said
