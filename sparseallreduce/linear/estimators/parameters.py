"""The parameters of the estimators: what they mean, which values they may have, and what is taken where they are "auto"."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.base import BaseEstimator

from sparseallreduce.linear.defaults import Penalty
from sparseallreduce.linear.strategies import LOSSY, STRATEGIES, ParameterServer
from sparseallreduce.linear.training.schedules import SCHEDULES
from sparseallreduce.linear.weights import UPDATES
from sparseallreduce.runtime.hosts import usable_cores

__all__ = ["ATTRIBUTES", "PARAMETERS", "PLATEAU", "REPLICATED", "Choices", "Parameterised", "is_auto"]

PLATEAU = "plateau"
# A parameter server holds no samples, but every rank that calls fit does.
REPLICATED = {name: kind for name, kind in STRATEGIES.items() if not issubclass(kind, ParameterServer)}

PARAMETERS = """
    Parameters
    ----------
    C : float
        How strongly the losses of samples, each times what the sample counts, weigh against the penalty of the weights: as in scikit-learn
        and LIBLINEAR, ``(1 - l1_ratio) / 2 * |w|^2 + l1_ratio * |w|_1 + C * sum of losses`` is least. Calls of ``partial_fit``, which do
        not know how many samples come, take it as of 10,000.
    l1_ratio : float
        The share of ``|w|_1`` in the penalty.
    penalty : {"auto", "l2", "l1", "elasticnet", None}
        "l2" is an ``l1_ratio`` of 0, "l1" of 1, None is no penalty; "auto" and "elasticnet" go by ``l1_ratio``.
    l2, l1 : float
        Factors of the penalties ``l2 / 2 * |w|^2`` and ``l1 * |w|_1`` beside the mean loss of a sample, in place of ``C``: over M samples
        l2 is 1 / (M C). Who gives one of them gives no ``C``, ``l1_ratio`` or ``penalty``. Penalised are the weights of features as they
        are scaled, where they are.
    fit_intercept : bool
        Whether a number, which is not penalised, is added to every score.
    update : str
        How a step changes the weights: "ftrl", each by a learning rate of its own, which falls as its gradients add up (FTRL-Proximal,
        without penalties AdaGrad), "sgd", all by one, or "arow", each by its variance (AROW, of :class:`LinearSVM` and two classes alone;
        with the strategies "sparse" and "dense"). "ftrl" comes near the least loss in few passes, and "sgd" to it in many.
        "auto" takes "ftrl" from 10,000 features on, unless ``momentum``, ``average`` or ``schedule`` ask for "sgd", which alone has them,
        ``learning_rate`` is a number, or the strategy is a lossy one.
    learning_rate : float or "auto"
        Of "ftrl", how far the first step moves each weight of a sample, in units of the spread of the labels (1 for classes) over the
        samples' length; "auto" is 0.5. Of "arow", the mean square of that length over AROW's r; "auto" is 1. Of "sgd", the factor of
        the mean gradient; "auto" takes the inverse of the loss's largest curvature, which is estimated from the samples. In calls of
        ``partial_fit``, all go by the samples of all calls so far.
    schedule : str or callable
        How the rate changes: "plateau" divides it by four when the loss stops falling, and ends training when it has not fallen after
        four times; another name of :data:`sparseallreduce.linear.SCHEDULES`; or a function that makes a schedule of a rate. Calls of
        ``partial_fit`` go on with the steps and losses of those before, but "plateau" keeps the rate: losses of other samples do not say
        whether it has fallen. "auto" is "plateau" for "sgd" and "constant" for the others, which take no other.
    momentum : float or "auto"
        The share of a step's velocity that is left in the next, below 1; "auto" is 0.9 for "sgd". The others have none.
    average : bool or int
        Whether ``coef_`` is the mean of the weights after all steps, or after all but the first so many: of a ``fit``, or of the calls
        of ``partial_fit`` that follow each other. Of "sgd" alone.
    batch_size : int or "auto"
        Samples a rank and step; "auto" is 64 for "ftrl" and "arow", and 256 for "sgd".
    max_iter : int
        Passes over the samples at most.
    tol : float, "auto" or None
        The loss has stopped falling when ``n_iter_no_change`` passes have not lowered it by this share of the loss without features;
        "auto" is 0.005 for "ftrl" and "arow", and 1e-4 for "sgd". None makes all ``max_iter`` passes at one rate.
    n_iter_no_change : int or "auto"
        "auto" is 2 for "ftrl" and "arow", and 5 for "sgd". In any case as many passes as have 3 / (1 - momentum) steps, where there is
        momentum.
    early_stopping : bool
        Whether ``fit`` holds samples out, ends when the loss on these has not fallen so for ``n_iter_no_change`` passes, and gives the
        weights after the pass where it was least. The samples depend on ``random_state``, and not on the number of ranks. For calls of
        ``partial_fit`` it is an error, as in scikit-learn.
    validation_fraction : float
        The share of all ranks' samples that is held out then.
    scale_features : bool or "auto"
        Whether features are brought to one scale; ``coef_`` belongs to the features as they are given. "auto" does so where typical values
        of columns are so far apart that their units must differ, as of statistics and measurements, and leaves texts, pixels and zeros and
        ones as they are; calls of ``partial_fit`` go by the first one. Steps divide by the power of two at or next above the largest
        magnitude on any rank, other solvers by what is typical.
    strategy : str, optional
        How the ranks' steps come together: a name of :data:`sparseallreduce.linear.STRATEGIES`, without those that have servers. By
        default "local" for ``fit`` on several ranks with the update "ftrl", each of which steps by itself; else "sparse".
    algorithm : str
        Of the sparse allreduce: any of :func:`sparseallreduce.algorithms`.
    density : float, optional
        Of the lossy strategies, :data:`sparseallreduce.linear.LOSSY`: the share of the weights that a step may change, by default 0.01.
        What the others would change waits in residuals, for the next ``partial_fit``; at the end of a ``fit`` it is dropped.
    threads, n_jobs : int
        Of every rank, in steps; how many there are changes no bit. ``n_jobs`` is scikit-learn's name for it, of which -1 is one a core.
    random_state : int, RandomState or None
        Of the order of samples; that of rank 0 counts.
    warm_start : bool
        Whether ``fit`` goes on from the weights that are there, of "ftrl" with the norms of the gradients so far.
    verbose : int
        Above zero, rank 0 prints a line for every pass.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        The ranks that train together. None is ``MPI.COMM_WORLD``, as everywhere in this library: a process alone trains alone, and
        under mpiexec all train together; with ``sparseallreduce.SERIAL`` a rank trains by itself. Pickles and files hold no
        communicator: what is read from them has None.
