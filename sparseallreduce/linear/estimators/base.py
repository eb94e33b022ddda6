"""What the estimators share: parameters, checks of what the ranks pass, training of one score or of all at once, files."""

from __future__ import annotations

import copy
import inspect
import math
import os
import warnings
import zlib
from abc import abstractmethod
from dataclasses import replace
from numbers import Number
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from sparseallreduce.errors import MismatchError
from sparseallreduce.linear.data.checks import described
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import (
    adaptive_rate_unit,
    feature_magnitudes,
    feature_scales,
    largest_eigenvalue,
    sample_moments,
    scaled,
)
from sparseallreduce.linear.model_file import FittedModel, ModelFileError, fitted, load_model, save_model, scores_for
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES, LossyStrategy, ParameterServer, SparseStrategy, Strategy
from sparseallreduce.linear.training.early_stopping import EarlyStopping
from sparseallreduce.linear.training.schedules import SCHEDULES, Onward, Plateau, Reactive, Schedule
from sparseallreduce.linear.training.trainer import Epoch, Options, Trainer
from sparseallreduce.linear.weights import UPDATES, Descent
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed, gather
from sparseallreduce.streams.stream import index_dtype

__all__ = ["ATTRIBUTES", "PARAMETERS", "PLATEAU", "LinearEstimator", "Samples", "counts_of"]

Array = NDArray[Any]

PLATEAU = "plateau"
# A parameter server holds no samples, but every rank that calls fit does.
_REPLICATED = {name: kind for name, kind in STRATEGIES.items() if not issubclass(kind, ParameterServer)}
_CUT = 0.25  # what a plateau multiplies the learning rate by
_PLATEAUS = 4  # the last of which ends training
_SWING = 3  # times the steps that a velocity lasts

