"""What is counted as a compilation, and when the log says that a program waits for one."""

import logging
import threading
import time

import numba
import pytest

from sparseallreduce.streams.kernels import compilation, compilations, warm_up
from sparseallreduce.streams.kernels.compilations import Compilations


@pytest.fixture
def compiles_long(monkeypatch):
    """A function that compiles for longer than the log's patience."""
    monkeypatch.setattr(compilations, "_counting", [compilations._for_the_log(0.01)])

    def compile_long():
        compilations.begin(compiles=True)
        time.sleep(0.2)
        compilations.end(compiles=True)

    return compile_long


def test_the_log_says_that_kernels_are_compiled_to_those_who_ask_for_it(compiles_long, caplog):
    caplog.set_level(logging.INFO, "sparseallreduce")
    for _ in range(2):
        compiles_long()
    lines = [record.getMessage() for record in caplog.records if record.name == "sparseallreduce"]
    assert lines == ["compiling kernels, once on this machine; sparseallreduce doctor --compile does it beforehand"]


def test_a_program_that_does_not_ask_hears_nothing_and_gets_no_thread(compiles_long, caplog, monkeypatch):
    monkeypatch.setattr(threading, "Timer", None)
    compiles_long()
    assert not caplog.records


def test_what_is_loaded_from_the_cache_is_no_compilation():
    warm_up()
    with Compilations().counted() as counted:
        warm_up()
    assert counted.count == 0


def test_functions_inside_a_function_are_compiled_with_it():
    inner = numba.njit(lambda x: x + 1)
    with Compilations().counted() as counted:
        numba.njit(lambda x: inner(x) + 1)(1)
    assert counted.count == 1 and counted.seconds > 0


def test_the_wait_for_another_process_that_compiles_counts_as_time():
    said = threading.Event()

    class Lock:
        def acquire(self, **_):
            assert said.wait(10), "nothing was said while the other process compiled"

    with Compilations(said.set, patience=0.01).counted() as counted:
        compilation._acquire(Lock())
    assert counted.count == 0 and counted.seconds >= 0.01
