"""The networks that the papers' figures are repeated with, and the commands that draw them, on a few steps."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner

from bench.neural import data, models, overlap, scaling, training
from bench.neural.__main__ import main
from bench.neural.figures import FIGURES
from bench.neural.papers import PAPERS


def run(*arguments):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_learns_from_the_same_beginning(name):
    given = data.data_of(name)
    model = models.make(name, given.classes, seed=1)
    assert 300_000 <= models.count(model) <= 5_000_000
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), models.make(name, given.classes, seed=1).parameters()))
    samples = data.Samples(given.train.x[:16], given.train.y[:16])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(training.loss_of(model, samples))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert abs(losses[0] - np.log(given.classes)) < 1  # before it has learned anything


def test_the_largest_model_is_within_five_million_parameters():
    assert 4_000_000 < models.count(models.make("vgg", 10, width=108)) <= 5_000_000


def test_the_last_character_of_a_piece_is_the_next_ones_first():
    train, test, classes = data.text(16)
    assert torch.equal(train.x[:, 1:], train.y[:, :-1]) and train.x.max() < classes and len(test.x) == 512
    data.text.cache_clear()
    assert torch.equal(data.text(16).train.x, train.x)


def test_ranks_share_out_every_batch():
    parts = [data.shares(103, 12, 5, rank, 4) for rank in range(4)]
    assert [part.shape for part in parts] == [(8, 3)] * 4
    assert len(np.unique(np.concatenate([part.ravel() for part in parts]))) == 96


def test_every_figure_names_what_its_paper_says():
    assert set(FIGURES) == set(PAPERS) and set(run("figures", "--list").split()) >= set(FIGURES)


def test_what_is_hidden_is_what_the_packed_form_shows(capsys):
    times = {overlap.ALONE: [0.1], overlap.GLOO: [0.3], "dense, packed": [0.2], "dense, hooked": [0.125]}
    table = overlap.print_table({"parameters": 5, "times": times})
    assert table["dense, hooked"]["hidden"] == pytest.approx(0.75) and table["dense, hooked"]["of_ddp"] == pytest.approx(0.125)


def test_a_sum_that_fits_behind_back_propagation_is_hidden():
    assert scaling.Step(1.0, 2.0, 3.0).overlapped() == (1.0, 0.0, 3.0) and scaling.Step(1.0, 5.0, 3.0).overlapped() == (1.0, 3.0, 3.0)


def test_figures_are_simulated_and_drawn(tmp_path):
    output = run("figures", "--figure", "gtopk-9", "--figure", "thesis-5.15", "--most-ranks", 4, "--out", tmp_path)
    assert "times as fast as SGD" in output and "P = 4, N = 25 million" in output
    report = json.loads((tmp_path / "figure-gtopk-9.json").read_text())
    assert list(report["results"]) == ["4 ranks, 25 million"] and report["paper"] == PAPERS["gtopk-9"]
    row = report["results"]["4 ranks, 25 million"]
    assert 0.7 < row["gTopk"] / row["gTopk, formula"] < 1.1  # codecs, and headers
    assert (tmp_path / "figure-thesis-5.15.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_cached_is_not_read_from_the_store_again(tmp_path):
    run("figures", "--figure", "commlib-9", "--samples", 32, "--out", tmp_path)
    results = json.loads((tmp_path / "figure-commlib-9.json").read_text())["results"]
    waits = 16 * results["bytes"] / results["samples"] / results["rate"]  # of a step that reads from the store
    seconds = {name: row["store"] for name, row in results["epochs"].items()}
    assert len(seconds) == 6
    for name, found in seconds.items():
        assert found == (pytest.approx(waits) if "naive" in name or "cold" in name else 0), name


def test_local_steps_are_trained_beside_dense_ones_and_not_repeated(tmp_path):
    options = ("--ways", "dense:1,sparseloco:2", "--seeds", 0, "--steps", 8, "--pieces", 1, "--width", 4, "--warmup", 4)
    options += ("--records", tmp_path / "records.jsonl")
    lines = [line for line in run("local", *options).splitlines() if line.startswith(("| dense", "| sparseloco 0.02, warmup 4"))]
    assert len(lines) == 2 and "+0.00 %" in lines[0]
    records = (tmp_path / "records.jsonl").read_text()
    dense, local = map(json.loads, records.splitlines())
    assert dense["curve"][1] == local["curve"][1] and dense["curve"][3] != local["curve"][3]  # after the warm-up, and at the end
    run("local", *options)
    assert (tmp_path / "records.jsonl").read_text() == records


@pytest.mark.mpi
@pytest.mark.release
def test_trainings_are_recorded_and_not_repeated(tmp_path):
    records = tmp_path / "records.jsonl"
    records.write_text('{"model": "perc')  # cut by an earlier end
    options = ("--models", "perceptron", "--optimisers", "oktopk", "--ranks", 2, "--samples", 128, "--epochs", 1, "--seeds", 1)
    options += ("--records", records)
    output = run("table", *options)
    rows = [line for line in output.splitlines() if line.startswith("| perceptron")]
    assert len(rows) == 2
    before = records.read_text()
    assert run("table", *options).count("| perceptron") == len(rows) and records.read_text() == before
    found = {each["optimiser"]: each for each in training.records(records).values()}
    assert found["oktopk"]["bytes_sent"] < found["dense"]["bytes_sent"] / 2  # of two steps, in which the density warms up
    assert len({json.dumps(each["curve"][-1]["step"]) for each in found.values()}) == 1
    setting = training.Setting("perceptron", "dense", ranks=2, most_samples=128)
    assert setting.steps == 40
    for steps in (40, 30):  # the second with a number of epochs that the model had before
        records.write_text(json.dumps(training.asdict(setting) | {"steps": steps}) + "\n")
        assert list(training.records(records)) == ([setting.key] if steps == 40 else [])
