"""The time of lossy sums: figures of Ok-Topk (7, 8, 10, 12), gTop-k (8 to 11) and the thesis (5.15)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.paper_figures.settings import ETHERNET, PIZ_DAINT, Figure, Settings, described, on_first
from sparseallreduce.cli.pictures.panels import RANKS, SECONDS, AnyPanel, Bars, Line, Panel, Picture, Quantity
from sparseallreduce.reducers import REDUCERS
from sparseallreduce.reducers.base import Reducer
from sparseallreduce.runtime.objects import agreed
from sparseallreduce.runtime.simulator import Network
from sparseallreduce.streams.selection import ApproximateTopK

__all__ = ["FIGURES"]

Array = NDArray[Any]

_LARGEST = 1 << 23  # simulated values on all ranks together
_TIME = Quantity("time", "s", False)
_SCALED = (
    "Simulated with vectors of N / s values on a network with 1 / s of the bandwidth, which takes the same time; times of selection and "
    "additions are measured on a core here and multiplied by s."
)
_NAMES = {"dense": "Dense", "topka": "TopkA", "topkdsa": "TopkDSA", "gtopk": "gTopk", "gaussiank": "Gaussiank", "oktopk": "Ok-Topk"}


def _gradients(size: int, ranks: int, seed: int, skew: float = 0.0) -> list[Array]:
    """Return accumulators of all ranks with few large values, as in networks: Laplace-distributed and partly correlated.

    With ``skew`` large values are close together: the scale falls with the position by a power law.
    """
    rng = np.random.default_rng(seed)
    scale = (np.arange(1, size + 1) ** -skew).astype(np.float32)
    common = rng.laplace(size=size).astype(np.float32)
    return [scale * (common + rng.laplace(size=size).astype(np.float32)) for _ in range(ranks)]


def _scaled(size: int, ranks: int, network: Network) -> tuple[int, int, Network]:
    """Return a smaller size, the factor by which it is smaller, and a network on which it takes the same time."""
    factor = max(1, -(-size * ranks // _LARGEST))
    gamma, dense = network.gamma * factor, (network.gamma_dense or 0.0) * factor
    return size // factor, factor, network._replace(bandwidth=network.bandwidth / factor, gamma=gamma, gamma_dense=dense)


def _steady_time(make: Callable[[], Reducer], gradients: Sequence[Array], network: Network) -> float:
    """Return the seconds of the second of two operations, which may reuse thresholds and boundaries."""
    reducers = [make() for _ in gradients]
    sar.simulate(gradients, reducers, network)
    return float(sar.simulate(gradients, reducers, network).time)


def _balancing(settings: Settings) -> Picture:
    """Draw Ok-Topk's figure 7: the speedup of each of its two ways of balancing."""
    size, density = (2**14, 0.01) if settings.small else (2**27, 0.01)
    ranks = settings.sizes((4, 8), (16, 32, 64))
    parts: dict[str, list[Line]] = {"boundaries": [], "data": []}
    times: dict[str, list[float]] = {name: [] for name in ("balanced", "equal regions", "no data balancing")}
    for count in ranks:
        small, _, network = _scaled(size, count, PIZ_DAINT)
        gradients, k = _gradients(small, count, settings.seed, skew=0.3), max(1, round(density * small))
        for name, options in (("balanced", {"max_imbalance": 1.0}), ("equal regions", {"balance_boundaries": False, "max_imbalance": 1.0}),
                              ("no data balancing", {"max_imbalance": None})):  # fmt: skip
            times[name].append(_steady_time(partial(sar.OkTopk, small, k, **options), gradients, network))
    for part, other, label in (
        ("boundaries", "equal regions", "balanced reduce over naive reduce"),
        ("data", "no data balancing", "balance and allgatherv over allgatherv"),
    ):
        gains = [slow / quick for slow, quick in zip(times[other], times["balanced"])]
        parts[part].append(Line(label, ranks, gains, kind="simulated"))
    gain = Quantity("speedup of the whole operation", "", False)
    panels: list[AnyPanel] = [
        Panel("Regions with equal numbers of entries: more is better", RANKS, gain, parts["boundaries"], level=1.0),
        Panel("Entries balanced before the allgather: more is better", RANKS, gain, parts["data"], level=1.0),
    ]
    caption = f"Simulated, {described(PIZ_DAINT)}; large values of the gradients are close together. {_SCALED}"
    return Picture(f"Ok-Topk 7: speedup by balancing, N = {size:,}, k = 1 % of N", panels, caption)


