"""Files of the library that have become something else: pipes, devices, headers that claim too much. Nothing waits, nor takes memory."""

import json
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from click_runner import CliRunner
from strange import CLAIMS, archive, arrays_of, npy, put, zeros

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.errors import CheckpointError, DatasetError
from sparseallreduce.linear import Checkpoints, Dataset, FittedModel, load, load_model, model_file, save_model
from sparseallreduce.linear.data.binary.writer import write_binary
from sparseallreduce.linear.model_file import ModelFileError
from sparseallreduce.linear.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from sparseallreduce.runtime.stalls import TIMEOUT_VARIABLE

MODEL = FittedModel("logistic", np.float32([0.5, -2, 0]), 0.25, np.array([-1.0, 1.0]))
CHECKPOINT = Checkpoint({"model": "svm"}, {"step": 3}, {"direction": np.arange(50, dtype=np.float32), "scale": 0.5})
ROWS = {"format": b"csr", "shape": (2, 9), "indptr": [0, 1, 3], "indices": [4, 0, 7], "data": [1.0, 2.0, 3.0], "labels": [1.0, -1.0]}
PLAIN = Dataset(np.array([0, 1, 3]), np.uint32([4, 0, 7]), np.float32([1, 2, 3]), np.array([1.0, -1.0]), 9)


class Kind:
    """A kind of file: one that is good, and how it is read; what is raised has to name it."""

    name = "file"
    error: type[Exception] = DatasetError

    def __init__(self, folder):
        self.path = folder / self.name
        self.write()


class Model(Kind):
    name, error, array = "model.npz", ModelFileError, "weights"

    def write(self):
        save_model(self.path, MODEL)

    def read(self):
        return load_model(self.path).weights.tolist()


class Saved(Kind):
    name, error, array = "step-000000000003.npz", CheckpointError, "state/direction"

    def write(self):
        write_checkpoint(self.path, CHECKPOINT)

    def read(self):
        return read_checkpoint(self.path).state["direction"].tolist()


class Rows(Kind):
    name, array = "rows.npz", "data"

    def write(self):
        np.savez(self.path, **ROWS)

    def read(self):
        return load(self.path, comm=sar.SERIAL)[0].values.tolist()


class Labels(Kind):
    name = "rows.labels.npy"

    def write(self):
        np.savez(self.path.with_name("rows.npz"), **{name: value for name, value in ROWS.items() if name != "labels"})
        np.save(self.path, np.array(ROWS["labels"]))

    def read(self):
        return load(self.path.with_name("rows.npz"), comm=sar.SERIAL)[0].labels.tolist()


class Binary(Kind):
    name = "rows.csr"

    def write(self):
        write_binary(self.path, PLAIN, sar.SERIAL)

    def read(self):
        return load(self.path, comm=sar.SERIAL)[0].values.tolist()


KINDS = [Model, Saved, Rows, Labels, Binary]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
each_archive = pytest.mark.parametrize("kind", [Model, Saved, Rows], ids=lambda kind: kind.__name__)


