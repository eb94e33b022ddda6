"""The bench that changes the code: its mutants are other programs, the same in every run, and its list of survivors can be read."""

import ast
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
SOURCE = b'''"""A module."""

LIMIT = 3


def f(values, at=0):
    """Return something."""
    if at < LIMIT and not values:
        raise ValueError(f"nothing at {at}")
    try:
        return values[at] + 1
    except IndexError:
        return None
'''


@pytest.fixture
def mutants(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import mutants

    yield mutants
    del sys.modules["mutants"]


def test_mutants_of_a_file_are_other_programs_and_each_is_there_once(mutants):
    made = mutants.mutants_of("file.py", SOURCE)
    texts = [mutant.applied(SOURCE) for mutant in made]
    assert len(set(texts)) == len({mutant.id for mutant in made}) == len(made)
    original = ast.dump(ast.parse(SOURCE))
    assert all(ast.dump(ast.parse(text)) != original for text in texts)
    assert made == mutants.mutants_of("file.py", SOURCE)
    changes = {"\n".join(mutant.diff(SOURCE)) for mutant in made}
    for line, *others in (
        ("LIMIT = 3", "LIMIT = 4", "LIMIT = 2"),
        ("def f(values, at=0):", "def f(values, at=1):"),
        ("        return values[at] + 1", "        return (values[at] - 1)", "        return None", "        return values[at] + 2"),
        ('        raise ValueError(f"nothing at {at}")', "        pass"),
        ("        return None", "        raise"),
        ("    if at < LIMIT and not values:", "    if (at <= LIMIT) and not values:", "    if (at < LIMIT or not values):"),
    ):
        for other in others:
            assert f"-{line}\n+{other}" in changes


def test_a_mutant_is_known_wherever_in_the_file_its_lines_are(mutants):
    below = b"# a line more\n" + SOURCE
    keys = [[mutants.known_key(mutant, source) for mutant in mutants.mutants_of("file.py", source)] for source in (SOURCE, below)]
    assert keys[0] == keys[1]
    ids = [[mutant.id for mutant in mutants.mutants_of("file.py", source)] for source in (SOURCE, below)]
    assert ids[0] == ids[1]


def test_lines_are_found_where_they_have_moved_to(mutants):
    places = mutants.moved(b"a\nb\nc\nd\n", b"new\na\nb\nbehind\nother\nd\n")
    assert [places[line] for line in range(1, 5)] == [[2], [3], [4, 5], [6]]
    assert mutants.moved(b"a\nb\n", b"a\nnew\nb\n")[1] == [1, 2]
    assert mutants.moved(b"a\nb\n", b"b\n")[1] == []


def test_the_list_of_survivors_is_well_formed(mutants):
    text = mutants.KNOWN.read_text()
    paragraphs = [[line for line in part.splitlines() if not line.startswith("#")] for part in text.split("\n\n")]
    known = mutants.known_survivors()
    assert len(known) == sum(map(bool, paragraphs)), "one is there twice"
    for (file, function, *diff), reason in known.items():
        assert file.split("/")[1] in mutants.ROOMS and (BENCH.parent / file).is_file()
        assert not function or f"def {function.rpartition('.')[2]}(" in (BENCH.parent / file).read_text()
        assert [line[0] for line in diff] == sorted((line[0] for line in diff), reverse=True) and {line[0] for line in diff} == {"-", "+"}
        assert len(reason) > 20, (file, function, *diff)
