"""The binary operators of a reduction: associative, commutative, with a neutral element (thesis section 3.1.2).

A position that a stream does not hold has the neutral element of the operator as its value, so that it never has to be sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import AlgorithmError

__all__ = ["MAX", "MIN", "OPERATORS", "PROD", "SUM", "Operator", "as_operator"]


@dataclass(frozen=True)
class Operator:
    """An associative, commutative operator and its neutral element.

    Parameters
    ----------
    name : str
        How ranks name it to each other: operators of the same name must be the same operator.
    ufunc : numpy.ufunc or callable
        Called as ``ufunc(a, b, out=c)`` on arrays of one dtype and shape.
    neutral : scalar or callable
        The value e with ``ufunc(e, x) == x``; a callable gets the dtype and returns it.

    Examples
    --------
    >>> import numpy as np
    >>> bitwise_or = Operator("bor", np.bitwise_or, 0)
    >>> bitwise_or.neutral_of(np.int32)
    np.int32(0)
    >>> MIN.neutral_of(np.float32)
    np.float32(inf)
    """

    name: str
    ufunc: Callable[..., Any]
    neutral: Any

    def neutral_of(self, dtype: DTypeLike) -> Any:
        """The neutral element as a NumPy scalar of ``dtype``."""
        dtype = np.dtype(dtype)
        value = self.neutral(dtype) if callable(self.neutral) else self.neutral
        return dtype.type(value)

    @property
    def is_sum(self) -> bool:
        """Whether zero is the neutral element and absent positions therefore need no record of their own."""
        return self.name == "sum"


def _highest(dtype: np.dtype[Any]) -> Any:
    return np.inf if dtype.kind == "f" else np.iinfo(dtype).max


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if dtype.kind == "f" else np.iinfo(dtype).min


SUM = Operator("sum", np.add, 0)
PROD = Operator("prod", np.multiply, 1)
MIN = Operator("min", np.minimum, _highest)
MAX = Operator("max", np.maximum, _lowest)
OPERATORS = {operator.name: operator for operator in (SUM, PROD, MIN, MAX)}


def as_operator(op: str | Operator | Any) -> Operator:
    """The operator that ``op`` names.

    Parameters
    ----------
    op : str, Operator or mpi4py.MPI.Op
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, the MPI operator of the same name, or an :class:`Operator`.

    Raises
    ------
    AlgorithmError
        If it names none of them.
    """
    if isinstance(op, Operator):
        return op
    if isinstance(op, str) and op in OPERATORS:
        return OPERATORS[op]
    mpi = sys.modules.get("mpi4py.MPI")  # there if op is one of its operators, which do not know their names
    for name, operator in OPERATORS.items():
        if mpi is not None and isinstance(op, mpi.Op) and op == getattr(mpi, name.upper()):
            return operator
    raise AlgorithmError(f"unknown operator {op!r}: use one of {', '.join(sorted(OPERATORS))}, or an Operator(name, ufunc, neutral)")
