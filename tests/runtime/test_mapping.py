"""Files in memory that ranks share: all ranks have them, or none; reserved before they are used, and gone with the last array."""

import gc
import os
import secrets
from pathlib import Path

import pytest

from sparseallreduce.algorithms.steps import Share
from sparseallreduce.runtime.memory import mapping
from sparseallreduce.runtime.memory.mapping import PAGE, SharedFile, shared_memory


def told(generators):
    """Carry out schedules that share alone, and return what they return."""
    steps, results = [next(generator) for generator in generators], []
    while len(results) < len(generators):
        assert all(isinstance(step, Share) for step in steps)
        said, steps = [step.record for step in steps], []
        for generator in generators:
            try:
                steps.append(generator.send(said))
            except StopIteration as stop:
                results.append(stop.value)
    return results


def test_what_one_rank_writes_into_shared_memory_the_others_read():
    memories = told([shared_memory(rank, 1000) for rank in range(3)])
    assert [len(memory) for memory in memories] == [1000] * 3
    assert not any(memory.any() for memory in memories)
    memories[1][17] = 5
    assert [memory[17] for memory in memories] == [5] * 3


@pytest.mark.parametrize("culprit", [0, 2])
def test_without_memory_on_one_rank_no_rank_has_any(culprit, monkeypatch):
    generators = [shared_memory(rank, 1000) for rank in range(3)]
    name = "memfd_create" if culprit == 0 else "open"
    original, calls = getattr(os, name), []

    def fails(*args, **kwargs):
        calls.append(args)
        if culprit == 0 or len(calls) == culprit:
            raise OSError("no such thing here")
        return original(*args, **kwargs)

    monkeypatch.setattr(os, name, fails)
    assert told(generators) == [None] * 3
    assert calls


def test_memory_of_another_process_is_not_taken_for_ours(monkeypatch):
    """As a path of the process file system may lead to in a container that numbers its own."""
    many = iter(bytes([number]) * 16 for number in range(10))
    monkeypatch.setattr(secrets, "token_bytes", lambda _: next(many))
    first, other = told([shared_memory(0, 500)] * 1), shared_memory(0, 500)
    assert first[0] is not None
    path = next(other).record
    stranger = shared_memory(1, 500)
    next(stranger)
    stranger.send([path[:64] + bytes([99]) * 16])
    with pytest.raises(StopIteration) as stop:
        stranger.send([b"\1", b"\1"])
    assert stop.value.value is None


def test_a_file_of_another_process_is_not_even_opened(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(500) + bytes([99]) * 16)
    with open(tmp_path / "file", "r+b") as file:
        stranger = shared_memory(1, 500)
        next(stranger)
        monkeypatch.setattr(os, "open", None)
        stranger.send([f"/proc/{os.getpid()}/fd/{file.fileno()}".encode().ljust(64, b"\0") + bytes([99]) * 16])
        with pytest.raises(StopIteration) as stop:
            stranger.send([b"\1", b"\1"])
    assert stop.value.value is None


def test_memory_is_reserved_before_any_rank_has_it(monkeypatch):
    left = 10**12
    monkeypatch.setattr(mapping, "memory_left", lambda: left)
    memories = told([shared_memory(rank, 100_000) for rank in range(2)])
    assert all(memory is not None for memory in memories)
    left = 1000
    assert told([shared_memory(rank, 100_000) for rank in range(3)]) == [None] * 3


def test_without_address_space_on_one_rank_no_rank_has_any(monkeypatch):
    original, calls = SharedFile.map, []

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no address space")
        return original(*args, **kwargs)

    monkeypatch.setattr(SharedFile, "map", fails)
    assert told([shared_memory(rank, 1000) for rank in range(3)]) == [None] * 3


def test_rows_lie_side_by_side_in_memory_whatever_lies_between_them():
    file = os.memfd_create("rows")
    os.ftruncate(file, 20 * PAGE)
    memory = SharedFile(file, 20 * PAGE)
    rows = memory.map([2 * PAGE, 7 * PAGE, 11 * PAGE], 2 * PAGE)
    assert rows.flags.c_contiguous and rows.shape == (3, 2 * PAGE)
    for number, row in enumerate(rows, 1):
        row[:] = number
    whole = memory.map([0], 20 * PAGE, writeable=False)[0].reshape(20, PAGE)
    assert [int(page[0]) for page in whole] == [0, 0, 1, 1, 0, 0, 0, 2, 2, 0, 0, 3, 3, *[0] * 7]
    with pytest.raises(ValueError, match="WRITEABLE"):
        whole.flags.writeable = True


def test_memory_in_large_pages_is_taken_by_who_has_mapped_it(monkeypatch):
    """Where the system gives them by advice, which reserving does not take."""
    file, (begin, nbytes) = os.memfd_create("large"), (3 * PAGE, 5 << 20)
    os.ftruncate(file, 16 << 20)
    memory = SharedFile(file, 16 << 20)
    monkeypatch.setattr(mapping, "_gives_large_pages", lambda: True)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    assert memory.reserve([(begin, nbytes)])
    assert memory.taken() >= nbytes


@pytest.mark.parametrize(("text", "given"), [("always [advise] never", True), ("always advise [never]", False), (None, False)])
def test_whether_large_pages_are_given_by_advice(text, given, tmp_path, monkeypatch):
    if text is not None:
        (tmp_path / "shmem_enabled").write_text(text)
    monkeypatch.setattr(mapping, "_LARGE_PAGES", tmp_path / "shmem_enabled")
    assert mapping._gives_large_pages() == given


def test_files_are_closed_and_mappings_gone_with_the_last_array():
    """A communicator that is given back leaves neither a descriptor nor address space."""

    def kept():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:sparseallreduce")

    files, mappings = kept()
    memories = told([shared_memory(rank, 1 << 22) for rank in range(3)])
    assert kept() == (files, mappings + 3)
    view = memories[0][5:7]
    del memories
    assert kept() == (files, mappings + 1)
    assert view.tolist() == [0, 0]
    del view
    assert kept() == (files, mappings)
