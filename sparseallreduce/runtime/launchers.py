"""Read what the launcher of this process says in the environment, and check that MPI connects the processes that it has started.

Every launcher gives its processes their number in environment variables, and most also give the total. MPI works only under launchers that
its library supports. Under any other, such as torchrun or the mpiexec of another MPI library, each process is an MPI world of one rank, in
which nothing is ever reduced, without an error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sparseallreduce.errors import LauncherError, MPIUnavailableError, SparseAllreduceError
from sparseallreduce.runtime import children

__all__ = ["CHECK", "OWN_RUN", "check", "check_missing", "initialised_mpi", "launched_rank", "launched_ranks", "library"]

CHECK = "SPARSEALLREDUCE_LAUNCHER_CHECK"
OWN_RUN = "sparseallreduce"  # TORCHELASTIC_RUN_ID that sparseallreduce.torch sets in MPI ranks, along with torchrun's other variables

_RUN = "sparseallreduce.torch.run"  # module that runs a script written for torchrun as MPI ranks
_LONGEST = 160  # longest command, in characters, that is shown in full


class _Launcher(NamedTuple):
    """The name of a launcher, and the environment variables that it sets."""

    name: str
    sizes: tuple[str, ...]  # variables with the number of processes, in total or on this host
    ranks: tuple[str, ...]  # variables with the number of this process, from 0
    needs_rank: bool = False  # whether a size counts only together with a rank
    encloses: bool = True  # whether its processes may be mpiexec programs that start worlds of their own


# In order of precedence: an mpiexec may run inside a step of srun, and torchrun inside either.
_LAUNCHERS = (
    _Launcher("torchrun", ("WORLD_SIZE",), ("RANK", "LOCAL_RANK"), needs_rank=True, encloses=False),
    _Launcher("horovodrun", ("HOROVOD_SIZE",), ("HOROVOD_RANK",), encloses=False),
    _Launcher("mpiexec", ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_RANK",)),
    _Launcher("mpiexec", ("PMI_SIZE",), ("PMI_RANK",)),
    _Launcher("mpiexec", ("MV2_COMM_WORLD_SIZE", "MVP_COMM_WORLD_SIZE"), ("MV2_COMM_WORLD_RANK", "MVP_COMM_WORLD_RANK")),
    _Launcher("mpiexec of PALS", ("PALS_SIZE", "PALS_LOCAL_SIZE"), ("PALS_RANKID",)),
    _Launcher("srun", ("SLURM_STEP_NUM_TASKS",), ("SLURM_PROCID",)),
    _Launcher("flux run", ("FLUX_JOB_SIZE",), ("FLUX_TASK_RANK",), needs_rank=True),
    _Launcher("jsrun", ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_RANK",)),
    _Launcher("mpiexec", ("MPI_LOCALNRANKS",), ("MPI_LOCALRANKID",)),
    _Launcher("a launcher that speaks PMIx", (), ("PMIX_RANK",)),
)
_VARIABLES = frozenset(name for launcher in _LAUNCHERS for name in (*launcher.sizes, *launcher.ranks))
_LOOKED_FOR = _VARIABLES | {name.encode() for name in _VARIABLES}

# For each MPI library, the variable of its launcher that holds the number of processes.
_OWN_SIZES = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "MPICH": "PMI_SIZE", "Intel MPI": "PMI_SIZE", "Microsoft MPI": "PMI_SIZE"}
_PMIX = ("PMIX_RANK", "PMIX_NAMESPACE")
_THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")


class _Found(NamedTuple):
    """A launcher that has started several processes, and the variable that says so."""

    launcher: _Launcher
    processes: int
    variable: str

    @property
    def name(self) -> str:
        if self.launcher.name == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:
            return "a launcher for PyTorch, such as torchrun,"
        return self.launcher.name


def launched_rank() -> int:
    """Return the rank that a launcher gave this process, without using MPI.

    It is 0 in a process without a launcher, and in one that a rank has started.
    """
    if not _is_launched() or children.is_child():
        return 0
    ranks = (_first_number(launcher.ranks) for launcher in _LAUNCHERS if not launcher.needs_rank or _first_number(launcher.sizes))
    return next((rank for rank in ranks if rank is not None), 0)


def launched_ranks() -> int | None:
    """Return the number of processes that this one's launcher has started, or None if there is no launcher or it does not say."""
    if children.is_child():
        return None
    sizes = ((launcher, _first_number(launcher.sizes)) for launcher in _LAUNCHERS)
    return next((size for launcher, size in sizes if size is not None and not _hides_ranks(launcher)), None)


