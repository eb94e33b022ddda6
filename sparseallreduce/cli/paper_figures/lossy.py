"""Figures of Ok-Topk (7 to 13), gTop-k (5 to 14) and CommLib (6, 10): the time of lossy sums, and how training converges with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.cli.paper_figures.learning import CLASSES, epochs_of, make_task
from sparseallreduce.cli.paper_figures.settings import ETHERNET, PIZ_DAINT, Figure, Settings, described
from sparseallreduce.cli.pictures.panels import RANKS, SECONDS, AnyPanel, Bars, Line, Panel, Picture, Quantity
from sparseallreduce.reducers import REDUCERS
from sparseallreduce.reducers.base import Reducer
from sparseallreduce.reducers.topka import TopkA
from sparseallreduce.runtime.objects import agreed
from sparseallreduce.runtime.simulator import Network
from sparseallreduce.streams.selection import DoubleSampling, ExactTopK, MSTopK

__all__ = ["FIGURES"]

Array = NDArray[Any]

_LARGEST = 1 << 23  # simulated values on all ranks together
_TIME = Quantity("time", "s", False)
_SCALED = (
    "Simulated with vectors of N / s values on a network with 1 / s of the bandwidth, which takes the same time; times of selection and "
    "additions are measured on a core here and multiplied by s."
)
_NAMES = {"dense": "Dense", "topka": "TopkA", "topkdsa": "TopkDSA", "gtopk": "gTopk", "gaussiank": "Gaussiank", "oktopk": "Ok-Topk"}


def _on_first(settings: Settings, make: Callable[[], Picture]) -> Picture:
    """Let rank 0 simulate; collective. Return an empty picture on the other ranks."""
    return agreed(settings.comm, lambda: make() if settings.comm.rank == 0 else Picture("", []), patient=True)


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
        small, factor, scaled = _scaled(size, count, network)
        gradients, k = _gradients(small, count, settings.seed), max(1, round(density * small))
        select, communicate = [], []
        for name in names:
            if name == "dense":
                streams = [sar.SparseStream.from_dense(gradient) for gradient in gradients]
                select.append(0.0)
                communicate.append(float(sar.simulate(streams, "dense", scaled).time))
                continue
            select.append(factor * _selecting(partial(REDUCERS[name], small, k), gradients[0]))
            communicate.append(_steady_time(partial(REDUCERS[name], small, k), gradients, scaled))
        parts = {"sparsification": select, "communication": communicate}
        panels.append(Bars(f"P = {count}: less is better", _TIME, [_NAMES[name] for name in names], parts))
    caption = f"Communication simulated, {described(network)}. {_SCALED} The time to compute gradients is not included."
    return Picture(f"{title}, N = {size:,}, k = {100 * density:g} % of N", panels, caption)


def _selecting(make: Callable[[], Reducer], gradient: Array) -> float:
    """Return the seconds that selection takes: the median of three operations on one rank, after a warm-up."""
    reducer, times = make(), []
    for _ in range(4):
        start = perf_counter()
        reducer.allreduce(gradient, sar.SERIAL)
        times.append(perf_counter() - start)
    return float(np.median(times[1:]))


def _learning(
    settings: Settings, title: str, ranks: int, densities: Sequence[float], names: Sequence[str], show: str, batches: Sequence[int] = (320,)
) -> Picture:
    """Draw accuracy, loss or error over time or epochs: one line for each method, one panel for each density or batch size."""
    features, epochs = (256, 3) if settings.small else (4096, 20)
    task, ranks = make_task(features, settings.seed), min(ranks, 4) if settings.small else ranks
    network = PIZ_DAINT if "Ok" in title else ETHERNET
    panels: list[AnyPanel] = []
    for density in densities:
        for batch in batches[:1] if settings.small else batches:
            lines = []
            for name in names:
                make = None if name == "dense" else partial(_reducer, name, density)
                found = list(epochs_of(task, make, ranks, batch, epochs, network, settings.seed))
                lines.append(_curve(_NAMES.get(name, name), found, show))
            what = f"k = {100 * density:g} % of N" + (f", {batch} samples per step" if len(batches) > 1 else "")
            panels.append(Panel(f"{what}: {'higher' if 'accuracy' in show else 'lower'} is better", *_axes(show), lines))
    caption = (
        f"Softmax regression on {features:,} random features of scikit-learn's digits, N = {features * CLASSES:,}, instead of the paper's "
        f"network; error feedback. P = {ranks} ranks simulated, {described(network)}; time of selection measured here."
    )
    return Picture(title, panels, caption)


def _reducer(name: str, density: float, size: int) -> Reducer:
    k = max(1, round(density * size))
    return TopkA(size, k, selector=MSTopK) if name == "MSTopK" else REDUCERS[name](size, k)


def _axes(show: str) -> tuple[Quantity, Quantity]:
    what, over = show.split(" over ")
    x = Quantity("epoch", "whole", False) if over == "epochs" else Quantity("time of selection and communication", "s", False)
    return x, {"accuracy": Quantity("test samples classified correctly", "share", False), "loss": Quantity("training loss", ""),
               "error": Quantity("test samples classified wrongly", "share", False)}[what]  # fmt: skip


def _curve(name: str, epochs: Sequence[Any], show: str) -> Line:
    what, over = show.split(" over ")
    y = [epoch.loss if what == "loss" else epoch.accuracy if what == "accuracy" else 1 - epoch.accuracy for epoch in epochs]
    x = list(range(1, len(epochs) + 1)) if over == "epochs" else [epoch.seconds for epoch in epochs]
    return Line(name, x, y, kind="simulated" if over == "time" else "measured")


def _allreduces(settings: Settings) -> Picture:
    """Draw gTop-k's figure 9: time of the three allreduces over the number of workers and the size."""
    names, density = ("dense", "topka", "gtopk"), 0.001
    ranks, fixed = settings.sizes((2, 4), (4, 8, 16, 32)), 4 if settings.small else 32
    sizes, size = (
        settings.sizes((2**12, 2**14), [million * 1_000_000 for million in (1, 5, 10, 25, 50)]),
        2**14 if settings.small else 25_000_000,
    )
    by_ranks = [[_sum_time(name, size, count, density, settings.seed) for count in ranks] for name in names]
    by_size = [[_sum_time(name, each, fixed, density, settings.seed) for each in sizes] for name in names]
    panels: list[AnyPanel] = [
        Panel(f"N = {size:,}: less is better", RANKS, SECONDS,
              [Line(_NAMES[name], ranks, times, kind="simulated") for name, times in zip(names, by_ranks)]),
        Panel(f"P = {fixed}: less is better", Quantity("parameters, N", "count"), SECONDS,
              [Line(_NAMES[name], sizes, times, kind="simulated") for name, times in zip(names, by_size)]),
    ]  # fmt: skip
    return Picture("gTop-k 9: time of an allreduce, k = 0.1 % of N", panels, f"Simulated, {described(ETHERNET)}. {_SCALED}")


