"""Conversion: the same bytes for any number of ranks and any compression; whole or not at all, however it ends."""

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click_runner import CliRunner
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.linear import DatasetError, load
from sparseallreduce.linear.data.convert import convert

COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def lines(count, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for label in rng.integers(0, 2, count):
        indices = np.flatnonzero(rng.random(80) < 0.2) + 1
        rows.append(" ".join([str(label), *(f"{index}:{value:.6g}" for index, value in zip(indices, rng.random(len(indices))))]))
    return ("\n".join(rows) + "\n").encode()


@pytest.fixture(scope="module")
def text():
    return lines(3000)


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    (folder / "plain.svm").write_bytes(text)
    convert(folder / "plain.svm", folder / "plain.csr", sar.SERIAL, n_features=90)
    return (folder / "plain.csr").read_bytes()


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_bytes_do_not_depend_on_ranks_or_compression(tmp_path, text, expected, suffix, ranks):
    path = tmp_path / f"in.svm{suffix}"
    path.write_bytes(COMPRESSORS[suffix](text))

    headers = on_ranks(ranks, lambda comm: convert(path, tmp_path / "out.csr", comm, n_features=90))

    assert (tmp_path / "out.csr").read_bytes() == expected
    assert len(set(map(repr, headers))) == 1
    assert headers[0].samples == 3000


def test_text_and_its_conversion_load_alike(tmp_path, text):
    (tmp_path / "in.svm").write_bytes(text)
    convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL)
    one, other = (load(tmp_path / name, comm=sar.SERIAL)[0] for name in ("in.svm", "out.csr"))
    for name in ("indptr", "indices", "values", "labels"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.features == other.features


def test_progress_adds_up_to_both_files(tmp_path, text):
    (tmp_path / "in.svm").write_bytes(text)
    read, written = [], []
    header = convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL, on_read=read.append, on_written=written.append)
    assert sum(read) == len(text)
    assert sum(written) == sum(section.length for section in header.sections.values())


@pytest.mark.parametrize("ranks", [1, 3])
def test_bad_text_leaves_nothing_and_spares_what_was_there(tmp_path, text, ranks):
    (tmp_path / "in.svm").write_bytes(text + b"1 5:x\n")
    (tmp_path / "out.csr").write_bytes(b"from before")
    errors = on_ranks(ranks, lambda comm: convert(tmp_path / "in.svm", tmp_path / "out.csr", comm))
    assert {str(error) for error in errors} == {f"{tmp_path}/in.svm, line 3001: the value 'x' of index 5 is not a number: '1 5:x'"}
    assert (tmp_path / "out.csr").read_bytes() == b"from before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.svm", "out.csr"]


def test_zero_based_indices_and_float64(tmp_path):
    (tmp_path / "in.svm").write_text("1 0:0.1 3:2\n-1 1:1e-300\n")
    convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL, zero_based=True, dtype="float64")
    read, _ = load(tmp_path / "out.csr", comm=sar.SERIAL)
    assert (read.indices.tolist(), read.features) == ([0, 3, 1], 4)
    assert np.float64(1e-300).tobytes() in (tmp_path / "out.csr").read_bytes()


def test_what_cannot_be_converted_is_refused(tmp_path, text):
    (tmp_path / "in.svm").write_bytes(text)
    convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL)
    for source, out, reason in (
        ("out.csr", "again.csr", "is in the binary format already"),
        ("in.svm", "in.svm", "it is the file to convert"),
        ("in.svm", "nowhere/out.csr", "No such file or directory"),
    ):
        with pytest.raises(DatasetError, match=reason):
            convert(tmp_path / source, tmp_path / out, sar.SERIAL)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.svm", "out.csr"]


def start(folder, *arguments, limit=None, slow=False):
    """The command in a process of its own, with a limit on the size of a file, or slow enough to be interrupted."""
    code = "import sys, time\nfrom sparseallreduce.cli import main\n"
    code += "from sparseallreduce.linear.data.binary.writer import BinaryWriter\n"
    if slow:
        code += "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background processes ignore it
        code += "append = BinaryWriter.append\n"
        code += "def late(self, block):\n    append(self, block)\n    print('appended', flush=True)\n    time.sleep(30)\n"
        code += "BinaryWriter.append = late\n"
    if limit is not None:  # MPI writes large files of its own when it starts
        code += "import resource\nfrom sparseallreduce.runtime.communicators import world\nworld()\n"
        code += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
    code += "main(sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, "convert", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])},
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, text, how):
    (tmp_path / "in.svm").write_bytes(text)
    process = start(tmp_path, "in.svm", "out.csr", slow=True)
    assert process.stdout.readline() == "appended\n"
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert errors.strip().endswith("Error: interrupted")
    assert [file.name for file in tmp_path.iterdir()] == ["in.svm"]


