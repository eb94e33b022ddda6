"""Compare the solvers of `train` on ranks of different hosts that this machine does not have: loops are measured, sums are simulated.

    python bench/many_ranks.py TRAIN [--test TEST] [--ranks 1,4,16] [--rate 1e9,1e10] [--latency 5e-5] [--way "--solver dual"] [--json F]

Every rank is a thread, and only one of them works at a time, so that a loop takes the processor time that one rank alone takes. When all
ranks have reached a sum, the simulator says how long it takes on the network, with the index sets of the ranks, and their clocks go on from
the latest. Everything else is the command `train`, which reads its seconds from these clocks. Values that are gathered otherwise take a
latency for each doubling of the ranks, and their bytes.

Printed are seconds without evaluation, including preparation: until the objective is within a share of the least dual objective that any
run has found, or, with --test, until the test accuracy is within a margin of the best of all runs.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import numpy as np

import sparseallreduce as sar
from sparseallreduce.algorithms.fixed import FixedSum, Kind, configured
from sparseallreduce.cli.train import train
from sparseallreduce.linear.solvers import rounds
from sparseallreduce.linear.strategies import clock, local_steps, sparse
from sparseallreduce.runtime import api, objects, planning
from sparseallreduce.runtime.simulator import engine
from sparseallreduce.runtime.simulator.network import machine_of
from sparseallreduce.streams.operator import SUM

SHARES = (1e-2, 1e-3, 1e-4, 1e-6)
WAYS = ("--solver dual", "--solver newton", "--solver sgd")
GAMMA = 1e-9  # seconds that adding an entry takes
PATIENCE = 3000.0  # seconds that ranks wait for each other, before it is taken for an error
_rank = threading.local()


class Hosts:
    """P ranks on hosts of their own, which are threads that take turns.

    Parameters
    ----------
    ranks : int
    network : Network
    """

    def __init__(self, ranks: int, network: sar.Network) -> None:
        self.ranks, self.network = ranks, network
        self.board: list[Any] = [None] * ranks
        self.found: tuple[Any, float] = None, 0.0
        self.turn, self.barrier = threading.Lock(), threading.Barrier(ranks, timeout=PATIENCE)

    def run(self, program: Callable[[], None]) -> None:
        """Run a program on every rank; raise what it raises on the lowest rank that fails."""
        failures: list[BaseException | None] = [None] * self.ranks

        def begin(rank: int) -> None:
            with self.turn:
                _rank.comm = Rank(rank, self)
                try:
                    program()
                except BaseException as error:
                    failures[rank] = error
                    self.barrier.abort()

        threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        known = [failure for failure in failures if failure is not None]
        for failure in [*(each for each in known if not isinstance(each, threading.BrokenBarrierError)), *known]:
            raise failure


class Rank:
    """One of the ranks, in place of its communicator."""

    def __init__(self, rank: int, hosts: Hosts) -> None:
        self.rank, self.size, self._hosts = rank, hosts.ranks, hosts
        self._elapsed, self._since = 0.0, time.thread_time()

    def now(self) -> float:
        """The rank's clock, in seconds."""
        return self._elapsed + time.thread_time() - self._since

    def together(self, given: Any, result: Callable[[list[Any]], tuple[Any, float]]) -> Any:
        """Return what ``result`` finds from what all ranks have given; it also returns the seconds that this takes on the network."""
        hosts = self._hosts
        hosts.board[self.rank] = given, self.now()
        hosts.turn.release()
        try:
            if hosts.barrier.wait() == 0:
                values, times = zip(*hosts.board, strict=True)
                found, seconds = result(list(values))
                hosts.found = found, max(times) + seconds
            hosts.barrier.wait()
            found, self._elapsed = hosts.found
            hosts.barrier.wait()
        finally:
            hosts.turn.acquire()
            self._since = time.thread_time()
        return found

    def seconds(self, nbytes: float) -> float:
        """Return the seconds until all ranks have these bytes of them all."""
        network = self._hosts.network
        return network.latency * math.ceil(math.log2(self.size)) + nbytes / network.bandwidth if self.size > 1 else 0.0

    def allgather(self, value: Any) -> list[Any]:
        size = len(pickle.dumps(value)) * (self.size - 1)
        return list(self.together(value, lambda values: (values, self.seconds(size))))

    def alltoall(self, values: list[Any]) -> list[Any]:
        return [row[self.rank] for row in self.allgather(values)]

    def Dup(self) -> Rank:
        return self

    def Free(self) -> None:
        pass


