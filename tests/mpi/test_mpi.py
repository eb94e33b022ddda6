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
# Of the combinations of the values of a case's arguments, two ranks, or the fewest above one that the case is for, try as many as have
# every value in them. On other numbers of ranks each case is tried with one. For a release (`make test-all`) the fewest ranks and a single
# one try all, and the others as many as have every value. Which combinations these are is drawn anew for each number of ranks: of those
# that depend on the number of ranks alone, the simulator tries thousands (tests/algorithms, tests/reducers, tests/world).
EVERY_VALUE = ("cases_allreduce.",)  # modules of which every value is tried even so: each algorithm on each number of ranks
# Schedules of the algorithms are others for each number of ranks. All else is tried on four and on eight where it needs as many.
SCHEDULES = ("cases_allreduce", "cases_far", "cases_inside_hosts", "cases_many", "cases_oktopk", "cases_reducers", "cases_skewed")
OTHER_RANKS = (1, 2, 3, 5)
# Cases of which MPI sees nothing but sums, which others try by both libraries.
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
    numbers = {case.name: (case.ranks or RANKS) if everything else ranks_of(case) for case in cases}
    meant = [case for case in cases if ranks in numbers[case.name] and not (smoke and case.name.startswith(ABOVE))]
    fewest = {case.name for case in meant if not smoke and ranks == min(set(numbers[case.name]) - {1}, default=1)}
    if everything and not smoke and ranks == 1:
        return meant
    one_each = None if everything else EVERY_VALUE
    drawn = sample([case for case in meant if case.name not in fewest], turn=0 if smoke else ranks, one_each=one_each)
    most = [case for case in meant if case.name in fewest]
    chosen = {case.name for case in drawn + (most if everything else sample(most, turn=ranks))}
    return [case for case in meant if case.name in chosen]


def ranks_of(case: Case) -> tuple[int, ...]:
    """Return the numbers of ranks that a case is tried on, but for a release."""
    meant = case.ranks or RANKS
    other = tuple(number for number in meant if number in OTHER_RANKS)
    return meant if case.name.startswith(SCHEDULES) or max(other, default=1) == 1 else other


@pytest.mark.mpi
@pytest.mark.timeout(0)  # the launch has its own limits, a case at a time
def test_case(group: tuple[str, int], case: Case, outcomes: Outcomes) -> None:
    outcome, reason = outcomes.of(group, case)
    if outcome == "skipped":
        pytest.skip(reason)
    if outcome == "failed":
        pytest.fail(reason, pytrace=False)