def check(MPI: Any, child: bool = False) -> None:
    """Check that a process that is an MPI world of its own was started alone; ``MPI`` is None if mpi4py is not available.

    Raises
    ------
    LauncherError
        If a launcher says that it has started more processes, unless the environment disables this check.
    """
    found = _found(MPI, child)
    if found is None:
        return
    loaded = "" if MPI is None else f"mpi4py has loaded {library(MPI)}. "
    if MPI is not None and not MPI.Is_initialized():
        loaded = f"mpi4py has loaded {library(MPI)}, which {_cannot_start(MPI)}. "
    if child:
        loaded = "A process of multiprocessing's is no rank of MPI's. "
    raise LauncherError(
        f"{found.name} has started {found.processes} processes ({found.variable}), but MPI connects this one with no other, so that "
        f"nothing would be reduced. {loaded}What works: {_command(MPI, found)}. Processes that are to compute alone pass "
        f"comm=sparseallreduce.SERIAL, or have {CHECK}=0 in their environment"
    )


def check_missing(error: Exception) -> None:
    """Check that a process that cannot load mpi4py was started alone.

    Raises
    ------
    MPIUnavailableError
        If a launcher has started more processes: each would take itself for the only one.
    """
    found = _found(None, False)
    if found is not None:
        raise MPIUnavailableError(
            f"{found.name} has started {found.processes} processes, but mpi4py cannot be loaded ({error}): install sparseallreduce[mpi]"
        ) from error


def initialised_mpi() -> Any:
    """Return mpi4py's MPI module, initialised unless initialisation would end the process (under a launcher that MPI does not support).

    Raises
    ------
    ImportError, RuntimeError
        If mpi4py or its MPI library is missing.
    """
    if "mpi4py.MPI" not in sys.modules and _may_end_the_process():
        return _started_with_care()
    from mpi4py import MPI

    return MPI


def check_running(MPI: Any) -> None:
    """Check that MPI is neither finalised nor left uninitialised by the program.

    Raises
    ------
    SparseAllreduceError
        If the program has not initialised MPI yet, or has finalised it.
    """
    if MPI.Is_finalized():
        raise SparseAllreduceError("MPI has been finalised: compute before MPI.Finalize(), or pass comm=sparseallreduce.SERIAL")
    if not MPI.Is_initialized() and not _cannot_start(MPI):
        raise SparseAllreduceError("MPI is not initialised: call MPI.Init() first, since mpi4py.rc.initialize is off")


def library(MPI: Any) -> str:
    """Return the name and version of the MPI library that mpi4py has loaded."""
    vendor, release = MPI.get_vendor()
    return f"{vendor} {'.'.join(map(str, release))}"


def _found(MPI: Any, child: bool) -> _Found | None:
    """Return the launcher that has started this process and others. Return None if there is none or the check is disabled."""
    has_group = _has_group()
    if not has_group and not _is_launched():
        return None
    if os.environ.get(CHECK) == "0" or (child and children.is_parents_group(has_group)):
        return None
    if has_group:
        ranks = sys.modules["torch.distributed"].get_world_size()
        return _Found(_LAUNCHERS[0], ranks, "the size of PyTorch's process group")
    own = _OWN_SIZES.get("" if MPI is None else MPI.get_vendor()[0], "")
    alone = os.environ.get(own) == "1"
    for launcher in _LAUNCHERS:
        if not (child or alone) or not launcher.encloses:
            found = _several(launcher)
            if found is not None:
                return found
    return None


def _several(launcher: _Launcher) -> _Found | None:
    """Return what a launcher says if it has started several processes, otherwise None."""
    if _hides_ranks(launcher):
        return None
    sizes = [name for name in launcher.sizes if _number(name) is not None]
    for name in sizes or launcher.ranks:
        processes = (_number(name) or 0) + (not sizes)
        if processes > 1:
            return _Found(launcher, processes, f"{name}={os.environ[name]}" if sizes else f"at least, as {name}={os.environ[name]}")
    return None


def _is_launched() -> bool:
    """Return True if the environment has a variable of any launcher.

    This is called in every sum of a single process and must be fast.
    """
    return not _LOOKED_FOR.isdisjoint(getattr(os.environ, "_data", os.environ))  # decoding all names takes ten times as long


