"""Loading of data sets: every rank reads its own contiguous block of the samples of files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from sparseallreduce.data_cache import DataCache
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.reader import read_binaries, read_binary
from sparseallreduce.linear.data.collected import collected
from sparseallreduce.linear.data.companion import companion_of
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.files import Progress
from sparseallreduce.linear.data.formats import format_of, open_samples
from sparseallreduce.linear.data.parts import Data, Source, check_read_once, source_of
from sparseallreduce.linear.data.reading import AUTO, Reading, TableOptions, table_reading
from sparseallreduce.linear.data.svmlight.reader import ZeroIndexError
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import together
from sparseallreduce.streams.stream import index_dtype

__all__ = ["load"]


def load(
    train: Data,
    test: Data | None = None,
    *,
    comm: Any = None,
    n_features: int | None = None,
    progress: Progress = None,
    format: str | None = None,
    zero_based: str | bool = "no",
    hash_bits: int | None = None,
    unlabelled: bool = False,
    cache: DataCache | None = None,
    **columns: Unpack[TableOptions],
) -> tuple[Dataset, Dataset | None]:
    r"""Read a training set, and a test set if given, into one feature space. Collective over ``comm``.

    Parameters
    ----------
    train, test : path or sequence of paths
        Files of samples in one format; folders of such files, except those whose names start with a dot or an underscore;
        patterns, such as ``"data/part-*"``; pipes; and ``-``, text on the standard input of rank 0. Pipes must contain text, which rank 0
        copies to the folder for temporary files. The files of a folder or a pattern are sorted by name, and the samples of a
        list are those of its first file, followed by those of its second, and so on.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        Communicator of the ranks that share the samples; ``MPI.COMM_WORLD`` by default.
    n_features : int, optional
        Number of features, N; by default that of the file, or the highest index plus one; the larger one of both sets.
    progress : callable, optional
        Function called with the number of bytes of text that this rank has processed since the last call.
    format : str, optional
        A key of :data:`~sparseallreduce.linear.data.reading.FORMATS`, for both sets. By default the first bytes identify the binary
        format, and the end of the name the others: ``.csv``, ``.parquet``, ``.arrow``, ``.feather``, ``.npz``, ``.vw``, ``.tsv``
        (a table if a column is named, otherwise labels with plain text); everything else is svmlight text.
    zero_based : {"no", "yes", "auto"} or bool
        Whether indices of svmlight text count from 0; "auto" means that they do if the training set has an index 0. The test set is read
        in the same way.
    hash_bits : int, optional
        For ``.vw`` and plain text: N is 2**hash_bits; 18 unless ``n_features`` implies another value. For tables: a column of too many
        categories becomes 2**hash_bits features, 18 by default.
    unlabelled : bool
        Whether samples in formats other than svmlight may lack labels, which are then NaN.
    cache : DataCache, optional
        Cache for files on a slow store: each host keeps what it reads in pieces of 1 MiB, and reads each from the store once.
    target : str, optional
        For tables (CSV, TSV, Parquet, Arrow): the column of labels, which are numbers or class names; by default one called "label" or
        "target".
    features : list of str, optional
        Columns that become features; by default all but the target. Numbers stay numbers; strings, booleans and Arrow's dictionaries
        become one feature per category; a column with missing values gets another feature for these. :class:`~.encoding.Encoding` has the
        names.
    drop : list of str
        Columns that do not become features.
    categorical : list of str
        Columns to treat as categories although they are numbers or dates.
    header : {"auto", "yes", "no"}
        Whether the first line of CSV has the names of the columns; "auto" means that it does if a given name is in it, or none of its
        fields is a number or empty. Without a header columns are called "1", "2", ...
    max_categories : int
        Columns with more categories are hashed.
    encoding : Encoding, optional
        Encoding of a training set, from a :class:`~.dataset.Dataset` or a model, to use for the table.

    Returns
    -------
    Dataset
        This rank's samples of the training set.
    Dataset or None
        This rank's samples of the test set, encoded like the training set.

    Raises
    ------
    DatasetError
        On every rank, with the file, the line or sample, and the fault.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "people.csv"
    ...     _ = file.write_text("age,color,bought\n31,red,yes\n,blue,no\n")
    ...     people, _ = load(file, target="bought")
    >>> list(people.encoding.names())
    ['age', 'age (missing)', 'color=blue', 'color=red']
    >>> people.to_scipy().toarray(), people.named_labels
    (array([[31.,  0.,  0.,  1.],
           [ 0.,  1.,  1.,  0.]], dtype=float32), array(['yes', 'no'], dtype='<U3'))
    """
    comm = resolve(comm)
    reading = Reading(format, zero_based, hash_bits, unlabelled, table_reading("load", columns))
    return together(comm, lambda: _load(train, test, comm, n_features, reading, progress, cache))


def _load(
    train: Data, test: Data | None, comm: Any, n_features: int | None, reading: Reading, progress: Progress, cache: DataCache | None
) -> tuple[Dataset, Dataset | None]:
    if test is not None:
        check_read_once(comm, train, test)
    training = _read(train, comm, n_features, reading, progress, cache)
    testing = None
    if test is not None:
        if training.zero_based is not None:
            reading = replace(reading, zero_based="yes" if training.zero_based else "no")
        if training.encoding is not None:
            reading = replace(reading, table=replace(reading.table, encoding=training.encoding))
        testing = _read(test, comm, n_features, reading, progress, cache)
        with np.errstate(over="ignore"):  # later checks refuse infinite values
            testing = replace(testing, values=testing.values.astype(training.values.dtype, copy=False))
    features = n_features or max(training.features, testing.features if testing else 1)
    return _widened(training, features), None if testing is None else _widened(testing, features)


def _read(data: Data, comm: Any, n_features: int | None, reading: Reading, progress: Progress, cache: DataCache | None = None) -> Dataset:
    with source_of(data, comm, cache) as source:
        chosen = format_of(source, reading, comm)
        if chosen == "binary":
            dataset = read_binary(source.parts[0], comm) if len(source.parts) == 1 else read_binaries(source, comm)
            if n_features is not None and dataset.features > n_features:
                raise DatasetError(f"{source}: it has {dataset.features} features, more than the requested {n_features}")
            return _with_columns(dataset, source, comm, reading)

        def read(zero_based: bool) -> Dataset:
            given: Any = {"n_features": n_features, "zero_based": zero_based, "dtype": np.float32, "progress": progress}
            return collected(open_samples(source, comm, chosen, reading, keep=True, **given), source, comm)

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


def _with_columns(dataset: Dataset, source: Source, comm: Any, reading: Reading) -> Dataset:
    """Return the samples of binary files with the encoding of the table that they come from, if any. Collective."""
    found, known = companion_of(source, comm), reading.table.encoding
    if found is None or found.encoding.features != dataset.features:
        return dataset
    if known is not None and replace(known, target=None) != replace(found.encoding, target=None):
        raise DatasetError(f"{source}: its columns were not encoded like those of the training set: give the table itself")
    return replace(dataset, encoding=found.encoding, names=found.classes)


def _widened(dataset: Dataset, features: int) -> Dataset:
    return replace(dataset, features=features, indices=dataset.indices.astype(index_dtype(features), copy=False))
