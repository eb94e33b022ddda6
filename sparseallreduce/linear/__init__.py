"""MPI-SGD: linear models trained by mini-batch SGD over MPI (thesis sections 2.1, 2.2 and 4.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparseallreduce import plugins
from sparseallreduce.errors import DatasetError, DivergenceError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.generate import generate
from sparseallreduce.linear.data.labels import numbered_classes, two_classes
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.data.shard import shard
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.linear.model_file import FittedModel, ModelFileError, load_model, save_model
from sparseallreduce.linear.models import (
    LOSSES,
    MODELS,
    EpsilonInsensitive,
    Hinge,
    Huber,
    LinearModel,
    Logistic,
    Poisson,
    Quantile,
    Squared,
    SquaredEpsilonInsensitive,
    SquaredHinge,
    model_of,
)
from sparseallreduce.linear.multiclass import Multinomial, OneVsRest, model_of_classes
from sparseallreduce.linear.strategies import (
    LOSSY,
    STRATEGIES,
    AsynchronousParameterServer,
    DenseStrategy,
    LocalStepsStrategy,
    LossyStrategy,
    OverlappedStrategy,
    SparseStrategy,
    Strategy,
    SynchronousParameterServer,
    read_on_workers,
    register_strategy,
)
from sparseallreduce.linear.training.batches import batches
from sparseallreduce.linear.training.checkpoint import Checkpoints
from sparseallreduce.linear.training.early_stopping import EarlyStopping
from sparseallreduce.linear.training.schedules import (
    SCHEDULES,
    BoldDriver,
    Constant,
    InverseScaling,
    InverseTime,
    LargeBatch,
    Plateau,
    StepDecay,
)
from sparseallreduce.linear.training.trainer import Epoch, Options, Trainer
from sparseallreduce.linear.weights import Descent, Weights

if TYPE_CHECKING:
    from sparseallreduce.linear.estimators import LinearRegression, LinearSVM, LogisticRegression

__all__ = [
    "LOSSES",
    "LOSSY",
    "MODELS",
    "SCHEDULES",
    "STRATEGIES",
    "AsynchronousParameterServer",
    "BoldDriver",
    "Checkpoints",
    "Constant",
    "Dataset",
    "DatasetError",
    "DenseStrategy",
    "Descent",
    "DivergenceError",
    "EarlyStopping",
    "Encoding",
    "Epoch",
    "EpsilonInsensitive",
    "FittedModel",
    "Hinge",
    "Huber",
    "InverseScaling",
    "InverseTime",
    "LargeBatch",
    "LinearModel",
    "LinearRegression",
    "LinearSVM",
    "Logistic",
    "LogisticRegression",
    "LocalStepsStrategy",
    "LossyStrategy",
    "ModelFileError",
    "Multinomial",
    "OneVsRest",
    "Options",
    "OverlappedStrategy",
    "Plateau",
    "Poisson",
    "Quantile",
    "SparseStrategy",
    "Squared",
    "SquaredEpsilonInsensitive",
    "SquaredHinge",
    "StepDecay",
    "Strategy",
    "SynchronousParameterServer",
    "Trainer",
    "Weights",
    "batches",
    "generate",
    "load",
    "load_model",
    "model_of",
    "model_of_classes",
    "numbered_classes",
    "read_on_workers",
    "save_model",
    "shard",
    "two_classes",
]


_ESTIMATORS = ("LinearRegression", "LinearSVM", "LogisticRegression")


def __getattr__(name: str) -> Any:
    # Imported on first access: scikit-learn takes two seconds to load on every rank, and no command needs it.
    if name in _ESTIMATORS:
        from sparseallreduce.linear import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


# Last, since what a package registers may import from here.
plugins.load("strategies", lambda _, kind: register_strategy(kind))
