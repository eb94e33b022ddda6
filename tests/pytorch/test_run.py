"""Scripts that are written for torchrun, run as ranks of MPI."""

import os
import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import sparseallreduce as sar
from sparseallreduce.runtime.hosts import Place
from sparseallreduce.torch import init_process_group, process_group, run
from sparseallreduce.torch.run import main

SCRIPT = Path(__file__).parent / "scripts_run.py"
RUN = "-m", "sparseallreduce.torch.run"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Give each test an environment of its own, in which no launcher has left anything."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    threads = torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)


def test_a_script_for_torchrun_runs_as_it_is(mpi_run):
    ran = mpi_run(2, *RUN, str(SCRIPT), "train", "--lr", "0.1", timeout=240)

    lines = sorted(line for line in ran.stdout.splitlines() if line.startswith("trained"))
    assert lines == [f"trained {rank} 2 {rank} 2 0 127.0.0.1 --lr 0.1" for rank in range(2)], (ran.stdout, ran.stderr)
    assert ran.stdout.count("again") == 2


def test_a_rank_that_fails_ends_all_and_says_why(mpi_run):
    ran = mpi_run(2, *RUN, str(SCRIPT), "fail", timeout=240, check=False)

    assert ran.returncode != 0
    assert "ValueError: this rank alone fails" in ran.stderr
    assert "runpy" not in ran.stderr


def test_the_exit_status_of_a_rank_is_that_of_the_program(mpi_run):
    ran = mpi_run(2, *RUN, "-m", "scripts_run", "exit", "3", timeout=240, check=False, env={"PYTHONPATH": str(SCRIPT.parent)})

    assert ran.returncode == 3, (ran.stdout, ran.stderr)


def test_one_process_is_a_world_of_one(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:], sys.path[0], __name__)\n")

    argv, paths = sys.argv, list(sys.path)
    try:
        result = CliRunner().invoke(main, [str(script), "-x", "--help"])
    finally:
        sys.argv, sys.path[:] = argv, paths

    assert result.output == f"1 ['-x', '--help'] {tmp_path} __main__\n"


