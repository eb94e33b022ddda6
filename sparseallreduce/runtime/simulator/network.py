"""The virtual network: the cost of a message, and when the ports of the ranks are free (thesis section 3.1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

from sparseallreduce.algorithms.cost import OVERLAP, Machine, Transfer, rabenseifner_of_messages
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.errors import StreamError

__all__ = ["Network", "Ports", "coding_time", "machine_of"]


class Network(NamedTuple):
    """The alpha-beta model (thesis section 3.1.1): a message of L bytes takes ``latency + L / bandwidth``.

    Every rank sends one message at a time and receives one at a time, both simultaneously; long messages are sent in pieces. With
    ``hosts``, the ranks of a host send to each other with the local latency and bandwidth. Messages to and from other hosts share the
    host's link: it sends the bytes of one piece at a time and receives those of one, while the latencies of its ranks overlap.
    """

    latency: float = 1e-6  # alpha, in seconds
    bandwidth: float = 12.5e9  # 1 / beta, in bytes per second
    gamma: float = 0.0  # seconds per entry that a sparse reduction reads; the thesis neglects computation
    gamma_dense: float | None = None  # seconds per value that a pass over a dense array writes; by default gamma / 8
    hosts: int | Sequence[Any] | None = None  # number of consecutive ranks per host, or the host of each rank; by default one rank per host
    local_latency: float | None = None  # latency between ranks of one host, by default the same
    local_bandwidth: float | None = None  # bandwidth between ranks of one host, by default the same

    @property
    def near_latency(self) -> float:
        """The latency between ranks of one host, in seconds."""
        return self.latency if self.local_latency is None else self.local_latency

    @property
    def near_bandwidth(self) -> float:
        """The bandwidth between ranks of one host, in bytes per second."""
        return self.bandwidth if self.local_bandwidth is None else self.local_bandwidth

    def layout(self, ranks: int) -> Hosts:
        """Return the hosts of ``ranks`` ranks.

        Raises
        ------
        StreamError
            If ``hosts`` is neither a positive number nor one host for each of the ranks.

        Examples
        --------
        >>> Network(hosts=2).layout(5).members
        ((0, 1), (2, 3), (4,))
        """
        if self.hosts is None:
            return Hosts(tuple((rank,) for rank in range(ranks)))
        if isinstance(self.hosts, Integral):
            if self.hosts < 1:
                raise StreamError(f"each host of a network has at least one rank, not {self.hosts}")
            return Hosts.of([rank // int(self.hosts) for rank in range(ranks)])
        found: Sequence[Any] = self.hosts  # type: ignore[assignment]
        if len(found) != ranks:
            raise StreamError(f"the network gives the hosts of {len(found)} ranks, but there are {ranks} ranks")
        return Hosts.of(found)


def machine_of(network: Network, hosts: Hosts | None = None) -> Machine:
    """Return the constants by which algorithms are chosen on this network, for ranks on these hosts, which share the hosts' links.

    Encoding and decoding indices takes no time. Without ``hosts``, each rank has a link of its own.
    """
    ranks = 1 if hosts is None else sum(map(len, hosts.members))
    beta = (1.0 if hosts is None else ranks / max(1, len(hosts.members))) / network.bandwidth
    gamma_dense = network.gamma / 8 if network.gamma_dense is None else network.gamma_dense
    local = {} if network.hosts is None else {"alpha_local": network.near_latency, "beta_local": 1 / network.near_bandwidth}
    # GPU kernels are charged like those of the host, and copies to and from the host by the default link.
    device = {"gamma_device": network.gamma, "gamma_dense_device": gamma_dense, "alpha_device": 0.0}
    machine = Machine(network.latency, beta, network.gamma, gamma_dense, beta, codec=1e-15, **local, **device)
    return machine if hosts is None or ranks < 2 else rabenseifner_of_messages(machine, ranks, hosts.in_a_row)


def coding_time(network: Network, nbytes: int, values: int) -> float:
    """Return the seconds beyond the transfer of a message for which ``values`` values of dense arrays are encoded and decoded.

    Sender and receiver each read and write every value, mostly while pieces are in flight.
    """
    machine = machine_of(network)
    busy = Transfer(nbytes, 2 * machine.gamma_dense * values)
    return busy.time(0.0, machine.beta, machine._replace(overlap=OVERLAP)) - nbytes * machine.beta


class Ports:
    """The times at which each port is free: one message at a time leaves it and one enters it, both simultaneously.

    Every rank has a port, which a message occupies for its latency and its bytes. A message to another host also occupies the link that the
    ranks of a host share, for its bytes alone: the latencies of different ranks overlap. All times of messages are computed here.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self._far = network.latency, network.bandwidth
        self._near = network.near_latency, network.near_bandwidth
        self._host = [0] * ranks
        for number, members in enumerate(network.layout(ranks).members):
            for rank in members:
                self._host[rank] = number
        # For each rank, and for each host.
        self._free_to_send, self._out = [0.0] * ranks, [0.0] * ranks
        self._free_to_receive, self._in = [0.0] * ranks, [0.0] * ranks

    def leaves(self, source: int, dest: int, ready: float, is_first: bool = True) -> float:
        """Return when a piece leaves whose message the sender has ``ready`` at that time. Call it for one piece of a rank at a time.

        The first piece leaves after the latency of the message.
        """
        free = max(ready, self._free_to_send[source])
        return free + self._link(source, dest)[0] if is_first else free

    def depart(self, source: int, dest: int, nbytes: int, now: float) -> float:
        """Return when the first byte of a piece, whose latency has just passed, reaches the receiver.

        Calls, for all ranks together, must be in order of time.
        """
        head, (_, bandwidth) = now, self._link(source, dest)
        if self._is_far(source, dest):
            host = self._host[source]
            head = max(now, self._out[host])
            self._out[host] = head + nbytes / bandwidth
        self._free_to_send[source] = head + nbytes / bandwidth
        return head

    def arrive(self, source: int, dest: int, nbytes: int, head: float) -> float:
        """Return when the last byte of a piece is received whose first byte arrives at ``head``, when the port may be busy."""
        start, (_, bandwidth) = max(head, self._free_to_receive[dest]), self._link(source, dest)
        if self._is_far(source, dest):
            host = self._host[dest]
            start = max(start, self._in[host])
            self._in[host] = start + nbytes / bandwidth
        self._free_to_receive[dest] = start + nbytes / bandwidth
        return self._free_to_receive[dest]

    def _is_far(self, source: int, dest: int) -> bool:
        return self._host[source] != self._host[dest]

    def _link(self, source: int, dest: int) -> tuple[float, float]:
        """Return the latency and the bandwidth between two ranks."""
        return self._far if self._is_far(source, dest) else self._near
