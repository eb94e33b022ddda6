"""CoCoA+: dual coordinate ascent on every rank, and one sum of the changes of the weights a round (Ma et al. 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError, DivergenceError
from sparseallreduce.linear.data.checks import checked_samples
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels.dual_warming import warm_up, warm_up_classes
from sparseallreduce.linear.models import EpsilonInsensitive, LinearModel
from sparseallreduce.linear.multiclass import Multinomial
from sparseallreduce.linear.solvers.exchange import Exchange
from sparseallreduce.linear.solvers.frames import frame_of
from sparseallreduce.linear.solvers.gathered import Gathered
from sparseallreduce.linear.solvers.local import MULTINOMIAL, ClassProblem, ErrorProblem, LocalProblem
from sparseallreduce.linear.solvers.losses import dual_loss
from sparseallreduce.linear.solvers.pace import Pace
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather, together, told
from sparseallreduce.runtime.stalls import collective
from sparseallreduce.runtime.trace import trace
from sparseallreduce.streams.stream import index_dtype

__all__ = ["PHASES", "CoCoA", "Round"]

Array = NDArray[Any]
State = tuple[Array, Array]
T = TypeVar("T")

#: What the seconds of a round are spent on: its passes, the sum of changes, and the objectives.
PHASES = ("compute", "communicate", "evaluate")

_FLOAT32 = 1e-5  # tolerance from which on changes are added up in float32
# Parts of a pass, at most, after each of which changes are summed, and samples of a rank in a part, at least. To a gap of 1e-3 two
# ranks took 10 rounds of the logistic loss in 5 parts, and 29 in one.
_PARTS, _PART = 5, 400
_VISITS = 3  # to all samples there are, before the first rank tells the others what it has changed
_SOON = 4  # rounds; where so many more seem enough, it does not pay to gather active samples
_WORST = 8.0  # times the gap that is expected, which it is taken for after it was more


@dataclass(frozen=True)
class Round:
    """The figures of one round; all but the seconds are the same on every rank."""

    round: int  # from 1
    dual: float  # objective, a lower bound of the optimum; it never falls but by rounding
    primal: float | None  # objective of the weights after the round; None where it was not computed, which takes a pass
    gap: float | None  # the lowest primal objective so far minus ``dual``: the returned weights are no farther from the optimum
    active: int  # samples that the next round visits, over all ranks
    sigma: float  # how often a rank's change of a weight that all ranks have counted in its own problem
    seconds: dict[str, float]  # of this rank, by PHASES
    bytes_sent: int  # by all ranks
    gathered: bool = False  # whether the first rank went over the active samples of all


class CoCoA:
    """Finds the weights of a linear classifier by dual coordinate ascent, in rounds (Ma et al. 2015, CoCoA+ with gamma = 1).

    It minimises ``l2 / 2 * |w|^2 + mean loss``, where the weights of samples multiply their losses. In the words of LIBLINEAR, C is
    ``1 / (samples * l2)`` and the objective is ``l2`` times its. In a round every rank goes over its own samples in a random order,
    and changes one dual variable after the other to its best value, as far as the rank knows; the changes of the weights are added
    up over all ranks, up to 5 times on the way. The paper adds them up at the end alone: then a pass of two ranks is worth half of
    one rank's, or much less with the hinge. On one rank that is LIBLINEAR's dual solver (Hsieh et al. 2008; Yu et al. 2011 for the
    logistic loss), which leaves out samples that are settled. Of several ranks, the first one goes over what the others have not
    settled either, where that is little (:mod:`~sparseallreduce.linear.solvers.gathered`). The rounds depend on the number of ranks;
    the optimum does not. All ranks make their solvers together.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples, labels -1 and +1; or all there are, the same on every rank, of which this one takes its share.
    model : Hinge, SquaredHinge, Logistic, Multinomial, EpsilonInsensitive or SquaredEpsilonInsensitive
        Of the fourth, labels are numbers of classes, and ``weights`` have a column a class; of the last two, any numbers.
    l2 : float
        Above 0: without a penalty there is no dual to ascend.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    tolerance : float
        Ends when the duality gap is at most this share of the primal objective: then the objective is above its optimum by no greater
        share. Accuracy is often the best it gets at 0.01. LIBLINEAR bounds no objective, but a gradient.
    enough : float
        A gap, in units of the mean loss, that is small enough whatever the objective is.
    rounds : int
        At most.
    local_passes : int
        Over a rank's samples in a round: more where sums take longer than passes. With more than one, changes are summed at their end
        alone.
    seed : int
        Of the order of visits.
    intercept : bool
        Whether samples have one more feature of value one, whose weight is penalised like all others, as by LIBLINEAR's ``-B 1``.
    free_intercept : bool
        Whether the intercept is not penalised: only its distance from where it was before is, and it is moved until that no longer matters
        (the proximal point method). The gap counts that distance too. Columns that all samples have are then taken around their mean.
    scale_features : bool or None
        Whether values are divided by what is typical of their column, of which ``l2`` penalises the weights; with None, where columns have
        different units. ``weights`` are of the values as they are given.

    Attributes
    ----------
    history : list of Round
    converged : bool
        Whether the gap has come below the tolerance.
    weights : ndarray
        After :meth:`fit`, float64, the same on every rank to the bit, of shape (features,) or (features + 1,), the intercept last.
    best_state : tuple of ndarray or None
        What :meth:`weights_of` makes those weights of; None before any.
    preparation : float
        Seconds before the first round: checks, numbering of features, and which of them several ranks have.

    Raises
    ------
    AlgorithmError
        On all ranks alike, if an argument of any rank is out of range, or the loss has no known dual.
    DatasetError, MismatchError
        On all ranks alike, if there are no samples, or arrays, labels or settings do not go together.

    Notes
    -----
    There is no start from given weights: what the ascent goes on from are dual variables, one a sample, which weights do not tell.
    Changes are added up in float32 for a tolerance of 1e-5 or more, in float64 below; all else is float64. By that the weights come to
    differ from those of the dual variables by some 1e-7 of themselves, and the gap by as small a share of the objective.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from sparseallreduce.linear import Hinge
    >>> samples = Dataset.from_scipy([[0.0, 2.0], [3.0, 0.0]], [1, -1])
    >>> solver = CoCoA(samples, Hinge(), l2=0.1, comm=sar.SERIAL, intercept=False)
    >>> solver.fit().round(3), solver.converged
    (array([-0.333,  0.5  ]), True)
    """

    def __init__(
        self,
        dataset: Dataset,
        model: LinearModel,
        *,
        l2: float,
        comm: Any = None,
        tolerance: float = 1e-3,
        enough: float = 0.0,
        rounds: int = 1000,
        local_passes: int = 1,
        seed: int = 0,
        intercept: bool = True,
        free_intercept: bool = False,
        scale_features: bool | None = False,
    ) -> None:
        clock = Clock()
        self.comm = resolve(comm)
        self.model, self.l2, self.tolerance, self.enough, self.rounds = model, l2, tolerance, enough, rounds
        self.local_passes, self.seed, self.intercept = local_passes, seed, intercept
        self.free_intercept, self.scale_features = intercept and free_intercept, scale_features
        self.history: list[Round] = []
        self.weights = np.zeros(0)
        self._sum_dtype = np.float32 if tolerance >= _FLOAT32 else np.float64
        together(self.comm, lambda: self._make(dataset))
        clock.lap("prepare")
        self.preparation = clock.seconds["prepare"]

    def _make(self, dataset: Dataset) -> None:
        """Check what has been given, and number the features; collective."""
        self._loss = agreed(self.comm, self._checked)
        self.dataset = checked_samples(dataset, self.comm, self.model, f"solver {type(self).__name__}", self._settings())
        self._active = self.dataset.total_samples
        self._local = agreed(self.comm, self._prepared)
        self._exchange = Exchange(self._local, self.dataset.features, self.comm, self._sum_dtype)
        frame = frame_of(self.dataset, self._local.numbering, self.comm, self.free_intercept, self.scale_features)
        agreed(self.comm, lambda: self._local.take(frame))
        agreed(self.comm, self._exchange.begin)
        self._centre = np.zeros(self._local.width)  # of a free intercept: the distance from this is penalised
        if self.free_intercept and not self.model.classifies:
            self._begin_at_mean()
        self._gathered = Gathered(self.dataset, self._local, self._exchange, self.comm)
        self._begin()

    def _begin(self) -> None:
        """Know nothing of rounds, of which there was none yet."""
        self.history, self.converged = [], False
        self._due, self._recollect, self._bound = False, False, 0.0
        self._pace, self._nonzeros, self._busiest = Pace(), 0, 0
        self._best, self._last, self._expected, self._optimism = math.inf, math.inf, math.inf, 1.0
        self.best_state: State | None = None

    def _begin_at_mean(self) -> None:
        """Have a free intercept begin at the mean label, from which it is never far; collective."""
        counts = np.ones(self.dataset.rows) if self.dataset.weights is None else self.dataset.weights
        parts = told(self.comm, lambda: (float(np.dot(counts, self.dataset.labels)), float(counts.sum())))
        total, count = (sum(column) for column in zip(*parts, strict=True))
        self._centre += total / count if count else 0.0
        self._exchange.move_intercept(self._centre.copy())

    def _checked(self) -> int:
        """The number of the loss, if all arguments are in range."""
        if not 0 < self.l2 < math.inf:
            raise AlgorithmError(f"l2 must be above 0 and finite for a dual solver, not {self.l2:g}: without it, train by SGD")
        if not 0 < self.tolerance < math.inf:
            raise AlgorithmError(f"the tolerance must be above 0 and finite, not {self.tolerance:g}")
        for name, lowest in (("rounds", 1), ("local_passes", 1), ("seed", 0)):
            if not getattr(self, name) >= lowest:
                raise AlgorithmError(f"{name} must be at least {lowest}, not {getattr(self, name)}")
        self._classes = self.model.columns if isinstance(self.model, Multinomial) else 0
        return MULTINOMIAL if self._classes else dual_loss(self.model)

    def _settings(self) -> dict[str, Any]:
        names = ("l2", "tolerance", "enough", "rounds", "local_passes", "seed", "intercept", "free_intercept", "scale_features")
        return {"model": type(self.model).__name__, **{name: getattr(self, name) for name in names}}

    def _prepared(self) -> LocalProblem:
        sum_dtype = self._sum_dtype if self.comm.size > 1 else None
        warm_up(self.dataset.indices.dtype, self.dataset.values.dtype, index_dtype(0), sum_dtype)
        if self._classes:
            warm_up_classes(place_dtype=index_dtype(0), value_dtype=self.dataset.values.dtype)
            return ClassProblem(self.dataset, self._classes, self.l2, self.intercept, self.seed)
        if isinstance(self.model, EpsilonInsensitive):
            return ErrorProblem(self.dataset, self._loss, self.model.epsilon, self.l2, self.intercept, self.seed)
        return LocalProblem(self.dataset, self._loss, self.l2, self.intercept, self.seed)

    @collective("fit")
    def fit(self) -> Array:
        """Make rounds until the gap is small enough, or as many as are allowed; collective.

        A second call goes on where the first one ended.

        Returns
        -------
        ndarray
            ``weights``: those of the lowest primal objective that was computed.

        Raises
        ------
        DivergenceError
            On all ranks alike, if an objective is no finite number, since values or ``1 / l2`` are too large.
        """

        def rounds() -> Array:
            limit = len(self.history) + self.rounds
            while not self.converged and len(self.history) < limit:
                self.advance(certify=len(self.history) + 1 == limit)
            return self.weights_of(self.best_state)

        self.weights = together(self.comm, rounds)
        return self.weights

    def penalise(self, l2: float) -> None:
        """Take another penalty, and begin where the last run has ended; collective.

        The weights are those, or these as many times as dual variables may be larger now, whichever is nearer to the optimum.

        Raises
        ------
        AlgorithmError
            On all ranks alike, if ``l2`` is out of range.
        """
        widening, self.l2 = self.l2 / l2 if l2 > 0 else 0.0, l2
        agreed(self.comm, self._checked)
        self._gathered.catch_up()
        self._gathered.forget()
        factors = {widening, min(1.0, widening)}

        def own() -> tuple[float, dict[float, float]]:
            self._local.penalise(l2)
            return self._local.squares(), {factor: self._local.conjugates(self._local.scaled(factor)) for factor in factors}

        told = gather(self.comm, agreed(self.comm, own))
        halved = self._halved(sum(squares for squares, _ in told))
        pulled = float(np.dot(self._centre, self._moved))

        def objective(factor: float) -> float:
            return float(sum(conjugates[factor] for _, conjugates in told)) + factor * factor * halved + factor * pulled

        self._exchange.scale(min(sorted(factors), key=objective), self._centre)
        self._begin()

    def advance(self, certify: bool = False) -> Round:
        """Make one round; collective.

        Parameters
        ----------
        certify : bool
            Whether the primal objective is computed in any case, and not only where the gap may be small enough.

        Raises
        ------
        DivergenceError
            As :meth:`fit`.
        """
        clock, sigma = Clock(), self._exchange.sigma
        with trace() as traffic:
            gap, sent = self._step(clock)
        dual, active, sent = self._dual(traffic.bytes_sent + sent)
        primal = None
        if self._expects_end(gap, dual) or certify or self._is_overdue():
            primal = self._primal()
            self._learn_from(dual)
            self._keep_pace(dual)
        clock.lap("evaluate")
        self._conclude(dual, primal, active, sigma, clock, sent)
        if primal is not None and self.free_intercept:
            self._recentre()
        return self.history[-1]

    def scores(self) -> Array:
        """The scores of this rank's samples, float64, by the weights after the last round whose primal objective was computed."""
        return self._local.scores

    def state(self) -> State:
        """A copy of what :meth:`weights_of` makes weights of."""
        return self._exchange.state()

    def weights_of(self, state: State | None = None) -> Array:
        """The weights of a state, or those after the last round, as ``weights``; collective."""
        return self._exchange.assembled(state)

    def _step(self, clock: Clock) -> tuple[float, int]:
        """Change dual variables and weights; the sum of the gaps of the samples when they were visited, and bytes sent beside sums."""
        if self.comm.size == 1:
            gap = self._local.ascend(self.local_passes)
            clock.lap("compute")
            return gap, 0
        self._gathered.catch_up()
        if self._gathered.begun or self._recollect:
            return self._step_together(clock)
        return self._step_apart(clock), 0

    def _step_together(self, clock: Clock) -> tuple[float, int]:
        """Have the first rank go over what is active at all of them."""
        gathered = self._gathered
        try:
            sent = gathered.collect() if self._recollect else 0
            self._recollect = False
            clock.lap("communicate")
            if not gathered.begun:
                return self._step_apart(clock), sent
            enough = self._aim(self._bound) / self._optimism
            passes = gathered.advance(self.local_passes, _VISITS * self.dataset.total_samples, enough)
        except BaseException:
            gathered.forget()
            raise
        clock.lap("compute")
        self._pace.spend(passes.nonzeros)
        if passes.before < math.inf:
            self._last = passes.before
        return passes.gap, sent + passes.sent

    def _step_apart(self, clock: Clock) -> float:
        """Have every rank go over its own samples, and the changes added up on the way."""
        total, parts = 0.0, 1
        self._pace.spend(self._busiest)
        if self.local_passes == 1:
            parts = min(_PARTS, max(1, self._active // (self.comm.size * _PART)))
        for part in range(parts):
            failure: BaseException | None = None
            try:
                change = self._exchange.own_change(self._ascended(part, parts))
            except BaseException as error:
                failure, change = error, self._exchange.failure()
            clock.lap("compute")
            told = self._exchange.add(change)
            clock.lap("communicate")
            if told is None:
                agreed(self.comm, partial(_raised, failure))
            else:
                total += told
        return total

    def _ascended(self, part: int, parts: int) -> float:
        """Change dual variables of a part of a pass, or of several passes; the sum of the gaps of the samples when they were visited."""
        local = self._local
        if parts == 1:
            return local.ascend(self.local_passes)
        if part == 0:
            local.deal(parts)
        return local.ascend_part(part)

    def _dual(self, sent: int) -> tuple[float, int, int]:
        """The dual objective, and sums over the ranks: of active samples, and of bytes sent."""
        local, gathered = self._local, self._gathered

        def own() -> tuple[float, float, int, int, int]:
            return local.conjugates(), local.squares(), gathered.active, local.entries_of(local.active_rows), sent

        told = gather(self.comm, agreed(self.comm, own))
        conjugates, squares, active, entries, bytes_sent = (sum(column) for column in zip(*told, strict=True))
        self._active = active
        self._nonzeros, self._busiest = entries, max(rank[3] for rank in told)
        self._due = not gathered.begun and gathered.is_due(entries, len(self.history))
        dual = -conjugates - self._halved(squares) - float(np.dot(self._centre, self._moved))
        self._bound = abs(dual)
        return dual, active, bytes_sent

    def _primal(self) -> float:
        """The primal objective; the weights are kept if it is the lowest so far."""
        told = gather(self.comm, agreed(self.comm, self._local.certify))
        self._recollect |= self._gathered.begun
        self._near = near = sum(part.losses for part in told) + self._halved(sum(part.squares for part in told))
        distance = float(np.square(self._moved).sum()) / 2
        if near + distance < self._best:
            self._best, self._best_distance, self.best_state = near + distance, distance, self._exchange.state()
        return near - distance

    @property
    def _moved(self) -> Array:
        """The distance of each score's intercept from the point it is pulled to; zeros unless the intercept is free."""
        return self._local.intercept - self._centre if self.free_intercept else np.zeros_like(self._centre)

    def _halved(self, squares: float) -> float:
        """Half the squares of all weights, those that other ranks have not among them given; of a free intercept that of its distance."""
        squares += self._exchange.squares()
        if self.free_intercept:
            squares += float(np.square(self._moved).sum() - np.square(self._local.intercept).sum())
        return squares / 2

    def _recentre(self) -> None:
        """Hold a free intercept where it is now, if that it was held elsewhere is what keeps the gap open."""
        distance = self._best_distance
        if self.converged or distance < self._aim(self._best) / 4 or self._gap_near > distance:
            return
        moved = self._moved
        self._centre += moved
        self._exchange.move_intercept(moved)
        self._gathered.forget()
        self._recollect = False
        self._best, self._last = math.inf, math.inf

    def _expects_end(self, gap: float, dual: float) -> bool:
        """Whether the gap may be small enough, judged by what the samples showed when they were visited.

        That was before they changed: after a round it is smaller by about as much as it was than a round ago.
        """
        rate = min(1.0, gap / self._last) if self._last > 0 else 1.0
        self._expected = self._optimism * gap * rate
        self._last = gap
        aim = self._aim(abs(dual))
        self._recollect |= self._due and self._expected * rate**_SOON > aim
        return not self._expected > aim

    def _aim(self, objective: float) -> float:
        """The gap that is small enough at an objective."""
        return max(self.tolerance * objective, self.enough / self.l2)

    def _learn_from(self, dual: float) -> None:
        """Expect a gap by as much larger than this one was than expected, and see whether it is the end."""
        gap = self._gap_near = self._near - dual
        if not math.isfinite(gap):
            raise DivergenceError("an objective is no longer a finite number: scale the values down, or raise l2")
        self.converged = self._best - dual <= self._aim(self._best)
        if self._expected > 0:
            self._optimism = min(_WORST, max(1.0, self._optimism * gap / self._expected))

    def _is_overdue(self) -> bool:
        """Whether to compute the primal objective so as to see how fast the ranks are that work apart."""
        return self.comm.size > 1 and not self._gathered.begun and self._pace.overdue(len(self.history) + 1)

    def _keep_pace(self, dual: float) -> None:
        """Have one rank go over the active samples of all where the gap falls too slowly, and all of them if that is no faster."""
        if self.comm.size == 1 or self.converged:
            return
        self._pace.mark(len(self.history) + 1, self._best - dual)
        aim = self._aim(self._best)
        if not self._gathered.begun:
            self._recollect |= not self._classes and self._gathered.has_room(self._nonzeros) and self._pace.prefers_one(aim, self._nonzeros)
        elif self._pace.prefers_all(aim, self._nonzeros):
            self._gathered.forget()
            self._recollect = False

    def _conclude(self, dual: float, primal: float | None, active: int, sigma: float, clock: Clock, sent: int) -> None:
        scale = self.l2
        self.history.append(
            Round(
                round=len(self.history) + 1,
                dual=scale * dual,
                primal=None if primal is None else scale * primal,
                gap=None if primal is None else scale * (self._best - dual),
                active=active,
                sigma=sigma,
                seconds={phase: clock.seconds[phase] for phase in PHASES},
                bytes_sent=sent,
                gathered=self._gathered.begun,
            )
        )


def _raised(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
