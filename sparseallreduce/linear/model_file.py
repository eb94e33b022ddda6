"""The model file: a NumPy ``.npz`` with all that prediction needs. It is read without MPI and without pickle.

===============  =========================  ==================================================================================
array            dtype, shape               what it holds
===============  =========================  ==================================================================================
format           string                     "sparseallreduce linear model 1"; or 2, where predictions are not the scores, or
                                            weights are left out that are zero
library          string                     version of sparseallreduce that wrote the file
model            string                     "logistic", "multinomial", "svm", "linear", or the name of a model of one's own
n_features       int64                      N
weights          float32/64, (N,) or (K,N)  of the one score, or with more than two classes of the score of each
indices, values  uint32/64, float32/64, (k,)  instead of weights, where that is smaller by a mebibyte: places, increasing, of the
                                            weights that are not zero, among those of all scores one after the other
intercept        float64, () or (K,)        what is added to each score
classes          number or string, (K,)     the labels, sorted; of two, those that a score up to zero and above it stands for;
                                            none if the score is the prediction
loss             string                     of the losses that the model may have, which; left out for the first
parameter        float64, ()                the epsilon or quantile of the loss; left out if it has none
zero_based       bool                       whether indices count from 0 in the svmlight text that it was trained on; left out
                                            if it was not trained on such
encoding         uint8, (bytes,)            how columns of a table are encoded, as UTF-8 of JSON: see linear/encoding.py; left out
                                            if it was not trained on a table
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

_ARCHIVE = b"PK"  # how a file of type .npz begins
_FORMAT = "sparseallreduce linear model 1"
_SECOND = "sparseallreduce linear model 2"  # what version 1 would misunderstand
_WORTH = 1 << 20  # bytes that leaving out zeros has to save: files of few weights are read by NumPy alone
# Bytes of dense weights from which on weights of a file are sparse, if they are so many times what is stored of them.
_LARGE, _MANY_ZEROS = 1 << 27, 8
_WORDS = ("format", "library", "model", "loss")
_NUMBERS = ("n_features", "parameter", "zero_based")
_ARRAYS = ("weights", "indices", "values", "intercept", "classes", "encoding")
_LONGEST_WORD = 1 << 12  # bytes


class ModelFileError(SparseAllreduceError, ValueError):
    """A file is no model file, is damaged, or does not fit what it is used for."""


@dataclass(frozen=True)
class FittedModel:
    """What training ends with, and what it says of samples.

    Examples
    --------
    >>> model = FittedModel("logistic", np.float32([1, -1]), 0.5, np.array(["ham", "spam"]))
    >>> model.predict(np.array([[2.0, 1.0], [0.0, 3.0]]))
    array(['spam', 'ham'], dtype='<U4')
    >>> model.predict_proba(np.array([[0.0, 0.5]]))
    array([[0.5, 0.5]])
    """

    model: str  # name of the LinearModel
    weights: Any  # float32 or float64, (n_features,), or (classes, n_features) if there are more than two classes; or a SciPy sparse
    # array of two dimensions, where dense weights would be larger than the samples that they are learned from
    intercept: Array | float = 0.0  # one number, or one a class
    classes: Array = field(default_factory=lambda: np.empty(0))  # sorted labels; none if the score is the prediction
    library: str = __version__  # that trained it
    loss: str = ""  # which of the losses that a model of this name may have; the first if none is said
    parameter: float | None = None  # of the loss: epsilon or quantile
    zero_based: bool | None = None  # whether indices count from 0 in the svmlight text that it was trained on; None for other data
    encoding: Encoding | None = field(default=None, repr=False)  # how the columns of a table become features; None for other data

    def __post_init__(self) -> None:
        object.__setattr__(self, "intercept", np.asarray(self.intercept, np.float64))
        object.__setattr__(self, "classes", np.asarray(self.classes))

    @property
    def n_features(self) -> int:
        """Dimension N."""
        return int(self.weights.shape[-1])

    def name_of(self, index: int) -> str:
        """Return what a feature, counted from 0, is called: by its column, or by its index in the text that the model was trained on."""
        return str(index + (self.zero_based is False)) if self.encoding is None else self.encoding.name_of(index)

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are the log-odds of classes."""
        return self.model in (Logistic.name, Multinomial.name) and len(self.classes) >= 2

    def to_sklearn(self) -> Any:
        """Return a fitted estimator of scikit-learn with the same predictions and probabilities.

        It is a ``LogisticRegression``, ``LinearSVC`` or ``Ridge``; of a logistic model of more than two classes, each against the rest, a
        ``OneVsRestClassifier`` of ``LogisticRegression``, as that itself is a softmax of several classes; and of the loss "poisson" a
        ``PoissonRegressor``. It does not need this library, also where it is unpickled.

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
        """The scores ``w.x + intercept``.

        Parameters
        ----------
        samples : ndarray or scipy.sparse matrix or array, shape (samples, n_features)

        Returns
        -------
        ndarray
            Of the weights' dtype; shape (samples,), or (samples, classes) if there are more than two classes.

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
        """The products of samples and sparse weights, at the cost of both their non-zeros."""
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
        """The label of every sample, or the number that its score stands for if the model has no classes; shape (samples,)."""
        return self.labels_of(self.decision_function(samples))

    def predict_proba(self, samples: Any) -> Array:
        """The probability of every class, float64 of shape (samples, classes).

        Raises
        ------
        ModelFileError
            If the model is not logistic, whose scores alone are log-odds.
        """
        return self.probabilities_of(self.decision_function(samples))

    def labels_of(self, scores: Array) -> Array:
        """The predictions that scores stand for."""
        if len(self.classes) == 0:
            return self._linked(scores)
        chosen = scores.argmax(axis=1) if scores.ndim == 2 else (scores > 0).astype(np.intp)
        labels: Array = self.classes[chosen]
        return labels

    def _linked(self, scores: Array) -> Array:
        """The numbers that scores stand for, which are themselves but for losses that say otherwise."""
        losses = LOSSES.get(self.model, {})
        return model_of(self.model, self.loss, self.parameter).prediction(scores) if self.loss in losses else scores

    def probabilities_of(self, scores: Array) -> Array:
        """The probabilities that scores stand for: their softmax, or of classes each against the rest, scaled to a sum of one."""
        if not self.gives_probabilities:
            raise ModelFileError(f"only a logistic classifier gives probabilities, and this model is {self.model!r}")
        if self.model == Multinomial.name:
            return Multinomial.probabilities(scores.astype(np.float64))
        positive = Logistic().prediction(scores.astype(np.float64))
        if positive.ndim == 1:
            return np.column_stack([1 - positive, positive])
        sums = positive.sum(axis=1, keepdims=True)
        # All classes may be out of the question by so much that every probability is rounded to zero.
        shares: Array = np.divide(positive, sums, out=np.full_like(positive, 1 / len(self.classes)), where=sums > 0)
        return shares