def _breakdown(
    settings: Settings, title: str, size: int, ranks: Sequence[int], density: float, names: Sequence[str], network: Network
) -> Picture:
    """Draw seconds of selection and communication: one bar for each method, one panel for each number of ranks."""
    size = 2**14 if settings.small else size
    panels: list[AnyPanel] = []
    for count in settings.sizes((2, 4), ranks):
        rows = [_seconds(name, size, count, density, network, settings.seed) for name in names]
        parts = {"sparsification": [row[0] for row in rows], "communication": [row[1] for row in rows]}
        panels.append(Bars(f"P = {count}: less is better", _TIME, [_NAMES[name] for name in names], parts))
    caption = f"Communication simulated, {described(network)}. {_SCALED} The time to compute gradients is not included."
    return Picture(f"{title}, N = {size:,}, k = {100 * density:g} % of N", panels, caption)


def _seconds(name: str, size: int, ranks: int, density: float, network: Network, seed: int) -> tuple[float, float]:
    """Return the seconds of a method's selection and of its communication."""
    small, _, scaled = _scaled(size, ranks, network)
    gradients, k = _gradients(small, ranks, seed), max(1, round(density * small))
    if name == "dense":
        return 0.0, float(sar.simulate([sar.SparseStream.from_dense(gradient) for gradient in gradients], "dense", scaled).time)
    return _selecting(name, size, density, seed), _steady_time(partial(REDUCERS[name], small, k), gradients, scaled)


