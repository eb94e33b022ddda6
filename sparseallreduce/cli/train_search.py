"""Cross-validation for `sparseallreduce train --folds`: compare penalties by the samples that each fold holds out."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.cli import train_options, train_runs
from sparseallreduce.cli.progress import progress_bar
from sparseallreduce.cli.terminal import Column, table_lines
from sparseallreduce.cli.train_samples import Samples
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.labels import shown
from sparseallreduce.linear.defaults import in_rounds
from sparseallreduce.linear.models import Squared
from sparseallreduce.linear.solvers import RoundTrainer
from sparseallreduce.linear.training.batches import Fold, class_counts
from sparseallreduce.linear.training.trainer import Trainer
from sparseallreduce.runtime.objects import gather

__all__ = ["Search", "search"]

Array = NDArray[Any]

_OF_CLASSES, _OF_NUMBERS = ("accuracy", "auc", "loss"), ("r2", "loss")  # metrics of held-out samples, if they are defined


@dataclass(frozen=True)
class Candidate:
    """A penalty, and the results of its models."""

    strength: float  # value of --C or --l2
    figures: dict[str, list[float]]  # by name, one value per fold on its held-out samples; absent unless all folds have it
    seconds: list[float]

    def mean(self, figure: str) -> float:
        return float(np.mean(self.figures[figure]))

    @property
    def cost(self) -> tuple[float, float]:
        """The sort key, lower is better: negated accuracy if there is one, then loss."""
        return -self.mean("accuracy") if "accuracy" in self.figures else 0.0, self.mean("loss")


@dataclass(frozen=True)
class Search:
    """The results of a search: the metrics of all penalties.

    Of two equally good penalties, the stronger one is the best.
    """

    name: str  # the option, C or l2
    folds: int
    candidates: list[Candidate]

    @property
    def best(self) -> float:
        """The best value."""
        return min(self._by_strength(), key=lambda one: one.cost).strength

    def _by_strength(self) -> list[Candidate]:
        return sorted(self.candidates, key=lambda one: one.strength, reverse=self.name == "l2")

    def lines(self) -> list[str]:
        """Return the lines of a table, mean and standard deviation of each figure over the folds."""
        known = list(self.candidates[0].figures)
        columns = [
            Column("strength", f"{self.folds} folds", 0, 0, left=True),
            *(Column(figure, f"held-out {figure}", 0, place, spaced=True) for place, figure in enumerate(known)),
            Column("seconds", "seconds", 0, 8, spaced=True),
            Column("mark", "", 0, 0, left=True, spaced=True),
        ]
        rows = [
            {"strength": f"{self.name} {one.strength:g}", "seconds": f"{sum(one.seconds):.3f}"}
            | {figure: f"{one.mean(figure):.5g} +- {np.std(one.figures[figure]):<6.2g}" for figure in known}
            | {"mark": "best" if one.strength == self.best else ""}
            for one in self.candidates
        ]
        return table_lines(columns, rows)

    def record(self) -> dict[str, Any]:
        """Return the table for --json: mean, standard deviation and values of all folds for each metric."""
        return {
            "parameter": self.name,
            "folds": self.folds,
            "best": self.best,
            "candidates": [
                {self.name: one.strength}
                | {
                    f"validation_{figure}": {"mean": one.mean(figure), "deviation": float(np.std(values)), "folds": values}
                    for figure, values in one.figures.items()
                }
                | {"seconds": sum(one.seconds)}
                for one in self.candidates
            ],
        }


def search(samples: Samples, chosen: dict[str, Any], start: Array | None, comm: Any) -> Search:
    """Train a model for each penalty and fold on the other folds, and evaluate it on the fold held out; collective.

    Within a fold, solvers in rounds go from the strongest penalty to the weakest, each starting from the previous solution. SGD always
    starts again, since the result of a fixed number of passes depends on the start.

    Parameters
    ----------
    samples : Samples
        Samples of all ranks; they stay on their ranks.
    chosen : dict
        The options; ``C`` or ``l2`` is one number or several.
    start : ndarray or None
        Initial weights of SGD.

    Raises
    ------
    DatasetError
        On all ranks, if a class has fewer samples than there are folds.
    """
    folds, (name, values) = chosen["folds"], train_options.strengths(chosen)
    _check_classes(samples, folds, comm)
    path = sorted(values, reverse=name == "l2")
    watch = chosen["early_stopping"] or ""
    every = chosen["evaluate_every"] if watch and not watch.startswith("progressive") else max(1, chosen["epochs"])
    names = _OF_CLASSES if samples.model.classifies else _OF_NUMBERS
    found = {value: Candidate(value, {name: [] for name in names}, []) for value in values}
    with progress_bar(comm, desc="cross-validation", unit="model", total=folds * len(path)) as bar:
        for number in range(folds):
            options = chosen | {"validation": Fold(number, folds), "evaluate_every": every}
            each = [train_runs.penalised(samples, options | {name: value}) for value in path]
            rounds = in_rounds(chosen["solver"])
            ends = train_runs.ends_in_rounds(samples, each, comm) if rounds else train_runs.ends_by_steps(samples, each, start, comm)
            began = time.perf_counter()
            for value, (last, trainer) in zip(path, ends, strict=True):
                r2 = None if samples.model.classifies else _r2(last.validation_loss, trainer, comm)
                for figure, reached in found[value].figures.items():
                    held = r2 if figure == "r2" else getattr(last, f"validation_{figure}")
                    reached += [] if held is None else [held]
                found[value].seconds.append(time.perf_counter() - began)
                began = time.perf_counter()
                bar.update()
    for figure in names:  # the area under the curve may be undefined in some folds
        if any(len(one.figures[figure]) < folds for one in found.values()):
            for one in found.values():
                del one.figures[figure]
    return Search(name, folds, list(found.values()))


def _check_classes(samples: Samples, folds: int, comm: Any) -> None:
    """Raise an error if there are more folds than samples of a class."""
    total, codes = samples.training.total_samples, samples.model.codes
    if codes is None or not samples.classes:
        if total < folds:
            raise DatasetError(f"--folds {folds} needs as many samples, but there are {total}: use fewer folds")
        return
    counts = class_counts(samples.training, codes, comm).sum(axis=0)
    fewest = int(counts.argmin())
    if counts[fewest] < folds:
        few = f"the class {shown(samples.classes[fewest])} has {counts[fewest]}"
        raise DatasetError(f"--folds {folds} needs as many samples of each class, but {few}: use fewer folds, or leave the class out")


def _r2(loss: float | None, trainer: Trainer | RoundTrainer, comm: Any) -> float | None:
    """Return R2 on the held-out samples, from their mean ``loss``; None unless the model minimises squared errors. Collective."""
    if loss is None or type(trainer.model) is not Squared:  # other losses are subclasses of Squared
        return None
    rows, dataset = trainer.division.held_out, trainer.dataset
    labels = dataset.labels[rows]
    counts = np.ones(len(labels)) if dataset.weights is None else dataset.weights[rows]
    sums = np.sum(gather(comm, (float(counts.sum()), float(counts @ labels))), axis=0)
    if not sums[0] > 0:
        return None
    losses = trainer.model.loss(np.full(len(labels), sums[1] / sums[0]), labels)
    mean_only = np.sum(gather(comm, (float(counts @ losses), len(labels))), axis=0)  # the loss of predicting the mean
    return 1 - loss * float(mean_only[1] / mean_only[0]) if mean_only[0] > 0 and math.isfinite(loss) else None
