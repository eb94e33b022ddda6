"""The model file: a NumPy ``.npz`` with all that prediction needs. It is read without MPI and without pickle.

===============  =========================  ==================================================================================
array            dtype, shape               content
===============  =========================  ==================================================================================
format           string                     "sparseallreduce linear model 1"; or 2, if predictions differ from the scores, or
                                            weights of zero are left out
library          string                     version of sparseallreduce that wrote the file
model            string                     "logistic", "multinomial", "svm", "linear", or the name of a user's model
n_features       int64                      N
weights          float32/64, (N,) or (K,N)  of the only score, or with more than two classes of the score of each
indices, values  uint32/64, float32/64, (k,)  instead of weights, if that saves at least a mebibyte: increasing positions of the
                                            weights that are not zero, in the weights of all scores one after the other
intercept        float64, () or (K,)        the term added to each score
classes          number or string, (K,)     sorted labels; with two classes, a score above zero means the second;
                                            empty if the score is the prediction
loss             string                     name of the loss if it is not the first that the model may have
parameter        float64, ()                epsilon or quantile of the loss; left out if it has none
zero_based       bool                       whether indices count from 0 in the svmlight text of the training data; left out
                                            for other training data
encoding         uint8, (bytes,)            encoding of the columns of a table, as JSON in UTF-8: see linear/encoding.py; left
                                            out for other training data
===============  =========================  ==================================================================================
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.checked_file import Damaged, open_regular
from sparseallreduce.checked_npz import Npz, damage
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.linear.exporting import sklearn_estimator
from sparseallreduce.linear.models import LOSSES, LinearModel, Logistic, Poisson, model_of
from sparseallreduce.linear.multiclass import Multinomial
from sparseallreduce.runtime.limits import memory_left
from sparseallreduce.streams.stream import index_dtype
from sparseallreduce.version import __version__

__all__ = ["FittedModel", "ModelFileError", "dense_weights", "fitted", "is_sparse", "load_model", "save_model", "scores_for"]

Array = NDArray[Any]

_ARCHIVE = b"PK"  # first bytes of a .npz file
_FORMAT = "sparseallreduce linear model 1"
_SECOND = "sparseallreduce linear model 2"  # for content that readers of format 1 would misunderstand
_WORTH = 1 << 20  # bytes that leaving out zeros has to save; smaller files can be read by NumPy alone
# Loaded weights stay sparse if they took at least this many bytes as a dense array, and this many times the stored bytes.
_LARGE, _MANY_ZEROS = 1 << 27, 8
_WORDS = ("format", "library", "model", "loss")
_NUMBERS = ("n_features", "parameter", "zero_based")
_ARRAYS = ("weights", "indices", "values", "intercept", "classes", "encoding")
_LONGEST_WORD = 1 << 12  # bytes


class ModelFileError(SparseAllreduceError, ValueError):
    """Raised for a file that is not a model file or is damaged, and for a model that does not fit the samples it is used with."""


@dataclass(frozen=True)
class FittedModel:
    """A trained model, which predicts labels, numbers or probabilities.

    Examples
    --------
    >>> model = FittedModel("logistic", np.float32([1, -1]), 0.5, np.array(["ham", "spam"]))
    >>> model.predict(np.array([[2.0, 1.0], [0.0, 3.0]]))
    array(['spam', 'ham'], dtype='<U4')
    >>> model.predict_proba(np.array([[0.0, 0.5]]))
    array([[0.5, 0.5]])
    """

    model: str  # name of the LinearModel
    weights: Any  # float32 or float64, (n_features,), or (classes, n_features) for more than two classes; or a two-dimensional SciPy
    # sparse array, if dense weights would be larger than the training samples
    intercept: Array | float = 0.0  # one number, or one per class
    classes: Array = field(default_factory=lambda: np.empty(0))  # sorted labels; empty if the score is the prediction
    library: str = __version__  # version that trained the model
    loss: str = ""  # name of the loss; the empty string means the first that a model of this name may have
    parameter: float | None = None  # epsilon or quantile of the loss
    zero_based: bool | None = None  # whether indices count from 0 in the svmlight text of the training data; None for other data
    encoding: Encoding | None = field(default=None, repr=False)  # encoding of the columns of a table; None for other data

    def __post_init__(self) -> None:
        object.__setattr__(self, "intercept", np.asarray(self.intercept, np.float64))
        object.__setattr__(self, "classes", np.asarray(self.classes))

    @property
    def n_features(self) -> int:
        """The number of features, N."""
        return int(self.weights.shape[-1])

    def name_of(self, index: int) -> str:
        """Return the name of feature ``index``, counted from 0: that of its column, or its index in the text of the training data."""
        return str(index + (self.zero_based is False)) if self.encoding is None else self.encoding.name_of(index)

    @property
    def gives_probabilities(self) -> bool:
        """True if the model predicts probabilities: a logistic or multinomial model with classes."""
        return self.model in (Logistic.name, Multinomial.name) and len(self.classes) >= 2

    def to_sklearn(self) -> Any:
        """Return a fitted scikit-learn estimator with the same predictions and probabilities.

        It is a ``LogisticRegression``, ``LinearSVC`` or ``Ridge``; a ``OneVsRestClassifier`` of ``LogisticRegression`` for a
        one-versus-rest logistic model of more than two classes, because ``LogisticRegression`` itself is then a softmax; and a
        ``PoissonRegressor`` for the loss "poisson". The estimator does not need this library, not even for unpickling.

        Examples
        --------
        >>> model = FittedModel("logistic", np.array([1.0, -1.0]), 0.5, np.array(["ham", "spam"])).to_sklearn()
        >>> model, model.predict(np.array([[2.0, 1.0], [0.0, 3.0]]))
        (LogisticRegression(), array(['spam', 'ham'], dtype='<U4'))
        """
        keep = is_sparse(self.weights) and len(self.classes) > 0
        weights = self.weights if keep else dense_weights(self)
        return sklearn_estimator(self.model, self.loss, weights, np.asarray(self.intercept), self.classes)

    def decision_function(self, samples: Any) -> Array:
        """Return the scores ``w.x + intercept``.

        Parameters
        ----------
        samples : ndarray or scipy.sparse matrix or array, shape (samples, n_features)

        Returns
        -------
        ndarray
            In the weights' dtype; shape (samples,), or (samples, classes) for more than two classes.

        Raises
        ------
        ModelFileError
            If the samples have another number of features.
        """
        if samples.shape[1] != self.n_features:
            raise ModelFileError(f"the model has {self.n_features} features, the samples have {samples.shape[1]}")
        scores = self._sparse_products(samples) if is_sparse(self.weights) else np.asarray(samples @ self.weights.T)
        scores += self.intercept
        return scores.astype(self.weights.dtype, copy=False)

    def _sparse_products(self, samples: Any) -> Array:
        """Return the products of samples and sparse weights, in time proportional to the non-zeros of both."""
        features, places = np.unique(self.weights.indices, return_inverse=True)
        known: Array = csr_array((self.weights.data, places, self.weights.indptr), shape=(self.weights.shape[0], len(features))).toarray()
        if is_sparse(samples):
            rows = csr_array(samples)
            numbers = np.minimum(np.searchsorted(features, rows.indices), max(len(features) - 1, 0))
            inside = features[numbers] == rows.indices if len(features) else np.zeros(rows.nnz, bool)
            ends = np.append(0, np.cumsum(inside))[rows.indptr]
            columns: Any = csr_array((rows.data[inside], numbers[inside], ends), shape=(rows.shape[0], len(features)))
        else:
            columns = np.asarray(samples)[:, features]
        scores = np.asarray(columns @ known.T)
        return scores if self.intercept.ndim else scores[:, 0]  # type: ignore[union-attr]

    def predict(self, samples: Any) -> Array:
        """Return the label of each sample, or the predicted number if the model has no classes; shape (samples,)."""
        return self.labels_of(self.decision_function(samples))

    def predict_proba(self, samples: Any) -> Array:
        """Return the probability of each class, as float64 of shape (samples, classes).

        Raises
        ------
        ModelFileError
            If the model is not logistic: other scores are not log-odds.
        """
        return self.probabilities_of(self.decision_function(samples))

    def labels_of(self, scores: Array) -> Array:
        """Return the labels or numbers predicted for given scores."""
        if len(self.classes) == 0:
            return self._linked(scores)
        chosen = scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(np.intp)
        labels: Array = self.classes[chosen]
        return labels

    def _linked(self, scores: Array) -> Array:
        """Return the numbers predicted for given scores: the scores themselves, unless the loss has a link function."""
        losses = LOSSES.get(self.model, {})
        return model_of(self.model, self.loss, self.parameter).prediction(scores) if self.loss in losses else scores

    def probabilities_of(self, scores: Array) -> Array:
        """Return the class probabilities for given scores.

        They are the softmax of a multinomial model's scores. One-versus-rest probabilities are scaled to a sum of one.
        """
        if not self.gives_probabilities:
            raise ModelFileError(f"only a logistic classifier gives probabilities, but this model is {self.model!r}")
        if self.model == Multinomial.name:
            return Multinomial.probabilities(scores.astype(np.float64))
        positive = Logistic().prediction(scores.astype(np.float64))
        if positive.ndim == 1:
            return np.column_stack([1 - positive, positive])
        sums = positive.sum(axis=1, keepdims=True)
        # If every probability is rounded to zero, all classes get the same.
        shares: Array = np.divide(positive, sums, out=np.full_like(positive, 1 / len(self.classes)), where=sums > 0)
        return shares


def fitted(model: LinearModel, weights: Array, intercept: Array | float, classes: Array) -> FittedModel:
    """Return the result of a training as a :class:`FittedModel`.

    Parameters
    ----------
    model : LinearModel
        The model that was trained.
    weights : ndarray, shape (n_features,) or (n_features, K)
    intercept : float or ndarray
        One number, or one per column.
    classes : ndarray
        Labels, as in :class:`FittedModel`. The two scores of a multinomial model of two classes are replaced by their difference, which
        gives the same labels and probabilities.

    Examples
    --------
    >>> from sparseallreduce.linear import Multinomial
    >>> fitted(Multinomial(2), np.float32([[-1, 1], [2, -2]]), np.array([0.5, -0.5]), np.array([3, 7])).weights
    array([ 2., -4.], dtype=float32)
    """
    variant: dict[str, Any] = {"loss": model.variant, "parameter": model.parameter}
    if weights.ndim == 1:
        return FittedModel(model.name, weights, intercept, classes, **variant)
    shifts = np.asarray(intercept)
    if model.name == Multinomial.name and len(classes) == 2:
        return FittedModel(Logistic.name, weights[:, 1] - weights[:, 0], shifts[1] - shifts[0], classes)
    return FittedModel(model.name, np.ascontiguousarray(weights.T), shifts, classes, **variant)


def scores_for(model: LinearModel, found: FittedModel) -> tuple[Array, Array]:
    """Return weights and intercepts from which a training of ``model`` continues. This is the inverse of :func:`fitted`.

    Returns
    -------
    weights : ndarray, shape (n_features,) or (n_features, K)
    intercept : ndarray, shape () or (K,)
    """
    weights, intercept = found.weights, np.asarray(found.intercept)
    if is_sparse(weights):
        weights = dense_weights(found)
    if model.columns == 2 and weights.ndim == 1:
        return np.stack([-weights / 2, weights / 2], axis=1), np.stack([-intercept / 2, intercept / 2])
    return weights.T, intercept


def dense_weights(model: FittedModel) -> Array:
    """Return the weights of a model as a dense array of shape (n_features,) or (classes, n_features)."""
    if not is_sparse(model.weights):
        return np.asarray(model.weights)
    whole: Array = model.weights.toarray()
    return whole if np.ndim(model.intercept) else whole[0]


def is_sparse(array: Any) -> bool:
    """Return True if ``array`` is a SciPy sparse matrix or array."""
    return bool(issparse(array))


def save_model(path: str | os.PathLike[str], model: FittedModel) -> None:
    """Write a model file, which appears under its name when it is complete.

    Parameters
    ----------
    path : str or path-like
        The file to write or replace.
    model : FittedModel
        The model.

    Raises
    ------
    ModelFileError
        If the shapes do not fit together, weights are not finite, or labels neither numbers nor strings.
    OSError
    """
    fault = _fault(model)
    if fault:
        raise ModelFileError(f"{path} is not written, as this is no linear model: {fault}")
    classes = _plain_labels(model.classes)
    weights = _packed(model.weights)
    with atomic_file(path) as file:  # given a name, savez would append a suffix of its own
        np.savez(
            file,
            format=_SECOND if model.loss == Poisson.loss_name or "indices" in weights else _FORMAT,
            library=model.library,
            model=model.model,
            n_features=model.n_features,
            **weights,
            intercept=model.intercept,
            classes=classes,
            **_optional(model),
        )


def _packed(weights: Any) -> dict[str, Any]:
    """Return the arrays to store for the weights: the weights, or positions and values of those that are not zero."""
    if is_sparse(weights):
        scores, features = weights.shape
        rows = np.repeat(np.arange(scores, dtype=np.uint64), np.diff(weights.indptr))
        places = rows * np.uint64(features) + weights.indices.astype(np.uint64)
        return {"indices": places.astype(index_dtype(scores * features)), "values": weights.data}
    flat = weights.reshape(-1)
    index = index_dtype(flat.size)
    if flat.nbytes - np.count_nonzero(flat) * (flat.itemsize + index.itemsize) < _WORTH:
        return {"weights": weights}
    indices = np.flatnonzero(flat)
    return {"indices": indices.astype(index), "values": flat[indices]}


def _unpacked(arrays: dict[str, Array]) -> Any:
    """Return the weights stored in the arrays of a file, as a sparse array if they are large and nearly all zero.

    Raises
    ------
    KeyError, ValueError
        If the arrays do not describe weights.
    """
    if "indices" not in arrays:
        return arrays["weights"]
    indices, values, features = arrays["indices"], arrays["values"], int(arrays["n_features"])
    shape = (*arrays["intercept"].shape, features)
    if indices.ndim != 1 or indices.dtype.kind != "u" or values.shape != indices.shape or values.dtype.kind != "f":
        raise ValueError(f"there are indices of {indices.dtype}, {indices.shape}, and values of {values.dtype}, {values.shape}")
    nbytes = math.prod(shape) * values.dtype.itemsize
    if nbytes > _LARGE and nbytes > _MANY_ZEROS * (values.nbytes + indices.nbytes):
        return _sparse(indices, values, shape)
    if features < 0 or (nbytes > _WORTH and nbytes > memory_left()):
        raise ValueError(f"there is no memory for the weights of {features:,} features, {nbytes:,} bytes")
    weights = np.zeros(shape, values.dtype)
    if len(indices) and ((indices[1:] <= indices[:-1]).any() or indices[-1] >= weights.size):
        raise ValueError(f"the indices of weights do not increase up to {weights.size}")
    weights.reshape(-1)[indices] = values
    return weights


def _sparse(indices: Array, values: Array, shape: tuple[int, ...]) -> Any:
    """Return weights of this shape as a sparse array, given their positions in the flattened array."""
    rows, features = math.prod(shape[:-1]), shape[-1]
    if len(indices) and ((indices[1:] <= indices[:-1]).any() or int(indices[-1]) >= rows * features):
        raise ValueError(f"the indices of weights do not increase up to {rows * features}")
    bounds = np.searchsorted(indices, np.array([row * features for row in range(rows + 1)], np.uint64))
    own = indices.astype(np.uint64) - np.repeat(np.arange(rows, dtype=np.uint64) * np.uint64(features), np.diff(bounds))
    return csr_array((values, own.astype(np.int64), bounds), shape=(rows, features))


def _optional(model: FittedModel) -> dict[str, Any]:
    """Return the optional arrays that this model needs."""
    encoding = None if model.encoding is None else np.frombuffer(model.encoding.to_json().encode(), np.uint8)
    given = {"loss": model.loss or None, "parameter": model.parameter, "zero_based": model.zero_based, "encoding": encoding}
    return {name: value for name, value in given.items() if value is not None}


def load_model(path: str | os.PathLike[str]) -> FittedModel:
    """Read a model file.

    Parameters
    ----------
    path : str or path-like
        A file that :func:`save_model` or ``sparseallreduce train --model-out`` has written.

    Returns
    -------
    FittedModel
        The model with its weights, classes and feature names.

    Raises
    ------
    ModelFileError
        If the file does not exist, is damaged, is not a model file, or has a format that this version does not know.
    """
    try:
        with open_regular(path) as file:
            if file.read(len(_ARCHIVE)) != _ARCHIVE:
                raise ModelFileError(f"{path} is not a model file that can be read: it is something else")
            file.seek(0)
            return _model(path, Npz(file))
    except FileNotFoundError:
        raise ModelFileError(f"there is no model file {path}") from None
    except OSError as error:
        raise ModelFileError(f"{path} is not a model file that can be read: {error.strerror or error}") from None
    except Damaged as fault:
        raise ModelFileError(f"{path} is a damaged model file, or none: {fault}") from None


def _model(path: str | os.PathLike[str], file: Npz) -> FittedModel:
    """Return the model stored in a file. Check the format before reading any array."""
    layout = _word(file, "format") if "format" in file.names else ""
    if layout not in (_FORMAT, _SECOND):
        known = layout.rpartition(" ")[0] == _FORMAT.rpartition(" ")[0]
        newer = f"its format is {layout!r}, this version reads up to {_SECOND!r}: update sparseallreduce"
        reason = newer if known else "it is something else"
        raise ModelFileError(f"{path} is not a model file that can be read: {reason}")
    words = {name: _word(file, name) for name in _WORDS if name in file.names}
    arrays = {name: file.array(name) for name in (*_ARRAYS, *_NUMBERS) if name in file.names}
    if (ragged := next((name for name in _NUMBERS if name in arrays and arrays[name].shape), None)) is not None:
        raise Damaged(f"{ragged!r} is not a number")
    with damage():
        try:
            model = FittedModel(
                words["model"],
                _unpacked(arrays),
                arrays["intercept"],
                arrays["classes"],
                library=words["library"],
                loss=words.get("loss", ""),
                parameter=float(arrays["parameter"]) if "parameter" in arrays else None,
                zero_based=bool(arrays["zero_based"]) if "zero_based" in arrays else None,
                encoding=_encoding(arrays["encoding"]) if "encoding" in arrays else None,
            )
            fault = _fault(model, int(arrays["n_features"]))
        except KeyError as error:
            raise Damaged(f"it lacks {error}") from None
    if fault:
        raise Damaged(fault)
    return model


def _encoding(array: Array) -> Encoding:
    """Return the encoding of columns stored as JSON bytes."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"the encoding of columns is {array.dtype} of {array.ndim} dimensions, not bytes")
    return Encoding.from_json(array.tobytes().decode())


