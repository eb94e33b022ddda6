"""Runs of `sparseallreduce train`: SGD, or a solver that works in rounds."""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import click
import numpy as np

from sparseallreduce.cli import train_options, train_table
from sparseallreduce.cli.progress import progress_bar
from sparseallreduce.cli.train_samples import Samples
from sparseallreduce.linear.data.checks import described
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import gradient_unit, rate_unit, sample_moments, typical_value
from sparseallreduce.linear.defaults import COCOA, DUAL, NEWTON
from sparseallreduce.linear.model_file import FittedModel, fitted
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.solvers import Figures, RoundOptions, RoundTrainer
from sparseallreduce.linear.strategies import STRATEGIES, ParameterServer
from sparseallreduce.linear.training.batches import divided, held_out
from sparseallreduce.linear.training.checkpoint import Checkpoint
from sparseallreduce.linear.training.picking import CANDIDATES, Pick, picked
from sparseallreduce.linear.training.trainer import Epoch, Options, SparseBatchWarning, Trainer
from sparseallreduce.linear.weights import Descent

_SECONDS = 0.3  # between two losses that a progress bar shows

__all__ = ["Ends", "Run", "by_steps", "ends_by_steps", "ends_in_rounds", "in_rounds", "penalised"]


@dataclass(frozen=True)
class Run:
    """A trained model, with the history of its training."""

    l2: float
    history: list[Epoch] | list[Figures]
    fitted: FittedModel
    speed: float | None  # non-zeros per second and rank; None in rounds, which visit some samples more often than others
    best_epoch: int | None  # the epoch whose weights the model has; None if the last
    cost: float  # on the held-out samples, infinite without them
    batch_size: int | None = None  # samples per rank and step; None in rounds
    picked: dict[str, float] | None = None  # learning rate, beta, power of the decay, and the seconds for picking them


#: Trained models: for each, the figures of its last epoch or round, and its trainer.
Ends = Iterator[tuple[Epoch | Figures, Trainer | RoundTrainer]]


