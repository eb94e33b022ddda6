"""The pages that a newcomer reads: links resolve, commands and options exist, programs run. pytest itself runs their doctests."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import sparseallreduce as sar
from sparseallreduce import optim
from sparseallreduce.cli import main
from sparseallreduce.linear import MODELS, SCHEDULES, STRATEGIES
from sparseallreduce.reducers import REDUCERS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs/**", "data", "examples")
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))])
FENCE = re.compile(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page):
    """The fragments by which the headings of a page are linked."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page):
    """The words of every shell command in the fenced blocks of a page, without comments; those of cells begin with `!`."""
    for language, block in FENCE.findall(page.read_text()):
        if language in ("", "sh", "{code-cell}"):
            for line in block.replace("\\\n", " ").splitlines():
                line = line.removeprefix("!") if language == "{code-cell}" else line
                if re.match(r"(sudo |mpiexec|srun|sparseallreduce|python|pip|make) ?", line):
                    yield shlex.split(line, comments=True)


def test_the_readme_is_read_in_a_minute():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


@each_page
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if not target.startswith("https://"):
            path, _, fragment = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), target
            assert not fragment or fragment in anchors(linked), target


@each_page
def test_commands_and_their_options_exist(page):
    for words in commands(page):
        if "sparseallreduce" in words and words[0] != "pip":
            name, *arguments = words[words.index("sparseallreduce") + 1 :]
            command = main.get_command(click.Context(main), name)
            assert command is not None, name
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in arguments if word.startswith("--")} <= known | {"--help"}, words


@each_page
def test_programs_that_are_named_exist(page):
    for path in re.findall(r"\b(?:bench|examples|tools|tests)/[\w./]+\.(?:py|sh)\b", page.read_text()):
        assert (ROOT / path).exists(), path


@each_page
def test_programs_are_python(page):
    for language, block in FENCE.findall(page.read_text()):
        if language == "python" and ">>>" not in block:
            ast.parse(block)


@pytest.mark.parametrize("name", [*sar.algorithms(), *(reducer.__name__ for reducer in REDUCERS.values())])
def test_every_algorithm_has_a_card(name):
    assert f"\n### {name}\n" in (ROOT / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("name", [name for name in optim.__all__ if name.endswith("SGD")])
def test_every_optimiser_is_listed(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "lossy.md").read_text()


@pytest.mark.parametrize("name", [name for name in sar.__all__ if name.endswith("Error") and name != "SparseAllreduceError"])
def test_every_error_is_listed(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "use.md").read_text()


def test_every_choice_of_train_is_described():
    text = (ROOT / "docs" / "training.md").read_text()
    for name in (*MODELS, *SCHEDULES, *STRATEGIES):
        assert f"`{name}`" in text, name


def test_the_program_of_the_readme_runs(tmp_path, mpi_run):
    program = tmp_path / "example.py"
    program.write_text(next(block for language, block in FENCE.findall((ROOT / "README.md").read_text()) if language == "python"))
    run = mpi_run(2, program, timeout=120, env={"PYTHONUNBUFFERED": ""})  # lines of two ranks come whole
    assert [int(line.split()[0]) > 1000 for line in run.stdout.splitlines()] == [True, True], run.stdout


@pytest.mark.mpi
def test_the_commands_of_the_start_page_run(tmp_path):
    """In their order, as a reader types them, in an empty folder that has only the program that the page shows."""
    page = ROOT / "docs" / "start.md"
    (tmp_path / "first.py").write_text(next(block for language, block in FENCE.findall(page.read_text()) if language == "python"))
    environment = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    typed = [words for words in commands(page) if words[0] not in ("pip", "make")]
    assert len(typed) >= 7
    for words in typed:
        run = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False)
        allowed = (0, 1) if "doctor" in words else (0,)  # doctor exits with 1 where it finds a problem, such as too few cores
        assert run.returncode in allowed, (words, run.stdout[-2000:], run.stderr[-2000:])


def test_the_readme_says_how_commands_are_found_in_the_environment_that_make_fills():
    assert "source .venv/bin/activate" in (ROOT / "README.md").read_text()
