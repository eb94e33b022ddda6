"""Two-level algorithms: the ranks of each host add their streams, and parts of the sums are reduced between hosts (CommLib 3.2)."""

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

SPLIT = "split"  # default of `inner`: each rank of a host adds a part


class Hosts(NamedTuple):
    """The layout of ranks on hosts."""

    members: tuple[tuple[int, ...], ...]  # ranks of each host, increasing; hosts in the order of their first ranks
    share_memory: bool = False  # whether the ranks of every host exchange parts in shared memory

    @classmethod
    def of(cls, host_of_rank: Sequence[Any]) -> Hosts:
        """Return the layout, given the host of every rank.

        Examples
        --------
        >>> Hosts.of("abab").members
        ((0, 2), (1, 3))
        """
        found: dict[Any, list[int]] = {}
        for rank, host in enumerate(host_of_rank):
            found.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def in_a_row(self) -> int:
        """The number of consecutive ranks on each host, if all hosts have the same number and consecutive ranks; else 1.

        Examples
        --------
        >>> Hosts.of("aabb").in_a_row, Hosts.of("abab").in_a_row, Hosts.of("aab").in_a_row
        (2, 1, 1)
        """
        rows = all(ranks == tuple(range(ranks[0], ranks[-1] + 1)) for ranks in self.members)
        return self.lanes if rows and len(set(map(len, self.members))) == 1 else 1

    @property
    def lanes(self) -> int:
        """The number of ranks of the smallest host, which is the number of parts reduced between hosts in parallel."""
        return min(map(len, self.members))

    @property
    def most(self) -> int:
        """The number of ranks of the largest host."""
        return max(map(len, self.members))

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's host, and its index there."""
        host = next(number for number, ranks in enumerate(self.members) if rank in ranks)
        return host, self.members[host].index(rank)

    def lane(self, place: int) -> tuple[int, ...]:
        """Return the ranks at one place of every host."""
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
    """Add the streams inside every host, and reduce the hosts' sums between hosts.

    The algorithm has three steps, with L the ranks of the smallest host:

    1. The index space is cut into L parts. The ranks of a host add their streams, its first L ranks a part each.
    2. Part l is reduced between the hosts' ranks at place l by the algorithm ``outer``, all parts in parallel.
    3. The ranks of a host gather the parts.

    Between hosts a rank sends 1/L of what a single rank per host would with the host's sum as its stream: all ranks of a host use its link.

    Parameters
    ----------
    hosts : Hosts
    run : mapping
        Generator functions of the algorithms that ``inner`` and ``outer`` may name.
    inner : str
        "split", in which each of the L ranks adds a part, or an algorithm that gives all of them the whole sum of the host.
    outer : str
    cut : callable, optional
        Returns the bounds of L parts, based on where the ranks' entries are; by default parts have equal widths.
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
    """Reduce dense vectors on two levels, by rings between hosts: 2D-Torus (CommLib section 5.3: 2DTAR).

    The ranks are a grid of H hosts with L ranks each. Three steps, dense: a reduce-scatter inside every host, an allreduce of parts of
    about N/L along the ranks at each place by a ring of H, and an allgather inside every host.

    Latency 2 (H - 1) alpha between hosts; bandwidth 2 (H - 1)/H N/L beta there, and 2 (L - 1)/L N beta inside.
    """
    return (yield from hierarchical(reduction.densify(stream), rank, ranks, reduction, hosts=hosts, run=run, outer="ssar_ring"))


def reduce_scatter_in_host(step: HostReduceScatter, rank: int) -> Generator[Step, Any, SparseStream | None]:
    """Run the step by messages: each part is sent directly to the rank that adds it."""
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
    """Run the step by messages: each part is sent directly to all ranks of the host."""
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
