"""What is chosen where users leave it open, for the estimators and the command `train` alike: the solver and the penalties."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from sparseallreduce.linear.models import Hinge, LinearModel, Squared, SquaredHinge
from sparseallreduce.linear.multiclass import OneVsRest
from sparseallreduce.linear.solvers.losses import has_dual
from sparseallreduce.linear.solvers.newton import has_curvature, has_few_weights
from sparseallreduce.linear.solvers.rounds import DUAL, NEWTON

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
#: Names of solvers: dual coordinate ascent in rounds, the same with an intercept that is penalised as LIBLINEAR's is, Newton's method, and
#: steps. "auto" takes Newton's method where features are few.
SOLVERS = (AUTO, DUAL, COCOA, NEWTON, SGD)
PENALTIES = (AUTO, "l2", "l1", "elasticnet", None)
_STANDARD = 10_000  # samples that a C of one is meant for where nobody says how many there will be, or C is None


class Factors(NamedTuple):
    """Factors of the penalties ``l2 / 2 * |w|^2`` and ``l1 * |w|_1`` beside the mean loss of a sample."""

    l2: float
    l1: float


class Penalty(NamedTuple):
    """A penalty as users say it: by C, as scikit-learn and LIBLINEAR do, or by its factors beside the mean loss.

    With C, ``(1 - l1_ratio) / 2 * |w|^2 + l1_ratio * |w|_1 + C * sum of losses`` is least. The penalty is "l2" for an ``l1_ratio`` of 0,
    "l1" for 1, "elasticnet" for any, and None for none, as an infinite C; "auto" goes by ``l1_ratio``.
    """

    C: float | None = 1.0  # None: a penalty of the mean loss that does not depend on how many samples there are
    l1_ratio: float = 0.0
    penalty: str | None = AUTO
    l2: float | None = None
    l1: float = 0.0

    def check(self) -> None:
        """Refuse what is out of range, or says two things.

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
        said = {"C": self.C not in (1.0, None), "l1_ratio": self.l1_ratio != 0.0, "penalty": self.penalty != AUTO}
        by_factor = "l2" if self.l2 is not None else "l1" if self.l1 else None
        other = next((name for name, is_said in said.items() if is_said), None)
        if by_factor and other:
            raise ValueError(f"{by_factor} and {other} both say what the penalty is: leave one of them out")
        if self.penalty is None and self.l1_ratio:
            raise ValueError(f"penalty=None has no l1_ratio, and it is {self.l1_ratio!r}: leave one of them out")
        only = {"l2": 0.0, "l1": 1.0}.get(self.penalty or "")
        if only is not None and self.l1_ratio not in (0.0, only):
            raise ValueError(f"penalty={self.penalty!r} is an l1_ratio of {only:g}, not {self.l1_ratio!r}: leave one of them out")

    @property
    def by_factors(self) -> bool:
        """True if ``l2`` or ``l1`` is given, in place of ``C``."""
        return self.l2 is not None or self.l1 > 0

    def factors(self, counted: float | None) -> Factors:
        """Return the factors beside the mean loss.

        Parameters
        ----------
        counted : float or None
            What all samples that are trained on count together; None if they come call by call, and nobody knows.

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
    """Return True if a solver (not "auto") trains in rounds over samples in memory, and False if it takes steps."""
    return solver in (DUAL, COCOA, NEWTON)


def svm_loss(solver: str, asks_for_steps: bool) -> str:
    """Return the loss of a support vector machine where none is said.

    It is the squared hinge, as of LIBLINEAR and scikit-learn's ``LinearSVC``, which is as accurate and whose optimum takes fewer rounds;
    but the hinge of steps that are asked for, whose rates are tuned to it, and of "cocoa", which is the published method.

    Examples
    --------
    >>> svm_loss("auto", False), svm_loss("sgd", False)
    ('squared_hinge', 'hinge')
    """
    return Hinge.loss_name if asks_for_steps or solver in (SGD, COCOA) else SquaredHinge.loss_name


def chosen_solver(
    solver: str, model: LinearModel, features: int, density: float, factors: Factors, asks_for_steps: bool, holds_out: bool
) -> str:
    """Return the solver that "auto" stands for, or the one that is asked for.

    It is Newton's method where a score has few weights, and for least squares; else dual coordinate ascent, if the loss and the penalty are
    such that it can be; otherwise, steps.

    Parameters
    ----------
    solver : str
        One of :data:`SOLVERS`.
    model : LinearModel
    features : int
    density : float
        The share of values that are not zero, of which more features are few.
    factors : Factors
    asks_for_steps : bool
        Whether something else is asked for, or is so, that steps alone can do: a learning rate, samples that are not in memory, ...
    holds_out : bool
        Whether samples are held out, by which training ends early: then it must not take few large steps.

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
        return NEWTON  # by products with the second derivatives
    return DUAL if factors.l2 and has_dual(base) else SGD
