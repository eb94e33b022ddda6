"""Faults at every point of an operation on one rank or two, and what the promise says of all the others.

A scenario is a program of some operations that are struck. It runs once without a fault, which tells how many points of each kind each
rank passes; then once for each of them. Whatever happens, every other rank has the right sum or raises the same as all others that
raise, nobody waits for ever, the operations that follow are right on all ranks, and nothing is kept of what failed.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import greenlet
import numpy as np

import sparseallreduce as sar
from sparseallreduce.algorithms.allreduce import takes_samples
from sparseallreduce.algorithms.collectives import COLLECTIVES
from sparseallreduce.algorithms.fixed import FIXED
from world import hooks, interrupts
from world.hooks import DENSE, MESSAGES, PACKED, READY, RECURSIVE, SKEWED, SPARSE_SHARED, UNEVEN
from world.world import Preemptions, RandomOrder, RoundRobin, Stuck, World

PROGRESS = "sparseallreduce.runtime.progress"
EMPTY = {PROGRESS: ("operations", "preparing")}  # what keeps nothing when nothing is in flight
ERRORS: dict[str, Callable[[], BaseException]] = {
    "StreamError": lambda: sar.StreamError("struck by a fault"),
    "RuntimeError": lambda: RuntimeError("struck by a fault"),
    "MemoryError": lambda: MemoryError("struck by a fault"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("struck by a fault"),
}
AFTERWARDS = 10  # operations that have to be right after a fault
MANY, AFTERWARDS_OF_MANY = 32, 3  # so many ranks take their time


class Fault(NamedTuple):
    """What befalls a rank: the error at its so many-th point of a kind."""

    rank: int
    kind: str
    number: int
    error: str


class Outcome(NamedTuple):
    """What an operation came to on a rank."""

    what: str  # "result", "error"
    name: str = ""  # of the class
    text: str = ""
    bits: bytes = b""
    right: bool = True


@dataclass(frozen=True)
class Scenario:
    """A program to be struck.

    Parameters
    ----------
    operations : callable
        Of a rank and a function that takes note of what an operation came to; yields nothing, and raises nothing.
    passes : str
        A kind of points that it passes, or it does not go the way that it is to try.
    warm : bool
        Whether an operation has gone before on the communicator.
    """

    name: str
    operations: Callable[[Player], None]
    passes: str = ""
    ranks: int = 2
    cores: int | None = None
    hosts: int = 0  # how many ranks share a host, and memory; all of them by default
    inside: bool = False  # whether those of a host use that
    pieces: bool = False  # whether messages between hosts are cut into pieces
    in_step: bool = False  # whether few ranks gather in step, too
    eager: int = 1 << 12
    warm: bool = True
    constants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Left(Exception):
    """A rank takes part in no more operations after one that has raised."""


class Player:
    """A rank in a scenario: makes streams, carries operations out and notes what they came to."""

    def __init__(self, play: Play, rank: Any, comm: Any) -> None:
        self.play, self.rank, self.comm, self.number = play, rank, comm, rank.number
        self.sar, self.ranks = rank.sar, len(play.world.ranks)
        self.outcomes: dict[str, Outcome] = {}
        self.kept: list[Any] = []  # weak references to what nobody should keep
        self.interrupted_before = False  # whether an operation was, before it had begun
        self.leaves = play.leaves
        self.in_flight = False  # whether operations are in flight together, of which any may raise what failed on some ranks

    def stream(self, key: str, size: int, share: float = 0.2, dtype: Any = np.float32, width: int | None = None) -> sar.SparseStream:
        self.rank.quiet = True
        stream = _stream(key, self.number, size, share, dtype, width)
        self.rank.quiet = False
        self.kept += [weakref.ref(array) for array in (stream._indices, stream._values, stream._array) if array is not None]
        return stream

    def begin(self, call: Callable[[], Any]) -> Any:
        """Call what begins an operation; again, where it was interrupted before that had begun: nobody had to hear of it."""
        before = self._begun()
        try:
            return call()
        except KeyboardInterrupt:
            if self._begun() != before:
                raise
        self.interrupted_before = True
        return call()

    def _begun(self) -> int:
        """Operations on the communicator that have begun."""
        before, self.rank.quiet = self.rank.quiet, True
        channel = self.rank.library.modules["sparseallreduce.runtime.communicators"].known_channel(self.comm)
        self.rank.quiet = before
        return 0 if channel is None else channel.sequence

    def note(self, key: str, size: int, run: Callable[[], Any], share: float = 0.2, op: str = "sum", **kind: Any) -> None:
        """Note what an operation on the streams of this key comes to."""
        try:
            result = run()
        except (greenlet.GreenletExit, Stuck):
            raise
        except BaseException as error:
            return self._raised(key, error)
        self.rank.quiet = True
        stream = getattr(result, "update", result)
        dense = stream.to_dense()
        right = not isinstance(result, sar.SparseStream) or np.array_equal(dense, _expected(key, self.ranks, size, share, op, **kind))
        self.outcomes[key] = Outcome("result", bits=bytes([stream.is_dense]) + dense.tobytes(), right=right)
        self.rank.quiet = False

    def _raised(self, key: str, error: BaseException) -> None:
        """Note that an operation has raised; a rank that leaves takes part in no other."""
        self.outcomes[key] = Outcome("error", type(error).__name__, str(error))
        if self.leaves:
            raise Left

    def blocking(self, key: str, size: int, share: float = 0.2, **options: Any) -> None:
        kind = {name: options.pop(name) for name in ("dtype", "width") if name in options}
        stream = self.stream(key, size, share, **kind)
        run = lambda: self.begin(lambda: self.sar.allreduce(stream, self.comm, **options))  # noqa: E731
        self.note(key, size, run, share, options.get("op", "sum"), **kind)

    def collective(self, name: str, key: str, size: int, blocking: bool, share: float = 0.2, **options: Any) -> None:
        """A collective besides allreduce, of which every rank notes the same bits: that what it got is right, or what it raised."""
        mine, last = self.stream(key, size, share), self.ranks - 1
        stream = mine if name != "bcast" or self.number == last else None
        call = getattr(self.sar, name if blocking else "i" + name)
        options |= {"root": last} if name in ("reduce", "bcast") else {}
        try:
            result = self.begin(lambda: call(stream, self.comm, **options))
            result = result if blocking else result.wait()
        except (greenlet.GreenletExit, Stuck):
            raise
        except BaseException as error:
            return self._raised(key, error)
        self.rank.quiet = True
        whole = _expected(key, self.ranks, size, share, "sum")
        if name == "reduce":
            right = result is None if self.number != last else np.array_equal(result.to_dense(), whole)
        elif name == "reduce_scatter":
            right = np.array_equal(result.to_dense(), whole[size * self.number // self.ranks : size * (self.number + 1) // self.ranks])
        elif name == "allgather":
            streams = (_stream(key, rank, size, share) for rank in range(self.ranks))
            right = np.array_equal(result.to_dense(), np.concatenate([each.to_dense() for each in streams]))
        else:
            right = np.array_equal(result.to_dense(), _stream(key, last, size, share).to_dense())
        self.outcomes[key] = Outcome("result", right=right)
        self.rank.quiet = False

    def list(self, key: str, kinds: Sequence[tuple[int, Any]], blocking: bool, **options: Any) -> None:
        """An operation on a list of streams of these sizes and dtypes."""

        streams = [self.stream(f"{key} {place}", size, dtype=dtype) for place, (size, dtype) in enumerate(kinds)]

        def run() -> Any:
            if blocking:
                return self.begin(lambda: self.sar.allreduce(streams, self.comm, **options))
            return self.begin(lambda: self.sar.iallreduce(streams, self.comm, **options)).wait()

        try:
            results = run()
        except (greenlet.GreenletExit, Stuck):
            raise
        except BaseException as error:
            return self._raised(key, error)
        self.rank.quiet = True
        dense = [result.to_dense() for result in results]
        wanted = [_expected(f"{key} {place}", self.ranks, size, 0.2, "sum", dtype=dtype) for place, (size, dtype) in enumerate(kinds)]
        right = len(dense) == len(wanted) and all(map(np.array_equal, dense, wanted))
        self.outcomes[key] = Outcome("result", bits=b"".join(each.tobytes() for each in dense), right=right)
        self.rank.quiet = False

    def start(self, key: str, size: int, share: float = 0.2, **options: Any) -> Callable[[], None]:
        """Start an operation; what is returned waits for it."""
        try:
            stream = self.stream(key, size, share)
            request = self.begin(lambda: self.sar.iallreduce(stream, self.comm, **options))
        except (greenlet.GreenletExit, Stuck):
            raise
        except BaseException as error:
            self._raised(key, error)
            return lambda: None
        return lambda: self.note(key, size, request.wait, share, options.get("op", "sum"))


def _stream(key: str, rank: int, size: int, share: float, dtype: Any = np.float32, width: int | None = None) -> sar.SparseStream:
    rng = random.Random(f"{key} {rank} {size}")
    count = max(1, int(size * share))
    first = count // 2 if size == SKEWED else 0
    indices = [*range(first), *sorted(rng.sample(range(first, size), count - first))]
    values = np.array([rng.randrange(1, 100) for _ in range(len(indices) * (width or 1))], dtype)
    return sar.SparseStream(np.array(indices, np.uint32), values if width is None else values.reshape(-1, width), size)


def _expected(key: str, ranks: int, size: int, share: float, op: str, **kind: Any) -> np.ndarray:
    streams = [_stream(key, rank, size, share, **kind) for rank in range(ranks)]
    if op == "sum":
        return sum(stream.to_dense() for stream in streams)
    reduced: dict[int, Any] = {}
    for stream in streams:
        for index, value in zip(stream.indices.tolist(), stream.values):
            reduced[index] = {"max": max, "min": min}[op](reduced[index], value) if index in reduced else value
    dense = np.zeros(size, np.float32)
    for index, value in reduced.items():
        dense[index] = value
    return dense


class Violation(NamedTuple):
    """A promise that was not held."""

    scenario: str
    faults: tuple[Fault, ...]
    order: str
    what: str

    def __str__(self) -> str:
        faults = " and ".join(f"{f.error} on rank {f.rank} at {f.kind!r} number {f.number}" for f in self.faults)
        return f"{self.scenario}; {faults}; order {self.order}: {self.what}"


class Play:
    """Scenarios in one world, one fault after the other, each on a communicator of its own."""

    def __init__(self, scenario: Scenario, instructions: bool = False, leaves: bool = False) -> None:
        self.scenario, self.instructions, self.leaves = scenario, instructions, leaves
        self.world: Any = None
        self._stack: Any = None
        self.steps = 0  # points of the run that was struck last
        self.others = 0  # points that were passed from the fault until the last of the other ranks had its outcome
        self.struck = 0  # faults that have struck in it
        self._renewals = 0
        self.window = 0, 0  # the first point of a run that may be struck, and the last
        self._usual = 0  # arrays that are kept without any fault

    def __enter__(self) -> Play:
        self._stack = ExitStack()
        self._stack.enter_context(hooks.hooked(lambda: self.world))
        if self.scenario.pieces:
            self._stack.enter_context(hooks.in_pieces())
        if self.scenario.in_step:
            self._stack.enter_context(hooks.in_step())
        self._renew()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.world = None
        gc.unfreeze()
        self._stack.close()

    def _renew(self) -> None:
        """A world that no fault has struck."""
        self._renewals += 1
        if self._renewals % 50 == 0:
            gc.unfreeze()
        scenario, self.world = self.scenario, None
        hosts = [f"host {rank // scenario.hosts}" for rank in range(scenario.ranks)] if scenario.hosts else None
        world = World(scenario.ranks, cores=scenario.cores, hosts=hosts, eager=scenario.eager, constants=scenario.constants)
        for rank in world.ranks:
            operation = rank.library.load("sparseallreduce.reducers.base").ReducerOperation
            original = operation.run
            operation.run = lambda self, *args, original=original: hooks.resumable(lambda: world, original(self, *args))
        self.world = world
        world.run(lambda rank: rank.sar.allreduce(_stream("first", rank.number, PACKED, 0.1), rank.comm))
        gc.freeze()

    def points(self) -> list[Counter[str]]:
        """How many points of each kind each rank passes."""
        violation, calls = self._run((), RoundRobin(), "round robin")
        if violation is not None:
            raise AssertionError(f"without any fault: {violation}")
        if self.scenario.passes and not all(count[self.scenario.passes] for count in calls):
            raise AssertionError(f"{self.scenario.name} passes no {self.scenario.passes!r}: {[dict(count) for count in calls]}")
        shares = any(kind.startswith("kernel ") for count in calls for kind in count)
        if self.scenario.hosts and shares != self.scenario.inside:
            raise AssertionError(f"{self.scenario.name} shares {'' if shares else 'no '}memory")
        return calls

    def strike(self, *faults: Fault, order: str = "round robin") -> Violation | None:
        """What was not as promised, if anything, after these faults."""
        words = order.split()
        if words[0] == "preempt":
            scheduler: Any = Preemptions({int(at): int(hop) for at, _, hop in (word.partition(":") for word in words[1:])})
        elif words[0] == "round":
            scheduler = RoundRobin()
        else:
            scheduler = RandomOrder(int(words[0]), float(words[1]))
        return self._run(faults, scheduler, order)[0]

    def _run(self, faults: Sequence[Fault], scheduler: Any, order: str) -> tuple[Violation | None, list[Counter[str]]]:
        world, scenario = self.world, self.scenario
        left_before = world.network.left()
        players: list[Any] = [None] * scenario.ranks
        passed: list[Counter[str]] = [Counter() for _ in world.ranks]
        armed: set[int] = set()
        pending = set(faults)
        struck_at: list[int] = []
        had: list[int] = []
        began: list[int] = []
        self.struck = 0

        def inject(rank: Any, kind: str) -> None:
            if rank.number in armed:
                for fault in tuple(pending):
                    if fault.rank == rank.number and fault.kind == kind and rank.calls[kind] == fault.number:
                        pending.discard(fault)
                        self.struck += 1
                        struck_at.append(world.steps)
                        raise ERRORS[fault.error]()

        def program(rank: Any) -> None:
            player = players[rank.number] = Player(self, rank, rank.comm.Dup())
            if scenario.warm:
                player.blocking("warm", PACKED)
            rank.calls.clear()
            began.append(world.steps)
            armed.add(rank.number)
            try:
                scenario.operations(player)
                armed.discard(rank.number)
                if self.leaves:
                    player.blocking("next", PACKED)
            except Left:
                armed.discard(rank.number)
            had.append(world.steps)
            passed[rank.number].update(rank.calls)
            if not self.leaves:
                afterwards(rank)

        def afterwards(rank: Any) -> None:
            player = players[rank.number]
            player.leaves = False
            kept, player.kept = player.kept, []
            _afterwards(player)
            player.kept = kept

        def catch_up(rank: Any) -> None:
            """Raise what this rank has still to raise, so that all ranks go on with the same operation."""
            player = players[rank.number]
            player.leaves = False
            if player._begun() < last:
                player.blocking("caught up", PACKED)

        def fail(what: str) -> tuple[Violation, list[Counter[str]]]:
            self._renew()
            return Violation(scenario.name, tuple(faults), order, what), passed

        world.injector = inject
        try:
            with interrupts.between_instructions(lambda: self.world) if self.instructions else nullcontext():
                world.run(program, scheduler)
            abandons = self.leaves and players[0].in_flight and any(player.outcomes.get("next") is None for player in players)
            if self.leaves and not abandons:
                last = max(player._begun() for player in players)
                world.run(catch_up)
                world.run(afterwards)
        except Stuck as stuck:
            return fail(str(stuck))
        except Exception as error:
            import traceback

            return fail("the program was not to raise: " + "".join(traceback.format_exception(error)[-3:]))
        finally:
            self.steps = world.steps
            self.window = min(began, default=0), max(had, default=0)
            self.others = max(had, default=0) - struck_at[0] if struck_at and len(had) == len(players) else 0
            world.injector = None
        interrupted = [fault.rank for fault in faults if fault.error == "KeyboardInterrupt" and fault not in pending]
        wrong = (_wrong_of_loops if self.leaves else _wrong)(players, faults, interrupted, scenario.warm)
        if wrong:
            return fail(wrong)
        if abandons:  # operations that nobody waits for, which the next ones would meet
            self._renew()
            return None, passed
        gc.collect()
        alive = sum(ref() is not None for player in players for ref in player.kept)
        if not faults:
            self._usual = alive
        elif alive > self._usual and not self.instructions:  # frames that were traced keep what they had
            return fail(f"{alive - self._usual} arrays of the streams of what was struck are kept")
        for rank in world.ranks:
            for name, lists in EMPTY.items():
                module = rank.library.modules[name]
                for each in lists:
                    if len(getattr(module, each)):
                        return fail(f"rank {rank.number} keeps {len(getattr(module, each))} in {each}")
        try:
            world.run(lambda rank: _free(rank, players[rank.number].comm), steps=20_000)
        except Stuck as stuck:
            return fail(f"the communicator is not freed: {stuck}")
        except Exception as error:
            return fail(f"the communicator is not freed: {error!r}")
        if world.network.left() > left_before:
            return fail(f"{world.network.left() - left_before} messages or receives are left over")
        return None, passed


def _free(rank: Any, comm: Any) -> None:
    """Free a communicator, and give back what was kept for it."""
    comm.Free()
    progress = rank.library.modules[PROGRESS]
    progress.wait_until(lambda: not progress.recall_freed())


def _afterwards(player: Player) -> None:
    """Operations of all ways, by turns, with streams of their own."""
    for number in range(AFTERWARDS if player.ranks < MANY else AFTERWARDS_OF_MANY):
        size, key = (PACKED, SPARSE_SHARED, DENSE, MESSAGES, RECURSIVE)[number % 5], f"later {number}"
        if number % 3 == 2:
            player.start(key, size)()
        else:
            player.blocking(key, size)


def _wrong(players: Sequence[Player], faults: Sequence[Fault], interrupted: Sequence[int] = (), warm: bool = True) -> str:
    """Return what is not as promised about the outcomes, if anything; ``interrupted`` are the ranks that were."""
    culprits = {fault.rank: fault.error for fault in faults}
    owed, in_flight = "", players[0].in_flight
    for key in players[0].outcomes:
        outcomes = [player.outcomes.get(key) for player in players]
        if any(outcome is None for outcome in outcomes):
            return f"{key}: no outcome on some rank: {outcomes}"
        errors = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.what == "error"]
        results = [outcome for outcome in outcomes if outcome.what == "result"]
        said = "; ".join(f"rank {rank} raises {outcome.name}: {outcome.text}" for rank, outcome in errors)
        if not all(outcome.right for outcome in results):
            return f"{key}: a wrong sum on rank {[rank for rank, outcome in enumerate(outcomes) if not outcome.right]}"
        if len({outcome.bits for outcome in results}) > 1:
            return f"{key}: not the same bits on all ranks"
        late, owed = owed, key if errors and results else owed if in_flight and key != "later 0" else ""
        if late and not in_flight and results:  # of one after the other
            return f"{key} does not raise on all ranks what failed on some in {late}: {said}"
        if errors and (key.startswith(("later", "warm")) or not faults) and not (late and not results):
            # Of two faults in a preparation one may strike on a rank that is ready, and has failed in its operation: each fails one.
            second = key == "later 0" and not warm and len(faults) > 1 and len(errors) == len(players)
            if not second or len({(outcome.name, outcome.text) for _, outcome in errors}) > 1:
                return f"{key} fails: {said}"
        others = {(outcome.name, outcome.text) for rank, outcome in errors if rank not in culprits or key.startswith("later")}
        if len(others) > 1:
            return f"{key}: the other ranks raise different errors: {said}"
        for rank, outcome in errors:
            if rank in culprits:
                own = outcome.name == culprits[rank] and "struck by a fault" in outcome.text
                if not own and others and (outcome.name, outcome.text) not in others:
                    return f"{key}: the rank that failed raises another error: {said}"
            elif not issubclass(getattr(sar, outcome.name, type(None)), sar.SparseAllreduceError):
                return f"{key}: an error that is not the library's: {said}"
    for rank in interrupted:  # what interrupts a rank is not lost
        outcomes = players[rank].outcomes.values()
        if not players[rank].interrupted_before and not any(outcome.name == "KeyboardInterrupt" for outcome in outcomes):
            return f"the interrupt of rank {rank} is lost: {[outcome.what for outcome in outcomes]}"
    return ""


def _wrong_of_loops(players: Sequence[Player], faults: Sequence[Fault], interrupted: Sequence[int] = (), warm: bool = True) -> str:
    """Return what is not as promised where ranks leave at the first error: all others raise it, at the latest in the next operation."""
    culprits = {fault.rank: fault.error for fault in faults}
    errors = [(player.number, key, each) for player in players for key, each in player.outcomes.items() if each.what == "error"]
    said = "; ".join(f"rank {rank} raises {each.name} in {key}: {each.text}" for rank, key, each in errors)
    if not all(outcome.right for player in players for outcome in player.outcomes.values()):
        return "a wrong sum"
    if any(key.startswith("later") for _, key, _ in errors) or (errors and not faults):
        return f"fails: {said}"
    if errors and {rank for rank, _, _ in errors} != {player.number for player in players}:
        return f"not all ranks raise: {said}"
    if len({(each.name, each.text) for rank, key, each in errors if rank not in culprits or key == "caught up"}) > 1:
        return f"the other ranks raise different errors: {said}"
    for rank in interrupted:
        if not players[rank].interrupted_before and not any(each.name == "KeyboardInterrupt" for each in players[rank].outcomes.values()):
            return f"the interrupt of rank {rank} is lost: {said}"
    return ""


# What is struck.


def one(size: int, share: float = 0.2, **options: Any) -> Callable[[Player], None]:
    """A blocking operation."""
    return lambda player: player.blocking("struck", size, share, **options)


def waited(size: int, share: float = 0.2, **options: Any) -> Callable[[Player], None]:
    """One that is started, tested and waited for."""

    def run(player: Player) -> None:
        player.start("struck", size, share, **options)()

    return run


def listed(*kinds: tuple[int, Any], blocking: bool, **options: Any) -> Callable[[Player], None]:
    """One on a list of streams."""
    return lambda player: player.list("struck", kinds, blocking, **options)


def collective(name: str, size: int, blocking: bool, **options: Any) -> Callable[[Player], None]:
    """A collective besides allreduce."""
    return lambda player: player.collective(name, "struck", size, blocking, **options)


def several(*sizes: int, **options: Any) -> Callable[[Player], None]:
    """Some in flight together, waited for in another order on each rank."""

    def run(player: Player) -> None:
        player.in_flight = True
        waits = [player.start(f"struck {number}", size, **options) for number, size in enumerate(sizes)]
        for number in range(len(waits)):
            waits[(number + (0 if player.leaves else player.number)) % len(waits)]()

    return run


def in_a_row(*sizes: int) -> Callable[[Player], None]:
    """Some blocking ones."""

    def run(player: Player) -> None:
        for number, size in enumerate(sizes):
            player.blocking(f"struck {number}", size)

    return run


def reducer(name: str, blocking: bool) -> Callable[[Player], None]:
    """An operation of a reducer, and another one of it."""

    def run(player: Player) -> None:
        reducer = getattr(player.sar, name)(64, 8)
        for key in ("struck", "struck again"):
            rng = np.random.default_rng(player.number + len(key))
            accumulator = rng.standard_normal(64).astype(np.float32)
            player.kept.append(weakref.ref(accumulator))
            if blocking:
                player.note(key, 64, partial(player.begin, partial(reducer.allreduce, accumulator, player.comm)))
            else:
                start = partial(player.begin, partial(reducer.iallreduce, accumulator, player.comm))
                player.note(key, 64, lambda start=start: start().wait())

    return run


def planned(size: int, share: float = 0.2, **options: Any) -> Callable[[Player], None]:
    """A plan of fixed indices, and two sums of it; a rank that has none sums its stream instead, which is not what the others do."""

    def run(player: Player) -> None:
        player.in_flight = True  # of whatever is left, once a rank has no plan
        stream, plans = player.stream("struck", size, share), []
        try:
            plans.append(player.sar.allreduce_init(stream, player.comm, fixed_indices=True, **options))
            player.outcomes["made"] = Outcome("result", right=True)
        except (greenlet.GreenletExit, Stuck):
            raise
        except BaseException as error:
            player._raised("made", error)

        def again() -> Any:
            if not plans:
                return player.sar.allreduce(stream, player.comm)
            plans[0].start(stream)
            return plans[0].wait()

        player.note("struck", size, again, share)
        first = player.outcomes.pop("struck")
        player.note("struck", size, again, share)
        player.outcomes["struck first"] = first

    return run


# Lists of streams whose sizes make that of a way, and of streams of several dtypes.
LISTS: dict[str, list[tuple[int, Any]]] = {
    "packed": [(PACKED - 8, np.float32), (8, np.float32)],
    "sparse shared": [(SPARSE_SHARED - 30, np.float32), (10, np.float32), (20, np.float32)],
    "dense": [(DENSE // 2, np.float32), (DENSE // 2, np.float32)],
    "of two dtypes": [(PACKED, np.float32), (10, np.float64), (RECURSIVE - PACKED, np.float32)],
}
ALGORITHMS = [name for name in sar.algorithms() if name != "auto"]
CUTTING = [name for name in ALGORITHMS if name != "hierarchical" and takes_samples(name)]
FEW_IN_FLIGHT: dict[str, dict[str, Any]] = {"sparseallreduce.runtime.outbox": {"PIECES_IN_FLIGHT": 2, "PIECES_OF_A_RANK": 3}}
NO_MEMORY: dict[str, dict[str, Any]] = {"sparseallreduce.runtime.inside_hosts": {"_LEAST": 1 << 40}}
ASKING: dict[str, dict[str, Any]] = {"sparseallreduce.runtime.signature": {"_LONG": 0.0}}
ASKING_OF_MANY = {"sparseallreduce.runtime.signature": {"_LONG": 0.0, "_ROUNDS": 0}}  # who do not tell each other with their records
SMALL_AREA: dict[str, dict[str, Any]] = {"sparseallreduce.runtime.memory.dense": {"_CAPACITY": 0, "_CAPACITY_OVERSUBSCRIBED": 0}}


def scenarios() -> Iterator[Scenario]:
    """All of them."""
    for ranks in (2, 3):
        P = f"P={ranks} "
        far: dict[str, Any] = {"ranks": ranks, "hosts": 1, "pieces": True, "eager": 0, "constants": FEW_IN_FLIGHT}
        for how, operation in (("blocking", one), ("waited", waited)):
            yield Scenario(f"{P}packed {how}", operation(PACKED), "kernel store_word", ranks)
            yield Scenario(f"{P}packed by messages {how}", operation(PACKED), "MPI.Isend", ranks, hosts=1)
            yield Scenario(f"{P}sparse shared {how}", operation(SPARSE_SHARED), "kernel store_word", ranks)
            yield Scenario(f"{P}sparse shared, dense result {how}", operation(SPARSE_SHARED, 0.45), "kernel store_word", ranks)
            yield Scenario(f"{P}dense {how}", operation(DENSE), "", ranks)
            yield Scenario(f"{P}split by messages {how}", operation(MESSAGES), "MPI.Isend", ranks, hosts=1, eager=0)
            for algorithm in ("auto", *CUTTING):
                cut, name = operation(SKEWED, algorithm=algorithm), f"{P}{algorithm}, skewed {how}"
                yield Scenario(name, cut, UNEVEN, ranks, hosts=1, eager=0, constants=ASKING)
            yield Scenario(f"{P}split, agreed in memory {how}", operation(MESSAGES), "MPI.Isend", ranks)
            yield Scenario(f"{P}max, packed {how}", operation(PACKED, op="max"), "", ranks)
            for algorithm in ALGORITHMS:
                for eager in (1 << 12, 0):
                    name = f"{P}{algorithm} {how}, eager {eager}"
                    yield Scenario(name, operation(PACKED, algorithm=algorithm), "", ranks, eager=eager)
            yield Scenario(f"{P}dense by messages {how}", operation(DENSE), "", ranks, hosts=1)
            for algorithm in ALGORITHMS[1:]:
                yield Scenario(f"{P}{algorithm} in pieces {how}", operation(DENSE, 0.4, algorithm=algorithm), "wire._frame", **far)
            for codec in ("float16", "bfloat16"):  # which hold such sums exactly
                options = {"value_codec": codec, "algorithm": "ssar_recursive_doubling"}
                yield Scenario(f"{P}{codec} in pieces {how}", operation(DENSE, 0.4, **options), "wire._frame", **far)
                yield Scenario(f"{P}{codec} in memory {how}", operation(DENSE, 0.4, **options), "wire._frame", ranks, eager=0)
        yield Scenario(f"{P}dense written blocking", one(DENSE), "kernel sum_vectors", ranks)
        yield Scenario(f"{P}dense ready blocking", one(DENSE), "MPI.Allreduce", ranks, constants=SMALL_AREA)
        yield Scenario(f"{P}dense ready by messages", one(DENSE), "MPI.Allreduce", ranks, hosts=1)
        if ranks == 2:
            yield Scenario(f"{P}sparse shared direct", one(SPARSE_SHARED), "kernel sum_parts", ranks)
        yield Scenario(f"{P}sparse shared direct, a core for all", one(SPARSE_SHARED, 0.1), "kernel sum_parts", ranks, cores=ranks - 1)
        yield Scenario(f"{P}several in flight", several(SPARSE_SHARED, PACKED, MESSAGES), "", ranks)
        yield Scenario(f"{P}several in flight by messages", several(DENSE, PACKED, MESSAGES), "", ranks, hosts=1)
        yield Scenario(f"{P}several in flight in pieces", several(SPARSE_SHARED, MESSAGES, RECURSIVE), "wire._frame", **far)
        skewed = several(SKEWED, SKEWED, DENSE)
        yield Scenario(f"{P}several skewed in flight", skewed, UNEVEN, ranks, hosts=1, constants=ASKING)
        yield Scenario(f"{P}skewed in a row", in_a_row(SKEWED, SKEWED, SKEWED), UNEVEN, ranks, hosts=1, constants=ASKING)
        yield Scenario(f"{P}several dense in flight", several(DENSE, DENSE, DENSE, algorithm="dense"), "", ranks)
        yield Scenario(f"{P}in a row", in_a_row(DENSE, SPARSE_SHARED, PACKED, DENSE, SPARSE_SHARED), "", ranks)
        for name in COLLECTIVES:
            for algorithm in sar.algorithms(name):
                for blocking in (True, False):
                    how = f"{name}, {algorithm} {'blocking' if blocking else 'waited'}"
                    yield Scenario(f"{P}{how}", collective(name, PACKED, blocking, algorithm=algorithm), "", ranks)
                if algorithm != "auto":
                    struck = collective(name, DENSE, True, algorithm=algorithm)
                    yield Scenario(f"{P}{name}, {algorithm} in pieces", struck, "wire._frame", **far)
            yield Scenario(f"{P}{name} in shared memory", collective(name, SPARSE_SHARED, True), "kernel store_word", ranks)
        for name in ("OkTopk", "GTopk", "TopkA"):
            for blocking in (True, False):
                yield Scenario(f"{P}{name} {'blocking' if blocking else 'waited'}", reducer(name, blocking), "", ranks)
            yield Scenario(f"{P}{name} in pieces", reducer(name, True), "wire._frame", **far)
        for how, blocking in (("blocking", True), ("waited", False)):
            for way, kinds in LISTS.items():
                yield Scenario(f"{P}list, {way} {how}", listed(*kinds, blocking=blocking), "", ranks)
                yield Scenario(f"{P}list, {way} by messages {how}", listed(*kinds, blocking=blocking), "MPI.Isend", ranks, hosts=1)
            skewed = listed((SKEWED, np.float32), (10, np.float64), blocking=blocking)
            yield Scenario(f"{P}list, skewed {how}", skewed, UNEVEN, ranks, hosts=1, constants=ASKING)
        for how, operation in (("blocking", one), ("waited", waited)):
            yield Scenario(f"{P}first, {how}", operation(PACKED), "MPI.Idup", ranks, warm=False)
            yield Scenario(f"{P}first by messages, {how}", operation(MESSAGES), "MPI.Idup", ranks, hosts=1, warm=False)
    options = {"algorithm": "ssar_recursive_doubling"}
    yield Scenario("P=4 two hosts", one(DENSE, 0.4, **options), "wire._frame", 4, hosts=2, pieces=True, eager=0, constants=FEW_IN_FLIGHT)
    hosts: dict[str, Any] = {"hosts": 2, "pieces": True, "eager": 0, "constants": FEW_IN_FLIGHT}
    inside: dict[str, Any] = {**hosts, "inside": True}
    by_messages: dict[str, Any] = {**inside, "constants": {**FEW_IN_FLIGHT, **NO_MEMORY}}  # as the ranks agree in memory
    option: dict[str, Any] = {"algorithm": "hierarchical"}
    for how, operation in (("blocking", one), ("waited", waited)):
        yield Scenario(f"P=4 hierarchical {how}", operation(DENSE, 0.4, **option), "wire._frame", 4, **inside)
        yield Scenario(f"P=4 hierarchical, sparse {how}", operation(SPARSE_SHARED, 0.1, **option), "wire._frame", 4, **inside)
        yield Scenario(f"P=4 hierarchical by messages {how}", operation(DENSE, 0.4, **option), "wire._frame", 4, **by_messages)
        yield Scenario(f"P=4 hierarchical, maximum {how}", operation(DENSE, 0.4, op="max", **option), "wire._frame", 4, **inside)
        yield Scenario(f"P=5 hierarchical {how}", operation(DENSE, 0.4, **option), "", 5, **inside)  # one rank on the third
        yield Scenario(f"P=3 hierarchical on one host {how}", operation(DENSE, 0.4, **option), "kernel store_word", 3)
        yield Scenario(f"P=4 2D-Torus {how}", operation(DENSE, 0.4, algorithm="dense_torus"), "wire._frame", 4, **inside)
        yield Scenario(f"P=4 HiTopK {how}", reducer("HiTopK", how == "blocking"), "wire._frame", 4, **inside)
        sections, cut = {"algorithm": "dsar_early_switch", "group_size": 2}, {"hosts": 1, "constants": ASKING}
        yield Scenario(f"P=4 sections of several parts, skewed {how}", operation(SKEWED, **sections), UNEVEN, 4, eager=0, **cut)
        yield Scenario(f"P=5 sections of several parts, skewed {how}", operation(SKEWED, **sections), UNEVEN, 5, eager=0, **cut)
        cut = {**inside, "constants": {**FEW_IN_FLIGHT, **ASKING}}
        yield Scenario(f"P=4 hierarchical, skewed {how}", operation(SKEWED, **option), UNEVEN, 4, **cut)
        far = {"hosts": 1, "eager": 0, "constants": ASKING}
        for ranks in (2, 3, 4):
            for algorithm in CUTTING:
                if algorithm != "ssar_ring":
                    name = f"P={ranks} {algorithm}, skewed, in step {how}"
                    yield Scenario(name, operation(SKEWED, algorithm=algorithm), READY, ranks, in_step=True, **far)
        cut = {**far, "pieces": True, "constants": {**FEW_IN_FLIGHT, **ASKING}}
        yield Scenario(f"P=4 skewed, in step, in pieces {how}", operation(SKEWED), READY, 4, in_step=True, **cut)
        for ranks in (MANY, MANY + 1):
            name = f"P={ranks} skewed, in step {how}"
            yield Scenario(name, operation(SKEWED), READY, ranks, **{**far, "constants": ASKING_OF_MANY})
    skewed = several(SKEWED, SKEWED, PACKED)
    yield Scenario("P=3 several skewed in flight, in step", skewed, READY, 3, in_step=True, hosts=1, constants=ASKING)
    yield Scenario("P=4 several hierarchical", several(DENSE, PACKED, MESSAGES, **option), "", 4, **inside)
    sizes = (DENSE, SPARSE_SHARED, PACKED, MESSAGES, SPARSE_SHARED, DENSE)
    yield Scenario("P=4 many hierarchical", several(*sizes, **option), "", 4, **inside)
    for algorithm in FIXED:
        yield Scenario(f"P=3 plan, {algorithm}", planned(MESSAGES, algorithm=algorithm), "", 3)
        yield Scenario(f"P=4 plan between hosts, {algorithm}", planned(DENSE, 0.4, algorithm=algorithm), "wire._frame", 4, **hosts)
        if algorithm != FIXED[0]:
            yield Scenario(f"P=4 plan, skewed, {algorithm}", planned(SKEWED, algorithm=algorithm), UNEVEN, 4, **hosts)
    yield Scenario("P=2 plan in memory", planned(SPARSE_SHARED), "", 2)
    options["value_codec"] = "float16"
    yield Scenario("P=4 two hosts, float16", one(DENSE, 0.4, **options), "wire._frame", 4, hosts=2, pieces=True, eager=0)
    yield Scenario("P=5 packed", one(PACKED), "", 5, cores=2)
    yield Scenario("P=5 sparse shared", one(SPARSE_SHARED), "", 5, cores=2)
    yield Scenario("P=5 sparse shared, five parts", one(SPARSE_SHARED), "", 5)
    yield Scenario("P=5 split by messages", one(MESSAGES), "", 5, hosts=1)


# What has taken effect raises nothing of its own; and Python looks for interrupts behind a call of compiled code, not before it.
BEHIND, COMPILED = (", after", ", nothing", ", done"), ("MPI.", "kernel ")
# What the runtime calls by way of `list.extend(map(...))`: the interpreter looks for signals when the list holds what they return.
LISTED = tuple(f"MPI.{name}, after" for name in ("Idup", "Isend", "Irecv", "Iallreduce", "Iallgatherv"))


def faults_of(points: Sequence[Counter[str]]) -> list[Fault]:
    """All faults that may strike a program which passes these points."""
    found = []
    for rank, counts in enumerate(points):
        for kind, count in sorted(counts.items()):
            for error in ERRORS:
                behind, compiled = kind.endswith(BEHIND) or kind == interrupts.KIND, kind.startswith(COMPILED)
                interrupt = error == "KeyboardInterrupt"
                if kind.startswith(LISTED) or (behind and not interrupt) or (compiled and not behind and interrupt):
                    continue
                found += [Fault(rank, kind, number, error) for number in range(1, count + 1)]
    return found


@contextmanager
def played(scenario: Scenario, instructions: bool = False, leaves: bool = False) -> Iterator[Play]:
    """Yield what strikes a scenario.

    Parameters
    ----------
    scenario : Scenario
    instructions : bool
        Whether a KeyboardInterrupt strikes wherever Python takes one, besides.
    leaves : bool
        Whether a rank takes part in no more operations after one that has raised, as one that leaves a loop.
    """
    with Play(scenario, instructions, leaves) as play:
        yield play
