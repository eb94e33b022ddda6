"""Settings of all tests: one thread, hypothesis profiles, and `mpi_run` as a fixture.

TEST_ALL=1 runs the tests marked `release` too, and tries four times as many examples (`make test-all`). HYPOTHESIS_PROFILE=thorough
tries a hundred times as many. With CI set, the examples are the same in every run.
"""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(variable, "1")  # before anything imports NumPy or numba
for variable in ("COLUMNS", "LINES"):
    os.environ.pop(variable, None)  # which readline sets in the processes of pytest-xdist, as if there were a terminal
if "SPARSEALLREDUCE_CACHE" not in os.environ:
    os.environ["SPARSEALLREDUCE_CACHE"] = tempfile.mkdtemp(prefix="sparseallreduce-")
    atexit.register(shutil.rmtree, os.environ["SPARSEALLREDUCE_CACHE"], ignore_errors=True)

import budget
import kept_kernels
import mpi_launch
import pytest
from hypothesis import HealthCheck, settings
from thoroughness import ALL, examples

_common = settings(
    deadline=None,  # the first example compiles
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("default", _common, derandomize=bool(os.environ.get("CI")), max_examples=examples(60))
settings.register_profile("thorough", _common, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

collect_ignore = ["mpi/device_checks.py"]  # not a test: it is imported by ranks whose path has tests/cuda


class OnlyMpi:
    """The plugin of a run of nothing but MPI tests: it leaves out files that have none, to import all of which takes ten seconds."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.is_dir() or any(word in collection_path.read_text(errors="replace") for word in ("mpi_run", "mark.mpi")):
            return None
        return True


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(budget.Budget())
    if config.option.markexpr == "mpi":
        config.pluginmanager.register(OnlyMpi())
    if not hasattr(config, "workerinput"):
        mpi_launch.share_cores_as_one()
        kept_kernels.unpack()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        kept_kernels.pack()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "mpi_run" in getattr(item, "fixturenames", ()):
            item.add_marker("mpi")
    if not ALL:
        later = [item for item in items if item.get_closest_marker("release")]
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if not item.get_closest_marker("release")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections of garbage pass over what was imported and collected, which takes each of them more than a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def mpi_run():
    """`mpi_launch.mpi_run`: a program under mpiexec. Tests that use it get the mark `mpi`; without an MPI library they are skipped."""
    if mpi_launch.launcher() is None:
        if os.environ.get("REQUIRE_MPI"):
            pytest.fail("no mpiexec here: `make test` installs it")
        pytest.skip("no mpiexec here: `make test` installs it")
    return mpi_launch.mpi_run
