"""The pace of rounds: when one rank alone is expected to be faster than all side by side, and when it was not."""

import math

import pytest

from sparseallreduce.linear.solvers.pace import CHECK_INTERVAL, Pace

NONZEROS, RANKS, AIM = 1000, 2, 1e-3


def paced(fall, rounds, first=1.0, pace=None, begin=0):
    """Rounds of two ranks, after each of which the gap is so large a share of what it was."""
    pace = pace or Pace()
    for number in range(1, rounds + 1):
        pace.spend(NONZEROS // RANKS)
        pace.mark(begin + number, first * fall**number)
    return pace


def test_it_is_known_after_some_rounds_and_not_before():
    assert not any(paced(1.0, rounds).prefers_one(AIM, NONZEROS) for rounds in range(6))
    assert paced(1.0, 6).prefers_one(AIM, NONZEROS)


@pytest.mark.parametrize("rest", [8, 11, 13, 40, 400])
def test_one_rank_is_preferred_to_more_than_six_passes_of_its_own(rest):
    """Six passes over all cost what twelve rounds of two ranks do."""
    fall = 0.9
    assert paced(fall, 8, first=AIM * fall ** -(8 + rest)).prefers_one(AIM, NONZEROS) == (rest > 12)


def test_the_last_rounds_count_alone():
    pace = paced(0.5, 10)
    assert not pace.prefers_one(AIM / 100, NONZEROS)
    assert paced(0.99, 6, 0.5**10, pace, 10).prefers_one(AIM / 100, NONZEROS)


def test_a_gap_that_is_small_enough_is_left():
    assert not paced(1.0, 20, first=AIM).prefers_one(AIM, NONZEROS)


@pytest.mark.parametrize("gap", [0.0, -1e-18])
def test_a_gap_that_is_zero_but_for_rounding_is_left(gap):
    pace = Pace()
    for number in range(10):
        pace.mark(number, gap)
    assert not pace.prefers_one(AIM, NONZEROS) and not pace.prefers_one(0.0, NONZEROS)


@pytest.mark.parametrize(("fall", "back"), [(0.5, False), (0.999, True)])
def test_ranks_work_apart_again_where_one_is_no_faster_and_that_is_tried_once(fall, back):
    pace = paced(0.95, 10)
    assert pace.prefers_one(AIM, NONZEROS) and not pace.prefers_one(AIM, NONZEROS)
    gap, found = 0.95**10, []
    for number in range(11, 18):
        pace.spend(NONZEROS)
        gap *= fall
        pace.mark(number, gap)
        found.append(pace.prefers_all(AIM, NONZEROS))
    assert any(found) == back and not any(found[:5])
    if back:
        assert not paced(1.0, 10, gap, pace, 20).prefers_one(AIM, NONZEROS)


def test_a_gap_that_is_not_known_for_long_is_computed():
    pace = Pace()
    assert [number for number in range(1, 12) if pace.overdue(number)] == list(range(CHECK_INTERVAL, 12))
    pace.mark(9, math.inf)
    assert not pace.overdue(10) and pace.overdue(9 + CHECK_INTERVAL)
