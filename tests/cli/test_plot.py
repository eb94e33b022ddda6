"""`plot`: a picture of what train and bench report, and a clear word about all else."""

import json

import pytest
from click.testing import CliRunner

from sparseallreduce.cli import main

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure


def command(*arguments, status=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two training runs and two benchmarks."""
    folder = tmp_path_factory.mktemp("reports")
    command("generate", "uniform", folder / "data.svm", "--samples", 300, "--features", 2000, "--density", 0.01)
    for strategy in ("dense", "sparse"):
        train = ("train", folder / "data.svm", "--epochs", 3, "--strategy", strategy, "--batch-size", 50)
        command(*train, "--json", folder / f"{strategy}.json")
    for density in (0.01, 0.1):
        bench = ("bench", "--size", 1000, "--density", density, "--repeats", 1, "--experiments", 1)
        command(*bench, "--algorithms", "ssar_ring,dense", "--json", folder / f"bench-{density}.json")
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures that have been written."""
    figures, save = [], Figure.savefig

    def saved(figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    return figures


def labels(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_training_runs_are_drawn_by_epoch_by_time_and_by_phase(reports, drawn, tmp_path):
    out = command("plot", reports / "dense.json", reports / "sparse.json", tmp_path / "out.png")
    assert "2 runs" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    by_pass, by_time, phases, densities = drawn[0].axes
    assert labels(by_pass) == labels(by_time) == ["dense", "sparse"]
    epochs = json.loads((reports / "sparse.json").read_text())["epochs"]
    assert by_pass.lines[1].get_ydata().tolist() == [epoch["loss"] for epoch in epochs]
    assert by_pass.lines[1].get_xdata().tolist() == [1, 2, 3]
    assert by_time.lines[1].get_xdata()[-1] < sum(epoch["seconds"]["total"] for epoch in epochs)
    assert {"compute", "communicate", "update"} <= set(labels(phases))
    assert len(densities.lines) == 4
    heights = [sum(bars[run].get_height() for bars in phases.containers) for run in range(2)]
    assert heights[1] == pytest.approx(sum(epoch["seconds"]["total"] for epoch in epochs) / 3)


def test_densities_are_drawn_by_iteration_where_they_are_recorded(reports, drawn, tmp_path):
    report = json.loads((reports / "sparse.json").read_text())
    for epoch in report["epochs"]:
        epoch["gradient_densities"] = [0.1] * epoch["steps"]
        epoch["total_densities"] = [0.2] * epoch["steps"]
    (tmp_path / "fine.json").write_text(json.dumps(report))
    command("plot", tmp_path / "fine.json", tmp_path / "out.svg")
    given, summed = drawn[0].axes[3].lines
    assert len(given.get_xdata()) == 3 * report["epochs"][0]["steps"]
    assert (set(given.get_ydata()), set(summed.get_ydata())) == ({0.1}, {0.2})


def test_benchmarks_are_drawn_algorithm_by_algorithm(reports, drawn, tmp_path):
    command("plot", reports / "bench-0.01.json", reports / "bench-0.1.json", tmp_path / "out.pdf")
    times, sent = drawn[0].axes
    assert [text.partition(":")[0] for text in labels(times)] == ["bench-0.01", "bench-0.1"]
    assert [tick.get_text() for tick in sent.get_xticklabels()][2:] == ["ssar_ring", "dense"]


def test_runs_of_the_same_name_are_told_apart_by_their_folders(reports, drawn, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dense.json").write_text((reports / "sparse.json").read_text())
    command("plot", reports / "dense.json", tmp_path / "other" / "dense.json", tmp_path / "out.png")
    assert labels(drawn[0].axes[0]) == [f"{reports.name}/dense", "other/dense"]


BAD = {
    "text": ("1 1:1\n", "is not JSON"),
    "bytes": (b"\xff\xfe", "is not JSON"),
    "list": ("[1, 2]", "is not a report"),
    "foreign": ('{"loss": 1}', "is not a report"),
    "schema": ('{"schema": 99, "command": "train"}', "has schema 99"),
    "command": ('{"schema": 1, "command": "doctor"}', "only those of train and bench"),
    "empty": ('{"schema": 1, "command": "train", "epochs": []}', "nothing in its 'epochs'"),
    "bench": ('{"schema": 1, "command": "bench", "results": 3}', "nothing in its 'results.algorithms'"),
    "damaged": ('{"schema": 1, "command": "train", "epochs": [{"epoch": 1}]}', "damaged: KeyError 'loss'"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_report_is_refused_by_name(what, tmp_path):
    content, reason = BAD[what]
    path = tmp_path / "it.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert reason in command("plot", path, tmp_path / "out.png", status=1)
    assert not (tmp_path / "out.png").exists()


def test_files_that_do_not_fit_are_refused(reports, tmp_path):
    assert "plot them apart" in command("plot", reports / "dense.json", reports / "bench-0.1.json", tmp_path / "out.png", status=1)
    assert "absent.json" in command("plot", tmp_path / "absent.json", tmp_path / "out.png", status=1)
    assert "cannot write" in command("plot", reports / "dense.json", tmp_path / "no folder" / "out.png", status=1)
    assert "cannot write" in command("plot", reports / "dense.json", tmp_path / "out.xyz", status=1)
    command("plot", reports / "dense.json", status=2)
