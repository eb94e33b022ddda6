"""`doctor` finds out what there is, and never fails for what is not."""

import json
import os
import subprocess
import sys
from importlib import import_module
from math import ceil

from click.testing import CliRunner

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.cli import main
from sparseallreduce.runtime.calibration import Calibration
from sparseallreduce.runtime.hosts import Limit, Place, label_hosts
from sparseallreduce.runtime.serial import SERIAL

doctor = import_module("sparseallreduce.cli.doctor")
WITHOUT = "import sys; sys.modules['mpi4py'] = None; from sparseallreduce.cli import main; main(sys.argv[1:])"


def test_alone(tmp_path):
    result = CliRunner().invoke(main, ["doctor", "--json", str(tmp_path / "out.json")])

    report = json.loads((tmp_path / "out.json").read_text())
    assert result.exit_code == int(bool(report["results"]["problems"])), result.output
    assert "No problems found" in result.output or result.exit_code == 1
    assert (report["schema"], report["command"]) == (1, "doctor")
    assert {"mpi", "kernels", "gpu", "network", "processes", "problems"} <= report["results"].keys()
    process = report["results"]["processes"][0]
    assert process["cores"] == min(int(process["affinity"], 16).bit_count(), ceil(process["cpu_limit"] or 1 << 20)) >= 1
    (host,) = report["results"]["hosts"]
    assert (host["ranks"], host["cores"]) == ([0], process["cores"])
    for subject in ("software", "MPI", "ranks", "cores", "kernels", "GPU", "network"):
        assert f"\n{subject} " in f"\n{result.output}"


def test_to_what_shared_memory_large_pages_are_given(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_LARGE_PAGES", tmp_path / "shmem_enabled")
    assert doctor._large_pages() is None
    (tmp_path / "shmem_enabled").write_text("always within_size [advise] never deny force\n")
    assert doctor._large_pages() == "advise"


def test_without_mpi4py():
    ran = subprocess.run([sys.executable, "-c", WITHOUT, "doctor"], capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    assert "MPI          none" in ran.stdout


def test_without_mpi4py_but_under_an_mpiexec_a_remedy_is_named():
    launched = os.environ | {"PMI_SIZE": "2", "PMI_RANK": "0"}

    ran = subprocess.run([sys.executable, "-c", WITHOUT, "doctor"], capture_output=True, text=True, check=False, env=launched)

    assert ran.returncode == 1, ran.stderr
    assert "PROBLEM" in ran.stdout
    assert "install sparseallreduce[mpi]" in ran.stdout


def test_ranks_and_network_under_mpiexec(mpi_run, tmp_path):
    ran = mpi_run(3, "-m", "sparseallreduce", "doctor", "--json", tmp_path / "out.json", check=False)

    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert (ran.returncode != 0) == bool(results["problems"]), (ran.stdout, ran.stderr)
    assert len(results["processes"]) == 3
    assert results["network"]["alpha"] > 0 and not any("device" in name or "to_host" in name for name in results["network"])
    assert results["shared_memory"] == ("  through shared memory" in ran.stdout)
    assert results["shared_memory"] != ("by messages" in ran.stdout)
    assert ("large pages" in ran.stdout) == (results["shared_memory"] and results["shared_large_pages"] is not None)
    assert results["mpi"]["standard"]
    assert results["oversubscribed"] == any("share" in problem for problem in results["problems"])
    assert ran.stdout.count("network ") == 1


def test_cores_are_those_of_a_machine_and_of_the_limits_of_its_cgroups():
    host, other = b"h" * 8, b"o" * 8
    half = [Place(host, bytes([rank]) * 8, b"\xff", (Limit(1 + rank, 500),)) for rank in range(2)]
    places = [half[0], half[0], half[1], Place(other, other, b"\x03")]
    processes = [doctor._process(place) for place in places]
    hosts = label_hosts(["a", "a", "a", "b"], places)

    found = doctor.Findings()
    doctor._ranks(found, processes, places, hosts)

    assert found.facts["hosts"] == [
        {"names": ["a", "a (2)"], "ranks": [0, 1, 2], "cores": 1, "cores_without_limit": 8},
        {"names": ["b"], "ranks": [3], "cores": 2, "cores_without_limit": 2},
    ]
    text = "\n".join(found.lines)
    assert "4: 2 on a, 1 on a (2), 1 on b" in text
    assert "a, a (2) are on one machine: their ranks share its cores, but no memory" in text
    assert "1 that ranks may use (limited by a cgroup, otherwise 8)" in text
    (problem,) = found.problems
    assert "3 ranks share 1 core(s) on a, a (2)" in problem and "cpu.max" in problem
    assert found.facts["oversubscribed"]
    assert [process.cpu_limit for process in processes] == [0.5, 0.5, 0.5, None]


def test_the_network_is_measured_anew_when_asked_to(mpi_run, tmp_path):
    kept = []
    for options in ((), ("--calibrate",)):
        ran = mpi_run(2, "-m", "sparseallreduce", "doctor", *options, env={"SPARSEALLREDUCE_CACHE": str(tmp_path)}, check=False)
        (file,) = (tmp_path / "calibration").iterdir()
        assert f"measured now, and stored in {file}" in ran.stdout
        kept.append(json.loads(file.read_text()))
    assert kept[1][-1] not in kept[0]


def test_constants_of_an_earlier_run_are_called_so_with_a_way_to_renew_them(tmp_path):
    measured = Machine(*[1e-6] * len(Machine._fields))
    Calibration("MPI", [b"host"] * 2, 2, tmp_path).keep(measured)
    assert Calibration("MPI", [b"host"] * 2, 2, tmp_path).like(measured) == measured
    (file,) = tmp_path.iterdir()
    found = doctor.Findings()
    doctor._stored(found, SERIAL)
    text = "\n".join(found.lines)
    assert "of an earlier run, stored on 20" in text and str(file) in text and "doctor --calibrate" in text
    assert found.facts["network_stored"]["reused"]
    file.unlink()
    doctor._stored(found, SERIAL)
    assert "not stored" in found.lines[-1]
