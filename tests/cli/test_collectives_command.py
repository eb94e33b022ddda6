"""`bench --collective` and `simulate --collective`, by one process: what they show, write, and refuse."""

import json

import pytest
from click.testing import CliRunner

import sparseallreduce as sar
from sparseallreduce.cli import main

COLLECTIVES = ("reduce", "reduce_scatter", "allgather", "bcast")


def run(*arguments, status=0):
    result = CliRunner().invoke(main, [*map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_simulated_collectives_are_right_and_written(collective, tmp_path):
    options = "--ranks", 5, "--size", "1e4", "--density", 0.01, "--collective", collective
    output = run("simulate", *options, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["results"]["algorithms"]
    assert [row["algorithm"] for row in rows] == sar.algorithms(collective)
    assert all(row["correct"] and row["predicted_time"] > 0 for row in rows)
    best = min(rows[:-1], key=lambda row: row["time"])
    assert rows[-1]["time"] <= 1.2 * best["time"] and f"took {rows[-1]['chosen']}" in output


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_process_alone_measures_collectives(collective, tmp_path):
    options = "--size", 2000, "--density", 0.05, "--repeats", 2, "--experiments", 2, "--collective", collective
    assert "MPI, dense" in run("bench", *options, "--json", tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["results"]["algorithms"]
    assert [row["algorithm"] for row in rows] == ["MPI, dense", "MPI, packed pairs", *sar.algorithms(collective)]
    assert all(row["correct"] for row in rows)


def test_what_a_collective_does_not_take_is_refused():
    small = "--size", 2000, "--density", 0.05, "--collective", "reduce"
    assert "unknown algorithm 'ssar_ring'" in run("bench", *small, "--algorithms", "ssar_ring", status=2)
    assert "leave out" in run("bench", *small, "--lossy", status=2)
    assert "give --op sum" in run("bench", *small, "--op", "mean", status=2)
    assert "leave out" in run("simulate", "--ranks", 2, *small, "--device", "gpu", status=2)
