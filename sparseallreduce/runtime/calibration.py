"""What was measured of machines and networks like this one, kept from run to run.

"auto" chooses by measured constants, and no two measurements are the same. Near a crossing of two algorithms another choice would
follow, another order of additions, and other bits. So a measurement that is like an earlier one, of as many ranks laid out alike,
gives way to it: runs on one machine choose alike, and what has changed, as a network has when a job lands elsewhere, is found out.

Other programs make a measurement slower, never faster: one that is much faster than what is kept has found the truth.
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
from typing import Any

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.cache import default_cache
from sparseallreduce.checked_file import Damaged, read_json
from sparseallreduce.version import __version__

__all__ = ["Calibration"]

# Times: how far constants may lie from kept ones that they are taken for. What disturbs a measurement inside a host may be much else that
# it has to do; between hosts one that takes several times as long is of another network.
_SLOWER, _SLOWER_BETWEEN_HOSTS, _FASTER = 10.0, 2.0, 3.0
_KEPT = 16  # measurements of one layout
_LONGEST = 1 << 20  # bytes of a file, of which each measurement takes less than a thousand
# Of each constant: what is less takes no time that matters.
_NEGLIGIBLE_OF_GPU = (1e-12, 1e-13, 1e-6, 1e-6, 1e-12, 1e-6, 1e-12)
_NEGLIGIBLE = (1e-7, 1e-12, 1e-10, 1e-11, 1e-12, 1e-7, 1e-12, 0.0, 1e-10, 1e-3, 1e-7, 1e-12, 1e-11, *_NEGLIGIBLE_OF_GPU)


def renew() -> None:
    """From now on, measure what this process has not measured yet, whatever is kept; the latest counts from then on."""
    Calibration.renewing = True


class Calibration:
    """The measurements of one layout of ranks; for one rank to use.

    Parameters
    ----------
    library : str
        Name and version of the MPI library.
    hosts : sequence of bytes
        For each rank, what ranks that may share memory with it have in common.
    cores : int
        That the ranks of the first rank's host may run on.
    folder : Path, optional
        Where measurements are kept, the cache folder by default. If it cannot be written, nothing is.
    """

    renewing = False  # whether what is kept is to be replaced

    def __init__(self, library: str, hosts: Sequence[bytes], cores: int, folder: Path | None = None) -> None:
        self._slower = _SLOWER if len(set(hosts)) == 1 else _SLOWER_BETWEEN_HOSTS
        try:
            self._path = (folder or default_cache() / "calibration") / f"{_digest(library, hosts, cores)}.json"
        except RuntimeError:  # there is no home directory
            self._path = Path(os.devnull)

    def like(self, measured: Machine) -> Machine | None:
        """The kept measurement that ``measured`` may be one more of: the fastest of them, None if there is none."""
        if self.renewing:
            return None
        alike = [machine for machine in _read(self._path) if _alike(machine, measured, self._slower)]
        return min(alike, key=lambda machine: math.prod(_noticed(machine)), default=None)

    def keep(self, measured: Machine) -> None:
        """Keep a measurement, and none that it shows to have been disturbed."""
        others = [machine for machine in _read(self._path) if not self._outdated(machine, measured)]
        with contextlib.suppress(OSError):
            _write(self._path, [*others, measured][-_KEPT:])

    def _outdated(self, kept: Machine, measured: Machine) -> bool:
        """Whether a measurement shows another to have been disturbed, or replaces it."""
        slower = all(map(le, _noticed(measured), _noticed(kept)))
        return slower or (self.renewing and (_alike(kept, measured, self._slower) or _alike(measured, kept, self._slower)))


def _digest(library: str, hosts: Sequence[bytes], cores: int) -> str:
    """A name for a layout: which ranks may share memory, not on which host, since a job's hosts change."""
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


def _alike(kept: Machine, measured: Machine, slower: float) -> bool:
    """``slower`` is for the bytes: latencies are multiplied by the slightest disturbance, and additions by one on this host alone."""
    times = zip(Machine._fields, _noticed(kept), _noticed(measured), strict=True)
    return all(
        before / _FASTER <= now <= before * (slower if name.startswith("beta") else _SLOWER) for name, before, now in times
    )


def _noticed(machine: Machine) -> list[float]:
    return [max(value or 0.0, negligible) for value, negligible in zip(machine, _NEGLIGIBLE, strict=True)]


def _read(path: Path) -> list[Machine]:
    """The measurements in a file; none if there is no such file, or if it is damaged: then the next one that is kept replaces it."""
    try:
        entries = read_json(path, _LONGEST)
        if not isinstance(entries, list) or len(entries) > _KEPT:
            return []
        return [Machine(*(_constant(entry[name]) for name in Machine._fields)) for entry in entries]
    except (OSError, Damaged, ValueError, TypeError, LookupError, OverflowError):
        return []


def _constant(value: Any) -> float:
    """Return the constant of a machine that JSON has given; raise ValueError or OverflowError if it is none."""
    constant = float(value) if type(value) in (int, float) else math.nan
    if not 0 <= constant < math.inf:
        raise ValueError(f"{constant} is no constant of a machine")
    return constant


def _write(path: Path, machines: Sequence[Machine]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, "w", own=True) as file:
        json.dump([machine._asdict() for machine in machines], file, indent=1)
