"""How training converges: figures of Ok-Topk (9, 11, 13), gTop-k (5 to 7, 12 to 14), CommLib (10) and the thesis (5.13 to 5.17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from sparseallreduce.cli.paper_figures.learning import Epoch, Method, Training, method_of
from sparseallreduce.cli.paper_figures.settings import ETHERNET, PIZ_DAINT, Figure, Settings, described, on_first
from sparseallreduce.cli.paper_figures.tasks import make_task
from sparseallreduce.cli.pictures.panels import Line, Panel, Picture, Quantity
from sparseallreduce.runtime.simulator import Network

__all__ = ["FIGURES"]

_EPOCHS, _PREVIEW = 20, 3
_BATCH = {"softmax": 320, "perceptron": 320, "recurrent": 80}  # samples in a step, over all ranks
_EVERY = ("dense", "topka", "topkdsa", "gtopk", "gaussiank", "oktopk")
_EPOCH = Quantity("epoch", "whole", False)
_TIME = Quantity("time of selection and communication", "s", False)
_Y = {
    "accuracy": (Quantity("correct on test samples", "share", False), "higher"),
    "error": (Quantity("wrong on test samples", "share", False), "lower"),
    "loss": (Quantity("training loss", ""), "lower"),
}


@dataclass(frozen=True)
class Curves:
    """Trainings of one model that are drawn in the same panels."""

    model: str
    ranks: tuple[int, ...]
    methods: tuple[Method, ...]
    show: tuple[str, ...] = ("loss over epochs",)  # one panel for each
    batch: int = 0  # samples in a step, over all ranks; 0 for the usual number
    each: int = 0  # samples in a step on each rank, instead
    times: int = 1  # width of the model

    def panels(self, settings: Settings, network: Network) -> list[Panel]:
        """Train, and return one panel for each of ``show``."""
        epochs = _PREVIEW if settings.small else _EPOCHS
        task = make_task(self.model, settings.small, settings.seed, self.times)
        found: list[tuple[str, str, list[Epoch]]] = []
        for count in [min(count, 4) for count in self.ranks[:2]] if settings.small else self.ranks:
            batch = self.each * count or self.batch or _BATCH[self.model]
            for method in self.methods:
                training = Training(task, method, count, min(batch, task.count), epochs, network, settings.seed)
                found.append((method.label, f"P = {count}" if len(self.ranks) > 1 else "", list(training.run())))
        title = f"{task.title}, N = {task.size:,}"
        if self.batch or self.each:
            title += f", {self.batch} samples per step" if self.batch else f", {self.each} samples per rank and step"
        return [self._panel(title, show, found) for show in self.show]

    def _panel(self, title: str, show: str, found: Sequence[tuple[str, str, list[Epoch]]]) -> Panel:
        what, over = show.split(" over ")
        y, better = _Y[what]
        lines = [
            Line(
                label,
                list(range(1, len(epochs) + 1)) if over == "epochs" else [epoch.seconds for epoch in epochs],
                [epoch.loss if what == "loss" else epoch.accuracy if what == "accuracy" else 1 - epoch.accuracy for epoch in epochs],
                kind="simulated" if over == "time" else "measured",
                what=ranks,
            )
            for label, ranks, epochs in found
        ]
        return Panel(f"{title}: {better} is better", _EPOCH if over == "epochs" else _TIME, y, lines)


def _make(settings: Settings, title: str, curves: Sequence[Curves], network: Network) -> Picture:
    def made() -> Picture:
        panels: list[Any] = [panel for each in curves for panel in each.panels(settings, network)]
        counts = dict.fromkeys(min(count, 4) if settings.small else count for each in curves for count in each.ranks)
        timed = any("time" in show for each in curves for show in each.show)
        ways = [method for each in curves for method in each.methods]
        caption = f"Small models instead of the paper's networks; error feedback. P = {', '.join(map(str, counts))} simulated ranks"
        if timed:
            slow = " (1 Gbit/s, on which small models communicate for most of a step)" if network == ETHERNET else ""
            caption += f", {described(network)}{slow}; time of selection measured here, computing not included."
            if network != ETHERNET:
                caption += " A dense sum of so few values takes less than a selection; Ok-Topk 8, 10 and 12 have the paper's numbers."
        else:
            caption += "."
        if any(method.warm_up for method in ways):
            caption += " The first four of 20 epochs have densities of 25, 7.25, 1.5 and 0.4 %, as in the paper."
        return Picture(title, panels, caption + _coinciding(panels))

    return on_first(settings, made)


def _coinciding(panels: Sequence[Panel]) -> str:
    """Return which lines of all panels lie on each other, as a sentence; empty if none do."""
    drawn = [{line.label: np.array(line.y, float) for line in panel.lines} for panel in panels]
    pairs = combinations([line.label for line in panels[0].lines if not line.what], 2)
    in_all = [(first, second) for first, second in pairs if all(first in ys and second in ys for ys in drawn)]
    same = [f"{first} and {second}" for first, second in in_all if all(np.allclose(ys[first], ys[second], rtol=0.01) for ys in drawn)]
    return f" The lines of {', '.join(same)} coincide." if same else ""


def _figure(name: str, summary: str, title: str, *curves: Curves, network: Network = ETHERNET) -> Figure:
    return Figure(name, summary, lambda settings: _make(settings, title, curves, network))


def _methods(density: float, *names: str, warm_up: bool = False) -> tuple[Method, ...]:
    return tuple(method_of(name, density, warm_up) for name in names)


_DENSE_GTOPK = _methods(0.001, "dense", "gtopk", warm_up=True)
_AGAINST = _methods(0.001, "topka", "gtopk")
_DENSITIES = (
    method_of("dense"),
    *(method_of("gtopk", density, True, f"gTopk, {100 * density:g} %") for density in (0.005, 0.001, 0.0005)),
)
_TOPK = _methods(0.001, "dense", "topka", "MSTopK")
_BY_EPOCH = ("loss over epochs", "accuracy over epochs")
_BOTH_AXES = ("loss over epochs", "loss over time")

FIGURES = (
    _figure("thesis-5.13", "SGD and TopK on 4, 8 and 32 nodes", "Thesis 5.13: SGD and TopK, 32 of every 512 values",
            Curves("perceptron", (4, 8, 32), _methods(1.0, "dense", "Top32"), _BY_EPOCH, each=16),
            network=PIZ_DAINT),
    _figure("thesis-5.14", "TopK with 32, 8 and 2 of every 512 values, 8 nodes", "Thesis 5.14: TopK with 32, 8 and 2 of every 512 values",
            Curves("perceptron", (8,), _methods(1.0, "dense", "Top32", "Top8", "Top2"), _BY_EPOCH, each=16),
            network=PIZ_DAINT),
    _figure("thesis-5.16", "fully connected network: error over epochs and time, 8 nodes", "Thesis 5.16: a fully connected network",
            Curves("perceptron", (8,), _methods(1.0, "dense", "Top8"), (*_BOTH_AXES, "accuracy over time"), each=16, times=4)),
    _figure("thesis-5.17", "recurrent network: error over epochs and time, 8 nodes", "Thesis 5.17: a recurrent network",
            Curves("recurrent", (8,), _methods(1.0, "dense", "Top8"), _BOTH_AXES)),
    _figure("oktopk-9", "accuracy over time", "Ok-Topk 9: accuracy, k = 2 % of N",
            Curves("perceptron", (16,), _methods(0.02, *_EVERY), ("accuracy over time",)), network=PIZ_DAINT),
    _figure("oktopk-11", "error rate over time", "Ok-Topk 11: error, k = 2 % of N",
            Curves("recurrent", (32,), _methods(0.02, *_EVERY), ("error over time",)), network=PIZ_DAINT),
    _figure("oktopk-13", "training loss over time", "Ok-Topk 13: loss, k = 1 % of N",
            Curves("softmax", (32,), _methods(0.01, "dense", "gaussiank", "oktopk"), ("loss over time",)), network=PIZ_DAINT),
    _figure("gtopk-5", "convergence of two models, 4 workers", "gTop-k 5: convergence, k = 0.1 % of N",
            Curves("perceptron", (4,), _DENSE_GTOPK), Curves("softmax", (4,), _DENSE_GTOPK)),
    _figure("gtopk-6", "convergence of two larger models, 4 workers", "gTop-k 6: convergence, k = 0.1 % of N",
            Curves("perceptron", (4,), _DENSE_GTOPK, times=4), Curves("softmax", (4,), _DENSE_GTOPK, times=2)),
    _figure("gtopk-7", "convergence of a recurrent network, 4 workers", "gTop-k 7: convergence, k = 0.5 % of N",
            Curves("recurrent", (4,), _methods(0.005, "dense", "gtopk", warm_up=True))),
    _figure("gtopk-12", "convergence by density, 4 workers", "gTop-k 12: convergence by density",
            Curves("perceptron", (4,), _DENSITIES), Curves("softmax", (4,), _DENSITIES)),
    _figure("gtopk-13", "gTop-k and Top-k, many samples per step, 32 workers", "gTop-k 13: accuracy, k = 0.1 % of N",
            Curves("softmax", (32,), _AGAINST, ("accuracy over epochs",), batch=320),
            Curves("perceptron", (32,), _AGAINST, ("accuracy over epochs",), batch=320)),
    _figure("gtopk-14", "gTop-k and Top-k, other numbers of samples, 32 workers", "gTop-k 14: accuracy, k = 0.1 % of N",
            Curves("softmax", (32,), _AGAINST, ("accuracy over epochs",), batch=64),
            Curves("perceptron", (32,), _AGAINST, ("accuracy over epochs",), batch=640)),
    _figure("commlib-10", "convergence with MSTopK, exact Top-k and dense sums", "CommLib 10: convergence, k = 0.1 % of N",
            *(Curves(model, (16,), _TOPK, ("accuracy over epochs",)) for model in ("perceptron", "softmax", "recurrent"))),
)  # fmt: skip
