"""Tables fit the terminal, and progress is shown where somebody sees it."""

import pytest
from click.testing import CliRunner

from sparseallreduce.cli import main
from sparseallreduce.cli.progress import shows_progress


def command(*arguments, **options):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("samples") / "d.svm"
    command("generate", "uniform", path, "--samples", 200, "--features", 500, "--density", 0.02)
    return path


WAYS = {"steps": ("--update", "ftrl", "--validation", 0.2, "--epochs", 2), "rounds": ("--solver", "dual", "--validation", 0.2)}


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("way", WAYS)
def test_no_line_of_training_wraps(way, columns, samples, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = command("train", samples, "--test", samples, *WAYS[way]).stdout.splitlines()
    lines = [line for line in out if line.split()[0] in ("epoch", "round", "1", "2")]
    assert len(lines) >= 2 and max(map(len, lines)) <= columns
    assert {"loss", "total"} <= set(lines[0].split())


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_no_line_of_benchmarks_wraps(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command("bench", "--size", 1000, "--density", 0.1, "--repeats", 1, "--experiments", 1).stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert ("25 %" in " ".join(lines)) == (columns > 80)


def test_without_a_terminal_all_columns_are_written(samples, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "prog acc" in command("train", samples, *WAYS["steps"]).stdout


@pytest.mark.parametrize("choice,shown", [("on", True), ("off", False), ("auto", False)])
def test_progress_is_shown_as_asked(choice, shown, samples):
    errors = command("train", samples, *WAYS["steps"], "--progress", choice).stderr
    assert ("training" in errors) == shown


def test_under_mpiexec_the_size_variables_stand_for_a_terminal(monkeypatch):
    monkeypatch.setattr("sparseallreduce.cli.terminal.launched_ranks", lambda: 2)
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    assert not shows_progress()
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("LINES", "30")
    assert shows_progress()
