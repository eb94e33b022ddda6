"""The virtual network: what a message costs, and from when on the ports of the ranks are free (thesis section 3.1.1)."""

from __future__ import annotations

from typing import NamedTuple

from sparseallreduce.algorithms.cost import OVERLAP, Machine, Transfer

__all__ = ["Network", "Ports", "coding_time", "machine_of"]


class Network(NamedTuple):
    """The alpha-beta model (thesis section 3.1.1): a message of L bytes takes ``latency + L / bandwidth``.

    Every rank sends one message at a time and receives one at a time, both at once.
    """

    latency: float = 1e-6  # alpha, seconds
    bandwidth: float = 12.5e9  # 1 / beta, bytes a second
    gamma: float = 0.0  # seconds for each entry that a sparse reduction reads; the thesis leaves computation out
    gamma_dense: float | None = None  # seconds for each value that a pass over a dense array writes; by default an eighth of gamma


def machine_of(network: Network) -> Machine:
    """The constants by which algorithms are chosen there; to write indices and to read them takes no time."""
    beta = 1 / network.bandwidth
    gamma_dense = network.gamma / 8 if network.gamma_dense is None else network.gamma_dense
    return Machine(network.latency, beta, network.gamma, gamma_dense, beta, codec=1e-15)


def coding_time(network: Network, nbytes: int, values: int) -> float:
    """Seconds beyond those on the wire of a message for which so many values of dense arrays are read and written again.

    Each is passed over twice, by the sender and by the receiver, most of it while pieces travel.
    """
    machine = machine_of(network)
    busy = Transfer(nbytes, 2 * machine.gamma_dense * values)
    return busy.time(0.0, machine.beta, machine._replace(overlap=OVERLAP)) - nbytes * machine.beta


class Ports:
    """From when on each rank's port is free: one message at a time leaves it, and one at a time enters it, both at once.

    The only place where a message is given a time. Who sends and who receives is known in both methods, so that the time may depend on it.
    """

    def __init__(self, network: Network, ranks: int) -> None:
        self._network = network
        self._free_to_send = [0.0] * ranks
        self._free_to_receive = [0.0] * ranks

    def depart(self, source: int, dest: int, nbytes: int, ready: float) -> float:
        """When the first byte is at the receiver of a message that the sender has ``ready`` at a time."""
        start = max(ready, self._free_to_send[source])
        self._free_to_send[source] = start + self._network.latency + nbytes / self._network.bandwidth
        return start + self._network.latency

    def arrive(self, source: int, dest: int, nbytes: int, head: float) -> float:
        """When the last byte has been received of a message whose first byte is there at ``head``; the port may be busy then."""
        self._free_to_receive[dest] = max(head, self._free_to_receive[dest]) + nbytes / self._network.bandwidth
        return self._free_to_receive[dest]
