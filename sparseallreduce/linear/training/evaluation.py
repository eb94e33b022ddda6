"""The metrics of an epoch, and the model that is best on the samples held out."""

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
_FIGURES.remove("train_loss")  # reported as the loss


class Best(NamedTuple):
    """The model that is best on the samples held out."""

    cost: float  # lower is better
    epoch: int
    weights: Array


class Evaluation:
    """Evaluates a model on the samples of all ranks.

    Parameters
    ----------
    model : LinearModel
    dataset : Dataset
        This rank's samples, both for training and held out.
    division : Division
    watch : str
        Metric of the samples held out that selects the best model.
    comm : communicator
        Communicator of all ranks.
    """

    def __init__(self, model: LinearModel, dataset: Dataset, division: Division, watch: str, comm: Any) -> None:
        self.progressive: Progressive = Progressive(model, dataset)
        self.best: Best | None = None
        self._model = model
        self._dataset = dataset
        self._division = division
        self._watch = watch
        self._comm = comm
        self._threshold: float | None = None

    def find_threshold(self) -> None:
        """Determine the score that separates the classes. Collective; called before any evaluation."""
        self._threshold = class_threshold(self._model, self._dataset, self._comm)

    def sums_so_far(self, workers: Any) -> Sums:
        """Return the sums over the epoch's samples on all workers, each before its step. Collective over these."""
        own = agreed(workers, lambda: self.progressive.sums(self._threshold))  # the loss may be user code
        return Sums.total([self.progressive.before, *gather(workers, own)])

    def before_steps(self) -> dict[str, Any]:
        """Return progressive metrics of an epoch under the names of :class:`Epoch`; other metrics are None. Collective."""
        loss, accuracy = self.sums_so_far(self._comm).means(self._threshold)
        known = loss is not None and math.isfinite(loss)
        return dict.fromkeys(_FIGURES) | {
            "loss": math.nan if loss is None else loss,
            "progressive_loss": loss if known else None,
            "progressive_accuracy": accuracy,
            "evaluated": False,
        }

    def of_weights(self, weights: Weights, test: Dataset | None) -> dict[str, Any]:
        """Return metrics of the training samples, those held out and a test set. Collective."""
        measured, division = self._measuring(weights), self._division
        training = measured(self._dataset, division.rows)
        figures = {"loss": training.loss + weights.penalty(), "train_accuracy": training.accuracy, "train_auc": training.auc}
        if division.held_out is not None:
            figures |= _named("validation", measured(self._dataset, division.held_out))
        if test is not None:
            figures |= _named("test", measured(test, None))
        return figures | {"evaluated": True}

    def keep_if_best(self, epoch: Epoch, weights: Weights) -> None:
        """Save the weights after an epoch if they are the best so far on the samples held out."""
        if epoch.validation_loss is None:
            return
        figure = getattr(epoch, self._watch)
        cost = math.inf if figure is None else -figure if WATCHED[self._watch] else figure
        if self.best is None or cost < self.best.cost:
            self.best = Best(cost, epoch.epoch, weights.to_array())

    def _measuring(self, weights: Weights) -> Callable[[Dataset, Array | None], Metrics]:
        """Return a function that evaluates these weights on some rows of a data set, or on all. Collective, and so are its calls."""
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
