"""`bench`, alone and under mpiexec: what it times, that it notices a wrong result, and what it writes."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import sparseallreduce as sar
from sparseallreduce.cli import main
from sparseallreduce.streams.kernels import backend

SMALL = ["--size", "2000", "--density", "0.05", "--repeats", "2", "--experiments", "2"]


def bench(*arguments, status=0):
    result = CliRunner().invoke(main, ["bench", *SMALL, *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def test_json_holds_schema_arguments_environment_and_results(tmp_path):
    output = bench("--algorithms", "auto,ssar_ring", "--seed", 3, "--json", tmp_path / "out.json")

    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["schema"], report["command"]) == (1, "bench")
    assert report["arguments"]["seed"] == 3
    assert {"python", "numpy", "mpi4py", "mpi", "cpu", "ranks", "hosts"} <= report["environment"].keys()
    results = report["results"]
    assert (results["ranks"], results["size"], results["entries"]) == (1, 2000, 100)
    assert [row["algorithm"] for row in results["algorithms"]] == ["auto", "ssar_ring"]
    for row in (results["dense"], results["dense_with_densifying"], *results["algorithms"]):
        assert np.shape(row["seconds"]) == (2, 2)
        assert 0 < row["lower_quartile"] <= row["median"] <= row["upper_quartile"]
        assert row["algorithm"] in output
    for row in results["algorithms"]:
        assert row["ratio"] == pytest.approx(row["median"] / results["dense"]["median"])
        assert row["result_density"] == 0.05
        assert row["correct"] is True


def test_all_algorithms_are_measured_by_default(tmp_path):
    bench("--json", tmp_path / "out.json")

    rows = json.loads((tmp_path / "out.json").read_text())["results"]["algorithms"]
    assert [row["algorithm"] for row in rows] == sar.algorithms()


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "complex64", "complex128"])
def test_every_operator_and_dtype_is_right(op, dtype):
    if dtype.startswith("complex") and op in ("min", "max"):
        assert "have no order" in bench("--op", op, "--dtype", dtype, status=2)
        return
    bench("--op", op, "--dtype", dtype, "--algorithms", "ssar_split_allgather", "--non-blocking")


@pytest.mark.parametrize("size,density", [(0, 0), (1, 1), (3, 0), (50, 1)])
def test_extreme_sizes_and_densities(size, density):
    bench("--size", size, "--density", density)


def test_cold_caches_change_the_order_alone(tmp_path):
    bench("--cold-caches", "--algorithms", "auto", "--json", tmp_path / "out.json")

    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["cold_caches"] is True
    assert np.shape(results["dense"]["seconds"]) == (2, 2)


def test_a_wrong_result_fails(monkeypatch):
    right = sar.allreduce

    def wrong(stream, comm, op, algorithm):
        result = right(stream, comm, op, algorithm)
        return sar.SparseStream(result.indices, 1.01 * result.values, result.size) if algorithm == "ssar_ring" else result

    monkeypatch.setattr(sar, "allreduce", wrong)

    output = bench("--algorithms", "auto,ssar_ring", status=1)

    assert "ssar_ring: the error is" in output
    assert "auto: off by" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "arguments,remedy",
    [
        (["--algorithms", "auto,fastest"], "give all, or some of dense,"),
        (["--algorithms", ","], "give all, or some of dense,"),
        (["--density", "1.5"], "--density"),
        (["--device", "tpu"], "'cpu'"),
        (["--dtype", "float8"], "float32"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(arguments, remedy):
    output = bench(*arguments, status=2)

    assert remedy in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("there", [False, True])
def test_a_gpu_that_is_not_there_is_one_line_and_status_2(monkeypatch, capsys, there):
    monkeypatch.setattr(backend, "_loaded", backend if there else None)  # a GPU and no CuPy, or neither
    monkeypatch.setattr("numba.cuda.is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "cupy", None)

    for kind in ((), ("--lossy",)):
        output = bench("--device", "gpu", *kind, status=2)

        assert ("install the extra gpu" if there else "there is no GPU here") in output
        assert output.count("\n") == 1
    assert importlib.import_module("gpu").main([]) == 2  # of bench/, which ranks of other tests of this file do not have
    shown, told = capsys.readouterr()
    assert shown == "" and told.startswith("error: ") and told.count("\n") == 1


def test_a_result_file_that_cannot_be_written_is_known_at_once(tmp_path):
    output = bench("--size", 10**12, "--json", tmp_path / "missing" / "out.json", status=1)

    assert output.startswith("Error: cannot write")
    assert output.count("\n") == 1


def test_without_mpi4py():
    program = "import sys; sys.modules['mpi4py'] = None; from sparseallreduce.cli import main; main(sys.argv[1:])"

    ran = subprocess.run([sys.executable, "-c", program, "bench", *SMALL], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert "no MPI" in ran.stdout


def test_on_four_ranks_under_mpiexec(mpi_run, tmp_path):
    ran = mpi_run(4, "-m", "sparseallreduce", "bench", *SMALL, "--json", tmp_path / "out.json")

    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert results["ranks"] == 4
    assert [row["algorithm"] for row in results["algorithms"]] == sar.algorithms()
    for row in results["algorithms"]:
        assert row["correct"] is True
        assert len(row["bytes_sent"]) == 4
        assert min(row["bytes_sent"]) > 0
        assert row["result_density"] == pytest.approx(1 - 0.95**4, rel=0.1)
    assert results["algorithms"][-1]["chosen"] in sar.algorithms()
    assert ran.stdout.count("ssar_ring") == 1


def test_different_bits_on_a_rank_fail_on_all(mpi_run):
    ran = mpi_run(2, bench_with_one_rank_wrong, check=False)

    assert ran.returncode == 1
    assert "ssar_ring: the ranks have different results" in ran.stderr
    assert ran.stderr.count("different results") == 1
    assert "Traceback" not in ran.stderr


def bench_with_one_rank_wrong():
    right = sar.allreduce

    def wrong(stream, comm, op, algorithm):
        result = right(stream, comm, op, algorithm)
        return sar.SparseStream(result.indices[1:], result.values[1:], result.size) if comm.rank == 1 else result

    sar.allreduce = wrong
    main(["bench", *SMALL, "--algorithms", "ssar_ring"])