def fitted(model: LinearModel, weights: Array, intercept: Array | float, classes: Array) -> FittedModel:
    """What training has come to.

    Parameters
    ----------
    model : LinearModel
        That was trained.
    weights : ndarray, shape (n_features,) or (n_features, K)
    intercept : float or ndarray
        One number, or one a column.
    classes : ndarray
        Labels, as for :class:`FittedModel`. The two scores of a multinomial model of two classes become one, their difference, which
        gives the same labels and probabilities.

    Examples
    --------
    >>> from sparseallreduce.linear import Multinomial
    >>> fitted(Multinomial(2), np.float32([[-1, 1], [2, -2]]), np.array([0.5, -0.5]), np.array([3, 7])).weights
    array([ 2., -4.], dtype=float32)
    """
    said: dict[str, Any] = {"loss": model.variant, "parameter": model.parameter}
    if weights.ndim == 1:
        return FittedModel(model.name, weights, intercept, classes, **said)
    shifts = np.asarray(intercept)
    if model.name == Multinomial.name and len(classes) == 2:
        return FittedModel(Logistic.name, weights[:, 1] - weights[:, 0], shifts[1] - shifts[0], classes)
    return FittedModel(model.name, np.ascontiguousarray(weights.T), shifts, classes, **said)


def scores_for(model: LinearModel, found: FittedModel) -> tuple[Array, Array]:
    """Weights and intercepts for a training of this model to go on from: the inverse of :func:`fitted`.

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
    """Return the weights of a model as an array of shape (n_features,) or (classes, n_features), whatever memory it takes."""
    if not is_sparse(model.weights):
        return np.asarray(model.weights)
    whole: Array = model.weights.toarray()
    return whole if np.ndim(model.intercept) else whole[0]


def is_sparse(array: Any) -> bool:
    """Return True for a SciPy sparse matrix or array."""
    return bool(issparse(array))


def save_model(path: str | os.PathLike[str], model: FittedModel) -> None:
    """Write a model file; it appears under its name when it is complete.

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
    """The arrays that stand for weights: themselves, or places and values of those that are not zero."""
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
    """The weights that the arrays of a file stand for, sparse where they are many and nearly all are zero.

    Raises
    ------
    KeyError, ValueError
        If they stand for none.
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
    """Weights of this shape as a sparse array, by their places among those of all scores."""
    rows, features = math.prod(shape[:-1]), shape[-1]
    if len(indices) and ((indices[1:] <= indices[:-1]).any() or int(indices[-1]) >= rows * features):
        raise ValueError(f"the indices of weights do not increase up to {rows * features}")
    bounds = np.searchsorted(indices, np.array([row * features for row in range(rows + 1)], np.uint64))
    own = indices.astype(np.uint64) - np.repeat(np.arange(rows, dtype=np.uint64) * np.uint64(features), np.diff(bounds))
    return csr_array((values, own.astype(np.int64), bounds), shape=(rows, features))


def _optional(model: FittedModel) -> dict[str, Any]:
    """What is written where there is any."""
    encoding = None if model.encoding is None else np.frombuffer(model.encoding.to_json().encode(), np.uint8)
    given = {"loss": model.loss or None, "parameter": model.parameter, "zero_based": model.zero_based, "encoding": encoding}
    return {name: value for name, value in given.items() if value is not None}


def load_model(path: str | os.PathLike[str]) -> FittedModel:
    """Read a model file.

    Raises
    ------
    ModelFileError
        If there is none, or it is damaged, foreign, or of a layout that this version does not know.
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
    """The model that the arrays of a file stand for, which are not read before the file is known to be of a layout of ours."""
    layout = _word(file, "format") if "format" in file.names else ""
    if layout not in (_FORMAT, _SECOND):
        known = layout.rpartition(" ")[0] == _FORMAT.rpartition(" ")[0]
        newer = f"its format is {layout!r}, this version reads up to {_SECOND!r}: update sparseallreduce"
        reason = newer if known else "it is something else"
        raise ModelFileError(f"{path} is not a model file that can be read: {reason}")
    words = {name: _word(file, name) for name in _WORDS if name in file.names}
    arrays = {name: file.array(name) for name in (*_ARRAYS, *_NUMBERS) if name in file.names}
    if (ragged := next((name for name in _NUMBERS if name in arrays and arrays[name].shape), None)) is not None:
        raise Damaged(f"{ragged!r} is no number")
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
    """How columns are encoded, of the bytes of JSON in a file."""
    if array.dtype != np.uint8 or array.ndim != 1:
        raise ValueError(f"the encoding of columns is {array.dtype} of {array.ndim} dimensions, not bytes")
    return Encoding.from_json(array.tobytes().decode())


def _word(file: Npz, name: str) -> str:
    """A string that stands by itself."""
    word = file.array(name, _LONGEST_WORD)
    if word.shape or word.dtype.kind not in "US":
        raise Damaged(f"{name!r} is no word")
    with damage():
        return str(word)


def _plain_labels(classes: Array) -> Array:
    """Labels as an array that is written without pickle."""
    if classes.dtype.kind == "O" and all(isinstance(label, str) for label in classes):
        classes = classes.astype(np.str_)
    if classes.dtype.kind not in "biufUS":
        raise ModelFileError(f"labels have to be numbers or strings to be written to a file, not {classes.dtype}")
    return classes


def _fault(model: FittedModel, n_features: int | None = None) -> str | None:
    """What is wrong with the shapes and values of a model, None if nothing is."""
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
