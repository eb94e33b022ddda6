"""`plot`: a picture of what train and bench report, and a clear word about all else."""

import json

import pytest
from click.testing import CliRunner
from pictures import check_picture, faults_of

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


def labels(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def panels(figure, word):
    """The axes whose titles have a word."""
    return [axes for axes in figure.axes if word in axes.get_title().replace("\n", " ")]


def curves(axes):
    """What lines show: (x, y) of each."""
    return [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]


def test_training_runs_are_drawn_by_epoch_by_time_and_by_phase(reports, drawn, tmp_path):
    out = command("plot", reports / "dense.json", reports / "sparse.json", tmp_path / "out.png")
    assert "2 runs" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    check_picture(drawn[0])
    by_pass, by_time = panels(drawn[0], "Training loss")
    epochs = json.loads((reports / "sparse.json").read_text())["epochs"]
    assert curves(by_pass)[1] == ([1, 2, 3], [epoch["loss"] for epoch in epochs])
    assert by_time.lines[1].get_xdata()[-1] < sum(epoch["seconds"]["total"] for epoch in epochs)
    assert curves(panels(drawn[0], "Accuracy")[0])[0][1][-1] == epochs_of(reports / "dense.json")[-1]["train_accuracy"]
    assert {"dense", "sparse", "compute", "update"} <= set(labels(drawn[0]))
    (phases,) = panels(drawn[0], "phase")
    lengths = [sum(bars[run].get_width() for bars in phases.containers) for run in range(2)]
    assert lengths[1] == pytest.approx(sum(epoch["seconds"]["total"] for epoch in epochs) / 3)
    assert len(panels(drawn[0], "Density")[0].lines) == 4


def epochs_of(path):
    return json.loads(path.read_text())["epochs"]


def changed(path, out, **values):
    """A report with other values in its epochs, or arguments where these have the name."""
    report = json.loads(path.read_text())
    for name, value in values.items():
        if name in report["arguments"]:
            report["arguments"][name] = value
        else:
            for number, epoch in enumerate(report["epochs"]):
                epoch[name] = value(number) if callable(value) else value
    out.write_text(json.dumps(report))
    return out


def test_losses_of_two_kinds_have_axes_of_their_own(reports, drawn, tmp_path):
    hinge = changed(reports / "dense.json", tmp_path / "hinge.json", model="svm", loss="hinge")
    progressive = changed(reports / "dense.json", tmp_path / "progressive.json", evaluated=False)
    command("plot", reports / "dense.json", hinge, progressive, tmp_path / "out.png")
    check_picture(drawn[0])
    losses = {axes.get_title().replace("\n", " "): len(axes.lines) for axes in panels(drawn[0], "oss")}
    assert len(losses) == 3 and set(losses.values()) == {1}


def test_what_ranks_have_sent_and_test_samples_are_drawn(reports, drawn, tmp_path):
    sent = changed(reports / "dense.json", tmp_path / "sent.json", bytes_sent=10_000_000, test_loss=lambda n: 2 - n, test_accuracy=0.5)
    command("plot", sent, reports / "sparse.json", tmp_path / "out.svg")
    check_picture(drawn[0])
    _, _, by_bytes = panels(drawn[0], "without penalty")
    assert curves(by_bytes) == [([10_000_000, 20_000_000, 30_000_000], [2, 1, 0])]
    assert {"training samples", "test samples"} <= set(labels(drawn[0]))


def test_a_search_is_drawn_by_penalty(reports, drawn, tmp_path):
    report = json.loads((reports / "dense.json").read_text())
    epochs = [epoch | {"validation_accuracy": 0.9} for epoch in report["epochs"]]
    report["models"] = [{"l2": l2, "best_epoch": 2, "epochs": epochs} for l2 in (0.1, 0.001, 0.01)]
    (tmp_path / "search.json").write_text(json.dumps(report))
    command("plot", tmp_path / "search.json", tmp_path / "out.png")
    check_picture(drawn[0])
    assert curves(panels(drawn[0], "Search")[0]) == [([0.001, 0.01, 0.1], [0.9] * 3)]


@pytest.mark.parametrize("parameter, model", [("C", "logistic"), ("l2", "linear")])
def test_a_search_by_folds_is_drawn_as_the_table_of_train_has_it(parameter, model, reports, drawn, tmp_path):
    values = (f"--{parameter}", "10,0.1,1", "--folds", 3)
    command("train", reports / "data.svm", "--model", model, *values, "--json", tmp_path / "search.json")
    command("plot", tmp_path / "search.json", tmp_path / "out.png")
    check_picture(drawn[0])
    figure = "validation_accuracy" if model == "logistic" else "validation_loss"
    candidates = json.loads((tmp_path / "search.json").read_text())["search"]["candidates"]
    means = {each[parameter]: each[figure]["mean"] for each in candidates}
    (axes,) = panels(drawn[0], "Search, mean and range of the folds")
    assert curves(axes) == [(sorted(means), [means[value] for value in sorted(means)])]
    assert axes.collections


def test_runs_in_rounds_have_no_empty_axes(reports, drawn, tmp_path):
    train = ("train", reports / "data.svm", "--solver", "dual", "--json", tmp_path / "rounds.json")
    command(*train)
    command("plot", tmp_path / "rounds.json", tmp_path / "out.png")
    check_picture(drawn[0])
    assert not panels(drawn[0], "Density")


def test_densities_are_drawn_by_iteration_where_they_are_recorded(reports, drawn, tmp_path):
    report = json.loads((reports / "sparse.json").read_text())
    for epoch in report["epochs"]:
        epoch["gradient_densities"] = [0.1] * epoch["steps"]
        epoch["total_densities"] = [0.2] * epoch["steps"]
    (tmp_path / "fine.json").write_text(json.dumps(report))
    command("plot", tmp_path / "fine.json", tmp_path / "out.svg")
    check_picture(drawn[0])
    given, summed = panels(drawn[0], "Density")[0].lines
    assert len(given.get_xdata()) == 3 * report["epochs"][0]["steps"]
    assert (set(given.get_ydata()), set(summed.get_ydata())) == ({0.1}, {0.2})


def test_benchmarks_are_drawn_algorithm_by_algorithm(reports, drawn, tmp_path):
    command("plot", reports / "bench-0.01.json", reports / "bench-0.1.json", tmp_path / "out.pdf")
    check_picture(drawn[0])
    (times,) = drawn[0].axes  # a process alone sends nothing
    assert labels(drawn[0]) == ["bench-0.01", "bench-0.1"]
    assert [tick.get_text() for tick in times.get_yticklabels()][2:] == ["ssar_ring", "dense"]
    assert times.lines[0].get_xdata()[2] == json.loads((reports / "bench-0.01.json").read_text())["results"]["algorithms"][0]["median"]


def test_simulations_and_reducers_are_drawn(drawn, tmp_path):
    command("simulate", "--ranks", 8, "--size", 1000, "--density", 0.05, "--json", tmp_path / "simulated.json")
    command("simulate", "--ranks", 4, "--size", 1000, "--lossy", "--json", tmp_path / "lossy.json")
    command("bench", "--size", 1000, "--lossy", "--repeats", 2, "--experiments", 1, "--json", tmp_path / "bench.json")
    for name in ("simulated", "lossy", "bench"):
        command("plot", tmp_path / f"{name}.json", tmp_path / "out.png")
        check_picture(drawn[-1])
    times, sent = drawn[0].axes
    rows = json.loads((tmp_path / "simulated.json").read_text())["results"]["algorithms"]
    assert times.lines[0].get_xdata().tolist() == [row["time"] for row in rows]
    assert sent.lines[0].get_xdata().tolist() == [row["bytes_sent"]["max"] for row in rows]
    assert {"whole operation", "selection only"} <= set(labels(drawn[2]))


def test_many_runs_of_long_names_leave_no_text_on_other_text(reports, drawn, tmp_path):
    for number in range(9):
        (tmp_path / f"{'a-long-name-of-a-run-' * 5}{number}.json").write_text((reports / "sparse.json").read_text())
        (tmp_path / f"bench-{'with-a-long-name-' * 5}{number}.json").write_text((reports / "bench-0.1.json").read_text())
    command("plot", *sorted(tmp_path.glob("a-long*.json")), tmp_path / "out.png")
    command("plot", *sorted(tmp_path.glob("bench-*.json")), tmp_path / "out.png")
    for figure in drawn:
        check_picture(figure)


def test_the_check_of_pictures_finds_what_is_wrong():
    figure = Figure(figsize=(3, 2))
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8))
    axes.set_title("a title that is far longer than the figure is wide, so that it leaves it")
    axes.text(0.5, 0.5, "one")
    axes.text(0.5, 0.5, "other")
    found = " ".join(faults_of(figure))
    assert "leaves the figure" in found and "overlaps" in found and "empty" in found


