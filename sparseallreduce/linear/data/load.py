"""Data sets as the trainer takes them: every rank reads its own contiguous block of the samples of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sparseallreduce.data_cache import DataCache
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.beside import columns_beside
from sparseallreduce.linear.data.binary.reader import read_binaries, read_binary
from sparseallreduce.linear.data.collected import collected
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.files import Progress
from sparseallreduce.linear.data.formats import format_of, open_samples
from sparseallreduce.linear.data.parts import Data, Source, check_read_once, source_of
from sparseallreduce.linear.data.reading import AUTO, MOST_CATEGORIES, Reading, table_reading
from sparseallreduce.linear.data.svmlight.reader import ZeroIndexError
from sparseallreduce.linear.encoding import Encoding
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
    target: str | None = None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    header: str = AUTO,
    max_categories: int = MOST_CATEGORIES,
    encoding: Encoding | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Read a training set, and a test set if given, into one feature space; collective over ``comm``.

    Parameters
    ----------
    train, test : path or sequence of paths
        Files of samples of one format; folders of such, of which files whose names begin with a dot or an underscore are left out;
        patterns, as ``"data/part-*"``; pipes; and ``-``, text on the standard input of rank 0. What comes by a pipe is text, which rank 0
        copies to the folder for temporary files. The files of a folder or a pattern are in the order of their names, and the samples of a
        list are those of its first file, then those of its second, and so on.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        Of the ranks that share the samples; ``MPI.COMM_WORLD`` by default.
    n_features : int, optional
        Dimension N; by default that of the file, or one more than the highest index, whichever of both files has more.
    progress : callable, optional
        Called with the bytes of text that this rank has worked off since the last call.
    format : str, optional
        A key of :data:`~sparseallreduce.linear.data.reading.FORMATS`, for both files. By default the first bytes tell the binary
        format, and the ending of the name tells the others: ``.csv``, ``.parquet``, ``.arrow``, ``.feather``, ``.npz``, ``.vw``, ``.tsv``,
        which is a table if a column is named, and labels with plain text otherwise; svmlight text is all else.
    zero_based : {"no", "yes", "auto"} or bool
        Whether indices of svmlight text count from 0; "auto": if there is an index 0 in the training set. The test set follows it.
    hash_bits : int, optional
        Of ``.vw`` and plain text: N is two to the power of it; 18 unless ``n_features`` says another. Of a table: a column of too many
        categories becomes two to the power of it features, 18 by default.
    unlabelled : bool
        Whether samples of other formats than svmlight may have no labels, which are then NaN.
    cache : DataCache, optional
        For files on a slow store: what a host reads of them is kept there in pieces of 1 MiB, each of which is read from the store once.
    target : str, optional
        Of a table (CSV, TSV, Parquet, Arrow): the column of labels, which are numbers or names of classes; by default one that is called
        "label" or "target".
    features : list of str, optional
        The columns that become features; by default all but the target. Numbers stay numbers; strings, booleans and Arrow's dictionaries
        become a feature a category; a column with missing values has a further feature for these. :class:`~.encoding.Encoding` names them.
    drop : list of str
        Columns that do not become features.
    categorical : list of str
        Columns that are categories though they are numbers or dates.
    header : {"auto", "yes", "no"}
        Whether the first line of CSV names the columns; "auto": if a given name is in it, or none of its fields is a number or empty.
        Without a header columns are called "1", "2", ...
    max_categories : int
        A column of more categories is hashed.
    encoding : Encoding, optional
        Of a training set, as a :class:`~.dataset.Dataset` and a model have it: the table is encoded by it.

    Returns
    -------
    Dataset
        This rank's samples of the training set.
    Dataset or None
        Likewise of the test set, encoded as the training set.

    Raises
    ------
    DatasetError
        On every rank alike, with the file, the line or sample, and what is wrong with it.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = Path(folder) / "people.csv"
    ...     _ = file.write_text("age,color,bought\\n31,red,yes\\n,blue,no\\n")
    ...     people, _ = load(file, target="bought")
    >>> list(people.encoding.names())
    ['age', 'age (missing)', 'color=blue', 'color=red']
    >>> people.to_scipy().toarray(), people.named_labels
    (array([[31.,  0.,  0.,  1.],
           [ 0.,  1.,  1.,  0.]], dtype=float32), array(['yes', 'no'], dtype='<U3'))
    """
    comm = resolve(comm)
    table = table_reading(target, features, drop, categorical, header, max_categories, encoding)
    reading = Reading(format, zero_based, hash_bits, unlabelled, table)
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
    """The samples of binary files with how the columns of a table were encoded, if they come from one; collective."""
    found, known = columns_beside(source, comm), reading.table.encoding
    if found is None or found.encoding.features != dataset.features:
        return dataset
    if known is not None and replace(known, target=None) != replace(found.encoding, target=None):
        raise DatasetError(f"{source}: its columns were encoded otherwise than those of the training set: give the table itself")
    return replace(dataset, encoding=found.encoding, names=found.classes)


def _widened(dataset: Dataset, features: int) -> Dataset:
    return replace(dataset, features=features, indices=dataset.indices.astype(index_dtype(features), copy=False))
