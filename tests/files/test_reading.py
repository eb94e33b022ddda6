"""The readers beneath all files of the library: regular files, bounded bytes, JSON of bounded depth, arrays of checked sizes."""

import io
import json
import sys

import numpy as np
import pytest
from strange import archive, put

from sparseallreduce.checked_file import Damaged, open_regular, parse_json, read_bytes, read_json
from sparseallreduce.checked_npz import Npz


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"four")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"four"
    for what in ("pipe", "folder", "device", "loop"):
        put(tmp_path / what, what)
        with pytest.raises(OSError) as raised, open_regular(tmp_path / what):
            pass
        assert raised.value.filename == str(tmp_path / what) and raised.value.strerror


def test_files_longer_than_any_of_their_kind_are_not_read(tmp_path):
    (tmp_path / "file").write_bytes(b"[1]")
    assert (read_bytes(tmp_path / "file", 3), read_json(tmp_path / "file", 3)) == (b"[1]", [1])
    with pytest.raises(Damaged, match="it has 3 bytes, and no file of its kind has more than 2"):
        read_bytes(tmp_path / "file", 2)
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(Damaged, match="it has 1,099,511,627,776 bytes"):
        read_bytes(tmp_path / "file", 1 << 20)


@pytest.mark.parametrize(
    "text", ['["' + "[" * 5000 + '"]', '["\\"' + "[" * 5000 + '"]', "[" + "[],{}," * 5000 + "1]", '"' + "\\\\" * 3000 + '"']
)
def test_brackets_that_are_not_inside_each_other_are_no_depth(text):
    assert parse_json(text.encode()) == json.loads(text)


def test_json_is_refused_by_its_depth_whatever_the_limit_of_recursion():
    """Which a program may have raised, and then Python's parser would run out of stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1 << 22)
    try:
        for text in (b"[" * 500_000, b'{"a":' * 500_000, b'"\\"' + b"[" * 500_000, b'"",' + b"[" * 500_000):
            with pytest.raises(Damaged):
                parse_json(text)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_as_numpy_reads_them(save):
    given = {
        "matrix": np.arange(6).reshape(2, 3),
        "by columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "word": np.array("word"),
        "words": np.array(["a", "bc", ""]),
        "bytes": np.array([b"ab"]),
        "nothing": np.empty((0, 3), np.float32),
        "number": np.float64(3),
        "other order": np.arange(3, dtype=">i4"),
        "complex": np.array([1j]),
        "true": np.array([True, False]),
        "large": np.arange(1 << 19),
    }
    file = io.BytesIO()
    save(file, **given)
    read = Npz(file)
    assert read.names == list(given)
    for name, array in given.items():
        found = read.array(name)
        assert found.dtype == array.dtype.newbyteorder("=") and found.shape == array.shape
        np.testing.assert_array_equal(found, array)


def test_headers_may_be_written_as_others_write_them():
    for header in (
        b"{'shape': (3,), 'fortran_order': False, 'descr': '<f4'}",
        b'{"descr": "<f4", "fortran_order": False, "shape": (3,)}   \n',
        b"{'descr':'<f4','fortran_order':False,'shape':(3L,),}\n",
        b"{'descr': '<f4', 'fortran_order': True, 'shape': ( 3 , )}",
    ):
        array = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + np.float32([1, 2, 3]).tobytes()
        assert Npz(io.BytesIO(archive({"a": array}))).array("a").tolist() == [1, 2, 3]
