"""Linear models with scikit-learn's interface, trained on the samples of one process or of all ranks of a communicator.

Under mpiexec every rank passes its own samples, in any number, and all ranks get the same model::

    model = LogisticRegression().fit(X_of_this_rank, y_of_this_rank)

``fit``, ``partial_fit`` and ``score`` are collective: all ranks of the communicator call them. ``predict`` and its relatives
concern only the samples of the caller.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from sparseallreduce.errors import MismatchError
from sparseallreduce.linear.data.labels import huber_epsilon
from sparseallreduce.linear.defaults import COCOA, svm_loss
from sparseallreduce.linear.estimators.base import LinearEstimator, has_partial_fit
from sparseallreduce.linear.estimators.bases import ClassifierMixin, RegressorMixin
from sparseallreduce.linear.estimators.parameters import ATTRIBUTES, PARAMETERS, is_auto
from sparseallreduce.linear.estimators.rounds import asks_for_steps
from sparseallreduce.linear.estimators.samples import Samples, counts_of
from sparseallreduce.linear.estimators.scores import Predicted, accuracy, determination, right_of
from sparseallreduce.linear.model_file import FittedModel, is_sparse
from sparseallreduce.linear.models import OF_EPSILON, Hinge, LinearModel, Logistic, Poisson, Squared, model_of
from sparseallreduce.linear.multiclass import CHOICES, Multinomial, model_of_classes
from sparseallreduce.runtime.objects import agreed, gather_results, together
from sparseallreduce.runtime.stalls import collective

__all__ = ["LinearRegression", "LinearSVM", "LogisticRegression"]

Array = NDArray[Any]


def _with(listed: str, parameters: str) -> str:
    """Return a list of parameters with these inserted before ``l2``."""
    return listed.replace("    l2, l1", parameters + "    l2, l1", 1)


_SOLVER = """    solver : {"auto", "dual", "cocoa", "newton", "sgd"}
        "sgd" takes steps along gradients of batches. "dual" is dual coordinate ascent on every rank in rounds
        (:class:`sparseallreduce.linear.solvers.CoCoA`), which needs no learning rate, and bounds the distance of the loss from its minimum;
        "cocoa" is the same with a penalised intercept as in LIBLINEAR, and one-versus-rest. "newton" is Newton's method, which needs
        few iterations, whatever the number of ranks; losses with a kink (hinge, epsilon-insensitive) need few features. "auto" selects
        "newton" for at most 400 weights per score (100 for a loss with a kink), otherwise "dual"; and "sgd" if ``partial_fit`` is called,
        a parameter is only for SGD steps, or the penalty allows no other.
        For all but "sgd", ``max_iter`` is the largest number of rounds; ``tol`` is the duality gap at which they end, as a fraction of the
        loss: "auto" is 1e-3, and None makes all rounds. With ``early_stopping`` they also end when the loss on the samples held out has not
        decreased for ``n_iter_no_change`` rounds, "auto" 5. ``history_`` has :class:`~sparseallreduce.linear.solvers.Figures`, in which
        the loss of a round is None if it was not needed. Only "sgd" has ``partial_fit``; with the others, parameters of SGD steps
        must have their defaults.
"""

_CLASSIFIER_PARAMETERS = (
    PARAMETERS
    + """    class_weight : dict, "balanced" or None
        Factor of the sample weights of each class; "balanced" gives all classes the same total weight.
"""
    + _SOLVER
    + """
    Attributes
    ----------
    classes_ : ndarray, shape (classes,)
        The labels of all ranks, sorted.
    coef_ : ndarray or csr_array, shape (1 or classes, n_features)
        Weights of the one score for two classes, otherwise of one score per class. Sparse if less than half of the features occur and an
        array would be larger than the training data and a megabyte, or after :meth:`sparsify`.
    intercept_ : ndarray, shape (1 or classes,)
