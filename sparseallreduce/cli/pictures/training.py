"""The picture of training runs: losses and accuracies by epoch, time and bytes, time by phase, and the density of sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.cli.pictures.panels import AnyPanel, Bars, Line, Panel, Picture, Quantity

__all__ = ["training_picture"]

Run = dict[str, Any]

# Phases from left to right in a bar, with the numbers of their colours.
_PHASES = {
    "read": 7, "prepare": 4, "compute": 0, "select": 3, "communicate": 1, "wait": 4, "update": 2, "checkpoint": 7, "evaluate": 5,
}  # fmt: skip
_MOST_POINTS = 2000  # points of a curve
_TRAINING, _TEST, _HELD = "training samples", "test samples", "held-out samples"


class _Way(NamedTuple):
    """A measure of training progress: epochs, time or bytes."""

    quantity: Quantity
    of: Callable[[Sequence[Run]], list[float]]


class _Kind(NamedTuple):
    """A kind of metrics that can share an axis."""

    title: str
    name: str
    unit: Any
    log: bool = False


def training_picture(runs: Mapping[str, Run]) -> Picture:
    """Return the picture of reports of ``train``, by the names of the runs."""
    kinds: dict[_Kind, list[tuple[str, str, Sequence[Run], list[float | None]]]] = {}
    for name, run in runs.items():
        for kind, what, values in _figures(run):
            kinds.setdefault(kind, []).append((name, what, run["epochs"], values))
    panels: list[AnyPanel] = []
    ways = list(_ways(runs))
    for kind, curves in kinds.items():
        for way in ways:
            lines = [Line(name, x, values, what=what) for name, what, epochs, values in curves if any(x := way.of(epochs))]
            if not lines:  # all runs have one rank, which sends nothing
                lines = [Line(name, way.of(epochs), values, what=what) for name, what, epochs, values in curves]
            panels.append(Panel(kind.title, way.quantity, Quantity(kind.name, kind.unit, kind.log), lines))
    panels += _searches(runs)
    panels += [_phases(runs), *_densities(runs)]
    return Picture("Training runs", panels, columns=len(ways))


def _ways(runs: Mapping[str, Run]) -> Iterator[_Way]:
    rounds = [not all("steps" in epoch for epoch in run["epochs"]) for run in runs.values()]
    passes = "round" if all(rounds) else "epoch or round" if any(rounds) else "epoch"
    yield _Way(Quantity(passes, "whole", False), lambda epochs: [epoch["epoch"] for epoch in epochs])
    yield _Way(
        Quantity("time of training, without evaluation", "s", False),
        lambda epochs: np.cumsum([_training_seconds(epoch) for epoch in epochs]).tolist(),
    )
    if any(epoch["bytes_sent"] for run in runs.values() for epoch in run["epochs"]):
        yield _Way(
            Quantity("bytes sent by all ranks", "B", False), lambda epochs: np.cumsum([epoch["bytes_sent"] for epoch in epochs]).tolist()
        )


def _training_seconds(epoch: Run) -> float:
    return float(sum(seconds for phase, seconds in epoch["seconds"].items() if phase not in ("total", "evaluate")))


def _figures(run: Run) -> Iterator[tuple[_Kind, str, list[float | None]]]:
    """Yield the metrics of a run: their kind, the name of the samples, and the values by epoch."""
    epochs, arguments = run["epochs"], run.get("arguments") or {}
    loss = " ".join(str(arguments[name]) for name in ("model", "loss") if arguments.get(name))
    loss = loss.replace("_", " ")
    evaluated = [epoch["loss"] if epoch.get("evaluated", True) else None for epoch in epochs]
    if any(value is not None for value in evaluated):
        yield _Kind(f"Training loss and penalty, {loss}: lower is better", "loss", ""), _TRAINING, evaluated
    else:
        yield _Kind(f"Loss before each step, {loss}: lower is better", "progressive loss", ""), _TRAINING, [e["loss"] for e in epochs]
    for of, what in (("test", _TEST), ("validation", _HELD)):
        values = [epoch.get(f"{of}_loss") for epoch in epochs]
        if any(value is not None for value in values):
            yield _Kind(f"Loss without penalty, {loss}: lower is better", "loss", ""), what, values
    for of, what in (("train", _TRAINING), ("test", _TEST), ("validation", _HELD)):
        values = [epoch.get(f"{of}_accuracy") for epoch in epochs]
        if any(value is not None for value in values):
            yield _Kind("Accuracy: higher is better", "samples classified correctly", "share"), what, values


def _searches(runs: Mapping[str, Run]) -> Iterator[Panel]:
    """Yield panels of searches over penalties: the result of each model on the held-out samples, by folds or in its best epoch."""
    for parameter, name in (("C", "C"), ("l2", "factor of the penalty, L2")):
        for figure, title, quantity in (
            ("validation_accuracy", "accuracy on held-out samples: higher is better", Quantity("accuracy", "share", False)),
            ("validation_loss", "loss on held-out samples: lower is better", Quantity("loss", "", False)),
        ):
            lines = [line for run_name, run in runs.items() for line in _searched(run_name, run, parameter, figure)]
            if lines:
                folds = "mean and range of the folds, " if any(line.low for line in lines) else ""
                yield Panel(f"Search, {folds}{title}", Quantity(name), quantity, lines)
                break


def _searched(name: str, run: Run, parameter: str, figure: str) -> Iterator[Line]:
    candidates = [each for each in (run.get("search") or {}).get("candidates") or () if parameter in each and figure in each]
    if len(candidates) > 1:
        rows = [(each[parameter], each[figure]["mean"], min(each[figure]["folds"]), max(each[figure]["folds"])) for each in candidates]
        x, y, low, high = zip(*sorted(rows))
        yield Line(name, list(x), list(y), list(low), list(high))
        return
    models = [model for model in run.get("models") or () if model.get(parameter) is not None]
    points = sorted((model[parameter], value) for model in models if (value := _best(model, figure)) is not None)
    if len(points) > 1:
        yield Line(name, [x for x, _ in points], [y for _, y in points])


def _best(model: Run, figure: str) -> float | None:
    """Return the metric of a model at its best epoch."""
    epochs = model.get("epochs") or ()
    best = next((epoch for epoch in epochs if epoch["epoch"] == model.get("best_epoch")), epochs[-1] if epochs else {})
    value = best.get(figure)
    return None if value is None else float(value)


def _phases(runs: Mapping[str, Run]) -> Bars:
    """Return the mean seconds per epoch by phase, as one stacked bar per run."""
    found = dict.fromkeys(phase for run in runs.values() for epoch in run["epochs"] for phase in epoch["seconds"] if phase != "total")
    parts = {}
    for phase in sorted(found, key=lambda phase: list(_PHASES).index(phase) if phase in _PHASES else len(_PHASES)):
        lengths = [float(np.mean([epoch["seconds"].get(phase, 0.0) for epoch in run["epochs"]])) for run in runs.values()]
        if any(lengths):
            parts[phase] = lengths
    colours = {phase: _PHASES.get(phase, 6 + number) for number, phase in enumerate(parts)}
    title = "Time of an epoch by phase, mean over the epochs: less is better"
    return Bars(title, Quantity("time", "s", False), list(runs), parts, colours=colours)


def _densities(runs: Mapping[str, Run]) -> Iterator[Panel]:
    """Yield the density of gradient and sum at every iteration if recorded, else at every epoch; runs in rounds have none."""
    lines = []
    for name, run in runs.items():
        if all("steps" in epoch for epoch in run["epochs"]):
            steps, given, summed = _steps(run["epochs"])
            lines += [Line(name, steps, given, what="gradient of a rank"), Line(name, steps, summed, what="sum of the ranks")]
    if lines:
        title = "Density of gradients and sums: sparser is cheaper"
        yield Panel(title, Quantity("iteration", "whole", False), Quantity("entries that are not zero", "share"), lines)


def _steps(epochs: Sequence[Run]) -> tuple[list[float], list[float], list[float]]:
    """Return iterations, and the densities of a rank's gradient and of the sum at each of them."""
    if all(epoch.get("gradient_densities") for epoch in epochs):
        given, summed = (np.concatenate([epoch[f"{of}_densities"] for epoch in epochs]) for of in ("gradient", "total"))
        every = -(-len(given) // _MOST_POINTS)
        return np.arange(1, len(given) + 1)[::every].tolist(), given[::every].tolist(), summed[::every].tolist()
    ends = np.cumsum([epoch["steps"] for epoch in epochs]).tolist()
    return ends, [epoch["gradient_density"] for epoch in epochs], [epoch["total_density"] for epoch in epochs]
