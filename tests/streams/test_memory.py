"""Memory of arrays that are gone serves the next ones, and that of arrays in use never does."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparseallreduce.streams import memory

LARGE = memory.SMALLEST * 3


@pytest.fixture(autouse=True)
def pool(monkeypatch):
    gc.collect()
    monkeypatch.setattr(memory, "_pool", memory._Pool())


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_comes_back_when_an_array_is_gone():
    first = memory.empty(LARGE, np.uint8)
    place = address(first)
    del first
    assert memory.idle_bytes() >= LARGE
    assert address(memory.empty(LARGE // 4, np.float32)) == place


@pytest.mark.parametrize("view", [lambda a: a[5:9], lambda a: a.view(np.uint16)[3:], lambda a: a.reshape(3, -1)[1:][0]])
def test_a_view_keeps_the_memory(view):
    array = memory.empty(LARGE, np.uint8)
    array[:] = 7
    kept = view(array)
    was = kept.copy()
    del array
    assert memory.idle_bytes() == 0
    memory.empty(LARGE, np.uint8)[:] = 1
    assert (kept == was).all()


def test_small_arrays_are_left_to_numpy():
    del_me = memory.empty(10, np.float64)
    assert del_me.dtype == np.float64 and del_me.base is None


@pytest.mark.parametrize("shape, dtype", [(LARGE, np.float64), ((LARGE, 3), np.float16), ((0, 4), np.int64), (0, np.uint32)])
def test_arrays_are_what_was_asked_for(shape, dtype):
    array = memory.empty(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,)) and array.dtype == dtype
    assert array.flags.writeable and array.flags.c_contiguous and array.flags.aligned


def test_idle_memory_has_a_limit(monkeypatch):
    monkeypatch.setattr(memory, "IDLE_LIMIT", 4 * LARGE)
    arrays = [memory.empty(LARGE, np.uint8) for _ in range(10)]
    del arrays
    assert LARGE <= memory.idle_bytes() <= 4 * LARGE


def test_idle_memory_of_many_sizes_has_that_limit_when_the_next_is_allocated(monkeypatch):
    monkeypatch.setattr(memory, "IDLE_LIMIT", 8 * LARGE)
    arrays = [memory.empty(LARGE * 2**power, np.uint8) for power in range(4) for _ in range(3)]
    del arrays
    assert memory.idle_bytes() > memory.IDLE_LIMIT
    kept = memory.empty(LARGE * 16, np.uint8)
    assert memory.idle_bytes() <= memory.IDLE_LIMIT
    del kept
    assert memory.idle_bytes() <= memory.IDLE_LIMIT  # what is above the limit itself is not kept


def test_threads_that_take_and_leave_at_once_have_memory_of_their_own():
    def work(number):
        for _ in range(300):
            arrays = [memory.empty(LARGE, np.uint8) for _ in range(3)]
            for place, array in enumerate(arrays):
                array[::4096] = number * 3 + place
            for place, array in enumerate(arrays):
                assert (array[::4096] == number * 3 + place).all()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
