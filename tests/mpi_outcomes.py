"""How the cases of a folder went, each launch of mpiexec running all those of a number of ranks."""

import json
import os
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
    """Launches a group (an MPI library and a number of ranks) when its first case is asked for, and remembers how its cases went."""

    def __init__(self, wanted: dict[tuple[str, int], list[Case]], folders: pytest.TempPathFactory, where: Path) -> None:
        self._wanted = wanted
        self._where = where  # the folder of the files of cases
        self._folders = folders
        self._known: dict[tuple[str, int], dict[str, tuple[str, str]]] = {}
        self._beside: dict[tuple[str, int], Future[dict[str, tuple[str, str]]]] = {}
        self._executor = ThreadPoolExecutor(1)

    def of(self, group: tuple[str, int], case: Case) -> tuple[str, str]:
        if launcher(group[0]) is None:
            missing = f"no {group[0]} here: `make test` installs it"
            if os.environ.get("REQUIRE_MPI"):
                pytest.fail(missing, pytrace=False)
            pytest.skip(missing)
        for other in self._wanted:
            if other[1] == 1 and other not in self._beside and launcher(other[0]) is not None:
                self._beside[other] = self._executor.submit(self._launch, other)
        if group not in self._known:
            self._known[group] = self._beside[group].result() if group in self._beside else self._launch(group)
        return self._known[group][case.name]

    def _launch(self, group: tuple[str, int]) -> dict[str, tuple[str, str]]:
        """Run the cases; when one brings the launch down, it has failed, and another launch runs those behind it."""
        mpi, ranks = group
        known: dict[str, tuple[str, str]] = {}
        pending = self._wanted[group]
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
