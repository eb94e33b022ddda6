"""`figures`: the papers' figures from one command each, in small."""

import json

import pytest
from click.testing import CliRunner

from sparseallreduce.cli import main
from sparseallreduce.cli.paper_figures import FIGURES

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from pictures import check_picture

THESIS = [f"thesis-5.{number}" for number in range(1, 8)]


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_made_and_needs_no_excuse(name, tmp_path, monkeypatch):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *rest, **options: (drawn.append(figure), save(figure, *rest, **options)))
    command("figures", name, "--small", "--out", tmp_path)
    check_picture(drawn[0])
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert (report["schema"], report["command"]) == (1, "figures")
    picture = report["results"]["picture"]
    assert picture["panels"] and ("imulated" in picture["caption"] or "Measured" in picture["caption"])


def test_a_figure_is_drawn_again_from_its_report(tmp_path):
    command("figures", "thesis-5.1", "--small", "--out", tmp_path, "--format", "svg")
    command("plot", tmp_path / "thesis-5.1.json", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes()[:200] == (tmp_path / "thesis-5.1.svg").read_bytes()[:200]


def test_all_figures_of_the_thesis_are_listed():
    listed = command("figures", "--list")
    assert [line.split()[0] for line in listed.splitlines()][:7] == THESIS
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("names", [(), ("thesis-9",)])
def test_an_unknown_figure_is_refused_in_one_line(names):
    assert command("figures", *names, status=2).count("\n") == 1
