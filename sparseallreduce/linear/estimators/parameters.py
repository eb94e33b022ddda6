"""Parameters of the estimators: documentation, allowed values, and the meaning of "auto"."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparseallreduce.linear.defaults import Penalty
from sparseallreduce.linear.estimators.bases import BaseEstimator
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES, ParameterServer
from sparseallreduce.linear.training.schedules import SCHEDULES
from sparseallreduce.linear.weights import UPDATES
from sparseallreduce.runtime.hosts import usable_cores

__all__ = ["ATTRIBUTES", "PARAMETERS", "PLATEAU", "REPLICATED", "Choices", "Parameterised", "is_auto"]

PLATEAU = "plateau"
# Without parameter servers, which hold no samples: every rank that calls fit does.
REPLICATED = {name: kind for name, kind in STRATEGIES.items() if not issubclass(kind, ParameterServer)}

PARAMETERS = """
    Parameters
    ----------
    C : float
        Weight of the losses relative to the penalty: as in scikit-learn and LIBLINEAR, the objective is
        ``(1 - l1_ratio) / 2 * |w|^2 + l1_ratio * |w|_1 + C * sum of losses``, each loss times its sample weight. Calls of ``partial_fit``,
        which do not know the number of samples, assume 10,000.
    l1_ratio : float
        Fraction of ``|w|_1`` in the penalty.
    penalty : {"auto", "l2", "l1", "elasticnet", None}
        "l2" means an ``l1_ratio`` of 0, "l1" an ``l1_ratio`` of 1, None no penalty; "auto" and "elasticnet" use ``l1_ratio``.
    l2, l1 : float
        Factors of the penalties ``l2 / 2 * |w|^2`` and ``l1 * |w|_1`` relative to the mean loss, as alternatives to ``C``: for M samples
        l2 is 1 / (M C). They cannot be combined with ``C``, ``l1_ratio`` or ``penalty``. If features are scaled, the weights of the scaled
        features are penalised.
    fit_intercept : bool
        Whether the model has an intercept, which is not penalised.
    update : str
        Update rule of SGD steps: "ftrl" has one learning rate per weight, which decreases as its gradients accumulate (FTRL-Proximal,
        without penalties AdaGrad), "sgd" one for all weights, and "arow" one variance per weight (AROW, only for :class:`LinearSVM` with
        two classes and the strategies "sparse" and "dense"). "ftrl" gets close to the minimum loss in few passes, "sgd" reaches it in many.
        "auto" selects "ftrl" from 10,000 features on, unless ``momentum``, ``average`` or ``schedule`` require "sgd", the only one that has
        them, ``learning_rate`` is a number, or the strategy is a lossy one.
    learning_rate : float or "auto"
        For "ftrl", the change of a sample's weights in the first step, in units of the spread of the labels (1 for classes) divided by the
        length of the samples; "auto" is 0.5. For "arow", the mean squared length divided by AROW's r; "auto" is 1. For "sgd", the factor of
        the mean gradient; "auto" is the inverse of the largest curvature of the loss, estimated from the samples. In calls of
        ``partial_fit``, all of these use the samples of all calls so far.
    schedule : str or callable
        Schedule of the learning rate: "plateau" divides it by four when the loss stops decreasing, and ends training the fourth time;
        another name of :data:`sparseallreduce.linear.SCHEDULES`; or a function that returns a schedule, given a rate. Calls of
        ``partial_fit`` continue with the steps and losses of earlier calls, but "plateau" keeps the rate, because the losses of different
        samples are not comparable. "auto" is "plateau" for "sgd", and "constant" for the others, which support no other.
    momentum : float or "auto"
        Fraction of a step's velocity that remains in the next, below 1; "auto" is 0.9 for "sgd". The other updates have none.
    average : bool or int
        Whether ``coef_`` is the mean of the weights after all steps, or after all but this many first ones: those of a ``fit``, or of
        consecutive calls of ``partial_fit``. Only for "sgd".
    batch_size : int or "auto"
        Samples per rank and step; "auto" is 64 for "ftrl" and "arow", and 256 for "sgd".
    max_iter : int
        Largest number of passes over the samples.
    tol : float, "auto" or None
        The loss has stopped decreasing when ``n_iter_no_change`` passes have not reduced it by this fraction of the loss without features;
        "auto" is 0.005 for "ftrl" and "arow", and 1e-4 for "sgd". None makes all ``max_iter`` passes at one rate.
    n_iter_no_change : int or "auto"
        Number of passes without improvement after which the loss has stopped decreasing; "auto" is 2 for "ftrl" and "arow", and 5 for
        "sgd". With momentum it is at least the number of passes that have 3 / (1 - momentum) steps.
    early_stopping : bool
        Whether ``fit`` holds samples out, ends when their loss has not decreased for ``n_iter_no_change`` passes, and returns the
        weights after the pass with the lowest. The samples depend on ``random_state``, and not on the number of ranks. As in scikit-learn,
        ``partial_fit`` does not support it.
    validation_fraction : float
        Fraction of all ranks' samples to hold out for ``early_stopping``.
    scale_features : bool or "auto"
        Whether features are scaled; ``coef_`` applies to the original features. "auto" scales if typical values of columns differ so
        much that their units must differ, as in statistics and measurements, and leaves texts, pixels and zeros and ones as they are; in
        calls of ``partial_fit`` the first one decides. SGD steps divide by the power of two at or above the largest magnitude on
        any rank, other solvers by a typical value.
    strategy : str, optional
        Strategy that combines the ranks' SGD steps: a name of :data:`sparseallreduce.linear.STRATEGIES`, except parameter servers. The
        default is "local", independent steps of each rank, for ``fit`` on several ranks with the update "ftrl", and otherwise "sparse".
    algorithm : str
        Algorithm of the sparse allreduce, any of :func:`sparseallreduce.algorithms`.
    density : float, optional
        For the lossy strategies, :data:`sparseallreduce.linear.LOSSY`: fraction of the weights that a step may change, by default 0.01.
        The remaining changes stay in residuals for the next ``partial_fit``; at the end of a ``fit`` they are dropped.
    threads, n_jobs : int
        Threads per rank in SGD steps; results do not depend on their number. ``n_jobs`` is scikit-learn's name, with -1 for one per core.
    random_state : int, RandomState or None
        Seed of the order of samples; that of rank 0 is used.
    warm_start : bool
        Whether ``fit`` continues from the present weights, with "ftrl" also from the gradient norms.
    verbose : int
        Above zero, rank 0 prints a line for every pass.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        Communicator of the ranks that train together. None is ``MPI.COMM_WORLD``, as everywhere in this library: a single process trains
        alone, and under mpiexec all train together; with ``sparseallreduce.SERIAL`` a rank trains by itself. Pickles and files do not
        contain the communicator: estimators read from them have None.
