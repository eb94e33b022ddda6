"""The virtual network: what a message costs, and from when on the ports of the ranks are free (thesis section 3.1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from sparseallreduce.algorithms.cost import OVERLAP, Machine, Transfer
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.errors import StreamError

__all__ = ["Network", "Ports", "coding_time", "machine_of"]


class Network(NamedTuple):
    """The alpha-beta model (thesis section 3.1.1): a message of L bytes takes ``latency + L / bandwidth``.

    Every rank sends one message at a time and receives one at a time, both at once. With ``hosts``, ranks of a host send to each other by
    the local latency and bandwidth, each rank at its own; what goes to other hosts or comes from them shares the host's link: one message
    at a time leaves it, and one enters it.
    """

    latency: float = 1e-6  # alpha, seconds
    bandwidth: float = 12.5e9  # 1 / beta, bytes a second
    gamma: float = 0.0  # seconds for each entry that a sparse reduction reads; the thesis leaves computation out
    gamma_dense: float | None = None  # seconds for each value that a pass over a dense array writes; by default an eighth of gamma
    hosts: int | Sequence[Any] | None = None  # the ranks of a host, one host's behind another's; or the host of each rank; else one each
    local_latency: float | None = None  # between ranks of one host; by default the latency
    local_bandwidth: float | None = None  # by default the bandwidth

    @property
    def near_latency(self) -> float:
        """Between ranks of one host."""
        return self.latency if self.local_latency is None else self.local_latency

    @property
    def near_bandwidth(self) -> float:
        """Between ranks of one host."""
        return self.bandwidth if self.local_bandwidth is None else self.local_bandwidth

    def layout(self, ranks: int) -> Hosts:
        """Where so many ranks are.

        Raises
        ------
        StreamError
            If ``hosts`` is no number from 1 on, nor the hosts of so many ranks.

        >>> Network(hosts=2).layout(5).members
        ((0, 1), (2, 3), (4,))
        """
        if self.hosts is None:
            return Hosts(tuple((rank,) for rank in range(ranks)))
        if isinstance(self.hosts, Integral):
            if self.hosts < 1:
                raise StreamError(f"a network's hosts have at least one rank each, not {self.hosts}")
            return Hosts.of([rank // int(self.hosts) for rank in range(ranks)])
        found: Sequence[Any] = self.hosts  # type: ignore[assignment]
        if len(found) != ranks:
            raise StreamError(f"the network has the hosts of {len(found)} ranks, and there are {ranks}")
        return Hosts.of(found)


def machine_of(network: Network, sharing: float = 1.0) -> Machine:
    """The constants by which algorithms are chosen there, where so many ranks share a link; writing and reading indices takes no time."""
    beta = sharing / network.bandwidth
    gamma_dense = network.gamma / 8 if network.gamma_dense is None else network.gamma_dense
    local = {} if network.hosts is None else {"alpha_local": network.near_latency, "beta_local": 1 / network.near_bandwidth}
    return Machine(network.latency, beta, network.gamma, gamma_dense, beta, codec=1e-15, **local)


def coding_time(network: Network, nbytes: int, values: int) -> float:
    """Seconds beyond those on the wire of a message for which so many values of dense arrays are read and written again.

    Each is passed over twice, by the sender and by the receiver, most of it while pieces travel.
    """
    machine = machine_of(network)
    busy = Transfer(nbytes, 2 * machine.gamma_dense * values)
    return busy.time(0.0, machine.beta, machine._replace(overlap=OVERLAP)) - nbytes * machine.beta


class Ports:
    """From when on each port is free: one message at a time leaves it, and one at a time enters it, both at once.

    Every rank has a port of its own for the ranks of its host, and the ranks of a host share that to other hosts.

    The only place where a message is given a time.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self._far = network.latency, network.bandwidth
        self._near = network.near_latency, network.near_bandwidth
        self._host = [0] * ranks
        for number, members in enumerate(network.layout(ranks).members):
            for rank in members:
                self._host[rank] = number
        # By whether the other rank is on the same host: of each rank, and of each host.
        self._free_to_send = [0.0] * ranks, [0.0] * ranks
        self._free_to_receive = [0.0] * ranks, [0.0] * ranks

    def depart(self, source: int, dest: int, nbytes: int, ready: float) -> float:
        """When the first byte is at the receiver of a message that the sender has ``ready`` at a time."""
        port, free, (latency, bandwidth) = self._link(source, dest, source, self._free_to_send)
        start = max(ready, free[port])
        free[port] = start + latency + nbytes / bandwidth
        return start + latency

    def arrive(self, source: int, dest: int, nbytes: int, head: float) -> float:
        """When the last byte has been received of a message whose first byte is there at ``head``; the port may be busy then."""
        port, free, (_, bandwidth) = self._link(source, dest, dest, self._free_to_receive)
        free[port] = max(head, free[port]) + nbytes / bandwidth
        return free[port]

    def _link(
        self, source: int, dest: int, end: int, free: tuple[list[float], list[float]]
    ) -> tuple[int, list[float], tuple[float, float]]:
        """Of the end of a message: its port, from when on such ports are free, and what the link between them is like."""
        if self._host[source] == self._host[dest]:
            return end, free[0], self._near
        return self._host[end], free[1], self._far
