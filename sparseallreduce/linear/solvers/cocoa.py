"""CoCoA+: dual coordinate ascent on every rank, with sums of the changes of the weights in each round (Ma et al. 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.errors import AlgorithmError, DivergenceError
from sparseallreduce.linear.data.checks import checked_samples
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.kernels.dual_warming import warm_up, warm_up_classes
from sparseallreduce.linear.models import EpsilonInsensitive, LinearModel
from sparseallreduce.linear.multiclass import Multinomial
from sparseallreduce.linear.solvers.exchange import Exchange
from sparseallreduce.linear.solvers.frames import frame_of
from sparseallreduce.linear.solvers.gathered import Gathered
from sparseallreduce.linear.solvers.local import MULTINOMIAL, ClassProblem, ErrorProblem, LocalProblem, Passes
from sparseallreduce.linear.solvers.losses import dual_loss
from sparseallreduce.linear.solvers.pace import Pace
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, gather, gather_results, together
from sparseallreduce.runtime.stalls import collective
from sparseallreduce.runtime.trace import trace
from sparseallreduce.streams.stream import index_dtype

__all__ = ["PHASES", "CoCoA", "Round", "load_loops"]

Array = NDArray[Any]
State = tuple[Array, Array]
T = TypeVar("T")

#: Phases of a round that are timed: passes over samples, sums of changes, and objectives.
PHASES = ("compute", "communicate", "evaluate")

_FLOAT32 = 1e-5  # smallest tolerance for which changes are summed in float32
# Largest number of parts of a pass, after each of which changes of frequent features are summed, and smallest number of samples per rank
# and part. Objectives after passes of two ranks over 100,000 samples like URL's, logistic: .071 .047 .038 .037 with two sums of all
# features a pass, .062 .044 .038 .037 with one and 19 of frequent ones; one rank .058 .041 .037 .036.
_PARTS, _PART = 20, 400
# Smallest number of active non-zeros of a rank per part, and additionally per frequent feature, which take as long as a sum.
_ENTRIES, _PER_FEATURE = 1 << 14, 4
# Visits per sample of all ranks before the first rank broadcasts its changes. A single rank makes as many in a round if less than a fourth
# of its samples are active. Rounds to a gap of 5e-7, phishing_url: squared hinge 249 with one pass, 12 on two ranks.
_VISITS, _FEW = 3, 4
_SOON = 4  # if this many more rounds are expected to suffice, active samples are not gathered
_WORST = 8.0  # largest correction factor of the expected gap after it was underestimated


@dataclass(frozen=True)
class Round:
    """The results of one round; all but the seconds are the same on every rank."""

    round: int  # from 1
    dual: float  # dual objective, a lower bound of the optimum; it never decreases except by rounding
    primal: float | None  # primal objective of the weights after the round; None if it was not computed, which takes a pass
    gap: float | None  # the lowest primal objective so far minus ``dual``, a bound on its distance from the optimum
    active: int  # samples that the next round visits, over all ranks
    sigma: float  # factor by which a rank's change of a weight that all ranks have counts in its own problem
    seconds: dict[str, float]  # of this rank, by PHASES
    bytes_sent: int  # by all ranks
    gathered: bool = False  # whether the first rank processed the active samples of all ranks


class CoCoA:
    """Finds the weights of a linear classifier by dual coordinate ascent, in rounds (Ma et al. 2015, CoCoA+ with gamma = 1).

    It minimises ``l2 / 2 * |w|^2 + mean loss``, where sample weights multiply the losses. In LIBLINEAR's terms, C is ``1 / (samples * l2)``
    and the objective is ``l2`` times LIBLINEAR's. In a round every rank visits its own samples in random order, and sets one dual variable
    after the other to its best value, given what the rank knows; the changes of the weights are summed over all ranks at the end of the
    round, and those of frequent features up to 20 times in it. The paper sums only at the end: then a pass of two ranks achieves half of
    one rank's pass, or much less with the hinge. On one rank the method is LIBLINEAR's dual solver (Hsieh et al. 2008; Yu et al. 2011 for
    the logistic loss), which skips samples whose dual variables stay at a bound. With several ranks, the first one processes the remaining
    active samples of all ranks once they are few (:mod:`~sparseallreduce.linear.solvers.gathered`). The rounds depend on the number of
    ranks; the optimum does not. Creating a solver is collective.

    Parameters
    ----------
    dataset : Dataset
        This rank's samples, with labels -1 and +1; or all samples, the same on every rank, of which each rank takes its share.
    model : Hinge, SquaredHinge, Logistic, Multinomial, EpsilonInsensitive or SquaredEpsilonInsensitive
        Labels are class numbers for ``Multinomial``, whose ``weights`` have one column per class, and any numbers for the last two models.
    l2 : float
        Above 0: without a penalty there is no dual to ascend.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    tolerance : float
        Training ends when the duality gap is at most this fraction of the primal objective, which is then above its optimum by at most the
        same fraction. Accuracy often stops improving at 0.01. LIBLINEAR's tolerance bounds a gradient instead.
    enough : float
        A gap, in units of the mean loss, at which training ends whatever the objective is.
    rounds : int
        Largest number of rounds.
    local_passes : int
        Passes over a rank's samples per round: use more if sums take longer than passes. With more than one, changes are summed only at the
        end of a round.
    seed : int
        Seed of the order of visits.
    intercept : bool
        Whether samples have one more feature of value one, whose weight is penalised like the others, as with LIBLINEAR's ``-B 1``.
    free_intercept : bool
        Whether the intercept is not penalised. Only its distance from a centre is, and the centre is moved until that no longer matters
        (the proximal point method). The gap includes that distance. Columns without zeros are then centred.
    scale_features : bool or None
        Whether values are divided by the scale of their column, so that ``l2`` penalises the weights of the scaled values; None scales if
        columns have different units. ``weights`` apply to the original values.

    Attributes
    ----------
    history : list of Round
    converged : bool
        True if the gap is below the tolerance.
    weights : ndarray
        Set by :meth:`fit`: float64, bitwise identical on every rank, of shape (features,) or (features + 1,), the intercept last.
    best_state : tuple of ndarray or None
        State from which :meth:`weights_of` computes those weights; None before the first.

    Raises
    ------
    AlgorithmError
        On all ranks, if an argument of any rank is out of range, or the loss has no known dual.
    DatasetError, MismatchError
        On all ranks, if there are no samples, or arrays, labels or settings do not match.

    Notes
    -----
    Training cannot start from given weights: its state is one dual variable per sample, which does not follow from the weights.
    Changes are summed in float32 for a tolerance of 1e-5 or more, otherwise in float64; all else is float64. Summing in float32 changes the
    weights by a relative error of some 1e-7, and the gap by as small a fraction of the objective.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from sparseallreduce.linear import Hinge
    >>> samples = Dataset.from_scipy([[0.0, 2.0], [3.0, 0.0]], [1, -1])
    >>> solver = CoCoA(samples, Hinge(), l2=0.1, comm=sar.SERIAL, intercept=False)
    >>> solver.fit().round(3), solver.converged
    (array([-0.333,  0.5  ]), True)
    """

    model: LinearModel
    l2: float
    tolerance: float
    enough: float
    rounds: int
    local_passes: int
    seed: int
    intercept: bool
    free_intercept: bool
    scale_features: bool | None
    converged: bool

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
        self.comm: Any = resolve(comm)
        self.model, self.l2, self.tolerance, self.enough, self.rounds = model, l2, tolerance, enough, rounds
        self.local_passes, self.seed, self.intercept = local_passes, seed, intercept
        self.free_intercept, self.scale_features = intercept and free_intercept, scale_features
        self.history: list[Round] = []
        self.weights: Array = np.zeros(0)
        self._sum_dtype = sum_dtype(tolerance)
        together(self.comm, lambda: self._make(dataset))

    def _make(self, dataset: Dataset) -> None:
        """Check the arguments and number the features. Collective."""
        self._loss = agreed(self.comm, self._checked)
        self.dataset: Dataset = checked_samples(dataset, self.comm, self.model, f"solver {type(self).__name__}", self._settings())
        self._active = self.dataset.total_samples
        self._local = agreed(self.comm, self._prepared)
        self._exchange = Exchange(self._local, self.dataset.features, self.comm, self._sum_dtype)
        local, exchange = self._local, self._exchange
        frame = frame_of(self.dataset, local.numbering, self.comm, self.free_intercept, self.scale_features, local.has_ones)
        agreed(self.comm, lambda: exchange.begin(frame))
        self._centre = np.zeros(self._local.width)  # the distance of a free intercept from this is penalised
        if self.free_intercept and not self.model.classifies:
            self._begin_at_mean()
        self._gathered = Gathered(self.dataset, self._local, self._exchange, self.comm)
        self._begin()

    def _begin(self) -> None:
        """Reset the state of a run."""
        self.history, self.converged, self._certified = [], False, False
        self._due, self._recollect, self._bound = False, False, 0.0
        self._pace, self._nonzeros, self._busiest = Pace(), 0, 0
        self._best, self._last, self._expected, self._optimism = math.inf, math.inf, math.inf, 1.0
        self.best_state: State | None = None

    def _begin_at_mean(self) -> None:
        """Set a free intercept to the mean label, which is near its optimum. Collective."""
        counts = np.ones(self.dataset.rows) if self.dataset.weights is None else self.dataset.weights
        parts = gather_results(self.comm, lambda: (float(np.dot(counts, self.dataset.labels)), float(counts.sum())))
        total, count = (sum(column) for column in zip(*parts, strict=True))
        self._centre += total / count if count else 0.0
        self._exchange.move_intercept(self._centre.copy())

    def _checked(self) -> int:
        """Return the number of the loss after checking all arguments."""
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
        load_loops(self.dataset, self.model, self.comm, self.tolerance)
        if self._classes:
            return ClassProblem(self.dataset, self._classes, self.l2, self.intercept, self.seed)
        if isinstance(self.model, EpsilonInsensitive):
            return ErrorProblem(self.dataset, self._loss, self.model.epsilon, self.l2, self.intercept, self.seed)
        return LocalProblem(self.dataset, self._loss, self.l2, self.intercept, self.seed)

    @collective("fit")
    def fit(self) -> Array:
        """Make rounds until the gap is small enough, or the number of rounds is reached. Collective.

        A second call continues where the first one ended.

        Returns
        -------
        ndarray
            ``weights``, those of the lowest primal objective computed.

        Raises
        ------
        DivergenceError
            On all ranks, if an objective is not finite, because values or ``1 / l2`` are too large.
        """

        def rounds() -> Array:
            limit = len(self.history) + self.rounds
            while not self.converged and len(self.history) < limit:
                self.advance(certify=len(self.history) + 1 == limit)
            return self.weights_of(self.best_state)

        self.weights = together(self.comm, rounds)
        return self.weights

    def penalise(self, l2: float) -> None:
        """Change the penalty, and continue from the end of the last run. Collective.

        The run starts from the last weights, or from a multiple of them by the growth of the dual variables' bounds, whichever is nearer to
        the optimum.

        Raises
        ------
        AlgorithmError
            On all ranks, if ``l2`` is out of range.
        """
        widening, self.l2 = self.l2 / l2 if l2 > 0 else 0.0, l2
        agreed(self.comm, self._checked)
        self._gathered.catch_up()
        self._gathered.forget()
        factors = {widening, min(1.0, widening)}

        def own() -> tuple[float, dict[float, float]]:
            self._local.penalise(l2)
            return self._local.squares(), {factor: self._local.conjugates(self._local.scaled(factor)) for factor in factors}

        parts = gather(self.comm, agreed(self.comm, own))
        halved = self._halved(sum(squares for squares, _ in parts))
        pulled = float(np.dot(self._centre, self._moved))

        def objective(factor: float) -> float:
            return float(sum(conjugates[factor] for _, conjugates in parts)) + factor * factor * halved + factor * pulled

        self._exchange.scale(min(sorted(factors), key=objective), self._centre)
        self._begin()

    def advance(self, certify: bool = False) -> Round:
        """Make one round. Collective.

        Parameters
        ----------
        certify : bool
            Whether to compute the primal objective in any case, not only if the gap may be small enough.

        Raises
        ------
        DivergenceError
            As in :meth:`fit`.
        """
        clock, sigma = Clock(), self._exchange.sigma
        if self._certified and self.free_intercept:
            self._recentre()  # not before, so that the weights of a round are those of which the objective is known
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
        self._certified = primal is not None
        return self.history[-1]

    def scores(self) -> Array:
        """Return the scores of this rank's samples, float64, after the last round whose primal objective was computed."""
        return self._local.scores

    def state(self) -> State:
        """Return a copy of the state from which :meth:`weights_of` computes weights."""
        return self._exchange.state()

    def weights_of(self, state: State | None = None) -> Array:
        """Return the weights of a state, by default the present one, in the form of ``weights``. Collective."""
        return self._exchange.assembled(state)

    def _step(self, clock: Clock) -> tuple[float, int]:
        """Update dual variables and weights; return the sum of the gaps before each visit, and the bytes sent other than sums."""
        if self.comm.size == 1:
            local = self._local
            visits = _VISITS * local.rows if _FEW * local.active < local.rows else 0
            passes = local.ascend_until(self.local_passes, visits, self._enough)
            clock.lap("compute")
            self._note_gap_before(passes)
            return passes.gap, 0
        self._gathered.catch_up()
        if self._gathered.begun or self._recollect:
            return self._step_together(clock)
        return self._step_separately(clock), 0

    def _step_together(self, clock: Clock) -> tuple[float, int]:
        """Let the first rank process the active samples of all ranks."""
        gathered = self._gathered
        try:
            sent = gathered.collect() if self._recollect else 0
            self._recollect = False
            clock.lap("communicate")
            if not gathered.begun:
                return self._step_separately(clock), sent
            passes, sent_since = gathered.advance(self.local_passes, _VISITS * self.dataset.total_samples, self._enough)
        except BaseException:
            gathered.forget()
            raise
        clock.lap("compute")
        self._pace.spend(passes.nonzeros)
        self._note_gap_before(passes)
        return passes.gap, sent + sent_since

    @property
    def _enough(self) -> float:
        """The sum of the samples' gaps before their visits for which the gap between both objectives is expected to be small enough."""
        return self._aim(self._bound) / self._optimism

    def _note_gap_before(self, passes: Passes) -> None:
        if passes.before < math.inf:
            self._last = passes.before

    def _step_separately(self, clock: Clock) -> float:
        """Let every rank process its own samples, and sum the changes several times."""
        exchange, parts, found = self._exchange, 1, 0.0
        exchange.open()
        self._pace.spend(self._busiest)
        if self.local_passes == 1:
            parts = self._parts()
        for part in range(parts - 1):
            failure: BaseException | None = None
            try:
                found += self._ascended(part, parts)
                change = exchange.own_early_change()
            except BaseException as error:
                failure, change = error, exchange.failure(early=True)
            clock.lap("compute")
            is_added = exchange.add_early(change)
            clock.lap("communicate")
            if not is_added:
                agreed(self.comm, partial(_raised, failure))
        return self._ended(clock, parts, found)

    def _ended(self, clock: Clock, parts: int, found: float) -> float:
        """Process the last part of a pass, and sum the changes of all features; return the sum of gaps, given that of earlier parts."""
        failure: BaseException | None = None
        try:
            change = self._exchange.own_change(found + self._ascended(parts - 1, parts))
        except BaseException as error:
            failure, change = error, self._exchange.failure(early=False)
        clock.lap("compute")
        gap = self._exchange.add(change)
        clock.lap("communicate")
        if gap is None:
            agreed(self.comm, partial(_raised, failure))
        return gap or 0.0

    def _parts(self) -> int:
        """Return the number of parts of the next pass, the same on every rank."""
        ranks, entries = int(self.comm.size), self._nonzeros or self._gathered.entries
        worth = entries // (ranks * (_ENTRIES + _PER_FEATURE * self._exchange.frequent_features))
        return max(1, min(_PARTS, worth, self._active // (ranks * _PART)))

    def _ascended(self, part: int, parts: int) -> float:
        """Visit the active samples for a part of a pass or several passes; return the sum of the duality gaps found before each visit."""
        local = self._local
        if parts == 1:
            return local.ascend(self.local_passes)
        if part == 0:
            local.deal(parts)
        return local.ascend_part(part)

    def _dual(self, sent: int) -> tuple[float, int, int]:
        """Return the dual objective, and the numbers of active samples and of bytes sent, summed over the ranks."""
        local, gathered = self._local, self._gathered

        def own() -> tuple[float, float, int, int, int]:
            return local.conjugates(), local.squares(), gathered.active, local.entries_of(local.active_rows), sent

        ranks = gather(self.comm, agreed(self.comm, own))
        conjugates, squares, active, entries, bytes_sent = (sum(column) for column in zip(*ranks, strict=True))
        self._active = active
        self._nonzeros, self._busiest = entries, max(rank[3] for rank in ranks)
        self._due = not gathered.begun and gathered.is_due(entries, len(self.history))
        dual = -conjugates - self._halved(squares) - float(np.dot(self._centre, self._moved))
        self._bound = abs(dual)
        return dual, active, bytes_sent

    def _primal(self) -> float:
        """Return the primal objective, and save the weights if it is the lowest so far."""
        parts = gather(self.comm, agreed(self.comm, self._local.certify))
        self._recollect |= self._gathered.begun
        self._near = near = sum(part.losses for part in parts) + self._halved(sum(part.squares for part in parts))
        distance = float(np.square(self._moved).sum()) / 2
        if near + distance < self._best:
            self._best, self._best_distance, self.best_state = near + distance, distance, self._exchange.state()
        return near - distance

    @property
    def _moved(self) -> Array:
        """The distance of each score's intercept from its centre; zeros unless the intercept is free."""
        return self._local.intercept - self._centre if self.free_intercept else np.zeros_like(self._centre)

    def _halved(self, squares: float) -> float:
        """Return half the squared length of all weights, given that of the ranks' private ones. A free intercept counts by its distance."""
        squares += self._exchange.squares()
        if self.free_intercept:
            squares += float(np.square(self._moved).sum() - np.square(self._local.intercept).sum())
        return squares / 2

    def _recentre(self) -> None:
        """Move the centre of a free intercept to its present value, if its distance from the centre keeps the gap open."""
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
        """Return True if the gap may be small enough, judged by the samples' gaps before their visits.

        The visits have reduced the gap since: the estimate assumes the reduction of the previous round.
        """
        rate = min(1.0, gap / self._last) if self._last > 0 else 1.0
        self._expected = self._optimism * gap * rate
        self._last = gap
        aim = self._aim(abs(dual))
        self._recollect |= self._due and self._expected * rate**_SOON > aim
        return not self._expected > aim

    def _aim(self, objective: float) -> float:
        """Return the gap that is small enough for this objective."""
        return max(self.tolerance * objective, self.enough / self.l2)

    def _learn_from(self, dual: float) -> None:
        """Update ``converged``, and correct later estimates of the gap by the error of the last one."""
        gap = self._gap_near = self._near - dual
        if not math.isfinite(gap):
            raise DivergenceError("an objective is no longer a finite number: scale the values down, or raise l2")
        self.converged = self._best - dual <= self._aim(self._best)
        if self._expected > 0:
            self._optimism = min(_WORST, max(1.0, self._optimism * gap / self._expected))

    def _is_overdue(self) -> bool:
        """Return True if the primal objective should be computed to measure the progress of ranks that work separately."""
        return self.comm.size > 1 and not self._gathered.begun and self._pace.overdue(len(self.history) + 1)

    def _keep_pace(self, dual: float) -> None:
        """Switch to one rank for all active samples if the gap decreases too slowly, and back if that is no faster."""
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


def sum_dtype(tolerance: float) -> DTypeLike:
    """Return the dtype in which ranks sum their changes for a tolerance."""
    return np.float32 if tolerance >= _FLOAT32 else np.float64


def load_loops(dataset: Dataset, model: LinearModel, comm: Any, tolerance: float) -> None:
    """Compile the loops of a training, or load them from the cache on disk. Not collective."""
    index, value = dataset.indices.dtype, dataset.values.dtype
    warm_up(index, value, index_dtype(0), sum_dtype(tolerance) if comm.size > 1 else None)
    if isinstance(model, Multinomial):
        warm_up_classes(place_dtype=index_dtype(0), value_dtype=value)


def _raised(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure
