"""The binary format: what is written is read, mapped or in parts, to the bit; and the page that describes it is true."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.linear import Constant, Dataset, DatasetError, Logistic, Options, SparseStrategy, Trainer, load
from sparseallreduce.linear.data.binary import format as binary_format
from sparseallreduce.linear.data.binary import ones, pages, reader
from sparseallreduce.linear.data.binary.pages import Pages
from sparseallreduce.linear.data.binary.reader import _plan
from sparseallreduce.linear.data.binary.writer import BinaryWriter, write_binary
from sparseallreduce.linear.data.blocks import Block

COLUMNS = ("indptr", "indices", "values", "labels")


def dataset(lengths, features=1000, seed=0, values=None, labels=None):
    rng = np.random.default_rng(seed)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    indices = [np.sort(rng.choice(features, length, replace=False)) for length in lengths]
    drawn = rng.standard_normal(indptr[-1]).astype(np.float32) if values is None else np.full(indptr[-1], values, np.float32)
    labels = rng.integers(0, 2, len(lengths)) * 2.0 - 1 if labels is None else labels
    return Dataset(indptr, np.concatenate([*indices, []]).astype(np.uint32), drawn, np.array(labels, np.float64), features)


def assert_same(read, written):
    for name in COLUMNS:
        ours, theirs = getattr(read, name), getattr(written, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert (read.features, read.first_sample, read.total_samples) == (written.features, written.first_sample, written.total_samples)


def part(whole, first, last):
    begin, end = whole.indptr[[first, last]]
    return Block(whole.indptr[first : last + 1], whole.indices[begin:end], whole.values[begin:end], whole.labels[first:last])


@settings(max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=60),
    values=st.sampled_from([None, 1.0]),
    labels=st.sampled_from([None, 0.5, 300.0, -128.0]),
    ranks=st.integers(1, 5),
    block=st.sampled_from([64, 128, 1 << 20]),
)
def test_what_is_written_is_read(tmp_path_factory, lengths, values, labels, ranks, block):
    folder = tmp_path_factory.mktemp("written")
    whole = dataset(lengths, values=values, labels=None if labels is None else np.full(len(lengths), labels))
    cuts = np.linspace(0, whole.rows, ranks + 1).astype(int)

    def write(comm):
        with BinaryWriter(folder / "a.csr", comm, features=whole.features) as writer:
            for first in range(cuts[comm.rank], cuts[comm.rank + 1]):
                writer.append(part(whole, first, first + 1))
            writer.finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparseallreduce.linear.data.binary.format.BLOCK", block)
        patch.setattr("sparseallreduce.linear.data.binary.writer.BLOCK", block)
        assert on_ranks(ranks, write) == [None] * ranks

    assert_same(load(folder / "a.csr", comm=sar.SERIAL)[0], whole)
    assert [file.name for file in folder.iterdir()] == ["a.csr"]


@pytest.mark.parametrize("block", [64, 1 << 20])
def test_any_rows_are_read_from_the_blocks_that_they_lie_in(tmp_path, monkeypatch, block):
    from sparseallreduce.linear.data.binary.reader import _Rows

    monkeypatch.setattr(binary_format, "BLOCK", block)
    monkeypatch.setattr("sparseallreduce.linear.data.binary.writer.BLOCK", block)
    whole = dataset(np.arange(60) % 17, seed=3)
    write_binary(tmp_path / "a.csr", whole, sar.SERIAL)
    raw = np.fromfile(tmp_path / "a.csr", np.uint8)
    header, checksums, _ = _plan(tmp_path / "a.csr", 1)
    read = []

    def source(offset, length):
        read.append(length)
        return raw[offset : offset + length].copy()

    for first in range(0, 60, 7):
        for last in range(first, 61, 9):
            rows = _Rows(tmp_path / "a.csr", header, checksums, source)
            ours = rows.dataset(first, last, rows.indptr(first, last))
            expected = part(whole, first, last)
            np.testing.assert_array_equal(ours.indptr, expected.indptr - expected.indptr[0])
            for name in COLUMNS[1:]:
                np.testing.assert_array_equal(getattr(ours, name), getattr(expected, name))
            assert (ours.first_sample, ours.total_samples) == (first, 60)
    if block == 64:
        assert max(read) < len(raw) / 2


def test_one_process_maps_the_file_and_copies_nothing(tmp_path):
    write_binary(tmp_path / "a.csr", dataset([5] * 100, labels=[0.5] * 100), sar.SERIAL)
    read, _ = load(tmp_path / "a.csr", comm=sar.SERIAL)
    for name in COLUMNS:
        base = getattr(read, name)
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert isinstance(base, np.memmap), name


def test_ranks_get_about_the_same_number_of_non_zeros(tmp_path):
    lengths = np.r_[np.full(50, 200), np.full(1000, 3)]
    write_binary(tmp_path / "a.csr", dataset(lengths), sar.SERIAL)
    _, _, bounds = _plan(tmp_path / "a.csr", 4)
    ends = np.concatenate([[0], np.cumsum(lengths + 1)])[bounds]
    np.testing.assert_allclose(np.diff(ends), (lengths + 1).sum() / 4, atol=201)
    assert bounds[0] == 0 and bounds[-1] == 1050


def test_more_ranks_than_samples(tmp_path):
    write_binary(tmp_path / "a.csr", dataset([3, 4]), sar.SERIAL)
    _, _, bounds = _plan(tmp_path / "a.csr", 7)
    assert len(bounds) == 8 and bounds == sorted(bounds) and bounds[-1] == 2


@pytest.mark.parametrize("form,index,value,label", [("ones", 4, 0, 1), ("float32", 4, 4, 1), ("float64", 8, 8, 8)])
def test_forms_of_values_indices_and_labels(tmp_path, form, index, value, label):
    features = 2**33 if index == 8 else 50
    block = Block(
        np.array([0, 2, 3]), np.array([1, 7, features - 1]), np.array([1.0, 1.0, 1.0 if form == "ones" else 0.1]), np.array([0, 1])
    )
    if form == "float64":
        block = block._replace(labels=np.array([0.0, 1e9]))
    with BinaryWriter(tmp_path / "a.csr", sar.SERIAL, features=features, dtype="float64" if value == 8 else "float32") as writer:
        writer.append(block)
        header = writer.finish()
    assert (header.index_width, header.value_width, header.label_width) == (index, value, label)
    read, _ = load(tmp_path / "a.csr", comm=sar.SERIAL)
    kind = np.float64 if form == "float64" else np.float32
    assert (read.indices.dtype, read.values.dtype, read.labels.dtype) == (np.uint64 if index == 8 else np.uint32, kind, np.float64)
    np.testing.assert_array_equal(read.indices, block.indices)
    np.testing.assert_array_equal(read.values, block.values.astype(kind))
    np.testing.assert_array_equal(read.labels, block.labels)


def test_float64_values_stay_what_they_are_and_so_does_a_training_in_them(tmp_path):
    block = Block(np.array([0, 1, 2]), np.array([0, 1]), np.array([1.0, 1.0]), np.array([-1, 1]))
    with BinaryWriter(tmp_path / "ones.csr", sar.SERIAL, features=2, dtype="float64") as writer:
        writer.append(block)
        assert writer.finish().value_width == 8  # what is left out would be read as float32
    (tmp_path / "test.svm").write_text("1 1:0.1\n")
    train, test = load(tmp_path / "ones.csr", tmp_path / "test.svm", comm=sar.SERIAL)
    assert (train.values.dtype, test.values.dtype) == (np.float64, np.float64)
    strategy = SparseStrategy(train, sar.SERIAL)
    assert strategy.weights.to_array().dtype == np.float64


@pytest.mark.parametrize("values", [None, 1.0])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_file_larger_than_the_memory_that_is_left_is_mapped_by_every_rank(tmp_path, monkeypatch, values, ranks):
    monkeypatch.setattr(ones, "_PIECE", 4096)
    written = dataset(np.full(3000, 7), values=values)
    write_binary(tmp_path / "a.csr", written, sar.SERIAL)
    left = iter([1e12, 1000.0, 1e12])  # one rank alone is short of it
    monkeypatch.setattr(reader, "memory_left", lambda: next(left) if ranks > 1 else 1000.0)
    parts = on_ranks(ranks, lambda comm: load(tmp_path / "a.csr", comm=comm)[0])
    for part in parts:
        assert not part.indices.flags.owndata and not part.indices.flags.writeable
    for name in ("indices", "values", "labels"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(written, name))


@pytest.mark.parametrize("values", [None, 1.0])
@pytest.mark.parametrize("alone", [True, False])
def test_training_on_a_mapped_file_gives_the_same_bits(tmp_path, monkeypatch, values, alone):
    lengths = np.random.default_rng(1).integers(0, 40, 2000)
    write_binary(tmp_path / "a.csr", dataset(lengths, values=values, labels=np.where(lengths % 2, 1, -1)), sar.SERIAL)
    learned, fetched = [], []
    original = Pages.fetch
    monkeypatch.setattr(Pages, "fetch", lambda self, rows: (fetched.append(len(rows)), original(self, rows)))
    if not alone:
        monkeypatch.setattr(pages.ctypes, "CDLL", lambda _: None)  # a system without advice
    for left in (1e12, 1000.0):
        monkeypatch.setattr(reader, "memory_left", lambda left=left: left)
        strategy = SparseStrategy(load(tmp_path / "a.csr", comm=sar.SERIAL)[0], sar.SERIAL)
        list(Trainer(Logistic(), strategy, Constant(0.1), Options(2, 300)).run())
        learned.append(strategy.weights.to_array())
        assert sum(fetched) == (0 if left > 1e6 else 2 * (2000 - 300))  # all but the first step's
    np.testing.assert_array_equal(*learned)


def test_repeated_ones_take_one_piece_of_memory():
    before, shared_before = resident(), peak_of_no_file()
    many = ones.repeated_ones(250_000_000)
    assert many.sum(dtype=np.float64) == 250_000_000 and many.dtype == np.float32 and not many.flags.writeable
    assert resident() - before < 1 << 30
    assert peak_of_no_file() - shared_before < 200 << 20
    del many


def resident():
    return sum(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")) * 1024


def peak_of_no_file():
    """What this process has of memory that it shares with nobody, or of a piece that it maps again and again, in proportion."""
    return int(re.search(r"Pss: +(\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) * 1024


def test_training_and_test_set_in_different_formats_share_the_features(tmp_path):
    write_binary(tmp_path / "a.csr", dataset([3, 4], features=40), sar.SERIAL)
    (tmp_path / "b.svm").write_text("1 77:1\n")
    train, test = load(tmp_path / "a.csr", tmp_path / "b.svm", comm=sar.SERIAL)
    assert (train.features, test.features) == (77, 77)
    assert load(tmp_path / "a.csr", comm=sar.SERIAL, n_features=50)[0].features == 50


@pytest.mark.parametrize(
    "samples,message",
    [([], "there are no samples"), ([9], "index 9 is not below the 5 features")],
)
def test_what_makes_no_data_set_is_not_written(tmp_path, samples, message):
    with BinaryWriter(tmp_path / "a.csr", sar.SERIAL, features=5) as writer:
        for index in samples:
            writer.append(Block(np.array([0, 1]), np.array([index]), np.ones(1), np.ones(1)))
        with pytest.raises(DatasetError, match=message):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_the_page_about_the_format_has_a_reader_that_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "data" / "FORMAT.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    whole = dataset([3, 0, 5])
    write_binary(tmp_path / "train.csr", whole, sar.SERIAL)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    for name in COLUMNS:
        np.testing.assert_array_equal(names[name], getattr(whole, name))


def test_the_page_about_the_format_has_the_offsets_of_the_header():
    page = (Path(__file__).parents[2] / "data" / "FORMAT.md").read_text()
    rows = [tuple(map(int, row)) for row in re.findall(r"^\| (\d+) \| (\d+) \|", page, re.MULTILINE)]
    assert [offset for offset, _ in rows] == np.cumsum([0, *(size for _, size in rows[:-1])]).tolist()
    assert sum(size for _, size in rows) == binary_format.HEADER_BYTES
