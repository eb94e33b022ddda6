"""As results go, no line of Python is executed: a KeyboardInterrupt that comes there would be printed and forgotten by Python."""

import ctypes
import gc
import os
import random
import signal
import sys
import time
from collections import deque

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.finalizer import Finalizer
from sparseallreduce.runtime import request
from sparseallreduce.runtime.memory.leases import Leases
from sparseallreduce.runtime.memory.mapping import PAGE, SharedFile
from sparseallreduce.streams import memory
from sparseallreduce.streams.pinned import PinnedPool

MANY = 1000  # interrupts


def shared_file():
    file = os.memfd_create("of a test")
    os.ftruncate(file, 4 * PAGE)
    return SharedFile(file, 4 * PAGE)


def mapped():
    return shared_file().map([0, PAGE], PAGE)


def leased():
    return Leases(2).keep(1, memoryview(bytearray(8)))


def in_flight():
    return sar.Request(object())


KINDS = {
    "large array": lambda: memory.empty(memory.SMALLEST, np.uint8),
    "view": lambda: memory.empty(memory.SMALLEST, np.uint8)[5:].view(np.int8),
    "pinned array": lambda: PinnedPool(np.zeros, 1 << 16).take(100, "f4"),
    "mapped memory": mapped,
    "shared file": shared_file,
    "result where it lies": leased,
    "leases": lambda: Leases(2),
    "request": in_flight,
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_python_runs_as_one_goes(kind):
    called = []

    def profile(frame, event, _argument):
        if event == "call":
            called.append(frame.f_code.co_qualname)

    held = [KINDS[kind]() for _ in range(3)]
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        held.clear()
    finally:
        sys.setprofile(before)
    assert not called


def test_what_goes_is_done():
    memory._pool.idle.clear()
    array = memory.empty(memory.SMALLEST, np.uint8)
    assert memory.idle_bytes() == 0
    del array
    assert memory.idle_bytes() == memory.SMALLEST
    file = shared_file()
    number = file.file
    rows = file.map([0], PAGE)
    address = rows.ctypes.data
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    assert rows.sum() == 0 and is_mapped(address)
    del rows
    assert not is_mapped(address)
    waiting = set(request.pending)
    forgotten = in_flight()
    assert len(request.pending - waiting) == 1
    del forgotten
    assert request.pending == waiting


def is_mapped(address):
    resident = ctypes.create_string_buffer(1)
    return ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), resident) == 0


def test_a_finalizer_in_a_circle_of_references_calls_once():
    gone = deque()
    circle = [Finalizer(gone.append, 1)]
    circle.append(circle)
    del circle
    gc.collect()
    assert list(gone) == [1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_no_interrupt_is_lost_in_a_loop_of_sums():
    """At points that nobody chose."""
    stream = sar.SparseStream.from_dense(np.ones(memory.SMALLEST, np.float32))
    moments, raised = random.Random(1), 0
    gc.collect()
    gc.disable()  # hypothesis has the collector call a function of Python, in which an interrupt is lost
    before = signal.signal(signal.SIGALRM, interrupting)
    try:
        for _ in range(MANY):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 1e-3))
                end = time.monotonic() + 2
                while time.monotonic() < end:
                    sar.allreduce(stream + stream, comm=sar.SERIAL)
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert raised == MANY


def interrupting(_number, _frame):
    raise KeyboardInterrupt
