"""The JSON reports of commands: schema, command, arguments, environment, results."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import numpy as np

from sparseallreduce.atomic_file import atomic_file, is_special
from sparseallreduce.runtime.hosts import count_cores, label_hosts, this_place
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.serial import SERIAL
from sparseallreduce.version import __version__

__all__ = ["OUTPUT_FILE", "check_output", "environment", "on_rank_0", "processor", "release", "write_report"]

SCHEMA = 1
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path)


def environment(comm: Any) -> dict[str, Any]:
    """Return the software and hardware that results were obtained with; collective over ``comm``, the same on all ranks."""
    here = (platform.node(), this_place())
    names, places = zip(*gather(comm, here))
    library = None
    if comm is not SERIAL:
        from mpi4py import MPI

        library = " ".join(MPI.Get_library_version().splitlines()[0].split()).rstrip("\0")
    return {
        "sparseallreduce": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "numba": release("numba"),
        "mpi4py": release("mpi4py"),
        "mpi": library,
        "platform": platform.platform(),
        "cpu": processor(),
        "cpus": count_cores([here[1]]),
        "ranks": comm.size,
        "hosts": dict(Counter(label_hosts(names, places))),  # number of ranks on each host
    }


def write_report(
    path: Path, command: str, arguments: Mapping[str, Any], environment: Mapping[str, Any], results: Any, **further: Any
) -> None:
    """Write a report to ``path`` atomically; called on one rank.

    Parameters
    ----------
    path : Path
    command : str
        Name of the subcommand.
    arguments : mapping
        Parameters of the subcommand; paths are written as text.
    environment : mapping
        As returned by :func:`environment`.
    results
        Values that JSON can represent, NumPy scalars and arrays included.
    **further
        Other top-level keys of the report.
    """
    report = {
        "schema": SCHEMA,
        "command": command,
        "arguments": dict(arguments),
        "environment": dict(environment),
        "results": results,
        **further,
    }
    text = json.dumps(report, indent=2, default=_plain) + "\n"
    with atomic_file(path, "w") as file:
        file.write(text)


def check_output(*paths: Path | None) -> None:
    """Check before the work that the output files can be written.

    Raises
    ------
    OSError
    """
    for path in paths:
        if path is not None and is_special(path):  # as /dev/null
            if not os.access(path, os.W_OK):
                raise OSError(f"cannot write {path}: no permission to write to it; choose another")
        elif path is not None and not os.access(path.parent, os.W_OK):
            raise OSError(f"cannot write {path}: {path.parent} is not a writable folder; create it or choose another")


def on_rank_0(comm: Any, action: Callable[[], object]) -> None:
    """Call ``action`` on rank 0; collective. An OSError of it is raised on all ranks.

    Raises
    ------
    OSError
    """
    failure: OSError | None = None
    if comm.rank == 0:
        try:
            action()
        except OSError as error:
            failure = error
    failure = gather(comm, failure)[0]
    if failure is not None:
        raise failure


def release(package: str) -> str | None:
    """Return the version of an installed package without importing it, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the model name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