"""
    + ATTRIBUTES
)


class _LinearClassifier(ClassifierMixin, LinearEstimator):
    """Base class of classifiers: one score for two classes, one per class for more."""

    _multiclass = "auto"  # method for more than two classes

    def __init__(
        self,
        *,
        C: float = 1.0,
        l1_ratio: float = 0.0,
        penalty: str | None = "auto",
        l2: float | None = None,
        l1: float = 0.0,
        fit_intercept: bool = True,
        update: str = "auto",
        learning_rate: float | str = "auto",
        schedule: Any = "auto",
        momentum: float | str = "auto",
        average: bool | int = False,
        batch_size: int | str = "auto",
        max_iter: int = 1000,
        tol: float | str | None = "auto",
        n_iter_no_change: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        scale_features: bool | str = "auto",
        class_weight: Any = None,
        strategy: str | None = None,
        algorithm: str = "auto",
        density: float | None = None,
        threads: int = 1,
        n_jobs: int | None = None,
        random_state: Any = 0,
        warm_start: bool = False,
        verbose: int = 0,
        solver: str = "auto",
        comm: Any = None,
    ) -> None:
        super().__init__(
            C=C,
            l1_ratio=l1_ratio,
            penalty=penalty,
            l2=l2,
            l1=l1,
            fit_intercept=fit_intercept,
            update=update,
            learning_rate=learning_rate,
            schedule=schedule,
            momentum=momentum,
            average=average,
            batch_size=batch_size,
            max_iter=max_iter,
            tol=tol,
            n_iter_no_change=n_iter_no_change,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            scale_features=scale_features,
            strategy=strategy,
            algorithm=algorithm,
            density=density,
            threads=threads,
            n_jobs=n_jobs,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            comm=comm,
        )
        self.class_weight = class_weight
        self.solver = solver

    @available_if(has_partial_fit)  # type: ignore[untyped-decorator]
    @collective("partial_fit")
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Make one pass over the samples of all ranks, continuing from the last call. Collective.

        Steps, learning rate, velocity and average continue from call to call, and start again after :meth:`fit`, or if ``coef_``
        is set. The gradient norms of adaptive steps continue after :meth:`fit` too.

        With the strategies "sparse" and "overlapped" the cost of a call depends on the non-zeros of its samples, not on the number of
        features: ``coef_`` is computed when it is read, and the next call then checks whether it has been changed. Once in thousands of
        steps there is a pass over all weights. A call that raises, or is interrupted, leaves the model as it was before.

        Parameters
        ----------
        X, y
            As for :meth:`fit`.
        sample_weight : array-like, shape (samples,), optional
            Factor of the loss of each sample, as in scikit-learn's ``SGDClassifier``: the weights are comparable between calls.
        classes : array-like, optional
            All labels that this and later calls may have; required in the first call.
        """
        onward = self._has_weights()
        return self._learn(X, y, sample_weight, passes=1, onward=onward, partial=True, classes=() if classes is None else classes)

    def decision_function(self, X: Any) -> Array:
        """Return the scores of this rank's samples, of shape (samples,) for two classes, above 0 for the second; or (samples, classes)."""
        return self._scores(X)

    def predict(self, X: Any) -> Array:
        """Return the labels of this rank's samples, shape (samples,)."""
        scores = self._scores(X)
        return self._meaning().labels_of(scores)

    @collective("score")
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy on all ranks' samples, the same on every rank. Collective."""
        comm = self._communicator()

        def right() -> tuple[float, float]:
            predicted = self._meaning().labels_of(self._scores(X, least=comm.size == 1))
            return right_of(y, predicted, counts_of(sample_weight, len(predicted)))

        return together(comm, lambda: accuracy(gather_results(comm, right)))

    def _kind(self) -> str:
        """Return the name of the model with these scores for more than two classes."""
        return self._model.name

    def _labels_checked(self, y: Array) -> Array:
        if len(y):
            check_classification_targets(y)
        return y

    def _targets(self, samples: Samples, comm: Any, onward: bool, classes: Any) -> tuple[LinearModel, Array, Array]:
        found = _union(gather_results(comm, lambda: np.unique(samples.labels)))
        if classes is None and not onward:
            self.classes_: Array = found
        elif classes is not None:
            self._expect(_union(gather_results(comm, lambda: np.unique(classes))), onward)
        strange = np.setdiff1d(found, self.classes_)
        if len(strange):
            raise ValueError(f"the label {strange[0]!s} is not among the classes {', '.join(map(str, self.classes_[:5]))}, ...")
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs samples of two classes, but there is only one class, {self.classes_[0]!s}")
        numbers = np.searchsorted(self.classes_, samples.labels) if len(samples.labels) else np.empty(0, np.intp)
        counts = samples.counts * self._class_counts(numbers, samples.counts, comm, classes is not None)[numbers]
        model = model_of_classes(self._loss_model(), len(self.classes_), self._multiclass)
        return model, np.where(numbers == 1, 1.0, -1.0) if model.columns is None else numbers.astype(np.float64), counts

    def _expect(self, classes: Array, onward: bool) -> None:
        """Store the classes in the first call, and compare them in later ones."""
        if not onward:
            if len(classes) == 0:
                raise ValueError("classes must be passed on the first call to partial_fit")
            self.classes_ = classes
        elif len(classes) and not np.array_equal(classes, self.classes_):
            raise ValueError(f"classes are {classes!r}, but were {self.classes_!r} in the first call to partial_fit")

    def _class_counts(self, numbers: Array, counts: Array, comm: Any, partial: bool) -> Array:
        """Return the weight of each class."""
        if self.class_weight is None:
            return np.ones(len(self.classes_))
        if not isinstance(self.class_weight, str):
            return np.asarray(compute_class_weight(self.class_weight, classes=self.classes_, y=self.classes_))
        if self.class_weight != "balanced" or partial:
            reason = "needs all samples: compute the weights and give a dict" if partial else "is not known: give a dict or 'balanced'"
            raise ValueError(f"class_weight={self.class_weight!r} {reason}")
        shares = np.sum(gather_results(comm, lambda: np.bincount(numbers, counts, len(self.classes_))), axis=0)
        return np.asarray(shares.sum() / (len(shares) * np.where(shares > 0, shares, np.inf)))

    def _take(self, model: FittedModel) -> None:
        self.classes_ = model.classes
        self.coef_ = self._shaped(model.weights)
        self.intercept_: Array = np.atleast_1d(model.intercept)

    def _shaped(self, weights: Any) -> Any:
        return weights if is_sparse(weights) else np.atleast_2d(weights)

    def _fitted(self, weights: Any = None) -> FittedModel:
        check_is_fitted(self)
        weights = self.coef_ if weights is None else weights
        if len(self.classes_) > 2:
            return self._as_file(weights, self.intercept_, self.classes_, self._kind())
        return self._as_file(weights if is_sparse(weights) else weights[0], self.intercept_[0], self.classes_)


