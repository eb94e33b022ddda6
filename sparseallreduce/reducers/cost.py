"""The cost of a step of error feedback with each reducer: the model for ``Auto``, including the selection.

A step consists of a pass over N values to select, the messages of the reducer (Ok-Topk table 1, gTop-k table 1, CommLib equations 7 to 10),
and the additions between them. The model uses only sums, products and quotients, so that ranks with the same inputs choose the same
reducer.
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
PERIOD = 32  # operations between evaluations of Ok-Topk's thresholds

# Other costs of a step, fitted to measurements (P = 2, N = 10^3 to 10^7, densities of 0.1 to 10 %: bench/reducer_choice.py).
# Passes over a dense array, in units of a pass that writes zeros:
_DENSE_PASSES = 12.0  # add the gradient to the residual, copy that, compute the mean, clear the residual
_SELECT_PASSES = 8.0  # add the gradient to the residual, copy what is above a threshold
_MEASURE_PASSES = 6.0  # MSTopK's mean and maximum
_HOST_PASSES = 8.0  # exchange and add a host's vectors, put the rest of the sum into the residual
# Per entry, in units of the time of a merge per entry read:
_SELECT = 7.0  # select it among about 1.5 k candidates above a threshold
_FINISH = 7.0  # divide it by the number of ranks, and clear it in the residual
_SELECT_AGAIN = 28.0  # select the k largest of 2 k, and keep the rest
_SELECT_REDUCED = 20.0  # the same in Ok-Topk, whose thresholds are known
_SELECT_MEASURED = 50.0  # by MSTopK
# Fixed seconds:
_ONCE = {"dense": 7e-5, "topkdsa": 1.2e-4, "topka": 1.2e-4, "gtopk": 1.2e-4, "oktopk": 4e-4, "hitopk": 4.5e-4}
_FEW = 100  # below this k, the number of values above a threshold may be a fifth off by chance, so it is evaluated in every step
# Algorithms that sum the ranks' top k exactly; the fastest is used.
EXACT = ("ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather")


class Case(NamedTuple):
    """A reduction to be predicted: N values on each rank, of which k are to be summed, and the machine."""

    size: int  # N
    k: int
    value_bytes: int
    hosts: Hosts
    machine: Machine
    on_device: bool = False  # whether vectors are on a GPU and added there

    @property
    def ranks(self) -> int:
        """The number of ranks, P."""
        return sum(map(len, self.hosts.members))

    def problem(self, entries: float) -> Problem:
        """Return the problem of summing ``entries`` entries of each rank."""
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
        """Return the seconds of a sparse reduction that reads ``entries`` entries, without its fixed cost."""
        return (self.machine.gamma_device if self.on_device else self.machine.gamma) * entries


class Predicted(NamedTuple):
    """The predicted seconds of a step with one reducer, and their parts."""

    seconds: float
    select: float  # before anything is sent
    latency: float  # time of messages without their content
    wire: float  # time of their bytes, including encoding and decoding
    sums: float  # time of additions and of later selections
    algorithm: str = ""  # algorithm of an exact sum
    bytes: float = 0.0  # bytes received by the busiest rank
    copies: float = 0.0  # seconds of copies between a GPU and the host, not in other parts


def fastest(times: dict[str, Predicted]) -> str:
    """Return the candidate with the least time, the first among equals."""
    return min(times, key=lambda name: times[name].seconds)


@lru_cache(maxsize=1024)
def predicted(case: Case, names: tuple[str, ...] = CANDIDATES) -> dict[str, Predicted]:
    """Return the prediction of a step for each candidate, the same on all ranks."""
    found = {}
    for name in names:
        algorithm = _algorithm(case) if name == "topkdsa" else ""
        select = _MODELS[name].select(case)

        def exchanged(machine: Machine, name: str = name, algorithm: str = algorithm) -> float:
            return _MODELS[name].exchange(case._replace(machine=machine), algorithm)

        no_copies = without_copies(case.machine)

        agreement = rounds(case.ranks) * case.machine.alpha if len(case.hosts.members) > 1 else 0.0  # in memory inside a host
        without_latency = no_copies._replace(alpha=0.0, alpha_local=0.0, alpha_dense=0.0)
        free = without_latency._replace(beta=0.0, beta_local=0.0, beta_dense=0.0, beta_blocking=0.0, overlap=0.0)
        whole, without, moved, computed = map(exchanged, (case.machine, no_copies, without_latency, free))
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
    """Return the bytes that the busiest rank receives, computed from the predicted time on a network without latency."""
    beta = case.machine.beta or 1e-12
    alone = Machine(0.0, beta, 0.0, 0.0, beta, 0.0, 0.0, codec=case.machine.codec)
    return _MODELS[name].exchange(case._replace(machine=alone, on_device=False), algorithm) / beta


def evaluation_seconds(case: Case) -> float:
    """Return the additional seconds of evaluating Ok-Topk's thresholds in a step: a second pass over the values, and counts."""
    machine = case.machine
    second_look = machine.dense_pass(case.size, case.size * case.value_bytes, case.on_device)
    # A radix search takes the exponent in two rounds, and then as many as the values that have it in common take.
    bits = min(12, max(4, case.k.bit_length() - 7))
    searches = 2 + -(-case.k.bit_length() // bits)
    return second_look + searches * _total_time(case, 1 << bits) + rounds(case.ranks) * machine.alpha


def _total_time(case: Case, counts: int) -> float:
    """Return the seconds of a sum of counts, by an exchange of all or by Rabenseifner's algorithm."""
    ranks, machine = case.ranks, case.machine
    if 2 * (ranks - 1) * counts <= case.k // 64:
        return rounds(ranks) * machine.alpha + (ranks - 1) * 8 * counts * machine.beta
    return 2 * (rounds(ranks) * machine.alpha + counts * machine.beta)


def case_of(size: int, k: int, value_bytes: int, ranks: int, on_device: bool = False) -> Generator[Step, Any, Case]:
    """Return the model's input for these ranks, which are all ranks of the communicator or one on each of several hosts."""
    hosts: Hosts = yield Layout()
    machine: Machine | None = yield Constants()
    if sum(map(len, hosts.members)) != ranks:
        hosts = Hosts(tuple((rank,) for rank in range(ranks)))
    return Case(size, k, value_bytes, hosts, machine or Machine(), on_device)


class _Model(NamedTuple):
    select: Callable[[Case], float]
    exchange: Callable[[Case, str], float]  # the second argument is the algorithm, if there is a choice


def _selection(case: Case) -> float:
    """Return the seconds of selecting the exact k largest of N values."""
    return _passes(case, _SELECT_PASSES) + _SELECT * case.sums(case.k)


def _passes(case: Case, passes: float) -> float:
    return passes * case.machine.dense_pass(case.size, case.size * case.value_bytes, case.on_device)


def _finish(case: Case) -> float:
    """Return the seconds of the work after the sum."""
    return _FINISH * case.sums(case.k)


def _algorithm(case: Case) -> str:
    """Return the algorithm by which the ranks' top k are summed."""
    return min(EXACT, key=lambda name: predicted_time(name, case.problem(case.k), case.machine))


def _dense(case: Case, _: str) -> float:
    return predicted_time("dense", case.problem(case.size), case.machine)


def _topka(case: Case, _: str) -> float:
    return predicted_time("allgather", case.problem(case.k), case.machine) + _finish(case)


def _topkdsa(case: Case, algorithm: str) -> float:
    return predicted_time(algorithm, case.problem(case.k), case.machine) + _finish(case)


def _gtopk(case: Case, _: str) -> float:
    """Return the seconds of a tree up and down, with messages of k entries, and a selection from two streams on every level."""
    problem, machine, k = case.problem(case.k), case.machine, case.k
    time, distance = _finish(case), 1
    while distance < case.ranks:
        alone = machine._replace(beta=machine.beta / problem.local)  # one rank of a host; its other ranks communicate elsewhere
        time += 2 * step_time(problem, alone, distance, k, case.size)
        time += pair_time(problem, machine, k, case.size) + _SELECT_AGAIN * case.sums(k)
        distance *= 2
    return time


def _oktopk(case: Case, _: str) -> float:
    """Return the seconds of the split and reduce, the counts, the allgatherv, and a share of the threshold evaluation."""
    problem, machine, ranks = case.problem(case.k), case.machine, case.ranks
    time = split_time(problem, machine, tree_time(problem, machine, ranks)) + _finish(case)
    time += _total_time(case, ranks)  # whether the regions are balanced
    time += rounds(ranks) * machine.alpha  # how many each has chosen
    each, extent = case.k / ranks, case.size / ranks
    time += _SELECT_REDUCED * case.sums(problem.held(ranks)) / ranks
    time += gather_time(problem, machine, each, extent) + concatenation_time(problem, machine, each, extent)
    return time + evaluation_seconds(case) / (PERIOD if case.k >= _FEW else 1)


def _select_of_part(case: Case) -> float:
    """Return 0: HiTopK selects after the sum inside the host."""
    return 0.0


def _hitopk(case: Case, _: str) -> float:
    """Return the seconds of dense sums inside hosts, MSTopK of a part, an allgather between hosts, and one inside."""
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
