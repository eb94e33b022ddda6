"""Who shares a host's cores, who may share its memory, and how many cores the ranks of a host may use together.

Host names tell neither: containers on different machines may have one name, and those of one machine have several. The boot id, which
Linux draws when a machine starts, tells who shares cores. Boot id and PID namespace together tell who may share memory, since ranks
find each other's by process id; whether they can is proved by the mapping itself
(:func:`~sparseallreduce.runtime.memory.mapping.shared_memory`).
Where there is no boot id, the host name stands for it. Machines resumed from one snapshot have one boot id, and are taken for one host
whose ranks cannot share memory.

How many cores the host has says little where a container, ``taskset`` or a job scheduler allows some of them: two ranks on one of two
cores that took themselves for a rank a core took 379 microseconds for a sum of a few entries, where ranks that know it take 57.
A cgroup may besides limit the processor time of all that is in it (``cpu.max``), which counts as so many cores, rounded up.
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

_ROOT = Path("/")  # of the file system in which /proc and /sys are looked for
_ID = 8  # bytes
_MASK = 256  # bytes, for 2,048 cores; ranks bound to others count as if they could use all
_LIMITS = 4  # most nested limits of a rank that others learn of: those of the innermost cgroups
_MEMBERSHIP = re.compile(r"^[0-9]+:([^:\n]*):([^\n]*)$", re.MULTILINE)  # a line of /proc/self/cgroup: controllers and path
# A line of /proc/self/mountinfo: what of the file system is mounted, where, its type and its options.
_MOUNT = re.compile(r"^(?:[^ \n]+ ){3}([^ \n]+) ([^ \n]+) [^\n]*? - ([^ \n]+) [^ \n]* ([^ \n]+)$", re.MULTILINE)
_RECORD = struct.Struct(f"<{_ID}s{_ID}s{_MASK}s{2 * _LIMITS}Q")


class Limit(NamedTuple):
    """What the processes of a cgroup and of those inside it may use together."""

    cgroup: int  # the inode of its folder, which is the same in every namespace of a host; never 0
    millicores: int  # thousandths of a core: 1,500 are 1.5 seconds of processor time in each second


class Place(NamedTuple):
    """Where a process runs."""

    host: bytes  # the same for processes that share cores
    memory: bytes  # the same for processes that may share memory, all of which are on one host
    affinity: bytes  # the cores that it may run on, a bit for each; none where the system does not tell
    limits: tuple[Limit, ...] = ()  # of the cgroups that it is in, outermost first

    def pack(self) -> bytes:
        """A record, equally long for all places."""
        numbers = [number for limit in self.limits[-_LIMITS:] for number in limit]
        return _RECORD.pack(self.host, self.memory, self.affinity, *numbers, *[0] * (2 * _LIMITS - len(numbers)))

    @staticmethod
    def unpack(record: bytes) -> Place:
        """The place of a record."""
        host, memory, affinity, *numbers = _RECORD.unpack(record)
        limits = map(Limit, numbers[::2], numbers[1::2])
        return Place(host, memory, affinity, tuple(limit for limit in limits if limit.cgroup))


def this_place(root: Path = _ROOT) -> Place:
    """Where this process runs, as ``/proc`` and ``/sys`` below ``root`` tell."""
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
    """The ranks that share cores with a rank, itself included."""
    return [other for other, place in enumerate(places) if place.host == places[rank].host]


def same_memory(places: Sequence[Place], rank: int) -> list[int]:
    """The ranks that may share memory with a rank, itself included."""
    return [other for other, place in enumerate(places) if place.memory == places[rank].memory]


def count_cores(places: Iterable[Place]) -> int:
    """The cores that processes of one host may use together.

    These are the cores that any of them may run on, but no more than the limits of their cgroups add up to: a limit counts once for
    all processes in its cgroup, those of different cgroups add up, and no cgroup has more than the one that it lies in. What remains
    of a core counts as one.

    >>> one, other = Limit(7, 1500), Limit(8, 500)
    >>> count_cores([Place(b"", b"", b"\\1"), Place(b"", b"", b"\\2"), Place(b"", b"", b"\\2")])
    2
    >>> count_cores([Place(b"", b"", b"\\xff", (one,)), Place(b"", b"", b"\\xff", (one,))])
    2
    >>> count_cores([Place(b"", b"", b"\\xff", (one,)), Place(b"", b"", b"\\xff", (other,))])
    2
    """
    return max(1, -(-_millicores([(place.affinity, place.limits) for place in places]) // 1000))


def usable_cores() -> int:
    """Cores that this process may use."""
    return count_cores([this_place()])


def label_hosts(names: Sequence[str], places: Sequence[Place]) -> list[str]:
    """For each rank a name of its host, the same for ranks that may share memory and for no others.

    Parameters
    ----------
    names : sequence of str
        The host names of the ranks, of which the first of each host counts; hosts of one name are numbered.
    places : sequence of Place
        Of the ranks.

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
    """The limits of the cgroups that this process is in, outermost first; a limit above one further out is none.

    Cgroups outside of what a container sees of ``/sys/fs/cgroup`` remain unknown.
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
    """What processes may use together, each with its affinity and its limits, outermost first."""
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
    """The folders of the cgroups that this process is in and that may limit processor time, outermost first."""
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
    """Of one cgroup, in thousandths of a core; None without."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((folder / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        except OSError:
            return None
    try:
        return max(1, 1000 * int(quota) // int(period)) if int(quota) >= 0 else None
    except (ValueError, ZeroDivisionError):  # no limit is "max"
        return None
