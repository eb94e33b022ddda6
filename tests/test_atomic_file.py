"""Files are there whole, or not at all: after errors, beside other writers, and on the disk."""

import ast
import errno
import os
import stat
import threading
from pathlib import Path

import pytest

import sparseallreduce as sar
from sparseallreduce.atomic_file import atomic_file, atomic_path, publish


def write(path, text):
    with atomic_file(path, "w") as file:
        file.write(text)


def begin(manager, path, error):
    """Write a part, and fail."""
    with manager(path) as target:
        if manager is atomic_file:
            target.write(b"half of it")
        else:
            target.write_bytes(b"half of it")
        raise error


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def calls(monkeypatch):
    """What is forced to the disk and renamed, in order."""
    made = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        made.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_replace(source, target):
        made.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    return made


def by_file(path, data):
    with atomic_file(path) as file:
        file.write(data)


def by_path(path, data):
    with atomic_path(path) as part:
        part.write_bytes(data)


def by_hand(path, data):
    part = path.with_name("part")
    part.write_bytes(data)
    publish(part, path)


WAYS = pytest.mark.parametrize("way", [by_file, by_path, by_hand])


@WAYS
def test_the_contents_are_on_the_disk_before_the_name_and_the_name_before_the_end(way, tmp_path, calls):
    way(tmp_path / "out.bin", b"new")
    assert calls == ["file", "rename", "folder"]
    assert (tmp_path / "out.bin").read_bytes() == b"new"
    assert names(tmp_path) == ["out.bin"]


def test_buffered_contents_are_forced_too(tmp_path, monkeypatch):
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (sizes.append(os.fstat(descriptor).st_size), fsync(descriptor)))
    write(tmp_path / "out.txt", "x" * 100)
    assert sizes[0] == 100


@WAYS
@pytest.mark.parametrize("raised", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_what_was_there_stays_when_the_end_fails(way, raised, where, tmp_path, monkeypatch):
    (tmp_path / "out.bin").write_bytes(b"old")

    def fail(*_):
        raise raised

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(type(raised)):
        way(tmp_path / "out.bin", b"new")
    assert (tmp_path / "out.bin").read_bytes() == b"old"
    if way is not by_hand:  # whose part is the caller's, to go on with
        assert names(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt, GeneratorExit, SystemExit])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("manager", [atomic_file, atomic_path])
def test_raising_in_the_middle_leaves_the_old_file_and_no_rubbish(manager, there, raised, tmp_path):
    path = tmp_path / "out.txt"
    if there:
        path.write_text("old")
    with pytest.raises(raised):
        begin(manager, path, raised)
    assert names(tmp_path) == ["out.txt"] * there
    if there:
        assert path.read_text() == "old"


def test_a_part_that_is_gone_does_not_hide_what_was_raised(tmp_path):
    def lose():
        with atomic_path(tmp_path / "out.txt") as part:
            part.unlink()
            raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        lose()
    assert names(tmp_path) == []


def test_before_the_end_nothing_is_under_the_name(tmp_path):
    with atomic_file(tmp_path / "out.txt", "w") as file:
        file.write("new")
        file.flush()
        assert not (tmp_path / "out.txt").exists()
        assert all(name.startswith(".") for name in names(tmp_path))  # no listing of results shows it
    assert (tmp_path / "out.txt").read_text() == "new"


def test_writers_at_once_leave_the_whole_file_of_one(tmp_path):
    path, begun, texts = tmp_path / "out.txt", threading.Barrier(8), [letter * 300_000 for letter in "abcdefgh"]

    def slowly(text):
        with atomic_file(path, "w") as file:
            begun.wait()
            for start in range(0, len(text), 50_000):
                file.write(text[start : start + 50_000])

    threads = [threading.Thread(target=slowly, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["out.txt"]


def test_a_writer_that_fails_beside_another_takes_nothing_of_its(tmp_path):
    with atomic_file(tmp_path / "out.txt", "w") as file:
        with pytest.raises(ValueError):
            begin(atomic_file, tmp_path / "out.txt", ValueError)
        file.write("this")
    assert (tmp_path / "out.txt").read_text() == "this"
    assert names(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000, 0o777])
@pytest.mark.parametrize("there", [True, False])
def test_permissions_are_those_of_new_files(mask, there, tmp_path):
    if there:
        (tmp_path / "out.txt").write_text("old")
    before = os.umask(mask)
    try:
        write(tmp_path / "out.txt", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out.txt").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("name", ["x" * 255, "x" * 245 + ".csr.gz", "ß" * 127, "🌲" * 63])
def test_the_longest_names_can_be_written(name, tmp_path):
    with atomic_path(tmp_path / name) as part:
        assert part.suffix == (tmp_path / name).suffix
        part.write_text("new")
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_force_folders_will_do(code, tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    write(tmp_path / "out.txt", "new")
    assert (tmp_path / "out.txt").read_text() == "new"


def test_a_folder_that_is_lost_on_its_way_to_the_disk_is_an_error(tmp_path, monkeypatch):
    fsync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "out.txt", "new")
    assert names(tmp_path) == ["out.txt"]


def test_a_relative_name_is_in_the_present_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("out.txt", "new")
    assert names(tmp_path) == ["out.txt"]


def test_where_there_is_no_folder_that_is_the_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "none" / "out.txt", "new")


def renames(source):
    """Whether a module renames files: by `os`, or as a `Path` does, to one other name."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute))
    return any(
        call.func.attr in ("replace", "rename") and (ast.unparse(call.func.value) == "os" or (len(call.args) == 1 and not call.keywords))
        for call in calls
    )


def test_the_package_renames_files_nowhere_else():
    """A second way to write and rename would lack what this one has learned; a cache, which may lose a sample, does not wait for disks."""
    package = Path(sar.__file__).parent
    found = {path.relative_to(package) for path in package.rglob("*.py") if renames(path.read_text())}
    assert found == {Path("atomic_file.py"), Path("data_cache/level.py")}


@pytest.mark.parametrize("write", [by_file, by_path])
def test_what_is_no_file_is_written_to_and_stays(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    came = []
    reader = threading.Thread(target=lambda: came.append(pipe.read_bytes()))
    reader.start()
    write(pipe, b"hello")
    reader.join(10)
    assert came == [b"hello"] and stat.S_ISFIFO(pipe.stat().st_mode)
    write(Path(os.devnull), b"hello")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert names(tmp_path) == ["pipe"]


@pytest.mark.parametrize("write", [by_file, by_path])
def test_a_link_stays_and_what_it_points_to_is_written(tmp_path, write):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for data in (b"first", b"second"):  # the link points to nothing at first
        write(tmp_path / "link", data)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file").read_bytes() == data
    assert names(tmp_path) == ["folder", "link"] and names(tmp_path / "folder") == ["file"]


def test_a_part_does_not_take_the_place_of_what_is_no_file(tmp_path):
    (tmp_path / "part").write_bytes(b"hello")
    with pytest.raises(OSError, match="no regular file"):
        publish(tmp_path / "part", Path(os.devnull))
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