STRANGE = ["pipe", "folder", "device", "loop", "empty"]


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """How long a rank waits for who writes into a pipe that is read as a data set: for ever otherwise, as it may be."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "0.3")


def refuse(kind):
    """Read a file that has to be refused, by an error of one line that names it."""
    with pytest.raises(kind.error) as raised:
        kind.read()
    assert str(kind.path) in str(raised.value) and "\n" not in str(raised.value)
    return str(raised.value)


@each_kind
@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, kind, what):
    one = kind(tmp_path)
    one.read()
    put(one.path, what)
    refuse(one)


@each_archive
@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_a_header_that_claims_what_is_not_there_is_refused_before_memory_is_taken(tmp_path, kind, claim, method):
    one = kind(tmp_path)
    good = arrays_of(one.path)
    for name in {one.array, next(iter(good))}:
        one.path.write_bytes(archive(good | {name: CLAIMS[claim]}, method))
        refuse(one)


@pytest.mark.parametrize("claim", CLAIMS)
def test_labels_whose_header_claims_what_is_not_there_are_refused(tmp_path, claim):
    one = Labels(tmp_path)
    one.path.write_bytes(CLAIMS[claim])
    refuse(one)


@each_archive
def test_an_array_that_unpacks_to_gigabytes_is_refused_and_one_that_nobody_asked_for_not_read(tmp_path, kind):
    one = kind(tmp_path)
    good, expected = arrays_of(one.path), one.read()
    large = zeros(80 << 20)
    one.path.write_bytes(archive(good | {one.array: large}, zipfile.ZIP_DEFLATED))
    assert one.path.stat().st_size < 1 << 20
    refuse(one)
    if kind is Rows:  # files of others have arrays of their own
        one.path.write_bytes(archive(good | {"another": large}, zipfile.ZIP_DEFLATED))
        assert one.read() == expected


@each_archive
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_an_archive_that_numpy_does_not_write_is_refused(tmp_path, kind, method):
    """One of these can unpack to a million times as many bytes, or claim a dictionary of gigabytes."""
    one = kind(tmp_path)
    one.path.write_bytes(archive(arrays_of(one.path), method))
    assert "neither stored nor deflated" in refuse(one)


@each_archive
def test_a_directory_that_claims_sizes_of_its_own_is_refused(tmp_path, kind):
    one = kind(tmp_path)
    good = one.path.read_bytes()
    places = [at for at in range(len(good)) if good.startswith(b"PK\1\2", at)]
    for at in places:
        for offset, number in ((20, 2**31), (24, 2**31), (24, 0), (42, 2**31), (46, 0xFF)):
            content = bytearray(good)
            content[at + offset : at + offset + 4] = number.to_bytes(4, "little")
            one.path.write_bytes(content)
            refuse(one)
    end = good.rindex(b"PK\5\6")
    for offset, number in ((12, 2**31), (16, 2**31), (12, 0)):
        content = bytearray(good)
        content[end + offset : end + offset + 4] = number.to_bytes(4, "little")
        one.path.write_bytes(content)
        refuse(one)


@each_archive
def test_a_file_of_holes_that_is_longer_than_memory_takes_none(tmp_path, kind):
    one = kind(tmp_path)
    content = one.path.read_bytes()
    with one.path.open("r+b") as file:
        file.truncate(1 << 42)
        file.seek((1 << 42) - len(content))
        file.write(content)
    with suppress(kind.error):  # the archive behind the hole may be read
        one.read()


def test_weights_of_more_features_than_there_is_memory_are_refused_or_sparse(tmp_path, monkeypatch):
    path = tmp_path / "model.npz"
    weights = np.zeros(600_000, np.float32)
    weights[[3, 5]] = 1
    save_model(path, FittedModel("svm", weights, 0.0, np.arange(2)))
    with np.load(path) as file:
        arrays = dict(file)
    for features in (2**40, 2**45, 2**62):
        np.savez(path, **(arrays | {"n_features": features}))
        weights = load_model(path).weights
        assert weights.shape == (1, features) and weights.indices.tolist() == [3, 5] and weights.data.tolist() == [1, 1]
        with monkeypatch.context() as patch:
            patch.setattr(model_file, "_LARGE", 2**80)
            with pytest.raises(ModelFileError, match="no memory for the weights"):
                load_model(path)


def test_models_that_were_compressed_by_others_are_read(tmp_path):
    path = tmp_path / "model.npz"
    save_model(path, MODEL)
    with np.load(path) as file:
        np.savez_compressed(path, **dict(file))
    assert load_model(path).weights.tolist() == MODEL.weights.tolist()


@pytest.mark.parametrize(
    "name,value",
    [
        ("format", np.array(["sparseallreduce linear model 1"])),
        ("format", np.float64(1)),
        ("format", np.array("x" * 100_000)),
        ("model", np.array([b"svm"])),
        ("n_features", np.array([3])),
        ("n_features", np.array("three")),
        ("n_features", np.array(3j)),
        ("parameter", np.array("x")),
        ("classes", np.array(1.0)),
        ("intercept", np.array(["a"])),
        ("weights", np.array(["a", "b", "c"])),
        ("weights", np.zeros((3, 1, 1), np.float32)),
    ],
    ids=str,
)
def test_arrays_of_a_model_that_are_something_else_are_refused(tmp_path, name, value):
    path = tmp_path / "model.npz"
    save_model(path, MODEL)
    with np.load(path) as file:
        arrays = dict(file) | {name: value}
    np.savez(path, **arrays)
    with pytest.raises(ModelFileError, match=str(path)):
        load_model(path)


ABOUT = {"layout": "sparseallreduce checkpoint 3", "identity": {}, "progress": {}, "numbers": {}, "arrays": ["state/direction"]}
ABOUTS = {
    "deep": b"[" * 100_000,
    "deep inside": b'{"layout": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
    "many digits": b'{"layout": ' + b"1" * 10_000 + b"}",
    "a list": b"[1, 2]",
    "a number": b"1",
    "no text": b"\xff\xfe",
    "empty": b"",
    "no layout": b"{}",
    "a layout that is none": json.dumps(ABOUT | {"layout": [1]}).encode(),
    "identity": json.dumps(ABOUT | {"identity": [1]}).encode(),
    "progress": json.dumps(ABOUT | {"progress": None}).encode(),
    "numbers": json.dumps(ABOUT | {"numbers": 3}).encode(),
    "arrays": json.dumps(ABOUT | {"arrays": {}}).encode(),
    "an array that is missing": json.dumps(ABOUT | {"arrays": ["state/direction", "state/last"]}).encode(),
    "an array that nobody listed": json.dumps(ABOUT | {"arrays": []}).encode(),
    "an array that is a list": json.dumps(ABOUT | {"arrays": [["state/direction"]]}).encode(),
    "an array twice": json.dumps(ABOUT | {"arrays": ["state/direction", "state/direction"]}).encode(),
}


@pytest.mark.parametrize("about", ABOUTS)
def test_a_checkpoint_that_tells_nonsense_is_damaged(tmp_path, about):
    one = Saved(tmp_path)
    good = arrays_of(one.path)
    one.path.write_bytes(archive(good | {"about": npy("|u1", f"({len(ABOUTS[about])},)", ABOUTS[about])}))
    assert "is damaged" in refuse(one)
    with pytest.raises(CheckpointError, match=r"all checkpoints in .* are damaged"):
        Checkpoints(tmp_path).prepare(sar.SERIAL, resume=True)


def test_a_checkpoint_that_lacks_an_array_is_damaged(tmp_path):
    one = Saved(tmp_path)
    good = arrays_of(one.path)
    for name in good:
        one.path.write_bytes(archive({each: content for each, content in good.items() if each != name}))
        assert "is damaged" in refuse(one)
    one.path.write_bytes(archive(good | {"state/more": npy()}))
    assert "is damaged" in refuse(one)


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_a_checkpoint_takes_the_place_of_what_is_no_file(tmp_path, what):
    path = tmp_path / "step-000000000003.npz"
    put(path, what)
    Checkpoints(tmp_path).save(3, CHECKPOINT, sar.SERIAL)
    assert path.is_file() and not path.is_symlink()
    assert read_checkpoint(path).progress == {"step": 3}


@each_kind
@pytest.mark.parametrize("what", ["pipe", "device"])
def test_commands_fail_in_one_line_that_names_the_file(tmp_path, kind, what):
    model = Model(tmp_path)
    one = kind(tmp_path)
    data = tmp_path / "rows.npz" if kind is Labels else one.path
    put(one.path, what)
    commands = {
        Model: ["predict", model.path, tmp_path / "rows.csr"],
        Saved: ["train", tmp_path / "rows.csr", "--checkpoint", tmp_path, "--resume", "--epochs", "1"],
    }
    if kind in commands:
        write_binary(tmp_path / "rows.csr", PLAIN, sar.SERIAL)
    result = CliRunner().invoke(main, list(map(str, commands.get(kind, ["train", data, "--epochs", "1"]))))
    assert result.exit_code == 1, result.output
    error = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(error) == 1 and str(one.path) in error[0]
