"""Data sets as the trainer takes them: every rank reads its own contiguous block of the samples of a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.reader import is_binary, read_binary
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.files import PathLike, Progress
from sparseallreduce.linear.data.svmlight.reader import read_svmlight
from sparseallreduce.runtime.objects import agreed
from sparseallreduce.streams.stream import index_dtype

__all__ = ["load"]


def load(
    train: PathLike,
    test: PathLike | None = None,
    *,
    comm: Any,
    n_features: int | None = None,
    progress: Progress = None,
) -> tuple[Dataset, Dataset | None]:
    """Read a training set, and a test set if given, into one feature space; collective over ``comm``.

    Parameters
    ----------
    train, test : path
        Files of the binary format, or of svmlight text with indices from 1, plain or compressed by gzip, bzip2 or xz; their first
        bytes tell which.
    comm : communicator
        Of the ranks that share the samples.
    n_features : int, optional
        Dimension N; by default that of the binary file, or the highest index in the text, whichever of both files has more.
    progress : callable, optional
        Called with the bytes of text that this rank has worked off since the last call.

    Raises
    ------
    DatasetError
        On every rank alike, with the file, the line and what is wrong with it.
    """
    training = _read(train, comm, n_features, progress)
    testing = None if test is None else _read(test, comm, n_features, progress)
    features = n_features or max(training.features, testing.features if testing else 1)
    return _widened(training, features), None if testing is None else _widened(testing, features)


def _read(path: PathLike, comm: Any, n_features: int | None, progress: Progress) -> Dataset:
    if not agreed(comm, lambda: is_binary(path)):
        return read_svmlight(path, comm, n_features=n_features, progress=progress)
    dataset = read_binary(path, comm)
    if n_features is not None and dataset.features > n_features:
        raise DatasetError(f"{path}: {dataset.features} features in it, more than the {n_features} that are asked for")
    return dataset


def _widened(dataset: Dataset, features: int) -> Dataset:
    return replace(dataset, features=features, indices=dataset.indices.astype(index_dtype(features), copy=False))