class SimulatedPlan:
    """Stands in for a plan with fixed indices."""

    def __init__(self, stream: sar.SparseStream, comm: Rank) -> None:
        self._comm, self._size, self._values = comm, stream.size, np.empty(0)
        self._union, self._seconds = comm.together(stream, lambda streams: ((laid_out(streams, comm)), 0.0))
        self._places = np.searchsorted(self._union, stream.indices)

    def start(self, values: Any) -> None:
        self._values = np.array(values)

    def wait(self) -> sar.SparseStream:
        def added(parts: list[Any]) -> tuple[Any, float]:
            total = np.zeros((len(self._union), *self._values.shape[1:]), self._values.dtype)
            for places, values in parts:
                total[places] += values
            return total, self._seconds

        return sar.SparseStream(self._union, self._comm.together((self._places, self._values), added), self._size)

    def free(self) -> None:
        pass


def laid_out(streams: Sequence[sar.SparseStream], comm: Rank) -> tuple[Any, float]:
    """Return the union of the streams' indices, and the seconds of a sum whose indices are known."""
    network, first = comm._hosts.network, streams[0]
    kind, machine = Kind(SUM, first.dtype, first.values.shape[1:]), machine_of(network)
    schedules = [configured(stream.indices, stream.size, kind, "auto", rank, len(streams), machine) for rank, stream in enumerate(streams)]
    made: list[FixedSum] = engine.run(schedules, network).outputs
    sums = [each.run(stream.values) for each, stream in zip(made, streams, strict=True)]
    return made[0].indices, engine.run(sums, network).time


def allreduce(stream: sar.SparseStream, comm: Any = None, op: Any = "sum", algorithm: str = "auto", **options: Any) -> Any:
    """Stands in for the library's."""
    if not isinstance(comm, Rank) or comm.size == 1:
        return api.allreduce(stream, sar.SERIAL, op, algorithm, **options)

    def summed(streams: list[Any]) -> tuple[Any, float]:
        found = sar.simulate(streams, algorithm, comm._hosts.network, op, **options)
        return found.outputs[0], found.time

    return comm.together(stream, summed)


def allreduce_init(stream: sar.SparseStream, comm: Rank, **_: Any) -> SimulatedPlan:
    """Stands in for the library's, for fixed indices."""
    return SimulatedPlan(stream, comm)


def gather_on_first(comm: Rank, array: Any, lengths: list[int]) -> Any:
    """Stands in for the library's."""
    size = sum(lengths[1:]) * array.itemsize
    whole = comm.together(array, lambda arrays: (np.concatenate(arrays), comm.seconds(size)))
    return array if comm.rank else whole


def broadcast_arrays(comm: Rank, arrays: Any) -> Any:
    """Stands in for the library's."""

    def first(everyones: list[Any]) -> tuple[Any, float]:
        return everyones[0], comm.seconds(sum(array.nbytes for array in everyones[0].values()))

    return dict(arrays or {}) if comm.size == 1 else comm.together(arrays, first)


def stand_in() -> None:
    """Let linear models use these ranks."""
    originals = api.allreduce, planning.allreduce_init, objects.gather_on_first, objects.broadcast_arrays
    others = dict(zip(map(id, originals), (allreduce, allreduce_init, gather_on_first, broadcast_arrays), strict=True))
    for name, module in list(sys.modules.items()):
        if name.startswith(("sparseallreduce.linear", "sparseallreduce.cli")):
            for attribute, value in list(vars(module).items()):
                if id(value) in others:
                    setattr(module, attribute, others[id(value)])
    train_module: Any = sys.modules["sparseallreduce.cli.train"]
    train_module.world = lambda: _rank.comm if _rank.comm.size > 1 else sar.SERIAL
    train_module.environment = lambda comm: {}
    clock.time = SimpleNamespace(perf_counter=lambda: _rank.comm.now())  # type: ignore[attr-defined]
    local_steps.same_host = lambda places, rank: [rank]  # type: ignore[attr-defined]
    sparse.warm_up = rounds.warm_up = lambda *_: None  # type: ignore[attr-defined]