@pytest.mark.parametrize("arguments", [["none.py"], ["-m", "no_such"], ["-m", "no_such.module"], ["-m", "json.no_such"]])
def test_a_script_that_is_not_there_is_one_line_and_no_traceback(arguments, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    result = CliRunner().invoke(main, arguments)

    assert result.exit_code == 1
    assert re.fullmatch(rf"Error: there is no (file|module) {arguments[-1]}\b.*\n", result.output), result.output


@pytest.mark.parametrize("arguments", [["--help"], [], ["--no-such-option", "train.py"], ["none.py"]])
def test_rank_0_alone_prints_the_help_and_what_is_wrong_with_the_arguments(arguments, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run, "launched_rank", lambda: 1)
    silent = CliRunner().invoke(main, arguments)
    monkeypatch.setattr(run, "launched_rank", lambda: 0)
    spoken = CliRunner().invoke(main, arguments)

    assert silent.output == "" and spoken.output != ""
    assert silent.exit_code == spoken.exit_code


@pytest.mark.parametrize("option", ["--nproc-per-node=2", "--nnodes", "--standalone"])
def test_options_of_torchrun_are_refused_with_what_takes_their_place(option):
    result = CliRunner().invoke(main, [option, "2", "train.py"])

    assert result.exit_code == 2
    assert "is torchrun's: mpiexec -n 4" in result.output


def test_ranks_are_numbered_by_hosts_wherever_they_lie():
    places = [Place(host, host, b"\x0f") for host in (b"a", b"b", b"a", b"b", b"b")]

    found = [process_group._positions(["a", "b", "a", "b", "b"], rank) for rank in range(5)]

    assert [each["LOCAL_RANK"] for each in found] == ["0", "0", "1", "1", "2"]
    assert [each["LOCAL_WORLD_SIZE"] for each in found] == ["2", "3", "2", "3", "3"]
    assert [each["GROUP_RANK"] for each in found] == ["0", "1", "0", "1", "1"]
    assert {each["GROUP_WORLD_SIZE"] for each in found} == {"2"}
    assert [process_group._threads(places, rank) for rank in range(5)] == [2, 1, 2, 1, 1]


def test_containers_of_one_machine_are_hosts_of_their_own_unless_nccl_is_told_otherwise(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    names = iter(["pod-0", "pod-1", "pod-1"])
    monkeypatch.setattr(process_group.socket, "gethostname", lambda: next(names))
    hosts = [process_group._host() for _ in range(3)]
    assert [process_group._positions(hosts, rank)["LOCAL_RANK"] for rank in range(3)] == ["0", "0", "1"]

    monkeypatch.setenv("NCCL_HOSTID", "machine")
    assert {process_group._host() for _ in range(3)} == {"machine"}


def test_threads_of_the_user_are_left_alone(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    threads = torch.get_num_threads()

    process_group.set_environment(sar.SERIAL)

    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert torch.get_num_threads() == threads


def test_an_address_that_does_not_answer_is_an_error_that_names_the_remedy(monkeypatch):
    monkeypatch.setattr(process_group, "_SECONDS", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")

    with pytest.raises(sar.SparseAllreduceError, match=r"at one of 192\.0\.2\.1, port \d+, but rank 0 reaches none: set MASTER_ADDR"):
        process_group.set_environment(sar.SERIAL)


@pytest.mark.parametrize("port", ["a", "-1"])
def test_a_port_that_cannot_be_opened_is_an_error_that_names_it(monkeypatch, port):
    monkeypatch.setattr(process_group, "_store", None)
    monkeypatch.setenv("MASTER_PORT", port)

    with pytest.raises(sar.SparseAllreduceError, match=f"MASTER_PORT={port} cannot be opened"):
        process_group.set_environment(sar.SERIAL)


def test_addresses_between_hosts_are_those_of_the_network_not_of_the_loop(monkeypatch):
    monkeypatch.setattr(process_group.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0)), (0, 0, 0, "", ("10.0.0.7", 0))])
    monkeypatch.setattr(process_group, "_address_of", {"lo": "127.0.0.1", "eth0": "10.0.0.9"}.get)
    monkeypatch.setattr(process_group.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])

    assert process_group._addresses(one_host=False) == ["10.0.0.7", "10.0.0.9"]
    assert process_group._addresses(one_host=True) == ["127.0.0.1"]


def test_the_interface_towards_an_address_is_that_of_the_route():
    assert process_group._interface_towards("127.0.0.1", 80) == "lo"
    assert process_group._interface_towards("256.0.0.1", 80) == ""


@pytest.mark.parametrize(("own", "expected"), [(None, "eth7"), ("ib0", "ib0")])
def test_gloo_takes_the_interface_between_hosts_unless_the_user_names_one(monkeypatch, own, expected):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if own:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", own)
    networks = iter([(b"a", "1")])
    monkeypatch.setattr(process_group, "_network", lambda: next(networks))
    monkeypatch.setattr(process_group, "gather", lambda comm, value: [value, (value[0], (b"b", "2"), value[2])])
    monkeypatch.setattr(process_group, "_positions", lambda *_: {})
    monkeypatch.setattr(process_group, "_reachable", lambda *_: "10.0.0.7")
    monkeypatch.setattr(process_group, "_interface_towards", lambda *_: "eth7")
    process_group.set_environment(sar.SERIAL)
    assert os.environ["GLOO_SOCKET_IFNAME"] == expected


def test_init_process_group_is_that_of_pytorch():
    init_process_group("gloo", sar.SERIAL)
    try:
        assert torch.distributed.get_world_size() == 1
        with pytest.raises(ValueError, match="initialised already"):
            init_process_group("gloo", sar.SERIAL)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("option", ["init_method", "store", "rank", "world_size"])
def test_options_that_follow_from_the_communicator_are_refused(option):
    with pytest.raises(sar.SparseAllreduceError, match=f"no option {option}"):
        init_process_group("gloo", sar.SERIAL, **{option: None})
