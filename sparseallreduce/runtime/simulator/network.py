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

    Every rank sends one message at a time and receives one at a time, both at once; of long messages, a piece at a time. With ``hosts``,
    ranks of a host send to each other by the local latency and bandwidth, each rank at its own; what goes to other hosts or comes from them
    shares the host's link: the bytes of one piece at a time leave it, and those of one enter it, while the latencies of its ranks pass side
    by side.
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
    # Kernels of a GPU take as long as what stands for them here; copies to the host and back what their link promises.
    device = {"gamma_device": network.gamma, "gamma_dense_device": gamma_dense, "alpha_device": 0.0}
    return Machine(network.latency, beta, network.gamma, gamma_dense, beta, codec=1e-15, **local, **device)


def coding_time(network: Network, nbytes: int, values: int) -> float:
    """Seconds beyond those on the wire of a message for which so many values of dense arrays are read and written again.

    Each is passed over twice, by the sender and by the receiver, most of it while pieces travel.
    """
    machine = machine_of(network)
    busy = Transfer(nbytes, 2 * machine.gamma_dense * values)
    return busy.time(0.0, machine.beta, machine._replace(overlap=OVERLAP)) - nbytes * machine.beta


class Ports:
    """From when on each port is free: one message at a time leaves it, and one at a time enters it, both at once.

    Every rank has a port, which a message takes for its latency and its bytes. What goes to other hosts also takes the link that the ranks
    of a host share, for its bytes alone: the latencies of different ranks pass side by side.

    The only place where a message is given a time.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self._far = network.latency, network.bandwidth
        self._near = network.near_latency, network.near_bandwidth
        self._host = [0] * ranks
        for number, members in enumerate(network.layout(ranks).members):
            for rank in members:
                self._host[rank] = number
        # Of each rank, and of each host.
        self._free_to_send, self._out = [0.0] * ranks, [0.0] * ranks
        self._free_to_receive, self._in = [0.0] * ranks, [0.0] * ranks

    def leaves(self, source: int, dest: int, ready: float, is_first: bool = True) -> float:
        """Return when a piece of a message leaves that the sender has ``ready`` at a time; to be asked for one at a time of a rank.

        The first piece leaves when the latency of the message has passed.
        """
        free = max(ready, self._free_to_send[source])
        return free + self._link(source, dest)[0] if is_first else free

    def depart(self, source: int, dest: int, nbytes: int, now: float) -> float:
        """When the first byte is at the receiver of a message whose latency has just passed; of all ranks, in the order of time."""
        head, (_, bandwidth) = now, self._link(source, dest)
        if self._is_far(source, dest):
            host = self._host[source]
            head = max(now, self._out[host])
            self._out[host] = head + nbytes / bandwidth
        self._free_to_send[source] = head + nbytes / bandwidth
        return head

    def arrive(self, source: int, dest: int, nbytes: int, head: float) -> float:
        """When the last byte has been received of a message whose first byte is there at ``head``; the port may be busy then."""
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
        """The latency and the bandwidth between two ranks."""
        return self._far if self._is_far(source, dest) else self._near
