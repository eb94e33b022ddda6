"""Workers agree after the same step, whoever wishes, and seldom enough to cost nothing."""

import time

import pytest
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.linear.training.consensus import Consensus


@pytest.mark.parametrize("wisher", [0, 2])
def test_all_learn_of_a_wish_after_the_same_step(wisher):
    def steps(comm):
        consensus = Consensus(comm, interval=0.01)
        for step in range(1000):
            time.sleep(0.0005 * (comm.rank + 1))
            wishes = consensus.after_step("stop" if comm.rank == wisher and step >= 20 else None)
            if wishes:
                return step, wishes
        return None

    found = on_ranks(3, steps)
    assert found[0] is not None and found[0][0] >= 20 and found[0][1] == ["stop"]
    assert found == [found[0]] * 3


def test_meetings_are_as_far_apart_as_the_interval():
    class Counting:
        size, rank, meetings = 2, 0, 0

        def allgather(self, value):
            self.meetings += 1
            return [value, value]

    comm = Counting()
    consensus = Consensus(comm, interval=0.05)
    start, steps = time.monotonic(), 0
    while time.monotonic() - start < 0.5:
        consensus.after_step(None)
        steps += 1
    assert comm.meetings < 40 < steps  # besides the first ones, which feel their way


def test_a_rank_alone_hears_itself():
    assert Consensus(sar.SERIAL).after_step("now") == ["now"]
