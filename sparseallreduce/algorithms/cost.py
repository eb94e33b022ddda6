"""What an algorithm costs: the alpha-beta model of thesis section 3.1.1 with a gamma for the additions, and table 3.1.

All predictions are made of sums, products and quotients alone, which IEEE 754 rounds alike on every machine, so that ranks which
start from the same numbers choose the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sparseallreduce.algorithms.exchange import lower_power_of_two

__all__ = ["Machine", "Problem", "expected_size", "predicted_time", "shared_split_time"]


class Machine(NamedTuple):
    """The constants of a network and of the processors on it."""

    alpha: float = 2e-6  # seconds a message
    beta: float = 1e-10  # seconds a byte
    gamma: float = 2e-9  # seconds an entry read by a sparse reduction
    gamma_dense: float = 3e-10  # seconds a value written by a dense one
    beta_dense: float = 2e-10  # seconds a byte and hop of the dense allreduce, its additions included
    alpha_dense: float | None = None  # seconds of the dense allreduce of a few bytes; by default 2 log2(P) alpha
    beta_blocking: float | None = None  # as beta_dense, of one that ranks wait for inside MPI; by default the same
    trust: float = 1.0  # share of the dense allreduce's time that another algorithm must be expected to stay below


class Problem(NamedTuple):
    """What is to be reduced: k entries on each of P ranks, in dimension N (thesis section 3.1.2)."""

    entries: float  # k
    size: int  # N
    ranks: int  # P
    value_bytes: int = 4  # of a value, or of a row: isize
    index_bytes: int = 4  # c
    switch_density: float | None = None  # as in SparseStream

    def bytes(self, entries: float, extent: float) -> float:
        """Of a stream with ``entries`` on ``extent`` positions, in the form that is smaller."""
        if entries > self.limit(extent):
            return extent * self.value_bytes
        return entries * (self.value_bytes + self.index_bytes)

    def limit(self, extent: float) -> float:
        """phi: entries above which a stream on ``extent`` positions is dense (thesis section 4.1.2)."""
        limit = extent * self.value_bytes / (self.value_bytes + self.index_bytes)
        return limit if self.switch_density is None else min(limit, extent * self.switch_density)


def expected_size(entries: float, size: float, ranks: int) -> float:
    """E[K] = f(k, N, P): the entries of the sum of P streams of k entries at uniformly random positions (thesis section 3.2.1).

    The paper's alternating sum in closed form: N (1 - (1 - k/N)**P).

    >>> round(expected_size(16, 512, 2), 6)
    31.5
    """
    if size == 0:
        return 0.0
    absent, power, base = 1.0, ranks, 1.0 - entries / size
    while power:  # by repeated squaring: pow() may differ in the last bit from one C library to another
        if power & 1:
            absent *= base
        base *= base
        power >>= 1
    return size * (1.0 - absent)


def predicted_time(name: str, problem: Problem, machine: Machine) -> float:
    """Seconds that algorithm ``name`` takes for uniformly random positions.

    Parameters
    ----------
    name : str
        One of :func:`~sparseallreduce.algorithms.algorithms`, "auto" apart.
    problem : Problem
    machine : Machine

    Notes
    -----
    With gamma = 0 and streams below the switch point these are the expected bandwidths of thesis table 3.1; ranks in excess of a
    power of two add one message at each end, for the algorithms that need it.
    """
    return _MODELS[name](problem, machine)


def shared_split_time(problem: Problem, machine: Machine) -> float:
    """Seconds of a split in memory that the ranks share: a rank copies its stream, adds up its part, copies that, and waits twice.

    An entry is copied in half the time that a merge takes for one it reads, and each wait takes as long as a dense sum of next to
    nothing. With 30 microseconds besides, that fits what short streams took with 2, 4 and 8 ranks on 2 cores when parts were copied; two
    parts no longer are.
    """
    ranks = problem.ranks
    entries, extent = problem.entries / ranks, problem.size / ranks
    copied = problem.entries + expected_size(entries, extent, ranks)
    wait = machine.alpha if machine.alpha_dense is None else machine.alpha_dense
    return 3e-5 + 2 * wait + machine.gamma / 2 * copied + _tree_time(problem, machine, entries, extent)


def _rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _pair_time(problem: Problem, machine: Machine, entries: float, extent: float) -> float:
    """Of reducing two streams of ``entries`` each on ``extent`` positions."""
    if entries > problem.limit(extent):
        return machine.gamma_dense * extent
    if 2 * entries > problem.limit(extent):
        return machine.gamma_dense * extent + machine.gamma * 2 * entries
    return machine.gamma * 2 * entries


def _tree_time(problem: Problem, machine: Machine, entries: float, extent: float) -> float:
    """Of reducing a stream of ``entries`` on ``extent`` positions from each rank, as a balanced tree."""
    time, nodes, size = 0.0, problem.ranks, 1
    while nodes > 1:
        time += nodes // 2 * _pair_time(problem, machine, expected_size(entries, extent, size), extent)
        nodes, size = (nodes + 1) // 2, 2 * size
    return time


def _concatenation_time(problem: Problem, machine: Machine, entries: float, extent: float) -> float:
    """Of joining the parts of all ranks; an entry is copied in half the time that a merge takes for one it reads (0.43 to 0.51)."""
    if entries > problem.limit(extent):
        return machine.gamma_dense * extent * problem.ranks
    return machine.gamma / 2 * entries * problem.ranks


def _dense(problem: Problem, machine: Machine) -> float:
    hops = 2 * (problem.ranks - 1) / problem.ranks
    already = problem.entries > problem.limit(problem.size)
    fill = 0.0 if already else machine.gamma_dense * problem.size + machine.gamma * problem.entries
    latency = 2 * _rounds(problem.ranks) * machine.alpha if machine.alpha_dense is None else machine.alpha_dense
    return fill + latency + hops * problem.size * problem.value_bytes * machine.beta_dense


def _allgather(problem: Problem, machine: Machine) -> float:
    k, ranks = problem.entries, problem.ranks
    time = _rounds(ranks) * machine.alpha + (ranks - 1) * problem.bytes(k, problem.size) * machine.beta
    return time + _tree_time(problem, machine, k, problem.size)


def _ssar_recursive_doubling(problem: Problem, machine: Machine) -> float:
    k, size = problem.entries, problem.size
    core = lower_power_of_two(problem.ranks)
    time, held = 0.0, k
    if core < problem.ranks:
        result = problem.bytes(expected_size(k, size, problem.ranks), size)
        time += 2 * machine.alpha + (problem.bytes(k, size) + result) * machine.beta + _pair_time(problem, machine, k, size)
    distance = 1
    while distance < core:
        held = expected_size(k, size, distance)
        time += machine.alpha + problem.bytes(held, size) * machine.beta + _pair_time(problem, machine, held, size)
        distance *= 2
    return time


def _split(problem: Problem, machine: Machine) -> float:
    """The split phase without the additions."""
    ranks = problem.ranks
    part = problem.bytes(problem.entries, problem.size) / ranks
    return (ranks - 1) * (machine.alpha + part * machine.beta)


def _ssar_split_allgather(problem: Problem, machine: Machine) -> float:
    ranks = problem.ranks
    entries, extent = problem.entries / ranks, problem.size / ranks
    time = _split(problem, machine) + _tree_time(problem, machine, entries, extent)
    total = expected_size(entries, extent, ranks)
    time += _rounds(ranks) * machine.alpha + (ranks - 1) * problem.bytes(total, extent) * machine.beta
    return time + _concatenation_time(problem, machine, total, extent)


def _ssar_ring(problem: Problem, machine: Machine) -> float:
    ranks = problem.ranks
    entries, extent = problem.entries / ranks, problem.size / ranks
    time = 0.0
    for hop in range(1, ranks):
        partial = expected_size(entries, extent, hop)
        time += machine.alpha + problem.bytes(partial, extent) * machine.beta
        time += _pair_time(problem, machine, (partial + entries) / 2, extent)
    total = expected_size(entries, extent, ranks)
    time += (ranks - 1) * (machine.alpha + problem.bytes(total, extent) * machine.beta)
    return time + _concatenation_time(problem, machine, total, extent)


def _dsar_split_allgather(problem: Problem, machine: Machine) -> float:
    ranks = problem.ranks
    time = _split(problem, machine) + machine.gamma * problem.entries + machine.gamma_dense * problem.size / ranks
    time += _rounds(ranks) * machine.alpha
    return time + (ranks - 1) / ranks * problem.size * problem.value_bytes * machine.beta + machine.gamma_dense * problem.size


def _dsar_early_switch(problem: Problem, machine: Machine, group_size: int = 8) -> float:
    group = min(group_size, problem.ranks)
    groups = lower_power_of_two(problem.ranks // group)
    k, size = problem.entries, problem.size
    time = 0.0
    if group * groups < problem.ranks:
        time += machine.alpha + problem.bytes(k, size) * machine.beta + _pair_time(problem, machine, k, size)
    time += _split(problem._replace(ranks=group), machine) + machine.gamma * k + machine.gamma_dense * size / group
    halved = size / group
    while groups > 1:
        halved /= 2
        time += machine.alpha + halved * (problem.value_bytes * machine.beta + machine.gamma_dense)
        groups //= 2
    ranks = problem.ranks
    time += _rounds(ranks) * machine.alpha + (ranks - 1) / ranks * size * problem.value_bytes * machine.beta
    return time + machine.gamma_dense * size


_MODELS: dict[str, Callable[[Problem, Machine], float]] = {
    "dense": _dense,
    "allgather": _allgather,
    "ssar_recursive_doubling": _ssar_recursive_doubling,
    "ssar_split_allgather": _ssar_split_allgather,
    "ssar_ring": _ssar_ring,
    "dsar_split_allgather": _dsar_split_allgather,
    "dsar_early_switch": _dsar_early_switch,
}
