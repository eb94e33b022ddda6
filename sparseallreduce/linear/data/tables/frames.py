"""Frames in memory: pandas, polars, Arrow tables and Hugging Face's datasets, whose columns are encoded like those of files.

None of these packages is imported here: whoever passes such a frame has it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.blocks import Column as Growing
from sparseallreduce.linear.data.reading import DEFAULT_BITS, TableReading
from sparseallreduce.linear.data.tables.batches import Batch, choose
from sparseallreduce.linear.data.tables.extra import arrow_for
from sparseallreduce.linear.data.tables.learning import learn
from sparseallreduce.linear.encoding import Encoding
from sparseallreduce.runtime.objects import agreed

__all__ = ["arrow_table", "encoded_frame", "is_frame", "needs_encoding", "values_of"]

Array = NDArray[Any]

_ROWS = 1 << 16  # rows encoded in one call


def is_frame(X: Any) -> bool:
    """Return True if an object is a table with named columns."""
    if package_of(X) == "pandas":
        return getattr(X, "ndim", 0) == 2
    return (hasattr(X, "__arrow_c_stream__") and getattr(X, "ndim", 2) == 2 and not _is_column(X)) or _is_dataset(X)


def needs_encoding(X: Any) -> bool:
    """Return True if a frame has to be encoded. A pandas frame of only numbers, none missing, is used as a matrix."""
    if package_of(X) != "pandas":
        return True
    numbers = all(getattr(kind, "kind", "O") in "iuf" or "Sparse" in str(kind) for kind in X.dtypes)
    return not numbers or not all(isinstance(name, str) for name in X.columns) or bool(X.isna().any(axis=None))


def arrow_table(X: Any) -> Any:
    """Return a frame as an Arrow table.

    Raises
    ------
    DatasetError
        If Arrow has no type for a column.
    """
    pyarrow = arrow_for(f"a frame of {package_of(X)}")
    try:
        if package_of(X) == "pandas":
            return pyarrow.Table.from_pandas(X, preserve_index=False)
        if _is_dataset(X):
            return X.with_format("arrow")[:]
        return pyarrow.table(X)
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        reason = "; ".join(str(each) for each in error.args) or type(error).__name__
        raise DatasetError(f"X cannot be converted to a table: {' '.join(reason.split())}") from None


def encoded_frame(X: Any, comm: Any, encoding: Encoding | None = None) -> tuple[csr_array, Encoding]:
    """Return a frame's rows as samples, and the encoding of its columns. Collective over ``comm``.

    Parameters
    ----------
    X : frame
        This rank's rows.
    comm : communicator
        Communicator of the ranks whose frames have a common encoding.
    encoding : Encoding, optional
        Encoding of the columns; determined from the frames by default.

    Returns
    -------
    csr_array, shape (rows, features)
        float32 if all numbers are float32 or shorter, otherwise float64.
    Encoding

    Raises
    ------
    DatasetError
        On every rank, with the row and the column of the fault.
    """
    table = agreed(comm, lambda: arrow_table(X))
    reading = TableReading(features=tuple(table.column_names), encoding=encoding)
    chosen = agreed(comm, lambda: choose(table.column_names, reading, "X", True)._replace(target=None))
    places = [table.column_names.index(name) for name in chosen.features]
    dtype = np.dtype(np.float32 if _is_single(table) else np.float64)

    def read(texts: frozenset[str]) -> Generator[Batch]:
        first = 0
        for batch in table.to_batches(max_chunksize=_ROWS):
            columns = [batch.column(place) for place in places]
            yield Batch(columns, batch.num_rows, lambda row, first=first: f"X, row {first + row}")  # type: ignore[misc]
            first += batch.num_rows

    learned = learn(read, chosen, comm, reading, bits=DEFAULT_BITS, unlabelled=True, dtype=dtype, keep=True)
    lengths, values, indices = Growing(np.int64), Growing(dtype), Growing(np.int64)
    for block in learned.blocks:
        lengths.append(np.diff(block.indptr))
        values.append(block.values)
        indices.append(block.indices.astype(np.int64))
    indptr = np.append(0, np.cumsum(lengths.array()))
    return csr_array((values.array(), indices.array(), indptr), shape=(table.num_rows, learned.encoding.features)), learned.encoding


def values_of(column: Any) -> list[Array]:
    """Return the values of a column of an Arrow table as arrays that are equal if the values are, whatever their memory layout."""
    pyarrow = arrow_for("a frame")
    arrays: list[Array] = []
    for chunk in [column.combine_chunks()] if isinstance(column, pyarrow.ChunkedArray) else [column]:
        whole = chunk
        if pyarrow.types.is_dictionary(chunk.type):
            whole = chunk.dictionary.cast(pyarrow.string()).take(chunk.indices)
        arrays.append(whole.is_null().to_numpy(zero_copy_only=False))
        if pyarrow.types.is_integer(whole.type) or pyarrow.types.is_floating(whole.type):
            arrays.append(pyarrow.compute.fill_null(whole, 0).to_numpy(zero_copy_only=False))
        else:
            arrays.append(whole.cast(pyarrow.string()).fill_null("").to_numpy(zero_copy_only=False))
    return arrays


def package_of(X: Any) -> str:
    """Return the name of the package that defines an object's class."""
    return type(X).__module__.partition(".")[0]


def _is_dataset(X: Any) -> bool:
    return package_of(X) == "datasets" and hasattr(X, "with_format") and hasattr(X, "column_names")


def _is_column(X: Any) -> bool:
    """Return True if an object that Arrow can read is a single column, such as a series."""
    return type(X).__name__ in ("Series", "ChunkedArray")


def _is_single(table: Any) -> bool:
    """Return True if there are floats, and no number is more precise than float32."""
    kinds = [str(kind) for kind in table.schema.types]
    return any(kind in ("float", "halffloat") for kind in kinds) and not any(kind in ("double",) or "int" in kind for kind in kinds)
