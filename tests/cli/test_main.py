"""The command line as a whole: help, version, and that failing is one line, an exit status, and no rank left waiting."""

import json
import os
import subprocess
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner

import sparseallreduce as sar
from sparseallreduce import cli
from sparseallreduce.cli import main
from sparseallreduce.cli.report import write_report


def fails_with(monkeypatch, error):
    """The result of a subcommand that raises ``error``."""

    @click.command()
    def doctor():
        raise error

    monkeypatch.setattr(cli, "import_module", lambda name: type("module", (), {"doctor": doctor}))
    return CliRunner().invoke(main, ["doctor"])


def test_help_names_every_subcommand():
    result = CliRunner().invoke(main, ["--help"])

    assert result.exit_code == 0
    for name in ("bench", "train", "generate", "simulate", "doctor"):
        assert f"\n  {name} " in result.output


@pytest.mark.parametrize("name", ["bench", "train", "generate", "simulate", "doctor"])
def test_every_subcommand_has_help(name):
    result = CliRunner().invoke(main, [name, "--help"])

    assert result.exit_code == 0, result.output
    assert result.output.startswith("Usage: ")


def test_version():
    result = CliRunner().invoke(main, ["--version"])

    assert result.exit_code == 0
    assert sar.__version__ in result.output


def test_help_does_not_load_numba_scipy_or_mpi():
    program = (
        "import sys\nfrom sparseallreduce.cli import main\ntry:\n    main(['--help'])\n"
        "finally:\n    assert not {'numba', 'scipy', 'mpi4py', 'tqdm'} & set(sys.modules)"
    )

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr


def test_no_command_loads_scikit_learn():
    program = "import sys\nfrom sparseallreduce.cli import main, train, predict, convert\nassert 'sklearn' not in sys.modules"

    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense"], ["bench"], ["bench", "--size", "-1"], ["doctor", "x"]])
def test_bad_arguments_are_one_line_and_status_2(arguments):
    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert result.output.endswith("--help\n")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(
    "error,text",
    [
        (sar.StreamError("two\nlines"), "Error: two lines\n"),
        (click.ClickException("no luck"), "Error: no luck\n"),
        (OSError("the disk is full"), "Error: the disk is full\n"),
    ],
)
def test_what_fails_is_one_line_and_status_1(monkeypatch, error, text):
    result = fails_with(monkeypatch, error)

    assert result.exit_code == 1
    assert result.output == text


def test_a_file_that_is_missing_is_named(monkeypatch):
    result = fails_with(monkeypatch, FileNotFoundError(2, "No such file or directory", "data.svm"))

    assert result.exit_code == 1
    assert result.output.startswith("Error: data.svm: No such file or directory")
    assert result.output.count("\n") == 1


def test_what_nobody_foresaw_shows_where(monkeypatch):
    result = fails_with(monkeypatch, ZeroDivisionError("why"))

    assert result.exit_code == 1
    assert "Traceback" in result.output
    assert "ZeroDivisionError: why" in result.output


def test_a_rank_but_the_first_says_nothing_of_bad_arguments():
    launched = os.environ | {"PMI_RANK": "1", "PMI_SIZE": "2"}

    ran = subprocess.run([sys.executable, "-m", "sparseallreduce", "bench"], capture_output=True, text=True, check=False, env=launched)

    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", "")


def test_all_ranks_failing_alike_are_one_line(mpi_run):
    ran = mpi_run(3, fail, "0,1,2", "alike", check=False)

    assert ran.returncode == 1
    assert ran.stderr.count("Error: alike") == 1


def test_all_ranks_failing_each_in_its_way_say_so(mpi_run):
    ran = mpi_run(3, fail, "0,1,2", "rank", check=False)

    assert ran.returncode == 1
    for rank in range(3):
        assert ran.stderr.count(f"rank {rank}: Error: rank{rank}") == 1


@pytest.mark.parametrize(
    "rank, kind",
    [
        (2, "rank"),
        (0, "unforeseen"),
        pytest.param(0, "rank", marks=pytest.mark.release),
        pytest.param(2, "unforeseen", marks=pytest.mark.release),
    ],
)
def test_one_rank_failing_ends_all(mpi_run, rank, kind):
    ran = mpi_run(3, fail, rank, kind, check=False)

    assert ran.returncode != 0
    assert f"{kind}{rank}" in ran.stderr


def fail(ranks, kind):
    """Raise on some ranks, wait for them on the others."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    @click.command()
    def doctor():
        if str(comm.rank) in ranks.split(","):
            raise {"alike": OSError("alike"), "rank": OSError(f"rank{comm.rank}"), "unforeseen": KeyError(f"unforeseen{comm.rank}")}[kind]
        comm.Barrier()

    cli.import_module = lambda name: type("module", (), {"doctor": doctor})
    main(["doctor"])


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.json"
    write_report(path, "bench", {"json_path": path}, {}, {"array": np.arange(3), "number": np.float32(0.5)}, epochs=[1])
    before = path.read_text()

    with pytest.raises(TypeError):
        write_report(path, "bench", {}, {}, object())

    assert path.read_text() == before
    assert json.loads(before) == {
        "schema": 1,
        "command": "bench",
        "arguments": {"json_path": str(path)},
        "environment": {},
        "results": {"array": [0, 1, 2], "number": 0.5},
        "epochs": [1],
    }
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
