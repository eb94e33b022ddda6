"""The package that reads tables, which not everyone has."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparseallreduce.errors import DatasetError

__all__ = ["arrow", "arrow_for"]


@cache
def arrow() -> Any:
    """Return pyarrow, with its modules for CSV, IPC, Parquet and arithmetic."""
    import pyarrow
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def arrow_for(what: object) -> Any:
    """Return pyarrow for reading something.

    Raises
    ------
    DatasetError
        If it is missing.
    """
    try:
        import pyarrow  # noqa: F401

        return arrow()
    except ImportError:
        raise DatasetError(f"cannot read {what}: tables take pyarrow: install sparseallreduce[parquet]") from None
