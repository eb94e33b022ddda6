"""DESIGN's promise 3, for a selection of faults at every point of an operation: `bench/faults.py` tries them all."""

import random

import pytest
import thoroughness

from world.faults import faults_of, played, scenarios

FAULTS = 4  # of each scenario
ALL = {scenario.name: scenario for scenario in scenarios()}
NAMES = sorted(ALL)[:: 4 if thoroughness.ALL else 8]
TWICE = ["P=3 packed blocking", "P=3 sparse shared waited", "P=3 several dense in flight", "P=3 first, blocking", "P=2 first, waited"]


def test_every_scenario_has_a_name_of_its_own():
    names = [scenario.name for scenario in scenarios()]
    assert len(set(names)) == len(names)


# Those of so many ranks take longer than all others together.
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.release) if ALL[name].ranks > 8 else name for name in NAMES])
def test_what_befalls_a_rank_leaves_the_others_right_or_with_one_error(name):
    rng = random.Random(name)
    with played(ALL[name]) as play:
        faults = faults_of(play.points())
        for number, fault in enumerate(rng.sample(faults, min(FAULTS, len(faults)))):
            violation = play.strike(fault, order="round robin" if number % 2 else f"{number} 0.2")
            assert violation is None, str(violation)


@pytest.mark.parametrize("name", TWICE)
def test_two_ranks_that_fail_at_once_leave_the_others_right_or_with_one_error(name):
    rng = random.Random(name)
    with played(ALL[name]) as play:
        faults = faults_of(play.points())
        for number in range(4 * FAULTS):
            first = rng.choice(faults)
            second = rng.choice([fault for fault in faults if fault.rank != first.rank])
            violation = play.strike(first, second, order="round robin" if number % 2 else f"{number} 0.2")
            assert violation is None, str(violation)
