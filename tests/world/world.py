"""The scheduler: which rank runs, up to where, and what befalls it there.

Ranks are coroutines. One runs at a time, from one point to the next; at each point an *order* says who goes on. A rank that has found
nothing to do says so, and lets the others run. When all wait and nothing changes any more, that is a deadlock, reported at once with
the line at which each rank waits.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import greenlet
import numpy as np

from world import network
from world.library import Library

STEPS = 200_000  # points of one run of up to four ranks; of more, in proportion
IDLE = 1_500  # waits in a row of each rank, with nothing changed, that are a deadlock; the clock runs by then
UNSEEN = ("numpy.", "memory.", "resume", "reduction.", "wire.", "merging.", "packed.")  # kinds of points of which the others see nothing
_TICK, _LONG_TICK = 1e-6, 1e-2  # seconds of the virtual clock that a wait takes, and takes when nothing has changed for long
_LONG = 500
_PACKAGE = "/sparseallreduce/"


class Stuck(AssertionError):
    """Ranks wait for each other, or go on for ever."""


class RoundRobin:
    """A rank runs until it waits; then the next one does."""

    def next(self, world: World, rank: Rank, waits: bool) -> Rank:
        return world.following(rank) if waits else rank


class Preemptions(RoundRobin):
    """As round robin, but for some points, by their number, at which another rank goes on: as many ranks further as is said there."""

    def __init__(self, at: Mapping[int, int]) -> None:
        self.at = dict(at)

    def next(self, world: World, rank: Rank, waits: bool) -> Rank:
        if world.steps in self.at:
            return world.following(rank, self.at[world.steps] + waits)
        return world.following(rank) if waits else rank


class RandomOrder:
    """At every point another rank goes on with some probability."""

    def __init__(self, seed: int, share: float) -> None:
        self.random, self.share = random.Random(seed), share

    def next(self, world: World, rank: Rank, waits: bool) -> Rank:
        if waits or self.random.random() < self.share:
            return world.following(rank, self.random.randrange(len(world.ranks) - waits) + waits)
        return rank


class Rank:
    """A rank: its library, its communicator, and where it stands."""

    def __init__(self, number: int, library: Library, MPI: Any) -> None:
        self.number, self.library, self.MPI = number, library, MPI
        self.sar = library.sar
        self.comm = MPI.COMM_WORLD
        self.calls: Counter[str] = Counter()  # points that it has passed, by kind
        self.coroutine: Any = None
        self.blocked: Callable[[], bool] | None = None  # in a call that does not return before this holds
        self.where = ""
        self.seen: dict[tuple[int, int], Any] = {}  # the words that it has read last
        self.finished_at = 0  # number of the point
        self.quiet = False  # whether it does what is no part of the program

    @property
    def runs(self) -> bool:
        return not self.coroutine.dead and (self.blocked is None or self.blocked())


class World:
    """Some ranks, from their first operation on.

    Parameters
    ----------
    ranks : int
    cores : int
        That they share; as many as ranks by default.
    hosts : sequence of str, optional
        The name of the host of each; one by default.
    eager : int
        Bytes of a message up to which it is sent without waiting for the receiver.
    constants : mapping
        Numbers of the library that are to be others, by module and name.
    """

    def __init__(
        self,
        ranks: int,
        *,
        cores: int | None = None,
        hosts: Sequence[str] | None = None,
        eager: int = 1 << 12,
        constants: Mapping[str, Mapping[str, Any]] = {},
    ) -> None:
        self.network = network.Network(eager)
        self.clock = 0.0
        self.steps = self.idle = 0
        self.order: Any = RoundRobin()
        self.injector: Callable[[Rank, str, bool], None] | None = None
        self.running: Rank | None = None
        self.dead = False  # what runs is to end
        self.problems: list[str] = []  # what ranks did that MPI forbids
        self.lies: dict[str, Callable[..., Any]] = {}  # what kernels answer without a look, to see whether anybody notices
        self.ranks: list[Rank] = []
        for number, MPI in enumerate(network.modules(self, ranks)):
            library = Library(self, number, MPI, hosts[number] if hosts else "host", cores or ranks, constants)
            self.ranks.append(Rank(number, library, MPI))

    def run(self, program: Callable[[Rank], Any], order: Any = None, steps: int | None = None) -> list[Any]:
        """What a program comes to on each rank.

        Raises
        ------
        Stuck
            If it does not end. The world is of no use afterwards.
        """
        assert not self.dead, "a world that has ended"
        results: list[Any] = [None] * len(self.ranks)
        self.order, self.steps, self.idle = order or RoundRobin(), 0, 0
        self._limit = steps or STEPS * max(4, len(self.ranks)) // 4
        for rank in self.ranks:
            rank.calls.clear()
            rank.seen.clear()
            rank.coroutine, rank.blocked = greenlet.greenlet(self._body(rank, program, results)), None
        try:
            rank = self.ranks[0]
            while not self.dead and any(not rank.coroutine.dead for rank in self.ranks):
                self.running = rank = self.following(rank, 0)
                rank.coroutine.switch()
                rank = self.running
        except BaseException as error:
            self.end()
            if self.problems and isinstance(error, Exception):
                raise Stuck("; ".join(self.problems)) from error
            raise
        finally:
            self.running = None
        if self.dead:
            self.end()
        if self.problems:
            raise Stuck("; ".join(self.problems))
        return results

    def end(self) -> None:
        """End the coroutines of a run that has not ended by itself."""
        self.dead, self.running = True, None
        for rank in self.ranks:
            for _ in range(100):
                if rank.coroutine is None or rank.coroutine.dead:
                    break
                rank.coroutine.throw(greenlet.GreenletExit)

    def _body(self, rank: Rank, program: Callable[[Rank], Any], results: list[Any]) -> Callable[[], None]:
        def body() -> None:
            results[rank.number] = program(rank)
            rank.finished_at = self.steps
            self.idle = 0

        return body

    # What ranks say on their way.

    def point(self, kind: str) -> None:
        """A rank is about to do something that others may see, or that may fail."""
        rank = self.running
        if rank is None:
            return self._nowhere()
        if rank.quiet:
            return
        rank.calls[kind] += 1
        if self.injector is not None:
            self.injector(rank, kind)
        if not kind.startswith(UNSEEN):
            self._pass(rank, False)

    def _nowhere(self) -> None:
        """Outside of a run nothing is scheduled; while one is being ended, nothing goes on."""
        if self.dead and greenlet.getcurrent().parent is not None:  # and not what Python clears away later
            raise greenlet.GreenletExit

    def after(self, kind: str) -> None:
        """It has done it, and may be interrupted before it knows the result."""
        rank = self.running
        if rank is not None:
            kind += ", after"
            rank.calls[kind] += 1
            if self.injector is not None:
                self.injector(rank, kind)

    def wait(self, kind: str) -> None:
        """It has found nothing to do."""
        rank = self.running
        if rank is None:
            return self._nowhere()
        rank.calls[kind + ", nothing"] += 1
        if self.injector is not None:
            self.injector(rank, kind + ", nothing")
        rank.where = kind
        self.idle += 1
        self.clock += _TICK if self.idle < _LONG else _LONG_TICK
        if self.idle > IDLE * len(self.ranks):
            raise self._stuck("nothing changes any more")
        self._pass(rank, True)

    def block(self, done: Callable[[], bool], kind: str) -> None:
        """It does nothing else until something is done."""
        rank = self.running
        if rank is None:
            if not done():
                raise Stuck(f"{kind} outside of a run waits for ever")
            return
        rank.where = kind
        while not done():
            rank.blocked = done
            self._pass(rank, True)
        rank.blocked = None

    def changed(self) -> None:
        """Something is as no rank may have seen it yet."""
        self.idle = 0

    def misused(self, what: str) -> network.Misuse:
        """Note what MPI forbids; the run ends by it even if the library takes it for an error of its own."""
        self.problems.append(what)
        return network.Misuse(what)

    def word_read(self, array: np.ndarray, at: Any) -> None:
        rank = self.running
        if rank is None:
            return
        self._pass(rank, False)
        address = array.ctypes.data + 8 * int(at)
        value = array[at]
        if rank.seen.get(address) == value:
            self.wait("word")
        else:
            rank.seen[address] = value  # type: ignore[index]

    def word_stored(self, array: np.ndarray, at: Any, value: Any) -> None:
        rank = self.running
        if rank is not None:
            self._pass(rank, False)
        if array[at] != value:
            self.idle = 0
        array[at] = value

    def word_exchanged(self, array: np.ndarray, at: Any, expected: Any, value: Any) -> bool:
        rank = self.running
        if rank is not None:
            self._pass(rank, False)
        if array[at] != expected:
            return False
        array[at] = value
        self.idle = 0
        return True

    # Who runs.

    def following(self, rank: Rank, further: int = 1) -> Rank:
        """The rank that is so many further than one, of those that can run; that one itself if it is the only one."""
        count = len(self.ranks)
        able = [self.ranks[(rank.number + step) % count] for step in range(count)]
        able = [other for other in able if other.runs]
        if not able:
            raise self._stuck("every rank is inside a call of MPI that cannot return")
        if able[0] is not rank and further:
            further -= 1
        return able[further % len(able)]

    def _pass(self, rank: Rank, waits: bool) -> None:
        self.steps += 1
        if self.steps > self._limit:
            raise self._stuck(f"no end after {self._limit} points")
        chosen = self.order.next(self, rank, waits)
        if chosen is not rank:
            self.running = chosen
            chosen.coroutine.switch()
        elif rank.blocked is not None and not rank.blocked():
            raise self._stuck("every rank is inside a call of MPI that cannot return")

    def _stuck(self, why: str) -> BaseException:
        """Note why the run cannot go on; what is raised ends the coroutine, whatever the library makes of errors."""
        lines = [f"{why}:"]
        for rank in self.ranks:
            if rank.coroutine.dead:
                lines.append(f"rank {rank.number} has ended")
                continue
            frame = rank.coroutine.gr_frame
            stack = traceback.extract_stack(frame) if frame is not None else traceback.extract_stack()
            inside = [f"{part.filename.rpartition('/')[2]}:{part.lineno} {part.name}" for part in stack if _PACKAGE in part.filename]
            lines.append(f"rank {rank.number} in {rank.where}: {' < '.join(reversed(inside[-6:]))}")
        self.dead, self.running = True, None
        self.problems.append("\n  ".join(lines))
        return greenlet.GreenletExit()
