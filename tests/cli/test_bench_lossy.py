"""`bench --lossy`, alone and under mpiexec: what it times and counts, and that it notices what a reducer must not do."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.reducers import REDUCERS

SMALL = ["--lossy", "--size", "3000", "--repeats", "3", "--experiments", "2"]


def bench(*arguments, status=0):
    result = CliRunner().invoke(main, ["bench", *SMALL, *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def test_json_holds_times_apart_and_counts(tmp_path):
    output = bench("--density", 0.02, "--seed", 5, "--json", tmp_path / "out.json")

    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["schema"], report["command"], report["arguments"]["lossy"]) == (1, "bench", True)
    results = report["results"]
    assert (results["ranks"], results["size"], results["entries"], results["seed"]) == (1, 3000, 60, 5)
    assert [row["algorithm"] for row in results["algorithms"]] == list(REDUCERS)
    for row in (results["copy"], results["dense"]):
        assert np.shape(row["seconds"]) == (6,)
        assert 0 < row["lower_quartile"] <= row["median"] <= row["upper_quartile"]
    for row in results["algorithms"]:
        assert row["algorithm"] in output
        assert np.shape(row["seconds"]) == np.shape(row["select_seconds"]) == (2, 3)
        assert 0 < row["select"]["median"] < row["median"]
        assert row["communicate"]["median"] > 0
        np.testing.assert_allclose(row["copies"], row["median"] / results["copy"]["median"])
        np.testing.assert_allclose(row["ratio"], row["median"] / results["dense"]["median"])
        assert row["correct"] is True
        assert 0 < row["contributed"] < (1.05 if row["algorithm"] in ("hitopk", "auto") else 0.05)
        assert 0 < row["result_density"] < (1.05 if row["algorithm"] == "auto" else 0.05)
        assert row["words"] == row["messages"] == [0]


def test_one_percent_is_summed_by_default(tmp_path):
    bench("--json", tmp_path / "out.json", "--reducers", "topka")
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (results["density"], results["entries"]) == (0.01, 30)
    assert [row["algorithm"] for row in results["algorithms"]] == ["topka"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size,density", [(0, 0.5), (1, 1), (3, 1e-6), (50, 1)])
def test_extreme_sizes_and_densities(dtype, size, density):
    bench("--size", size, "--density", density, "--dtype", dtype, "--non-blocking")


def test_it_is_drawn(tmp_path):
    bench("--json", tmp_path / "out.json")
    drawn = CliRunner().invoke(main, ["plot", str(tmp_path / "out.json"), str(tmp_path / "out.png")])
    assert drawn.exit_code == 0, drawn.output
    assert (tmp_path / "out.png").stat().st_size > 10_000


class Forgetful(sar.TopkA):
    """Says that all of its choice is in the sum, and leaves one value out."""

    name = "topka"

    def reduce(self, accumulator, gradient, rank, ranks):
        reduced = yield from super().reduce(accumulator, gradient, rank, ranks)
        update = reduced.update
        return reduced._replace(update=sar.SparseStream(update.indices[1:], update.values[1:], update.size))


def test_what_is_lost_is_noticed(monkeypatch):
    monkeypatch.setitem(REDUCERS, "topka", Forgetful)
    output = bench(status=1)
    assert "topka: the error of residuals and update is" in output
    assert "gtopk: " not in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "arguments,remedy",
    [
        (["--reducers", "topka,fastest"], "give all, or some of"),
        (["--reducers", ","], "no reducer given"),
        (["--density", "0"], "--density must be above 0"),
        (["--algorithms", "auto"], "leave it out, or leave out --lossy"),
        (["--op", "max"], "leave it out, or leave out --lossy"),
        (["--cold-caches"], "leave it out, or leave out --lossy"),
        (["--dtype", "int32"], "give --dtype float32 or float64"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, remedy):
    output = bench(*arguments, status=2)
    assert remedy in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("arguments,remedy", [([], "--density is missing"), (["--density", "1", "--reducers", "all"], "give --lossy too")])
def test_what_is_of_lossy_alone(arguments, remedy):
    result = CliRunner().invoke(main, ["bench", "--size", "10", *arguments])
    assert result.exit_code == 2
    assert remedy in result.output


def test_on_four_ranks_under_mpiexec(mpi_run, tmp_path):
    mpi_run(4, "-m", "sparseallreduce", "bench", *SMALL, "--density", "0.02", "--json", tmp_path / "out.json")

    results = json.loads((tmp_path / "out.json").read_text())["results"]
    rows = {row["algorithm"]: row for row in results["algorithms"]}
    assert list(rows) == list(REDUCERS)
    for row in rows.values():
        assert row["correct"] is True
        assert len(row["words"]) == 4 and min(row["words"]) > 0 and min(row["messages"]) > 0
    assert rows["topka"]["words"] == [2 * 60 * 3] * 4  # 2 k (P - 1)
    assert max(rows["gtopk"]["words"]) <= 4 * 60 * 2  # 4 k log2 P
    assert rows["gtopk"]["result_density"] == pytest.approx(0.02)


def test_different_bits_on_a_rank_fail_on_all(mpi_run):
    ran = mpi_run(2, bench_with_one_rank_wrong, check=False)

    assert ran.returncode == 1
    assert "topka: the ranks have different results" in ran.stderr
    assert ran.stderr.count("different results") == 1
    assert "Traceback" not in ran.stderr


def bench_with_one_rank_wrong():
    class Wrong(Forgetful):
        def reduce(self, accumulator, gradient, rank, ranks):
            if rank:
                return (yield from super().reduce(accumulator, gradient, rank, ranks))
            return (yield from sar.TopkA.reduce(self, accumulator, gradient, rank, ranks))

    REDUCERS["topka"] = Wrong
    main(["bench", *SMALL, "--reducers", "topka"])
