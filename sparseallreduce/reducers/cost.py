"""What a step of error feedback costs by each reducer: the model that serves ``algorithm="auto"``, with the selection before it.

A step takes a pass over N values to select, the messages of the reducer (Ok-Topk table 1, gTop-k table 1, CommLib equations 7 to 10), and
the additions between them. All is made of sums, products and quotients alone, so that ranks which start from the same numbers choose the
same reducer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any, NamedTuple

from sparseallreduce.algorithms import Hosts
from sparseallreduce.algorithms.choose import rounded
from sparseallreduce.algorithms.cost import (
    Machine,
    Problem,
    concatenation_time,
    gather_time,
    pair_time,
    predicted_time,
    rounds,
    split_time,
    step_time,
    tree_time,
    without_copies,
)
from sparseallreduce.algorithms.steps import Constants, Layout, Step
from sparseallreduce.streams.stream import index_dtype

__all__ = ["CANDIDATES", "Case", "Predicted", "case_of", "evaluation_seconds", "fastest", "predicted"]

# In the order of preference among equals.
CANDIDATES = ("dense", "topka", "topkdsa", "gtopk", "oktopk", "hitopk")
PERIOD = 32  # operations that share the evaluation of Ok-Topk's thresholds

# What a step takes besides, fitted to measurements (P = 2, N = 10^3 to 10^7, densities of 0.1 to 10 %: bench/reducer_choice.py).
# Passes over a dense array, each in the time that one takes which writes zeros:
_DENSE_PASSES = 12.0  # the gradient is added to the residual, that copied, the mean made of the sum, the residual cleared
_SELECT_PASSES = 8.0  # the gradient is added to the residual, and what lies above a threshold copied
_MEASURE_PASSES = 6.0  # MSTopK's mean and maximum
_HOST_PASSES = 8.0  # a host's vectors are copied for each other, added, and what is left of the sum is put into the residual
# Of an entry, in multiples of the time that a merge takes for one it reads:
_SELECT = 7.0  # it is found among about one and a half k that lie above a threshold
_FINISH = 7.0  # it is divided by the number of ranks, and its place in the residual cleared
_SELECT_AGAIN = 28.0  # for each of k of a stream: the k largest of two k, with what they leave
_SELECT_REDUCED = 20.0  # likewise in Ok-Topk, whose thresholds are known
_SELECT_MEASURED = 50.0  # by MSTopK
# Seconds, whatever N and k are:
_ONCE = {"dense": 7e-5, "topkdsa": 1.2e-4, "topka": 1.2e-4, "gtopk": 1.2e-4, "oktopk": 4e-4, "hitopk": 4.5e-4}
_FEW = 100  # values, of which so many that a threshold lets through may be a fifth off by chance: it is evaluated in every step
# Algorithms that sum the ranks' top k exactly, of which the fastest is taken: its sum is sparse, or becomes dense on the way.
EXACT = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather")


class Case(NamedTuple):
    """What is to be reduced, where: N values on each rank, of which k are to be summed."""

    size: int  # N
    k: int
    value_bytes: int
    hosts: Hosts
    machine: Machine
    on_device: bool = False  # whether vectors lie on a GPU, and sums are made there

    @property
    def ranks(self) -> int:
        """P."""
        return sum(map(len, self.hosts.members))

    def problem(self, entries: float) -> Problem:
        """The sum of so many entries of each rank."""
        return Problem(
            entries=rounded(entries),
            size=self.size,
            ranks=self.ranks,
            value_bytes=self.value_bytes,
            index_bytes=index_dtype(self.size).itemsize,
            local=self.hosts.in_a_row,
            hosts=len(self.hosts.members),
            lanes=self.hosts.lanes,
            share_memory=self.hosts.share_memory,
            on_device=self.on_device,
        )

    def sums(self, entries: float) -> float:
        """Seconds in which a sparse reduction reads so many entries, its beginning apart."""
        return (self.machine.gamma_device if self.on_device else self.machine.gamma) * entries


class Predicted(NamedTuple):
    """Of a step by one reducer, in seconds."""

    seconds: float
    select: float  # of these, before anything is sent
    latency: float  # of what follows, the time that messages without content would take
    wire: float  # that of their bytes, written and read
    sums: float  # that of additions and of selections on the way
    algorithm: str = ""  # by which an exact sum is made
    bytes: float = 0.0  # that arrive at the busiest rank
    copies: float = 0.0  # seconds of copies between a GPU and the host, which no other part holds


def fastest(times: dict[str, Predicted]) -> str:
    """The candidate that takes the least time, the first of equals."""
    return min(times, key=lambda name: times[name].seconds)


@lru_cache(maxsize=1024)
def predicted(case: Case, names: tuple[str, ...] = CANDIDATES) -> dict[str, Predicted]:
    """A step of each candidate, the same on all ranks."""
    found = {}
    for name in names:
        algorithm = _algorithm(case) if name == "topkdsa" else ""
        select = _MODELS[name].select(case)

        def exchanged(machine: Machine, name: str = name, algorithm: str = algorithm) -> float:
            return _MODELS[name].exchange(case._replace(machine=machine), algorithm)

        beside = without_copies(case.machine)

        agreement = rounds(case.ranks) * case.machine.alpha if len(case.hosts.members) > 1 else 0.0  # in memory inside a host
        without_latency = beside._replace(alpha=0.0, alpha_local=0.0, alpha_dense=0.0)
        free = without_latency._replace(beta=0.0, beta_local=0.0, beta_dense=0.0, beta_blocking=0.0, overlap=0.0)
        whole, without, moved, computed = map(exchanged, (case.machine, beside, without_latency, free))
        select += _ONCE[name]
        found[name] = Predicted(
            select + agreement + whole,
            select,
            max(without - moved, 0.0) + agreement,
            max(moved - computed, 0.0),
            computed,
            algorithm,
            _bytes_in(name, case, algorithm),
            max(whole - without, 0.0) if case.on_device else 0.0,
        )
    return found


def _bytes_in(name: str, case: Case, algorithm: str) -> float:
    """That arrive at the busiest rank: the time on a network where nothing else takes any."""
    beta = case.machine.beta or 1e-12
    alone = Machine(0.0, beta, 0.0, 0.0, beta, 0.0, 0.0, codec=case.machine.codec)
    return _MODELS[name].exchange(case._replace(machine=alone, on_device=False), algorithm) / beta


def evaluation_seconds(case: Case) -> float:
    """Of evaluating Ok-Topk's thresholds in a step, beyond one that reuses them: a second look at the values, and counts."""
    machine = case.machine
    second_look = machine.dense_pass(case.size, case.size * case.value_bytes, case.on_device)
    # A radix search takes the exponent in two rounds, and then as many as the values that have it in common take.
    bits = min(12, max(4, case.k.bit_length() - 7))
    searches = 2 + -(-case.k.bit_length() // bits)
    return second_look + searches * _total_time(case, 1 << bits) + rounds(case.ranks) * machine.alpha


def _total_time(case: Case, counts: int) -> float:
    """Of a sum of counts: by telling all, or by Rabenseifner's algorithm."""
    ranks, machine = case.ranks, case.machine
    if 2 * (ranks - 1) * counts <= case.k // 64:
        return rounds(ranks) * machine.alpha + (ranks - 1) * 8 * counts * machine.beta
    return 2 * (rounds(ranks) * machine.alpha + counts * machine.beta)


def case_of(size: int, k: int, value_bytes: int, ranks: int, on_device: bool = False) -> Generator[Step, Any, Case]:
    """What the model is asked by these ranks, all of the communicator's or one on each of several hosts, of vectors on GPUs or not."""
    hosts: Hosts = yield Layout()
    machine: Machine | None = yield Constants()
    if sum(map(len, hosts.members)) != ranks:
        hosts = Hosts(tuple((rank,) for rank in range(ranks)))
    return Case(size, k, value_bytes, hosts, machine or Machine(), on_device)


class _Model(NamedTuple):
    select: Callable[[Case], float]
    exchange: Callable[[Case, str], float]  # by an algorithm, where that is chosen


def _selection(case: Case) -> float:
    """Of the k largest of N values, exactly."""
    return _passes(case, _SELECT_PASSES) + _SELECT * case.sums(case.k)


def _passes(case: Case, passes: float) -> float:
    return passes * case.machine.dense_pass(case.size, case.size * case.value_bytes, case.on_device)


def _finish(case: Case) -> float:
    """Of what follows the sum."""
    return _FINISH * case.sums(case.k)


def _algorithm(case: Case) -> str:
    """By which the ranks' top k are summed."""
    return min(EXACT, key=lambda name: predicted_time(name, case.problem(case.k), case.machine))


def _dense(case: Case, _: str) -> float:
    return predicted_time("dense", case.problem(case.size), case.machine)


def _topka(case: Case, _: str) -> float:
    return predicted_time("allgather", case.problem(case.k), case.machine) + _finish(case)


def _topkdsa(case: Case, algorithm: str) -> float:
    return predicted_time(algorithm, case.problem(case.k), case.machine) + _finish(case)


def _gtopk(case: Case, _: str) -> float:
    """A tree up and down, of k entries a message; the k largest of two streams on every level."""
    problem, machine, k = case.problem(case.k), case.machine, case.k
    time, distance = _finish(case), 1
    while distance < case.ranks:
        alone = machine._replace(beta=machine.beta / problem.local)  # of a host, whose ranks elsewhere share its link
        time += 2 * step_time(problem, alone, distance, k, case.size)
        time += pair_time(problem, machine, k, case.size) + _SELECT_AGAIN * case.sums(k)
        distance *= 2
    return time


def _oktopk(case: Case, _: str) -> float:
    """Split and reduce, the counts, and the allgatherv; of the evaluation its share."""
    problem, machine, ranks = case.problem(case.k), case.machine, case.ranks
    time = split_time(problem, machine, tree_time(problem, machine, ranks)) + _finish(case)
    time += _total_time(case, ranks)  # whether the regions are balanced
    time += rounds(ranks) * machine.alpha  # how many each has chosen
    each, extent = case.k / ranks, case.size / ranks
    time += _SELECT_REDUCED * case.sums(problem.held(ranks)) / ranks
    time += gather_time(problem, machine, each, extent) + concatenation_time(problem, machine, each, extent)
    return time + evaluation_seconds(case) / (PERIOD if case.k >= _FEW else 1)


def _select_of_part(case: Case) -> float:
    """HiTopK's comes after the sum inside the host."""
    return 0.0


def _hitopk(case: Case, _: str) -> float:
    """Dense sums inside every host, MSTopK of a part, an allgather of these between hosts, and one of the results inside."""
    problem, machine, lanes = case.problem(case.k), case.machine, case.hosts.lanes
    each, part, k = case.hosts.most, case.size / lanes, min(case.size / lanes, -(-case.k // lanes))
    here = problem._replace(ranks=each, local=max(each, 1))
    time = _passes(case, _HOST_PASSES) + (each - 1) * step_time(here, machine, 0, part, part, dense=True)
    time += _passes(case, (_SELECT_PASSES + _MEASURE_PASSES) / lanes) + _SELECT_MEASURED * case.sums(k)
    outer = problem._replace(entries=k, size=max(1, round(part)), ranks=problem.hosts, local=1, hosts=1, lanes=1)
    if outer.ranks > 1:
        time += predicted_time("allgather", outer, machine)
    held = outer.held(outer.ranks)
    time += (each - 1) * step_time(here, machine, 0, held, part)
    return time + concatenation_time(problem._replace(ranks=lanes), machine, held, part) + _finish(case)


_MODELS = {
    "dense": _Model(lambda case: _passes(case, _DENSE_PASSES), _dense),
    "topka": _Model(_selection, _topka),
    "topkdsa": _Model(_selection, _topkdsa),
    "gtopk": _Model(_selection, _gtopk),
    "oktopk": _Model(_selection, _oktopk),
    "hitopk": _Model(_select_of_part, _hitopk),
}
