"""Two hosts of two ranks, made by `tools/hosts.sh`: the ranks of a host share memory, the hosts share a wire alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mpi_launch import ROOT, Launcher, launcher, mpi_run

TOOL = ROOT / "tools" / "hosts.sh"
PROGRAMS = ("ip", "tc", "unshare", "nsenter")
# What the tool asks of a machine, in namespaces that are gone with it.
PROBE = """
ip link add probe0 type bridge && ip link add probe1 type veth peer name probe2 && ip link set probe1 gso_max_size 30000 &&
tc qdisc add dev probe1 root tbf rate 1gbit burst 32kb latency 50ms && mount -t tmpfs probe /dev/shm && mount -t sysfs probe /sys
"""
PLACEMENTS = {"blocks": [0, 0, 1, 1], "round-robin": [0, 1, 0, 1]}  # the host of each rank

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def network():
    """Settings that name a network of two hosts of two ranks, which nothing else uses."""
    own = launcher()
    if own is None or own.name != "mpich":
        pytest.skip("tools/hosts.sh starts MPICH's mpiexec")
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("making hosts needs Linux and root")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"making hosts needs {', '.join(missing)}")
    spaces = ["unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc"]
    probe = subprocess.run([*spaces, "sh", "-c", PROBE], capture_output=True, text=True, check=False, timeout=30)
    if probe.returncode != 0:
        pytest.skip(f"this machine does not allow what hosts need: {probe.stderr.strip()}")
    process = os.getpid()
    letters = "".join(chr(ord("a") + process // 26**place % 26) for place in range(5))
    subnet = f"10.{216 + process // 250 % 32}.{process % 250}"
    settings = {"HOSTS_NAME": f"t{letters}", "HOSTS_SUBNET": subnet, "MPIEXEC": str(own.mpiexec)}
    try:
        call(settings, TOOL, "up", "2", "1gbit", "2")
        yield settings
    finally:
        call(settings, TOOL, "down")
        assert settings["HOSTS_NAME"] not in call(settings, "ip", "netns", "list") + call(settings, "ip", "link")


def call(settings, *command):
    """What a command says that has to succeed."""
    ran = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run(network, placement, folder, *program, check=True):
    """As `mpi_run`, of four ranks on the hosts, which keep in ``folder`` what they measure."""
    start = folder / "mpiexec"
    option = "--round-robin" if placement == "round-robin" else ""
    start.write_text(f'#!/bin/sh\nexec {TOOL} run {option} "$@"\n')
    start.chmod(0o755)
    settings = {"SPARSEALLREDUCE_CACHE": str(folder / "cache"), "PYTHONPATH": str(Path(__file__).parent)}
    on_hosts = Launcher("mpich", start, launcher().python)
    return mpi_run(4, *program, mpi=on_hosts, timeout=180, env=network | settings, check=check)


def sum_by_hosts():
    """HiTopKComm on the hosts as they are: the update that the simulator comes to, and with feedback no value is lost."""
    import socket

    import numpy as np
    from mpi4py import MPI

    import sparseallreduce as sar

    world = MPI.COMM_WORLD
    hosts = world.allgather(socket.gethostname())
    size, k, steps = 30_000, 300, 3
    gradients = [np.random.default_rng([7, rank]).standard_normal((steps, size)) for rank in range(world.size)]
    feedback = sar.ErrorFeedback(sar.HiTopK(size, k), dtype=np.float64)
    simulated = [sar.ErrorFeedback(sar.HiTopK(size, k), dtype=np.float64) for _ in range(world.size)]
    applied = np.zeros(size)
    for step in range(steps):
        update = feedback.step(gradients[world.rank][step], world)
        out = sar.simulate([each[step] for each in gradients], simulated, sar.Network(hosts=hosts))
        np.testing.assert_allclose(update.to_dense(), out.outputs[0].to_dense(), rtol=1e-12)
        applied += update.to_dense()
    left = np.zeros(size)
    world.Allreduce(feedback.residual, left)
    total = sum(each.sum(axis=0) for each in gradients)
    np.testing.assert_allclose(world.size * applied + left, total, atol=1e-9)
    if world.rank == 0:
        print("as simulated")


def print_findings():
    """Where the ranks are, who shares memory, and that sums are right: of all, inside the hosts, and of a rank of each."""
    import socket

    from mpi4py import MPI
    from mpi_inputs import Inputs, check_usable

    import sparseallreduce as sar
    from sparseallreduce.runtime import progress
    from sparseallreduce.runtime.communicators import shared_capacity, shares_memory

    world = MPI.COMM_WORLD
    host = int(socket.gethostname()[-1])
    inside = world.Split(host, world.rank)
    across = world.Split(inside.rank, world.rank)
    findings = {"host": host}
    for name, comm in (("world", world), ("inside", inside), ("across", across)):
        check_usable(comm)
        inputs = Inputs(comm.size, 300_000, entries=9000)
        inputs.check(sar.allreduce(inputs.stream(comm.rank), comm))
        inputs.check(sar.iallreduce(inputs.stream(comm.rank), comm).wait())
        inputs.check(sar.allreduce(inputs.stream(comm.rank), comm, algorithm="hierarchical"))
        findings[name] = [comm.size, shares_memory(comm), shared_capacity(comm) > 0]
        findings["cores"] = progress.channels[-1].cores
    told = world.gather(findings)
    if world.rank == 0:
        print(json.dumps(told))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_share_memory_inside_a_host_and_not_across(network, tmp_path, placement):
    told = json.loads(run(network, placement, tmp_path, print_findings).stdout)

    assert [findings["host"] for findings in told] == PLACEMENTS[placement]
    for findings in told:
        assert findings["world"] == [4, False, False]
        assert findings["inside"] == [2, True, True]
        assert findings["across"] == [2, False, False]
        assert findings["cores"] == told[0]["cores"]  # the hosts are on one machine
    kept = list((tmp_path / "cache" / "calibration").iterdir())
    assert len(kept) == 3  # layouts, of which two have two ranks


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_hitopk_takes_the_hosts_as_they_are(network, tmp_path, placement):
    assert "as simulated" in run(network, placement, tmp_path, sum_by_hosts).stdout


def test_doctor_tells_what_is_shared(network, tmp_path):
    ran = run(network, "round-robin", tmp_path, "-m", "sparseallreduce", "doctor", "--json", tmp_path / "out.json", check=False)

    report = json.loads((tmp_path / "out.json").read_text())
    names = [f"{network['HOSTS_NAME']}host{number}" for number in range(2)]
    results = report["results"]
    assert (ran.returncode != 0) == bool(results["problems"]), (ran.stdout, ran.stderr)
    assert report["environment"]["hosts"] == dict.fromkeys(names, 2)
    (host,) = results["hosts"]
    assert (host["names"], host["ranks"]) == (names, [0, 1, 2, 3])
    assert (results["shared_memory"], results["hosts_sharing_memory"]) == (False, names)
    assert f"4: 2 on {names[0]}, 2 on {names[1]}" in ran.stdout
    assert "share its cores, but no memory" in ran.stdout
    assert f"share memory only within their host, on {names[0]}, {names[1]}" in ran.stdout
    assert results["oversubscribed"] == (host["cores"] < 4)
