"""The trainer: data-parallel mini-batch SGD for a linear model (thesis sections 2.1, algorithm 1, and 4.2)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.errors import AlgorithmError, DivergenceError, TrainingStopped
from sparseallreduce.linear.data.checks import check_labels, check_parts, check_same, described, own_test_samples
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.gradients.on_gpu import sparse_batch
from sparseallreduce.linear.models import Hinge, LinearModel
from sparseallreduce.linear.strategies import Strategy
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.linear.training.batches import Division, divided, epoch_order
from sparseallreduce.linear.training.checkpoint import Checkpoints
from sparseallreduce.linear.training.consensus import Consensus
from sparseallreduce.linear.training.early_stopping import EarlyStopping
from sparseallreduce.linear.training.epoch import PHASES, Epoch, Options
from sparseallreduce.linear.training.evaluation import Best, Evaluation
from sparseallreduce.linear.training.resuming import Resumable
from sparseallreduce.linear.training.schedules import LargeBatch, Reactive, Schedule
from sparseallreduce.linear.weights import Weights
from sparseallreduce.runtime.objects import agreed, gather, is_known, mark_known, steps_together, together
from sparseallreduce.runtime.trace import trace

__all__ = ["PHASES", "Epoch", "Options", "SparseBatchWarning", "Trainer"]

Array = NDArray[Any]

_MOST = 0.99  # limit of schedules, as a fraction of the learning rate at which the L2 term would flip the signs of weights


class SparseBatchWarning(UserWarning):
    """Warns that batches have too few non-zeros, or too many features, for a GPU to be worth using."""


class _Failure(NamedTuple):
    """A worker's record of an error outside of sums, for the other workers."""

    rank: int
    error: str  # name of its class
    text: str


