"""The keyword options of :func:`~sparseallreduce.allreduce` and related functions, typed for editors and type checkers."""

from __future__ import annotations

from typing import Literal, TypedDict

from sparseallreduce.algorithms.cost import Machine

__all__ = ["OperationOptions", "RequestOptions"]


class OperationOptions(TypedDict, total=False):
    """The options of a blocking operation."""

    switch_density: float | None  # density above which streams become dense
    timeout: float | None  # seconds
    machine: Machine | None  # constants that "auto" uses instead of the measured ones
    index_codec: Literal["auto", "plain", "bitmap", "gaps"]
    value_codec: Literal["exact", "float16", "bfloat16", "qsgd8", "qsgd4"]
    seed: int  # seed of QSGD's random numbers
    group_size: int  # group size of dsar_early_switch
    inner: str  # of hierarchical: the algorithm inside hosts
    outer: str  # of hierarchical: the algorithm between hosts


class RequestOptions(OperationOptions, total=False):
    """The options of a non-blocking operation."""

    progress: Literal["manual", "thread"]