"""

ATTRIBUTES = """
    n_features_in_ : int
        Number of columns of X.
    feature_names_in_ : ndarray of str
        Names of the columns, if X has them.
    encoding_ : Encoding or None
        Encoding of the columns of a frame that has not only numbers: ``list(encoding_.names())`` are the names of the features in
        ``coef_``.
    n_iter_ : int
        Number of passes or rounds made.
    solver_ : str
        Solver that ``solver="auto"`` selected in the last call: "newton", "dual" or "sgd"; otherwise the solver.
    history_ : list of list of Epoch
        One list, because all classes are trained together, with the metrics of each pass: loss, seconds by phase, bytes sent by all ranks.
        The loss is that of the samples after the pass, with the penalty. For ``partial_fit`` without a reactive schedule, and for "ftrl"
        and "arow" without ``early_stopping``, it is the progressive loss: that of each sample before its own step.
"""


class Choices(NamedTuple):
    """Values of the parameters that may be "auto"."""

    update: str
    schedule: Any
    momentum: float
    batch_size: int
    tol: float | None
    n_iter_no_change: int


# Values that "auto" stands for. At a constant rate, loss and accuracy of adaptive steps converge within few passes.
_CHOICES = {
    "ftrl": Choices("ftrl", "constant", 0.0, 64, 5e-3, 2),
    "arow": Choices("arow", "constant", 0.0, 64, 5e-3, 2),
    "sgd": Choices("sgd", PLATEAU, 0.9, 256, 1e-4, 5),
}
# From this number of features on, some of which are rare, adaptive steps find a good model sooner. For few features, SGD with momentum
# reaches a lower loss, and time does not matter: it had the better scores on scikit-learn's wine, iris and breast cancer.
_MANY_FEATURES = 10_000


class Parameterised(BaseEstimator):
    """Holds the parameters of all estimators."""

    # Of the classes derived from this one.
    solver: str
    solver_: str
    n_features_in_: int
    _factors: Any

    def __init__(
        self,
        *,
        C: float | None = 1.0,
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
        comm: Any = None,
    ) -> None:
        self.C = C
        self.l1_ratio = l1_ratio
        self.penalty = penalty
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
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.warm_start = warm_start
        self.verbose = verbose
        self.comm = comm

    @property
    def _penalty(self) -> Penalty:
        return Penalty(self.C, self.l1_ratio, self.penalty, self.l2, self.l1)

    @property
    def _thread_count(self) -> int:
        """The number of threads per rank; negative ``n_jobs`` count down from all cores, as in joblib."""
        if self.n_jobs is None:
            return self.threads
        return self.n_jobs if self.n_jobs > 0 else max(1, usable_cores() + 1 + self.n_jobs)

    @property
    def _dimension(self) -> int:
        """The number of features, N; for a frame, that of the encoded columns."""
        encoding = getattr(self, "encoding_", None)
        return int(self.n_features_in_ if encoding is None else encoding.features)

    def _choices(self) -> Choices:
        """Return the parameters with "auto" replaced."""
        update = self.update
        if update == "auto":
            of_sgd = self._of_sgd_alone() or not is_auto(self.learning_rate) or self.strategy in LOSSY
            update = "sgd" if of_sgd or self._dimension < _MANY_FEATURES else "ftrl"
        chosen = {name: getattr(self, name) for name in Choices._fields if name != "update"}
        return _CHOICES[update]._replace(**{name: value for name, value in chosen.items() if not is_auto(value)})

    def _of_sgd_alone(self) -> list[str]:
        """Return the names of parameters with values that only the update "sgd" supports."""
        asked = {
            "momentum": not is_auto(self.momentum) and self.momentum != 0,
            "average": self.average is not False,
            "schedule": not (isinstance(self.schedule, str) and self.schedule in ("auto", "constant")),
        }
        return [name for name, is_so in asked.items() if is_so]

    def _check_parameters(self) -> None:
        self._penalty.check()
        at_least = {"average": 0, "batch_size": 1, "max_iter": 1, "n_iter_no_change": 1, "threads": 1}
        for name, least in at_least.items():
            if not is_auto(getattr(self, name)) and not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)!r}")
        if self.n_jobs is not None and self.threads != 1:
            raise ValueError(f"n_jobs={self.n_jobs!r} and threads={self.threads!r} mean the same: leave one of them out")
        if self.n_jobs == 0:
            raise ValueError("n_jobs must be a number of threads, or -1 for one per core, not 0")
        if not isinstance(self.scale_features, bool | np.bool_ | int) and not is_auto(self.scale_features):
            raise ValueError(f"scale_features must be True, False or 'auto', not {self.scale_features!r}")
        if not is_auto(self.momentum) and not 0 <= self.momentum < 1:  # type: ignore[operator]
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum!r}")
        self._check_update()
        if self.learning_rate != "auto" and not (isinstance(self.learning_rate, int | float) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be 'auto' or a number above 0, not {self.learning_rate!r}")
        self._check_strategy()
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction must be above 0 and below 1, not {self.validation_fraction!r}")
        if not callable(self.schedule) and self.schedule not in ("auto", PLATEAU, *SCHEDULES):
            raise ValueError(f"schedule must be a function or one of {', '.join((PLATEAU, *SCHEDULES, 'auto'))}, not {self.schedule!r}")

    def _check_strategy(self) -> None:
        if self.strategy is not None and self.strategy not in REPLICATED:
            raise ValueError(f"strategy must be one of {', '.join(REPLICATED)}, not {self.strategy!r}")
        if self.density is None:
            return
        if self.strategy not in LOSSY:
            raise ValueError(f"density is for the strategies {', '.join(LOSSY)}: leave it out, or use one of them")
        if not (isinstance(self.density, int | float) and 0 < self.density <= 1):
            raise ValueError(f"density must be above 0 and at most 1, not {self.density!r}")

    def _check_update(self) -> None:
        if self.update not in ("auto", *UPDATES):
            raise ValueError(f"update must be one of {', '.join(('auto', *UPDATES))}, not {self.update!r}")
        if self.update not in ("auto", "sgd") and (asked := self._of_sgd_alone()):
            value = getattr(self, asked[0])
            raise ValueError(f"{asked[0]}={value!r} is for the update 'sgd', not for {self.update!r}: leave it out, or use 'sgd'")


def is_auto(value: Any) -> bool:
    """Return True if a parameter is "auto"."""
    return isinstance(value, str) and value == "auto"
