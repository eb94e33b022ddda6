"""The optional package that reads tables."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparseallreduce.errors import DatasetError

__all__ = ["arrow", "arrow_for"]


@cache
def arrow() -> Any:
    """Return pyarrow, with its modules for CSV, IPC, Parquet and compute."""
    import pyarrow
    import pyarrow.compute
    import pyarrow.csv
    import pyarrow.ipc
    import pyarrow.parquet

    return pyarrow


def arrow_for(what: object) -> Any:
    """Return pyarrow to read ``what``.

    Raises
    ------
    DatasetError
        If it is missing.
    """
    try:
        import pyarrow  # noqa: F401

        return arrow()
    except ImportError:
        raise DatasetError(f"cannot read {what}: tables need pyarrow: install sparseallreduce[parquet]") from None
