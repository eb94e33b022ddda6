"""Determine which ranks share a host's cores, which may share its memory, and how many cores they may use together.

Host names are not reliable: containers on different machines may have the same name, and those on one machine have different names. The
boot id, which Linux draws when a machine starts, identifies ranks that share cores. Boot id and PID namespace together identify ranks that
may share memory, since ranks find each other by process id; the mapping itself shows whether they can
(:func:`~sparseallreduce.runtime.memory.mapping.shared_memory`). If there is no boot id, the host name is used instead. Machines resumed
from one snapshot have the same boot id, and are treated as one host whose ranks cannot share memory.

The number of cores of the host is not enough if a container, ``taskset`` or a job scheduler allows only some of them: two ranks on one of
two cores that assumed a core each took 379 microseconds for a sum of a few entries; ranks that know the limit take 57. A cgroup may also
limit the processor time of its members (``cpu.max``), which counts as that many cores, rounded up.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = [
    "Limit",
    "Place",
    "count_cores",
    "cpu_limits",
    "label_hosts",
    "same_host",
    "same_memory",
    "this_place",
    "usable_cores",
]

_ROOT = Path("/")  # root of the file system that contains /proc and /sys
_ID = 8  # bytes
_MASK = 256  # bytes, for 2,048 cores; ranks bound to cores beyond these count as if they could use all
_LIMITS = 4  # number of a rank's nested limits that are sent to other ranks: those of the innermost cgroups
_MEMBERSHIP = re.compile(r"^[0-9]+:([^:\n]*):([^\n]*)$", re.MULTILINE)  # a line of /proc/self/cgroup: controllers and path
# A line of /proc/self/mountinfo: the mounted folder, the mount point, the type and the options.
_MOUNT = re.compile(r"^(?:[^ \n]+ ){3}([^ \n]+) ([^ \n]+) [^\n]*? - ([^ \n]+) [^ \n]* ([^ \n]+)$", re.MULTILINE)
_RECORD = struct.Struct(f"<{_ID}s{_ID}s{_MASK}s{2 * _LIMITS}Q")


class Limit(NamedTuple):
    """The processor time that the processes of a cgroup and its descendants may use together."""

    cgroup: int  # the inode of its folder, which is the same in every namespace of a host; never 0
    millicores: int  # thousandths of a core: 1,500 are 1.5 seconds of processor time in each second


class Place(NamedTuple):
    """The host and the cores on which a process runs, and the processes with which it can share memory."""

    host: bytes  # the same for processes that share cores
    memory: bytes  # the same for processes that may share memory, all of which are on one host
    affinity: bytes  # bit mask of the cores that it may run on; zero if unknown
    limits: tuple[Limit, ...] = ()  # limits of its cgroups, outermost first

    def pack(self) -> bytes:
        """Return a record of this place; all records have the same length."""
        numbers = [number for limit in self.limits[-_LIMITS:] for number in limit]
        return _RECORD.pack(self.host, self.memory, self.affinity, *numbers, *[0] * (2 * _LIMITS - len(numbers)))

    @staticmethod
    def unpack(record: bytes) -> Place:
        """Return the place stored in a record."""
        host, memory, affinity, *numbers = _RECORD.unpack(record)
        limits = map(Limit, numbers[::2], numbers[1::2])
        return Place(host, memory, affinity, tuple(limit for limit in limits if limit.cgroup))


def this_place(root: Path = _ROOT) -> Place:
    """Return where this process runs, read from ``/proc`` and ``/sys`` below ``root``."""
    try:
        host = "boot " + (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        host = "name " + socket.gethostname()
    try:
        namespace = os.readlink(root / "proc/self/ns/pid")
    except OSError:
        namespace = ""
    return Place(_digest(host), _digest(f"{host} {namespace}"), _affinity(), cpu_limits(root))


def same_host(places: Sequence[Place], rank: int) -> list[int]:
    """Return the ranks that share cores with ``rank``, including itself."""
    return [other for other, place in enumerate(places) if place.host == places[rank].host]


def same_memory(places: Sequence[Place], rank: int) -> list[int]:
    """Return the ranks that may share memory with ``rank``, including itself."""
    return [other for other, place in enumerate(places) if place.memory == places[rank].memory]


def count_cores(places: Iterable[Place]) -> int:
    r"""Return the number of cores that processes of one host may use together.

    These are the cores that any of the processes may run on, but no more than the sum of their cgroup limits. A limit counts once for all
    processes in its cgroup, and a nested cgroup cannot exceed its parent. Fractions of a core are rounded up.

    Examples
    --------
    >>> one, other = Limit(7, 1500), Limit(8, 500)
    >>> count_cores([Place(b"", b"", b"\1"), Place(b"", b"", b"\2"), Place(b"", b"", b"\2")])
    2
    >>> count_cores([Place(b"", b"", b"\xff", (one,)), Place(b"", b"", b"\xff", (one,))])
    2
    >>> count_cores([Place(b"", b"", b"\xff", (one,)), Place(b"", b"", b"\xff", (other,))])
    2
    """
    return max(1, -(-_millicores([(place.affinity, place.limits) for place in places]) // 1000))


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return count_cores([this_place()])


def label_hosts(names: Sequence[str], places: Sequence[Place]) -> list[str]:
    """Return a host name for each rank, the same for ranks that may share memory and different for others.

    Parameters
    ----------
    names : sequence of str
        The host names of the ranks. The name of a host's first rank is used; hosts with the same name are numbered.
    places : sequence of Place
        The places of the ranks.

    Examples
    --------
    >>> label_hosts(["a", "a", "b"], [Place(b"1", b"1", b""), Place(b"2", b"2", b""), Place(b"2", b"2", b"")])
    ['a', 'a (2)', 'a (2)']
    """
    labels: dict[bytes, str] = {}
    taken: Counter[str] = Counter()
    for name, place in zip(names, places, strict=True):
        if place.memory not in labels:
            taken[name] += 1
            labels[place.memory] = name if taken[name] == 1 else f"{name} ({taken[name]})"
    return [labels[place.memory] for place in places]


def cpu_limits(root: Path = _ROOT) -> tuple[Limit, ...]:
    """Return the limits of this process's cgroups, outermost first, without those that a parent's lower limit makes ineffective.

    Cgroups outside of the part of ``/sys/fs/cgroup`` that a container sees remain unknown.
    """
    limits: list[Limit] = []
    for folder in _cgroups(root):
        millicores = _limit(folder)
        if millicores is not None and (not limits or millicores < limits[-1].millicores):
            limits.append(Limit(folder.stat().st_ino, millicores))
    return tuple(limits)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_ID).digest()


def _affinity() -> bytes:
    mask = 0
    if hasattr(os, "sched_getaffinity"):
        for core in os.sched_getaffinity(0):
            mask |= 1 << core
    return (mask & ((1 << 8 * _MASK) - 1)).to_bytes(_MASK, "little")


def _millicores(ranks: list[tuple[bytes, tuple[Limit, ...]]]) -> int:
    """Return what processes may use together, in thousandths of a core, given their affinities and limits (outermost first)."""
    union = 0
    cgroups: dict[Limit | None, list[tuple[bytes, tuple[Limit, ...]]]] = {}
    for affinity, limits in ranks:
        union |= int.from_bytes(affinity, "little")
        cgroups.setdefault(limits[0] if limits else None, []).append((affinity, limits[1:]))
    most = 1000 * (union.bit_count() or os.cpu_count() or 1)
    if cgroups.keys() == {None}:
        return most
    return min(most, sum(min(limit.millicores if limit else most, _millicores(inside)) for limit, inside in cgroups.items()))


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may limit processor time, outermost first."""
    try:
        memberships, mounts = (os.fsdecode((root / "proc/self" / name).read_bytes()) for name in ("cgroup", "mountinfo"))
    except OSError:
        return
    paths: dict[str, str] = {}
    for controllers, path in _MEMBERSHIP.findall(memberships):
        if not controllers:
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for mounted, point, kind, options in _MOUNT.findall(mounts):
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        inside, folder = PurePosixPath(paths[kind]), root / point.lstrip("/")
        yield folder
        for part in inside.relative_to(mounted).parts if inside.is_relative_to(mounted) else ():
            folder /= part
            yield folder


def _limit(folder: Path) -> int | None:
    """Return the limit of one cgroup in thousandths of a core, or None if it has none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        except OSError:
            return None
    try:
        return max(1, 1000 * int(quota) // int(period)) if int(quota) >= 0 else None
    except (ValueError, ZeroDivisionError):  # "max" means no limit
        return None
