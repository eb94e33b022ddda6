"""Input of `sparseallreduce train`: samples, labels and weights ready for the model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import click
from numpy.typing import NDArray

from sparseallreduce.cli.inputs import data_cache, table_arguments
from sparseallreduce.cli.progress import progress_bar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import scaled
from sparseallreduce.linear.data.labels import (
    Label,
    classes_of,
    huber_epsilon,
    numbered_classes,
    of_mean_one,
    shown,
    two_classes,
    weighted_by_class,
)
from sparseallreduce.linear.data.load import load
from sparseallreduce.linear.data.occurring import Occurring
from sparseallreduce.linear.data.parts import Data, described
from sparseallreduce.linear.data.tables.batches import CUSTOMARY
from sparseallreduce.linear.data.tables.learning import remarks_on
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.linear.models import Huber, LinearModel
from sparseallreduce.linear.multiclass import model_of_classes
from sparseallreduce.linear.strategies import STRATEGIES, ParameterServer, read_on_workers
from sparseallreduce.runtime.objects import gather

__all__ = ["Samples", "read_samples"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Samples:
    """The samples of a training run."""

    training: Dataset
    testing: Dataset | None
    classes: tuple[Label, ...] | None
    model: LinearModel  # adapted to the number of classes
    nonzeros: int  # of the training set, over all ranks
    seconds: float
    counted: float  # total weight of the training samples

    def numbered(self, features: Occurring) -> Samples:
        """Return the samples restricted to these features."""
        testing = None if self.testing is None else features.renumbered(self.testing)
        return replace(self, training=features.renumbered(self.training), testing=testing)

    def scaled(self, scales: Array) -> Samples:
        """Return the samples with every feature divided by its scale."""
        testing = None if self.testing is None else scaled(self.testing, scales)
        return replace(self, training=scaled(self.training, scales), testing=testing)

    def described(self, data: Data, comm: Any) -> str:
        training = self.training
        several = f"{len(self.classes)} classes, " if self.classes and self.model.columns else ""
        columns = "" if training.encoding is None else f" of {len(training.encoding.columns)} columns"
        return (
            f"{described(data)}: {training.total_samples:,} samples, {several}{training.features:,} features{columns}, "
            f"{self.nonzeros / training.total_samples:.1f} non-zeros per sample; "
            f"read by {comm.size} rank{'s' if comm.size > 1 else ''} in {self.seconds:.1f} s"
        )

    def remarks(self, chosen: dict[str, Any]) -> list[str]:
        """Return remarks on how the columns of a table are used, where users may not expect it."""
        encoding = self.training.encoding
        if encoding is None:
            return []
        known = chosen["target"] is not None or encoding.target is None or encoding.target.lower() not in CUSTOMARY
        assumed = [] if known else [f"the column {encoding.target!r} is the target; --target names another"]
        return assumed + remarks_on(encoding, chosen["categorical"])


def read_samples(
    data: Data, test: Data | None, model: LinearModel, chosen: dict[str, Any], comm: Any, encoding: Encoding | None = None
) -> Samples:
    """Read this rank's samples, and prepare labels and weights for the model; collective. ``encoding`` is for tables."""
    start = time.perf_counter()
    cache = data_cache(chosen)
    with progress_bar(comm, desc="reading", unit="B", unit_scale=True) as bar:

        def read(workers: Any) -> tuple[Dataset, Dataset | None]:
            how = {name: chosen[name] for name in ("format", "zero_based", "hash_bits")} | table_arguments(chosen)
            return load(data, test, comm=workers, progress=bar.update, cache=cache, encoding=encoding, **how)

        serving = issubclass(STRATEGIES[chosen["strategy"]], ParameterServer)
        training, testing = read_on_workers(comm, chosen["servers"], read) if serving else read(comm)
    if training.names is not None and not model.classifies:
        listed = " and ".join(map(repr, training.names[:2]))
        raise DatasetError(f"{described(data)}: labels are names of classes, such as {listed}: use --model logistic or svm")
    classes = None
    if type(model) is Huber and chosen["epsilon"] is None:
        model = Huber(huber_epsilon(training.labels, training.weights, comm))
    if model.classifies:
        found = classes_of(training, comm)
        if len(found) > 1:
            model = model_of_classes(model, len(found), chosen["multiclass"])
        coded: Any = two_classes if model.columns is None else numbered_classes
        training, classes = coded(training, comm)
        testing = None if testing is None else coded(testing, comm, classes)[0]
        training = _class_weighted(training, chosen["class_weight"], classes, model.columns, comm)
    counted = float(sum(gather(comm, training.rows if training.weights is None else float(training.weights.sum()))))
    training, testing = _importances_of_mean_one(training, comm), testing and _importances_of_mean_one(testing, comm)
    return Samples(training, testing, classes, model, sum(gather(comm, training.nnz)), time.perf_counter() - start, counted)


def _importances_of_mean_one(samples: Dataset, comm: Any) -> Dataset:
    """Return the samples with weights scaled to a mean of one, since some formats allow any scale."""
    weighted = any(gather(comm, samples.weights is not None))
    return of_mean_one(samples, comm) if weighted else samples


def _class_weighted(training: Dataset, weights: Any, classes: tuple[Label, ...], columns: int | None, comm: Any) -> Dataset:
    if weights is None:
        return training
    if isinstance(weights, str):
        return weighted_by_class(training, weights, comm)
    unknown = next((label for label in weights if label not in classes), None)
    if unknown is not None:
        most = 10  # labels that fit on a line
        listed = ", ".join(map(shown, classes[:-1][:most])) + (f" and {shown(classes[-1])}" if len(classes) <= most else ", ...")
        raise click.UsageError(f"--class-weight names the label {shown(unknown)}, but the labels are {listed}")
    codes = (-1.0, 1.0) if columns is None else tuple(map(float, range(columns)))
    chosen: dict[Label, float] = {codes[classes.index(label)]: weight for label, weight in weights.items()}
    return weighted_by_class(training, chosen, comm)