def test_runs_of_the_same_name_are_told_apart_by_their_folders(reports, drawn, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "dense.json").write_text((reports / "sparse.json").read_text())
    command("plot", reports / "dense.json", tmp_path / "other" / "dense.json", tmp_path / "out.png")
    assert labels(drawn[0])[:2] == [f"{reports.name}/dense", "other/dense"]


BAD = {
    "text": ("1 1:1\n", "is not JSON"),
    "bytes": (b"\xff\xfe", "is not JSON"),
    "list": ("[1, 2]", "is not a report"),
    "foreign": ('{"loss": 1}', "is not a report"),
    "schema": ('{"schema": 99, "command": "train"}', "has schema 99"),
    "command": ('{"schema": 1, "command": "doctor"}', "only those of train, bench, simulate and figures"),
    "empty": ('{"schema": 1, "command": "train", "epochs": []}', "'epochs' is missing or empty"),
    "bench": ('{"schema": 1, "command": "bench", "results": 3}', "'results.algorithms' is missing or empty"),
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
    assert "plot them separately" in command("plot", reports / "dense.json", reports / "bench-0.1.json", tmp_path / "out.png", status=1)
    assert "absent.json" in command("plot", tmp_path / "absent.json", tmp_path / "out.png", status=1)
    assert "cannot write" in command("plot", reports / "dense.json", tmp_path / "no folder" / "out.png", status=1)
    assert "cannot write" in command("plot", reports / "dense.json", tmp_path / "out.xyz", status=1)
    command("plot", reports / "dense.json", status=2)
