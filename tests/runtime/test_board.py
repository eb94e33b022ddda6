"""The board and the sums on it, seen by all ranks of one process: nobody reads what is not there, or is overwritten before it was read."""

import functools
import gc
import os
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce.algorithms.steps import Share
from sparseallreduce.runtime import shared
from sparseallreduce.runtime.board import CLAIMED, PREFIX, SLOTS, Board
from sparseallreduce.runtime.part_sum import Joining, PartSum
from sparseallreduce.runtime.shared import PAGE, SharedFile, claim_kernel, shared_memory

FIRST = 7


def boards(ranks, room=256, cores=16):
    memory = np.zeros(Board.nbytes(ranks, room, cores), np.uint8)
    return [Board(memory, rank, ranks, room, cores, FIRST) for rank in range(ranks)]


def texts(board, turn, length):
    return [bytes(text[:length]) for text in board.slot(turn).texts]


def test_what_all_have_posted_is_read_by_all():
    ours, theirs = boards(2)
    for turn in range(FIRST, FIRST + 3 * SLOTS):
        assert ours.slot(turn).is_free(turn)
        ours.slot(turn).post(turn, b"a%03d" % turn)
        assert not ours.slot(turn).is_complete(turn)
        assert not theirs.slot(turn).is_complete(turn, theirs.polls)
        theirs.slot(turn).post(turn, b"b%03d" % turn)
        for board in (ours, theirs):
            assert board.slot(turn).is_complete(turn)
            assert texts(board, turn, 4) == [b"a%03d" % turn, b"b%03d" % turn]
            board.slot(turn).take(turn)


def test_a_slot_is_free_when_all_have_taken():
    ours, theirs = boards(2)
    for turn in range(FIRST, FIRST + SLOTS):
        assert ours.slot(turn).is_free(turn)
        ours.slot(turn).post(turn, b"word")
        theirs.slot(turn).post(turn, b"word")
    later = FIRST + SLOTS
    ours.slot(FIRST).take(FIRST)
    assert not ours.slot(later).is_free(later)
    theirs.slot(FIRST).take(FIRST)
    assert ours.slot(later).is_free(later)
    assert theirs.slot(later).is_free(later)
    assert not ours.slot(later + 1).is_free(later + 1)


def test_a_rank_that_gave_up_without_a_word_holds_up_nobody_later():
    """It takes its turn while the others have not posted theirs yet."""
    ours, theirs = boards(2)
    theirs.slot(FIRST).take(FIRST)
    ours.slot(FIRST).post(FIRST, b"word")
    assert not ours.slot(FIRST).is_complete(FIRST)
    ours.slot(FIRST).take(FIRST)
    for turn in range(FIRST + 1, FIRST + SLOTS):
        theirs.slot(turn).take(turn)
        ours.slot(turn).take(turn)
    assert ours.slot(FIRST + SLOTS).is_free(FIRST + SLOTS)
    assert theirs.slot(FIRST + SLOTS).is_free(FIRST + SLOTS)


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**60)), st.integers(0, 2**29).map(lambda n: (4 * n, n))),
        min_size=2,
        max_size=5,
    ),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 255), min_size=5, max_size=5),
)
def test_what_a_word_says_is_what_its_text_says(said, digest, flags):
    ranks = boards(len(said))
    for board, (length, entries), flag in zip(ranks, said, flags):
        board.slot(FIRST).post_word(FIRST, True, length, flag, digest, entries)
    expected = 255
    for flag in flags[: len(said)]:
        expected &= flag
    for board in ranks:
        assert board.slot(FIRST).agreed(FIRST, 1, 255, digest, 4) == expected
        assert list(zip(board.slot(FIRST).lengths.tolist(), board.slot(FIRST).entries.tolist())) == said
        counts = [-1 if entries and length == 4 * entries else entries for length, entries in said]
        assert board.slot(FIRST).counts.tolist() == counts
        assert board.slot(FIRST).sums.tolist() == [sum(count for count in counts if count > 0), counts.count(-1)]
        assert board.slot(FIRST).agreed(FIRST, 1, 255, digest ^ 1, 4) == -1
    for text, (length, _) in zip(ranks[0].slot(FIRST).texts, said):
        assert PREFIX.unpack_from(text) == (True, length)


def test_one_channel_that_is_not_sound_is_no_agreement():
    ours, theirs = boards(2)
    ours.slot(FIRST).post_word(FIRST, True, 0, 1, 5, 3)
    theirs.slot(FIRST).post_word(FIRST, False, 0, 1, 5, 3)
    assert ours.slot(FIRST).agreed(FIRST, 1, 1, 5, 4) == -1


