"""Interpretation of a model: its largest weights, and the contribution of each feature to a sample's score."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse

from sparseallreduce.linear.model_file import FittedModel

__all__ = ["Contributions", "Weight", "class_number", "contributions", "largest_weights", "shown_label"]

Array = NDArray[Any]


class Weight(NamedTuple):
    """One weight of a model."""

    feature: int  # counted from 0
    weight: float
    number: int  # of the class whose score it contributes to: with two classes the second, without classes 0


class Contributions(NamedTuple):
    """The terms of a sample's score, which is the sum of all contributions and the intercept."""

    indices: Array  # int64, features of the sample, by descending magnitude of their contributions
    values: Array  # float64, values of these features
    weights: Array  # float64, weights of these features
    products: Array  # float64, contributions: value times weight
    intercept: float
    score: float  # their sum


def class_number(model: FittedModel, label: str) -> int:
    """Return the number of the class with this label, given as text.

    Raises
    ------
    ValueError
        If the model has no such class.
    """
    written = [shown_label(each) for each in model.classes.tolist()]
    if model.classes.dtype.kind in "biuf":  # 1.0 and +1 are 1
        with suppress(ValueError):
            label = shown_label(float(label))
    if label not in written:
        listed = ", ".join(map(str, map(shown_label, model.classes[:10].tolist()))) or "none, as it predicts numbers"
        raise ValueError(f"the model has no class {label}: its classes are {listed}{', ...' * (len(model.classes) > 10)}")
    return written.index(label)


def largest_weights(model: FittedModel, top: int | None = 20, number: int | None = None) -> list[Weight]:
    """Return the weights of largest magnitude in descending order, ties by ascending feature.

    Parameters
    ----------
    model : FittedModel
    top : int, optional
        Maximum number of weights to return; all that are not zero if None.
    number : int, optional
        The class to return the weights of; all classes by default. With two classes, the weights of the first are those of the second
        with the opposite sign.

    Examples
    --------
    >>> model = FittedModel("svm", np.array([1.0, 0.0, -3.0]), 0.0, np.array([0, 1]))
    >>> largest_weights(model)
    [Weight(feature=2, weight=-3.0, number=1), Weight(feature=0, weight=1.0, number=1)]
    >>> largest_weights(model, 1, number=0)
    [Weight(feature=2, weight=3.0, number=0)]
    """
    one = len(model.classes) < 3
    rows = [0] if one or number is None else [number]
    if not one and number is None:
        rows = list(range(len(model.classes)))
    found = [_nonzero(model, row) for row in rows]
    indices, weights = (np.concatenate(parts) for parts in zip(*found, strict=True))
    numbers = np.repeat(np.array(rows if not one else [len(model.classes) // 2]), [len(part) for part, _ in found])
    if one and number == 0 and len(model.classes) == 2:
        weights, numbers = -weights, np.zeros_like(numbers)
    sizes = np.abs(weights)
    if top is not None and top < len(sizes):
        inside = np.flatnonzero(sizes >= np.partition(sizes, len(sizes) - top)[len(sizes) - top]) if top else np.empty(0, np.intp)
        indices, weights, numbers, sizes = (each[inside] for each in (indices, weights, numbers, sizes))
    order = np.lexsort((numbers, indices, -sizes))[:top]
    return [Weight(*each) for each in zip(indices[order].tolist(), weights[order].tolist(), numbers[order].tolist(), strict=True)]


def contributions(model: FittedModel, sample: Any, number: int | None = None) -> Contributions:
    """Return the terms that a sample's score is the sum of, as float64.

    Parameters
    ----------
    model : FittedModel
    sample : scipy.sparse matrix or array, shape (1, n_features)
    number : int, optional
        The class to explain the score of. By default it is the predicted one of more than two classes, and the second of two.

    Examples
    --------
    >>> model = FittedModel("linear", np.array([1.0, 2.0, -3.0]), 0.5)
    >>> found = contributions(model, csr_array([[2.0, 0.0, 1.0]]))
    >>> found.indices, found.products, found.score
    (array([2, 0]), array([-3.,  2.]), -0.5)
    """
    row = csr_array(sample)
    several = len(model.classes) > 2
    if several and number is None:
        number = int(model.decision_function(row)[0].argmax())
    place = number if several and number is not None else 0
    indices, values = row.indices.astype(np.int64), row.data.astype(np.float64)
    weights = _some(model, place, indices).astype(np.float64)
    intercept = float(np.atleast_1d(model.intercept)[place])
    if number == 0 and len(model.classes) == 2:
        weights, intercept = -weights, -intercept
    products = values * weights
    order = np.lexsort((indices, -np.abs(products)))
    return Contributions(indices[order], values[order], weights[order], products[order], intercept, float(products.sum() + intercept))


def _nonzero(model: FittedModel, row: int) -> tuple[Array, Array]:
    """Return the features with non-zero weights in a score, and their weights."""
    if issparse(model.weights):
        rows: Any = model.weights
        own = slice(*rows.indptr[row : row + 2])
        return rows.indices[own].astype(np.int64), rows.data[own].astype(np.float64)
    weights = np.atleast_2d(model.weights)[row]
    indices = np.flatnonzero(weights)
    return indices, weights[indices].astype(np.float64)


def _some(model: FittedModel, row: int, indices: Array) -> Array:
    """Return the weights that the features ``indices`` have in a score."""
    if not issparse(model.weights):
        return np.asarray(np.atleast_2d(model.weights)[row, indices])
    found, weights = _nonzero(model, row)
    order = np.argsort(found)
    places = np.searchsorted(found, indices, sorter=order)
    inside = places < len(found)
    own = order[places[inside]]
    result = np.zeros(len(indices))
    result[inside] = np.where(found[own] == indices[inside], weights[own], 0.0)
    return result


def shown_label(label: Any) -> str:
    """Return the label of a class as text, whole numbers without a fraction."""
    return label.decode(errors="backslashreplace") if isinstance(label, bytes) else str(label).removesuffix(".0")