PARAMETERS = """
    Parameters
    ----------
    l2, l1 : float
        Factors of the penalties ``l2 / 2 * |w|^2`` and ``l1 * |w|_1``, beside the mean loss of a sample, on the weights of scaled
        features. Where other libraries have C over M samples, l2 is 1 / (M C), without ``scale_features``.
    fit_intercept : bool
        Whether a number, which is not penalised, is added to every score.
    update : str
        How a step changes the weights: "ftrl", each by a learning rate of its own, which falls as its gradients add up (FTRL-Proximal,
        without penalties AdaGrad), or "sgd", all by one. "ftrl" comes near the least loss in few passes, and "sgd" to it in many.
        "auto" takes "ftrl" from 10,000 features on, unless ``momentum``, ``average`` or ``schedule`` ask for "sgd", which alone has them,
        ``learning_rate`` is a number, or the strategy is a lossy one.
    learning_rate : float or "auto"
        Of "ftrl", how far the first step moves each weight of a sample, in units of the spread of the labels (1 for classes) over the
        samples' length; "auto" is 0.5. Of "sgd", the factor of the mean gradient; "auto" takes the inverse of the loss's largest
        curvature, which is estimated from the samples. In calls of ``partial_fit``, both go by the samples of all calls so far.
    schedule : str or callable
        How the rate changes: "plateau" divides it by four when the loss stops falling, and ends training when it has not fallen after
        four times; another name of :data:`sparseallreduce.linear.SCHEDULES`; or a function that makes a schedule of a rate. Calls of
        ``partial_fit`` go on with the steps and losses of those before, but "plateau" keeps the rate: losses of other samples do not say
        whether it has fallen. "auto" is "plateau" for "sgd" and "constant" for "ftrl", which takes no other.
    momentum : float or "auto"
        The share of a step's velocity that is left in the next, below 1; "auto" is 0.9 for "sgd". "ftrl" has none.
    average : bool or int
        Whether ``coef_`` is the mean of the weights after all steps, or after all but the first so many: of a ``fit``, or of the calls
        of ``partial_fit`` that follow each other. Of "sgd" alone.
    batch_size : int or "auto"
        Samples a rank and step; "auto" is 64 for "ftrl" and 256 for "sgd".
    max_iter : int
        Passes over the samples at most.
    tol : float, "auto" or None
        The loss has stopped falling when ``n_iter_no_change`` passes have not lowered it by this share of the loss without features;
        "auto" is 0.005 for "ftrl" and 1e-4 for "sgd". None makes all ``max_iter`` passes at one rate.
    n_iter_no_change : int or "auto"
        "auto" is 2 for "ftrl" and 5 for "sgd". In any case as many passes as have 3 / (1 - momentum) steps, where there is momentum.
    early_stopping : bool
        Whether ``fit`` holds samples out, ends when the loss on these has not fallen so for ``n_iter_no_change`` passes, and gives the
        weights after the pass where it was least. The samples depend on ``random_state``, and not on the number of ranks. For calls of
        ``partial_fit`` it is an error, as in scikit-learn.
    validation_fraction : float
        The share of all ranks' samples that is held out then.
    scale_features : bool
        Whether every feature is divided by the power of two at or next above its largest magnitude on any rank; ``coef_`` belongs to
        the features as they are given.
    strategy : str
        How the ranks' gradients are brought together: a name of :data:`sparseallreduce.linear.STRATEGIES`, without those that have
        servers.
    algorithm : str
        Of the sparse allreduce: any of :func:`sparseallreduce.algorithms`.
    density : float, optional
        Of the lossy strategies, :data:`sparseallreduce.linear.LOSSY`: the share of the weights that a step may change, by default 0.01.
        What the others would change waits in residuals, for the next ``partial_fit``; at the end of a ``fit`` it is dropped.
    threads : int
        Of every rank; how many there are changes no bit.
    random_state : int, RandomState or None
        Of the order of samples; that of rank 0 counts.
    warm_start : bool
        Whether ``fit`` goes on from the weights that are there.
    verbose : int
        Above zero, rank 0 prints a line for every pass.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        The ranks that train together. None is ``MPI.COMM_WORLD``, as everywhere in this library: a process alone trains alone, and
        under mpiexec all train together; with ``sparseallreduce.SERIAL`` a rank trains by itself. Pickles and files hold no
        communicator: what is read from them has None.
"""

ATTRIBUTES = """
    n_features_in_ : int
    feature_names_in_ : ndarray of str
        If X has column names.
    n_iter_ : int
        Passes made.
    history_ : list of list of Epoch
        One list, for all classes are trained at once: what each pass came to: loss, seconds by phase, bytes sent by all ranks. The loss
        is that of the samples after the pass, with the penalty; of a ``partial_fit``, as long as no reactive schedule goes by it, and of
        "ftrl" without ``early_stopping``, that of each sample before the step that it was in.
"""


class Choices(NamedTuple):
    """The parameters of which some have been left to the estimator."""

    update: str
    schedule: Any
    momentum: float
    batch_size: int
    tol: float | None
    n_iter_no_change: int


# What the estimator takes where a parameter is "auto". At a constant rate, loss and accuracy of adaptive steps settle within few passes.
_CHOICES = {
    "ftrl": Choices("ftrl", "constant", 0.0, 64, 5e-3, 2),
    "sgd": Choices("sgd", PLATEAU, 0.9, 256, 1e-4, 5),
}
_ADAPTIVE_RATE = 0.5
# From so many features on, some of them rare, adaptive steps come to a good model sooner. For few, plain ones with momentum reach the least
# loss, and time is no matter: of the sets of scikit-learn they led to the better scores on wine, iris and breast cancer.
_MANY_FEATURES = 10_000


class Samples(NamedTuple):
    """What a call has been given, checked; without the samples that do not count."""

    rows: csr_array  # of float32 or float64
    labels: Array
    counts: Array  # float64, what each sample counts


