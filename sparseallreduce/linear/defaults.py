"""Default solver and penalties of the estimators and of the ``train`` command."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sparseallreduce.linear.models import Hinge, LinearModel, Squared, SquaredHinge
from sparseallreduce.linear.multiclass import OneVsRest
from sparseallreduce.linear.solvers.losses import has_dual
from sparseallreduce.linear.solvers.newton import has_curvature, has_few_weights
from sparseallreduce.linear.solvers.rounds import DUAL, NEWTON
from sparseallreduce.linear.solvers.truncated_newton import has_second_derivatives

__all__ = [
    "AUTO",
    "COCOA",
    "DUAL",
    "NEWTON",
    "PENALTIES",
    "SGD",
    "SOLVERS",
    "Factors",
    "Penalty",
    "chosen_solver",
    "in_rounds",
    "svm_loss",
]

AUTO, COCOA, SGD = "auto", "cocoa", "sgd"
#: Names of solvers: dual coordinate ascent in rounds, the same with a penalised intercept as in LIBLINEAR, Newton's method, and mini-batch
#: SGD. "auto" selects Newton's method if there are few features.
SOLVERS = (AUTO, DUAL, COCOA, NEWTON, SGD)
PENALTIES = (AUTO, "l2", "l1", "elasticnet", None)
# Fewest ranks and largest tolerance for which Newton's method is chosen although there are many features. On phishing_url at 1 Gbit/s,
# simulated (bench/many_ranks.py), 16 ranks take 1.0 and 2.2 s to 1e-4 and 1e-6 by dual ascent, and 2.9 and 3.2 by Newton; 64 ranks have a
# gap of 4e-3 after 60 rounds of dual ascent and 1.5 s.
_MANY_RANKS, _TIGHT = 32, 1e-6
_STANDARD = 10_000  # number of samples assumed by the penalty if the number is unknown, or C is None


class Factors(NamedTuple):
    """Factors of the penalties ``l2 / 2 * |w|^2`` and ``l1 * |w|_1`` that are added to the mean loss of the samples."""

    l2: float
    l1: float


class Penalty(NamedTuple):
    """A penalty given by C, as in scikit-learn and LIBLINEAR, or by its factors relative to the mean loss.

    With C, the objective is ``(1 - l1_ratio) / 2 * |w|^2 + l1_ratio * |w|_1 + C * sum of losses``. The penalty "l2" means an ``l1_ratio``
    of 0, "l1" an ``l1_ratio`` of 1, "elasticnet" allows any ratio, and None, like an infinite C, means no penalty; "auto" uses
    ``l1_ratio``.
    """

    C: float | None = 1.0  # None: a penalty relative to the mean loss, which does not depend on the number of samples
    l1_ratio: float = 0.0
    penalty: str | None = AUTO
    l2: float | None = None
    l1: float = 0.0

    def check(self) -> None:
        """Raise an error if a value is out of range, or two of them contradict each other.

        Raises
        ------
        ValueError
        """
        if self.C is not None and not self.C > 0:
            raise ValueError(f"C must be above 0, not {self.C!r}")
        if not 0 <= self.l1_ratio <= 1:
            raise ValueError(f"l1_ratio must be between 0 and 1, not {self.l1_ratio!r}")
        if self.penalty not in PENALTIES:
            raise ValueError(f"penalty must be one of {', '.join(map(str, PENALTIES))}, not {self.penalty!r}")
        for name, value in (("l2", self.l2 or 0.0), ("l1", self.l1)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, not {value!r}")
        given = {"C": self.C not in (1.0, None), "l1_ratio": self.l1_ratio != 0.0, "penalty": self.penalty != AUTO}
        by_factor = "l2" if self.l2 is not None else "l1" if self.l1 else None
        other = next((name for name, is_given in given.items() if is_given), None)
        if by_factor and other:
            raise ValueError(f"{by_factor} and {other} both set the penalty: leave one of them out")
        if self.penalty is None and self.l1_ratio:
            raise ValueError(f"penalty=None takes no l1_ratio, but l1_ratio is {self.l1_ratio!r}: leave one of them out")
        only = {"l2": 0.0, "l1": 1.0}.get(self.penalty or "")
        if only is not None and self.l1_ratio not in (0.0, only):
            raise ValueError(f"penalty={self.penalty!r} means l1_ratio={only:g}, not {self.l1_ratio!r}: leave one of them out")

    @property
    def by_factors(self) -> bool:
        """True if ``l2`` or ``l1`` is given instead of ``C``."""
        return self.l2 is not None or self.l1 > 0

    def factors(self, counted: float | None) -> Factors:
        """Return the factors of the penalties relative to the mean loss.

        Parameters
        ----------
        counted : float or None
            Sum of the weights of all training samples; None if it is unknown, as in ``partial_fit``.

        Examples
        --------
        >>> Penalty(C=10.0).factors(50)
        Factors(l2=0.002, l1=0.0)
        >>> Penalty(l1=1e-3).factors(50)
        Factors(l2=0.0, l1=0.001)
        """
        if self.by_factors:
            return Factors(self.l2 or 0.0, self.l1)
        if self.penalty is None or math.inf == self.C:
            return Factors(0.0, 0.0)
        ratio = 1.0 if self.penalty == "l1" else self.l1_ratio
        whole = 1 / _STANDARD if self.C is None else 1 / (self.C * (_STANDARD if counted is None else counted))
        return Factors((1 - ratio) * whole, ratio * whole)


def in_rounds(solver: str) -> bool:
    """Return True if ``solver`` (not "auto") trains in rounds over samples in memory, and False if it takes SGD steps."""
    return solver in (DUAL, COCOA, NEWTON)


def svm_loss(solver: str, asks_for_steps: bool) -> str:
    """Return the default loss of a support vector machine.

    It is the squared hinge, as in LIBLINEAR and scikit-learn's ``LinearSVC``: it is as accurate as the hinge and needs fewer rounds to
    converge. It is the hinge if SGD steps are requested, whose learning rates are tuned to it, and for "cocoa", the published method.

    Examples
    --------
    >>> svm_loss("auto", False), svm_loss("sgd", False)
    ('squared_hinge', 'hinge')
    """
    return Hinge.loss_name if asks_for_steps or solver in (SGD, COCOA) else SquaredHinge.loss_name


def chosen_solver(
    solver: str,
    model: LinearModel,
    features: int,
    density: float,
    factors: Factors,
    asks_for_steps: bool,
    holds_out: bool,
    ranks: int = 1,
    tolerance: float | None = None,
) -> str:
    """Return ``solver``, or the solver that "auto" selects for this training.

    "auto" selects Newton's method for few weights per score, for least squares, and for a tight tolerance on many ranks; otherwise dual
    coordinate ascent, if loss and penalty allow it; otherwise SGD.

    Parameters
    ----------
    solver : str
        One of :data:`SOLVERS`.
    model : LinearModel
    features : int
    density : float
        Fraction of the values that are not zero. The sparser the samples, the fewer features still count as few.
    factors : Factors
    asks_for_steps : bool
        Whether the training needs something that only SGD steps provide: a learning rate, samples that are not in memory, ...
    holds_out : bool
        Whether held-out samples end the training early, which rules out methods of few large steps.
    ranks : int
        Number of ranks.
    tolerance : float, optional
        Requested duality gap as a fraction of the loss; None for the default.

    Examples
    --------
    >>> from sparseallreduce.linear.models import Logistic, Quantile
    >>> some, none = Factors(1e-3, 0.0), Factors(0.0, 0.0)
    >>> chosen_solver("auto", Logistic(), 10, 1.0, some, False, False), chosen_solver("auto", Logistic(), 10**6, 1e-3, some, False, False)
    ('newton', 'dual')
    >>> chosen_solver("auto", Logistic(), 10**6, 1e-3, none, False, False), chosen_solver("auto", Quantile(), 10, 1.0, some, False, False)
    ('sgd', 'sgd')
    """
    if solver != AUTO:
        return solver
    if asks_for_steps or factors.l1:
        return SGD
    base: Any = model.base if isinstance(model, OneVsRest) else model
    if has_few_weights(base, features, density) and has_curvature(base) and not holds_out:
        return NEWTON
    if type(base) is Squared and factors.l2 and not holds_out:
        return NEWTON  # truncated: it multiplies by the second derivatives, and does not store them
    tight = tolerance is not None and tolerance <= _TIGHT and ranks >= _MANY_RANKS
    if tight and factors.l2 and not holds_out and has_second_derivatives(base):
        return NEWTON  # truncated; its number of iterations does not grow with the ranks
    return DUAL if factors.l2 and has_dual(base) else SGD
