"""Every case of `cases_*.py` as a test of its own, for each number of ranks, all of which one or two launches of mpiexec run."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi_cases import Case, collect, sample
from mpi_launch import launcher
from mpi_outcomes import Outcomes, wanted_cases

HERE = Path(__file__).parent
RANKS = (1, 2, 3, 4, 5, 8)
WAITING = ("cases_promises", "cases_stalls", "cases_timeouts")
SMOKE_RANKS = (3,)  # for the other MPI library: not a power of two, so that all steps of the algorithms are taken
# Where each value of each argument is tried, and all combinations of them on fewer ranks alone: the fewest above one that the case is for.
SAMPLED_RANKS = (4, 5, 8)
# Cases of which MPI sees nothing but sums, which others try on all numbers of ranks and by both libraries.
ABOVE_RANKS = (1, 2, 3, 5)
ABOVE = (
    "cases_data",
    "cases_estimators",
    "cases_given",
    "cases_lossy_train",
    "cases_optim",
    "cases_partial_fit",
    "cases_replica",
    "cases_solvers",
)


def all_cases() -> list[Case]:
    return [case for file in sorted(HERE.glob("cases_*.py")) for case in collect(importlib.import_module(file.stem))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and metafunc.config.option.markexpr == "not mpi":
        metafunc.parametrize(("group", "case"), [])  # all would be deselected, which takes each process 5 s
    elif "case" in metafunc.fixturenames:
        own = launcher()
        first = own.name if own else "mpich"
        other = {"mpich": "openmpi", "openmpi": "mpich"}[first]
        groups = [(first, ranks) for ranks in RANKS] + [(other, ranks) for ranks in SMOKE_RANKS]
        cases = all_cases()
        metafunc.parametrize(
            ("group", "case"),
            [
                pytest.param((mpi, ranks), case, id=f"{mpi}-{ranks}-{case.name}")
                for mpi, ranks in groups
                for case in cases_of(cases, ranks, smoke=mpi == other)
            ],
        )


def cases_of(cases: list[Case], ranks: int, smoke: bool = False) -> list[Case]:
    """Return the cases that are tried on so many ranks; `smoke` stands for the other MPI library."""
    meant = [
        case
        for case in cases
        if (not case.ranks or ranks in case.ranks) and not (case.name.startswith(ABOVE) and (smoke or ranks not in ABOVE_RANKS))
    ]
    if not smoke and ranks not in SAMPLED_RANKS:
        return meant
    turn = (*SAMPLED_RANKS, *SMOKE_RANKS).index(ranks)
    first = {case.name: min(number for number in case.ranks or RANKS if number > 1) for case in meant}  # where it is called for all
    chosen = {case.name for case in sample(meant, turn)}
    return [case for case in meant if case.name in chosen or (not smoke and ranks == first[case.name])]


@pytest.mark.mpi
@pytest.mark.timeout(0)  # the launch has its own limits, a case at a time
def test_case(group: tuple[str, int], case: Case, outcomes: Outcomes) -> None:
    outcome, reason = outcomes.of(group, case)
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome == "failed":
        pytest.fail(reason, pytrace=False)


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    items = [item for item in request.session.items if item.path == Path(__file__)]
    all_outcomes = Outcomes(wanted_cases(items), tmp_path_factory, HERE, WAITING)
    yield all_outcomes
    all_outcomes.close()
