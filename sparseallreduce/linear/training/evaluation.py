"""What the figures of an epoch are, and which of its models did best on the samples held out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.training.batches import Division
from sparseallreduce.linear.training.class_metrics import evaluate_classes
from sparseallreduce.linear.training.early_stopping import WATCHED
from sparseallreduce.linear.training.epoch import Epoch
from sparseallreduce.linear.training.metrics import Metrics, Sums, class_threshold, evaluate
from sparseallreduce.linear.training.progressive import Progressive
from sparseallreduce.linear.weights import Weights
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["Best", "Evaluation"]

Array = NDArray[Any]

_FIGURES = [f"{of}_{figure}" for of in ("train", "test", "validation") for figure in ("loss", "accuracy", "auc")]
_FIGURES.remove("train_loss")  # which is the loss


class Best(NamedTuple):
    """The model that did best on the samples held out."""

    cost: float  # the lower the better
    epoch: int
    weights: Array


class Evaluation:
    """Measures a model on this rank's samples and those of all others.

    Parameters
    ----------
    model : LinearModel
    dataset : Dataset
        The samples of this rank, trained on or held out.
    division : Division
    watch : str
        The figure of the samples held out by which a model is the best.
    comm : communicator
        Of all ranks.
    """

    def __init__(self, model: LinearModel, dataset: Dataset, division: Division, watch: str, comm: Any) -> None:
        self.progressive = Progressive(model, dataset)
        self.best: Best | None = None
        self._model = model
        self._dataset = dataset
        self._division = division
        self._watch = watch
        self._comm = comm
        self._threshold: float | None = None

    def find_threshold(self) -> None:
        """Find out which score parts the classes; collective, before anything is measured."""
        self._threshold = class_threshold(self._model, self._dataset, self._comm)

    def sums_so_far(self, workers: Any) -> Sums:
        """Those of the epoch's samples on all workers before their steps; collective over these."""
        own = agreed(workers, lambda: self.progressive.sums(self._threshold))  # the loss may be a user's own
        return Sums.total([self.progressive.before, *gather(workers, own)])

    def before_steps(self) -> dict[str, Any]:
        """Figures of an epoch's samples before their steps, by the names of :class:`Epoch`; no others are known yet. Collective."""
        loss, accuracy = self.sums_so_far(self._comm).means(self._threshold)
        known = loss is not None and math.isfinite(loss)
        return dict.fromkeys(_FIGURES) | {
            "loss": math.nan if loss is None else loss,
            "progressive_loss": loss if known else None,
            "progressive_accuracy": accuracy,
            "evaluated": False,
        }

    def of_weights(self, weights: Weights, test: Dataset | None) -> dict[str, Any]:
        """Figures of the samples trained on, of those held out and of a test set; collective."""
        measured, division = self._measuring(weights), self._division
        training = measured(self._dataset, division.rows)
        figures = {"loss": training.loss + weights.penalty(), "train_accuracy": training.accuracy, "train_auc": training.auc}
        if division.held_out is not None:
            figures |= _named("validation", measured(self._dataset, division.held_out))
        if test is not None:
            figures |= _named("test", measured(test, None))
        return figures | {"evaluated": True}

    def keep_if_best(self, epoch: Epoch, weights: Weights) -> None:
        """Keep the weights after an epoch, if none before did as well on the samples held out."""
        if epoch.validation_loss is None:
            return
        figure = getattr(epoch, self._watch)
        cost = math.inf if figure is None else -figure if WATCHED[self._watch] else figure
        if self.best is None or cost < self.best.cost:
            self.best = Best(cost, epoch.epoch, weights.to_array())

    def _measuring(self, weights: Weights) -> Callable[[Dataset, Array | None], Metrics]:
        """What measures these weights on some rows of a data set, or on all of them; collective, and so is each of its calls."""
        if self._model.columns is not None:
            final = weights.final()
            return lambda dataset, rows: evaluate_classes(self._model, final, dataset, self._comm, rows)
        scores = agreed(self._comm, lambda: weights.final_scores(self._dataset))

        def measured(dataset: Dataset, rows: Array | None) -> Metrics:
            own = scores if dataset is self._dataset else agreed(self._comm, lambda: weights.final_scores(dataset))
            return evaluate(self._model, own, dataset, self._threshold, self._comm, rows)

        return measured


def _named(of: str, metrics: Metrics) -> dict[str, float | None]:
    return {f"{of}_loss": metrics.loss, f"{of}_accuracy": metrics.accuracy, f"{of}_auc": metrics.auc}
