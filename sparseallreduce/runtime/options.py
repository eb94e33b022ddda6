"""The options of an operation, for editors and type checkers: what :func:`~sparseallreduce.allreduce` takes by name."""

from __future__ import annotations

from typing import Literal, TypedDict

from sparseallreduce.algorithms.cost import Machine

__all__ = ["OperationOptions", "RequestOptions"]


class OperationOptions(TypedDict, total=False):
    """What an operation takes besides streams, communicator, operator and algorithm."""

    switch_density: float | None  # share of the size above which streams go dense
    timeout: float | None  # seconds
    machine: Machine | None  # for "auto", instead of the measured one
    index_codec: Literal["auto", "plain", "bitmap", "gaps"]
    value_codec: Literal["exact", "float16", "bfloat16", "qsgd8", "qsgd4"]
    seed: int  # of the draws of QSGD
    group_size: int  # of dsar_early_switch
    inner: str  # of hierarchical: the algorithm inside hosts
    outer: str  # of hierarchical: the algorithm between hosts


class RequestOptions(OperationOptions, total=False):
    """The same of an operation that is started and waited for later."""

    progress: Literal["manual", "thread"]
