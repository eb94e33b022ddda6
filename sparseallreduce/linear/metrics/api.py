"""Evaluation of a model on the samples of all ranks, with the metrics of scikit-learn by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.metrics.classification import Tally, measured
from sparseallreduce.linear.metrics.names import chosen_metrics
from sparseallreduce.linear.metrics.regression import errors
from sparseallreduce.linear.model_file import FittedModel
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather, together

__all__ = ["target_of", "evaluate", "evaluate_scores", "rows_of", "scores_of"]

Array = NDArray[Any]

_ROWS = 1 << 14  # samples scored in one call: limits the memory of their indices, which SciPy needs as int64


def evaluate(model: Any, dataset: Dataset, comm: Any = None, *, metrics: Sequence[str] | None = None) -> dict[str, Any]:
    """Return metrics of a model over the samples of all ranks. Collective; every rank gets the same result.

    Each equals scikit-learn's function of the same name on the samples of all ranks together. No rank gathers the samples: counts and sums
    are added, and for the areas under curves each rank counts a range of the scores.

    Parameters
    ----------
    model : FittedModel or estimator
        A model from :func:`~sparseallreduce.linear.load_model`, or a fitted estimator.
    dataset : Dataset
        This rank's samples with labels, as :func:`~sparseallreduce.linear.load` returns them. Sample weights are used.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    metrics : sequence of str, optional
        Keys of :data:`~sparseallreduce.linear.metrics.METRICS`, with a number for K as in ``top_5_accuracy``; all by default.

    Returns
    -------
    dict
        Value of each metric by name, in this order: a float, or None if the metric is undefined, such as the area under the ROC curve of
        a single class; "confusion_matrix" is an ndarray of shape (K, K).

    Raises
    ------
    ValueError
        On every rank, if a metric is unknown or not defined for the model, or all samples have weight zero.
    DatasetError
        On every rank, if a label is missing or is not one of the model's classes.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> model = FittedModel("svm", np.float32([1, -1]), 0.0, np.array([0.0, 1.0]))
    >>> dataset = Dataset.from_scipy(csr_array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), [1, 0, 0])
    >>> evaluate(model, dataset, sar.SERIAL, metrics=["accuracy", "f1"])
    {'accuracy': 0.6666666666666666, 'f1': 0.6666666666666666}
    """
    comm = resolve(comm)

    def made() -> dict[str, Any]:
        found = agreed(comm, lambda: model if isinstance(model, FittedModel) else model._fitted())
        scores = agreed(comm, lambda: scores_of(found, dataset))
        labels = agreed(comm, lambda: target_of(found, dataset))
        return evaluate_scores(found, scores, labels, dataset.weights, comm, metrics)

    return together(comm, made)


def evaluate_scores(
    model: FittedModel, scores: Array, labels: Array, weights: Array | None, comm: Any, metrics: Sequence[str] | None = None
) -> dict[str, Any]:
    """Return metrics of samples whose scores are known. Collective, like :func:`evaluate`.

    Parameters
    ----------
    model : FittedModel
    scores : ndarray, shape (samples,) or (samples, K)
    labels : ndarray, shape (samples,)
        Class numbers from 0, or the numbers to predict if the model has no classes.
    weights : ndarray, shape (samples,), optional
    comm : communicator
        The ranks that share the samples.
    metrics : sequence of str, optional
        By default those of :func:`all_metrics`.

    Returns
    -------
    dict
        The metrics by name, the same on every rank.
    """
    counts = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
    names = agreed(comm, lambda: chosen_metrics(model, metrics))
    if not len(model.classes):
        predictions = agreed(comm, lambda: np.asarray(model.labels_of(scores), np.float64))
        figures = errors(np.asarray(labels, np.float64), predictions, counts, comm)
        return {name: figures[name] for name in names}
    tally = agreed(comm, lambda: Tally(model, names))
    agreed(comm, lambda: tally.add(scores, labels, counts))
    found = measured(tally, model, names, comm)
    weighted = any(gather(comm, weights is not None))
    if "confusion_matrix" in found and not weighted:
        found["confusion_matrix"] = found["confusion_matrix"].astype(np.int64)
    return found


def target_of(model: FittedModel, dataset: Dataset) -> Array:
    """Return the labels of this rank's samples in the form that :func:`evaluate_scores` takes, shape (samples,).

    Parameters
    ----------
    model : FittedModel
        The model, which determines the numbers of classes.
    dataset : Dataset
        This rank's samples.

    Returns
    -------
    ndarray, shape (samples,)
        Class numbers from 0, or the numbers to predict.

    Raises
    ------
    DatasetError
        If a label is missing or is not one of the model's classes, or is a name although the model predicts numbers.
    """
    missing = np.flatnonzero(np.isnan(dataset.labels))
    if len(missing):
        raise DatasetError(f"{dataset.source}: sample {dataset.first_sample + missing[0]} has no label to compare with")
    if not len(model.classes):
        if dataset.names is not None:
            raise DatasetError(f"{dataset.source}: labels are names of classes, and the model predicts numbers")
        return dataset.labels
    labels, kinds = dataset.named_labels, "biuf" if dataset.names is None else "U"
    if model.classes.dtype.kind not in kinds and len(labels):
        ours, theirs = ("numbers", "names") if kinds == "biuf" else ("names", "numbers")
        raise DatasetError(f"{dataset.source}: labels are {ours}, and the model's classes are {theirs}")
    numbers = np.searchsorted(model.classes, labels) if len(labels) else np.empty(0, np.intp)
    numbers = np.minimum(numbers, len(model.classes) - 1)
    strange = np.flatnonzero(model.classes[numbers] != labels) if len(labels) else numbers
    if len(strange):
        shown = ", ".join(map(str, model.classes[:5].tolist())) + (", ..." if len(model.classes) > 5 else "")
        raise DatasetError(
            f"{dataset.source}: the label of sample {dataset.first_sample + strange[0]}, {labels[strange[0]]}, is none of the model's "
            f"classes, {shown}"
        )
    return numbers


def scores_of(model: FittedModel, dataset: Dataset) -> Array:
    """Return the scores of this rank's samples, shape (samples,) or (samples, K). Features that the model does not have are ignored.

    Parameters
    ----------
    model : FittedModel
        The model.
    dataset : Dataset
        This rank's samples.

    Returns
    -------
    ndarray, shape (samples,) or (samples, K)
        One score for two classes and for numbers, otherwise one for each class.
    """
    return np.concatenate([model.decision_function(rows) for rows in rows_of(dataset, model.n_features)])


def rows_of(dataset: Dataset, features: int) -> Iterator[csr_array]:
    """Yield this rank's samples in blocks as SciPy arrays with the first ``features`` features; at least one block.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples.
    features : int
        Number of columns of the blocks.

    Yields
    ------
    csr_array
        A block of rows.
    """
    for first in range(0, max(1, dataset.rows), _ROWS):
        starts = dataset.indptr[first : first + _ROWS + 1]
        inside = slice(starts[0], starts[-1])
        columns = dataset.indices[inside].astype(np.int64)
        known = columns < features
        ends = np.append(0, np.cumsum(known))[starts - starts[0]]
        yield csr_array((dataset.values[inside][known], columns[known], ends), shape=(len(ends) - 1, features))
