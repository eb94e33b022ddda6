"""`bench --sweep`: a grid of benchmarks, measured where there are ranks, else simulated; and the pictures of it."""

import csv
import json

import numpy as np
import pytest
from click.testing import CliRunner

from sparseallreduce.cli import main
from sparseallreduce.cli.pictures.sweeps import points_of, sweep_picture
from sparseallreduce.cli.simulated_point import simulated_point
from sparseallreduce.cli.sweep import Setting, values_of
from sparseallreduce.runtime.simulator import Network


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep over all three, and its folder."""
    folder = tmp_path_factory.mktemp("swept")
    grid = ("--sweep", "density=0.001:0.3:log3", "--sweep", "ranks=1,2,8", "--sweep", "size=1e3,1e4")
    names = ("--algorithms", "dense,ssar_split_allgather,dsar_split_allgather,auto")
    out = command("bench", *grid, *names, "--repeats", 2, "--experiments", 2, "--json", folder / "s.json", "--csv", folder / "s.csv")
    return folder, out


def test_a_sweep_has_every_point_of_the_grid_and_every_sample(swept):
    folder, out = swept
    report = json.loads((folder / "s.json").read_text())
    points = report["results"]["points"]
    assert (report["schema"], report["command"]) == (1, "bench")
    assert {(point["ranks"], point["size"], point["density"]) for point in points} == {
        (ranks, size, density) for ranks in (1, 2, 8) for size in (1000, 10_000) for density in (0.001, 0.0173205080757, 0.3)
    }
    assert [point["simulated"] for point in points] == [point["ranks"] > 1 for point in points]
    assert report["results"]["network"]["source"] == "default"
    rows = list(csv.DictReader((folder / "s.csv").open()))
    measured, simulated = (sum(row["simulated"] == said for row in rows) for said in ("False", "True"))
    assert (measured, simulated) == (6 * (2 + 4) * 4, 12 * 4)
    first = points[0]["algorithms"][0]
    assert [float(row["seconds"]) for row in rows if row["algorithm"] == "dense"][:4] == [*first["seconds"][0], *first["seconds"][1]]
    assert len(out.splitlines()) == 19 and max(map(len, out.splitlines())) <= 80


def test_a_sweep_is_drawn_without_text_on_text(swept, tmp_path):
    pytest.importorskip("matplotlib")
    from pictures import check_picture

    from sparseallreduce.cli.pictures.drawing import draw

    folder, _ = swept
    runs = {"s": json.loads((folder / "s.json").read_text())}
    figure = draw(sweep_picture(runs))
    check_picture(figure)
    titles = " ".join(axes.get_title().replace("\n", " ") for axes in figure.axes)
    assert all(word in titles for word in ("Time", "Bytes", 'Choice of "auto"', "Fill-in"))
    dashed = [line for axes in figure.axes for line in axes.lines if line.get_linestyle() == "--"]
    thin = [line for axes in figure.axes for line in axes.lines if line.get_linewidth() < 1]
    assert dashed and thin
    command("plot", folder / "s.json", tmp_path / "s.svg")


def test_simulations_that_differ_form_curves(tmp_path):
    for ranks in (2, 4, 8):
        command("simulate", "--ranks", ranks, "--size", 1000, "--density", 0.05, "--json", tmp_path / f"{ranks}.json")
    runs = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in (2, 4, 8)}
    curves, *_ = sweep_picture(runs).panels
    rings = next(line for line in curves.lines if line.label == "ssar_ring" and line.kind == "simulated")
    assert rings.x == [2, 4, 8]
    assert rings.y == [next(r["time"] for r in p["algorithms"] if r["algorithm"] == "ssar_ring") for p in points_of(runs)]


KINDS = [("float32", "sum"), ("float64", "prod"), ("int32", "max"), ("complex64", "sum"), ("int64", "min"), ("float32", "mean")]


@pytest.mark.parametrize("dtype,op", KINDS)
def test_simulated_points_are_right_for_every_operator(dtype, op):
    point = simulated_point(Setting(5, 300, 0.1), ["ssar_ring", "dsar_split_allgather", "auto"], dtype, op, Network(), 0)
    assert all(row["correct"] for row in point["algorithms"])


def test_a_scaled_simulation_takes_as_long_as_the_whole_one(monkeypatch):
    setting, names, network = Setting(4, 2**16, 0.05), ["ssar_split_allgather", "dense"], Network(1e-6, 1e9, 1e-9)
    whole = simulated_point(setting, names, "float32", "sum", network, 0)
    monkeypatch.setattr("sparseallreduce.cli.simulated_point._LARGEST", 2**14)
    part = simulated_point(setting, names, "float32", "sum", network, 0)
    assert (whole["scaled_by"], part["scaled_by"]) == (1, 16)
    for row, other in zip(whole["algorithms"], part["algorithms"]):
        assert other["median"] == pytest.approx(row["median"], rel=0.1)
        assert np.mean(other["bytes_sent"]) == pytest.approx(np.mean(row["bytes_sent"]), rel=0.2)  # gaps between indices are shorter


@pytest.mark.parametrize("extremes", [("density=0,1", "size=0,1"), ("size=1,3,1000", "ranks=1,3,5")])
def test_extremes_are_swept(extremes, tmp_path):
    given = () if "density" in extremes[0] else ("--density", 1)
    sweeps = [word for sweep in extremes for word in ("--sweep", sweep)]
    command("bench", *sweeps, *given, "--repeats", 1, "--experiments", 1, "--json", tmp_path / "s.json")
    command("plot", tmp_path / "s.json", tmp_path / "s.png")


BAD = ["density", "density=", "k=3", "density=2", "ranks=0", "ranks=1.5", "size=-1", "size=a", "density=0:1:log3", "ranks=nan"]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_sweep_is_refused_in_one_line(text):
    out = command("bench", "--size", 10, "--density", 0.1, "--sweep", text, status=2)
    assert out.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--size", 10), ("--density", 0.1), ("--sweep", "size=3"), ("--size", 3, "--density", 1, "--sweep", "size=3"),
                  ("--size", 3, "--density", 1, "--latency", 1), ("--lossy", "--size", 9, "--sweep", "ranks=2")],
)  # fmt: skip
def test_what_is_missing_or_given_twice_is_said(arguments):
    command("bench", *arguments, status=2)


def test_numbers_are_read_as_people_write_them():
    assert values_of("size", "1e3,1_000_000,2**20,2^4") == [16, 1000, 1_000_000, 2**20]
