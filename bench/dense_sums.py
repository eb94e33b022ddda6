"""Train by steps on each rank's own samples, and average dense weights by MPI after every pass, as Vowpal Wabbit's `--span_server` does.

    mpiexec -n 2 python bench/dense_sums.py TRAIN TEST --json F [--passes 5]

Steps are those of scikit-learn's `SGDClassifier` with its defaults and the logistic loss. The report has the seconds and the test accuracy
after every pass in the form of `train --json`, so that `bench/two_ranks.py` shows them beside those of `train`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import click
import numpy as np
from mpi4py import MPI
from scipy.sparse import csr_matrix
from sklearn.linear_model import SGDClassifier

from sparseallreduce.linear import Dataset, load, two_classes

LABELS = np.array([-1.0, 1.0])


@click.command()
@click.argument("training", metavar="TRAIN", type=click.Path(exists=True, path_type=Path))
@click.argument("test", type=click.Path(exists=True, path_type=Path))
@click.option("--passes", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Where to write the results.")
def dense_sums(training: Path, test: Path, passes: int, json_path: Path) -> None:
    """Write seconds and test accuracy after every pass."""
    comm = MPI.COMM_WORLD
    own, _ = two_classes(load(training, comm=comm)[0], comm)
    held_out, _ = two_classes(load(test, comm=MPI.COMM_SELF, n_features=own.features)[0], MPI.COMM_SELF)
    rows, test_rows = (with_small_indices(dataset) for dataset in (own, held_out))
    model, epochs = SGDClassifier(loss="log_loss", random_state=comm.rank), []
    model.partial_fit(rows[:2], own.labels[:2], classes=LABELS)  # allocates
    model.coef_[:], model.intercept_[:], model.t_ = 0.0, 0.0, 1.0
    for number in range(1, passes + 1):
        comm.Barrier()
        begin = time.perf_counter()
        model.partial_fit(rows, own.labels)
        for weights in (model.coef_, model.intercept_):
            comm.Allreduce(MPI.IN_PLACE, weights)
            weights /= comm.size
        seconds = comm.allreduce(time.perf_counter() - begin, MPI.MAX)
        accuracy = float(np.mean(model.predict(test_rows) == held_out.labels))
        epochs.append({"epoch": number, "seconds": {"total": seconds, "evaluate": 0.0}, "test_accuracy": accuracy})
    if comm.rank == 0:
        json_path.write_text(json.dumps({"schema": 1, "epochs": epochs, "results": {"picked": None}}) + "\n")


def with_small_indices(dataset: Dataset) -> csr_matrix:
    """The rows with 32-bit indices, which `SGDClassifier` requires."""
    indices, indptr = dataset.indices.astype(np.int32), dataset.indptr.astype(np.int32)
    return csr_matrix((dataset.values.astype(np.float64), indices, indptr), shape=(dataset.rows, dataset.features))


if __name__ == "__main__":
    dense_sums()