class Point(NamedTuple):
    """What a run has come to after an epoch or round."""

    seconds: float
    objective: float
    dual: float
    accuracy: float
    phases: dict[str, float]  # seconds of the epoch or round by phase


def curve(command: list[str], ranks: int, network: sar.Network) -> list[Point]:
    """Train on so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = [*command, "--progress", "off", "--json", str(report)]
        with redirect_stdout(io.StringIO()):
            Hosts(ranks, network).run(lambda: train.main(arguments, standalone_mode=False))
        found = json.loads(report.read_text())
    points, total = [], (found["results"]["picked"] or {"seconds": 0.0})["seconds"]
    for epoch in found["epochs"]:
        total += epoch["seconds"]["total"] - epoch["seconds"]["evaluate"]
        loss = math.inf if epoch["loss"] is None else epoch["loss"]
        points.append(Point(total, loss, epoch.get("dual", -math.inf), epoch.get("test_accuracy") or 0.0, epoch["seconds"]))
    return points


@click.command()
@click.argument("training", metavar="TRAIN", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--test", type=click.Path(exists=True, path_type=Path), help="Seconds to an accuracy on these samples, instead of an objective."
)
@click.option("--ranks", default="1,4,16,64", show_default=True)
@click.option("--rate", default="1e9,1e10", show_default=True, help="Bits per second of each host.")
@click.option("--latency", type=click.FloatRange(0), default=5e-5, show_default=True, help="Seconds.")
@click.option("--way", "ways", multiple=True, default=WAYS, show_default=True, help="Options of `train`.")
@click.option("--options", default="--epochs 60", show_default=True, help="Of all ways.")
@click.option("--margin", type=click.FloatRange(0), default=0.001, show_default=True, help="Of the accuracy.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def many_ranks(
    training: Path,
    test: Path | None,
    ranks: str,
    rate: str,
    latency: float,
    ways: tuple[str, ...],
    options: str,
    margin: float,
    json_path: Path | None,
) -> None:
    """Print the seconds of every way on every number of ranks and network."""
    stand_in()
    tested = [] if test is None else ["--test", str(test)]
    found: dict[str, list[Point]] = {}
    for way in ways:
        command = [str(training), *tested, *options.split(), *way.split()]
        for count in map(int, ranks.split(",")):
            for bits in map(float, rate.split(",")) if count > 1 else [math.inf]:
                network = sar.Network(latency, bits / 8, GAMMA)
                if not found:
                    curve(command, 2, network)  # loads kernels
                name = f"{way}, P={count}" + (f", {bits / 1e9:g} Gbit/s" if count > 1 else "")
                found[name] = curve(command, count, network)
                print(f"{name}: {len(found[name])} rounds, {found[name][-1].seconds:.3f} s", file=sys.stderr, flush=True)
    print("\n".join(by_objective(found) if test is None else by_accuracy(found, margin)))
    if json_path is not None:
        json_path.write_text(json.dumps({"schema": 1, "command": "many_ranks", "curves": found}, indent=1) + "\n")


def by_objective(found: dict[str, list[Point]]) -> list[str]:
    """Return the lines of a table of the seconds to each share above the least objective."""
    least = max(point.dual for curve in found.values() for point in curve)
    lines = [f"{'seconds to':58}" + "".join(f"{share:>10g}" for share in SHARES)]
    for name, points in found.items():
        times = [next((p.seconds for p in points if p.objective <= least * (1 + share)), None) for share in SHARES]
        lines.append(f"{name:58}" + "".join(f"{'not':>10}" if each is None else f"{each:10.3f}" for each in times))
    return lines


def by_accuracy(found: dict[str, list[Point]], margin: float) -> list[str]:
    """Return the lines of a table of the seconds to the best accuracy less the margin."""
    aim = max(point.accuracy for curve in found.values() for point in curve) - margin
    lines = [f"{f'seconds to {aim:.4f}':58}{'':10}{'accuracies':>12}"]
    for name, points in found.items():
        reached = next((f"{p.seconds:10.3f}" for p in points if p.accuracy >= aim), f"{'not':>10}")
        lines.append(f"{name:58}{reached}  " + " ".join(f"{point.accuracy:.4f}" for point in points[:8]))
    return lines


if __name__ == "__main__":
    many_ranks()
