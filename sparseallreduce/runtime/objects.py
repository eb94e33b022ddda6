"""What ranks say to each other about small things: values, and errors, which are raised by all or by none."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

from sparseallreduce.errors import SparseAllreduceError

__all__ = ["agreed", "gather"]

T = TypeVar("T")


def gather(comm: Any, value: T) -> list[T]:
    """What every rank gives, in the order of ranks, on every rank."""
    return [value] if comm.size == 1 else cast("list[T]", comm.allgather(value))


def agreed(comm: Any, action: Callable[[], T]) -> T:
    """What ``action`` returns on this rank; if it raises on any rank, the lowest such rank's exception is raised on all."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    for raised in gather(comm, failure if comm.size == 1 else _portable(failure)):
        if raised is not None:
            raise raised
    return cast(T, result)


def _portable(error: Exception | None) -> Exception | None:
    """The error, or what other ranks can be told of it: some cannot be pickled, or not be made again from their pickle."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return SparseAllreduceError(f"{type(error).__name__}: {error}")
