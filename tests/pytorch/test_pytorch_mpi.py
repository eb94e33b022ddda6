"""Every case of `cases_*.py` of this folder as a test of its own, with two ranks and with three."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mpi_cases import Case, collect, sample
from mpi_launch import launcher
from mpi_outcomes import Outcomes, wanted_cases
from thoroughness import ALL

HERE = Path(__file__).parent
RANKS = (2, 3)


def all_cases() -> list[Case]:
    sys.path.insert(0, str(HERE))
    return [case for file in sorted(HERE.glob("cases_*.py")) for case in collect(importlib.import_module(file.stem))]


def cases_of(cases: list[Case], ranks: int) -> list[Case]:
    """Return the cases that are tried on so many ranks, of each of which a few combinations are drawn, but for a release.

    On the fewest ranks of a case these have every value of every argument in them, on more there is one.
    """
    meant = [case for case in cases if not case.ranks or ranks in case.ranks]
    fewest = [case for case in meant if ranks == min(case.ranks or RANKS)]
    return meant if ALL else sample(fewest, ranks) + sample([case for case in meant if case not in fewest], ranks, one_each=())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        own = launcher()
        mpi = own.name if own else "mpich"
        cases = all_cases()
        columns = [pytest.param((mpi, ranks), case, id=f"{mpi}-{ranks}-{case.name}") for ranks in RANKS for case in cases_of(cases, ranks)]
        metafunc.parametrize(("group", "case"), columns)


@pytest.mark.mpi
@pytest.mark.timeout(0)  # the launch has its own limits, a case at a time
def test_case(group: tuple[str, int], case: Case, outcomes: Outcomes) -> None:
    outcome, reason = outcomes.of(group, case)
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome == "failed":
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    items = [item for item in request.session.items if item.path == Path(__file__)]
    return Outcomes(wanted_cases(items), tmp_path_factory, HERE)
