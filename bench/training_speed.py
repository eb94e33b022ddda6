"""Measure the trainer in non-zeros a second and rank, beside scikit-learn's ``SGDClassifier`` on the same rows in the same run.

    sparseallreduce generate url-like data/url-like.csr
    mpiexec -n 2 python bench/training_speed.py data/url-like.csr [--update ftrl] [--batch-size 1000] [--epochs 3] [--json F]

The two alternate, an epoch each. The trainer uses the sparse strategy; all of its time but communication counts. Adaptive updates have the
rates and the beta of the command `train`. `SGDClassifier` runs on the rows of each rank, all ranks at once, shuffled, one sample a step. On
a machine that others use too, compare the ratio.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
from mpi4py import MPI
from scipy.sparse import csr_array
from sklearn.linear_model import SGDClassifier

from sparseallreduce.cli.train_options import CLASSES_BETA, CLASSES_RATE
from sparseallreduce.linear import MODELS, Constant, Dataset, Options, SparseStrategy, Trainer, load, two_classes
from sparseallreduce.linear.data.feature_scaling import gradient_unit, rate_unit, sample_moments
from sparseallreduce.linear.strategies.clock import Clock
from sparseallreduce.linear.weights import UPDATES, Descent

LOSSES = {"logistic": "log_loss", "svm": "hinge"}
CASES = {(model, update): model + (f", {update}" if update != "sgd" else "") for model in LOSSES for update in UPDATES}
del CASES["logistic", "arow"]  # which is of the hinge loss


@click.command()
@click.argument("data", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--update", "updates", type=click.Choice(UPDATES), multiple=True, default=UPDATES, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=1000, show_default=True, help="Samples a rank and step.")
@click.option("--epochs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
def training_speed(data: Path, updates: Sequence[str], batch_size: int, epochs: int, json_path: Path | None) -> None:
    """Print millions of non-zeros a second of each epoch, the median over the epochs, and the ratio of the medians."""
    comm = MPI.COMM_WORLD
    dataset, _ = two_classes(load(data, comm=comm)[0], comm)
    if comm.allreduce(dataset.nnz, MPI.MAX) > np.iinfo(np.int32).max:
        raise click.UsageError("scikit-learn takes 2^31 non-zeros a rank at most: start more ranks, or take fewer samples")
    structure = dataset.indices.astype(np.int32), dataset.indptr.astype(np.int32)
    rows = csr_array((dataset.values, *structure), shape=(dataset.rows, dataset.features))
    results = {name: measured(*case, dataset, rows, comm, batch_size, epochs) for case, name in CASES.items() if case[1] in updates}
    if comm.rank != 0:
        return
    print(f"{comm.size} ranks, {batch_size} samples a rank and step; millions of non-zeros a second and rank")
    print(f"{'':15}{'sparseallreduce':>18}{'SGDClassifier':>16}{'ratio':>8}   epoch by epoch")
    for name, speeds in results.items():
        ours, theirs = (float(np.median([pair[which] for pair in speeds])) for which in (0, 1))
        each = "  ".join(f"{first:.0f} / {second:.0f}" for first, second in speeds)
        print(f"{name:15}{ours:18.1f}{theirs:16.1f}{ours / theirs:8.2f}   {each}")
    if json_path is not None:
        json_path.write_text(json.dumps({"ranks": comm.size, "batch_size": batch_size, "epochs": results}, indent=1))


def measured(
    name: str, update: str, dataset: Dataset, rows: csr_array, comm: MPI.Intracomm, batch_size: int, epochs: int
) -> list[tuple[float, float]]:
    """Millions of non-zeros a second of each epoch, by the trainer and by scikit-learn: the mean over the ranks."""
    descent, rate, unit = Descent(update=update), 1.0, 1.0
    if descent.adaptive:
        moments, nonzeros = sample_moments(dataset, comm), comm.allreduce(dataset.nnz)
        unit = rate_unit(update, moments, intercept=False, in_units_of_labels=False)
    if update == "ftrl":
        rate = CLASSES_RATE
        descent = replace(descent, beta=CLASSES_BETA * gradient_unit(moments, nonzeros, batch_size * comm.size))
    options = Options(epochs=epochs, batch_size=batch_size)
    trainer = Trainer(MODELS[name](), SparseStrategy(dataset, comm, descent), Constant(rate), options, rate_unit=unit)
    other = SGDClassifier(loss=LOSSES[name], alpha=1e-9, learning_rate="constant", eta0=0.1, fit_intercept=False, random_state=0)
    warnings.simplefilter("ignore")
    speeds = []
    for epoch in trainer.run():
        ours = epoch.seconds["compute"] + epoch.seconds["update"]
        comm.Barrier()
        clock = Clock()
        other.partial_fit(rows, dataset.labels, classes=[-1.0, 1.0])
        clock.lap("theirs")
        theirs = comm.allreduce(clock.seconds["theirs"]) / comm.size
        nonzeros = comm.allreduce(dataset.nnz) / comm.size / 1e6
        speeds.append((nonzeros / ours, nonzeros / theirs))
    return speeds


if __name__ == "__main__":
    training_speed()
