"""Faults at points of an operation over a real MPI: what :mod:`world.faults` does in one process, on one rank of several.

The rank that is struck has its calls of MPI, its kernels, its allocations and its resumptions counted, and raises at one of them.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np

import sparseallreduce as sar
from sparseallreduce.algorithms.allreduce import allreduce, takes_samples
from world import hooks
from world.faults import BEHIND, COMPILED, ERRORS, LISTED, _expected, _stream
from world.hooks import DENSE, MESSAGES, PACKED, SKEWED, SPARSE_SHARED, UNEVEN

WATCHDOG = 10.0  # seconds after which a fault is taken for a hang, and the run ended with all stacks
Way = tuple[int, dict[str, str]]  # the size of the vector, and options
WAYS: dict[str, Way] = {
    "packed": (PACKED, {}),
    "dense": (DENSE, {}),
    "sparse shared": (SPARSE_SHARED, {}),
    "messages": (MESSAGES, {}),
    "dense by name": (DENSE, {"algorithm": "dense"}),
    "ring": (PACKED, {"algorithm": "ssar_ring"}),
    "early switch": (PACKED, {"algorithm": "dsar_early_switch"}),
    "list": (PACKED, {}),
}
# Between hosts, of which each rank takes itself to be one: sets that are cut where their entries lie, and some ways by messages.
FAR_WAYS: dict[str, Way] = {
    "skewed": (SKEWED, {}),
    **{f"skewed {name}": (SKEWED, {"algorithm": name}) for name in sar.algorithms() if name != "auto" and takes_samples(name)},
    "packed": (PACKED, {}),
    "messages": (MESSAGES, {}),
    "dense": (DENSE, {}),
}
CALLS = ("Isend", "Irecv", "Improbe", "Allreduce", "Iallreduce", "Iallgather", "Iallgatherv", "Idup")


class Points:
    """The points that this rank passes, and what befalls it at one of them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.fault: tuple[str, int, str] | None = None
        self.counting = self.struck = False

    def point(self, kind: str) -> None:
        if not self.counting:
            return
        self.calls[kind] += 1
        if self.fault is not None and self.fault[0] == kind and self.fault[1] == self.calls[kind]:
            error, self.fault, self.struck = self.fault[2], None, True
            raise ERRORS[error]()


