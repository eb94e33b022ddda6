"""``algorithm="auto"``: the algorithm that the cost model expects to be the fastest, and the constants of the model, measured."""

from __future__ import annotations

import math
import struct
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from sparseallreduce.algorithms.cost import Machine, Problem, predicted_time
from sparseallreduce.algorithms.steps import Clock, DenseAllgather, DenseAllreduce, Share, Shift, Step
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype

__all__ = ["choose", "choose_shortcut", "measure", "pack_machine", "problem_of", "unpack_machine"]

# Candidates in the order of preference among equals. The ring is never expected to win (its latency grows with P and its volume
# is that of the split), and is left to those who know that their network wants neighbours to talk.
_CANDIDATES = (
    "ssar_recursive_doubling",
    "ssar_split_allgather",
    "dense",
    "dsar_split_allgather",
    "dsar_early_switch",
    "allgather",
)

_LEAST_BLOCKING = 0.25  # of the time for a byte of a polled dense sum, that of one that ranks wait for inside MPI, at the least

_LAYOUT = struct.Struct(f"<{len(Machine._fields)}d")


def choose(stream: SparseStream, entries: Sequence[int], reduction: Reduction, machine: Machine) -> str:
    """The name of the algorithm for streams like ``stream`` with ``entries[r]`` entries on rank r.

    The mean over the ranks stands for the model's k. All ranks get the same answer from the same entries and machine.
    """
    return _best(problem_of(stream, sum(entries) / len(entries), len(entries), reduction), machine)


def choose_shortcut(problem: Problem, machine: Machine, predicted: Mapping[str, float]) -> str:
    """The shortcut that ranks make ready for before they agree, if all have about as many entries; or the name of an algorithm.

    Parameters
    ----------
    problem : Problem
        Of :func:`problem_of`.
    machine : Machine
    predicted : mapping
        The seconds that each shortcut is expected to take, by name; "dense" is that of the dense sum, and always among them. An algorithm
        that sends messages of its own is set up in the time that two of them take, while a shortcut begins with the agreement.
    """
    times = {name: predicted_time(name, problem, machine) + 2 * machine.alpha for name in _CANDIDATES if name != "dense"}
    return _fastest({**times, **predicted}, machine)


def problem_of(stream: SparseStream, entries: float, ranks: int, reduction: Reduction) -> Problem:
    """What the model is asked: streams like this one with so many entries, give or take 2 %, on each rank."""
    return Problem(
        entries=_rounded(entries),
        size=stream.size,
        ranks=ranks,
        value_bytes=stream.dtype.itemsize * (stream.width or 1),
        index_bytes=index_dtype(stream.size).itemsize,
        switch_density=reduction.switch_density,
    )


@lru_cache(maxsize=4096)
def _best(problem: Problem, machine: Machine) -> str:
    return _fastest({name: predicted_time(name, problem, machine) for name in _CANDIDATES}, machine)


def _fastest(times: dict[str, float], machine: Machine) -> str:
    best = min(times, key=times.__getitem__)
    return best if times[best] <= machine.trust * times["dense"] else "dense"


def _rounded(entries: float) -> float:
    """``entries`` to six binary digits, less than 2 % off: asking the model takes 16 microseconds, remembering its answer 2."""
    mantissa, exponent = math.frexp(entries)
    return math.ldexp(round(mantissa * 64), exponent - 6)


