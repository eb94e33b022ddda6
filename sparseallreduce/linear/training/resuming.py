"""Writing a training run to checkpoints, and resuming it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from sparseallreduce.errors import CheckpointError
from sparseallreduce.linear.data.checks import described
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.strategies import Strategy
from sparseallreduce.linear.training.checkpoint import Checkpoint, Checkpoints, check_identity, data_fingerprint, nonsense_refused
from sparseallreduce.linear.training.early_stopping import EarlyStopping
from sparseallreduce.linear.training.epoch import Epoch, Options, epoch_of
from sparseallreduce.linear.training.evaluation import Best, Evaluation
from sparseallreduce.linear.training.metrics import Sums
from sparseallreduce.linear.training.progressive import Progressive
from sparseallreduce.linear.training.schedules import Reactive, Schedule
from sparseallreduce.runtime.objects import agreed, together

__all__ = ["Resumable"]


class Resumable:
    """The part of a trainer that writes and reads checkpoints; it sets the trainer's attributes when a run is resumed."""

    model: LinearModel
    strategy: Strategy
    schedule: Schedule
    options: Options
    stopping: EarlyStopping | None
    checkpoints: Checkpoints | None
    rate_unit: float
    dataset: Dataset
    comm: Any
    batch: int
    step: int
    history: list[Epoch]
    _evaluation: Evaluation
    _identity: dict[str, Any]
    _position: int  # steps taken in the present epoch
    _progressive: Progressive
    _saved: int  # step of the last checkpoint
    _tested_before: str | None  # fingerprint of the test set that the epochs before a resume were evaluated on
    _test_set: str

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        raise NotImplementedError

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue a run from a checkpoint. Collective; called before :meth:`run`.

        Raises
        ------
        CheckpointError
            On all ranks, if data, model or options differ, with the difference named. The number of epochs may differ. Whether the test set
            is the same as before, if there was one, is checked by :meth:`run`.
        """
        together(self.comm, lambda: self._resume(checkpoint))

    def _resume(self, checkpoint: Checkpoint) -> None:
        agreed(self.comm, lambda: check_identity(checkpoint.identity, self._identity))
        agreed(self.comm, lambda: self._take_progress(checkpoint))
        # The name of a schedule that is a function does not tell its parameters, so its last rate is compared.
        before = {"learning rate of the last step": checkpoint.progress.get("rate")}
        agreed(self.comm, lambda: check_identity(before, {"learning rate of the last step": self._last_rate()}))
        failure: CheckpointError | None = None
        try:
            with nonsense_refused(checkpoint):
                self.strategy.restore({name: value for name, value in checkpoint.state.items() if name != "best"})
        except CheckpointError as error:
            failure = error
        agreed(self.comm, lambda: _raise(failure))  # ranks restore different parts

    def _take_progress(self, checkpoint: Checkpoint) -> None:
        """Restore the trainer's own state from a checkpoint."""
        with nonsense_refused(checkpoint):
            self._take(checkpoint.progress, checkpoint.state.get("best"))
            self._last_rate()

    def _take(self, progress: dict[str, Any], best: Any) -> None:
        self.step, self._position = _count(progress["step"]), _count(progress["position"])
        if self._position > self.steps:
            raise ValueError(f"{self._position} steps of {self.steps} in an epoch")
        self.history = [epoch_of(record) for record in progress["epochs"]]
        watched = [*progress["schedule"].values(), *progress["stopping"].values()]
        if not all(isinstance(value, int | float) for value in (*watched, *progress["progressive"])):
            raise TypeError("some figures are not numbers")
        if isinstance(self.schedule, Reactive):
            self.schedule.restore(progress["schedule"])
        if self.stopping is not None:
            self.stopping.restore(progress["stopping"])
        self._tested_before = progress["test set"] if self.history else None
        self._saved = self.step
        self._progressive.before = Sums(*progress["progressive"])
        if best is not None:
            cost, epoch = progress["best"]
            if np.shape(best) != self.strategy.weights.shape:
                raise ValueError(f"the best weights are of shape {np.shape(best)}")
            self._evaluation.best = Best(float(cost), _count(epoch), best)

    def _note_test_set(self, test: Dataset | None) -> None:
        """Record the test set for checkpoints; raise an error if earlier epochs were evaluated on another one. Collective."""
        if self.checkpoints is None:
            return
        self._test_set = "none" if test is None else data_fingerprint(test, self.comm)
        if self._tested_before is not None:
            check_identity({"test set": self._tested_before}, {"test set": self._test_set})

    def _due(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.due_after(self.step) and self._position < self.steps

    def _due_at_end(self) -> bool:
        """Return True if a checkpoint is due after the last step of an epoch."""
        if self.checkpoints is None:
            return False
        often = self.checkpoints.after_epochs or not self.strategy.in_step
        return often or self.checkpoints.due_after(self.step) or len(self.history) + 1 == self.options.epochs

    def _save(self, drained: bool = False) -> None:
        """Write a checkpoint, if there is a folder. Collective over the workers, or once ``drained`` over all ranks."""
        if self.checkpoints is None:
            return
        self._saved = self.step
        if drained and self.strategy.serves:
            return
        best = self._evaluation.best
        progress = {
            "step": self.step,
            "position": self._position,
            "batch_size": self.options.batch_size,
            "rate": self._last_rate(),
            "test set": self._test_set,
            "progressive": self._evaluation.sums_so_far(self.strategy.workers_comm) if self._position else Sums(),
            "best": None if best is None else (best.cost, best.epoch),
            "epochs": [asdict(epoch) for epoch in self.history],
            "schedule": self.schedule.state() if isinstance(self.schedule, Reactive) else {},
            "stopping": self.stopping.state() if self.stopping is not None else {},
        }
        state = self.strategy.drained_state() if drained else self.strategy.state()
        if best is not None:
            state = state | {"best": best.weights}
        checkpoint = Checkpoint(self._identity, progress, state)
        self.checkpoints.save(self.step, checkpoint, self.strategy.workers_comm)
        self.strategy.clock.lap("checkpoint")

    def _last_rate(self) -> float | None:
        return self.schedule(self.step - 1) if self.step else None

    def _stopped(self, reason: str) -> str:
        where = f"stopped by {reason} after step {self.step}"
        if self.checkpoints is None:
            return f"{where}; without checkpoints it has to start again"
        return f"{where}; a checkpoint is in {self.checkpoints.folder}: resume from there"

    def _identified(self) -> dict[str, Any]:
        """Return what must be equal in a run that continues this one. Collective."""
        return {
            "data": data_fingerprint(self.dataset, self.comm),
            "samples": self.dataset.total_samples,
            "features": self.dataset.features,
            "model": self.model.title,
            "initial weights": self.strategy.start,
            "batch of all ranks": self.batch,
            **self.strategy.identity(),
            "seed": self.options.seed,
            "schedule": described(self.schedule),
            "unit of the learning rate": self.rate_unit,
            "early stopping": repr(self.stopping),
            "share held out": self.options.validation,
            "watched loss": "of every epoch" if self.options.evaluate_every == 1 else "progressive",
        }


def _count(value: Any) -> int:
    """Return a non-negative integer; raise TypeError for anything else."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{value!r:.40} is not a count")
    return value


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure
