"""Every case of `cases_*.py` as a test of its own, for each number of ranks, all of which one or two launches of mpiexec run."""

import importlib
from pathlib import Path

import pytest
from mpi_cases import Case, collect, sample
from mpi_launch import launcher
from mpi_outcomes import Outcomes
from thoroughness import ALL

HERE = Path(__file__).parent
RANKS = (1, 2, 3, 4, 5, 8)
SMOKE_RANKS = (3,)  # for the other MPI library: not a power of two, so that all steps of the algorithms are taken
# All combinations of the values of a case's arguments are tried on two ranks, or on the fewest above one that it is for. On other numbers
# of ranks each case is tried with one combination, or for a release (`make test-all`) with as many as have every value in them, and on one
# rank with all. Which combinations these are is drawn anew for each number of ranks: of those that depend on the number of ranks alone,
# the simulator tries thousands (tests/algorithms, tests/reducers, tests/world).
THIN_RANKS = (1, 3, 4, 5, 8)
EVERY_VALUE = ("cases_allreduce.",)  # modules of which every value is tried even so: each algorithm on each number of ranks
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


def cases_of(cases: list[Case], ranks: int, smoke: bool = False, everything: bool = ALL) -> list[Case]:
    """Return the cases that are tried on so many ranks; `smoke` stands for the other MPI library, `everything` for a release."""
    meant = [
        case
        for case in cases
        if (not case.ranks or ranks in case.ranks) and not (case.name.startswith(ABOVE) and (smoke or ranks not in ABOVE_RANKS))
    ]
    if not smoke and (ranks not in THIN_RANKS or (everything and ranks == 1)):
        return meant
    first = {case.name: min((number for number in case.ranks or RANKS if number > 1), default=1) for case in meant}  # where all are tried
    chosen = {case.name for case in sample(meant, turn=0 if smoke else ranks, one_each=None if everything else EVERY_VALUE)}
    return [case for case in meant if case.name in chosen or (not smoke and ranks == first[case.name])]


@pytest.mark.mpi
@pytest.mark.timeout(0)  # the launch has its own limits, a case at a time
def test_case(group: tuple[str, int], case: Case, outcomes: Outcomes) -> None:
    outcome, reason = outcomes.of(group, case)
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome == "failed":
        pytest.fail(reason, pytrace=False)