"""

ATTRIBUTES = """
    n_features_in_ : int
        Columns of X.
    feature_names_in_ : ndarray of str
        If X has column names.
    encoding_ : Encoding or None
        Of a frame that is not of numbers alone, what features its columns have become: ``list(encoding_.names())`` are the names of
        ``coef_``.
    n_iter_ : int
        Passes made, or rounds.
    solver_ : str
        What ``solver="auto"`` has come to in the last call: "newton", "dual" or "sgd"; else the solver.
    history_ : list of list of Epoch
        One list, for all classes are trained at once: what each pass came to: loss, seconds by phase, bytes sent by all ranks. The loss
        is that of the samples after the pass, with the penalty; of a ``partial_fit``, as long as no reactive schedule goes by it, and of
        "ftrl" and "arow" without ``early_stopping``, that of each sample before the step that it was in.
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
    "arow": Choices("arow", "constant", 0.0, 64, 5e-3, 2),
    "sgd": Choices("sgd", PLATEAU, 0.9, 256, 1e-4, 5),
}
# From so many features on, some of them rare, adaptive steps come to a good model sooner. For few, plain ones with momentum reach the least
# loss, and time is no matter: of the sets of scikit-learn they led to the better scores on wine, iris and breast cancer.
_MANY_FEATURES = 10_000


class Parameterised(BaseEstimator):
    """Holds the parameters that all estimators have."""

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
        """The number of threads of a rank; negative ``n_jobs`` count down from all cores, as joblib's do."""
        if self.n_jobs is None:
            return self.threads
        return self.n_jobs if self.n_jobs > 0 else max(1, usable_cores() + 1 + self.n_jobs)

    @property
    def _dimension(self) -> int:
        """N: of a frame the features that its columns become."""
        encoding = getattr(self, "encoding_", None)
        return int(self.n_features_in_ if encoding is None else encoding.features)

    def _choices(self) -> Choices:
        """The parameters that may be "auto", chosen."""
        update = self.update
        if update == "auto":
            of_sgd = self._of_sgd_alone() or not is_auto(self.learning_rate) or self.strategy in LOSSY
            update = "sgd" if of_sgd or self._dimension < _MANY_FEATURES else "ftrl"
        chosen = {name: getattr(self, name) for name in Choices._fields if name != "update"}
        return _CHOICES[update]._replace(**{name: value for name, value in chosen.items() if not is_auto(value)})

    def _of_sgd_alone(self) -> list[str]:
        """The names of parameters that ask for what adaptive weights are without."""
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
            raise ValueError(f"n_jobs={self.n_jobs!r} and threads={self.threads!r} say the same: leave one of them out")
        if self.n_jobs == 0:
            raise ValueError("n_jobs must be a number of threads, or -1 for one a core, not 0")
        if not isinstance(self.scale_features, bool | np.bool_ | int) and not is_auto(self.scale_features):
            raise ValueError(f"scale_features must be True, False or 'auto', not {self.scale_features!r}")
        if not is_auto(self.momentum) and not 0 <= self.momentum < 1:  # type: ignore[operator]
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum!r}")
        self._check_update()
        if self.learning_rate != "auto" and not (isinstance(self.learning_rate, int | float) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be 'auto' or a number above 0, not {self.learning_rate!r}")
        if self.strategy is not None and self.strategy not in REPLICATED:
            raise ValueError(f"strategy must be one of {', '.join(REPLICATED)}, not {self.strategy!r}")
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


def is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"
