"""Cases: functions `case_*(comm, ...)` in `tests/mpi/cases_*.py` that all ranks of one mpiexec launch run one after another.

A case is called on every rank with the same communicator and fails with an exception, as a test does. `each` multiplies a case over values,
`limit` changes its time limit, `skip` skips it (on all ranks alike). A module may name its numbers of ranks in `RANKS`, and `on_ranks`
those of a case; where there are none, all that are tried::

    @each(algorithm=sar.algorithms(), blocking=[True, False])
    @limit(30)
    def case_result_equals_the_dense_sum(comm, algorithm, blocking):
        if comm.size < 2:
            skip("needs two ranks")
        ...
"""

import itertools
import os
import random
import tempfile
import unittest
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

SECONDS = 60.0  # limit of a case on which nothing else is set: time for a cold numba compilation, which takes half of it
MOST_PATIENCE = 4.0  # times the limits of cases, where others keep the machine busy
BEGAN = "began"  # the first word of a rank's log once a case has begun there


@dataclass(frozen=True)
class Case:
    """One call of a case function, named `module.function[value-value]`."""

    name: str
    function: Callable[..., None]
    arguments: dict[str, Any]
    seconds: float
    ranks: tuple[int, ...] = ()  # the numbers of ranks it is meant for, all if there are none here


def each(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the case once for every combination of the values of the named arguments."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.each = {name: list(column) for name, column in values.items()} | getattr(function, "each", {})
        return function

    return mark


def limit(seconds: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give the case so many seconds before the launch is aborted."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.seconds = seconds
        return function

    return mark


def on_ranks(*numbers: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the case with these numbers of ranks, in the place of those of its module."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.ranks = numbers
        return function

    return mark


@contextmanager
def shared_folder(comm: Any) -> Iterator[Path]:
    """A folder of rank 0 that all ranks see, until all are done with it."""
    with tempfile.TemporaryDirectory() as own:
        try:
            yield Path(comm.bcast(own))
        finally:
            comm.Barrier()


def patience() -> float:
    """What to multiply limits by while the machine is busy: its load for each core."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def skip(reason: str) -> NoReturn:
    """Leave the case as skipped; every rank has to do so."""
    raise unittest.SkipTest(reason)


def collect(module: ModuleType) -> list[Case]:
    """All cases of a module in the order of the file."""
    found = []
    for name, function in vars(module).items():
        if not name.startswith("case_") or not callable(function):
            continue
        columns = getattr(function, "each", {})
        for combination in itertools.product(*columns.values()):
            suffix = "[" + "-".join(getattr(value, "__name__", str(value)) for value in combination) + "]" if combination else ""
            found.append(
                Case(
                    f"{module.__name__}.{name}{suffix}",
                    function,
                    dict(zip(columns, combination, strict=True)),
                    getattr(function, "seconds", SECONDS),
                    getattr(function, "ranks", getattr(module, "RANKS", ())),
                )
            )
    names = [case.name for case in found]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"cases with the same name: {sorted(repeated)}")
    return found


def sample(cases: list[Case], turn: int = 0, one_each: tuple[str, ...] | None = None) -> list[Case]:
    """Return, of the combinations for which each function is called, as few as have every value of every argument in them.

    Which values come together is drawn, the same in every run; another `turn` draws others. With `one_each`, a single combination is
    drawn for every function but those of the modules that it names.
    """
    functions: dict[Callable[..., None], list[Case]] = {}
    for case in cases:
        functions.setdefault(case.function, []).append(case)
    chosen = []
    for combinations in functions.values():
        drawn = _sample(combinations, turn)
        if one_each is not None and not combinations[0].name.startswith(one_each):
            drawn = random.Random(f"{combinations[0].name} {turn}").sample(drawn, 1)
        chosen += drawn
    return chosen


def _sample(combinations: list[Case], turn: int) -> list[Case]:
    columns = list(getattr(combinations[0].function, "each", {}).values())
    orders = [
        random.Random(f"{combinations[0].name} {turn} {place}").sample(range(len(column)), len(column))
        for place, column in enumerate(columns)
    ]
    chosen = set()
    for row in range(max(map(len, columns), default=1)):
        number = 0  # of the combination, in the order of `itertools.product`
        for order in orders:
            number = number * len(order) + order[row % len(order)]
        chosen.add(number)
    return [combinations[number] for number in sorted(chosen)]
