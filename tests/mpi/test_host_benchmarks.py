"""The benchmarks for emulated hosts, at tiny sizes and without such hosts: what they count, print, write and draw."""

import json
import os
import subprocess

import pytest
from mpi_launch import ROOT, launcher

import sparseallreduce as sar

BENCH = ROOT / "bench"
SHORT = ("--samples", "2", "--seconds", "0.1", "--longest", "0.01")


@pytest.fixture
def measure(mpi_run, tmp_path):
    """The output of a script of two ranks, and the results that it has written."""

    def measure(program, *arguments):
        report = tmp_path / "report.json"
        where = {"PYTHONPATH": str(BENCH)}
        out = mpi_run(2, BENCH / program, *arguments, *SHORT, "--json", report, timeout=180, env=where).stdout
        return out, json.loads(report.read_text())["results"]

    return measure


def test_every_way_is_checked_and_timed_beside_the_limits(measure):
    refused = ("--with", "no_such_option=1", "--with", "ssar_ring:switch_density=0.3")
    out, (sparse, denser) = measure("hosts.py", "--power", "12", "--density", "0.01", "--density", "0.25", "--no-torch", *refused)

    assert (sparse["entries"], sparse["coo"]["bytes"]) == (41, 41 * 8)
    assert sparse["entropy"]["bytes"] == pytest.approx(41 * (4 + 8.07 / 8), rel=0.01)
    assert denser["entropy"]["seconds"] < denser["coo"]["seconds"] == 1024 * 8 / 125e6
    for result in (sparse, denser):
        rows = {row["way"]: row for row in result["ways"]}
        assert {*sar.algorithms(), "MPI Allreduce", "ssar_ring switch_density=0.3"} - {"dense"} <= rows.keys()
        assert len([name for name in rows if name.startswith("allgather + ")]) == 1
        assert rows["ssar_recursive_doubling"]["bytes_received"] >= result["coo"]["bytes"]
        assert rows[result["best"]]["median"] == min(rows[name]["median"] for name in {*sar.algorithms()} - {"dense", "auto"})
        assert all(len(row["seconds"]) == 2 for row in rows.values())
        assert list(result["left_out"]) == ["auto no_such_option=1"]
    assert "left out: auto no_such_option=1: unknown option" in out
    assert "NOT on hosts of their own" in out


@pytest.mark.release
def test_auto_is_compared_at_every_point_and_by_the_tool_for_hosts(mpi_run, tmp_path):
    assert mpi_run is not None  # there is an mpiexec
    venv = launcher().python.parent.parent
    if not (venv / "bin" / "mpiexec").exists():
        pytest.skip("tools/bench_hosts.sh takes mpiexec from the environment of Python")
    arguments = " ".join(["--power 12 --kind zipf-permuted --kind clustered --density 0.01 --density 0.5", *SHORT])
    command = [ROOT / "tools" / "bench_hosts.sh", venv, tmp_path, "auto", "1x2", "1x3"]
    ran = subprocess.run(command, env=os.environ | {"ARGUMENTS": arguments}, capture_output=True, text=True, check=False, timeout=300)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    for name in ("auto-1x2.png", "auto-1x3.png", "auto.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    points = json.loads((tmp_path / "auto-1x3.json").read_text())["results"]
    assert [(point["kind"], point["density"]) for point in points] == [
        (kind, density) for kind in ("zipf-permuted", "clustered") for density in (0.01, 0.5)
    ]
    for point in points:
        times = {name: way["median"] for name, way in point["ways"].items()}
        in_turn = {name for name, way in point["ways"].items() if len(way["seconds"]) == len(point["ways"]["auto"]["seconds"])}
        fixed = {name: times[name] for name in sar.algorithms() if name != "auto" and name in in_turn}
        assert point["best"] == min(fixed, key=fixed.get)
        assert point["auto_to_dense"] == pytest.approx(times["auto"] / times["MPI Allreduce"])
        assert point["near_best"] == (times["auto"] <= max(1.1 * min(fixed.values()), min(fixed.values()) + 50e-6))
    assert ran.stdout.count("of 4 points") == 4  # each alone, and both joined


@pytest.mark.release
def test_simulated_times_stand_beside_measured_ones(measure, tmp_path):
    network = ("--rate", "200mbit", "--latency", "0.001")
    out, (result,) = measure("simulated.py", "--power", "12", "--density", "0.01", *network, "--plot", tmp_path / "out.png")

    assert result["network"]["bandwidth"] == 25e6
    assert [row["way"] for row in result["ways"]] == sar.algorithms()
    for row in result["ways"]:
        assert row["simulated"] >= 0.001  # a message
        assert row["ratio"] == pytest.approx(row["measured"] / row["simulated"])
        assert row["near"] == (0.75 <= row["ratio"] <= 1.25)
    assert f"of {len(sar.algorithms())}; at every density" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_sets_have_the_positions_that_their_kind_says(mpi_run):
    mpi_run(1, check_sets, env={"PYTHONPATH": str(BENCH)})


def check_sets():
    import auto_choice
    import numpy as np

    size = 4096
    for kind, draw in auto_choice.KINDS.items():
        for count in (1, 41, 2048):
            positions = draw(np.random.default_rng(count), size, count)
            assert len(np.unique(positions)) == len(positions) == count, kind
            assert (np.diff(positions.astype(int)) > 0).all(), kind
            assert positions[0] >= 0, kind
            assert positions[-1] < size, kind
    many = [auto_choice.zipf(np.random.default_rng(seed), size, 64) for seed in range(200)]
    often = np.bincount(np.concatenate(many), minlength=size)
    assert often[:4].min() > 160  # nearly every draw has the first positions
    assert often[size // 2 :].mean() < 2  # and few have a given one of the last
    runs = np.diff(auto_choice.clustered(np.random.default_rng(0), size, 640).astype(int))
    assert (runs == 1).mean() > 0.9


def test_a_wrong_sum_ends_the_benchmark_on_every_rank(mpi_run):
    mpi_run(2, check_wrong_sum, env={"PYTHONPATH": str(BENCH)})


def check_wrong_sum():
    import click
    from mpi4py import MPI
    from ways import Way, checked, uniform_streams

    comm = MPI.COMM_WORLD
    (stream,) = uniform_streams(comm, comm.rank, 1000, 10, 1)
    with pytest.raises(click.ClickException, match="ours alone gave a wrong sum"):
        checked([Way("ours alone", lambda stream: stream)], stream, comm)


@pytest.mark.parametrize(
    "option,value,message",
    [
        ("--with", "ring:a=1", "unknown algorithm 'ring'"),
        pytest.param("--with", "auto:a", "NAME=VALUE", marks=pytest.mark.release),
        pytest.param("--rate", "fast", "1gbit", marks=pytest.mark.release),
    ],
)
def test_a_mistyped_option_is_named(mpi_run, option, value, message):
    ran = mpi_run(1, BENCH / "hosts.py", option, value, check=False, env={"PYTHONPATH": str(BENCH)})
    assert ran.returncode != 0
    assert message in " ".join(ran.stderr.split())


def test_the_tool_for_hosts_refuses_what_it_does_not_know_and_makes_nothing(tmp_path):
    for arguments in (["tables", "2gbit"], ["everything"], []):
        command = [ROOT / "tools" / "bench_hosts.sh", tmp_path, tmp_path / "results", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert not (tmp_path / "results").exists()
