"""`simulate`: real data on a virtual network, checked, and comparable with the model."""

import json

import pytest
from click.testing import CliRunner
from strategies import DTYPES

import sparseallreduce as sar
from sparseallreduce.cli import main


def simulate(*arguments, status=0):
    result = CliRunner().invoke(main, ["simulate", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def rows(tmp_path, *arguments):
    simulate(*arguments, "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["schema"], report["command"]) == (1, "simulate")
    return {row["algorithm"]: row for row in report["results"]["algorithms"]}


def test_all_algorithms_are_simulated_and_right(tmp_path):
    found = rows(tmp_path, "--ranks", 6, "--size", 5000, "--density", 0.01)

    assert list(found) == sar.algorithms()
    assert all(row["correct"] for row in found.values())
    assert found["auto"]["chosen"] in sar.algorithms()
    assert found["auto"]["time"] == min(row["time"] for row in found.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions,density", [("uniform", None), ("disjoint", 0.08), ("same", 0.01)])
def test_positions_of_the_ranks(tmp_path, positions, density, dtype):
    arguments = ["--ranks", 8, "--size", 20000, "--density", 0.01, "--dtype", dtype, "--positions", positions]

    row = rows(tmp_path, *arguments, "--algorithms", "ssar_recursive_doubling")["ssar_recursive_doubling"]

    assert row["correct"]
    if density is None:
        assert 0.07 < row["result_density"] < 0.08
    else:
        error = 0.001 if dtype[0] in "ib" else 1e-9  # integers and bfloat16 may add up to zero
        assert row["result_density"] == pytest.approx(density, abs=error)


def test_copies_between_gpu_and_host_are_predicted_and_shown(tmp_path):
    arguments = ["--ranks", 4, "--size", 10**5, "--density", 0.01, "--algorithms", "ssar_recursive_doubling,auto"]
    dear = ["--device", "gpu", "--copy-latency", 1, "--copy-bandwidth", 1e12]

    host, device, costly = (rows(tmp_path, *arguments, *more) for more in ((), ("--device", "gpu"), dear))

    name = "ssar_recursive_doubling"
    assert host[name]["predicted_copies"] == 0 < device[name]["predicted_copies"] < 1e-3
    assert device[name]["predicted_time"] == pytest.approx(host[name]["predicted_time"] + device[name]["predicted_copies"])
    assert costly[name]["predicted_copies"] == pytest.approx(4.0, rel=1e-3)  # two messages, each copied twice
    assert device[name]["time"] == host[name]["time"]
    assert costly["auto"]["chosen"] == "dense"  # which copies a vector once


def test_time_follows_latency_and_bandwidth(tmp_path):
    arguments = ["--ranks", 4, "--size", 10**5, "--density", 0.01, "--algorithms", "ssar_recursive_doubling", "--latency", 0.5]

    row = rows(tmp_path, *arguments, "--bandwidth", 1e15)["ssar_recursive_doubling"]

    assert row["time"] == pytest.approx(2 * 0.5, rel=1e-6)  # log2(P) alpha
    assert row["time"] == pytest.approx(row["predicted_time"], rel=1e-6)
    assert row["messages"]["max"] == 2


def test_more_disjoint_positions_than_there_are_is_a_bad_argument():
    output = simulate("--ranks", 4, "--size", 100, "--density", 0.3, "--positions", "disjoint", status=2)

    assert "lower --density or --ranks" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--copy-latency", 1), ("--device", "gpu", "--lossy")])
def test_what_means_nothing_without_or_with_a_gpu_is_one_line_and_status_2(arguments):
    output = simulate("--ranks", 2, "--size", 100, "--density", 0.1, *arguments, status=2)
    assert "--device gpu" in output and output.count("\n") == 1


def test_too_large_for_the_memory_is_said_at_once():
    output = simulate("--ranks", 10**6, "--size", 2**32, "--density", 0, "--algorithms", "dense", status=1)

    assert "leave them out with --algorithms" in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("ranks,size,density", [(1, 100, 0.1), (3, 0, 0.0), (5, 2, 1.0), (4, 10, 0.0)])
def test_extremes(tmp_path, ranks, size, density):
    assert all(row["correct"] for row in rows(tmp_path, "--ranks", ranks, "--size", size, "--density", density).values())


@pytest.mark.parametrize("algorithm,ranks", [("allgather", 256), ("ssar_recursive_doubling", 1024)])
def test_many_ranks_share_what_is_the_same(tmp_path, algorithm, ranks):
    arguments = ["--ranks", ranks, "--size", 2**24, "--density", 1e-5, "--algorithms", algorithm]

    row = rows(tmp_path, *arguments)[algorithm]

    assert row["correct"]
    assert row["messages"]["max"] == ranks.bit_length() - 1