def _sum_time(name: str, size: int, ranks: int, density: float, seed: int) -> float:
    small, _, network = _scaled(size, ranks, ETHERNET)
    gradients = _gradients(small, ranks, seed)
    if name == "dense":
        return float(sar.simulate([sar.SparseStream.from_dense(gradient) for gradient in gradients], "dense", network).time)
    return _steady_time(partial(REDUCERS[name], small, max(1, round(density * small))), gradients, network)


def _selectors(settings: Settings) -> Picture:
    """Draw CommLib's figure 6: time of the selectors over the size."""
    sizes = settings.sizes((2**12, 2**14), [2**power for power in range(18, 26)])
    kinds = {"exact top-k": ExactTopK, "DGC (double sampling)": DoubleSampling, "MSTopK": MSTopK}
    lines = []
    for name, kind in kinds.items():
        times = []
        for size in sizes:
            values, select, found = _gradients(size, 1, settings.seed)[0], kind(max(1, size // 1000)), []
            for _ in range(4):
                start = perf_counter()
                select(values)
                found.append(perf_counter() - start)
            times.append(float(np.median(found[1:])))
        lines.append(Line(name, sizes, times))
    panel = Panel("k = 0.1 % of N: less is better", Quantity("values, N", "count"), SECONDS, lines)
    return Picture("CommLib 6: time of a selection", [panel], "Measured here on one core; the paper has a GPU. Laplace-distributed values.")


def _figure(name: str, summary: str, make: Callable[..., Picture], **options: Any) -> Figure:
    def made(settings: Settings) -> Picture:
        return _on_first(settings, lambda: make(settings, **options))

    return Figure(name, summary, made)


_VGG, _LSTM, _BERT, _RESNET = 14_728_266, 27_569_568, 133_547_324, 25_557_032  # parameters
_EVERY = tuple(_NAMES)
_NETWORK = {"names": _EVERY, "network": PIZ_DAINT}

FIGURES = (
    _figure("oktopk-7", "speedup by balancing the regions and the data", _balancing),
    _figure("oktopk-8", "weak scaling, size of VGG-16", _breakdown, title="Ok-Topk 8: VGG-16", size=_VGG, ranks=(16, 32),
            density=0.02, **_NETWORK),
    _figure("oktopk-9", "accuracy over time", _learning, title="Ok-Topk 9: accuracy", ranks=16, densities=(0.02,),
            names=_EVERY, show="accuracy over time"),
    _figure("oktopk-10", "weak scaling, size of the LSTM", _breakdown, title="Ok-Topk 10: LSTM", size=_LSTM, ranks=(32, 64),
            density=0.02, **_NETWORK),
    _figure("oktopk-11", "error rate over time", _learning, title="Ok-Topk 11: error", ranks=32, densities=(0.02,),
            names=_EVERY, show="error over time"),
    _figure("oktopk-12", "weak scaling, size of BERT", _breakdown, title="Ok-Topk 12: BERT", size=_BERT, ranks=(32, 64, 256),
            density=0.01, **_NETWORK),
    _figure("oktopk-13", "training loss over time", _learning, title="Ok-Topk 13: loss", ranks=32, densities=(0.01,),
            names=("dense", "gaussiank", "oktopk"), show="loss over time"),
    _figure("gtopk-5", "convergence, 4 workers", _learning, title="gTop-k 5 to 7: convergence", ranks=4, densities=(0.001, 0.005),
            names=("dense", "gtopk"), show="loss over epochs"),
    _figure("gtopk-9", "time of dense, Top-k and gTop-k allreduce", _allreduces),
    _figure("gtopk-11", "selection and communication", _breakdown, title="gTop-k 11: ResNet-50", size=_RESNET, ranks=(32,), density=0.001,
            names=("dense", "topka", "gtopk"), network=ETHERNET),
    _figure("gtopk-12", "convergence by density, 4 workers", _learning, title="gTop-k 12: densities", ranks=4,
            densities=(0.01, 0.001, 0.0005), names=("dense", "gtopk"), show="loss over epochs"),
    _figure("gtopk-13", "gTop-k and Top-k by samples per step (13 and 14)", _learning, title="gTop-k 13 and 14: batch sizes", ranks=32,
            densities=(0.001,), names=("topka", "gtopk"), show="accuracy over epochs", batches=(320, 64)),
    _figure("commlib-6", "time of the selectors over the size, on this machine", _selectors),
    _figure("commlib-10", "convergence with MSTopK, exact Top-k and dense sums", _learning, title="CommLib 10: convergence", ranks=16,
            densities=(0.001,), names=("dense", "topka", "MSTopK"), show="accuracy over epochs"),
)  # fmt: skip
