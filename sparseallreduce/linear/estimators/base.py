"""Base class of the estimators: fit, files, pickles, and checks of the arguments of all ranks."""

from __future__ import annotations

import inspect
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, check_X_y, validate_data

from sparseallreduce.errors import MismatchError
from sparseallreduce.linear.defaults import SOLVERS, chosen_solver, in_rounds
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.linear.estimators.frames import columns_encoded, encoded
from sparseallreduce.linear.estimators.parameters import is_auto
from sparseallreduce.linear.estimators.progress import Progress
from sparseallreduce.linear.estimators.remarks import warn
from sparseallreduce.linear.estimators.rounds import asks_for_steps, check_rounds, train_in_rounds
from sparseallreduce.linear.estimators.run import Call
from sparseallreduce.linear.estimators.samples import Samples, counts_of, dataset_of, digest_of
from sparseallreduce.linear.estimators.scores import target_of
from sparseallreduce.linear.estimators.streaming import StreamingEstimator
from sparseallreduce.linear.metrics import evaluate_scores
from sparseallreduce.linear.model_file import FittedModel, ModelFileError, load_model, save_model
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.training.batches import held_out
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather, gather_results, together
from sparseallreduce.runtime.stalls import collective

__all__ = ["LinearEstimator", "has_partial_fit"]

Array = NDArray[Any]

_Progress = Progress  # the name used in earlier pickles


