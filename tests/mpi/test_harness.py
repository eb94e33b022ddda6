"""The harness reports a failure of one rank, ends what hangs, and leaves no process behind."""

import json
import os
import time
from pathlib import Path
from types import ModuleType

import mpi_cases
import pytest
from mpi_launch import wait_until

RUN_CASES = Path(__file__).parent / "run_cases.py"

CASES = """
from mpi_cases import limit

def case_fails_on_one_rank(comm):
    if comm.rank == 1:
        raise ValueError("only here")

def case_passes(comm):
    comm.Barrier()

def case_fails_where_others_wait(comm):
    if comm.rank == 1:
        raise ValueError("nobody comes")
    comm.Barrier()

@limit(1)
def case_waits_for_ever(comm):
    comm.recv(source=(comm.rank + 1) % comm.size)
"""


def run_cases(mpi_run, folder, *names):
    (folder / "cases_made.py").write_text(CASES)
    (folder / "names.json").write_text(json.dumps([f"cases_made.{name}" for name in names]))
    mpi_run(3, RUN_CASES, folder, folder / "names.json", check=False, timeout=60, env={"PYTHONPATH": str(folder)})
    done = [json.loads(line) for line in (folder / "done.jsonl").read_text().splitlines()]
    return [(entry["name"].partition(".")[2], entry["outcome"]) for entry in done], done


def test_failure_of_one_rank_is_the_failure_of_the_case(mpi_run, tmp_path):
    outcomes, done = run_cases(mpi_run, tmp_path, "case_fails_on_one_rank", "case_passes")
    assert outcomes == [("case_fails_on_one_rank", "failed"), ("case_passes", "passed")]
    assert "rank 1: failed" in done[0]["reason"]
    assert "only here" in done[0]["reason"]


def test_ranks_waiting_for_a_failed_one_are_ended(mpi_run, tmp_path):
    outcomes, _ = run_cases(mpi_run, tmp_path, "case_passes", "case_fails_where_others_wait", "case_passes")
    assert outcomes == [("case_passes", "passed")]
    assert "nobody comes" in (tmp_path / "rank1.log").read_text()
    assert "in case_fails_where_others_wait" in (tmp_path / "rank0.log").read_text()


def test_deadlock_ends_at_the_limit_of_its_case(mpi_run, tmp_path):
    outcomes, _ = run_cases(mpi_run, tmp_path, "case_passes", "case_waits_for_ever")
    assert outcomes == [("case_passes", "passed")]
    assert "in case_waits_for_ever" in (tmp_path / "rank2.log").read_text()


def sleep_for_ever(folder):
    Path(folder, str(os.getpid())).touch()
    time.sleep(1000)


def test_timeout_leaves_no_process_behind(mpi_run, tmp_path):
    with pytest.raises(AssertionError, match="not finished after 12 s"):
        mpi_run(2, sleep_for_ever, tmp_path, timeout=12)
    processes = [int(file.name) for file in tmp_path.iterdir()]
    assert len(processes) == 2
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 5)


def test_a_sample_of_combinations_has_every_value_of_every_argument():
    values = {"algorithm": range(10), "blocking": [True, False], "codec": "abcd"}
    module = ModuleType("cases_of_a_sample")
    module.case_of_many = mpi_cases.each(**values)(lambda comm, **arguments: None)
    module.case_of_one = lambda comm: None
    cases = mpi_cases.collect(module)
    drawn = [mpi_cases.sample(cases, turn) for turn in range(3)]
    assert drawn[0] == mpi_cases.sample(cases, 0) and drawn[0] != drawn[1] != drawn[2]
    for *chosen, last in drawn:
        assert last.function is module.case_of_one
        assert len(chosen) == 10
        for name, column in values.items():
            assert {case.arguments[name] for case in chosen} == set(column)
