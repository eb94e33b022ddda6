"""What `sparseallreduce train` does before it trains: number and scale the features, and read the initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.cli.train_samples import Samples
from sparseallreduce.linear.data.feature_scaling import in_one_unit
from sparseallreduce.linear.data.occurring import Occurring, only_occurring
from sparseallreduce.linear.defaults import in_rounds
from sparseallreduce.linear.model_file import FittedModel, ModelFileError, load_model, scores_for
from sparseallreduce.linear.models import Logistic
from sparseallreduce.linear.strategies import STRATEGIES, ParameterServer
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather

__all__ = ["Prepared", "prepare"]


class Prepared(NamedTuple):
    """Samples whose features are numbered and scaled for training, and how to undo that."""

    samples: Samples
    start: np.ndarray | None  # initial weights
    features: Occurring | None  # None for all features
    scales: np.ndarray | None
    nonzeros: int

    def restored(self, fitted: FittedModel) -> FittedModel:
        """Return a model trained on these samples as one of the features and units of the data."""
        if self.scales is not None:
            fitted = replace(fitted, weights=fitted.weights / self.scales)
        if self.features is not None:
            fitted = replace(fitted, weights=self.features.restored(fitted.weights, self.nonzeros))
        return fitted


def prepare(samples: Samples, initial_model: Path | None, chosen: dict[str, Any], comm: Any) -> tuple[Prepared, dict[str, Any]]:
    """Return the samples ready for training, and the options with the intercept of the initial model, if any. Collective."""
    start = _initial_weights(initial_model, samples, chosen["intercept"], comm)
    if start is not None:
        chosen = chosen | {"intercept": len(start) > samples.training.features}
    features = only_occurring(samples.training, comm) if start is None else None
    numbered = samples if features is None else samples.numbered(features)
    scales = _scales(numbered, chosen, comm)
    if scales is not None:
        numbered = numbered.scaled(scales)
        if start is not None:
            start[: len(scales)] = (start[: len(scales)].T * scales).T
    return Prepared(numbered, start, features, scales, samples.nonzeros), chosen


def _scales(samples: Samples, chosen: dict[str, Any], comm: Any) -> np.ndarray | None:
    """Return scales by which adaptive steps divide features whose units differ, None for no scaling; collective.

    Solvers in rounds scale features by themselves. Plain SGD does not, because its given rate suits the features as they are.
    """
    serves = issubclass(STRATEGIES[chosen["strategy"]], ParameterServer)
    if in_rounds(chosen["solver"]) or chosen["update"] != "ftrl" or serves or any(gather(comm, samples.training.pages is not None)):
        return None
    return in_one_unit(samples.training, comm)


def _initial_weights(path: Path | None, samples: Samples, intercept: bool | None, comm: Any) -> np.ndarray | None:
    """Read the weights of a model file on rank 0, and return them in the layout of a run on these samples; collective.

    They include an ``intercept`` if that is true, or if it is None and the model has one.
    """
    if path is None:
        return None

    def read() -> np.ndarray:
        found = load_model(path)
        fault = _unfit(found, samples, intercept)
        if fault is not None:
            raise ModelFileError(f"training cannot start from {path}: {fault}")
        weights, shifts = scores_for(samples.model, found)
        more = bool(np.any(found.intercept)) if intercept is None else intercept
        start = np.zeros((samples.training.features + more, *weights.shape[1:]), samples.training.values.dtype)
        start[: found.n_features] = weights
        start[samples.training.features :] = shifts
        return start

    start = agreed(comm, lambda: read() if comm.rank == 0 else None)
    return broadcast_arrays(comm, None if start is None else {"start": start})["start"]


def _unfit(found: FittedModel, samples: Samples, intercept: bool | None) -> str | None:
    """Return the reason why a run on these samples cannot start from a model, None if it can."""
    features, model, scores = samples.training.features, samples.model, np.atleast_2d(found.weights).shape[0]
    two = model.columns == 2  # a model file stores the scores of two classes as one
    if found.model != (Logistic.name if two else model.name) or scores != (1 if two else model.columns or 1):
        wanted = "one" if two or model.columns is None else f"{model.columns}, one per class"
        return f"it is a {found.model!r} model with {scores} score{'s' * (scores > 1)}, but --model is {model.name}, with {wanted}"
    if found.loss != model.variant:
        return f"its loss is {found.loss or 'the default'}, but --loss is {model.loss_name}"
    if found.n_features > features:
        return f"it has {found.n_features} features, but the samples have {features}: give --features {found.n_features}"
    if samples.classes is not None and found.classes.tolist() != list(samples.classes):
        theirs, ours = (" and ".join(map(str, classes)) for classes in (found.classes.tolist(), samples.classes))
        return f"its classes are {theirs}, but those of the samples are {ours}"
    if np.any(found.intercept) and intercept is False:
        return "it has an intercept: leave --no-intercept out"
    return None
