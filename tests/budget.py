"""What the tests of each folder took, beside what they may take: a table at the end of every run. Nothing fails for it.

The seconds are those of `make test` on two idle cores, with kernels that an earlier run has kept (tests/kept_kernels.py). Where tests run
side by side, each counts for its part of the clock, so that all folders together take as long as the run: what is left is collecting, and
processes that have no more tests. On a machine that does other things besides, the clock says more, and the seconds of the processors, of
the processes that tests start and end included, say about the same.
"""

import json
import os
import time
from collections import Counter
from itertools import chain
from pathlib import Path, PurePosixPath

import pytest

SECONDS = {
    "README.md, docs": 5,  # examples in pages, as those in docstrings
    "sparseallreduce": 10,
    "tests": 25,
    "tests/algorithms": 40,
    "tests/cli": 30,
    "tests/data_cache": 8,
    "tests/files": 12,
    "tests/frameworks": 1,  # where PyTorch is installed, `make test-frameworks` takes minutes
    "tests/linear": 70,
    "tests/mpi": 190,
    "tests/optim": 15,
    "tests/pytorch": 60,
    "tests/reducers": 20,
    "tests/runtime": 34,
    "tests/streams": 30,
    "tests/world": 15,
    "collecting, idle": 35,
}
ALL = 10 * 60

TOGETHER = "TEST_SECONDS"  # the environment variable that names a file in which the runs of one `make test` are added up


def folder_of(test: str) -> str:
    """The row of the table in which a test counts."""
    path = PurePosixPath(test.partition("::")[0])
    if path.parts[0] == "sparseallreduce":
        return "sparseallreduce"
    return str(path.parent) if path.parts[0] == "tests" else "README.md, docs"


class Budget:
    """The plugin that takes the times of tests, wherever they run, and prints the table where the run was started."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._mark = processors()

    def pytest_runtest_logstart(self) -> None:
        self._mark = processors()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = processors()
        report.processors = now - self._mark  # travels to the process that prints
        self._mark = now
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter) -> None:
        if hasattr(terminalreporter.config, "workerinput"):  # of pytest-xdist: another process prints
            return
        side_by_side = getattr(terminalreporter.config.option, "numprocesses", None) or 1
        clock, busy = Counter(), Counter()
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if hasattr(report, "processors"):
                folder = folder_of(report.nodeid)
                clock[folder] += report.duration / side_by_side
                busy[folder] += report.processors
        clock["collecting, idle"] = time.monotonic() - self._began - clock.total()
        busy["collecting, idle"] = processors() - busy.total() if side_by_side == 1 else 0.0
        clock, busy = added_up(clock, busy)
        terminalreporter.section("seconds by folder")
        for line in table(clock, busy):
            terminalreporter.write_line(line)


def processors() -> float:
    """Seconds that processors have worked for this process and for those that it has started and seen end."""
    return sum(os.times()[:4])


def added_up(*seconds: Counter[str]) -> list[Counter[str]]:
    """With those of the runs before, in a `make test`."""
    file = Path(os.environ.get(TOGETHER) or os.devnull)
    before = json.loads(file.read_text() or "[]") if file.exists() else []
    both = [now + Counter(earlier) for now, earlier in zip(seconds, before or [{}] * len(seconds), strict=True)]
    if os.environ.get(TOGETHER):
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(both))
    return both


def table(clock: Counter[str], busy: Counter[str]) -> list[str]:
    """Its lines: of each folder the clock, the processors and the budget, and by how much it was missed."""
    lines = [f"{'':20}{'seconds':>9}{'of processors':>15}{'budget':>8}"]
    rows = [(folder, clock[folder], busy[folder], SECONDS.get(folder, 0)) for folder in sorted(clock)]
    for name, seconds, worked, budget in [*rows, ("all", clock.total(), busy.total(), ALL)]:
        over = f"  {seconds - budget:.0f} s over its budget" if seconds > budget else ""
        lines.append(f"{name:20}{seconds:9.1f}{worked:15.1f}{budget:8}{over}")
    return lines
