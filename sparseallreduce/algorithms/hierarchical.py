"""Two levels: the ranks of each host add their streams up, and parts of the sums travel between hosts (CommLib section 3.2)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

from sparseallreduce.algorithms.boundaries import Cutter, bounds_of
from sparseallreduce.algorithms.groups import on_group
from sparseallreduce.algorithms.steps import HostGather, HostReduceScatter, Recv, RecvAny, Schedule, Send, Step
from sparseallreduce.streams.partition import concatenate, slice_range, split
from sparseallreduce.streams.reduction import Reduction, Tree
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import decoded

__all__ = ["Hosts", "dense_torus", "gather_in_host", "hierarchical", "reduce_scatter_in_host"]

SPLIT = "split"  # how a host's ranks add up unless an algorithm is named: each a part


class Hosts(NamedTuple):
    """Which ranks are on which host."""

    members: tuple[tuple[int, ...], ...]  # ranks of each host, increasing; hosts in the order of their first ranks
    share_memory: bool = False  # whether on every host the ranks hand each other parts of streams in memory

    @classmethod
    def of(cls, host_of_rank: Sequence[Any]) -> Hosts:
        """From the host of every rank.

        >>> Hosts.of("abab").members
        ((0, 2), (1, 3))
        """
        found: dict[Any, list[int]] = {}
        for rank, host in enumerate(host_of_rank):
            found.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def in_a_row(self) -> int:
        """The ranks next to each other that are on one host, if all hosts have as many, one host's behind another's; else 1.

        >>> Hosts.of("aabb").in_a_row, Hosts.of("abab").in_a_row, Hosts.of("aab").in_a_row
        (2, 1, 1)
        """
        rows = all(ranks == tuple(range(ranks[0], ranks[-1] + 1)) for ranks in self.members)
        return self.lanes if rows and len(set(map(len, self.members))) == 1 else 1

    @property
    def lanes(self) -> int:
        """Ranks of the smallest host: so many parts travel between hosts side by side."""
        return min(map(len, self.members))

    @property
    def most(self) -> int:
        """Ranks of the largest host."""
        return max(map(len, self.members))

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of its host, and its place there."""
        host = next(number for number, ranks in enumerate(self.members) if rank in ranks)
        return host, self.members[host].index(rank)

    def lane(self, place: int) -> tuple[int, ...]:
        """The ranks at a place of every host."""
        return tuple(ranks[place] for ranks in self.members)


def hierarchical(
    stream: SparseStream,
    rank: int,
    ranks: int,
    reduction: Reduction,
    *,
    hosts: Hosts,
    run: Mapping[str, Any],
    inner: str = SPLIT,
    outer: str = "ssar_recursive_doubling",
    cut: Cutter | None = None,
) -> Schedule:
    """Add up inside every host, and send the sums of hosts alone between them.

    The algorithm has three steps, with L the ranks of the smallest host:

    1. The index space is cut in L parts. The ranks of a host add their streams up, its first L ranks a part each.
    2. Part l travels between the hosts along their ranks at place l, by the algorithm ``outer``, all parts at once.
    3. The ranks of a host gather the parts.

    Between hosts a rank sends 1/L of what one rank a host would, with the host's sum for its stream: the links of all hosts are used by
    all of their ranks.

    Parameters
    ----------
    hosts : Hosts
    run : mapping
        The generator functions of the algorithms that ``inner`` and ``outer`` may name.
    inner : str
        "split", by which each of the L ranks adds a part up; or an algorithm by which all of them come to the whole sum of the host.
    outer : str
    cut : callable, optional
        Of the index space into L parts, by where the ranks' entries lie; by default they are of equal widths.
    """
    if ranks == 1:
        return stream
    host, place = hosts.place_of(rank)
    members, lanes = hosts.members[host], hosts.lanes
    bounds = tuple(bounds_of(stream, lanes, cut))
    if inner == SPLIT:
        part = yield HostReduceScatter(stream, members, bounds, reduction)
    else:
        among = run[inner](stream, place, len(members), reduction)
        whole: SparseStream = yield from on_group(among, members, place, reduction, quantises=False)
        part = slice_range(whole, bounds[place], bounds[place + 1]) if place < lanes else None
    if part is not None and len(hosts.members) > 1:
        lane = hosts.lane(place)
        part = decoded((yield from on_group(run[outer](part, host, len(lane), reduction), lane, host, reduction)))
    result: SparseStream = yield HostGather(part, members, bounds, reduction)
    return result


def dense_torus(stream: SparseStream, rank: int, ranks: int, reduction: Reduction, *, hosts: Hosts, run: Mapping[str, Any]) -> Schedule:
    """2D-Torus: the dense vector of every rank, reduced on two levels, between hosts in rings (CommLib section 5.3: 2DTAR).

    The ranks are a grid of H hosts with L ranks each. Three steps, dense: a reduce-scatter inside every host, an allreduce of parts of
    about N/L along the ranks at each place by a ring of H, and an allgather inside every host.

    Latency 2 (H - 1) alpha between hosts; bandwidth 2 (H - 1)/H N/L beta there, and 2 (L - 1)/L N beta inside.
    """
    return (yield from hierarchical(reduction.densify(stream), rank, ranks, reduction, hosts=hosts, run=run, outer="ssar_ring"))


def reduce_scatter_in_host(step: HostReduceScatter, rank: int) -> Generator[Step, Any, SparseStream | None]:
    """The step by messages: each part goes straight to the rank that adds it up."""
    lanes, members, place = len(step.bounds) - 1, step.members, step.members.index(rank)
    parts = split(step.stream, step.bounds)
    for distance in range(1, lanes + 1):  # starting behind ourselves, so that no rank is sent everything at once
        other = (place + distance) % lanes
        if other != place:
            yield Send(members[other], parts[other])
    if place >= lanes:
        return None
    sums = Tree(step.reduction, len(members))
    sums.add(place, parts[place])
    missing = set(members) - {rank}
    while missing:
        source, part = yield RecvAny(missing)
        missing.remove(source)
        sums.add(members.index(source), part)
    return sums.result()


def gather_in_host(step: HostGather, rank: int) -> Generator[Step, Any, SparseStream]:
    """The step by messages: each part goes straight to all ranks of the host."""
    lanes, members, place = len(step.bounds) - 1, step.members, step.members.index(rank)
    parts: list[Any] = [None] * lanes
    if step.part is not None:
        parts[place] = step.part
        for distance in range(1, len(members)):
            yield Send(members[(place + distance) % len(members)], step.part)
    for number in range(lanes):
        if parts[number] is None:
            parts[number] = yield Recv(members[number])
    return concatenate(parts, step.reduction)