class LogisticRegression(_LinearClassifier):
    __doc__ = (
        """Logistic regression, with class probabilities (thesis section 2.2.1).
"""
        + _CLASSIFIER_PARAMETERS.replace(
            """
    Attributes
""",
            """    multi_class : str
        Method for more than two classes: "multinomial" uses the softmax of their scores, "ovr" is one-versus-rest;
        "auto" is multinomial for more than two. Two classes always have one score; with "multinomial" it is the difference of the two
        trained scores, which are penalised separately.

    Attributes
""",
        )
        + """
    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> LogisticRegression().fit(X, y).score(X, y) >= 0.94
    True
    """
    )

    _model = Logistic
    multi_class: str = "ovr"  # for models pickled before the parameter existed
    _of_softmax = False  # whether the present scores are those of a softmax

    def __init__(
        self,
        *,
        C: float = 1.0,
        l1_ratio: float = 0.0,
        penalty: str | None = "auto",
        l2: float | None = None,
        l1: float = 0.0,
        fit_intercept: bool = True,
        update: str = "auto",
        learning_rate: float | str = "auto",
        schedule: Any = "auto",
        momentum: float | str = "auto",
        average: bool | int = False,
        batch_size: int | str = "auto",
        max_iter: int = 1000,
        tol: float | str | None = "auto",
        n_iter_no_change: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        scale_features: bool | str = "auto",
        class_weight: Any = None,
        multi_class: str = "auto",
        strategy: str | None = None,
        algorithm: str = "auto",
        density: float | None = None,
        threads: int = 1,
        n_jobs: int | None = None,
        random_state: Any = 0,
        warm_start: bool = False,
        verbose: int = 0,
        solver: str = "auto",
        comm: Any = None,
    ) -> None:
        super().__init__(
            C=C,
            l1_ratio=l1_ratio,
            penalty=penalty,
            l2=l2,
            l1=l1,
            fit_intercept=fit_intercept,
            update=update,
            learning_rate=learning_rate,
            schedule=schedule,
            momentum=momentum,
            average=average,
            batch_size=batch_size,
            max_iter=max_iter,
            tol=tol,
            n_iter_no_change=n_iter_no_change,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            scale_features=scale_features,
            class_weight=class_weight,
            strategy=strategy,
            algorithm=algorithm,
            density=density,
            threads=threads,
            n_jobs=n_jobs,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            solver=solver,
            comm=comm,
        )
        self.multi_class = multi_class

    @property
    def _multiclass(self) -> str:  # type: ignore[override]
        return "ovr" if self.solver == COCOA and self.multi_class == "auto" else self.multi_class

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        return Logistic.name, Multinomial.name

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.multi_class not in CHOICES:
            raise ValueError(f"multi_class must be one of {', '.join(CHOICES)}, not {self.multi_class!r}")

    def _take(self, model: FittedModel) -> None:
        super()._take(model)
        if len(model.classes) > 2:  # a file may hold either kind
            self._of_softmax = model.model == Multinomial.name

    def _kind(self) -> str:
        return Multinomial.name if self._of_softmax else Logistic.name

    def predict_proba(self, X: Any) -> Array:
        """Return the probability of every class for this rank's samples, shape (samples, classes)."""
        scores = self._scores(X)
        return self._meaning().probabilities_of(scores)

    def predict_log_proba(self, X: Any) -> Array:
        """Return the logarithm of :meth:`predict_proba`."""
        with np.errstate(divide="ignore"):  # a probability may be zero
            return np.log(self.predict_proba(X))


