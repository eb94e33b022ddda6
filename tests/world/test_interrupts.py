"""Ctrl-C wherever Python takes one in an operation: no hang, no wrong sum, and it is raised. `bench/faults.py --instructions` tries all."""

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from thoroughness import examples

import sparseallreduce as sar
from world import interrupts
from world.faults import faults_of, played, scenarios

FAULTS = examples(25)  # of each scenario
ALL = {scenario.name: scenario for scenario in scenarios()}
NAMES = (
    "P=2 packed waited",
    "P=2 dense by messages blocking",
    "P=2 several in flight",
    "P=2 first, waited",
    "P=3 sparse shared blocking",
    "P=3 OkTopk waited",
    "P=3 list, of two dtypes by messages blocking",
    "P=3 ssar_split_allgather in pieces waited",
)


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_anywhere_leaves_the_others_right_or_with_one_error(name):
    rng = random.Random(name)
    with played(ALL[name], instructions=True) as play:
        faults = [fault for fault in faults_of(play.points()) if fault.kind == interrupts.KIND]
        for number, fault in enumerate(rng.sample(faults, min(FAULTS, len(faults)))):
            violation = play.strike(fault, order="round robin" if number % 2 else f"{number} 0.2")
            assert violation is None, str(violation)


def test_points_are_where_python_looks_for_signals():
    """Where functions begin, behind calls of what is no function of Python, and where loops go back."""
    source = """
def inner(rows):
    return rows

def outer(rows):
    for _ in range(3):
        inner(rows)
    rows.append(1)
    rows[0] = rows[1]
    return rows
"""
    names = {}
    exec(compile(source, str(Path(sar.__file__).parent / "made_up.py"), "exec"), names)
    found = []
    world = SimpleNamespace(running=SimpleNamespace(quiet=False, calls=Counter()))
    world.injector = lambda rank, kind: found.append((kind, rank.calls[kind]))
    rows = [0, 0]
    with interrupts.between_instructions(lambda: world):
        names["outer"](rows)
    # outer begins; range; three times inner begins, and the loop goes back; append.
    assert len(found) == 1 + 1 + 3 * 2 + 1
    assert found == [(interrupts.KIND, number) for number in range(1, len(found) + 1)]