def penalised(samples: Samples, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the factors of the penalty, where --C and --l2 are a number or None."""
    total = samples.training.total_samples
    factors = train_options.factors(chosen, samples.counted * (1 - held_out(total, chosen["validation"] or 0.0) / total))
    return chosen | {"l2": factors.l2, "l1": factors.l1}


def ends_by_steps(samples: Samples, each: list[dict[str, Any]], start: np.ndarray | None, comm: Any) -> Ends:
    """Train one model for each of the options, all from the same start, and yield its last epoch and trainer; collective."""
    for chosen in each:
        trainer, _ = _trainer(samples.model, samples.training, samples.nonzeros, chosen, start, comm, lambda line: None)
        with _stopping_on_signals(trainer):
            *_, last = trainer.run(samples.testing)
        yield last, trainer


def ends_in_rounds(samples: Samples, each: list[dict[str, Any]], comm: Any) -> Ends:
    """Train one model for each of the options, which differ only in l2, each from the previous one's end; collective."""
    trainer: RoundTrainer | None = None
    for chosen in each:
        if trainer is None:
            trainer = _round_trainer(samples, chosen, comm)
        else:
            trainer.penalise(chosen["l2"], train_options.stopping(chosen))
        with _stopping_on_signals(trainer):
            *_, last = trainer.run(samples.testing)
        yield last, trainer


def by_steps(samples: Samples, chosen: dict[str, Any], start: np.ndarray | None, comm: Any, say: Callable[[str], None]) -> Run:
    """Train by SGD, and print a line per epoch; collective."""
    trainer, pick = _trainer(samples.model, samples.training, samples.nonzeros, chosen, start, comm, say)
    shown, held = 0, chosen["validation"] is not None
    description = f"training, l2 {chosen['l2']:g}" if chosen["l2"] else "training"
    total = trainer.steps * trainer.options.epochs
    # smoothing=0 estimates the time left from the mean over all steps so far, which includes evaluations.
    with (
        progress_bar(comm, desc=description, unit="step", total=total, initial=trainer.step, smoothing=0) as bar,
        _stopping_on_signals(trainer),
    ):
        for epoch in trainer.run(samples.testing, _step_shown(bar, trainer)):
            if shown == 0:
                say(train_table.header(held))
            shown += 1
            say(train_table.line(epoch, held))
    began = trainer.strategy.descent.average_from
    if began is not None and trainer.history and trainer.step <= began:
        say("training ended before the epoch at which --average starts: the model has the weights after the last step, not a mean")
    if trainer.best is not None:
        say(f"the model is that after epoch {trainer.best.epoch}, the best on the held-out samples")
    nonzeros = samples.nonzeros * trainer.division.total / samples.training.total_samples
    return Run(
        chosen["l2"],
        trainer.history,
        _fitted(samples, trainer.weights.to_array()),
        _speed(trainer, nonzeros),
        None if trainer.best is None else trainer.best.epoch,
        math.inf if trainer.best is None else trainer.best.cost,
        trainer.options.batch_size,
        pick,
    )


def _step_shown(bar: Any, trainer: Trainer) -> Callable[[], None]:
    """Return what counts a step, and shows the loss of the pass so far now and then."""
    shown = 0.0

    def step() -> None:
        nonlocal shown
        if not bar.disable and time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            loss = trainer.loss_so_far
            bar.set_postfix_str(f"epoch {len(trainer.history) + 1}" + ("" if loss is None else f", loss {loss:.4g}"), refresh=False)
        bar.update()

    return step


def in_rounds(samples: Samples, chosen: dict[str, Any], comm: Any, say: Callable[[str], None]) -> Run:
    """Train in rounds, and print a line per round; collective."""
    trainer = _round_trainer(samples, chosen, comm)
    held = chosen["validation"] is not None
    with progress_bar(comm, desc=f"rounds, l2 {trainer.l2:g}", unit="round") as bar, _stopping_on_signals(trainer):
        for figures in trainer.run(samples.testing):
            if figures.epoch == 1:
                say(train_table.rounds_header(held))
            say(train_table.rounds_line(figures, held))
            known = (("loss", figures.loss), ("gap", figures.gap))
            bar.set_postfix_str(", ".join(f"{name} {value:.4g}" for name, value in known if value is not None), refresh=False)
            bar.update()
    if not trainer.converged:
        faster = {None: "", NEWTON: ", or use --solver newton"}.get(trainer.faster, f", or use --loss {trainer.faster}")
        say(f"the gap has not reached {chosen['gap'] or 1e-3:g} of the loss: raise --epochs, or --gap{faster}")
    best = trainer.best_epoch
    if trainer.history and best != len(trainer.history):
        say(f"the model is that after round {best}, " + ("the best on the held-out samples" if held else "whose loss is the lowest"))
    learned = trainer.weights().astype(samples.training.values.dtype, copy=False)
    cost = math.inf if trainer.best is None else trainer.best.cost
    return Run(trainer.l2, trainer.history, _fitted(samples, learned), None, best, cost)


def _round_trainer(samples: Samples, chosen: dict[str, Any], comm: Any) -> RoundTrainer:
    """Return the trainer of a solver that works in rounds; collective."""
    options = RoundOptions(
        rounds=chosen["epochs"],
        gap=chosen["gap"],
        seed=chosen["seed"],
        intercept=chosen["intercept"],
        solver=NEWTON if chosen["solver"] == NEWTON else DUAL,
        free_intercept=chosen["solver"] != COCOA,
        scale_features=None if chosen["solver"] != COCOA else False,
        evaluate_every=chosen["evaluate_every"],
        validation=chosen["validation"] or 0.0,
    )
    return RoundTrainer(samples.model, samples.training, comm, chosen["l2"], options, train_options.stopping(chosen))


def _trainer(
    model: LinearModel,
    training: Dataset,
    nonzeros: int,
    chosen: dict[str, Any],
    start: np.ndarray | None,
    comm: Any,
    say: Callable[[str], None],
) -> tuple[Trainer, dict[str, float] | None]:
    """Return the trainer, at its start or at a checkpoint, and the learning rate picked for it; collective."""
    checkpoints = train_options.checkpoints(chosen)
    found, remarks = (None, []) if checkpoints is None else checkpoints.prepare(comm, chosen["resume"])
    for remark in remarks:
        say(remark)
    kind = STRATEGIES[chosen["strategy"]]
    share = chosen["validation"] or 0.0
    total = training.total_samples - held_out(training.total_samples, share)
    size, batch = _batch(total, chosen, found, comm, say)
    steps = -(-total // batch)
    if chosen["update"] == "arow" and model.columns is not None:
        raise click.UsageError(f"--update arow supports two classes, but there are {model.columns}: use --update ftrl")
    descent, unit = replace(train_options.descent(chosen, steps), columns=model.columns), 1.0
    schedule, pick = train_options.schedule(chosen, steps, batch), None
    if descent.adaptive:
        moments = sample_moments(training, comm)
        value = typical_value(moments, nonzeros)
        unit = rate_unit(descent.update, moments, descent.intercept * value, model.in_units_of_labels)
        base = replace(descent, intercept_value=value)

        def damped(beta: float, samples: int) -> Descent:
            return replace(base, beta=beta * gradient_unit(moments, nonzeros, samples))

        beta = chosen["beta"]
        began = time.perf_counter()
        choice = None
        if chosen["picks"]:
            choice = (
                picked(model, training, comm, divided(training, share, chosen["seed"], comm), damped, batch, size, chosen["seed"], unit)
                if found is None
                else _picked_before(found, steps)
            )
        if choice is not None:
            pick = choice._asdict() | {"seconds": time.perf_counter() - began}
            schedule, beta = choice.schedule(steps), choice.beta
            say(f"learning rate {choice.rate:g}, beta {choice.beta:g}, by the progressive loss of the first samples")
        descent = damped(beta, batch)
    strategy = kind(training, comm, descent, **train_options.strategy_options(chosen))
    if start is not None:
        strategy.assign(start)
    options = Options(
        chosen["epochs"],
        size,
        chosen["seed"],
        batch,
        chosen["densities"],
        evaluate_every=chosen["evaluate_every"],
        validation=share,
    )
    stopping = train_options.stopping(chosen)
    with warnings.catch_warnings(record=True, action="always", category=SparseBatchWarning) as sparse_batches:
        trainer = Trainer(model, strategy, schedule, options, stopping=stopping, checkpoints=checkpoints, rate_unit=unit)
    for warning in sparse_batches:
        say(str(warning.message))
    if found is not None:
        trainer.resume(found)
        say(f"resumed after step {trainer.step:,}, in epoch {len(trainer.history) + 1}")
    return trainer, pick


def _batch(total: int, chosen: dict[str, Any], found: Checkpoint | None, comm: Any, say: Callable[[str], None]) -> tuple[int, int]:
    """Return the samples of a step on each rank, and on all ranks, which a resumed run keeps for any number of ranks."""
    serves = issubclass(STRATEGIES[chosen["strategy"]], ParameterServer)
    workers = comm.size - chosen["servers"] if serves and comm.size > 1 else comm.size
    size = train_options.batch_size(chosen, total, workers)
    if found is None:
        return size, size * workers
    if chosen["batch_size"] is None:
        size = found.whole_number("batch_size")
    batch = size * workers
    if found.whole_number("batch_size") == size and found.whole_number("batch of all ranks") != batch:
        batch = found.whole_number("batch of all ranks")
        say(f"a step uses {batch:,} samples, as before, now from {workers} rank{'s' if workers > 1 else ''}")
    return size, batch


def _picked_before(found: Checkpoint, steps: int) -> Pick | None:
    """Return the choice that is stored in a checkpoint; older checkpoints have none."""
    rates = found.identity.get("schedule")
    return next((each for each in CANDIDATES if described(each.schedule(steps)) == rates), None)


@contextmanager
def _stopping_on_signals(trainer: Trainer | RoundTrainer) -> Iterator[None]:
    """Let SIGINT and SIGTERM stop the training after a step or round; a second such signal ends the process immediately."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        trainer.request_stop(signal.Signals(number).name)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fitted(samples: Samples, weights: np.ndarray) -> FittedModel:
    """Return the fitted model of these weights; a row after the features, if there is one, is the intercept."""
    features = samples.training.features
    intercept = weights[features:].sum(axis=0, dtype=np.float64)  # of one row or none
    classes = np.array(samples.classes) if samples.classes else np.empty(0)
    model = fitted(samples.model, weights[:features], intercept, classes)
    return replace(model, zero_based=samples.training.zero_based)


def _speed(trainer: Trainer, nonzeros: float) -> float | None:
    """Return the median over the epochs of non-zeros per second and rank, for computing gradients and updates."""
    seconds = [epoch.seconds["compute"] + epoch.seconds["update"] for epoch in trainer.history]
    return nonzeros / trainer.strategy.workers / float(np.median(seconds)) if seconds else None
