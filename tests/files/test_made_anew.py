"""What can be measured or fetched again is: calibrations and entries of the DataCache that are damaged are replaced."""

import json
import shutil

import numpy as np
import pytest
from strange import put

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.data_cache import CachedFile, DataCache
from sparseallreduce.data_cache.level import Level, Name
from sparseallreduce.data_cache.samples import pack
from sparseallreduce.runtime.calibration import Calibration

CONSTANTS = Machine(*[1e-6] * len(Machine._fields))


def calibrated(folder, machine=CONSTANTS):
    """The constants that a run of this measurement goes by, which are kept."""
    calibration = Calibration("MPI", [b"here"] * 2, 2, folder)
    known = calibration.like(machine)
    if known is None:
        calibration.keep(machine)
    return known


ENTRY = CONSTANTS._asdict()
CALIBRATIONS = {
    "deep": b"[" * 100_000,
    "deep and long": b"[" * 1_000_000,
    "deep objects": b'[{"alpha":' * 50_000,
    "huge": b"[" + b"1," * (1 << 25) + b"1]",
    "a number of 400 digits": json.dumps([ENTRY]).replace("1e-06", "1" * 400).encode(),
    "a number of 5000 digits": json.dumps([ENTRY]).replace("1e-06", "1" * 5000).encode(),
    "not a number": json.dumps([ENTRY | {"alpha": float("nan")}]).encode(),
    "endless": json.dumps([ENTRY | {"alpha": float("inf")}]).encode(),
    "negative": json.dumps([ENTRY | {"alpha": -1e-6}]).encode(),
    "a word": json.dumps([ENTRY | {"alpha": "1e-6"}]).encode(),
    "true": json.dumps([ENTRY | {"alpha": True}]).encode(),
    "nothing": json.dumps([ENTRY | {"alpha": None}]).encode(),
    "a list of lists": b"[[1], [2]]",
    "a string": b'"alpha"',
    "one that is null": b"[null]",
    "null": b"null",
    "not text": b"\xff\xfe\x00",
    "more than are kept": json.dumps([ENTRY] * 1000).encode(),
}


@pytest.mark.parametrize("what", ["pipe", "device", "loop", "empty", *CALIBRATIONS])
def test_a_calibration_that_is_damaged_is_made_anew(tmp_path, what):
    assert calibrated(tmp_path) is None
    (path,) = tmp_path.iterdir()
    put(path, what, CALIBRATIONS.get(what, b""))
    assert calibrated(tmp_path) is None
    if what != "loop":
        assert calibrated(tmp_path) == CONSTANTS and path.is_file() and not path.is_symlink()


def test_a_calibration_that_cannot_be_made_anew_is_done_without(tmp_path):
    assert calibrated(tmp_path) is None
    (path,) = tmp_path.iterdir()
    put(path, "folder")
    assert calibrated(tmp_path) is None and path.is_dir()


def entries(folder):
    return [path for path in folder.glob("*/*") if len(path.parent.name) == 2]


ONE = np.arange(5)
OUTLINES = {
    "no list": {"a": 1},
    "an empty list": [],
    "a list of numbers": [1, 2],
    "an unknown word": ["what"],
    "an unknown word of an array": ["arrow", "<i8", 0],
    "an array without a dtype": ["array"],
    "an array of a dtype that is none": ["array", "x7", 5],
    "an array of objects": ["array", "|O8", 5],
    "an array of columns": ["array", "i4,i4", 5],
    "a dtype that is a number": ["array", 8, 5],
    "a length that is a word": ["array", "<i8", "5"],
    "a length below zero": ["array", "<i8", -5],
    "a length that is no whole number": ["array", "<i8", 5.0],
    "a length that is true": ["array", "<i8", True],
    "too long": ["array", "<i8", 2**45],
    "too long for 64 bits": ["array", "<i8", 2**33, 2**33],
    "too short": ["array", "<i8", 4],
    "of no length and of more": ["array", "<i8", 0, 2**70],
    "strings of no length": ["array", "<U0", 2**45],
    "a scalar of dimensions": ["scalar", "<i8", 5],
    "a scalar of no character": ["tuple", ["scalar", "<U1"], ["array", "|u1", 36]],
    "a key that is a list": ["dict", ["list", 1], 2],
    "a key without a value": ["dict", 1],
    "another object": ["list", {"a": 1}],
}


def packed(outline, behind=bytes(range(200, 255)) * 40):
    text = outline if isinstance(outline, bytes) else json.dumps(outline).encode()
    head = len(text).to_bytes(8, "little") + text
    return head + bytes(-len(head) % 64) + behind[:40]


