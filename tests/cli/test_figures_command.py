"""`figures`: the papers' figures from one command each, in small."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from sparseallreduce import Network
from sparseallreduce.cli import main
from sparseallreduce.cli.paper_figures import FIGURES
from sparseallreduce.cli.paper_figures.learning import Training, method_of
from sparseallreduce.cli.paper_figures.tasks import TASKS, make_task
from sparseallreduce.cli.paper_figures.trees import ring_allgather, tree_allreduce
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams.selection import ExactTopK

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from pictures import check_picture

THESIS = [f"thesis-5.{number}" for number in range(1, 18)]


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


#: Figures that a function draws of which others show as much, with other networks, tasks or methods.
ALIKE = {
    *(f"thesis-5.{number}" for number in (2, 3, 9, 10, 11, 13, 14, 16, 17)),
    *("oktopk-11", "oktopk-13", "gtopk-6", "gtopk-7", "gtopk-12", "gtopk-13", "gtopk-14", "commlib-10"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.release] * (name in ALIKE)) for name in FIGURES])
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
    assert [line.split()[0] for line in listed.splitlines()][:17] == THESIS
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize("names", [(), ("thesis-9",)])
def test_an_unknown_figure_is_refused_in_one_line(names):
    assert command("figures", *names, status=2).count("\n") == 1


@pytest.mark.parametrize("name", TASKS)
def test_the_gradients_of_learning_tasks_are_those_of_their_losses(name):
    task, rng = make_task(name, True, 0), np.random.default_rng(1)
    point = task.start(0) + 0.01 * rng.standard_normal(task.size).astype(np.float32)
    gradient, way = task.gradient(point, np.arange(task.count)), rng.standard_normal(task.size).astype(np.float32)
    slope = (task.loss(point + 1e-3 * way) - task.loss(point - 1e-3 * way)) / 2e-3
    assert gradient @ way == pytest.approx(slope, rel=0.05, abs=1e-3)


@pytest.mark.parametrize("hosts, lanes", [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4), (7, 1)])
def test_trees_and_rings_between_hosts_give_every_rank_all_values(hosts, lanes):
    arrays = np.random.default_rng(0).integers(-9, 9, (hosts * lanes, 200)).astype(np.float32)
    out = run([tree_allreduce(array, rank, len(arrays), lanes) for rank, array in enumerate(arrays)], Network())
    assert all((total == arrays.sum(axis=0)).all() for total in out.outputs)
    streams = [ExactTopK(5)(array) for array in arrays]
    gathered = run([ring_allgather(stream, rank, len(arrays)) for rank, stream in enumerate(streams)], Network()).outputs
    assert all(sorted(map(id, found)) == sorted(map(id, streams)) for found in gathered)


def test_learning_with_lossy_sums_loses_no_gradient():
    task, steps = make_task("perceptron", True, 0), []
    list(Training(task, method_of("gtopk", 0.1, warm_up=True), 3, 60, 6, Network()).run(steps.append))
    given, applied = sum(step.gradient for step in steps), sum(step.update for step in steps)
    last = steps[-1]
    np.testing.assert_allclose(applied + np.mean(last.accumulators, axis=0) - last.update, given, atol=1e-4)