class LinearSVM(_LinearClassifier):
    __doc__ = (
        """A linear support vector machine: the hinge loss or its square (thesis section 2.2.2).
"""
        + _with(
            _CLASSIFIER_PARAMETERS,
            """    loss : {"auto", "hinge", "squared_hinge"}
        Loss, the hinge or its square. "auto" is the squared hinge, as in LIBLINEAR and scikit-learn's ``LinearSVC``, except with SGD steps
        (requested by ``partial_fit``, a parameter or ``solver``) and with the solver "cocoa", which use the hinge.
""",
        )
        + """
    Examples
    --------
    >>> LinearSVM().fit([[0.0], [1.0]], ["ham", "spam"]).predict([[0.9]])
    array(['spam'], dtype='<U4')
    """
    )

    _model = Hinge
    _chosen_loss = Hinge.loss_name  # loss that "auto" selected in the last call

    def __init__(
        self,
        *,
        loss: str = "auto",
        C: float = 1.0,
        l1_ratio: float = 0.0,
        penalty: str | None = "auto",
        l2: float | None = None,
        l1: float = 0.0,
        fit_intercept: bool = True,
        update: str = "auto",
        learning_rate: float | str = "auto",
        schedule: Any = "auto",
        momentum: float | str = "auto",
        average: bool | int = False,
        batch_size: int | str = "auto",
        max_iter: int = 1000,
        tol: float | str | None = "auto",
        n_iter_no_change: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        scale_features: bool | str = "auto",
        class_weight: Any = None,
        strategy: str | None = None,
        algorithm: str = "auto",
        density: float | None = None,
        threads: int = 1,
        n_jobs: int | None = None,
        random_state: Any = 0,
        warm_start: bool = False,
        verbose: int = 0,
        solver: str = "auto",
        comm: Any = None,
    ) -> None:
        super().__init__(
            C=C,
            l1_ratio=l1_ratio,
            penalty=penalty,
            l2=l2,
            l1=l1,
            fit_intercept=fit_intercept,
            update=update,
            learning_rate=learning_rate,
            schedule=schedule,
            momentum=momentum,
            average=average,
            batch_size=batch_size,
            max_iter=max_iter,
            tol=tol,
            n_iter_no_change=n_iter_no_change,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            scale_features=scale_features,
            class_weight=class_weight,
            strategy=strategy,
            algorithm=algorithm,
            density=density,
            threads=threads,
            n_jobs=n_jobs,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            solver=solver,
            comm=comm,
        )
        self.loss = loss

    def _learn(self, *given: Any, partial: bool, **call: Any) -> Self:
        before = self._chosen_loss
        self._chosen_loss = svm_loss(self.solver, partial or asks_for_steps(self) is not None)
        try:
            return super()._learn(*given, partial=partial, **call)
        except BaseException:
            self._chosen_loss = before
            raise

    def _loss_model(self) -> LinearModel:
        return model_of(self._model.name, self._chosen_loss if is_auto(self.loss) else self.loss)


