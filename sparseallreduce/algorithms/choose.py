"""Choose the algorithm for ``algorithm="auto"``: the one that the cost model expects to be fastest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from sparseallreduce.algorithms.cost import Machine, Problem, outer_problem, predicted_time, rabenseifner_of_messages
from sparseallreduce.algorithms.dsar_early_switch import core_of
from sparseallreduce.algorithms.hierarchical import SPLIT, Hosts
from sparseallreduce.algorithms.overlap import Overlap
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype
from sparseallreduce.streams.wire import Encoding

__all__ = [
    "CANDIDATES",
    "LONG",
    "choose",
    "choose_levels",
    "choose_shortcut",
    "dense_bits",
    "forget_choices",
    "informed",
    "is_worth_a_sample",
    "predicted_times",
    "problem_of",
    "rounded",
]

LONG = 3e-4  # samples are worth their time if receiving the entries of all other ranks takes at least this many seconds
#: What "auto" selects from, in the order of preference among equals; registered algorithms that have a cost follow.
CANDIDATES = [
    "ssar_recursive_doubling",
    "ssar_split_allgather",
    "dense",
    "dsar_split_allgather",
    "dsar_early_switch",
    "allgather",
    "ssar_ring",
]


def choose(problem: Problem, machine: Machine) -> str:
    """Return the name of the fastest algorithm for a problem of :func:`problem_of`. Ranks with equal inputs get the same name."""
    return _best(problem, machine)


def choose_shortcut(problem: Problem, machine: Machine, predicted: Mapping[str, float]) -> str:
    """Return the shortcut that ranks prepare before they agree, assuming equal numbers of entries; or the name of an algorithm.

    Parameters
    ----------
    problem : Problem
        As returned by :func:`problem_of`.
    machine : Machine
    predicted : mapping
        Expected seconds of each shortcut, by name; always includes "dense", the dense sum. An algorithm with messages of its own needs the
        time of two more messages to start, while a shortcut starts with the agreement.
    """
    times = {name: time + 2 * machine.alpha for name, time in predicted_times(problem, machine).items() if name != "dense"}
    return _fastest({**times, **predicted}, machine)


def predicted_times(problem: Problem, machine: Machine) -> dict[str, float]:
    """Return the expected seconds of each algorithm."""
    times = {name: predicted_time(name, problem, machine) for name in CANDIDATES}
    if problem.hosts > 1 and problem.lanes > 1:
        times["hierarchical"] = predicted_time("hierarchical", problem, machine)
    return times


def choose_levels(problem: Problem, machine: Machine) -> dict[str, str]:
    """Return the options ``inner`` and ``outer`` of the hierarchical algorithm that are expected to be fastest."""
    outer = outer_problem(problem)
    if outer.ranks == 1:
        return {"inner": SPLIT, "outer": CANDIDATES[0]}
    return {"inner": SPLIT, "outer": choose(outer, rabenseifner_of_messages(machine, outer.ranks, 1))}


def is_worth_a_sample(stream: SparseStream, entries: float, ranks: int, machine: Machine, all_near: bool, least: float = LONG) -> bool:
    """Return True if ranks with this many entries exchange samples of their positions before they choose an algorithm.

    They do between hosts, if receiving the entries takes at least ``least`` seconds: the samples of 16 ranks take 0.6 ms, and are exchanged
    at most once in 16 sums.
    """
    if all_near or ranks < 2 or stream.on_device:
        return False
    return (ranks - 1) * entries * (stream.dtype.itemsize * (stream.width or 1) + 1) * machine.beta >= least


def dense_bits(stream: SparseStream) -> int:
    """Return the bits of a value, or of a row, of a dense block of such streams."""
    return 8 * stream.dtype.itemsize * (stream.width or 1)


def problem_of(
    stream: SparseStream,
    entries: float,
    ranks: int,
    reduction: Reduction,
    encoding: Encoding = Encoding(),  # noqa: B008 - a constant
    overlap: Overlap | None = None,
    hosts: Hosts | None = None,
) -> Problem:
    """Return the input of the cost model: streams like this one with ``entries`` entries (rounded to 2 %) on each rank.

    Parameters
    ----------
    stream : SparseStream
    entries : float
        Mean over the ranks, used as the model's k.
    ranks : int
    reduction : Reduction
    encoding : Encoding
        How messages are encoded.
    overlap : Overlap, optional
        Overlap of the ranks' sets; by default positions are assumed to be uniformly random.
    hosts : Hosts, optional
        Layout of the ranks; by default unknown.
    """
    problem = Problem(
        entries=rounded(entries),
        size=stream.size,
        ranks=ranks,
        value_bytes=stream.dtype.itemsize * (stream.width or 1),
        index_bytes=index_dtype(stream.size).itemsize,
        switch_density=reduction.switch_density,
        sent_bytes=None if encoding.is_exact else encoding.value_bytes(stream.dtype.itemsize) * (stream.width or 1),
        index_codec=encoding.index_codec,
        local=1 if hosts is None else hosts.in_a_row,
        hosts=1 if hosts is None else len(hosts.members),
        lanes=1 if hosts is None else hosts.lanes,
        share_memory=False if hosts is None else hosts.share_memory,
        on_device=stream.on_device,
    )
    return problem if overlap is None else informed(problem, overlap)


@lru_cache(maxsize=256)
def informed(problem: Problem, overlap: Overlap) -> Problem:
    """Return the problem with what is known of the overlap of the sets, and of the positions of entries."""
    problem, spread = problem._replace(union=overlap.union), overlap.spread
    if spread is None:
        return problem
    group, groups = core_of(problem.ranks)
    blocks = spread.parts(0, problem.size, problem.ranks, 8 * problem.value_bytes)
    return problem._replace(
        imbalance=max(1.0, rounded(spread.most * problem.ranks) / rounded(spread.total)),
        occupancy=spread.occupancy,
        parts=spread.parts(0, problem.size, problem.ranks).figures,
        blocks=blocks.figures,
        early_blocks=spread.parts(0, problem.size, group * groups, 8 * problem.value_bytes, group).figures,
        host_parts=spread.parts(0, problem.size, problem.lanes).figures,
    )


def forget_choices() -> None:
    """Forget what has been chosen, because there are other algorithms now."""
    _best.cache_clear()


@lru_cache(maxsize=4096)
def _best(problem: Problem, machine: Machine) -> str:
    return _fastest(predicted_times(problem, machine), machine)


def _fastest(times: Mapping[str, float], machine: Machine) -> str:
    best = min(times, key=times.__getitem__)
    return best if times[best] <= machine.trust * times["dense"] else "dense"


def rounded(entries: float) -> float:
    """Return ``entries`` rounded to six binary digits (2 %), so that the model's answers can be cached: 2 microseconds instead of 16."""
    mantissa, exponent = math.frexp(entries)
    return math.ldexp(round(mantissa * 64), exponent - 6)
