"""Data sets of several files: folders of parts, patterns, lists and pipes hold the same samples as one file, on any number of ranks."""

import bz2
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import dump_svmlight_file
from thoroughness import examples
from thread_ranks import joined, on_ranks

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.data_cache import DataCache
from sparseallreduce.linear import DatasetError, load, load_model
from sparseallreduce.linear.data import line_blocks
from sparseallreduce.linear.data.convert import convert

COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}
COLUMNS = ("indptr", "indices", "values", "labels", "features", "total_samples", "names")


def lines(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    return [f"{row % 2} " + " ".join(f"{index}:{row + 1}" for index in np.flatnonzero(rng.random(9) < 0.4) + 1) for row in range(rows)]


def text(rows=60):
    return ("\n".join(lines(rows)) + "\n").encode()


def read(data, ranks=1, **options):
    """Return the samples of all ranks as an array, their labels, their weights and the names of features."""
    parts = on_ranks(ranks, lambda comm: load(data, comm=comm, **options)[0])
    rows, labels = joined(parts)
    weights = [np.ones(part.rows) if part.weights is None else part.weights for part in parts]
    return rows.toarray(), labels, np.concatenate(weights), parts[0].names


def expect_alike(found, expected):
    for one, other in zip(found, expected):
        np.testing.assert_array_equal(one, other)


def command(*arguments, status=0, **options):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    assert result.exit_code == status, result.output + str(result.stderr)
    return result


def part(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


@contextmanager
def fifo(path, content):
    """A named pipe that somebody writes into as soon as it is read."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(content,), daemon=True)
    writer.start()
    yield path
    writer.join(10)
    assert not writer.is_alive()


@settings(max_examples=examples(40))
@given(
    cuts=st.lists(st.integers(0, 60), max_size=6),
    ranks=st.integers(1, 5),
    kinds=st.lists(st.sampled_from(["", ".gz", ".bz2"]), min_size=7, max_size=7),
    block=st.sampled_from([16, 100, 1 << 20]),
    ends=st.booleans(),
)
def test_a_file_that_is_cut_at_ends_of_lines_is_the_same_data_set(tmp_path_factory, cuts, ranks, kinds, block, ends):
    folder = tmp_path_factory.mktemp("cut")
    bounds = [0, *sorted(cuts), 60]
    for number, (begin, end, kind) in enumerate(zip(bounds, bounds[1:], kinds)):
        content = "\n".join(lines()[begin:end]) + ("\n" if ends else "")
        part(folder / "parts" / f"part-{number:05}{kind}", COMPRESSORS[kind](content.encode()))
    whole = part(folder / "whole.svm", text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_blocks, "_BLOCK", block)
        expect_alike(read(folder / "parts", ranks), read(whole))


def test_the_names_of_a_data_set_all_mean_the_same(tmp_path):
    content = text()
    cut = content.index(b"\n", 300) + 1
    parts = [part(tmp_path / "parts" / f"part-0000{number}", piece) for number, piece in enumerate((content[:cut], content[cut:]))]
    for noise in ("_SUCCESS", "_committed_17", ".part-00000.crc", "._SUCCESS.crc"):
        part(tmp_path / "parts" / noise, b"" if noise == "_SUCCESS" else b"{no samples}")
    whole = part(tmp_path / "whole.svm", content)
    pattern = f"{tmp_path}/parts/*"
    for data in (tmp_path / "parts", pattern, parts, tuple(map(str, parts)), f"{tmp_path}/part?", [parts[0], f"{tmp_path}/parts/*1"]):
        for ranks in (1, 3):
            expect_alike(read(data, ranks), read(whole))
    expect_alike(read([*parts, tmp_path / "parts" / "_SUCCESS"]), read(whole))
    assert load(parts, comm=sar.SERIAL)[0].source == f"{parts[0]} and {parts[1]}"
    assert load(parts[::-1], comm=sar.SERIAL)[0].values[0] != load(parts, comm=sar.SERIAL)[0].values[0]  # the order of a list is kept


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path):
    part(tmp_path / "a[1].svm", b"1 1:1\n")
    part(tmp_path / "a1.svm", b"1 2:1\n")
    assert load(tmp_path / "a[1].svm", comm=sar.SERIAL)[0].indices.tolist() == [0]
    assert load(tmp_path / "a[12].svm", comm=sar.SERIAL)[0].indices.tolist() == [1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_makes_no_data_set_is_refused_on_every_rank(tmp_path, ranks):
    (tmp_path / "nested" / "inner").mkdir(parents=True)
    part(tmp_path / "mixed" / "a.svm", b"1 1:1\n")
    part(tmp_path / "mixed" / "b.vw", b"1 |a b\n")
    part(tmp_path / "bad" / "part-0", b"1 1:1\n")
    part(tmp_path / "bad" / "part-1", b"1 1:1\n\n1 2:x\n")
    (tmp_path / "only").mkdir()
    part(tmp_path / "only" / "_SUCCESS", b"")
    for data, says in (
        (tmp_path / "nested", "it contains folders, such as .*inner: name those to read, or use a pattern like .*nested/"),
        (tmp_path / "mixed", r"a\.svm has the format svmlight and .*b\.vw the format vw, but the files of a data set must have the same"),
        (tmp_path / "bad", r"bad/part-1, line 3: the value 'x' of index 2 is not a number: '1 2:x'"),
        (tmp_path / "only", "only: it contains no files"),
        (f"{tmp_path}/x*", "there is no file that matches .*x"),
        ([], "the list of files is empty"),
        ([tmp_path / "bad" / "part-0", tmp_path / "gone"], "cannot read .*gone: No such file"),
    ):
        errors = on_ranks(ranks, lambda comm, data=data: load(data, comm=comm))
        assert len({str(error) for error in errors}) == 1
        with pytest.raises(DatasetError, match=says):
            raise errors[-1]


def test_ranks_that_see_different_files_all_say_so(tmp_path):
    part(tmp_path / "0" / "a", b"1 1:1\n")
    for name in "abc":
        part(tmp_path / "1" / name, b"1 1:1\n")
    errors = on_ranks(2, lambda comm: load(tmp_path / str(comm.rank), comm=comm))
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "ranks see different files: rank 0 finds 1 files and rank 1 3" in str(errors[0])


@pytest.mark.parametrize("parts, readers", [(8, 4), (5, 1), (2, 1)])
def test_compressed_parts_are_read_by_all_ranks_if_they_can_be_shared_evenly(tmp_path, monkeypatch, parts, readers):
    for number in range(parts):
        part(tmp_path / "parts" / f"{number}.gz", gzip.compress(text()))
    reading = set()
    monkeypatch.setattr(line_blocks, "_own", spying(line_blocks._own, reading))
    rows = [part.rows for part in on_ranks(4, lambda comm: load(tmp_path / "parts", comm=comm)[0])]
    assert (len(reading) > 1) == (readers > 1)
    assert max(rows) < 1.3 * sum(rows) / 4


def spying(function, threads):
    def noting(*arguments):
        threads.add(threading.get_ident())
        return function(*arguments)

    return noting


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_pipe_is_read_once_and_shared(tmp_path, ranks):
    expected = read(part(tmp_path / "whole.svm", text()), zero_based="auto")
    with fifo(tmp_path / "pipe", text()) as pipe:
        expect_alike(read(pipe, ranks, zero_based="auto"), expected)  # goes over it twice
    with fifo(tmp_path / "packed", gzip.compress(text())) as pipe:
        expect_alike(read(pipe, ranks), expected)
    cut = text().index(b"\n", 300) + 1
    part(tmp_path / "rest.svm", text()[cut:])
    with fifo(tmp_path / "first", text()[:cut]) as pipe:
        expect_alike(read([pipe, tmp_path / "rest.svm"], ranks), expected)
    with fifo(tmp_path / "a.vw", b"1 |a b\n-1 |a c\n") as pipe:
        assert read(pipe, ranks)[0].shape == (2, 2**18)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_pipe_cannot_do_is_said(tmp_path, ranks):
    os.mkfifo(tmp_path / "pipe")  # nobody writes: who reads it waits for ever
    for call in (
        lambda comm: load([tmp_path / "pipe", tmp_path / "pipe"], comm=comm),
        lambda comm: load(tmp_path / "pipe", tmp_path / "pipe", comm=comm),
    ):
        errors = on_ranks(ranks, call)
        assert {str(error) for error in errors} == {f"{tmp_path}/pipe is a pipe and can be read once, but is named twice: " + REMEDY}
    with pytest.raises(DatasetError, match="standard input, -, is a pipe and can be read once"):
        load("-", "/dev/stdin", comm=sar.SERIAL)
    with pytest.raises(DatasetError, match=r"cannot read /dev/fd/987: No such file or directory; .* pipes of the shell: .* name that, -"):
        load("/dev/fd/987", comm=sar.SERIAL)
    with (
        fifo(tmp_path / "b.npz", b"PK\x03\x04" + bytes(99)) as pipe,
        pytest.raises(DatasetError, match=r"cannot read .*b\.npz as npz: pipes are only for text"),
    ):
        load(pipe, comm=sar.SERIAL)


REMEDY = "write its content to a file"


def test_the_shell_gives_pipes_to_commands(tmp_path):
    part(tmp_path / "a.svm", text())
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash here")
    run = f"{sys.executable} -m sparseallreduce convert"
    script = f"{run} <(cat {tmp_path}/a.svm) {tmp_path}/a.csr && {run} {tmp_path}/a.svm {tmp_path}/b.csr"
    done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.csr").read_bytes() == (tmp_path / "b.csr").read_bytes()


@pytest.mark.parametrize("kind", ["npz", "parquet", "csr", "vw", "tsv"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_other_formats_may_have_parts_too(tmp_path, kind, ranks):
    sizes = [7, 0, 1, 12] if kind != "csr" else [7, 1, 12]
    rng = np.random.default_rng(0)
    matrices = [scipy.sparse.random_array((rows, 9 + rows), density=0.3, rng=rng, format="csr").astype(np.float32) for rows in sizes]
    (tmp_path / "parts").mkdir()
    for number, X in enumerate(matrices):
        y = np.arange(X.shape[0]) % 2 + number / 4
        write_part(tmp_path / "parts" / f"part-{number}.{kind}", kind, X, y)
    options = {"hash_bits": 6} if kind in ("vw", "tsv") else {"n_features": 21}
    rows, labels, *_ = read(tmp_path / "parts", ranks, **options)
    np.testing.assert_array_equal(labels, np.concatenate([np.arange(rows) % 2 + number / 4 for number, rows in enumerate(sizes)]))
    if kind in ("npz", "parquet", "csr"):
        np.testing.assert_array_equal(rows, np.vstack([np.pad(X.toarray(), ((0, 0), (0, 21 - X.shape[1]))) for X in matrices]))
    else:
        alone = [read(path, **options)[0] for path in sorted((tmp_path / "parts").iterdir()) if path.stat().st_size]
        np.testing.assert_array_equal(rows, np.vstack(alone))
    if kind in ("npz", "csr"):
        assert load(tmp_path / "parts", comm=sar.SERIAL)[0].features == 21


def write_part(path, kind, X, y):
    if kind == "npz":
        scipy.sparse.save_npz(path, X)
        np.save(path.with_name(f"{path.stem}.labels.npy"), y)
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        lists = {"indices": X.indices, "values": X.data}
        columns = {name: pa.ListArray.from_arrays(X.indptr.astype(np.int32), flat) for name, flat in lists.items()}
        parquet.write_table(pa.table({"label": y} | columns), path)
    elif kind == "csr":
        source = path.with_suffix(".svm")
        dump_svmlight_file(X, y, str(source), zero_based=False)
        convert(source, path, sar.SERIAL, n_features=X.shape[1])
        source.unlink()
    else:
        bar = {"vw": " |", "tsv": "\t"}[kind]
        path.write_text("".join(f"{label}{bar} w{row} w{row % 3}\n" for row, label in enumerate(y)))


def test_parts_come_by_way_of_a_cache(tmp_path):
    content = text()
    cut = content.index(b"\n", 300) + 1
    part(tmp_path / "parts" / "a", content[:cut])
    part(tmp_path / "parts" / "b", content[cut:])
    whole = part(tmp_path / "whole.svm", content)
    for _ in range(2):
        expect_alike(read(tmp_path / "parts", 2, cache=DataCache(tmp_path / "cache")), read(whole))


def test_progress_adds_up_to_the_bytes_of_all_parts(tmp_path):
    for number in range(3):
        part(tmp_path / "plain" / f"{number}", text())
        part(tmp_path / "packed" / f"{number}.gz", gzip.compress(text()))
    for folder in ("plain", "packed"):
        size = sum(file.stat().st_size for file in (tmp_path / folder).iterdir())
        for ranks in (1, 2, 3):
            seen = []
            on_ranks(ranks, lambda comm, folder=folder, seen=seen: load(tmp_path / folder, comm=comm, progress=seen.append))
            assert sum(seen) == size


def test_commands_take_parts_in_every_form(tmp_path):
    content = text()
    cut = content.index(b"\n", 300) + 1
    a, b = part(tmp_path / "parts" / "part-0", content[:cut]), part(tmp_path / "parts" / "part-1", content[cut:])
    whole = part(tmp_path / "whole.svm", content)
    given = ("--epochs", 2, "--json", tmp_path / "run.json")
    command("train", whole, "--model-out", tmp_path / "whole.npz", *given)
    expected = load_model(tmp_path / "whole.npz").weights
    for number, data in enumerate([(a, b), (tmp_path / "parts",), (f"{tmp_path}/parts/part-*",)]):
        out = tmp_path / f"{number}.npz"
        said = command("train", *data, "--test", f"{tmp_path}/parts/*", "--model-out", out, *given).output
        np.testing.assert_array_equal(load_model(out).weights, expected)
        assert "60 samples" in said
        arguments = json.loads((tmp_path / "run.json").read_text())["arguments"]
        assert arguments["data"] == ([str(a), str(b)] if number == 0 else str(data[0]))
        command("predict", out, *data, "--out", tmp_path / f"{number}.out")
        command("convert", *data, tmp_path / f"{number}.csr")
    command("predict", tmp_path / "whole.npz", whole, "--out", tmp_path / "whole.out")
    command("convert", whole, tmp_path / "whole.csr")
    for number in range(3):
        assert (tmp_path / f"{number}.out").read_text() == (tmp_path / "whole.out").read_text()
        assert (tmp_path / f"{number}.csr").read_bytes() == (tmp_path / "whole.csr").read_bytes()


def test_what_the_shell_makes_of_a_pattern_behind_test_is_no_training_data(tmp_path):
    a, b, c = (part(tmp_path / name, text()) for name in "abc")
    for words in ((a, "--test", b, c), ("--test", b, c, a), ("--test", b, c, "--epochs", 1, a), (a, b, "--epochs", 1, c)):
        said = command("train", *words, status=2).stderr
        assert "it is not clear which of" in said and "are DATA" in said
        assert ("give --test a pattern in quotes" in said) == ("--test" in words)
    command("train", a, b, "--test", c, "--epochs", 1)
    command("train", "--epochs", 1, a, b, f"--test={c}")
    command("train", f"--test={c}", a, b, "--epochs", 1)


def test_convert_does_not_take_samples_for_its_result(tmp_path):
    a, b, c = (part(tmp_path / name, text()) for name in "abc")
    for words in ((a, b), (a, b, c)):
        assert f"OUT, {words[-1]}, already exists and is not in the binary format" in command("convert", *words, status=2).stderr
    assert [path.read_bytes() for path in (a, b, c)] == [text()] * 3
    command("convert", a, b, tmp_path / "out.csr")
    command("convert", a, b, tmp_path / "out.csr")  # again


def test_standard_input_has_several_names(tmp_path, monkeypatch):
    expected = read(part(tmp_path / "a.svm", text()))
    for name in ("-", "/dev/stdin", "/dev/fd/0"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text())))
        expect_alike(read(name, 2), expected)
    refused = command("train", "-", "-", input="1 1:1\n", status=2)
    assert "can be read only once" in refused.stderr
