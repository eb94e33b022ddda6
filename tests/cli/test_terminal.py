"""Tables fit the terminal, and progress is shown where somebody sees it."""

import contextlib
import fcntl
import io
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import click
import numba
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce.cli import compiling, main, progress
from sparseallreduce.cli.progress import shows_progress
from sparseallreduce.cli.terminal import Column, table_lines, wrapped


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


COMMANDS = {
    "simulate": ("simulate", "--ranks", 4, "--size", 1000, "--density", 0.1),
    "simulate --lossy": ("simulate", "--ranks", 4, "--size", 1000, "--lossy"),
    "bench --lossy": ("bench", "--lossy", "--size", 1000, "--repeats", 1, "--experiments", 1),
    "search": ("train", "{samples}", "--C", "0.01,1", "--folds", 2),
    "figures": ("figures", "--list"),
}


@pytest.mark.parametrize("columns", [80, 100, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_wraps_at_any_width(name, columns, samples, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = command(*(str(each).format(samples=samples) for each in COMMANDS[name])).stdout.splitlines()
    assert max(map(len, lines)) <= columns


def test_words_are_wrapped_and_paths_are_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    path = "/a/folder-of/many-names/and/some-more.svm"
    assert wrapped(f"{path}: no such file", 2).split("\n") == [path + ":", "  no such file"]
    assert wrapped("short\n\n  kept") == "short\n\n  kept"


def test_columns_are_as_wide_as_what_is_in_them_and_empty_ones_are_left_out(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    columns = [Column("a", "a", 0, 0, left=True), Column("b", "long title", 0, 1), Column("c", "c", 0, 2), Column("d", "d", 0, 0)]
    rows = [{"a": "x", "b": "1", "c": "2"}, {"a": "yy", "b": "3"}]
    assert table_lines(columns, rows) == ["a", "x", "yy"]
    monkeypatch.setenv("COLUMNS", "13")
    assert table_lines(columns, rows) == ["a  long title", "x           1", "yy          3"]


def test_a_terminal_of_80_columns_gets_lines_that_fit_a_bar_and_the_loss_so_far(samples, monkeypatch):
    """By a terminal of that size, whatever its output says."""
    monkeypatch.delenv("COLUMNS", raising=False)
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    train = [sys.executable, "-m", "sparseallreduce", "train", samples, "--solver", "sgd", "--epochs", "40", "--validation", "0.2"]
    with subprocess.Popen(train, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so where the other side has closed it
            while piece := os.read(controller, 1 << 16):
                shown += piece
    os.close(controller)
    assert process.returncode == 0, shown
    states = [state for line in shown.decode().split("\n") for state in line.replace("\x1b[A", "").split("\r")]
    assert max(map(len, states)) <= 80
    assert any(re.search(r"training.*epoch \d+, loss [\d.]+", state) for state in states)


@pytest.mark.parametrize("name", main.list_commands(None))
def test_no_line_of_help_wraps_at_80_columns(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, command(name, "--help").stdout.splitlines())) <= 80


class Recorded(io.StringIO):
    """A stream that keeps each piece that is written."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def test_help_is_printed_by_rank_0_alone(monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr("sparseallreduce.cli.launched_rank", lambda rank=rank: rank)
        assert ("Usage" in command("plot", "--help").stdout) == (rank == 0)


@given(st.lists(st.booleans(), max_size=60))
def test_lines_stay_whole_however_mpiexec_mixes_them_with_a_bar(order):
    """Both streams of a rank reach the terminal through pipes of their own."""
    with pytest.MonkeyPatch.context() as patch, click.Context(main) as context:
        patch.setattr(sys, "stdout", Recorded())
        patch.setattr(sys, "stderr", Recorded())
        patch.setattr(progress, "_FORWARDED", 0)
        patch.setenv("COLUMNS", "40")
        context.meta["sparseallreduce.progress"] = "on"
        with progress.progress_bar(sar.SERIAL, desc="a title", total=3, mininterval=0) as bar:
            for number in range(3):
                progress.write_line(f"line {number}")
                bar.update()
        streams = [sys.stdout.pieces, sys.stderr.pieces]
    mixed = [streams[choice].pop(0) for choice in order if streams[choice]]
    shown = _screen(piece for piece in itertools.chain(mixed, *streams) if isinstance(piece, str))
    assert [line.rstrip() for line in shown if line.startswith("line")] == ["line 0", "line 1", "line 2"]


def _screen(pieces):
    """What a terminal shows that gets these pieces."""
    rows, column = [""], 0
    for character in "".join(pieces):
        if character == "\n":
            rows, column = [*rows, ""], 0
        elif character == "\r":
            column = 0
        else:
            rows[-1] = rows[-1][:column].ljust(column) + character + rows[-1][column + 1 :]
            column += 1
    return rows


@pytest.mark.parametrize(
    "words,rank,said",
    [
        (("bench",), 0, ["compiling kernels, once on this machine; doctor --compile does it beforehand"]),
        (("doctor",), 0, ["compiling kernels, once on this machine"]),
        (("bench", "--progress", "on"), 1, []),
        (("bench", "--progress", "off"), 0, []),
    ],
)
def test_rank_0_says_once_that_it_compiles_without_a_terminal_too(words, rank, said, monkeypatch):
    """Under mpiexec the standard error is a pipe."""
    lines, subcommand = [], click.Command("made", callback=lambda: [numba.njit(lambda x: x + 1)(1) for _ in range(2)])
    if words[0] == "bench":
        subcommand = progress.progress_option()(subcommand)
    monkeypatch.setattr(compiling, "_PATIENCE", 0.01)
    monkeypatch.setattr(compiling, "_PATIENCE_WITHOUT_TERMINAL", 0.01)
    monkeypatch.setattr(compiling, "launched_rank", lambda: rank)
    monkeypatch.setattr("tqdm.tqdm.write", lambda text, file: lines.append(text))
    monkeypatch.setattr(type(main), "get_command", lambda group, context, name: subcommand)
    with pytest.raises(SystemExit):
        main([*words])
    assert lines == said


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