def measure(rank: int, ranks: int, sharing: float = 1.0, faster_blocking: bool = True) -> Generator[Step, Any, Machine]:
    """The constants of this network, the worst over all ranks: a few milliseconds, once per communicator.

    Each is the fastest of some repetitions: messages of a header alone, of 32 KiB and of 1 MiB to the rank half way round, additions
    of streams, and dense allreduces of one value and of 4 MiB. The latency is that of 32 KiB, which go out in parts; where ranks
    share cores, each part waits for its turn. ``sharing`` is the number of ranks to a core of this host: messages and additions that
    were fast while the others waited take so much longer when all ranks have their own, and a byte takes as long as in a dense
    allgather of 4 MiB, in which all take part at once. How long a dense sum takes that ranks wait for inside MPI is not measured, since
    a rank that is measuring may not wait for others there: ``faster_blocking`` tells whether it may be the faster one.
    """
    reduction = Reduction()
    ahead, behind = (rank + ranks // 2) % ranks, (rank - ranks // 2) % ranks
    none, small, large = (_evenly(entries, 1 << 20) for entries in (0, 1 << 12, 1 << 17))
    times = dict.fromkeys(("header", "small", "large", "gathered", "gamma", "gamma_dense", "dense", "alpha_dense"), 0.0)

    def timed(name: str, start: float, end: float) -> None:
        times[name] = min(times[name] or end - start, end - start)

    for name, message, repetitions in (("header", none, 6), ("small", small, 6), ("large", large, 4)):
        for _ in range(repetitions):
            start = yield Clock()
            if ranks > 1:
                yield Shift(ahead, message, behind)
            timed(name, start, (yield Clock()))
    # At random, as the model has it: with both evenly spread, a merge takes more than twice as long.
    one, other = (_randomly(1 << 17, 1 << 20, seed) for seed in (0, 1))
    reduction.pair(one, other)  # compiles
    for _ in range(3):
        start = yield Clock()
        reduction.pair(one, other)
        middle = yield Clock()
        timed("gamma", start, middle)
        reduction.densify(none)
        timed("gamma_dense", middle, (yield Clock()))
    for _ in range(3):
        array = _ones(1 << 20)  # a new one as in every operation: one that another core has just read takes twice as long
        start = yield Clock()
        if ranks > 1:
            yield DenseAllreduce(array, SUM)
        timed("dense", start, (yield Clock()))
    blocks = tuple(pairwise(boundaries(1 << 20, ranks)))
    low, high = blocks[rank]
    for _ in range(3):
        block = SparseStream._dense_form(np.ones(high - low, np.float32), 1 << 20, low, high)
        start = yield Clock()
        if ranks > 1:
            yield DenseAllgather(block, blocks, SUM)
        timed("gathered", start, (yield Clock()))
    for _ in range(6):
        array = _ones(1)
        start = yield Clock()
        if ranks > 1:
            yield DenseAllreduce(array, SUM)
        timed("alpha_dense", start, (yield Clock()))
    volume = 2 * (ranks - 1) / ranks * (1 << 20) * 4
    beta = max(times["large"] - times["small"], 0.0) / (large.nbytes - small.nbytes)
    beta_dense = times["dense"] / volume if ranks > 1 else 0.0
    ours = Machine(
        alpha=sharing * max(times["small"] - beta * small.nbytes, times["header"]),
        # With P = 3 on 2 cores the fastest megabyte took 0.01 to 0.1 ns a byte, by one rank while no other wanted its core, and with
        # P = 8 up to twice as long as the bytes of an allgather.
        beta=beta if sharing <= 1 else times["gathered"] / (volume / 2),
        gamma=sharing * times["gamma"] / (one.stored + other.stored),
        gamma_dense=sharing * times["gamma_dense"] / none.size,
        beta_dense=beta_dense,
        alpha_dense=times["alpha_dense"],
        # Of the polled sum's time at P = 2, Open MPI takes 0.2 to 0.4 from 1 MiB on, less for a byte than for one of a message, unless
        # that was in the cache (0.03 ns, where a sum of 4 MiB takes 0.2 and of 64 MiB 0.7), and MPICH all. Where ranks share cores, no
        # library is faster by much: 0.64 to 1.5 on 2 cores.
        beta_blocking=max(min(beta_dense, beta), _LEAST_BLOCKING * beta_dense) if faster_blocking and sharing <= 1 else beta_dense,
        # The error of the model: at N = 2**24, P = 2 and 50 % density, the split was expected to take 0.75 of the dense allreduce's
        # time, and took 1.4 times as long.
        trust=0.7,
    )
    if ranks == 1:
        return ours
    records: list[bytes] = yield Share(pack_machine(ours))
    return Machine(*(max(values) for values in zip(*map(_LAYOUT.unpack, records), strict=True)))


def pack_machine(machine: Machine) -> bytes:
    """The bytes of a machine all of whose constants were measured."""
    return _LAYOUT.pack(*machine)


def unpack_machine(packed: bytes) -> Machine:
    """The machine of these bytes."""
    return Machine(*_LAYOUT.unpack(packed))


def _ones(size: int) -> SparseStream:
    return SparseStream._dense_form(np.ones(size, np.float32), size)


def _evenly(entries: int, size: int) -> SparseStream:
    indices = np.arange(entries, dtype=np.uint32) * np.uint32(size // max(entries, 1))
    return SparseStream._sparse_form(indices, np.ones(entries, np.float32), size)


def _randomly(entries: int, size: int, seed: int) -> SparseStream:
    gaps = np.random.default_rng(seed).integers(1, 2 * (size // entries) - 1, entries, dtype=np.uint32)
    return SparseStream._sparse_form(np.cumsum(gaps, dtype=np.uint32), np.ones(entries, np.float32), size)