class _Progress(NamedTuple):
    """How far the calls of ``partial_fit`` have come, beside the weights."""

    passes: int  # that have been made with the same seed
    memory: dict[str, Any]  # of the weights
    schedule: dict[str, float]  # its state
    rates: str  # the parameters that this state is of
    residual: Array | None  # of a lossy strategy: this rank's
    scales: Array  # of the features in these

    def checksum(self) -> int:
        """A number that has to be the same on all ranks, whose weights would drift apart else."""
        bits = zlib.crc32(repr((self.passes, sorted(self.schedule.items()))).encode())
        for name in sorted(self.memory):
            bits = zlib.crc32(np.asarray(self.memory[name]).tobytes(), bits)
        return bits

    @classmethod
    def of(cls, strategy: Strategy, schedule: Schedule, rates: str, passes: int, scales: Array) -> _Progress:
        """What a run has left; collective."""
        residual = strategy.residual.copy() if isinstance(strategy, LossyStrategy) else None
        state = schedule.state() if isinstance(schedule, Reactive) else {}
        return cls(passes, strategy.weights.memory(), state, rates, residual, scales)


class _Run(NamedTuple):
    """A training."""

    learned: Array  # weights, intercept last; with several classes a column a score
    epochs: list[Epoch]
    progress: _Progress | None  # for a partial_fit that follows