@cache
def _selecting(name: str, size: int, density: float, seed: int) -> float:
    """Return the seconds that selection takes on one rank, from those of fewer values: the median of five, after a warm-up."""
    part, times = min(size, _LARGEST // 4), []
    reducer, gradient = REDUCERS[name](part, max(1, round(density * part))), _gradients(part, 1, seed)[0]
    for _ in range(6):
        start = perf_counter()
        reducer.allreduce(gradient, sar.SERIAL)
        times.append(perf_counter() - start)
    return float(np.median(times[1:])) * size / part


def _allreduces(settings: Settings) -> Picture:
    """Draw gTop-k's figure 9: time of the three allreduces over the number of workers and the size."""
    names, density = ("dense", "topka", "gtopk"), 0.001
    ranks, fixed = settings.sizes((2, 4), (4, 8, 16, 32)), 4 if settings.small else 32
    sizes, size = (
        settings.sizes((2**12, 2**14), [million * 1_000_000 for million in (1, 5, 10, 25, 50)]),
        2**14 if settings.small else 25_000_000,
    )
    by_ranks = [[_seconds(name, size, count, density, ETHERNET, settings.seed)[1] for count in ranks] for name in names]
    by_size = [[_seconds(name, each, fixed, density, ETHERNET, settings.seed)[1] for each in sizes] for name in names]
    panels: list[AnyPanel] = [
        Panel(f"N = {size:,}: less is better", RANKS, SECONDS,
              [Line(_NAMES[name], ranks, times, kind="simulated") for name, times in zip(names, by_ranks)]),
        Panel(f"P = {fixed}: less is better", Quantity("parameters, N", "count"), SECONDS,
              [Line(_NAMES[name], sizes, times, kind="simulated") for name, times in zip(names, by_size)]),
    ]  # fmt: skip
    return Picture("gTop-k 9: time of an allreduce, k = 0.1 % of N", panels, f"Simulated, {described(ETHERNET)}. {_SCALED}")


def _messages(settings: Settings) -> Picture:
    """Draw gTop-k's figure 8: the time of a message over its size, measured between the first two ranks. Collective."""
    sizes = settings.sizes((2**8, 2**12), [2**power for power in range(8, 21)])  # values of 4 bytes
    found = agreed(settings.comm, lambda: [_message_seconds(settings.comm, size, 3 if settings.small else 11) for size in sizes])
    if settings.comm.rank:
        return Picture("", [])
    lines = [
        Line("the paper's cluster: α + β m", sizes, [ETHERNET.latency + 4 * size / ETHERNET.bandwidth for size in sizes], kind="simulated")
    ]
    title, caption = "Message between two ranks", "Simulated, because one rank was started: mpiexec -n 2 measures messages between two."
    if settings.comm.size > 1:
        low, median, high = (list(each) for each in zip(*found))
        lines.insert(0, Line("here", sizes, median, low, high))
        beta, alpha = np.polyfit(sizes, median, 1, w=1 / np.array(median))
        title += f", α = {1e6 * alpha:.3g} µs, β = {1e9 * beta:.3g} ns per value"
        caption = "Measured here between the first two ranks: medians of half the time there and back, and quartiles."
    panel = Panel(f"{title}: less is better", Quantity("values of 4 bytes, m", "count"), SECONDS, lines)
    return Picture("gTop-k 8: time of a message", [panel], f"{caption} The paper's cluster: {described(ETHERNET)}.")


def _message_seconds(comm: Any, size: int, repeats: int) -> tuple[float, float, float]:
    """Return quartiles of the time of a message between ranks 0 and 1; zeros on other ranks, and if there is only one."""
    if comm.size < 2 or comm.rank > 1:
        return 0.0, 0.0, 0.0
    message, other, times = np.zeros(size, np.float32), 1 - comm.rank, []
    for _ in range(repeats + 1):
        start = perf_counter()
        for sender in (0, 1):
            if comm.rank == sender:
                comm.Send(message, other)
            else:
                comm.Recv(message, other)
        times.append((perf_counter() - start) / 2)
    low, median, high = np.quantile(times[1:], [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def _efficiency(settings: Settings) -> Picture:
    """Draw gTop-k's figure 10: the fraction of a step that is computing, over the number of workers."""
    ranks, panels = settings.sizes((2, 4), (4, 8, 16, 32)), list[AnyPanel]()
    for name, model in _GTOPK_MODELS.items():
        size, computing, lines = 2**14 if settings.small else model.size, model.seconds, []
        for method in ("dense", "topka", "gtopk"):
            times = [sum(_seconds(method, size, count, 0.001, ETHERNET, settings.seed)) for count in ranks]
            lines.append(Line(_NAMES[method], ranks, [computing / (computing + time) for time in times], kind="simulated"))
        panels.append(Panel(f"{name}, N = {size:,}: higher is better", RANKS, Quantity("scaling efficiency", "share", False), lines))
    return Picture("gTop-k 10: scaling efficiency, k = 0.1 % of N", panels, f"Simulated, {described(ETHERNET)}. {_SCALED} {_COMPUTING}")


def _step_parts(settings: Settings) -> Picture:
    """Draw gTop-k's figure 11: the parts of a step with gTop-k."""
    ranks, rows = (4 if settings.small else 32), []
    for model in _GTOPK_MODELS.values():
        size = 2**14 if settings.small else model.size
        rows.append((model.seconds, *_seconds("gtopk", size, ranks, 0.001, ETHERNET, settings.seed)))
    parts = {name: [row[place] / sum(row) for row in rows] for place, name in enumerate(("computation", "sparsification", "communication"))}
    notes = [f"{1e3 * sum(row):.3g} ms" for row in rows]
    panel = Bars("More computation is better", Quantity("fraction of a step", "share", False), list(_GTOPK_MODELS), parts, notes)
    caption = f"Communication simulated, {described(ETHERNET)}. {_SCALED} {_COMPUTING}"
    return Picture(f"gTop-k 11: parts of a step with gTop-k, P = {ranks}, k = 0.1 % of N", [panel], caption)


def _speedup(settings: Settings) -> Picture:
    """Draw the thesis's figure 5.15: VGG-19, where the dense sum takes as long as computing."""
    size, ranks = 2**14 if settings.small else _VGG_19, 4 if settings.small else 8
    small, _, network = _scaled(size, ranks, PIZ_DAINT)
    gradients = _gradients(small, ranks, settings.seed)
    dense = [sar.SparseStream.from_dense(gradient) for gradient in gradients]
    times = {"SGD": float(sar.simulate(dense, "dense", network).time)}
    for count in (32, 8, 2):
        chosen = [ApproximateTopK(max(1, small * count // 512), seed=rank)(gradient) for rank, gradient in enumerate(gradients)]
        times[f"Top{count}"] = float(sar.simulate(chosen, "ssar_recursive_doubling", network).time)
    computing, steps = times["SGD"], [2 * times["SGD"] / (times["SGD"] + time) for time in times.values()]
    parts = {"computation": [computing] * len(times), "communication": list(times.values())}
    panel = Bars("Less is better", _TIME, list(times), parts, [f"{gain:.2f} times as fast" for gain in steps])
    caption = (
        f"Simulated, P = {ranks}, {described(PIZ_DAINT)}. {_SCALED} As in the thesis, computing takes as long as the dense sum, so that "
        "nothing is more than twice as fast; selection is not included. TopN: N of every 512 values, by recursive doubling."
    )
    return Picture(f"Thesis 5.15: a step of VGG-19, N = {size:,}", [panel], caption)


def _figure(name: str, summary: str, make: Callable[..., Picture], **options: Any) -> Figure:
    return Figure(name, summary, lambda settings: on_first(settings, lambda: make(settings, **options)))


class _Model(NamedTuple):
    """A model of gTop-k's table III, and its speed on one GPU, which the paper does not give."""

    size: int  # parameters
    batch: int  # samples per worker and step
    speed: float  # samples per second, assumed

    @property
    def seconds(self) -> float:
        """The time to compute a step."""
        return self.batch / self.speed


_GTOPK_MODELS = {
    "VGG-16": _Model(14_728_266, 128, 2500),
    "ResNet-20": _Model(269_722, 128, 6000),
    "AlexNet": _Model(61_100_840, 64, 1500),
    "ResNet-50": _Model(25_557_032, 256, 200),
}
_COMPUTING = (
    "The paper gives no computing times; assumed are "
    + ", ".join(f"{name} {1e3 * model.seconds:.0f} ms" for name, model in _GTOPK_MODELS.items())
    + "."
)
_VGG, _LSTM, _BERT, _VGG_19 = 14_728_266, 27_569_568, 133_547_324, 143_667_240  # parameters
_NETWORK = {"names": tuple(_NAMES), "network": PIZ_DAINT}

FIGURES = (
    _figure("thesis-5.15", "a step of VGG-19 with dense and with selected values", _speedup),
    _figure("oktopk-7", "speedup by balancing the regions and the data", _balancing),
    _figure("oktopk-8", "weak scaling, size of VGG-16", _breakdown, title="Ok-Topk 8: VGG-16", size=_VGG, ranks=(16, 32),
            density=0.02, **_NETWORK),
    _figure("oktopk-10", "weak scaling, size of the LSTM", _breakdown, title="Ok-Topk 10: LSTM", size=_LSTM, ranks=(32, 64),
            density=0.02, **_NETWORK),
    _figure("oktopk-12", "weak scaling, size of BERT", _breakdown, title="Ok-Topk 12: BERT", size=_BERT, ranks=(32, 64, 256),
            density=0.01, **_NETWORK),
    Figure("gtopk-8", "time of a message over its size; mpiexec -n 2 measures it", _messages),
    _figure("gtopk-9", "time of dense, Top-k and gTop-k allreduce", _allreduces),
    _figure("gtopk-10", "scaling efficiency with dense, Top-k and gTop-k sums", _efficiency),
    _figure("gtopk-11", "parts of a step with gTop-k", _step_parts),
)  # fmt: skip