def _hides_ranks(launcher: _Launcher) -> bool:
    if launcher.name == "torchrun" and os.environ.get("TORCHELASTIC_RUN_ID") == OWN_RUN:
        return True
    return launcher.needs_rank and _first_number(launcher.ranks) is None


def _first_number(names: Iterable[str]) -> int | None:
    return next((number for name in names if (number := _number(name)) is not None), None)


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None


def _has_group() -> bool:
    """Return True if PyTorch's process group has several ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not hasattr(distributed, "is_initialized") or not distributed.is_available():
        return False
    return bool(distributed.is_initialized() and distributed.get_world_size() > 1)


def _may_end_the_process() -> bool:
    """Return True if some MPI libraries would end a process like this one during initialisation."""
    return _is_cut_off() or ("PMI_FD" not in os.environ and any(name in os.environ for name in _PMIX))


def _is_cut_off() -> bool:
    """Return True if the socket to the launcher is closed because a parent process did not pass it on."""
    descriptor = _number("PMI_FD")
    if descriptor is None:
        return False
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


def _cannot_start(MPI: Any) -> str:
    """Return why initialising the loaded MPI library would end this process; an empty string if nothing is known."""
    version = MPI.Get_library_version()
    if not version.startswith("MPICH"):  # Open MPI ignores PMI_FD, and nothing is known of other libraries
        return ""
    if _is_cut_off():
        return f"has no way to its launcher, as a program between them has closed PMI_FD={os.environ['PMI_FD']}"
    if "PMI_FD" not in os.environ and any(name in os.environ for name in _PMIX) and "pmix" not in version.lower():
        return "was built without PMIx, and cannot start under a launcher that speaks nothing else"
    return ""


def _started_with_care() -> Any:
    """Import mpi4py's MPI, which initialises the library, but skip the initialisation if it would end the process."""
    import mpi4py

    rc = mpi4py.rc
    initialize, at_exit = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, bool(initialize) if at_exit is None else at_exit
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = initialize, at_exit
    if initialize and not MPI.Is_initialized() and not _cannot_start(MPI):
        if rc.threads:
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
        else:
            MPI.Init()
    return MPI


def _command(MPI: Any, found: _Found) -> str:
    """Return the command line that starts this program as MPI ranks."""
    arguments = [Path(sys.executable or "python").name, *sys.orig_argv[1:]]
    if found.launcher.name == "torchrun" and _RUN not in arguments:
        script = _place_of_script(arguments)
        arguments[script:script] = ["-m", _RUN] if script else []
    program = shlex.join(arguments)
    if len(program) > _LONGEST or "\n" in program:
        program = "python ..."
    text = f"{_mpiexec(MPI)} -n {found.processes} {program}"
    if found.launcher.name == "srun" and MPI is not None:
        plugin = "pmix" if MPI.get_vendor()[0] == "Open MPI" else "pmi2"
        text += f", or srun --mpi={plugin} where Slurm has that"
    return text


def _place_of_script(arguments: list[str]) -> int:
    """Return the index of the script in a Python command line, or of ``-m`` before a module.

    It is 0 if there is none.
    """
    own = sys.argv[1:]
    script = len(arguments) - len(own) - 1
    if script < 1 or arguments[script + 1 :] != own or arguments[script - 1] == "-c" or arguments[script].startswith("-"):
        return 0
    return script - (arguments[script - 1] == "-m")


def _mpiexec(MPI: Any) -> str:
    """Return the mpiexec that is installed with the loaded MPI library, as far as it can be determined."""
    if MPI is None:
        return "mpiexec"
    vendor = MPI.get_vendor()[0]
    names = ("mpiexec", "mpiexec.mpich" if vendor == "MPICH" else "mpiexec.openmpi")
    for folder in _folders_of_mpi():
        for name in names:
            program = folder / "bin" / name
            if program.exists() and os.access(program, os.X_OK):
                on_path = shutil.which(name)
                return name if on_path is not None and os.path.samefile(on_path, program) else shlex.quote(str(program))
    return f"the mpiexec of {vendor}"


def _folders_of_mpi() -> list[Path]:
    """Return the folders in which the loaded MPI library may be installed."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if re.search(r"/lib(p?mpi|mpich|mpi_abi)[^/]*\.(so|dylib)", line))
    return [parent for path in paths for parent in list(Path(path).parents)[1:4]]
