"""The package: what importing it takes, and that its public names are documented."""

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sparseallreduce as sar

PACKAGE = Path(sar.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def python(code, **environment):
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PACKAGE.parent), **environment}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_importing_takes_no_mpi_and_no_heavy_library():
    loaded = python("import sys, sparseallreduce; print(*sys.modules)").split()
    heavy = {"mpi4py", "numba", "llvmlite", "scipy", "sklearn", "click", "tqdm", "matplotlib", "cupy", "sparseallreduce.linear"}
    assert "sparseallreduce.streams.stream" in loaded
    assert not heavy & set(loaded)


def test_importing_takes_less_than_a_second():
    code = "import time; start = time.process_time(); import sparseallreduce; print(time.process_time() - start)"
    assert min(float(python(code)) for _ in range(3)) < 1.0


ALONE = """
import sys
sys.modules["mpi4py"] = None  # as if it were not installed
import numpy as np, sparseallreduce as sar
stream = sar.SparseStream([1, 5], [2.0, 3.0], 40)
for algorithm in sar.algorithms():
    assert sar.allreduce(stream, algorithm=algorithm).to_dense().sum() == 5
    assert sar.iallreduce(stream, sar.SERIAL, algorithm=algorithm).wait().nnz == 2
    assert sar.simulate([stream] * 3, algorithm).outputs[2].to_dense().sum() == 15
with sar.trace() as counts:
    sar.allreduce(stream, op="max")
print(counts.operations)
"""


def test_one_process_needs_no_mpi():
    assert python(ALONE) == "1"


@pytest.mark.parametrize("variable", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_several_processes_without_mpi4py_do_not_take_themselves_for_one(variable):
    code = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "import sparseallreduce as sar\n"
        "try: sar.allreduce(sar.SparseStream([1], [2.0], 4))\n"
        "except sar.MPIUnavailableError as error: print(error)"
    )
    text = python(code, **{variable: "4"})
    assert text.startswith("mpiexec has started 4 processes, but mpi4py cannot be loaded (")
    assert text.endswith("): install sparseallreduce[mpi]")


def test_the_public_names_are_there_and_no_others():
    assert sorted(sar.__all__) == sorted(set(sar.__all__))
    for name in ("SparseStream", "allreduce", "iallreduce", "Request", "algorithms", "simulate", "Network", "trace", "SERIAL", "Operator"):
        assert name in sar.__all__
    visible = {name for name, value in vars(sar).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert visible == set(sar.__all__) - {"__version__"}


def test_the_algorithms_are_there():
    assert sar.algorithms() == [
        "dense",
        "allgather",
        "ssar_recursive_doubling",
        "ssar_split_allgather",
        "ssar_ring",
        "dsar_split_allgather",
        "dsar_early_switch",
        "hierarchical",
        "dense_torus",
        "auto",
    ]


@pytest.mark.parametrize("name", [name for name in sar.__all__ if callable(getattr(sar, name))])
def test_every_public_name_is_documented(name):
    documented = getattr(sar, name)
    assert inspect.getdoc(documented)
    if inspect.isclass(documented):
        for member, value in vars(documented).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if not member.startswith("_") and (inspect.isfunction(function) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_the_oldest_versions_to_test_with_are_the_lower_bounds():
    root = PACKAGE.parent
    run = subprocess.run([sys.executable, root / "tools" / "oldest.py"], capture_output=True, text=True, timeout=60, check=True)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in [*project["dependencies"], *extras["mpi"], *extras["test"]]:
        assert requirement.split(",")[0].replace(">=", "==") in run.stdout.splitlines()


@pytest.mark.parametrize("error", [name for name in sar.__all__ if name.endswith("Error")])
def test_every_error_is_one_of_the_librarys(error):
    assert issubclass(getattr(sar, error), sar.SparseAllreduceError)