def _word(file: Npz, name: str) -> str:
    """Return a scalar string of the file."""
    word = file.array(name, _LONGEST_WORD)
    if word.shape or word.dtype.kind not in "US":
        raise Damaged(f"{name!r} is not a string")
    with damage():
        return str(word)


def _plain_labels(classes: Array) -> Array:
    """Return the labels as an array that NumPy writes without pickle."""
    if classes.dtype.kind == "O" and all(isinstance(label, str) for label in classes):
        classes = classes.astype(np.str_)
    if classes.dtype.kind not in "biufUS":
        raise ModelFileError(f"labels have to be numbers or strings to be written to a file, not {classes.dtype}")
    return classes


def _fault(model: FittedModel, n_features: int | None = None) -> str | None:
    """Return a description of what is wrong with the shapes and values of a model, or None."""
    weights, intercept, classes = model.weights, np.asarray(model.intercept), model.classes
    sparse = is_sparse(weights)
    numbers: Array = weights.data if sparse else weights
    shape: tuple[int, ...] = weights.shape[1:] if sparse and not intercept.ndim else weights.shape
    if weights.dtype not in (np.float32, np.float64) or weights.ndim not in (1, 2):
        return f"weights are {weights.dtype} of {weights.ndim} dimensions, not float32 or float64 of one or two"
    if model.encoding is not None and model.encoding.features != model.n_features:
        return f"there are weights of {model.n_features} features, and columns of {model.encoding.features}"
    if n_features not in (None, model.n_features):
        return f"there are weights of {model.n_features} features, not {n_features}"
    if classes.ndim != 1:
        return f"classes have {classes.ndim} dimensions, not one"
    if len(shape) == 2 and shape[0] != len(classes):
        return f"there are weights of {shape[0]} scores and {len(classes)} classes"
    if len(shape) == 1 and len(classes) not in (0, 1, 2):
        return f"there is one score for {len(classes)} classes"
    if intercept.shape != shape[:-1]:
        return f"the intercept has the shape {intercept.shape}, not {shape[:-1]}"
    if model.loss and model.model in LOSSES:
        try:
            model_of(model.model, model.loss, model.parameter)
        except ValueError as error:
            return str(error)
    if not (np.isfinite(numbers).all() and np.isfinite(intercept).all()):
        return "some weights are not finite numbers"
    return None
