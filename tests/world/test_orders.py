"""Operations in a row are right in every order in which ranks may run: here with one preemption, in `bench/interleavings.py` with more."""

import pytest
from thoroughness import examples

from world.orders import Explorer, programs

PROGRAMS = {program.name: program for program in programs()}
TRIED = [name for name in PROGRAMS if "skewed" not in name or name.startswith("P=2")]  # of skewed sets the quickest
MOST = examples(120)  # orders of each program


@pytest.mark.parametrize("name", TRIED)
def test_every_order_gives_the_same_right_sums(name):
    wrong = []
    with Explorer(PROGRAMS[name]) as explorer:
        explorer.explore(1, lambda *found: wrong.append(found), MOST)
        explorer.wander(range(examples(30)), lambda *found: wrong.append(found))
    assert not wrong


# What is waited for in shared memory is said to have come without a look: words, or all records, with our own flags.
LIES = {"words": {"kernel all_reached": lambda *_: True}, "records": {"kernel agree": lambda *args: args[5]}}


@pytest.mark.parametrize(
    "name, lie",
    [
        ("P=2 six packed in flight", "words"),
        ("P=3 sparse shared, sparse shared, sparse shared", "words"),
        ("P=2 packed, packed, packed", "records"),
        ("P=2 dense, dense, dense", "records"),
        ("P=2 sparse shared, sparse shared, sparse shared", "records"),
    ],
)
def test_a_rank_that_does_not_wait_is_found_out(name, lie):
    wrong = []
    with Explorer(PROGRAMS[name]) as explorer:

        def found(what, order):
            wrong.append(what)
            explorer.world.lies = LIES[lie]

        explorer.world.lies = LIES[lie]
        explorer.explore(1, found, 60)
    assert any("wrong on ranks" in what for what in wrong)
