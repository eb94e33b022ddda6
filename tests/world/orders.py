"""Every order in which ranks may run, up to a number of preemptions: of some operations in a row, each with streams of its own.

A rank runs on until it waits, and then the next one does; at every point another rank may come in between, and at every wait another
one than the next may follow. Orders with at most so many of these are all tried (delay-bounded scheduling; CHESS bounds preemptions
alike), and beyond them some at random.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import sparseallreduce as sar
from world import hooks
from world.hooks import DENSE, MESSAGES, PACKED, READY, SKEWED, SPARSE_SHARED, UNEVEN
from world.world import Preemptions, RandomOrder, Stuck, World

_CHECKED = 400  # runs after which the communicator is renewed


@dataclass(frozen=True)
class Program:
    """Operations in a row.

    Parameters
    ----------
    sizes : sequence of int
        Of their vectors, which settle the ways.
    started : bool
        Whether all are started before the first is waited for.
    share : float
        Of the positions that each rank holds.
    hosts : sequence of str, optional
        The name of the host of each rank; one by default.
    passes : str
        A kind of points that every rank passes.
    in_step : bool
        Whether few ranks gather in step, too.
    """

    name: str
    sizes: tuple[int, ...]
    ranks: int = 2
    cores: int | None = None
    started: bool = False
    share: float = 0.2
    hosts: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the operations
    passes: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    in_step: bool = False


AREAS = {"sparseallreduce.runtime.memory.dense": {"_CAPACITY": 0, "_CAPACITY_OVERSUBSCRIBED": 0}}
ASKING = {  # for samples, of every third sum
    "sparseallreduce.runtime.signature": {"_LONG": 0.0, "_ROUNDS": 0},
    "sparseallreduce.runtime.overlaps": {"_USES": 2, "_MOST_USES": 2},
}
SECTIONS = {"algorithm": "dsar_early_switch", "group_size": 2}


def programs() -> Iterator[Program]:
    for ranks in (2, 3):
        P = f"P={ranks} "
        yield Program(P + "sparse shared, dense, packed", (SPARSE_SHARED, DENSE, PACKED), ranks)
        yield Program(P + "packed, packed, packed", (PACKED, PACKED, PACKED), ranks)
        yield Program(P + "six packed in flight", (PACKED,) * 6, ranks, started=True)
        yield Program(P + "sparse shared, sparse shared, sparse shared", (SPARSE_SHARED,) * 3, ranks)
        yield Program(P + "sparse shared with dense results", (SPARSE_SHARED,) * 3, ranks, share=0.6)
        yield Program(P + "dense, dense, dense", (DENSE, DENSE, DENSE), ranks)
        yield Program(P + "dense by MPI, sparse shared, dense by MPI", (DENSE, SPARSE_SHARED, DENSE), ranks, constants=AREAS)
        yield Program(P + "by messages, sparse shared, packed", (MESSAGES, SPARSE_SHARED, PACKED), ranks)
        yield Program(P + "sparse shared, packed, dense in flight", (SPARSE_SHARED, PACKED, DENSE), ranks, started=True)
        yield Program(P + "sparse shared twice, by messages in flight", (SPARSE_SHARED, SPARSE_SHARED, MESSAGES), ranks, started=True)
        skewed: dict[str, Any] = {"hosts": tuple("abc"[:ranks]), "constants": ASKING, "passes": UNEVEN}
        yield Program(P + "skewed, skewed, skewed", (SKEWED,) * 3, ranks, **skewed)
        yield Program(P + "skewed, by messages, skewed in flight", (SKEWED, MESSAGES, SKEWED), ranks, started=True, **skewed)
        for algorithm in ("ssar_ring", "dsar_split_allgather"):
            yield Program(P + f"{algorithm}, skewed twice", (SKEWED, SKEWED), ranks, options={"algorithm": algorithm}, **skewed)
        skewed = {**skewed, "passes": READY, "in_step": True}
        yield Program(P + "skewed twice, in step", (SKEWED, SKEWED), ranks, **skewed)
        yield Program(P + "skewed twice in flight, in step", (SKEWED, SKEWED), ranks, started=True, **skewed)
    skewed = {"constants": ASKING, "passes": READY, "in_step": True, "hosts": tuple("abcd")}
    for algorithm in ("ssar_split_allgather", "dsar_split_allgather", "dsar_early_switch"):
        yield Program(f"P=4 {algorithm}, skewed, in step", (SKEWED,), 4, options={"algorithm": algorithm}, **skewed)
    for ranks in (32, 33):
        skewed = {"constants": ASKING, "passes": READY, "hosts": tuple(f"host {rank}" for rank in range(ranks))}
        yield Program(f"P={ranks} skewed, in step", (SKEWED,), ranks, **skewed)
    skewed = {"constants": ASKING, "passes": UNEVEN}
    yield Program("P=4 sections of several parts, skewed twice", (SKEWED, SKEWED), 4, hosts=tuple("abcd"), options=SECTIONS, **skewed)
    yield Program("P=4 hierarchical, skewed", (SKEWED,), 4, hosts=tuple("aabb"), options={"algorithm": "hierarchical"}, **skewed)
    yield Program("P=3 sparse shared in two parts", (SPARSE_SHARED, SPARSE_SHARED, PACKED), 3, cores=2)
    yield Program("P=3 dense in two parts", (DENSE, DENSE, SPARSE_SHARED), 3, cores=2)


class Explorer:
    """Runs a program in one order after the other."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.world: Any = None
        self.runs = 0
        self.bits: list[bytes] | None = None  # of the results, in every order

    def __enter__(self) -> Explorer:
        self._hooks = ExitStack()
        self._hooks.enter_context(hooks.hooked(lambda: self.world))
        if self.program.in_step:
            self._hooks.enter_context(hooks.in_step())
        self.renew()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.world = None
        gc.unfreeze()
        self._hooks.close()

    def renew(self) -> None:
        """Begin with ranks that have not done anything but to become ready."""
        program = self.program
        self.world = World(program.ranks, cores=program.cores, hosts=program.hosts, constants=program.constants)
        self.streams = [[_stream(rank, *numbered, program.share) for numbered in enumerate(program.sizes)] for rank in range(program.ranks)]
        self.sums = [sum(stream.to_dense().astype(float) for stream in streams) for streams in zip(*self.streams)]
        self.world.run(self._run)
        assert not program.passes or all(rank.calls[program.passes] for rank in self.world.ranks)
        gc.freeze()

    def _run(self, rank: Any) -> list[Any]:
        streams, comm = self.streams[rank.number], rank.comm
        if self.program.started:
            requests = [rank.sar.iallreduce(stream, comm, **self.program.options) for stream in streams]
            return [request.wait() for request in requests]
        return [rank.sar.allreduce(stream, comm, **self.program.options) for stream in streams]

    def try_order(self, order: Any) -> str:
        """What is wrong about the results in an order, if anything."""
        self.runs += 1
        try:
            results = self.world.run(self._run, order, steps=25_000 * max(4, self.program.ranks))
        except (Stuck, sar.SparseAllreduceError, AssertionError) as error:
            self.renew()
            return f"{type(error).__name__}: {error}"
        for number, expected in enumerate(self.sums):
            dense = [result[number].to_dense() for result in results]
            wrong = [rank for rank, array in enumerate(dense) if not np.allclose(array, expected, rtol=1e-5)]
            if wrong:
                return f"operation {number}: wrong on ranks {wrong}"
            if len({array.tobytes() for array in dense}) > 1:
                return f"operation {number}: not the same bits on all ranks"
        bits = [result.to_dense().tobytes() for result in results[0]]
        if self.bits is None:
            self.bits = bits
        if self.bits != bits:
            return f"other bits than in another order, in operations {[n for n, (a, b) in enumerate(zip(bits, self.bits)) if a != b]}"
        return ""

    def explore(self, preemptions: int, found: Callable[[str, Any], None], most: int | None = None) -> int:
        """Try all orders with so many preemptions at most, or ``most`` of them; the number of orders tried."""
        before, rng = self.runs, random.Random(0)

        def descend(at: dict[int, int], left: int) -> None:
            if most is not None and self.runs - before >= most:
                return
            wrong = self.try_order(Preemptions(at))
            if wrong:
                found(wrong, at)
                return
            if left:
                steps = range(max(at, default=0) + 1, self.world.steps + 1)
                further = [(step, hop) for step in steps for hop in range(1, self.program.ranks)]
                if most is not None:
                    rng.shuffle(further)
                for step, hop in further:
                    descend({**at, step: hop}, left - 1)

        descend({}, preemptions)
        return self.runs - before

    def wander(self, seeds: Sequence[int], found: Callable[[str, Any], None]) -> None:
        """Try orders at random."""
        for seed in seeds:
            wrong = self.try_order(RandomOrder(seed, (0.05, 0.2, 0.5)[seed % 3]))
            if wrong:
                found(wrong, f"seed {seed}")


def _stream(rank: int, number: int, size: int, share: float) -> sar.SparseStream:
    rng = np.random.default_rng([rank, number, size])
    count = max(1, int(size * share))
    first = count // 2 if size == SKEWED else 0
    indices = np.concatenate([np.arange(first), first + np.sort(rng.choice(size - first, count - first, replace=False))])
    return sar.SparseStream(indices, rng.standard_normal(len(indices)).astype(np.float32) + np.float32(2), size)
