"""`simulate --lossy`: the words that reducers send, for any number of ranks, and that a wrong one is noticed."""

import json

import pytest
from click.testing import CliRunner

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.reducers import REDUCERS


def simulate(*arguments, status=0):
    result = CliRunner().invoke(main, ["simulate", "--lossy", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


@pytest.mark.parametrize("ranks", [1, 2, 6, 16])
def test_words_are_counted_and_results_right(tmp_path, ranks):
    output = simulate("--ranks", ranks, "--size", 40_000, "--density", 0.02, "--json", tmp_path / "out.json")

    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["schema"], report["command"], report["results"]["entries"]) == (1, "simulate", 800)
    rows = {row["algorithm"]: row for row in report["results"]["algorithms"]}
    assert list(rows) == list(REDUCERS)
    for name, row in rows.items():
        assert name in output
        assert row["correct"] is True
        assert 0 < row["contributed"] <= (1 if name in ("hitopk", "auto") else 0.025)
        assert (row["words"]["max"] > 0) == (row["time"] > 0) == (ranks > 1)
    k, levels = 800, (ranks - 1).bit_length()
    assert max(rows["oktopk"][when]["max"] for when in ("words", "first_words")) <= max(4, 6 * (ranks - 1) / ranks) * k
    assert rows["gtopk"]["words"]["max"] <= 4 * k * levels
    assert rows["topka"]["words"]["max"] == 2 * k * (ranks - 1)


def test_one_percent_of_some_reducers(tmp_path):
    simulate("--reducers", "gtopk", "--ranks", 3, "--size", 1000, "--json", tmp_path / "out.json")
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (results["density"], results["entries"]) == (0.01, 10)
    assert [row["algorithm"] for row in results["algorithms"]] == ["gtopk"]


@pytest.mark.parametrize("size", [0, 1, 5])
def test_fewer_values_than_ranks(size):
    simulate("--ranks", 7, "--size", size, "--dtype", "float64")


class Forgetful(sar.TopkA):
    name = "topka"

    def reduce(self, accumulator, gradient, rank, ranks):
        reduced = yield from super().reduce(accumulator, gradient, rank, ranks)
        return reduced._replace(contributed=reduced.contributed[1:])


def test_a_wrong_result_fails(monkeypatch):
    monkeypatch.setitem(REDUCERS, "topka", Forgetful)
    output = simulate("--ranks", 4, "--size", 1000, status=1)
    assert "please report it: topka" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "arguments,remedy",
    [
        (["--reducers", "fastest"], "give all, or some of"),
        (["--density", "0"], "--density must be above 0"),
        (["--positions", "same"], "leave it out, or leave out --lossy"),
        (["--dtype", "int64"], "give --dtype float32 or float64"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, remedy):
    output = simulate("--ranks", 2, "--size", 10, *arguments, status=2)
    assert remedy in output
    assert output.count("\n") == 1


def test_density_is_needed_without_lossy():
    result = CliRunner().invoke(main, ["simulate", "--ranks", "2", "--size", "10"])
    assert result.exit_code == 2
    assert "--density is missing" in result.output
