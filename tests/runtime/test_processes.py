"""Whether a process is there: ours is, one that has ended is not, nor is a later one of its number."""

import os
import subprocess
import sys
import time

from sparseallreduce.runtime.processes import is_alive, started_at


def test_our_own_process_is_alive():
    start = started_at(os.getpid())
    assert start > 0
    assert is_alive(os.getpid(), start)


def test_a_later_process_of_the_same_number_is_another_one():
    assert not is_alive(os.getpid(), started_at(os.getpid()) + 1)


def test_a_process_that_has_ended_is_not_alive_even_before_its_parent_has_looked():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = started_at(child.pid)
    assert is_alive(child.pid, start)
    child.stdin.close()
    end = time.monotonic() + 10
    while is_alive(child.pid, start) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_alive(child.pid, start)  # a zombie
    child.wait()
    assert not is_alive(child.pid, start)
