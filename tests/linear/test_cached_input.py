"""The trainer's data sets by way of a cache: the same samples of every format, each piece of a file read once by all ranks of a host."""

import gzip
import json
import os
import warnings

import numpy as np
import pytest
import scipy.sparse
from click_runner import CliRunner
from sklearn.datasets import dump_svmlight_file
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.data_cache import CachedFile, DataCache
from sparseallreduce.data_cache import files as cached_files
from sparseallreduce.linear import DatasetError, load, load_model
from sparseallreduce.linear.data.binary import reader
from sparseallreduce.linear.data.convert import convert

COLUMNS = ("indptr", "indices", "values", "labels")
PIECE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(cached_files, "PIECE", PIECE)


@pytest.fixture
def fetched(monkeypatch):
    """The pieces that were read from the store."""
    numbers, real = [], CachedFile._fetched

    def noted(self, number):
        numbers.append((str(self._path), number))
        return real(self, number)

    monkeypatch.setattr(CachedFile, "_fetched", noted)
    return numbers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(0)
    X = scipy.sparse.random_array((700, 300), density=0.1, rng=rng, format="csr").astype(np.float32)
    y = np.where(rng.random(700) < 0.5, 1.0, -1.0)
    dump_svmlight_file(X, y, str(folder / "a.svm"), zero_based=False)
    (folder / "a.svm.gz").write_bytes(gzip.compress((folder / "a.svm").read_bytes(), mtime=0))
    convert(folder / "a.svm", folder / "a.csr", sar.SERIAL, n_features=300)
    scipy.sparse.save_npz(folder / "a.npz", X.tocsr(), compressed=False)
    np.save(folder / "a.labels.npy", y)
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    rows = [(X.indices[begin:end], X.data[begin:end]) for begin, end in zip(X.indptr, X.indptr[1:])]
    table = pa.table({"label": y, "indices": [row[0] for row in rows], "values": [row[1] for row in rows]})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=100)
    return folder


def same(parts, whole):
    for part in parts:
        if isinstance(part, Exception):
            raise part
        first, last = part.first_sample, part.first_sample + part.rows
        begin, end = whole.indptr[[first, last]]
        np.testing.assert_array_equal(part.indptr, whole.indptr[first : last + 1] - begin)
        np.testing.assert_array_equal(part.indices, whole.indices[begin:end])
        np.testing.assert_array_equal(part.values, whole.values[begin:end])
        np.testing.assert_array_equal(part.labels, whole.labels[first:last])
    assert sum(part.rows for part in parts) == whole.rows


@pytest.mark.parametrize("name", ["a.svm", "a.svm.gz", "a.csr", "a.npz", "a.parquet"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_samples_of_every_format_are_read_once(folder, tmp_path, fetched, name, ranks):
    path, pieces = folder / name, -(-(folder / name).stat().st_size // PIECE)
    whole, _ = load(path, comm=sar.SERIAL, n_features=300)
    for _ in range(2):
        given = {"n_features": 300, "cache": DataCache(tmp_path / "cache")}
        same(on_ranks(ranks, lambda comm, given=given: load(path, comm=comm, **given)[0]), whole)
        assert len(fetched) == len(set(fetched)) <= pieces and pieces > 3
    assert len(fetched) >= pieces - 1 or name.endswith(("npz", "parquet"))


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_large_binary_file_is_mapped_from_the_cache(folder, tmp_path, fetched, monkeypatch, ranks):
    monkeypatch.setattr(reader, "memory_left", lambda: 1)
    whole, _ = load(folder / "a.csr", comm=sar.SERIAL)
    for options in ({}, {}, {"disk_bytes": 10 * PIECE}):
        cache = DataCache(tmp_path / f"cache{options}", **options)
        parts = on_ranks(ranks, lambda comm, cache=cache: load(folder / "a.csr", comm=comm, cache=cache)[0])
        same(parts, whole)
        for part in parts:
            assert part.pages is not None
            part.pages.read_at_random()
            part.pages.fetch(np.arange(part.rows))
        assert options or len(fetched) == len(set(fetched))


def test_what_has_changed_on_the_store_is_read_anew(folder, tmp_path, fetched):
    path, cache = tmp_path / "b.svm", DataCache(tmp_path / "cache")
    for label in (1, 2, 2):
        path.write_text(f"{label} 1:1\n" * 3)
        os.utime(path, ns=(label, label))
        assert load(path, comm=sar.SERIAL, cache=cache)[0].labels.tolist() == [label] * 3
    assert len(fetched) == 2


def test_a_file_that_changes_while_it_is_read_is_an_error_of_all_ranks(folder, tmp_path, monkeypatch):
    path, real = tmp_path / "c.csr", CachedFile._fetched
    path.write_bytes((folder / "a.csr").read_bytes())

    def changing(self, number):
        if number == 9:
            os.utime(path, ns=(1, 1))
        return real(self, number)

    monkeypatch.setattr(CachedFile, "_fetched", changing)
    errors = on_ranks(3, lambda comm: load(path, comm=comm, cache=DataCache(tmp_path / "cache")))
    assert {(type(error), str(error)) for error in errors} == {(DatasetError, f"{path} has changed while it was read: begin again")}


@pytest.mark.parametrize("missing", ["none.svm", "."])
def test_what_is_no_file_is_an_error_as_without_a_cache(folder, tmp_path, missing):
    reasons = []
    for cache in (None, DataCache(tmp_path / "cache")):
        with pytest.raises(DatasetError) as raised:
            load(folder / missing, comm=sar.SERIAL, cache=cache)
        reasons.append(str(raised.value))
    assert reasons[0] == reasons[1]


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


def test_commands_take_a_cache(folder, tmp_path, fetched):
    cache = ["--cache-dir", tmp_path / "cache", "--cache-size", "0.01", "--cache-memory", "0.01"]
    for name, more in (("plain", []), ("cold", cache), ("warm", cache)):
        out = ["--json", tmp_path / f"{name}.json", "--model-out", tmp_path / f"{name}.npz"]
        run("train", folder / "a.svm", "--test", folder / "a.csr", "--epochs", "2", *out, *more)
        run("predict", tmp_path / f"{name}.npz", folder / "a.parquet", "--out", tmp_path / f"{name}.txt", *more)
        assert len(fetched) == len(set(fetched)) and bool(fetched) == bool(more)
        np.testing.assert_array_equal(load_model(tmp_path / f"{name}.npz").weights, load_model(tmp_path / "plain.npz").weights)
        assert (tmp_path / f"{name}.txt").read_bytes() == (tmp_path / "plain.txt").read_bytes()
    assert json.loads((tmp_path / "cold.json").read_text())["arguments"]["cache_dir"] == str(tmp_path / "cache")
    assert "2" in run("train", folder / "a.svm", "--cache-dir", tmp_path / "c", "--cache-size", "-1", status=2).stderr


def test_a_cache_that_cannot_be_written_to_is_a_warning(folder, tmp_path):
    (tmp_path / "cache").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples, _ = load(folder / "a.svm", comm=sar.SERIAL, cache=DataCache(tmp_path / "cache"))
    assert samples.rows == 700 and [each.category for each in caught] == [RuntimeWarning]
