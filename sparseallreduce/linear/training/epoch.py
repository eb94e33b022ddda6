"""What a training run is told, and what it tells of each pass over its samples."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from sparseallreduce.linear.training.batches import Fold, check_held_out

__all__ = ["PHASES", "Epoch", "Options", "epoch_of"]

#: What an epoch's seconds are spent on.
PHASES = ("compute", "select", "communicate", "wait", "update", "checkpoint", "evaluate")


@dataclass(frozen=True)
class Options:
    """What a training run is told beside its model, strategy and learning rate."""

    epochs: int = 10  # passes over the training set
    batch_size: int = 100  # samples a rank and step, the paper's B: a step averages over B * P samples
    seed: int = 0  # of the order of samples
    global_batch: int = 0  # samples a step over all ranks; 0 for batch_size times the ranks that hold samples
    densities: bool = False  # whether an epoch reports the densities of every step
    before: int = 0  # passes that earlier runs have made with this seed: orders of samples go on with the next
    evaluate_every: int = 1  # passes from one evaluation to the next; the last is always evaluated, unless this is 0 and none is
    validation: float | Fold = 0.0  # the samples that are not trained on, a share or a fold: what is learned is what did best on them

    def __post_init__(self) -> None:
        least = {"epochs": 0, "batch_size": 1, "seed": 0, "global_batch": 0, "before": 0, "evaluate_every": 0}
        for name, lowest in least.items():
            if not getattr(self, name) >= lowest:
                raise ValueError(f"{name} must be at least {lowest}, not {getattr(self, name)}")
        check_held_out(self.validation, self.evaluate_every > 0)

    def evaluates(self, epoch: int) -> bool:
        """Whether the model is evaluated after a pass, where these count from 1, because of its number."""
        return self.evaluate_every > 0 and (epoch % self.evaluate_every == 0 or epoch == self.epochs)


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training set came to, over all ranks.

    Where the model was not evaluated after it, ``loss`` is the progressive loss, and accuracies and areas are None, those of the test set
    and of the samples held out too.
    """

    epoch: int  # from 1
    loss: float  # mean loss of a training sample, plus the penalty, after the epoch
    train_accuracy: float | None  # share of training samples classified rightly; None where labels are no classes
    train_auc: float | None  # area under the ROC curve, likewise; None of more than two classes
    test_loss: float | None  # as the loss, but of the test set, if there is one, and without penalty
    test_accuracy: float | None
    test_auc: float | None
    learning_rate: float  # of the last step
    seconds: dict[str, float]  # mean over the ranks of each of PHASES, and their total; since it was resumed, if it was
    bytes_sent: int  # by all ranks together, in training
    steps: int
    gradient_density: float  # share of the N entries in what a rank gave to be summed: mean over steps and ranks
    total_density: float  # share of the N entries in the sum: mean over steps
    measures: dict[str, Any] = field(default_factory=dict)  # what the strategy alone has to report: see its ``measures``
    gradient_densities: list[float] | None = None  # of every step, that of rank 0's gradient
    total_densities: list[float] | None = None  # of every step
    evaluated: bool = True  # whether the model was, after the epoch
    progressive_loss: float | None = None  # mean loss of a training sample before the step that it was in, without penalty
    progressive_accuracy: float | None = None  # likewise
    validation_loss: float | None = None  # as the test loss, but of the samples held out
    validation_accuracy: float | None = None
    validation_auc: float | None = None


# What JSON may have for a field, by its annotation.
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
    """Return the epoch that a checkpoint tells of; raise TypeError if it tells of none."""
    epoch = Epoch(**record)
    for each in fields(Epoch):
        value = getattr(epoch, each.name)
        if not isinstance(value, _KINDS[str(each.type)]):
            raise TypeError(f"{each.name} of an epoch is {value!r:.40}")
    lists = [epoch.seconds.values(), epoch.gradient_densities or (), epoch.total_densities or ()]
    if not all(isinstance(value, int | float) for values in lists for value in values):
        raise TypeError("some figures of an epoch are no numbers")
    return epoch