class LinearEstimator(StreamingEstimator):
    """A linear model with scikit-learn's interface; subclasses define the labels."""

    t_: int

    solver = "auto"  # for models pickled before the parameter existed

    #: Encoding of the columns of a frame as features; None if the model was not fitted on an encoded frame.
    encoding_: Encoding | None = None

    @collective("fit")
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on the samples of all ranks. Collective.

        Parameters
        ----------
        X : array-like, scipy.sparse matrix or array, or frame, shape (samples, n_features)
            This rank's samples, possibly none under mpiexec. float32 is trained in float32, all else in float64. The columns of a frame
            (pandas, polars, Arrow, Hugging Face's datasets) are encoded as those of files are: numbers are features by themselves, each
            string, boolean or category becomes a feature, and so do missing values; ``encoding_`` has their names. Columns are then matched
            by name, in any order. A pandas frame of numbers only is used as in scikit-learn.
        y : array-like, shape (samples,)
        sample_weight : array-like, shape (samples,), optional
            Weight of each sample: 2 is the same as having it twice. With ``C``, the losses are summed with these weights; with ``l2`` and
            ``l1``, the loss is the weighted mean, so that only ratios of weights matter. ``sparseallreduce train`` does the same.

        Raises
        ------
        ValueError
            On every rank, if samples or parameters of any rank are invalid, or those of two ranks do not match.
        DivergenceError
            If the learning rate is too high.
        """
        return self._learn(X, y, sample_weight, passes=self.max_iter, onward=self.warm_start and self._has_weights(), partial=False)

    @collective("evaluate")
    def evaluate(self, X: Any, y: Any, sample_weight: Any = None, *, metrics: Sequence[str] | None = None) -> dict[str, Any]:
        """Return metrics over all ranks' samples by name, the same on every rank. Collective.

        Parameters
        ----------
        X, y, sample_weight
            As for :meth:`fit`. Labels have to be classes of the model.
        metrics : sequence of str, optional
            Keys of :data:`sparseallreduce.linear.metrics.METRICS`, such as ``["f1", "roc_auc"]``; by default all of the model's metrics.

        Returns
        -------
        dict
            The result of :func:`sparseallreduce.linear.metrics.evaluate`.

        Raises
        ------
        ValueError
            On every rank, if a metric or a label is unknown, or all samples have weight zero.
        """
        comm = self._communicator()

        def given() -> tuple[Array, Array, Array | None]:
            scores = self._scores(X, least=comm.size == 1)
            labels = target_of(y, self._meaning().classes, len(scores))
            return scores, labels, None if sample_weight is None else counts_of(sample_weight, len(scores))

        return together(comm, lambda: evaluate_scores(self._meaning(), *agreed(comm, given), comm, metrics))

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write a model file for ``sparseallreduce predict`` and :func:`~sparseallreduce.linear.load_model`. Called on one rank."""
        check_is_fitted(self)
        save_model(path, replace(self._fitted(), encoding=self.encoding_))

    def to_sklearn(self) -> Any:
        """Return a fitted scikit-learn estimator with the same predictions and probabilities.

        See :meth:`sparseallreduce.linear.FittedModel.to_sklearn`. The names of features (``feature_names_in_``) are kept.
        """
        check_is_fitted(self)
        estimator = self._fitted().to_sklearn()
        if self.encoding_ is not None:  # its features are the encoded columns of the frame
            estimator.feature_names_in_ = np.array(list(self.encoding_.names()), object)
        elif hasattr(self, "feature_names_in_"):
            estimator.feature_names_in_ = self.feature_names_in_
        return estimator

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **parameters: Any) -> Self:
        """Return an estimator with the model of a file, to predict or to continue training.

        Raises
        ------
        ModelFileError
            If the file does not exist, is damaged, or holds a model of another class or loss.
        """
        model = load_model(path)
        if model.model not in cls._kinds():
            raise ModelFileError(f"{path} holds a model of kind {model.model!r}, and {cls.__name__} is of kind {cls._model.name!r}")
        if model.loss and "loss" not in parameters:
            parameters = cls._parameters_of(model) | parameters
        estimator = cls(**parameters)
        if model.loss != estimator._loss_model().variant:
            raise ModelFileError(f"{path} holds a model of loss {model.loss or 'default'!r}, not {estimator._loss_model().loss_name!r}")
        estimator.n_features_in_ = model.n_features
        estimator._take(model)
        if model.encoding is not None:
            estimator._know_columns(model.encoding)
        return estimator

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __setstate__(self, state: Any) -> None:
        # An older pickle may lack some of the parameters.
        known = inspect.signature(type(self)).parameters
        super().__setstate__({name: parameter.default for name, parameter in known.items()} | state)

    def __sklearn_clone__(self) -> Any:
        # scikit-learn copies parameters, but communicators cannot be copied.
        bare = object.__new__(type(self))
        bare.__dict__.update(self.__dict__, comm=None)
        twin = BaseEstimator.__sklearn_clone__(bare)
        twin.comm = self.comm
        return twin

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {', '.join(SOLVERS)}, not {self.solver!r}")
        if in_rounds(self.solver):
            check_rounds(self)

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        """Return the model names that files of this estimator may have."""
        return (cls._model.name,)

    @abstractmethod
    def _targets(self, samples: Samples, comm: Any, onward: bool, classes: Any) -> tuple[LinearModel, Array, Array]:
        """Return the model to train, the labels in its form, and the weight of each sample. Collective."""

    @abstractmethod
    def _labels_checked(self, y: Array) -> Array:
        """Return the labels after checking that they suit this estimator."""

    @classmethod
    def _parameters_of(cls, model: FittedModel) -> dict[str, Any]:
        """Return the parameters that select the loss of a model."""
        return {"loss": model.loss}

    def _as_file(self, weights: Any, intercept: Any, classes: Array, kind: str | None = None) -> FittedModel:
        """Return these weights as a :class:`FittedModel`."""
        model = self._loss_model()
        return FittedModel(kind or model.name, weights, intercept, classes, loss=model.variant, parameter=model.parameter)

    def _communicator(self) -> Any:
        return resolve(self.comm)

    def _scores(self, X: Any, least: int = 1) -> Array:
        """Return the scores of this rank's samples, of which there must be at least ``least``."""
        check_is_fitted(self)
        if self.encoding_ is not None:
            return self._scores_of(encoded(X, self.encoding_, least, self))
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False, ensure_min_samples=least)
        return self._scores_of(X)

    def _know_columns(self, encoding: Encoding | None) -> None:
        """Store the encoding of columns, and their names as scikit-learn does."""
        if encoding is None:
            self.__dict__.pop("encoding_", None)
            return
        self.encoding_ = encoding
        self.feature_names_in_: Array = np.array([column.name for column in encoding.columns], object)
        self.n_features_in_: int = len(encoding.columns)

    def _learn(self, X: Any, y: Any, sample_weight: Any, *, passes: int, onward: bool, partial: bool, classes: Any = None) -> Self:
        """Train from zero, or from the present weights if ``onward``; ``partial`` calls continue the step count too. Collective."""
        comm = self._communicator()
        together(comm, lambda: self._learn_on(comm, X, y, sample_weight, passes, onward, partial, classes))
        return self

    def _learn_on(self, comm: Any, X: Any, y: Any, sample_weight: Any, passes: int, onward: bool, partial: bool, classes: Any) -> None:
        X, encoding = columns_encoded(X, self.encoding_ if onward else None, comm)
        samples = agreed(comm, lambda: self._checked(X, y, sample_weight, comm, onward, partial, encoding))
        self._check_same(samples, passes, onward, partial, comm)
        model, target, counts = self._targets(samples, comm, onward, classes)
        dataset, counted, nonzeros = dataset_of(samples.rows, counts, comm, partial)
        dataset = replace(dataset, labels=target)
        self._factors = self._penalty.factors(None if partial else counted * self._share_trained(dataset.total_samples))
        seed = gather_results(comm, lambda: int(check_random_state(self.random_state).randint(2**31)))[0]
        done: list[Any]
        steps = partial or asks_for_steps(self) is not None
        shape = dataset.features, nonzeros / (dataset.total_samples * max(1, dataset.features))
        asked: Any = None if is_auto(self.tol) else self.tol
        self.solver_: str = chosen_solver(self.solver, model, *shape, self._factors, steps, bool(self.early_stopping), comm.size, asked)
        if self.verbose and comm.rank == 0:
            print(f"solver {self.solver_}, l2 {self._factors.l2:.6g}, l1 {self._factors.l1:.6g}")
        dataset, numbers = self._numbered(model, dataset, comm, onward, partial)
        call = Call(passes, seed, getattr(self, "t_", 0) if onward else 0, partial, numbers)
        self._nonzeros = nonzeros + (self._nonzeros if onward and partial else 0)
        live = self._live_on_all(model, dataset, comm) if partial and onward else None
        if in_rounds(self.solver_):
            rounds = train_in_rounds(self, model, dataset, seed, comm)
            self._magnitudes = self._is_scaled = None
            self._keep(model, rounds.learned, np.ones(1, dataset.values.dtype), numbers)
            done, self.t_ = rounds.figures, 0
        else:
            passed = self._train_anew(model, dataset, call, onward, comm) if live is None else self._go_on(live, model, dataset, call, comm)
            done, self.t_ = passed, call.steps + sum(epoch.steps for epoch in passed)
        self.history_: list[list[Any]] = [done]
        self.n_iter_: int = len(done)

    def _share_trained(self, samples: int) -> float:
        """Return the fraction of the samples that are not held out."""
        return 1 - held_out(samples, self.validation_fraction) / samples if self.early_stopping else 1.0

    def _checked(self, X: Any, y: Any, sample_weight: Any, comm: Any, onward: bool, partial: bool, encoding: Encoding | None) -> Samples:
        """Return this rank's samples after checking them and the parameters."""
        self._check_parameters()
        if partial and self.early_stopping:
            raise ValueError("partial_fit does not support early_stopping, which needs all samples at once: call fit, or leave it out")
        self._loss_model()
        form: dict[str, Any] = {
            "accept_sparse": "csr",
            "dtype": [np.float64, np.float32],
            "ensure_min_samples": 1 if comm.size == 1 else 0,
            "ensure_min_features": 0 if encoding is not None else 1,
            "y_numeric": not self._model.classifies,
        }
        if encoding is not None:
            X, y = check_X_y(X, y, estimator=self, **form)
            self._know_columns(encoding)
        else:
            X, y = validate_data(self, X, y, reset=not onward, **form)
            self._know_columns(None)
        labels = self._labels_checked(y)
        counts = counts_of(sample_weight, len(labels))
        rows = csr_array(X)
        if not rows.has_canonical_format:
            rows = rows.copy()
            rows.sum_duplicates()
        if (counts > 0).all():
            return Samples(rows, labels, counts)
        return Samples(rows[counts > 0], labels[counts > 0], counts[counts > 0])

    def _check_same(self, samples: Samples, passes: int, onward: bool, partial: bool, comm: Any) -> None:
        """Raise an error on every rank if shapes, parameters or calls differ between ranks."""
        if comm.size == 1:
            if not samples.rows.shape[0]:
                raise _no_sample()
            return
        own = self.get_params(deep=False)
        for name in ("comm", "random_state", "verbose"):
            del own[name]
        digest = agreed(comm, lambda: digest_of(samples))
        compared = (passes, partial), onward, digest
        ranks = gather(comm, (samples.rows.shape, {name: repr(value) for name, value in own.items()}, *compared))
        widths = [shape[1] for shape, *_ in ranks]
        if len(set(widths)) > 1:
            raise MismatchError(f"all ranks must pass as many features, but ranks 0 to {comm.size - 1} pass {', '.join(map(str, widths))}")
        _check_equal([parameters for _, parameters, *_ in ranks], [name for name, value in own.items() if not callable(value)])
        if len({calls for _, _, calls, *_ in ranks}) > 1:
            raise MismatchError("some ranks call fit, others partial_fit: call the same on all ranks")
        if len({continued for *_, continued, _ in ranks}) > 1:
            raise MismatchError("some ranks have a model to continue from, others have none: use the same model on all ranks")
        if sum(shape[0] for shape, *_ in ranks) == 0:
            raise _no_sample()
        if comm.rank == 0 and samples.rows.shape[0] > 1 and all(bits == digest for *_, bits in ranks):
            warn(f"all {comm.size} ranks pass the same samples, each of which counts {comm.size} times: {_SAME_ROWS}", UserWarning)


def _check_equal(parameters: list[dict[str, str]], names: list[str]) -> None:
    """Raise an error if the named parameters of all ranks, as text, are not equal."""
    for name in names:
        values = list(dict.fromkeys(each[name] for each in parameters))
        if len(values) > 1:
            raise MismatchError(f"all ranks must have the same parameters, but {name} is {' and '.join(values[:2])}")


_SAME_ROWS = "pass different rows on each rank, for example those of shard(X, y) of sparseallreduce.linear"


def has_partial_fit(estimator: LinearEstimator) -> bool:
    """Return True if an estimator has a ``partial_fit``; raise AttributeError, as scikit-learn requires, if it does not."""
    if in_rounds(estimator.solver):
        raise AttributeError(f"partial_fit is for solver='sgd': solver={estimator.solver!r} needs all samples at once, in fit")
    return True


def _no_sample() -> ValueError:
    return ValueError("no rank has a sample with a weight other than zero")
