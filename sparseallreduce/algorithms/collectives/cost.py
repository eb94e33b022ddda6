"""The cost of the collectives besides allreduce, in the model of :mod:`~sparseallreduce.algorithms.cost`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from sparseallreduce.algorithms.cost import (
    Machine,
    Problem,
    concatenation_time,
    gather_time,
    pair_time,
    rounds,
    split_time,
    step_time,
    tree_time,
)
from sparseallreduce.algorithms.exchange import halvings, lower_power_of_two

__all__ = ["MODELS", "arriving_bytes", "choose", "predicted_times"]


def predicted_times(collective: str, problem: Problem, machine: Machine) -> dict[str, float]:
    """Return the predicted time of each algorithm of a collective in seconds.

    Parameters
    ----------
    collective : str
        "reduce", "reduce_scatter", "allgather" or "bcast".
    problem : Problem
        For a broadcast, ``entries`` are those of the root; for an allgather, ``size`` is that of one rank's stream. ``parts.entries``
        accounts for ranges with more entries than the mean.
    machine : Machine
        The parameters of the machine.
    """
    return {name: model(problem, machine) if problem.ranks > 1 else 0.0 for name, model in MODELS[collective].items()}


@lru_cache(maxsize=4096)
def choose(collective: str, problem: Problem, machine: Machine) -> str:
    """Return the name of the algorithm with the smallest predicted time, or the first of several."""
    times = predicted_times(collective, problem, machine)
    return min(times, key=times.__getitem__)


def arriving_bytes(collective: str, name: str, problem: Problem, machine: Machine) -> float:
    """Return the predicted bytes that arrive at the busiest rank: the time if only bandwidth costs anything."""
    bytes_alone = Machine(0.0, machine.beta, 0.0, 0.0, machine.beta, 0.0, 0.0, codec=machine.codec, overlap=0.0)
    free = MODELS[collective][name](problem._replace(local=1, on_device=False), bytes_alone)
    return free / machine.beta if machine.beta and problem.ranks > 1 else 0.0


def _messages(problem: Problem, machine: Machine, entries: float, extent: float) -> float:
    """Return the time of one message between a rank and every other rank, one after the other."""
    near = problem.local - 1
    time = near * step_time(problem, machine, 1, entries, extent) if near else 0.0
    return time + (problem.ranks - 1 - near) * step_time(problem, machine, problem.ranks, entries, extent)


def _reduce_tree(problem: Problem, machine: Machine) -> float:
    time = 0.0
    for distance in _distances(problem.ranks):
        held = problem.fullest(distance) * problem.held(distance)
        time += step_time(problem, machine, distance, held, problem.size, pair_time(problem, machine, held, problem.size))
    return time


def _reduce_split(problem: Problem, machine: Machine) -> float:
    extent, total = problem.size / problem.ranks, problem.held(problem.ranks) / problem.ranks
    time = split_time(problem, machine, tree_time(problem, machine, problem.ranks), problem.imbalance)
    together = (problem.ranks - 2) * machine.alpha  # the parts are on their way to the root together
    return time + _messages(problem, machine, total, extent) - together + concatenation_time(problem, machine, total, extent)


def _reduce_scatter_split(problem: Problem, machine: Machine) -> float:
    fullest = problem.parts.entries
    return split_time(problem, machine, fullest * tree_time(problem, machine, problem.ranks), max(fullest, problem.imbalance))


def _reduce_scatter_halving(problem: Problem, machine: Machine) -> float:
    core, fullest, k, size = lower_power_of_two(problem.ranks), problem.parts.entries, problem.entries, problem.size
    time, added, share = 0.0, 1, 1.0
    if core < problem.ranks:
        total, extent = fullest * problem.held(problem.ranks) / problem.ranks, fullest * size / problem.ranks
        time += step_time(problem, machine, 1, k, size, pair_time(problem, machine, k, size))
        time += step_time(problem, machine, 1, total, extent)
    for distance in halvings(core):
        share = min(1.0, max(share / 2, fullest / problem.ranks))  # the half with the widest range
        entries, extent = share * problem.held(added), share * size
        time += step_time(problem, machine, distance, entries, extent, pair_time(problem, machine, entries, extent))
        added *= 2
    return time


def _joining(problem: Problem, machine: Machine) -> float:
    return concatenation_time(problem, machine, problem.entries, problem.size)


def _allgather_doubling(problem: Problem, machine: Machine) -> float:
    return gather_time(problem, machine, problem.entries, problem.size, fullest=problem.fullest) + _joining(problem, machine)


def _allgather_ring(problem: Problem, machine: Machine) -> float:
    entries = problem.imbalance * problem.entries  # at each hop some rank waits for the stream with most entries
    time = (problem.ranks - 1) * step_time(problem, machine, problem.ranks, entries, problem.size)
    return time + _joining(problem, machine)


def _bcast_tree(problem: Problem, machine: Machine) -> float:
    return sum(step_time(problem, machine, distance, problem.entries, problem.size) for distance in _distances(problem.ranks))


def _bcast_scatter(problem: Problem, machine: Machine) -> float:
    entries, extent = problem.entries / problem.ranks, problem.size / problem.ranks
    time = _messages(problem, machine, entries, extent) + gather_time(problem, machine, entries, extent)
    return time + concatenation_time(problem, machine, entries, extent)


def _distances(ranks: int) -> list[int]:
    """Return the distances between communicating ranks in a binomial tree."""
    return [1 << level for level in range(rounds(ranks))]


#: The algorithms of each collective, in the order of preference among equals.
MODELS: dict[str, dict[str, Callable[[Problem, Machine], float]]] = {
    "reduce": {"tree": _reduce_tree, "split": _reduce_split},
    "reduce_scatter": {"halving": _reduce_scatter_halving, "split": _reduce_scatter_split},
    "allgather": {"doubling": _allgather_doubling, "ring": _allgather_ring},
    "bcast": {"tree": _bcast_tree, "scatter": _bcast_scatter},
}
