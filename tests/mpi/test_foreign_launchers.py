"""Ranks that the mpiexec of another MPI library starts, and ranks whose MPI the library starts itself."""

import pytest
from mpi_launch import Launcher, launcher

SUM = """
import sparseallreduce as sar
try: print(sar.allreduce(sar.SparseStream([1], [1.0], 4)).to_dense()[1])
except sar.LauncherError as error: print(error)
"""


@pytest.fixture
def both():
    found = {name: launcher(name) for name in ("mpich", "openmpi")}
    if None in found.values():
        pytest.skip("needs both MPI libraries")
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("mpiexec, python, library", [("mpich", "openmpi", "Open MPI"), ("openmpi", "mpich", "MPICH")])
def test_the_mpiexec_of_another_library_is_noticed(mpi_run, both, mpiexec, python, library):
    mixed = Launcher(mpiexec, both[mpiexec].mpiexec, both[python].python)

    ran = mpi_run(2, "-c", SUM, mpi=mixed)

    assert ran.stdout.count("mpiexec has started 2 processes") == 2
    assert ran.stdout.count(f"mpi4py has loaded {library} ") == 2
    assert ran.stdout.count(f"{both[python].mpiexec.resolve().parent}/mpiexec -n 2 python") == 2


def started_by_the_library():
    """As the import of mpi4py.MPI starts it: with threads, with exceptions for errors, and ended with the process."""
    import sparseallreduce as sar

    assert sar.allreduce(sar.SparseStream([1], [1.0], 4)).to_dense()[1] == 2
    import mpi4py
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    assert MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_RETURN
    assert (mpi4py.rc.initialize, mpi4py.rc.finalize) == (True, None)
    with pytest.raises(MPI.Exception):
        MPI.COMM_WORLD.Send([bytearray(1), MPI.BYTE], dest=7)
    print("done", flush=True)


@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_mpi_that_the_library_starts_is_as_mpi4py_starts_it(mpi_run, both, mpi):
    ran = mpi_run(2, started_by_the_library, mpi=mpi)

    assert ran.stdout.count("done") == 2
    assert "finalize" not in ran.stderr.lower()
