"""Each rank has a library of its own, and its kernels as Python functions do what the compiled ones do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.runtime.handshake import shared
from sparseallreduce.runtime.memory import dense, sum_parts
from sparseallreduce.runtime.memory import words as word_module
from sparseallreduce.streams.kernels.compilation import compiled_entry
from world.library import CONSTANTS, REPLACED, twin
from world.world import World

WORDS, WORD, COUNTS = types.Array(types.uint64, 1, "C"), types.uint64, types.Array(types.int64, 1, "C")


@pytest.fixture(scope="module")
def world():
    return World(2)


def test_ranks_share_no_state_of_the_library(world):
    ours, theirs = (rank.library for rank in world.ranks)
    progress = "sparseallreduce.runtime.progress"
    assert ours.load(progress).operations is not theirs.load(progress).operations
    assert ours.sar.trace is not theirs.sar.trace
    assert ours.sar.SparseStream is theirs.sar.SparseStream is sar.SparseStream
    assert ours.load("mpi4py.MPI").COMM_WORLD.rank == 0
    assert theirs.load("mpi4py.MPI").COMM_WORLD.rank == 1


def test_ranks_map_the_same_memory_each_for_itself():
    world = World(2)

    def program(rank):
        rank.sar.allreduce(sar.SparseStream([rank.number], np.ones(1, np.float32), 10), rank.comm)
        return rank.library.load("sparseallreduce.runtime.communicators").channel_of(rank.comm)

    ours, theirs = (channel.sparse_memory.rows for channel in world.run(program))
    assert ours.ctypes.data != theirs.ctypes.data
    ours[1, 5] = 77
    assert theirs[1, 5] == 77


def test_what_the_world_replaces_is_there(world):
    for name in {*CONSTANTS, *REPLACED}:
        world.ranks[0].library.load(name)  # raises for a name that is missing


def both(world, function, signature, *args):
    """The result and the arrays that a kernel leaves, compiled and as a Python function."""
    found = []
    for make in (compiled_entry, lambda dispatcher, signature: twin(world, python_of(world, dispatcher), signature)):
        given = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
        result = make(function, signature)(*given)
        found.append((result, [arg.tobytes() for arg in given if isinstance(arg, np.ndarray)]))
    return found


def python_of(world, dispatcher):
    module = world.ranks[0].library.load(dispatcher.py_func.__module__)
    return getattr(module, dispatcher.py_func.__name__)


words = st.lists(st.integers(0, 6), min_size=24, max_size=24).map(lambda numbers: np.array(numbers, np.uint64))


@given(words, st.integers(0, 7), st.integers(1, 5), st.integers(0, 4), st.integers(0, 6), st.integers(0, 3))
def test_looking_at_words(world, words, at, step, count, value, polls):
    compiled, python = both(world, word_module._all_reached, (WORDS, *(WORD,) * 6), words, at, step, count, value, polls, 0)
    assert compiled == python
    compiled, python = both(world, word_module._store_word, (WORDS, WORD, WORD), words, at, value)
    assert compiled == python


@given(words, st.integers(0, 23), st.integers(1, 3), st.integers(0, 4), st.integers(0, 3), st.integers(0, 5))
def test_claiming(world, words, at, turn, count, of, claimed):
    words[at] = of << 16 | claimed
    compiled, python = both(world, word_module._claim, (WORDS, *(WORD,) * 3), words, at, turn, count)
    assert compiled == python


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_publishing_and_agreeing(world, ranks, turn, data):
    step, published = 8, (WORDS, *(WORD,) * 8)
    rows = np.zeros(ranks * step, np.uint64)
    digests = st.sampled_from([7, 7, 7, 2**64 - 3])
    for rank in range(ranks):
        counts = data.draw(st.integers(0, 9))
        sequence, usable, valid = data.draw(st.integers(1, 3)), data.draw(st.booleans()), data.draw(st.booleans())
        length, flags = counts * data.draw(st.sampled_from([4, 12])), data.draw(st.integers(0, 255))
        args = sequence, usable, length, valid, flags, data.draw(digests)
        compiled, python = both(world, shared._publish, published, rows, rank * step, *args, counts)
        assert compiled == python
        rows = np.frombuffer(compiled[1][0], np.uint64).copy()
    heard = (WORDS, *(WORD,) * 7, COUNTS, COUNTS, COUNTS)
    arrays = [np.zeros(ranks + extra, np.int64) for extra in (0, 0, 2)]
    compiled, python = both(world, shared._agree, heard, rows, step, turn, 2, 0, 15, 7, 4, *arrays)
    assert compiled == python


@settings(max_examples=examples(30))
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.sampled_from(["float32", "int64"]), st.integers(0, 2**32))
def test_summing_vectors(world, ranks, parts, count, dtype, seed):
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    start, length = 64, 64 + 64 * dtype.itemsize
    rows = np.zeros((ranks, length), np.uint8)
    values = rows.view(dtype)
    first = start // dtype.itemsize
    values[:, first:] = rng.integers(-50, 50, values[:, first:].shape)
    size, parts = -(-max(count, 1) // (parts * 16)) * 16, min(parts, ranks)
    found = []
    kernel, signature = dense._sum_vectors, (WORDS, *(WORD,) * 4, _array(dtype, 2), *(WORD,) * 4, _array(dtype, 1))
    for entry in (compiled_entry(kernel, signature), twin(world, python_of(world, kernel), signature)):
        memory, out = rows.copy(), np.zeros(count, dtype)
        done = entry(memory.reshape(-1).view(np.uint64), length // 8, 0, parts, 0, memory.view(dtype), start, size, 3, 2, out)
        found.append((done, memory.tobytes(), out.tobytes()))
    assert found[0] == found[1]


@settings(max_examples=examples(30))
@given(st.integers(1, 3), st.integers(1, 2), st.sampled_from(["float32", "int64"]), st.integers(0, 2**32))
def test_summing_parts(world, ranks, parts, dtype, seed):
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    streams = [np.unique(rng.integers(0, 200, rng.integers(0, 25))).astype(np.uint32) for _ in range(ranks)]
    length = 64 * 8
    rows = np.zeros((ranks, length), np.uint8)
    for row, indices in zip(rows, streams):
        row.view(dtype)[: len(indices)] = rng.integers(-50, 50, len(indices))
        row.view(np.uint32)[len(indices) * dtype.itemsize // 4 :][: len(indices)] = indices
    counts = np.array([len(indices) for indices in streams], np.int64)
    found = []
    tables = _array(np.dtype(np.uint32), 2), _array(dtype, 2)
    signature = (WORDS, WORD, WORD, *tables, _array(np.dtype(np.uint64), 2), *tables, *tables, *(WORD,) * 3, COUNTS, WORD, WORD)
    python = twin(world, python_of(world, sum_parts._sum_parts), (types.int64, *signature))
    compiled = sum_parts.sum_parts_kernel(np.dtype(np.uint32), dtype)
    for entry in (compiled, lambda *args: python(sum_parts.ADD, *args)):
        words = np.zeros((ranks + 1) * sum_parts.WORDS, np.uint64)
        blocks, memory = np.zeros((2, 4096), np.uint8), rows.copy()
        inner = np.zeros((2, 128), np.uint32), np.zeros((2, 128), dtype)
        given_rows = memory.view(np.uint32), memory.view(dtype), np.zeros((4, ranks + 1), np.uint64), *inner
        done = entry(words, 0, 0, *given_rows, blocks.view(np.uint32), blocks.view(dtype), 4, min(parts, ranks), 2, counts, 200, 1)
        found.append((int(done), words.tobytes(), memory.tobytes(), blocks.tobytes()))
    assert found[0] == found[1]


def _array(dtype, ndim):
    from sparseallreduce.streams.kernels.compiled import array_type

    return array_type(dtype, ndim, False)