@st.composite
def dense_streams(draw):
    dtype = np.dtype(draw(st.sampled_from(["float32", "float64", "int32", "int64"])))
    ranks, size, width = draw(st.integers(2, 9)), draw(st.integers(1, 400)), draw(st.sampled_from([None, 3]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (size,) if width is None else (size, width)
    share = draw(st.sampled_from([0.1, 0.7, 1.0]))
    draws = [(100 * generator.standard_normal(shape)).astype(dtype) for _ in range(ranks)]
    if dtype.kind == "f":
        for array in draws:
            array[generator.random(shape) < 0.1] = generator.choice([np.nan, np.inf])
    arrays = [np.where(generator.random(shape) < share, array, dtype.type(0)) for array in draws]
    return [sar.SparseStream.from_dense(array) for array in arrays], arrays


@given(dense_streams(), st.integers(0, 8), st.integers(1, 9))
def test_a_sum_by_parts_is_added_up_in_the_order_of_the_ranks(given_streams, late, cores):
    streams, arrays = given_streams
    sums = [PartSum(board.areas[0], arrays[0].shape, arrays[0].dtype) for board in boards(len(streams), cores=cores)]
    expected = arrays[0].copy()
    for array in arrays[1:]:
        expected += array
    for turn in (FIRST, FIRST + 2):
        assert all(part_sum.area.is_free() for part_sum in sums)
        for part_sum, stream in zip(sums, streams):
            part_sum.write(stream)
        results = [Joining(part_sum, turn).result() for part_sum in sums[late:] + sums[:late]]
        assert {result.to_dense().tobytes() for result in results} == {expected.tobytes()}


@given(dense_streams(), st.integers(1, 9))
def test_ranks_at_once_claim_each_part_of_a_sum_once(given_streams, cores):
    """In threads, each on a core whenever compiled code lets it go."""
    streams, arrays = given_streams
    expected = functools.reduce(np.add, arrays)
    sums = [PartSum(board.areas[0], arrays[0].shape, arrays[0].dtype) for board in boards(len(streams), cores=cores)]
    for part_sum, stream in zip(sums, streams):
        part_sum.write(stream)
    with ThreadPoolExecutor(len(sums)) as pool:
        results = list(pool.map(lambda part_sum: Joining(part_sum, FIRST).result(1 << 30), sums))
    assert {result.to_dense().tobytes() for result in results} == {expected.tobytes()}


def test_an_area_is_free_when_all_have_joined_the_sum():
    ours, theirs = (PartSum(board.areas[1], (100,), np.dtype(np.float32)) for board in boards(2))
    stream = sar.SparseStream.from_dense(np.ones(100, np.float32))
    for part_sum in (ours, theirs):
        part_sum.write(stream)
    first, second = Joining(ours, FIRST), Joining(theirs, FIRST)
    assert first.result().nnz == 100  # who comes first adds all up
    assert not ours.area.is_free()
    assert second.result().nnz == 100
    assert ours.area.is_free()
    assert theirs.area.is_free()


def test_a_part_that_another_has_claimed_is_waited_for():
    ours, theirs = (PartSum(board.areas[0], (100,), np.dtype(np.float32)) for board in boards(2))
    stream = sar.SparseStream.from_dense(np.ones(100, np.float32))
    for part_sum in (ours, theirs):
        part_sum.write(stream)
    words, at = ours.area.terms[0], CLAIMED
    assert claim_kernel()(words, at, FIRST, 2) == 0
    assert Joining(theirs, FIRST).result(5) is None


def test_ranks_in_threads_hear_each_other():
    """With pauses of the length that the interpreter likes, many turns of words that change their length."""
    ranks, turns, heard = 3, 300, []

    def run(board, rank):
        for turn in range(FIRST, FIRST + turns):
            while not board.slot(turn).is_free(turn):
                pass
            board.slot(turn).post(turn, bytes([rank]) * (1 + (turn + rank) % 50))
            while not board.slot(turn).is_complete(turn, 50):
                pass
            heard.append([bytes(text[: 1 + (turn + other) % 50]) for other, text in enumerate(board.slot(turn).texts)])
            board.slot(turn).take(turn)

    threads = [threading.Thread(target=run, args=(board, rank)) for rank, board in enumerate(boards(ranks, cores=1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == ranks * turns
    assert all(set(text) == {rank} for said in heard for rank, text in enumerate(said))


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
    monkeypatch.setattr(shared, "memory_left", lambda: left)
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


def test_a_board_reserves_the_rows_of_vectors_as_they_are_used():
    ranks, room, cores = 3, 256, 1
    file = os.memfd_create("board")
    os.ftruncate(file, Board.nbytes(ranks, room, cores))
    memory = SharedFile(file, Board.nbytes(ranks, room, cores))
    assert memory.reserve(Board.reserved(ranks, room, cores))
    view = memory.map([0], memory.nbytes)[0]
    parts = [Board(view, rank, ranks, room, cores, FIRST, memory.reserve) for rank in range(ranks)]
    begun = memory.taken()
    assert begun < 1 << 18
    for turn, count in enumerate((1000, 100_000, 500, 300_000), FIRST):
        sums = [PartSum(board.areas[1], (count,), np.dtype(np.float32)) for board in parts]
        assert all(board.areas[1].reserve(4 * count) for board in parts)
        before = memory.taken()
        for part_sum in sums:
            part_sum.write(sar.SparseStream.from_dense(np.ones(count, np.float32)))
        assert all((Joining(part_sum, turn).result().to_dense() == ranks).all() for part_sum in sums)
        assert memory.taken() == before
    assert before >= ranks * 1_200_000
    with mock.patch.object(shared, "memory_left", return_value=0):
        assert not parts[0].areas[0].reserve(8000)
        assert parts[0].areas[1].reserve(8000)


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
    monkeypatch.setattr(shared, "_gives_large_pages", lambda: True)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    assert memory.reserve([(begin, nbytes)])
    assert memory.taken() >= nbytes


@pytest.mark.parametrize(("text", "given"), [("always [advise] never", True), ("always advise [never]", False), (None, False)])
def test_whether_large_pages_are_given_by_advice(text, given, tmp_path, monkeypatch):
    if text is not None:
        (tmp_path / "shmem_enabled").write_text(text)
    monkeypatch.setattr(shared, "_LARGE_PAGES", tmp_path / "shmem_enabled")
    assert shared._gives_large_pages() == given


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
