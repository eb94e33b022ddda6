"""The names of the package in examples/plugin work beside the library: in Python, at the command line and over MPI."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment of a process that finds the package and its entry points, as pip leaves them, without asking PyPI for setuptools."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE / "sparseallreduce_extras", folder / "sparseallreduce_extras")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    described = folder / f"sparseallreduce_extras-{project['version']}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    points = [f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in named.items()) for group, named in groups]
    (described / "entry_points.txt").write_text("\n".join(points))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def run(environment, *command):
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_its_extensions_keep_their_promises(installed):
    done = run(installed, "-c", "import sparseallreduce_extras.check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all promises hold") == 3


def test_its_names_are_known_without_a_call(installed):
    program = """
import sparseallreduce as sar
from sparseallreduce.linear import STRATEGIES
from sparseallreduce.reducers import REDUCERS
from sparseallreduce.streams.wire import VALUE_NAMES
print("bruck" in sar.algorithms(), "largestofall" in REDUCERS, "int8" in VALUE_NAMES, "largestofall" in STRATEGIES)
streams = [sar.SparseStream([rank, 9], [1.0, 2.0], size=10) for rank in range(5)]
out = sar.simulate(streams, "bruck", value_codec="int8")
print(out.outputs[0].to_dense().round(1).tolist(), out.messages.max())
"""
    done = run(installed, "-c", program)
    assert done.stdout == "True True True True\n[1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 10.0] 3\n", done.stderr
    without = run(installed | {"SPARSEALLREDUCE_PLUGINS": "0"}, "-c", program)
    assert without.stdout == "False False False False\n" and "unknown value_codec 'int8'" in without.stderr


def test_the_command_line_takes_them(installed):
    command = ["-m", "sparseallreduce", "simulate", "--ranks", "6", "--size", "1000", "--density", "0.01"]
    exact = run(installed, *command, "--algorithms", "bruck,ssar_ring")
    assert exact.returncode == 0 and "bruck" in exact.stdout and "WRONG" not in exact.stdout, exact.stderr
    lossy = run(installed, *command, "--lossy", "--reducers", "largestofall")
    assert lossy.returncode == 0 and "largestofall" in lossy.stdout, lossy.stderr
    assert "largestofall" in run(installed, "-m", "sparseallreduce", "train", "--help").stdout


@pytest.mark.mpi
def test_ranks_of_mpi_take_them(installed, mpi_run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", installed["PYTHONPATH"])
    program = tmp_path / "program.py"
    program.write_text(
        """
import sparseallreduce as sar
from mpi4py import MPI
comm = MPI.COMM_WORLD
stream = sar.SparseStream([comm.rank, 9], [1.0, 2.0], size=10)
assert sar.allreduce(stream, comm, algorithm="bruck").to_dense().tolist() == [1.0, 1.0] + [0.0] * 7 + [4.0]
from sparseallreduce.algorithms.ssar_ring import ssar_ring
assert sar.iallreduce(stream, comm, algorithm=ssar_ring).wait().nnz == 3
assert "bruck" in sar.explain(stream, comm).predicted
from sparseallreduce.algorithms.ssar_split_allgather import ssar_split_allgather
for _ in range(2):  # the second sum uses what is kept of the first
    sar.allreduce(stream, comm)
sar.register_algorithm("mine", [ssar_ring, ssar_split_allgather][comm.rank], lambda problem, machine: 1.0)
try:
    sar.allreduce(stream, comm)
except sar.MismatchError as error:
    print(f"mismatch {'auto with' in str(error) and 'mine, ' in str(error)}")
try:
    sar.allreduce(stream, comm, algorithm="mine")
except sar.MismatchError as error:
    print(f"mismatch {'mine, ' in str(error)}")
"""
    )
    assert mpi_run(2, program).stdout.count("mismatch True") == 4


def test_a_package_that_fails_does_not_keep_the_library_from_being_imported(tmp_path):
    (tmp_path / "broken-1.dist-info").mkdir()
    (tmp_path / "broken-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    points = "[sparseallreduce.algorithms]\nlost = no_such_module:schedule\ndense = sparseallreduce.algorithms.ssar_ring:ssar_ring\n"
    (tmp_path / "broken-1.dist-info" / "entry_points.txt").write_text(points)
    done = run(os.environ | {"PYTHONPATH": str(tmp_path)}, "-c", "import sparseallreduce as sar; print(len(sar.algorithms()))")
    assert done.returncode == 0
    assert "RuntimeWarning: the extension lost = no_such_module:schedule of algorithms is left out: ModuleNotFoundError" in done.stderr
    assert "'dense' is an algorithm of the library" in done.stderr