def proxied(MPI: Any, points: Points) -> Any:
    """A communicator class whose calls are points, before and after they take effect."""

    def passing(name: str) -> Callable[..., Any]:
        original = getattr(MPI.Intracomm, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            points.point(f"MPI.{name}")
            result = original(self, *args, **kwargs)
            if f"MPI.{name}, after" not in LISTED:
                points.point(f"MPI.{name}, after")
            return result

        return call

    return type("Passing", (MPI.Intracomm,), {name: passing(name) for name in CALLS})


def run(faults: int, seed: int, without: Sequence[str] = (), far: bool = False) -> int:
    """Strike faults one after the other, at no points whose names have one of these in them; collective.

    Returns how many left what is not promised. A hang ends the run, with the stacks of all ranks. If ``far``, each rank takes itself to be
    on a host of its own.
    """
    from mpi4py import MPI

    from sparseallreduce.runtime import predictions, signature

    points, ways = Points(), FAR_WAYS if far else WAYS
    comm = proxied(MPI, points)(MPI.COMM_WORLD.Dup())
    world, rank, ranks = MPI.COMM_WORLD, MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    rng, waits, wrong, kinds = random.Random(seed), [], 0, Counter[str]()
    with ExitStack() as patches:
        patches.enter_context(hooks.hooked(lambda: points))
        if far:
            patches.enter_context(hooks.hosts_of_their_own(rank))
        patches.enter_context(mock.patch.multiple(predictions, _fastest=hooks.begins, _ALWAYS_PACKED=0, _ALWAYS_PACKED_SHARED=0))
        patches.enter_context(mock.patch.object(signature, "allreduce", lambda *args: hooks.resumable(lambda: points, allreduce(*args))))
        counts: dict[tuple[str, bool], list[Counter[str]]] = {}
        for way in ways:
            for blocking in (True, False):
                for _ in range(3):  # the first compiles
                    points.calls.clear()
                    points.counting = True
                    _operate(points, comm, ways[way], blocking, "warm")
                    points.counting = False
                assert points.calls[UNEVEN] or not way.startswith("skewed"), f"{way} is cut in equal widths: {points.calls}"
                counts[way, blocking] = world.allgather(points.calls)
        for number in range(faults):
            way, blocking = rng.choice(sorted(counts))
            culprit = rng.randrange(ranks)
            known = counts[way, blocking][culprit]
            kind = rng.choice(sorted(kind for kind in known if not any(part in kind for part in without)))
            error = "KeyboardInterrupt" if kind.endswith(BEHIND) else rng.choice(sorted(ERRORS))
            if error == "KeyboardInterrupt" and kind.startswith(COMPILED) and not kind.endswith(BEHIND):
                error = "MemoryError"
            at = rng.randint(1, known[kind])
            points.calls.clear()
            points.struck, points.fault = False, (kind, at, error) if rank == culprit else None
            faulthandler.dump_traceback_later(WATCHDOG, exit=True)
            if rank == 0:
                print(f"fault {number}: {error} on rank {culprit} at {kind!r} number {at}, {way}, {blocking=}", file=sys.stderr, flush=True)
            world.Barrier()
            points.counting = True
            start = time.perf_counter()
            outcome = _operate(points, comm, ways[way], blocking, f"struck {number}")
            seconds, points.counting = time.perf_counter() - start, False
            after = enumerate(ways.values())
            later = [_operate(points, comm, other, each % 2 == 0, f"later {number} {each}") for each, other in after]
            faulthandler.cancel_dump_traceback_later()
            said = world.gather((outcome, later, seconds, points.struck), 0)
            if rank == 0 and said is not None and said[culprit][3]:
                kinds[way] += 1
                what = _wrong([outcome for outcome, *_ in said], [later for _, later, *_ in said], culprit, error)
                waits += [seconds for other, (_, _, seconds, _) in enumerate(said) if other != culprit]
                if what:
                    wrong += 1
                    print(f"fault {number}: {error} on rank {culprit} at {kind!r} number {at}, {way}, {blocking=}: {what}", flush=True)
    if rank == 0:
        waits.sort()
        late = waits[min(len(waits) - 1, int(len(waits) * 0.999))] if waits else 0.0
        print(f"{dict(kinds)}\n{kinds.total()} faults struck, {wrong} left what is not promised")
        print(f"the others had their outcome after {late:.3f} s (99.9th percentile)")
    return int(world.bcast(wrong))


def _operate(points: Points, comm: Any, way: Way, blocking: bool, key: str) -> tuple[str, ...]:
    """What an operation comes to on this rank."""
    size, options = way
    counting, points.counting = points.counting, False
    stream = _stream(key, comm.rank, size, 0.2)
    given = [stream, _stream(key, comm.rank, size, 0.2, np.float64), stream] if way is WAYS["list"] else stream
    points.counting = counting
    try:
        if blocking:
            result = sar.allreduce(given, comm, **options)
        else:
            result = sar.iallreduce(given, comm, **options).wait()
    except KeyboardInterrupt:
        return "error", "KeyboardInterrupt", ""
    except Exception as error:
        return "error", type(error).__name__, str(error)
    points.counting = False
    results, expected = result if way is WAYS["list"] else [result], _expected(key, comm.size, size, 0.2, "sum")
    return ("right" if all(np.array_equal(each.to_dense(), expected) for each in results) else "wrong",)


def _wrong(outcomes: Sequence[Any], later: Sequence[Any], culprit: int, error: str) -> str:
    if any(outcome[0] == "wrong" for outcome in outcomes):
        return f"a wrong sum: {outcomes}"
    others = {outcome for rank, outcome in enumerate(outcomes) if rank != culprit and outcome[0] == "error"}
    if len(others) > 1:
        return f"the others raise different errors: {outcomes}"
    if error == "KeyboardInterrupt" and outcomes[culprit][:2] != ("error", "KeyboardInterrupt"):
        return f"the interrupt is lost: {outcomes}"
    first = [each[0] for each in later]
    failed = [outcome[0] == "error" for outcome in outcomes]
    owed = any(failed) and not all(failed)  # by the ranks that have a sum, which raise in their next operation what the others have raised
    if owed and (len(set(first)) > 1 or first[0][0] != "error" or f"rank {culprit} gave up" not in first[0][2]):
        return f"the error is not raised by all in the next operation: {outcomes}, {first}"
    if any(outcome != ("right",) for each in later for outcome in each[owed:]):
        return f"operations after it: {outcomes}, {later}"
    return ""
