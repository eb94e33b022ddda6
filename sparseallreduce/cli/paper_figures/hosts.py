"""Sums between hosts of several ranks: figures 7 and 8 of CommLib (section 5.3)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.algorithms.steps import Clock, HostGather, HostReduceScatter, Step
from sparseallreduce.cli.paper_figures.settings import Figure, Settings, described, on_first
from sparseallreduce.cli.paper_figures.trees import ring_allgather, tree_allreduce
from sparseallreduce.cli.pictures.panels import SECONDS, Bars, Line, Panel, Picture, Quantity
from sparseallreduce.runtime.simulator import Network, run
from sparseallreduce.streams.selection import ExactTopK, MSTopK
from sparseallreduce.streams.wire import Encoding

__all__ = ["CLOUD", "FIGURES", "LARGEST", "scaled_vectors", "seconds_of_sums"]

Array = NDArray[Any]

# The paper gives no latencies: these are as of TCP between virtual machines, and inside a host. A V100 sends 150 GB/s over NVLink.
CLOUD = sar.Network(30e-6, 25e9 / 8, hosts=8, local_latency=5e-6, local_bandwidth=150e9)
_DENSITY = 0.01
_MODELS = {"ResNet-50": 25_000_000, "Transformer": 110_000_000}
LARGEST = 2**18  # simulated values per rank
_CAPTION = (
    "Simulated, float32, {hosts} hosts of {lanes} ranks; between hosts " + described(CLOUD) + ", inside them 5 µs and 150 GB/s; vectors "
    "of N / s values on a network with 1 / s of the bandwidth, which takes the same time."
)


def seconds_of_sums(arrays: Sequence[Array], network: Network, lanes: int) -> dict[str, float]:
    """Return the time of each way to add the arrays of all ranks, with ``lanes`` ranks on each host."""
    ranks, size = len(arrays), len(arrays[0])
    k = max(lanes, round(_DENSITY * size))
    chosen = [ExactTopK(k)(array) for array in arrays]
    dense = [sar.SparseStream.from_dense(array) for array in arrays]
    return {
        "TreeAR": float(run([tree_allreduce(array, rank, ranks, lanes) for rank, array in enumerate(arrays)], network).time),
        "2DTAR": float(sar.simulate(dense, "dense_torus", network).time),
        "NaiveAG": float(run([ring_allgather(stream, rank, ranks) for rank, stream in enumerate(chosen)], network).time),
        "TopkA (here)": float(sar.simulate(arrays, [sar.TopkA(size, k) for _ in arrays], network).time),
        "HiTopKComm": float(sar.simulate(arrays, [sar.HiTopK(size, k) for _ in arrays], network).time),
    }


def _shape(settings: Settings) -> tuple[int, int]:
    """Return the number of hosts, and of ranks on each."""
    return (4, 2) if settings.small else (16, 8)


def scaled_vectors(size: int, most: int, shape: tuple[int, int], seed: int = 0) -> tuple[list[Array], Network]:
    """Return vectors of at most ``most`` values for all ranks, and the network on which they take as long as ``size`` values."""
    hosts, lanes = shape
    factor = -(-size // most)
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(size // factor).astype(np.float32) for _ in range(hosts * lanes)]
    bandwidths = {"bandwidth": CLOUD.bandwidth / factor, "local_bandwidth": CLOUD.near_bandwidth / factor}
    return arrays, CLOUD._replace(hosts=lanes, **bandwidths)


def _aggregation(settings: Settings) -> Picture:
    """Draw CommLib's figure 7: the time of four ways to add the vectors, over their size."""
    sizes = settings.sizes((2**14, 2**16), [million * 1_000_000 for million in (1, 4, 16, 25, 64, 110)])
    times: dict[str, list[float]] = {}
    for size in sizes:
        arrays, network = scaled_vectors(size, 2**10 if settings.small else LARGEST, _shape(settings), settings.seed)
        for name, time in seconds_of_sums(arrays, network, _shape(settings)[1]).items():
            times.setdefault(name, []).append(time)
    panel = Panel(
        f"{_shape(settings)[0]} hosts of {_shape(settings)[1]} ranks: less is better", Quantity("values, N", "count"), SECONDS,
        [Line(name, sizes, each, kind="simulated") for name, each in times.items()],
    )  # fmt: skip
    caption = _caption(settings) + " NaiveAG gathers the selected values in a ring; the paper's values have 16 bits."
    return Picture("CommLib 7: time of a sum, k = 1 % of N", [panel], caption)


def _caption(settings: Settings) -> str:
    hosts, lanes = _shape(settings)
    return _CAPTION.format(hosts=hosts, lanes=lanes)


def _breakdown(settings: Settings) -> Picture:
    """Draw CommLib's figure 8: the four steps of HiTopKComm."""
    names = ("reduce-scatter inside hosts", "selection (MSTopK)", "allgather between hosts", "allgather inside hosts")
    parts: dict[str, list[float]] = {name: [] for name in names}
    for size in _MODELS.values():
        size = 2**14 if settings.small else size
        into, between, inside = _seconds_of_steps(settings, size)
        for name, seconds in zip(names, (into, _selecting(size // _shape(settings)[1], settings.seed), between, inside)):
            parts[name].append(seconds)
    labels = [f"{name}, {size // 1_000_000} million" for name, size in _MODELS.items()]
    panel = Bars("Less is better", Quantity("time", "s", False), labels, parts)
    caption = _caption(settings) + " Selection is measured on one core here; the paper has a GPU."
    return Picture("CommLib 8: parts of HiTopKComm, k = 1 % of N", [panel], caption)


def _seconds_of_steps(settings: Settings, size: int) -> tuple[float, float, float]:
    """Return the seconds inside hosts, between them, and inside again, of the slowest ranks."""
    arrays, network = scaled_vectors(size, 2**10 if settings.small else LARGEST, _shape(settings), settings.seed)
    reducers = [sar.HiTopK(len(array), max(_shape(settings)[1], round(_DENSITY * len(array)))) for array in arrays]
    marks: list[list[float]] = [[] for _ in arrays]
    operations = [reducer.planned(array) for reducer, array in zip(reducers, arrays)]
    run([_marked(each.run(rank, len(arrays)), marks[rank]) for rank, each in enumerate(operations)], network, encoding=Encoding())
    _, reduced, gathering, end = np.max(marks, axis=0).tolist()
    return reduced, gathering - reduced, end - gathering


def _marked(schedule: Generator[Step, Any, Any], marks: list[float]) -> Generator[Step, Any, Any]:
    """Run a schedule, and append to ``marks`` the times before and after its steps inside a host."""
    value = None
    while True:
        try:
            step = schedule.send(value)
        except StopIteration as stop:
            return stop.value
        if isinstance(step, HostReduceScatter | HostGather):
            marks.append((yield Clock()))
            value = yield step
            marks.append((yield Clock()))
        else:
            value = yield step


def _selecting(size: int, seed: int) -> float:
    """Return the median seconds of five selections from the part of one rank."""
    values = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    select, times = MSTopK(max(1, round(_DENSITY * size))), []
    for _ in range(6):
        start = perf_counter()
        select(values)
        times.append(perf_counter() - start)
    return float(np.median(times[1:]))


FIGURES = (
    Figure("commlib-7", "time of a sum by four methods, 16 hosts of 8 ranks",
           lambda settings: on_first(settings, lambda: _aggregation(settings))),
    Figure("commlib-8", "time of each step of HiTopKComm", lambda settings: on_first(settings, lambda: _breakdown(settings))),
)  # fmt: skip