class Trainer(Resumable):
    """Trains the weights of a model on the samples of all ranks.

    A step has three parts: every rank computes the gradient of those samples of the global batch that it holds, the strategy sums
    these gradients, and every rank subtracts the sum from its own copy of the weights. Creating a trainer is collective.

    Parameters
    ----------
    model : LinearModel
    strategy : Strategy
        Strategy created from this rank's training samples and the communicator.
    schedule : callable
        Function that returns the learning rate of a step, given its number: at least 0, and, except for adaptive weights, times ``l2``
        below 1 minus the momentum. A :class:`~sparseallreduce.linear.training.schedules.Reactive` schedule also gets the loss of each
        epoch.
    options : Options
    stopping : EarlyStopping, optional
    checkpoints : Checkpoints, optional
        Where and how often to write checkpoints.
    rate_unit : float, optional
        Factor of the schedule's rates, see :func:`~sparseallreduce.linear.data.feature_scaling.adaptive_rate_unit`.

    Attributes
    ----------
    step : int
        Steps taken, over all epochs.
    history : list of Epoch
        Epochs that have ended, including those before a resume.
    division : Division
        Division of the samples into those for training and those held out for validation.

    Raises
    ------
    ValueError
        On all ranks, if early stopping watches a metric that is never computed.
    DatasetError
        On all ranks, if there are no samples, too few to hold some out, or labels that do not fit the model.
    MismatchError
        On all ranks, if settings differ between ranks, or their samples do not form one data set.
    AlgorithmError
        On all ranks, if the first learning rate, or that at the end of a warm-up, is out of range.
    """

    batch: int

    def __init__(
        self,
        model: LinearModel,
        strategy: Strategy,
        schedule: Schedule,
        options: Options,
        *,
        stopping: EarlyStopping | None = None,
        checkpoints: Checkpoints | None = None,
        rate_unit: float = 1.0,
    ) -> None:
        self.model = model
        self.strategy = strategy
        self.schedule = schedule
        self.options = options
        self.stopping = stopping
        self.checkpoints = checkpoints
        self.rate_unit = rate_unit
        self.dataset: Dataset = strategy.dataset
        self.comm: Any = strategy.comm
        self.step: int = 0
        self.history: list[Epoch] = []
        self._position = 0  # steps taken in the present epoch
        self._stop: str | None = None
        self._saved = -1  # step of the last checkpoint
        self._tested_before: str | None = None  # fingerprint of the test set that the epochs before a resume were evaluated on
        together(self.comm, self._make)

    def _make(self) -> None:
        """Check the arguments and divide the samples. Collective."""
        strategy, schedule, options, model = self.strategy, self.schedule, self.options, self.model
        self.batch, settings = agreed(self.comm, self._checked)
        check_same(self.comm, settings)
        check_parts(self.dataset, self.comm, strategy.workers)
        self.division: Division = divided(self.dataset, options.validation, options.seed, self.comm, model.codes)
        watch = self._watched if self._watched.startswith("validation") else "validation_loss"
        self._evaluation = Evaluation(model, self.dataset, self.division, watch, self.comm)
        self._progressive = self._evaluation.progressive
        if isinstance(schedule, Reactive) and strategy.descent.l2 and not strategy.descent.adaptive:
            schedule.limit(_MOST * (1 - strategy.descent.momentum) / strategy.descent.l2)
        self._identity = {} if self.checkpoints is None else self._identified()
        if strategy.on_gpu:
            self._warn_of_sparse_batches()

    def _warn_of_sparse_batches(self) -> None:
        """Warn on the first rank if batches are too sparse for a GPU. Collective."""
        workers = self.strategy.workers
        found = gather(self.comm, sparse_batch(self.dataset, -(-self.batch // workers), workers))
        reason = next(filter(None, found), None)
        if reason is not None and self.comm.rank == 0:
            warnings.warn(f"device='gpu': {reason}", SparseBatchWarning, stacklevel=5)

    def _checked(self) -> tuple[int, dict[str, Any]]:
        """Return the batch size and all settings, after checking that labels and rates suit the model."""
        batch = self.options.global_batch or self.options.batch_size * self.strategy.workers
        if self.model.columns != self.strategy.columns:
            have = f"the model {self.model.name} has {self.model.columns or 1} scores, and the strategy {self.strategy.columns or 1}"
            raise ValueError(f"{have}: give Descent(columns={self.model.columns})")
        if self.strategy.descent.second_order and not isinstance(self.model, Hinge):
            raise ValueError(f"the update arow is for the model svm, not for {self.model.name}: use another update, or svm")
        check_labels(self.dataset, self.model)
        self._check_watched()
        self._rate(0)
        if isinstance(self.schedule, LargeBatch):
            self._rate(self.schedule.steps)
        return batch, {name: described(setting) for name, setting in self._settings().items()}

    def _check_watched(self) -> None:
        watch = "" if self.stopping is None else self.stopping.watch
        if watch.startswith("validation") and not self.options.validation:
            raise ValueError(f"early stopping watches {watch}: hold out samples by Options.validation")
        if not self.options.evaluate_every and watch.startswith(("train", "test")):
            raise ValueError(f"early stopping watches {watch}, which needs evaluations: set Options.evaluate_every above 0")

    @property
    def _watched(self) -> str:
        """The metric for early stopping. If not every epoch is evaluated, the progressive loss replaces the loss, as for schedules."""
        watch = "" if self.stopping is None else self.stopping.watch
        return "progressive_loss" if watch == "loss" and self.options.evaluate_every != 1 else watch

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks."""
        checkpoints = self.checkpoints
        identity = self.strategy.identity()
        for agreed_in_sums in ("algorithm", "density"):
            identity.pop(agreed_in_sums, None)
        return {
            "model": f"{self.model.title} ({type(self.model).__qualname__})",
            "number of workers": self.strategy.workers,
            "device": self.strategy.device,
            **identity,
            **asdict(self.options),
            "schedule": self.schedule,
            "unit of the learning rate": self.rate_unit,
            "first learning rate": self.schedule(0),
            "early stopping": self.stopping,
            "rhythm of checkpoints": checkpoints and (checkpoints.every_steps, checkpoints.after_epochs),
        }

    @property
    def weights(self) -> Weights:
        """The learned weights, the same on every rank; if samples are held out, those that are best on them after :meth:`run`."""
        return self.strategy.weights

    @property
    def best(self) -> Best | None:
        """The model that is best on the samples held out, by the metric that early stopping watches or by loss; None without them."""
        return self._evaluation.best

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return -(-self.division.total // self.batch)

    @property
    def loss_so_far(self) -> float | None:
        """The mean loss of the samples of this pass that this rank has scored, each before its step; None if there are none."""
        return self._progressive.so_far()

    def request_stop(self, reason: str) -> None:
        """Stop soon, on all ranks after the same step. May be called on any rank, also by signal handlers."""
        self._stop = reason

    def run(self, test: Dataset | None = None, on_step: Callable[[], object] | None = None) -> Iterator[Epoch]:
        """Train epoch by epoch. Collective over the strategy's communicator.

        Parameters
        ----------
        test : Dataset, optional
            Samples to evaluate the model on, with the features and the label coding of the training set; distributed over the ranks, or all
            of them on each rank, as for the training set.
        on_step : callable, optional
            Called after every step.

        Yields
        ------
        Epoch
            After every epoch, the same on all ranks.

        Raises
        ------
        DatasetError, MismatchError
            On every rank, before the first step, if the test set does not match, or is given only on some ranks.
        CheckpointError
            On every rank, before the first step, if the run was resumed and its epochs were evaluated on another test set, or none; and if
            a checkpoint cannot be written.
        AlgorithmError
            On every rank, if the learning rate of a step is out of range.
        DivergenceError
            On every rank, if a weight or the loss is no longer finite. Earlier checkpoints are kept.
        TrainingStopped
            On every rank, after :meth:`request_stop` on any; with ``checkpoints``, one has been written.
        """
        return steps_together(self.comm, self._epochs(test, on_step))

    def _epochs(self, test: Dataset | None, on_step: Callable[[], object] | None) -> Generator[Epoch, None, None]:
        """Yield the epochs of :meth:`run`."""
        test = own_test_samples(test, self.dataset, self.model, self.comm, self.strategy.workers)
        self._note_test_set(test)
        if not self.strategy.warm:
            self.strategy.warm_up()
        self._evaluation.find_threshold()
        stop = self.stopping is not None and self.stopping.reached
        while not stop and len(self.history) < self.options.epochs:
            clock = self.strategy.clock = Clock()
            with trace() as traffic:
                self._train(on_step)
            progressive = self._evaluation.before_steps()
            at_once = self._watched.startswith("progressive")
            stop = at_once and self._stops(progressive)
            figures = progressive
            if self.options.evaluates(len(self.history) + 1) or (stop and self.options.evaluate_every):
                figures = progressive | self._evaluation.of_weights(self.weights, test)
            clock.lap("evaluate")
            epoch = self._report(figures, traffic.bytes_sent)
            if not math.isfinite(epoch.loss):
                rate = f"{epoch.learning_rate:g} in step {epoch.epoch * self.steps}"
                raise DivergenceError(f"the loss is {epoch.loss} after epoch {epoch.epoch}: lower the learning rate ({rate})")
            self._conclude(epoch)
            stop = stop or (not at_once and epoch.evaluated and self._stops(asdict(epoch)))
            if stop and self._saved != self.step:
                self._save(drained=True)
            yield epoch
        self.strategy.finish()
        if self._evaluation.best is not None:
            self.strategy.return_to(self._evaluation.best.weights)

    def _stops(self, figures: dict[str, Any]) -> bool:
        """Return True if early stopping ends training after an epoch with these metrics."""
        return self.stopping is not None and self.stopping.after_epoch(figures[self._watched])

    def _train(self, on_step: Callable[[], object] | None) -> None:
        """Train for the rest of a pass over the training set."""
        stopped = None
        try:
            if self.strategy.serves:
                self.strategy.serve(lambda: self._stop)
            elif self.dataset.pages is None:
                stopped = self._take_steps(on_step)
            else:
                self.dataset.pages.read_at_random()
                stopped = self._take_steps(on_step)
                self.dataset.pages.read_in_order()
            self.strategy.drain()
        except BaseException as error:
            given = error if isinstance(error, Exception) else InterruptedError(f"by a {type(error).__name__}")
            shared = self.strategy.give_up(given)
            if is_known(shared):
                mark_known(self.comm, error)
            if shared is given or given is not error:
                raise
            raise shared from error
        workers = self.strategy.meet((stopped, self._stop))
        for stopped, _ in workers:
            if stopped is not None:
                raise TrainingStopped(stopped)
        # A request made after the last step ends the next epoch before its first one.
        self._stop = next((wish for _, wish in workers if wish is not None), None)

    def _take_steps(self, on_step: Callable[[], object] | None) -> str | None:
        """Take the steps of a worker; return the reason if they ended early, the same on all workers."""
        consensus = Consensus(self.strategy.workers_comm, before=self.strategy.settle)
        failure: BaseException | None = None
        starts, order = self._epoch_order()
        self.strategy.begin_pass(self._position, self.steps)
        pages = self.dataset.pages
        for start, end in pairwise(starts[self._position :]):
            if pages is not None:
                pages.fetch(order[end : 2 * end - start])  # rows of the next step
            self._take_step(order[start:end])
            if on_step is not None and failure is None:
                failure = self._called_back(on_step)
            if self.strategy.between_sums:
                continue
            if self.strategy.in_step:
                workers: list[str | _Failure] = consensus.after_step(self._wish() if failure is None else self._failure(failure))
                wishes = self._shared(workers, failure) if workers else []
                if self._due() or wishes:
                    self._save()
                reason = next(filter(None, wishes), None)
                if reason is not None:
                    return self._stopped(reason)
            elif self._to_stop() is not None or failure is not None:
                break
        self.strategy.settle()
        own = (self._stop or "") if failure is None else self._failure(failure)
        reasons = self._shared(gather(self.strategy.workers_comm, own), failure)
        if not self.strategy.in_step:  # a resumed run must not skip samples that the slowest worker has not processed
            self.step, self._position = min(gather(self.strategy.workers_comm, (self.step, self._position)))
        if self._due_at_end() or any(reasons):
            self._save()
        return next((self._stopped(reason) for reason in reasons if reason), None)

    def _epoch_order(self) -> tuple[list[int], Array]:
        """Return this rank's rows in the order of this epoch's steps, and where those of each step start."""
        epoch = self.options.before + len(self.history) + 1
        starts, order = epoch_order(self.division, self.dataset.rows, self.batch, (self.options.seed, epoch))
        self._progressive.begin(order, starts[self._position])
        return starts, order

    def _to_stop(self) -> str | None:
        """Return the reason for this worker, which runs at its own speed, to stop; notify other workers if it is new."""
        received = self.strategy.received_stop
        if self._stop is not None and received is None:
            self.strategy.ask_to_stop(self._stop)
        self._stop = self._stop or received
        return self._stop

    def _called_back(self, on_step: Callable[[], object]) -> BaseException | None:
        """Call a user's function; return its exception if it has to wait for the next exchange with the other ranks."""
        try:
            on_step()
        except BaseException as error:
            if self.comm.size == 1 or self.strategy.interrupts_waits:
                raise
            return error
        return None

    def _failure(self, error: BaseException) -> _Failure:
        return _Failure(self.comm.rank, type(error).__name__, str(error))

    def _shared(self, workers: list[str | _Failure], own: BaseException | None) -> list[str]:
        """Return the requests of the workers, or raise the common error if a worker has failed."""
        failures = [wish for wish in workers if isinstance(wish, _Failure)]
        if not failures:
            return [wish for wish in workers if isinstance(wish, str)]
        if own is not None and not isinstance(own, Exception):
            mark_known(self.comm, own)
            raise own
        records: list[dict[str, str]] = [{} for _ in range(self.comm.size)]
        for failure in failures:
            records[failure.rank] = {"error": failure.error, "text": failure.text}
        raise common_error(records) from own

    def _take_step(self, rows: Array) -> None:
        """Take one step, to which this rank contributes its rows of a batch."""
        count = min(self.batch, self.division.total - self._position * self.batch)
        scores = self.strategy.scores(rows)
        self._progressive.note(scores)
        coefficients = self.strategy.coefficients(self.model, rows, scores, count)
        self.strategy.step(rows, coefficients, self._rate(self.step))
        self.step += 1
        self._position += 1

    def _rate(self, step: int) -> float:
        """Return the learning rate of a step; raise an error if the L2 term alone would flip the signs of weights."""
        rate, descent = self.schedule(step) * self.rate_unit, self.strategy.descent
        if not 0 <= rate < math.inf:
            raise AlgorithmError(f"a learning rate must be at least 0 and finite, not {rate:g} as in step {step + 1}: change the schedule")
        if rate * descent.l2 * descent.penalty_factor >= 1 and not descent.adaptive:
            below = f"1 minus the momentum, {1 - descent.momentum:g}" if descent.momentum else "1"
            reason = f"learning rate times l2 must be below {below}, not {rate:g} * {descent.l2:g} as in step {step + 1}"
            raise AlgorithmError(f"{reason}: lower one of them")
        return rate

    def _wish(self) -> str | None:
        """Return this rank's request after a step: the reason to stop, an empty string for a checkpoint only, or None."""
        self._stop = self._stop or self.strategy.received_stop
        if self._stop is not None:
            return self._stop
        return "" if self.checkpoints is not None and self.checkpoints.overdue() else None

    def _report(self, figures: dict[str, Any], bytes_sent: int) -> Epoch:
        """Return the metrics of the epoch, from the records of every rank. Collective."""
        strategy = self.strategy
        ranks = gather(self.comm, (dict(strategy.clock.seconds), bytes_sent, strategy.given_densities, strategy.summed_densities))
        strategy.given_densities, strategy.summed_densities = [], []
        seconds = {phase: _mean([seconds.get(phase, 0.0) for seconds, *_ in ranks]) for phase in PHASES}
        seconds["total"] = sum(seconds.values())
        dimension = (self.dataset.dimension or self.dataset.features) + strategy.descent.intercept
        share = strategy.size / dimension if dimension else 1.0
        given, summed = ([[share * density for density in of_rank] for of_rank in each] for each in list(zip(*ranks, strict=True))[2:])
        return Epoch(
            epoch=len(self.history) + 1,
            **figures,
            learning_rate=self.schedule((len(self.history) + 1) * self.steps - 1),
            seconds=seconds,
            bytes_sent=sum(sent for _, sent, *_ in ranks),
            steps=self.steps,
            gradient_density=_mean([density for of_rank in given for density in of_rank]),
            total_density=_mean([density for of_rank in summed for density in of_rank]),
            measures=strategy.measures(),
            gradient_densities=given[0] if self.options.densities else None,
            total_densities=summed[0] if self.options.densities else None,
        )

    def _conclude(self, epoch: Epoch) -> None:
        """Record the end of an epoch, also on servers."""
        self.history.append(epoch)
        self.step, self._position = len(self.history) * self.steps, 0
        self._progressive.reset()
        if isinstance(self.schedule, Reactive):
            self.schedule.react(epoch.loss if self.options.evaluate_every == 1 else _progressive_loss(epoch))
        self._evaluation.keep_if_best(epoch, self.weights)


def _progressive_loss(epoch: Epoch) -> float:
    return math.inf if epoch.progressive_loss is None else epoch.progressive_loss


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
