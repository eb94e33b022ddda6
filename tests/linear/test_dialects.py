"""What people's files of samples look like: marks, compressions, labels with weights, names of classes; and what is refused by name."""

import bz2
import gzip
import io
import lzma
import math
import pickle
import sys
import tarfile
import zipfile

import numpy as np
import pytest
from click_runner import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import DatasetError, load, load_model, numbered_classes, two_classes
from sparseallreduce.linear.data import line_blocks
from sparseallreduce.linear.data.binary.writer import write_binary
from sparseallreduce.linear.data.convert import convert
from sparseallreduce.linear.data.generate import generate
from sparseallreduce.linear.data.labels import weighted_by_class

MARK = b"\xef\xbb\xbf"
COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
NAMED = b"spam 1:1 3:0.5\nham 2:1\nspam 1:2\nham 2:0.5 3:1\n" * 10


def written(folder, content, name="a.svm"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def shares(path, ranks=1, **options):
    parts = on_ranks(ranks, lambda comm: load(path, comm=comm, **options)[0])
    for part in parts:
        if isinstance(part, Exception):
            raise part
    return parts


def column(parts, name):
    return np.concatenate([getattr(part, name) for part in parts]).tolist()


def refused(path, ranks=1, **options):
    errors = on_ranks(ranks, lambda comm: load(path, comm=comm, **options))
    assert all(type(error) is DatasetError for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert str(path) in str(errors[0]) and "\n" not in str(errors[0])
    return str(errors[0])


def command(*arguments, status=0, **options):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    assert result.exit_code == status, result.output + result.stderr
    return result


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_byte_order_mark_is_skipped(tmp_path, suffix, ranks):
    texts = {"a.svm": b"1 1:1\n-1 2:1\n1 3:1\n", "a.vw": b"1 |a b\n-1 |a c\n1 |a d\n", "a.tsv": b"1\tone\n-1\ttwo\n1\tthree\n"}
    for name, text in texts.items():
        marked = shares(written(tmp_path, COMPRESSORS[suffix](MARK + text), f"marked_{name}{suffix}"), ranks)
        plain = shares(written(tmp_path, COMPRESSORS[suffix](text), f"plain_{name}{suffix}"), ranks)
        for each in ("labels", "indices", "values"):
            assert column(marked, each) == column(plain, each)
    assert "line 2: the value 'x'" in refused(written(tmp_path, COMPRESSORS[suffix](MARK + b"1 1:1\n1 1:x\n"), f"bad.svm{suffix}"), ranks)


def test_a_file_of_a_mark_alone_has_no_samples_and_a_mark_inside_is_an_error(tmp_path):
    assert "no samples in it" in refused(written(tmp_path, MARK), 2)
    assert "line 2: the label '\\xef\\xbb\\xbf1' is not a number" in refused(written(tmp_path, b"1 1:1\n" + MARK + b"1 1:1\n"))
    assert "is not a name" in refused(written(tmp_path, b"spam 1:1\n" + MARK + b"spam 1:1\n"))


@settings(max_examples=examples(30))
@given(blanks=st.lists(st.sampled_from([" ", "  ", "\t", " \t "]), min_size=3, max_size=3), end=st.sampled_from(["\n", " \r\n", ""]))
def test_blanks_behind_a_colon_are_skipped(tmp_path_factory, blanks, end):
    folder = tmp_path_factory.mktemp("blanks")
    features = " ".join(f"{index}:{blank}{index / 4}" for index, blank in enumerate(blanks, 1))
    (part,) = shares(written(folder, f"1 {features}{end}"))
    assert (part.indices.tolist(), part.values.tolist()) == ([0, 1, 2], [0.25, 0.5, 0.75])


def zstd(content, **options):
    return pytest.importorskip("zstandard").ZstdCompressor(**options).compress(content)


@pytest.mark.parametrize("ranks", [1, 3])
def test_zstandard_is_decompressed(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(line_blocks, "_BLOCK", 64)
    text = b"".join(b"%d 1:%d\n" % (row % 2, row) for row in range(2000))
    half = text.index(b"\n", len(text) // 2) + 1
    for content in (zstd(text), zstd(text[:half]) + zstd(text[half:]), zstd(text, write_checksum=True), zstd(text) + zstd(b"")):
        for name in ("a.svm.zst", "a.svm"):  # its first bytes say so
            assert column(shares(written(tmp_path, content, name), ranks), "values") == list(range(2000))
    assert shares(written(tmp_path, zstd(b"1 |a b\n"), "a.vw.zst"))[0].features == 2**18
    assert "no samples in it" in refused(written(tmp_path, zstd(b""), "empty.zst"), ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_zstandard_is_refused(tmp_path, ranks):
    text = b"".join(b"%d 1:%d\n" % (row % 2, row * 7919 % 9973) for row in range(2000))
    whole = zstd(text, write_checksum=True)
    for cut in (6, len(whole) // 2, len(whole) - 1):
        assert "ended before the end-of-stream marker" in refused(written(tmp_path, whole[:cut], "cut.zst"), ranks)
    assert "cannot read" in refused(written(tmp_path, whole + b"more", "more.zst"), ranks)
    for place in (len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        assert "cannot read" in refused(written(tmp_path, bytes(damaged), "damaged.zst"), ranks)


def test_generate_compresses_by_zstandard(tmp_path):
    pytest.importorskip("zstandard")
    for suffix in ("", ".zst"):
        generate("uniform", tmp_path / f"a.svm{suffix}", samples=30, features=20)
    assert (tmp_path / "a.svm.zst").read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    one, other = (shares(tmp_path / f"a.svm{suffix}")[0] for suffix in ("", ".zst"))
    assert one.values.tolist() == other.values.tolist()


def test_without_zstandard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    says = refused(written(tmp_path, b"\x28\xb5\x2f\xfd" + bytes(20), "a.svm.zst"), 2)
    assert says.endswith("a.svm.zst: .zst needs zstandard: install sparseallreduce[zstd]")
    with pytest.raises(DatasetError, match=r"install sparseallreduce\[zstd\]"):
        generate("uniform", tmp_path / "b.svm.zst", samples=3, features=20)


def archive(kind):
    """An archive with a file of samples in it."""
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as file:
            file.writestr("a.svm", "1 1:1\n")
    else:
        with tarfile.open(fileobj=out, mode=f"w:{kind}") as file:
            entry = tarfile.TarInfo("a.svm")
            entry.size = 6
            file.addfile(entry, io.BytesIO(b"1 1:1\n"))
    return out.getvalue()


TEXT = "1 1:0.5 2:1\n-1 3:1\n"


NO_TEXT = [
    ("a.zip", archive("zip"), "a zip archive: unpack it, and give the files in it"),
    ("a.svm", archive("zip"), "a zip archive: unpack it"),
    ("a.tar.gz", archive("gz"), "a tar archive: unpack it"),
    ("a.svm.gz", archive("gz"), "a tar archive: unpack it"),
    ("a.tgz", archive("gz"), "a tar archive: unpack it"),
    ("a.tar.bz2", archive("bz2"), "a tar archive: unpack it"),
    ("a.txz", archive("xz"), "a tar archive: unpack it"),
    ("a.tar", archive(""), "a tar archive: unpack it"),
    ("a.svm", archive(""), "a tar archive: unpack it"),
    ("a.tgz", gzip.compress(TEXT.encode()), "a tar archive: unpack it"),  # by its name
    ("a.7z", b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(50), "a 7z archive: unpack it"),
    ("a.svm", b"7z\xbc\xaf\x27\x1c\0\x04" + bytes(50), "a 7z archive: unpack it"),
    ("a.rar", b"Rar!\x1a\x07\x01\0" + bytes(50), "a RAR archive: unpack it"),
    ("a.svm.Z", b"\x1f\x9d\x90" + bytes(50), "compressed by compress: decompress it, or compress it by gzip"),
    ("a.svm.lz4", b"\x04\x22\x4d\x18" + bytes(50), "compressed by lz4: decompress it"),
    ("a.svm.br", TEXT, "compressed by brotli: decompress it"),
    ("a.svm", b"PAR1\x15\x04" + bytes(50), "a Parquet file: give it a name that ends in .parquet"),
    ("a.dat", b"PK\x03\x04" + bytes(26) + b"data.npy" + bytes(50), "a file of NumPy's arrays: give it a name that ends in .npz"),
    ("a.npy", b"\x93NUMPY\x01\0" + bytes(50), "an array of NumPy: write compressed rows"),
    ("a.h5", b"\x89HDF\r\n\x1a\n" + bytes(50), "an HDF5 file: write its samples as svmlight text"),
    ("a.csr.gz", gzip.compress(b"\x89SAR\r\n\x1a\n" + bytes(200)), "our binary format, compressed: decompress it"),
    ("a.svm", TEXT.encode("utf-16"), "text in UTF-16: write it in UTF-8, as by iconv -f UTF-16 -t UTF-8"),
    ("a.vw", TEXT.encode("utf-16"), "text in UTF-16: write it in UTF-8"),
    ("a.tsv", TEXT.encode("utf-16"), "text in UTF-16: write it in UTF-8"),
    ("a.svm", b"\xfe\xff" + TEXT.encode("utf-16-be"), "text in UTF-16: write it in UTF-8"),
    ("a.svm", TEXT.encode("utf-16-le"), "text in UTF-16LE: write it in UTF-8"),
    ("a.svm", TEXT.encode("utf-16-be"), "text in UTF-16BE: write it in UTF-8"),
    ("a.svm.gz", gzip.compress(TEXT.encode("utf-16")), "text in UTF-16: write it in UTF-8"),
    ("a.svm", TEXT.encode("utf-32"), "text in UTF-32: write it in UTF-8"),
]


@pytest.mark.parametrize("number", range(len(NO_TEXT)), ids=lambda number: f"{NO_TEXT[number][0]}-{number}")
def test_what_is_no_text_is_refused_by_name(tmp_path, number):
    name, content, says = NO_TEXT[number]
    path = written(tmp_path, content, name)
    for ranks in (1, 2):
        assert refused(path, ranks).startswith(f"cannot read {path}: it is {says}")
    with pytest.raises(DatasetError, match="it is "):
        convert(path, tmp_path / "out.csr", sar.SERIAL)
    assert f"it is {says}" in command("train", path, status=1).stderr


def test_text_with_a_word_that_files_begin_with_is_text(tmp_path):
    for word in ("ORC", "PAR1", "LZIP"):
        assert shares(written(tmp_path, f"{word} 1:1\nelf 2:1\n"))[0].names == tuple(sorted((word, "elf")))
    assert shares(written(tmp_path, TEXT, "text.zip"), format="svmlight")[0].rows == 2  # who says so is believed


def test_the_option_is_named_as_the_caller_writes_it(tmp_path):
    path = written(tmp_path, "1 0:1\n-1 1:1\n")
    text = f"{path}, line 1: index 0, but indices count from 1; if they count from 0 in this file, use {{}}: '1 0:1'"
    assert refused(path) == refused(path, 2) == text.format("zero_based=True")
    for call in (lambda: load(path, comm=sar.SERIAL), lambda: convert(path, tmp_path / "out.csr", sar.SERIAL)):
        with pytest.raises(DatasetError) as caught:
            call()
        assert str(pickle.loads(pickle.dumps(caught.value))) == text.format("zero_based=True")
        assert pickle.loads(pickle.dumps(caught.value)).at_command_line == text.format("--zero-based")
    for words in (("train", path), ("convert", path, tmp_path / "out.csr")):
        assert command(*words, status=1).stderr == f"Error: {text.format('--zero-based')}\n"
    assert load(path, comm=sar.SERIAL, zero_based=True)[0].indices.tolist() == [0, 1]
    assert "index 0, but" in refused(path, zero_based=False)
    convert(path, tmp_path / "out.csr", sar.SERIAL, zero_based=True)
    assert "--format is npz" in command("train", tmp_path / "out.csr", "--format", "npz", status=1).stderr


@pytest.mark.parametrize("word", ["nan", "NaN", "-nan", "inf", "+Inf", "-INF", "infinity", "-Infinity"])
def test_values_of_vowpal_wabbit_that_are_not_finite_are_errors(tmp_path, word):
    path = written(tmp_path, f"1 |a x:1\n-1 |a b c:{word} d\n", "a.vw")
    assert f"line 2: the value of the feature 'c:{word}' is not finite" in refused(path, 2)
    for line in (f"1 |a:{word} b\n", f"1 |a :{word}\n", f"1 {word} |a b\n", f"{word} |a b\n"):
        assert "line 1: " in refused(written(tmp_path, line, "b.vw"))


def test_other_words_are_categories_as_in_vowpal_wabbit(tmp_path):
    text = "".join(f"1 |a x:{word}\n" for word in ("nano", "info", "1x", "1e", "-", "infinit", "0x1f", "i"))
    assert shares(written(tmp_path, text, "a.vw"))[0].values.tolist() == [1] * 8


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_weights_behind_labels_are_weights_of_samples(tmp_path, ranks, suffix):
    text = "# XGBoost\n1:2.5 1:1 2:2\n0:0.5 2:1 # text\n1:1 3:1\n0:0\n+1:1e-1 qid:3 1:1\n"
    parts = shares(written(tmp_path, COMPRESSORS[suffix](text.encode()), f"a.svm{suffix}"), ranks)
    assert column(parts, "weights") == [2.5, 0.5, 1, 0, 0.1]
    assert column(parts, "labels") == [1, 0, 1, 0, 1]
    assert column(parts, "indices") == [0, 1, 1, 2, 0]


def test_training_counts_samples_by_these_weights(tmp_path):
    weighted, repeated = written(tmp_path, "-1:3 1:1\n1:1 1:1\n1:2 2:1\n" * 9, "w.svm"), "-1 1:1\n" * 3 + "1 1:1\n" + "1 2:1\n" * 2
    repeated = written(tmp_path, repeated * 9, "r.svm")
    for path in (weighted, repeated):
        command("train", path, "--update", "sgd", "--batch-size", 1000, "--epochs", 20, "--model-out", tmp_path / f"{path.stem}.npz")
    one, other = (load_model(tmp_path / f"{name}.npz").weights for name in "wr")
    np.testing.assert_allclose(one, other, rtol=1e-4)
    assert "accuracy" in command("predict", tmp_path / "w.npz", weighted, "--out", tmp_path / "out").output
    with pytest.raises(DatasetError, match="sample 0 of rank 0 has the importance 3, but the binary format has none"):
        convert(weighted, tmp_path / "a.csr", sar.SERIAL)
    with pytest.raises(DatasetError, match="has the importance 3"):
        write_binary(tmp_path / "a.csr", load(weighted, comm=sar.SERIAL)[0], sar.SERIAL)


@pytest.mark.parametrize(
    "text, says",
    [
        ("1:2 1:1\n0 1:1\n", "line 1: the label '1:2' is not a number"),
        ("1 1:1\n0:2 1:1\n", "line 2: the label '0:2' is not a number"),
        ("-1:1 1:1\n1:-2 1:1\n", "line 2: the weight '-2' of the label is below 0"),
        ("-1:1 1:1\n1:nan 1:1\n", "line 2: the weight 'nan' of the label is not a finite number"),
        ("-1:1 1:1\n1: 2:1\n", "line 2: the weight '' of the label is not a finite number"),
        ("-1:1 1:1\n1:2:3 2:1\n", "line 2: the label '1:2' is not a number"),
        ("-1:1 1:1\nnan:2 2:1\n", "line 2: the label 'nan' is not finite"),
        ("1:0.5 3:1\n2:1 7:1\n", "'1:0.5' may be a label and its weight, or the first feature of a sample without a label"),
        ("0:0.5 3:1\n2:1 7:1\n", "may be a label and its weight, or the first feature of a sample without a label"),
        ("qid:1 3:1\n", "line 1: the label 'qid:1' is not a number"),
    ],
)
def test_labels_with_weights_that_are_wrong_or_may_be_features_are_refused(tmp_path, text, says):
    for ranks in (1, 3):
        assert says in refused(written(tmp_path, text), ranks)


@settings(max_examples=examples(40))
@given(rows=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5, unique=True), min_size=1, max_size=8))
def test_samples_without_labels_are_never_taken_for_labels_with_weights(tmp_path_factory, rows):
    text = "".join(" ".join(f"{index}:0.5" for index in sorted(row)) + "\n" for row in rows)
    refused(written(tmp_path_factory.mktemp("unlabelled"), text))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_names_are_classes_in_the_order_of_letters(tmp_path, ranks, suffix):
    parts = shares(written(tmp_path, COMPRESSORS[suffix](NAMED), f"a.svm{suffix}"), ranks)
    assert {part.names for part in parts} == {("ham", "spam")}
    assert column(parts, "labels") == [1, 0, 1, 0] * 10
    assert np.concatenate([part.named_labels for part in parts if part.rows]).tolist() == ["spam", "ham"] * 20

    def coded(comm):
        train = load(tmp_path / f"a.svm{suffix}", comm=comm)[0]
        (two, classes), (numbered, same) = two_classes(train, comm), numbered_classes(train, comm)
        assert classes == same == ("ham", "spam") and two.names is numbered.names is None
        counts = weighted_by_class(train, {"spam": 3.0}, comm).weights
        return two.labels, numbered.labels, counts, weighted_by_class(train, "balanced", comm).weights

    labels, numbers, counts, balanced = (np.concatenate(each).tolist() for each in zip(*on_ranks(ranks, coded)))
    assert (labels, numbers, counts, balanced) == ([1, -1] * 20, [1, 0] * 20, [3, 1] * 20, [1] * 40)


@settings(max_examples=examples(30))
@given(
    words=st.lists(st.sampled_from(["a", "b_2", "caf\u00e9", "Z", "__label__x", "\u65e5\u672c", "x-1", "nano"]), min_size=1, max_size=15),
    ranks=st.integers(1, 4),
    weighted=st.booleans(),
)
def test_names_are_read_as_they_stand(tmp_path_factory, words, ranks, weighted):
    text = "".join(f"{word}{':2' if weighted else ''} 1:{row}\n" for row, word in enumerate(words))
    parts = shares(written(tmp_path_factory.mktemp("names"), text), ranks)
    assert [name for part in parts if part.rows for name in part.named_labels.tolist()] == words
    assert parts[0].names == tuple(sorted(set(words)))
    assert column(parts, "values") == list(range(len(words)))
    if weighted:
        assert column(parts, "weights") == [2] * len(words)


@pytest.mark.parametrize(
    "text, says",
    [
        ("spam 1:1\n1 1:1\n", "line 2: the label '1' is a number, but the first one, 'spam', is a name: labels are all numbers or all"),
        ("1 1:1\nspam 1:1\n", "line 2: the label 'spam' is not a number"),
        ("spam 1:1\nnan 1:1\n", "line 2: the label 'nan' is not a name"),
        ("nan 1:1\n", "line 1: the label 'nan' is not finite"),
        ("a,b 1:1\n", "line 1: the label 'a,b' is not a number"),
        ("spam 1:1\na,b 1:1\n", "line 2: the label 'a,b' is not a name"),
        ("spam 1:1\nham:2 1:1\n", "line 2: the label 'ham:2' is not a name"),
        (b"spam 1:1\nh\xff 1:1\n", "line 2: the label 'h\\xff' is not a name"),
        (b"spam 1:1\nh\x00m 1:1\n", "line 2: the label 'h\\x00m' is not a name"),
        ("spam 1:x\n", "line 1: the value 'x' of index 1 is not a number"),
        ("hello world\n", "line 1: 'world' is not of the form index:value"),
    ],
)
def test_labels_are_all_numbers_or_all_names(tmp_path, text, says):
    for ranks in (1, 3):
        assert says in refused(written(tmp_path, text), ranks)


@pytest.mark.parametrize("name, text", [("a.svm", NAMED), ("a.tsv", b"spam\tbuy now\nham\tsee you\n" * 20)])
def test_predict_writes_names_back(tmp_path, name, text):
    path, three = written(tmp_path, text, name), written(tmp_path, text + text.replace(b"spam", b"news"), f"three_{name}")
    bits = ("--hash-bits", 6) if name.endswith("tsv") else ()
    for data, names in ((path, ["ham", "spam"]), (three, ["ham", "news", "spam"])):
        given = ("--test", data, "--epochs", 5, "--model-out", tmp_path / "m.npz", "--class-weight", "ham=2")
        said = command("train", data, *given, *bits).output
        assert "40 samples" in said or "80 samples" in said
        assert load_model(tmp_path / "m.npz").classes.tolist() == names
        said = command("predict", tmp_path / "m.npz", data, *bits, "--out", tmp_path / "out").output
        predicted = (tmp_path / "out").read_text().split()
        assert set(predicted) <= set(names) and len(predicted) == int(said.split()[0])
        assert "accuracy" in said
        if len(names) == 2:
            assert predicted == [line.split(maxsplit=1)[0] for line in text.decode().splitlines()] and "accuracy 1.0000" in said
    header = command("predict", tmp_path / "m.npz", path, *bits, "--probabilities").stdout.splitlines()[0]
    assert header == "labels ham news spam"
    numbers = written(tmp_path, text.replace(b"spam", b"1").replace(b"ham", b"0"), f"numbers_{name}")
    said = command("predict", tmp_path / "m.npz", numbers, *bits, "--out", tmp_path / "out").output
    assert "no accuracy, because not all of their labels are among the model's" in said
    more = command("train", path, *bits, "--initial-model", tmp_path / "m.npz", status=1).stderr
    assert "training cannot start from" in more


def test_names_are_for_classification(tmp_path):
    path = written(tmp_path, NAMED)
    said = command("train", path, "--model", "linear", status=1).stderr
    assert "labels are names of classes, such as 'ham' and 'spam': use --model logistic or svm" in said
    assert "names the label news, but the labels are ham and spam" in command("train", path, "--class-weight", "news=2", status=2).stderr
    test = written(tmp_path, NAMED + b"news 1:1\n", "test.svm")
    assert "label news is not one of the training set's, ham and spam" in command("train", path, "--test", test, status=1).stderr
    numbers = written(tmp_path, "1 1:1\n0 2:1\n" * 9, "numbers.svm")
    assert "label 0 is not one of the training set's, ham and spam" in command("train", path, "--test", numbers, status=1).stderr
    assert "label ham is not one of the training set's, 0 and 1" in command("train", numbers, "--test", path, status=1).stderr
    said = command("convert", path, tmp_path / "o.csr", status=1).stderr
    assert "labels are names of classes, such as 'spam', but the binary format has only numbers" in said
    with pytest.raises(DatasetError, match="labels are names of classes"):
        write_binary(tmp_path / "o.csr", load(path, comm=sar.SERIAL)[0], sar.SERIAL)
    one = written(tmp_path, "spam 1:1\n", "one.svm")
    assert "a classifier needs two classes, but the labels are spam" in command("train", one, status=1).stderr
    command("train", numbers, "--model", "linear", "--features", 3, "--epochs", 1, "--model-out", tmp_path / "linear.npz")
    assert "no error, because their labels are names" in command("predict", tmp_path / "linear.npz", path, "--out", tmp_path / "out").output


def test_tabbed_text_has_names_with_blanks_and_none_where_it_is_predicted(tmp_path):
    path = written(tmp_path, "world news\ta b\nsci: tech\tb c\n", "a.tsv")
    assert shares(path, 2)[0].names == ("sci: tech", "world news")
    (part,) = shares(written(tmp_path, "\ta b\nspam\tb c\n", "b.tsv"), unlabelled=True)
    assert math.isnan(part.labels[0]) and part.labels[1] == 0 and part.names == ("spam",)
    assert "line 2: the label '' is not" in refused(written(tmp_path, "spam\tb c\n\ta b\n", "c.tsv"))


@pytest.mark.parametrize("solver", ["sgd", "cocoa"])
def test_every_solver_trains_on_names_and_weights(tmp_path, solver):
    path = written(tmp_path, NAMED.replace(b"spam ", b"spam:2 ").replace(b"ham ", b"ham:1 "))
    command("train", path, "--solver", solver, "--epochs", 5, "--model-out", tmp_path / "m.npz")
    assert "accuracy 1.0000" in command("predict", tmp_path / "m.npz", path, "--out", tmp_path / "out").output