class LinearRegression(RegressorMixin, LinearEstimator):
    intercept_: float

    __doc__ = (
        """Linear regression by least squares or another loss.
"""
        + _with(
            PARAMETERS,
            """    loss : {"squared", "huber", "quantile", "poisson", "epsilon_insensitive", "squared_epsilon_insensitive"}
        Loss: least squares; "huber", squared up to ``epsilon`` and linear beyond; "quantile" regression; "poisson", half the deviance of
        counts with the exponential of the score as their mean; or support vector regression, which ignores errors up to ``epsilon``, and
        counts larger ones by their excess or its square, as in scikit-learn's ``LinearSVR`` and LIBLINEAR.
    epsilon : float or "auto"
        Parameter of the losses, in units of the labels. "auto" is 0 for the epsilon-insensitive losses, as in ``LinearSVR``, and for
        "huber" 1.35 times the spread of the labels, which is 1.4826 times their median distance from the median: so the unit of the labels
        has no effect.
    quantile : float
        For the loss "quantile": fraction of the labels that should be below the prediction.
""",
        )
        + _SOLVER
        + """
    Attributes
    ----------
    epsilon_ : float
        Value chosen for ``epsilon="auto"``.
    coef_ : ndarray, shape (n_features,), or csr_array, shape (1, n_features)
        Weights. Sparse if less than half of the features occur and an array would be larger than the training data and a megabyte, or after
        :meth:`sparsify`.
    intercept_ : float
"""
        + ATTRIBUTES
        + """
    Examples
    --------
    >>> LinearRegression(l2=0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0]).predict([[4.0]]).round(2)
    array([9.])
    """
    )

    _model = Squared
    epsilon_: float = 0.0  # value chosen for epsilon="auto" in the last call that started from zero

    def __init__(
        self,
        *,
        loss: str = "squared",
        epsilon: float | str = "auto",
        quantile: float = 0.5,
        C: float | None = None,
        l1_ratio: float = 0.0,
        penalty: str | None = "auto",
        l2: float | None = None,
        l1: float = 0.0,
        fit_intercept: bool = True,
        update: str = "auto",
        learning_rate: float | str = "auto",
        schedule: Any = "auto",
        momentum: float | str = "auto",
        average: bool | int = False,
        batch_size: int | str = "auto",
        max_iter: int = 1000,
        tol: float | str | None = "auto",
        n_iter_no_change: int | str = "auto",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        scale_features: bool | str = "auto",
        strategy: str | None = None,
        algorithm: str = "auto",
        density: float | None = None,
        threads: int = 1,
        n_jobs: int | None = None,
        random_state: Any = 0,
        warm_start: bool = False,
        verbose: int = 0,
        solver: str = "auto",
        comm: Any = None,
    ) -> None:
        super().__init__(
            C=C,
            l1_ratio=l1_ratio,
            penalty=penalty,
            l2=l2,
            l1=l1,
            fit_intercept=fit_intercept,
            update=update,
            learning_rate=learning_rate,
            schedule=schedule,
            momentum=momentum,
            average=average,
            batch_size=batch_size,
            max_iter=max_iter,
            tol=tol,
            n_iter_no_change=n_iter_no_change,
            early_stopping=early_stopping,
            validation_fraction=validation_fraction,
            scale_features=scale_features,
            strategy=strategy,
            algorithm=algorithm,
            density=density,
            threads=threads,
            n_jobs=n_jobs,
            random_state=random_state,
            warm_start=warm_start,
            verbose=verbose,
            comm=comm,
        )
        self.solver = solver
        self.loss = loss
        self.epsilon = epsilon
        self.quantile = quantile

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.loss == Poisson.loss_name  # counts
        return tags

    @available_if(has_partial_fit)  # type: ignore[untyped-decorator]
    @collective("partial_fit")
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Make one pass over the samples of all ranks, continuing from the last call. Collective.

        Steps, learning rate, velocity and average continue from call to call, and start again after :meth:`fit`, or if ``coef_``
        is set. The gradient norms of adaptive steps continue after :meth:`fit` too.

        With the strategies "sparse" and "overlapped" the cost of a call depends on the non-zeros of its samples, not on the number of
        features: ``coef_`` is computed when it is read, and the next call then checks whether it has been changed. Once in thousands of
        steps there is a pass over all weights. A call that raises, or is interrupted, leaves the model as it was before.

        Parameters
        ----------
        X, y
            As for :meth:`fit`.
        sample_weight : array-like, shape (samples,), optional
            Factor of the loss of each sample, as in scikit-learn's ``SGDRegressor``: the weights are comparable between calls.
        """
        return self._learn(X, y, sample_weight, passes=1, onward=self._has_weights(), partial=True)

    def predict(self, X: Any) -> Array:
        """Return the predicted numbers of this rank's samples, shape (samples,): the scores, or for "poisson" their exponentials."""
        scores = self._scores(X)
        return self._meaning().labels_of(scores)

    @collective("score")
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the coefficient of determination R^2 over all ranks' samples, the same on every rank. Collective."""
        comm = self._communicator()

        def given() -> Predicted:
            predicted = self._meaning().labels_of(self._scores(X, least=comm.size == 1))
            return Predicted.of(y, predicted, counts_of(sample_weight, len(predicted)))

        return together(comm, lambda: determination(agreed(comm, given), comm))

    def _loss_model(self) -> LinearModel:
        parameter: Any = self.quantile if self.loss == "quantile" else None
        if self.loss in OF_EPSILON:
            parameter = (self.epsilon_ or None) if is_auto(self.epsilon) else self.epsilon
        return model_of(self._model.name, self.loss, parameter)

    @classmethod
    def _parameters_of(cls, model: FittedModel) -> dict[str, Any]:
        named = "quantile" if model.loss == "quantile" else "epsilon" if model.loss in OF_EPSILON else None
        return {"loss": model.loss} | ({named: model.parameter} if named else {})

    def _largest_curvature(self, model: LinearModel, labels: Array, comm: Any) -> float:
        sums = gather_results(comm, lambda: (labels.sum(), len(labels), labels.max(initial=-np.inf)))
        total, count, highest = (list(column) for column in zip(*sums))
        mean = sum(total) / sum(count)
        spread = sum(gather_results(comm, lambda: float(np.abs(labels - mean).sum()))) / sum(count)
        return model.curvature_at(spread, float(max(highest)))

    def _labels_checked(self, y: Array) -> Array:
        labels = np.asarray(y, np.float64)
        if self._loss_model().label_fault(labels).any():
            raise ValueError(f"the loss {self.loss} is undefined for labels below 0, but the lowest is {labels.min():g}")
        return labels

    def _targets(self, samples: Samples, comm: Any, onward: bool, classes: Any) -> tuple[LinearModel, Array, Array]:
        if is_auto(self.epsilon) and not (onward and "epsilon_" in self.__dict__):
            self.epsilon_ = huber_epsilon(samples.labels, samples.counts, comm) if self.loss == "huber" else 0.0
        return self._loss_model(), samples.labels, samples.counts

    def _take(self, model: FittedModel) -> None:
        self.coef_, self.intercept_ = model.weights, float(model.intercept)

    def _fitted(self, weights: Any = None) -> FittedModel:
        return self._as_file(self.coef_ if weights is None else weights, self.intercept_, np.empty(0))


def _union(parts: list[Array]) -> Array:
    """Return the sorted labels of all ranks. Ranks without labels have no type to compare."""
    held = [part for part in parts if len(part)]
    kinds = {"number" if part.dtype.kind in "biuf" else "string" for part in held}
    if len(kinds) > 1:
        raise MismatchError("the labels of some ranks are numbers, those of others strings")
    return np.unique(np.concatenate(held)) if held else np.empty(0)