def test_a_killed_conversion_leaves_no_result_and_the_next_one_clears_up(tmp_path, text, expected):
    (tmp_path / "in.svm").write_bytes(text)
    process = start(tmp_path, "in.svm", "out.csr", slow=True)
    assert process.stdout.readline() == "appended\n"
    with pytest.raises(DatasetError, match="another process is writing it"):
        convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL)
    process.kill()
    process.communicate(timeout=30)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".out.csr.partial", "in.svm"]

    convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL, n_features=90)

    assert (tmp_path / "out.csr").read_bytes() == expected
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.svm", "out.csr"]


def convert_and_die(folder, doomed):
    """Convert on all ranks, of which one is killed when it has written its first samples."""
    from mpi4py import MPI

    from sparseallreduce.linear.data.binary.writer import BinaryWriter

    append = BinaryWriter.append

    def last(self, block):
        append(self, block)
        if MPI.COMM_WORLD.rank == int(doomed):
            os.kill(os.getpid(), signal.SIGKILL)

    BinaryWriter.append = last
    convert(Path(folder) / "in.svm", Path(folder) / "out.csr", MPI.COMM_WORLD)


@pytest.mark.parametrize("doomed", [0, pytest.param(1, marks=pytest.mark.release)])
def test_a_killed_rank_leaves_no_result_and_the_next_conversion_clears_up(tmp_path, text, expected, mpi_run, doomed):
    (tmp_path / "in.svm").write_bytes(text)

    ran = mpi_run(2, convert_and_die, tmp_path, doomed, check=False)

    assert ran.returncode != 0
    assert not (tmp_path / "out.csr").exists()
    convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL, n_features=90)
    assert (tmp_path / "out.csr").read_bytes() == expected
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.svm", "out.csr"]


@pytest.mark.parametrize("limit", [50_000, 200_000, 330_000])
def test_a_disk_that_is_full_leaves_nothing(tmp_path, text, limit):
    """A limit on the size of a file stands for the full disk: the first while the columns are collected, the last while they are joined."""
    (tmp_path / "in.svm").write_bytes(text)
    process = start(tmp_path, "in.svm", "out.csr", limit=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip() == "Error: cannot write out.csr: File too large"
    assert [file.name for file in tmp_path.iterdir()] == ["in.svm"]


def test_the_command_says_what_it_has_written(tmp_path, text, expected):
    (tmp_path / "in.svm.bz2").write_bytes(bz2.compress(text))
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "in.svm.bz2"), str(tmp_path / "out.csr"), "--features", "90"])
    assert result.exit_code == 0, result.output
    assert "3,000 samples, 90 features, " in result.stdout
    assert (tmp_path / "out.csr").read_bytes() == expected


@pytest.mark.parametrize("arguments,status", [(["--features", "0"], 2), (["--dtype", "int8"], 2), (["--features", "5"], 1)])
def test_bad_arguments_and_bad_data(tmp_path, text, arguments, status):
    (tmp_path / "in.svm").write_bytes(text)
    result = CliRunner().invoke(main, ["convert", str(tmp_path / "in.svm"), str(tmp_path / "out.csr"), *arguments])
    assert result.exit_code == status
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out.csr").exists()


def test_training_on_text_and_on_its_conversion_is_the_same(tmp_path, text):
    (tmp_path / "in.svm").write_bytes(text)
    convert(tmp_path / "in.svm", tmp_path / "out.csr", sar.SERIAL)
    losses = []
    for name in ("in.svm", "out.csr"):
        json_path = tmp_path / f"{name}.json"
        result = CliRunner().invoke(main, ["train", str(tmp_path / name), "--epochs", "2", "--json", str(json_path)])
        assert result.exit_code == 0, result.output
        losses.append([epoch["loss"] for epoch in json.loads(json_path.read_text())["epochs"]])
    assert losses[0] == losses[1]
