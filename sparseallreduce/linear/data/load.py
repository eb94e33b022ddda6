"""Data sets as the trainer takes them: every rank reads its own contiguous block of the samples of a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sparseallreduce.data_cache import DataCache
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.reader import read_binaries, read_binary
from sparseallreduce.linear.data.collected import collected
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.files import Progress
from sparseallreduce.linear.data.formats import format_of, open_samples
from sparseallreduce.linear.data.parts import Data, check_read_once, source_of
from sparseallreduce.linear.data.reading import AUTO, Reading
from sparseallreduce.linear.data.svmlight.reader import ZeroIndexError
from sparseallreduce.runtime.objects import collective
from sparseallreduce.streams.stream import index_dtype

__all__ = ["load"]


@collective
def load(
    train: Data,
    test: Data | None = None,
    *,
    comm: Any,
    n_features: int | None = None,
    progress: Progress = None,
    format: str | None = None,
    zero_based: str | bool = "no",
    hash_bits: int | None = None,
    unlabelled: bool = False,
    cache: DataCache | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Read a training set, and a test set if given, into one feature space; collective over ``comm``.

    Parameters
    ----------
    train, test : path or sequence of paths
        Files of samples of one format; folders of such, of which files whose names begin with a dot or an underscore are left out;
        patterns, as ``"data/part-*"``; pipes; and ``-``, text on the standard input of rank 0. What comes by a pipe is text, which rank 0
        copies to the folder for temporary files. The files of a folder or a pattern are in the order of their names, and the samples of a
        list are those of its first file, then those of its second, and so on.
    comm : communicator
        Of the ranks that share the samples.
    n_features : int, optional
        Dimension N; by default that of the file, or one more than the highest index, whichever of both files has more.
    progress : callable, optional
        Called with the bytes of text that this rank has worked off since the last call.
    format : str, optional
        A key of :data:`~sparseallreduce.linear.data.reading.FORMATS`, for both files. By default the first bytes tell the binary
        format, and the ending of the name tells the others: ``.npz``, ``.parquet``, ``.vw``, ``.tsv``; svmlight text is all else.
    zero_based : {"no", "yes", "auto"} or bool
        Whether indices of svmlight text count from 0; "auto": if there is an index 0 in the training set. The test set follows it.
    hash_bits : int, optional
        Of ``.vw`` and ``.tsv``: N is two to the power of it; 18 unless ``n_features`` says another.
    unlabelled : bool
        Whether samples of other formats than svmlight may have no labels, which are then NaN.
    cache : DataCache, optional
        For files on a slow store: what a host reads of them is kept there in pieces of 1 MiB, each of which is read from the store once.

    Raises
    ------
    DatasetError
        On every rank alike, with the file, the line or sample, and what is wrong with it.
    """
    if test is not None:
        check_read_once(comm, train, test)
    reading = Reading(format, zero_based, hash_bits, unlabelled)
    training = _read(train, comm, n_features, reading, progress, cache)
    testing = None
    if test is not None:
        if training.zero_based is not None:
            reading = replace(reading, zero_based="yes" if training.zero_based else "no")
        testing = _read(test, comm, n_features, reading, progress, cache)
        with np.errstate(over="ignore"):  # what becomes infinite is refused where it is checked
            testing = replace(testing, values=testing.values.astype(training.values.dtype, copy=False))
    features = n_features or max(training.features, testing.features if testing else 1)
    return _widened(training, features), None if testing is None else _widened(testing, features)


def _read(
    data: Data, comm: Any, n_features: int | None, reading: Reading, progress: Progress, cache: DataCache | None = None
) -> Dataset:
    with source_of(data, comm, cache) as source:
        chosen = format_of(source, reading, comm)
        if chosen == "binary":
            dataset = read_binary(source.parts[0], comm) if len(source.parts) == 1 else read_binaries(source, comm)
            if n_features is not None and dataset.features > n_features:
                raise DatasetError(f"{source}: {dataset.features} features in it, more than the {n_features} that are asked for")
            return dataset

        def read(zero_based: bool) -> Dataset:
            given: Any = {"n_features": n_features, "zero_based": zero_based, "dtype": np.float32, "progress": progress}
            return collected(open_samples(source, comm, chosen, reading, **given), source, comm)

        if chosen != "svmlight":
            return read(False)
        try:
            zero_based = reading.zero_based == "yes"
            return replace(read(zero_based), zero_based=zero_based)
        except ZeroIndexError as error:
            if reading.zero_based != AUTO:
                plain = DatasetError(str(error))
                plain.at_command_line = error.at_command_line
                raise plain from None
        return replace(read(True), zero_based=True)


def _widened(dataset: Dataset, features: int) -> Dataset:
    return replace(dataset, features=features, indices=dataset.indices.astype(index_dtype(features), copy=False))
