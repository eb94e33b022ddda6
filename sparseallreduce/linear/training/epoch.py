"""The options of a training run, and its metrics for each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sparseallreduce.linear.training.batches import Fold, check_held_out

__all__ = ["PHASES", "Epoch", "Options", "epoch_of"]

#: Phases of an epoch that are timed.
PHASES = ("compute", "select", "communicate", "wait", "update", "checkpoint", "evaluate")


@dataclass(frozen=True)
class Options:
    """Options of a training run, besides model, strategy and learning rate."""

    epochs: int = 10  # passes over the training set
    batch_size: int = 100  # samples per rank and step, the paper's B: a step averages over B * P samples
    seed: int = 0  # seed of the order of samples
    global_batch: int = 0  # samples per step over all ranks; 0 for batch_size times the ranks that hold samples
    densities: bool = False  # whether epochs report the densities of every step
    before: int = 0  # passes that earlier runs have made with this seed, whose orders of samples are skipped
    evaluate_every: int = 1  # epochs between evaluations; the last epoch is always evaluated, except with 0, which never evaluates
    validation: float | Fold = 0.0  # fraction or fold of samples to hold out; the result is the model that is best on them

    def __post_init__(self) -> None:
        least = {"epochs": 0, "batch_size": 1, "seed": 0, "global_batch": 0, "before": 0, "evaluate_every": 0}
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")
        check_held_out(self.validation, self.evaluate_every > 0)

    def evaluates(self, epoch: int) -> bool:
        """Return True if ``evaluate_every`` asks for an evaluation after this epoch, counted from 1."""
        return self.evaluate_every > 0 and (epoch % self.evaluate_every == 0 or epoch == self.epochs)


@dataclass(frozen=True)
class Epoch:
    """The metrics of one pass over the training set, over all ranks.

    If the model was not evaluated after it, ``loss`` is the progressive loss, and accuracies and areas are None, including those of the
    test set and of the samples held out.
    """

    epoch: int  # from 1
    loss: float  # mean loss of the training samples, plus the penalty, after the epoch
    train_accuracy: float | None  # fraction of training samples classified correctly; None for regression
    train_auc: float | None  # area under the ROC curve of the training samples; None unless there are two classes
    test_loss: float | None  # mean loss of the test samples, if there are any, without penalty
    test_accuracy: float | None
    test_auc: float | None
    learning_rate: float  # rate of the last step
    seconds: dict[str, float]  # mean over the ranks for each of PHASES, and their total; only since the epoch was resumed, if it was
    bytes_sent: int  # by all ranks together, in training
    steps: int
    gradient_density: float  # fraction of the N entries that are in a rank's gradient: mean over steps and ranks
    total_density: float  # fraction of the N entries that are in the sum: mean over steps
    measures: dict[str, Any] = field(default_factory=dict)  # metrics of the strategy: see its ``measures``
    gradient_densities: list[float] | None = None  # density of rank 0's gradient in every step
    total_densities: list[float] | None = None  # density of the sum in every step
    evaluated: bool = True  # whether the model was evaluated after the epoch
    progressive_loss: float | None = None  # mean loss of the training samples, each before its own step, without penalty
    progressive_accuracy: float | None = None  # accuracy on the training samples, each before its own step
    validation_loss: float | None = None  # mean loss of the samples held out, without penalty
    validation_accuracy: float | None = None
    validation_auc: float | None = None


# Types that JSON values may have for each annotation of a field.
_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "dict[str, float]": (dict,),
    "dict[str, Any]": (dict,),
    "list[float] | None": (list, type(None)),
}


def epoch_of(record: dict[str, Any]) -> Epoch:
    """Return the epoch stored in a checkpoint; raise TypeError if the record is invalid."""
    epoch = Epoch(**record)
    for each in fields(Epoch):
        value = getattr(epoch, each.name)
        if not isinstance(value, _KINDS[str(each.type)]):
            raise TypeError(f"{each.name} of an epoch is {value!r:.40}")
    lists = [epoch.seconds.values(), epoch.gradient_densities or (), epoch.total_densities or ()]
    if not all(isinstance(value, int | float) for values in lists for value in values):
        raise TypeError("some figures of an epoch are not numbers")
    return epoch
