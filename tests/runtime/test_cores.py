"""Which cores a process may use, and how many processes of a host may use together."""

from __future__ import annotations

import os
import sys
from unittest import mock

import pytest

from sparseallreduce.runtime.cores import MASK_BYTES, allowed_cores, count_cores, usable_cores


def mask(*cores):
    return sum(1 << core for core in cores).to_bytes(MASK_BYTES, "little")


def test_ranks_use_what_any_of_them_may_use():
    assert count_cores([mask(0), mask(3), mask(3)]) == 2
    assert count_cores([mask(0, 1), mask(1, 2), mask(2000)]) == 4


def test_where_nothing_is_told_it_is_all_of_the_host():
    with mock.patch.object(os, "cpu_count", return_value=12):
        assert count_cores([mask(), mask()]) == 12
        with mock.patch.object(os, "sched_getaffinity", return_value={8 * MASK_BYTES, 8 * MASK_BYTES + 1}, create=True):
            assert usable_cores() == 12


def test_a_system_that_does_not_tell_is_asked_for_nothing():
    with mock.patch.object(os, "sched_getaffinity", create=True):
        del os.sched_getaffinity
        assert allowed_cores() == mask()


@pytest.mark.skipif(sys.platform != "linux", reason="no affinity")
def test_a_process_may_be_bound():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert allowed_cores() == mask(min(before))
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert usable_cores() == len(before)
