"""Bounds of time and memory for every test in this folder."""

import resource
import signal
from pathlib import Path

import pytest

SECONDS, MEMORY = 30, 1 << 29  # what a file may take that is refused


@pytest.fixture(autouse=True)
def bounded():
    """An error where anything takes more than `SECONDS` or `MEMORY` beside what the process has."""

    def late(*_):
        raise AssertionError(f"it took more than {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)