class LinearEstimator(BaseEstimator):
    """A linear model with scikit-learn's interface; a subclass says what its labels are."""

    _model: ClassVar[type[LinearModel]]

    def __init__(
        self,
        *,
        l2: float = 1e-4,
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
        scale_features: bool = True,
        strategy: str = "sparse",
        algorithm: str = "auto",
        density: float | None = None,
        threads: int = 1,
        random_state: Any = 0,
        warm_start: bool = False,
        verbose: int = 0,
        comm: Any = None,
    ) -> None:
        self.l2 = l2
        self.l1 = l1
        self.fit_intercept = fit_intercept
        self.update = update
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.momentum = momentum
        self.average = average
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.scale_features = scale_features
        self.strategy = strategy
        self.algorithm = algorithm
        self.density = density
        self.threads = threads
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.comm = comm

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train on the samples of all ranks; collective.

        Parameters
        ----------
        X : array-like or scipy.sparse matrix or array, shape (samples, n_features)
            This rank's samples, of which there may be none under mpiexec. float32 is trained in float32, all else in float64.
        y : array-like, shape (samples,)
        sample_weight : array-like, shape (samples,), optional
            What each sample counts: 2 is as good as having it twice. So the loss is the mean by weights, of which only the ratios
            matter: they change neither the learning rate nor what a penalty weighs. ``sparseallreduce train`` does the same.

        Raises
        ------
        ValueError
            On every rank alike, if samples or parameters of any rank are not right, or those of two ranks do not fit together.
        DivergenceError
            If the learning rate is too high.
        """
        return self._learn(X, y, sample_weight, passes=self.max_iter, onward=self.warm_start and hasattr(self, "coef_"), partial=False)

    def to_file(self, path: str | os.PathLike[str]) -> None:
        """Write a model file, which ``sparseallreduce predict`` and :func:`~sparseallreduce.linear.load_model` read; on one rank."""
        check_is_fitted(self)
        save_model(path, self._fitted())

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **parameters: Any) -> Self:
        """An estimator of these parameters with the model of a file, to predict with or to train on.

        Raises
        ------
        ModelFileError
            If there is no such file, it is damaged, or holds a model of another kind.
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
        return estimator

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def __getstate__(self) -> Any:
        return super().__getstate__() | {"comm": None}

    def __setstate__(self, state: Any) -> None:
        # A pickle may be from before there were some of the parameters.
        known = inspect.signature(type(self)).parameters
        super().__setstate__({name: parameter.default for name, parameter in known.items()} | state)

    def __sklearn_clone__(self) -> Any:
        # scikit-learn copies parameters, which a communicator does not let itself be.
        twin = BaseEstimator.__sklearn_clone__(copy.copy(self))
        twin.comm = self.comm
        return twin

    @classmethod
    def _kinds(cls) -> tuple[str, ...]:
        """The kinds of models that files of this estimator hold."""
        return (cls._model.name,)

    @abstractmethod
    def _targets(self, samples: Samples, comm: Any, onward: bool, classes: Any) -> tuple[LinearModel, Array, Array]:
        """The model that is to be trained, the labels as it takes them, and what each sample counts; collective."""

    @abstractmethod
    def _take(self, model: FittedModel) -> None:
        """Keep what has been learned as scikit-learn's attributes."""

    @abstractmethod
    def _fitted(self) -> FittedModel:
        """What these attributes hold."""

    @abstractmethod
    def _labels_checked(self, y: Array) -> Array:
        """The labels that a call has been given, if they are fit for this estimator."""

    @classmethod
    def _parameters_of(cls, model: FittedModel) -> dict[str, Any]:
        """The parameters that name the loss of a model."""
        return {"loss": model.loss}

    def _loss_model(self) -> LinearModel:
        """The model with the loss of this estimator's parameters."""
        return self._model()

    def _as_file(self, weights: Array, intercept: Any, classes: Array, kind: str | None = None) -> FittedModel:
        """These weights, with what else a file says of the model."""
        model = self._loss_model()
        return FittedModel(kind or model.name, weights, intercept, classes, loss=model.variant, parameter=model.parameter)

    def _communicator(self) -> Any:
        return world() if self.comm is None else self.comm

    def _scores(self, X: Any, least: int = 1) -> Array:
        """The scores of at least so many samples of this rank."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False, ensure_min_samples=least)
        return self._fitted().decision_function(X)

    def _learn(self, X: Any, y: Any, sample_weight: Any, *, passes: int, onward: bool, partial: bool, classes: Any = None) -> Self:
        """Train, from zero or ``onward`` from the weights that are there; collective. A ``partial`` call goes on with the steps as well."""
        comm = self._communicator()
        samples = agreed(comm, lambda: self._checked(X, y, sample_weight, comm, onward, partial))
        self._check_alike(samples, passes, partial, comm)
        model, target, counts = self._targets(samples, comm, onward, classes)
        dataset, scales = self._conditioned(_dataset(samples.rows, counts, comm, partial), comm, onward)
        dataset = replace(dataset, labels=target)
        rate = self._initial_rate(model, dataset, comm, partial, onward)
        unit = self._rate_unit(model, dataset, comm, partial and onward)
        seed = gather(comm, agreed(comm, lambda: int(check_random_state(self.random_state).randint(2**31))))[0]
        steps: int = getattr(self, "t_", 0) if onward else 0

        before = self._progress_so_far(comm) if onward and partial else None
        start = self._start(model, dataset, onward, scales, comm)
        run = self._run(model, dataset, start, rate, unit, steps, passes, seed, comm, scales, partial, before)
        weights = (run.learned[: dataset.features].T / scales).T
        intercept = run.learned[dataset.features :].sum(axis=0, dtype=np.float64)
        self._take(fitted(model, weights, intercept, getattr(self, "classes_", np.empty(0))))
        # Weights that somebody puts in the place of these, or changes, are gone on from anew.
        self._progress = (self._learned(), run.progress) if partial else None
        self.history_ = [run.epochs]
        self.n_iter_ = len(run.epochs)
        self.t_ = steps + sum(epoch.steps for epoch in run.epochs)
        return self

    def _checked(self, X: Any, y: Any, sample_weight: Any, comm: Any, onward: bool, partial: bool) -> Samples:
        """This rank's samples, if they and the parameters are right."""
        self._check_parameters()
        if partial and self.early_stopping:
            raise ValueError("partial_fit does without early_stopping, which needs all samples at once: call fit, or leave it out")
        self._loss_model()
        X, y = validate_data(
            self,
            X,
            y,
            accept_sparse="csr",
            dtype=[np.float64, np.float32],
            ensure_min_samples=1 if comm.size == 1 else 0,
            y_numeric=not self._model.classifies,
            reset=not onward,
        )
        labels = self._labels_checked(y)
        counts = counts_of(sample_weight, len(labels))
        rows = csr_array(X)
        if not rows.has_canonical_format:
            rows = rows.copy()
            rows.sum_duplicates()
        if (counts > 0).all():
            return Samples(rows, labels, counts)
        return Samples(rows[counts > 0], labels[counts > 0], counts[counts > 0])

    def _choices(self) -> Choices:
        """The parameters that may be "auto", chosen."""
        update = self.update
        if update == "auto":
            of_sgd = self._of_sgd_alone() or not _is_auto(self.learning_rate) or self.strategy in LOSSY
            update = "sgd" if of_sgd or self.n_features_in_ < _MANY_FEATURES else "ftrl"
        chosen = {name: getattr(self, name) for name in Choices._fields if name != "update"}
        return _CHOICES[update]._replace(**{name: value for name, value in chosen.items() if not _is_auto(value)})

    def _of_sgd_alone(self) -> list[str]:
        """The names of parameters that ask for what adaptive weights are without."""
        asked = {
            "momentum": not _is_auto(self.momentum) and self.momentum != 0,
            "average": self.average is not False,
            "schedule": not (isinstance(self.schedule, str) and self.schedule in ("auto", "constant")),
        }
        return [name for name, is_so in asked.items() if is_so]

    def _check_parameters(self) -> None:
        at_least = {"l2": 0, "l1": 0, "average": 0, "batch_size": 1, "max_iter": 1, "n_iter_no_change": 1, "threads": 1}
        for name, least in at_least.items():
            if not _is_auto(getattr(self, name)) and not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)!r}")
        if not _is_auto(self.momentum) and not 0 <= self.momentum < 1:  # type: ignore[operator]
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum!r}")
        self._check_update()
        if self.learning_rate != "auto" and not (isinstance(self.learning_rate, int | float) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be 'auto' or a number above 0, not {self.learning_rate!r}")
        if self.strategy not in _REPLICATED:
            raise ValueError(f"strategy must be one of {', '.join(_REPLICATED)}, not {self.strategy!r}")
        if self.density is not None:
            if self.strategy not in LOSSY:
                raise ValueError(f"density is of the strategies {', '.join(LOSSY)}: leave it out, or take one of them")
            if not (isinstance(self.density, int | float) and 0 < self.density <= 1):
                raise ValueError(f"density must be above 0 and at most 1, not {self.density!r}")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be above 0 and below 1, not {self.validation_fraction!r}")
        if not callable(self.schedule) and self.schedule not in ("auto", PLATEAU, *SCHEDULES):
            raise ValueError(f"schedule must be a function or one of {', '.join((PLATEAU, *SCHEDULES, 'auto'))}, not {self.schedule!r}")

    def _check_update(self) -> None:
        if self.update not in ("auto", *UPDATES):
            raise ValueError(f"update must be one of {', '.join(('auto', *UPDATES))}, not {self.update!r}")
        if self.update not in ("auto", "sgd") and (asked := self._of_sgd_alone()):
            value = getattr(self, asked[0])
            raise ValueError(f"{asked[0]}={value!r} is of the update 'sgd', not of {self.update!r}: leave it out, or take that")

    def _check_alike(self, samples: Samples, passes: int, partial: bool, comm: Any) -> None:
        """Refuse on every rank what differs between ranks."""
        own = self.get_params(deep=False)
        for name in ("comm", "random_state", "verbose"):
            del own[name]
        ranks = gather(comm, (samples.rows.shape, {name: repr(value) for name, value in own.items()}, (passes, partial)))
        widths = [shape[1] for shape, _, _ in ranks]
        if len(set(widths)) > 1:
            raise MismatchError(f"all ranks must pass as many features, but ranks 0 to {comm.size - 1} pass {', '.join(map(str, widths))}")
        for name in own:
            values = list(dict.fromkeys(parameters[name] for _, parameters, _ in ranks))
            if len(values) > 1 and not callable(own[name]):
                raise MismatchError(f"all ranks must have the same parameters, but {name} is {' and '.join(values[:2])}")
        if len({passes for *_, passes in ranks}) > 1:
            raise MismatchError("some ranks call fit, others partial_fit: call the same on all ranks")
        if sum(shape[0] for shape, _, _ in ranks) == 0:
            raise ValueError("there is no sample whose weight is not zero on any rank")

    def _conditioned(self, dataset: Dataset, comm: Any, onward: bool) -> tuple[Dataset, Array]:
        """The data set with scaled features, and the scales."""
        if not self.scale_features:
            return dataset, np.ones(1, dataset.values.dtype)
        self._magnitudes = feature_magnitudes(dataset, comm, getattr(self, "_magnitudes", None) if onward else None)
        scales = feature_scales(self._magnitudes)
        return scaled(dataset, scales), scales

    def _progress_so_far(self, comm: Any) -> _Progress | None:
        """That of the last ``partial_fit``, if weights and ranks are still those; collective."""
        learned, progress = getattr(self, "_progress", None) or (None, None)
        # Pickles from when classes were trained one after the other hold a list, of which that of one score is of use.
        if isinstance(progress, list):
            progress = progress[0] if len(progress) == 1 else None
        own: _Progress | None = progress if learned == self._learned() else None
        if comm.size == 1:
            return own
        ranks = gather(comm, None if own is None else own.checksum())
        if any(rank is None for rank in ranks):
            return None
        if any(rank != ranks[0] for rank in ranks):
            raise MismatchError("the ranks have made different calls of partial_fit before: give all the same model")
        return own

    def _learned(self) -> int:
        """A number that other weights and intercepts hardly have."""
        return zlib.crc32(np.ascontiguousarray(self.intercept_).data, zlib.crc32(np.ascontiguousarray(self.coef_).data))

    def _largest_curvature(self, model: LinearModel, labels: Array, comm: Any) -> float:
        """The largest second derivative of the loss by the score, or what stands for it in choosing a learning rate; collective."""
        return model.curvature

    def _initial_rate(self, model: LinearModel, dataset: Dataset, comm: Any, partial: bool, onward: bool) -> float:
        given = float(self.learning_rate) if isinstance(self.learning_rate, int | float) else None
        if self._choices().update != "sgd":
            return _ADAPTIVE_RATE if given is None else given
        if given is not None:
            return given
        eigenvalue = largest_eigenvalue(dataset, self.fit_intercept, comm)
        if partial:
            # Weights are not of mean one, and a step must be stable on the samples of any call.
            eigenvalue *= _mean(np.ones(dataset.rows), dataset, comm)
            eigenvalue = max(eigenvalue, getattr(self, "_eigenvalue", 0.0) if onward else 0.0)
        self._eigenvalue = eigenvalue
        shrinking = self.l2 / (1 - self._choices().momentum)  # a step of rate * shrinking = 1 would end at zero
        curvature = self._largest_curvature(model, dataset.labels, comm)
        return 1 / (curvature * eigenvalue + shrinking) if eigenvalue > 0 else 1 / (1 + shrinking)

    def _rate_unit(self, model: LinearModel, dataset: Dataset, comm: Any, further: bool) -> float:
        """What rates are multiplied by; if these are ``further`` samples, by those of earlier calls as well. Collective."""
        if self._choices().update == "sgd":
            return 1.0
        moments = sample_moments(dataset, comm) + (getattr(self, "_moments", 0.0) if further else 0.0)
        self._moments = moments
        return adaptive_rate_unit(moments, self.fit_intercept, model.in_units_of_labels)

    def _patience(self, dataset: Dataset, strategy: Strategy) -> int:
        """Passes without a lower loss that count as a plateau: with momentum the loss swings, for as long as the velocity lasts."""
        chosen = self._choices()
        steps = -(-dataset.total_samples // (chosen.batch_size * strategy.workers))
        return max(chosen.n_iter_no_change, math.ceil(_SWING / (1 - chosen.momentum) / steps) if chosen.momentum else 1)

    def _schedule(self, rate: float, steps: int, patience: int, tolerance: float) -> Schedule:
        """The rate of every step after so many of earlier calls."""
        kind = self._choices().schedule
        if kind == PLATEAU:
            return Plateau(rate, _CUT, patience, tolerance)
        return Onward((kind if callable(kind) else SCHEDULES[kind])(rate), steps)

    def _start(self, model: LinearModel, dataset: Dataset, onward: bool, scales: Array, comm: Any) -> Array:
        """The weights to start from, intercept last: those so far, or the best without features."""
        size = dataset.features + self.fit_intercept
        start = np.zeros(size if model.columns is None else (size, model.columns), dataset.values.dtype)
        if onward:
            weights, intercept = scores_for(model, self._fitted())
            start[: dataset.features] = (weights.T * scales).T
            start[dataset.features :] = intercept
        elif self.fit_intercept:
            start[-1] = self._constant(dataset, comm)
        return start

    def _constant(self, dataset: Dataset, comm: Any) -> float:
        """The score to start from without features: for a regression the mean label."""
        if self._model.classifies or not self.fit_intercept:
            return 0.0
        mean = _mean(dataset.labels, dataset, comm) / _mean(np.ones(dataset.rows), dataset, comm)
        return self._loss_model().constant_score(mean)

    def _run(
        self,
        model: LinearModel,
        dataset: Dataset,
        start: Array,
        rate: float,
        unit: float,
        steps: int,
        passes: int,
        seed: int,
        comm: Any,
        scales: Array,
        partial: bool,
        before: _Progress | None,
    ) -> _Run:
        """Train."""
        strategy, chosen = self._strategy(model, dataset, comm), self._choices()
        strategy.assign(start)
        constant = np.full((dataset.rows, *start.shape[1:]), self._constant(dataset, comm))
        tolerance = (chosen.tol or 0.0) * _mean(model.loss(constant, dataset.labels), dataset, comm)
        patience, stopping = self._patience(dataset, strategy), None
        if chosen.tol is not None and self.early_stopping:
            stopping = EarlyStopping("validation_loss", patience, tolerance)
        elif chosen.tol is not None and passes > 1:
            plateaus = _PLATEAUS if chosen.schedule == PLATEAU else 1
            stopping = EarlyStopping("loss", plateaus * patience, tolerance)
        schedule = agreed(comm, lambda: self._schedule(rate, steps, patience, tolerance))  # which may be a user's own
        if before is not None:
            self._take_up(before, strategy, schedule, scales)
        passed = 0 if before is None else before.passes
        share = self.validation_fraction if self.early_stopping else 0.0
        # What the samples of a call say of the weights after it takes all weights, and no schedule goes by it but reactive ones. To measure
        # the samples costs nearly as much as a pass of adaptive steps, of which there are few.
        silent = partial and (chosen.schedule == PLATEAU or not isinstance(schedule, Reactive))
        needless = silent or (chosen.update != "sgd" and not share)
        options = Options(passes, chosen.batch_size, seed, before=passed, validation=share, evaluate_every=0 if needless else 1)
        trainer = Trainer(model, strategy, schedule, options, stopping=stopping, rate_unit=unit)
        for epoch in trainer.run():
            if self.verbose and comm.rank == 0:
                print(f"pass {epoch.epoch}: loss {epoch.loss:.6g}, {epoch.seconds['total']:.3f} s")
        if stopping is not None and stopping.waited < stopping.patience and comm.rank == 0:
            warnings.warn(f"the loss still falls after max_iter = {passes} passes: raise max_iter or tol", ConvergenceWarning, stacklevel=4)
        learned = strategy.weights.to_array()
        return _Run(learned, trainer.history, _Progress.of(strategy, schedule, self._rates(), passed + passes, scales) if partial else None)

    def _take_up(self, before: _Progress, strategy: Strategy, schedule: Schedule, scales: Array) -> None:
        """Have a run go on where others ended."""
        stretch = scales / before.scales
        strategy.weights.remember(before.memory, stretch)
        if isinstance(strategy, LossyStrategy) and before.residual is not None:
            width = strategy.descent.width
            features = strategy.dataset.features * width
            strategy.residual[:features] = before.residual[:features] * np.repeat(stretch, width if len(stretch) > 1 else 1)
            if len(strategy.residual) == len(before.residual):  # else one of the two has an intercept
                strategy.residual[features:] = before.residual[features:]
        if isinstance(schedule, Reactive) and self._choices().schedule != PLATEAU and before.schedule and before.rates == self._rates():
            schedule.restore(before.schedule)

    def _rates(self) -> str:
        """The parameters that learning rates depend on, which are found anew where one of them has been changed."""
        chosen = self._choices()
        return described((chosen.update, chosen.schedule, self.learning_rate, self.l2, chosen.momentum))

    def _strategy(self, model: LinearModel, dataset: Dataset, comm: Any) -> Strategy:
        kind = _REPLICATED[self.strategy]
        options: dict[str, Any] = {"algorithm": self.algorithm} if issubclass(kind, SparseStrategy) else {}
        if issubclass(kind, LossyStrategy) and self.density is not None:
            options["density"] = self.density
        chosen = self._choices()
        descent = Descent(
            l2=self.l2,
            l1=self.l1,
            intercept=self.fit_intercept,
            momentum=chosen.momentum,
            update=chosen.update,
            average_from=None if self.average is False else int(self.average) * (self.average is not True),
            columns=model.columns,
        )
        return kind(dataset, comm, descent, threads=self.threads, **options)


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _mean(values: Array, dataset: Dataset, comm: Any) -> float:
    """The mean of what every sample of all ranks has, by what the samples count; collective."""
    counts = np.ones(dataset.rows) if dataset.weights is None else dataset.weights
    return float(sum(gather(comm, float(np.dot(values, counts))))) / dataset.total_samples


def counts_of(sample_weight: Any, samples: int) -> Array:
    """What each sample counts."""
    if sample_weight is None:
        return np.ones(samples)
    if isinstance(sample_weight, Number):
        sample_weight = np.full(samples, sample_weight)
    counts = check_array(sample_weight, ensure_2d=False, ensure_min_samples=0, dtype=np.float64, input_name="sample_weight")
    if counts.shape != (samples,):
        raise ValueError(f"sample_weight has the shape {counts.shape}, and there are {samples} samples")
    if (counts < 0).any():
        raise ValueError(f"sample_weight must not be negative, but the lowest is {counts.min():g}")
    return np.asarray(counts)


def _dataset(rows: csr_array, counts: Array, comm: Any, partial: bool) -> Dataset:
    """The samples of all ranks in the trainer's form, with weights of mean one unless they are a part of all; collective."""
    ranks = gather(comm, (len(counts), float(counts.sum()), rows.dtype.char if len(counts) else "f"))
    total, overall = sum(share for share, *_ in ranks), sum(weight for _, weight, _ in ranks)
    return Dataset(
        indptr=rows.indptr.astype(np.int64, copy=False),
        indices=rows.indices.astype(index_dtype(rows.shape[1])),
        values=rows.data.astype(np.result_type(*(kind for *_, kind in ranks)), copy=False),
        labels=np.empty(len(counts)),
        features=rows.shape[1],
        first_sample=sum(share for share, *_ in ranks[: comm.rank]),
        total_samples=total,
        weights=counts if partial else counts * (total / overall),
    )
