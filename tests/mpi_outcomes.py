"""How the cases of a folder went, each launch of mpiexec running all those of a number of ranks."""

import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from mpi_cases import BEGAN, MOST_PATIENCE, SECONDS, Case
from mpi_launch import launcher, mpi_run

PROGRAM = Path(__file__).parent / "mpi" / "run_cases.py"


def wanted_cases(items: list[pytest.Item]) -> dict[tuple[str, int], list[Case]]:
    """The cases of tests by their group: an MPI library and a number of ranks."""
    wanted: dict[tuple[str, int], list[Case]] = {}
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(parameters.get("case"), Case):
            wanted.setdefault(parameters["group"], []).append(parameters["case"])
    return wanted


class Outcomes:
    """Launches all groups (an MPI library and a number of ranks) one after the other once a case is asked for, and remembers how they went.

    Beside them goes what leaves cores idle: cases that wait, for limits of time and for ranks that come late, and those of a single rank.
    """

    def __init__(
        self, wanted: dict[tuple[str, int], list[Case]], folders: pytest.TempPathFactory, where: Path, waiting: Sequence[str] = ()
    ) -> None:
        self._where = where  # the folder of the files of cases
        self._folders = folders
        self._executors = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._launched: dict[tuple[tuple[str, int], bool], Future[dict[str, tuple[str, str]]]] = {}
        self._waiting = tuple(f"{name}." for name in waiting)
        self._wanted = wanted

    def of(self, group: tuple[str, int], case: Case) -> tuple[str, str]:
        if launcher(group[0]) is None:
            missing = f"no {group[0]} here: `make test` installs it"
            if os.environ.get("REQUIRE_MPI"):
                pytest.fail(missing, pytrace=False)
            pytest.skip(missing)
        if not self._launched:
            self._launch_all()
        return self._launched[group, self._goes_beside(group, case)].result()[case.name]

    def close(self) -> None:
        """Launch nothing more; waits for what is running."""
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)

    def _goes_beside(self, group: tuple[str, int], case: Case) -> bool:
        return group[1] == 1 or case.name.startswith(self._waiting)

    def _launch_all(self) -> None:
        self._folders.getbasetemp()  # made by whoever asks first, and emptied: of two threads that ask at once, twice
        for (group, cases), beside in itertools.product(self._wanted.items(), (True, False)):
            own = [case for case in cases if self._goes_beside(group, case) == beside]
            if own and launcher(group[0]) is not None:
                self._launched[group, beside] = self._executors[beside].submit(self._launch, group, own)

    def _launch(self, group: tuple[str, int], pending: list[Case]) -> dict[str, tuple[str, str]]:
        """Run the cases; when one brings the launch down, it has failed, and another launch runs those behind it."""
        mpi, ranks = group
        known: dict[str, tuple[str, str]] = {}
        while pending:
            reports = self._folders.mktemp(f"{mpi}-{ranks}-")
            (reports / "names.json").write_text(json.dumps([case.name for case in pending]))
            seconds = MOST_PATIENCE * SECONDS + sum(case.seconds + 10 for case in pending)
            try:
                path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(self._where), os.environ.get("PYTHONPATH")]))}
                run = mpi_run(ranks, PROGRAM, reports, reports / "names.json", timeout=seconds, mpi=mpi, check=False, env=path)
                ended = f"exit status {run.returncode}\n{run.stdout[-8000:]}\n{run.stderr[-8000:]}"
            except AssertionError as error:
                ended = str(error)
            done = reports / "done.jsonl"
            entries = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
            known |= {entry["name"]: (entry["outcome"], entry["reason"]) for entry in entries}
            pending = [case for case in pending if case.name not in known]
            if pending:
                logs = {rank: _log(reports, rank) for rank in range(ranks)}
                spoken = "\n".join(f"rank {rank}:\n{text}" for rank, text in logs.items())
                known[pending[0].name] = ("failed", f"the launch ended in this case\n{spoken}\n{ended}")
                pending = pending[1:]
                if not any(text.startswith(BEGAN) for text in logs.values()):  # no case's fault: the launch itself does not work
                    known |= {case.name: ("failed", f"not run\n{spoken}\n{ended}") for case in pending}
                    pending = []
        return known


def _log(reports: Path, rank: int) -> str:
    file = reports / f"rank{rank}.log"
    return file.read_text() if file.exists() else ""
