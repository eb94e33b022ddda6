"""Store and reuse measured machine constants, so that "auto" makes the same choices from run to run.

"auto" chooses by measured constants, and no two measurements are equal. Near the crossing point of two algorithms, a slightly different
measurement would lead to another choice, another order of additions, and different bits. A measurement that is close to a stored one, for
the same number and layout of ranks, is therefore replaced by the stored one. A real change, such as a job that runs on another part of the
network, is still detected. Other programs only slow a measurement down, so one that is much faster than the stored one is trusted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Sequence
from operator import le
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.cache import default_cache
from sparseallreduce.checked_file import Damaged, read_json
from sparseallreduce.version import __version__

__all__ = ["Calibration", "Stored", "renew"]

# Ratios within which a measured constant counts as close to a stored one. Inside a host, other load can make a measurement many times
# slower; between hosts, one that is several times slower belongs to another network.
_SLOWER, _SLOWER_BETWEEN_HOSTS, _FASTER = 10.0, 2.0, 3.0
_KEPT = 16  # measurements stored for one layout
_LONGEST = 1 << 20  # largest file size in bytes; a measurement takes less than 1,000 bytes
# For each constant, the value below which it is negligible.
_NEGLIGIBLE_OF_GPU = (1e-12, 1e-13, 1e-6, 1e-6, 1e-12, 1e-6, 1e-12)
_NEGLIGIBLE = (1e-7, 1e-12, 1e-10, 1e-11, 1e-12, 1e-7, 1e-12, 0.0, 1e-10, 1e-3, 1e-7, 1e-12, 1e-11, *_NEGLIGIBLE_OF_GPU)


def renew() -> None:
    """Measure everything again in this process, ignoring stored measurements, and store the new ones."""
    Calibration.renewing = True


class Stored(NamedTuple):
    """Name the file of the constants in use, and tell whether an earlier run has stored them."""

    path: Path
    reused: bool  # whether an earlier run has stored them


class Calibration:
    """The stored measurements of one layout of ranks. Only one rank uses it.

    Parameters
    ----------
    library : str
        Name and version of the MPI library.
    hosts : sequence of bytes
        For each rank, an identifier shared by the ranks that may share memory with it.
    cores : int
        Cores that the ranks of the first rank's host may use.
    folder : Path, optional
        Folder of the stored measurements, the cache folder by default. If it is not writable, nothing is stored.
    """

    renewing = False  # whether stored measurements are to be replaced
    latest: ClassVar[Stored | None] = None  # of the constants that this process has used last

    def __init__(self, library: str, hosts: Sequence[bytes], cores: int, folder: Path | None = None) -> None:
        self._slower = _SLOWER if len(set(hosts)) == 1 else _SLOWER_BETWEEN_HOSTS
        try:
            self._path = (folder or default_cache() / "calibration") / f"{_digest(library, hosts, cores)}.json"
        except RuntimeError:  # there is no home directory
            self._path = Path(os.devnull)

    def like(self, measured: Machine) -> Machine | None:
        """Return the fastest stored measurement that ``measured`` is close to, or None if there is none."""
        if self.renewing:
            return None
        similar = [machine for machine in _read(self._path) if _similar(machine, measured, self._slower)]
        if similar:
            Calibration.latest = Stored(self._path, reused=True)
        return min(similar, key=lambda machine: math.prod(_noticed(machine)), default=None)

    def keep(self, measured: Machine) -> None:
        """Store a measurement and remove those that it shows to have been disturbed."""
        others = [machine for machine in _read(self._path) if not self._outdated(machine, measured)]
        with contextlib.suppress(OSError):
            _write(self._path, [*others, measured][-_KEPT:])
        Calibration.latest = Stored(self._path, reused=False)

    def _outdated(self, kept: Machine, measured: Machine) -> bool:
        """Return True if ``measured`` shows that a stored measurement was disturbed, or replaces it."""
        slower = all(map(le, _noticed(measured), _noticed(kept)))
        return slower or (self.renewing and (_similar(kept, measured, self._slower) or _similar(measured, kept, self._slower)))


def _digest(library: str, hosts: Sequence[bytes], cores: int) -> str:
    """Return a file name for a layout. Which ranks may share memory counts; which hosts they run on does not, since that changes."""
    places: dict[bytes, int] = {}
    layout = [places.setdefault(host, len(places)) for host in hosts]
    what = json.dumps([__version__, library, _processor(), cores, layout])
    return hashlib.blake2b(what.encode(), digest_size=12).hexdigest()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("model name")), "")


def _similar(kept: Machine, measured: Machine, slower: float) -> bool:
    """Return True if two measurements are close. ``slower`` limits the ratio of the times per byte; the other constants vary more."""
    times = zip(Machine._fields, _noticed(kept), _noticed(measured), strict=True)
    return all(before / _FASTER <= now <= before * (slower if name.startswith("beta") else _SLOWER) for name, before, now in times)


def _noticed(machine: Machine) -> list[float]:
    return [max(value or 0.0, negligible) for value, negligible in zip(machine, _NEGLIGIBLE, strict=True)]


def _read(path: Path) -> list[Machine]:
    """Return the measurements in a file, or an empty list if it is missing or damaged; a damaged file is replaced by the next write."""
    try:
        entries = read_json(path, _LONGEST)
        if not isinstance(entries, list) or len(entries) > _KEPT:
            return []
        return [Machine(*(_constant(entry[name]) for name in Machine._fields)) for entry in entries]
    except (OSError, Damaged, ValueError, TypeError, LookupError, OverflowError):
        return []


def _constant(value: Any) -> float:
    """Return a machine constant read from JSON; raise ValueError or OverflowError if it is not a non-negative finite number."""
    constant = float(value) if type(value) in (int, float) else math.nan
    if not 0 <= constant < math.inf:
        raise ValueError(f"{constant} is no constant of a machine")
    return constant


def _write(path: Path, machines: Sequence[Machine]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, "w", own=True) as file:
        json.dump([machine._asdict() for machine in machines], file, indent=1)