@pytest.mark.parametrize("memory", [0, 1 << 20], ids=["disk", "memory"])
def test_an_entry_with_right_checksums_and_nonsense_inside_is_fetched_again(tmp_path, memory):
    cache = DataCache(tmp_path / "cache", memory_bytes=memory, memory=tmp_path)
    contents = [packed(outline) for outline in OUTLINES.values()]
    contents += [packed(b"[" * 50_000), packed(b'["list",' * 30_000), packed(b"1" * 5000), packed(b"\xff"), packed(b"")]
    contents += [b"", b"\1", (2**63).to_bytes(8, "little") + b"1", b"".join(pack(ONE)) + b"\0"]
    cache.get("key", lambda: ONE)
    for number, content in enumerate(contents):
        Level(tmp_path / "cache", 1 << 30).put(Name.of("key", ""), [content])
        if memory:
            cache._memory.put(Name.of("key", ""), [content])
        np.testing.assert_array_equal(cache.get("key", lambda: ONE), ONE)
        assert cache.counts.fetched == number + 2 and cache.counts.damaged == (number + 1) * (2 if memory else 1)
        np.testing.assert_array_equal(cache.get("key", lambda: "not asked for"), ONE)
    cache.close()


def test_what_is_no_sample_of_the_caller_is_fetched_again(tmp_path):
    cache = DataCache(tmp_path)
    cache.get("key", lambda: "nonsense")
    assert cache.get("key", lambda: "nonsense", check=lambda sample: isinstance(sample, str)) == "nonsense"
    np.testing.assert_array_equal(cache.get("key", lambda: ONE, check=lambda sample: isinstance(sample, np.ndarray)), ONE)
    assert cache.counts == (0, 1, 2, 1)


@pytest.mark.parametrize(
    "nonsense", ["a word", None, [1, 2], np.arange(3), np.zeros(4096, np.uint16), np.zeros((2, 2048), np.uint8)], ids=str
)
def test_a_cached_piece_of_a_file_that_is_something_else_is_read_anew(tmp_path, nonsense):
    (tmp_path / "text").write_bytes(b"1 3:0.5\n" * 100)
    for take in ("read_at", "map_at"):
        cache = DataCache(tmp_path / "cache")
        with CachedFile(tmp_path / "text", cache) as file:
            Level(tmp_path / "cache", 1 << 30).put(Name.of(file._key(0), str(file._version)), pack(nonsense))
            assert bytes(getattr(file, take)(8, 8)) == b"1 3:0.5\n"
        assert cache.counts.damaged >= 1
        shutil.rmtree(tmp_path / "cache")


def test_a_piece_is_mapped_only_where_the_entry_has_it(tmp_path):
    """What is in memory may be right where what is on the disk is not."""
    (tmp_path / "text").write_bytes(b"1 3:0.5\n" * 100)
    cache = DataCache(tmp_path / "cache", memory_bytes=1 << 20, memory=tmp_path)
    with CachedFile(tmp_path / "text", cache) as file:
        assert bytes(file.read_at(0, 8)) == b"1 3:0.5\n"
        for nonsense in (packed(["array", "|u1", 40]), b"".join(pack("a word")), (1 << 20).to_bytes(8, "little") + bytes(99)):
            Level(tmp_path / "cache", 1 << 30).put(Name.of(file._key(0), str(file._version)), [nonsense])
            assert bytes(file.map_at(8, 8)) == b"1 3:0.5\n"
    cache.close()


@pytest.mark.parametrize("what", ["pipe", "device", "loop", "empty"])
def test_an_entry_that_is_no_file_is_fetched_again(tmp_path, what):
    cache = DataCache(tmp_path)
    cache.get("key", lambda: ONE)
    (path,) = entries(tmp_path)
    put(path, what)
    np.testing.assert_array_equal(cache.get("key", lambda: ONE), ONE)
    np.testing.assert_array_equal(cache.get("key", lambda: "not asked for"), ONE)
    assert cache.counts.fetched == 2


@pytest.mark.parametrize("file", ["usage", "lock", "writing/pipe"])
@pytest.mark.parametrize("what", ["pipe", "device", "loop", "empty", "folder", "zeros", "long"])
def test_the_files_beside_the_entries_may_be_anything(tmp_path, recwarn, file, what):
    cache = DataCache(tmp_path, disk_bytes=3 * 4096)
    for key in range(3):
        cache.get(str(key), lambda: ONE)
    put(tmp_path / file, what, {"zeros": bytes(12), "long": bytes(5000)}.get(what, b""))
    cache = DataCache(tmp_path, disk_bytes=3 * 4096)
    for key in range(6):
        np.testing.assert_array_equal(cache.get(str(key), lambda: ONE), ONE)
    assert len(entries(tmp_path)) == 3
    assert not recwarn.list
