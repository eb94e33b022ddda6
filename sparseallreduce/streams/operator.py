"""The binary operators of a reduction: associative, commutative, with a neutral element (thesis section 3.1.2).

An absent position of a stream has the neutral element of the operator as its value, which therefore never has to be sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.errors import AlgorithmError, StreamTypeError
from sparseallreduce.streams.dtypes import is_float

__all__ = ["MAX", "MEAN", "MIN", "OPERATORS", "PROD", "SUM", "Operator", "as_operator"]


def _highest(dtype: np.dtype[Any]) -> Any:
    return np.inf if is_float(dtype) else np.iinfo(dtype).max


def _lowest(dtype: np.dtype[Any]) -> Any:
    return -np.inf if is_float(dtype) else np.iinfo(dtype).min


_MEAN = "mean"
_ORDERED = ("min", "max")  # not defined for complex numbers
_KNOWN: dict[str, tuple[np.ufunc, Any]] = {  # the library's own operators
    "sum": (np.add, 0),
    "prod": (np.multiply, 1),
    "min": (np.minimum, _highest),
    "max": (np.maximum, _lowest),
    _MEAN: (np.add, 0),
}


@dataclass(frozen=True)
class Operator:
    """An associative, commutative operator and its neutral element.

    Parameters
    ----------
    name : str
        Name that identifies the operator to other ranks: operators of the same name must be the same operator. "sum", "prod", "min", "max"
        and "mean" are reserved for those of the library.
    ufunc : numpy.ufunc or callable
        Called as ``ufunc(a, b, out=c)`` with arrays of one dtype and shape.
    neutral : scalar or callable
        The value e with ``ufunc(e, x) == x``, or a callable that takes the dtype and returns it.

    Raises
    ------
    AlgorithmError
        If the name is one of the library's, with a different function or neutral element.

    Examples
    --------
    >>> import numpy as np
    >>> bitwise_or = Operator("bor", np.bitwise_or, 0)
    >>> bitwise_or.neutral_of(np.int32).item()
    0
    >>> MIN.neutral_of(np.float32).item()
    inf
    """

    name: str
    ufunc: Callable[..., Any]
    neutral: Any

    def __post_init__(self) -> None:
        if self.name in _KNOWN:
            ufunc, neutral = _KNOWN[self.name]
            if self.ufunc is not ufunc or not (self.neutral is neutral or (_is_number(self.neutral) and self.neutral == neutral)):
                raise AlgorithmError(
                    f"{self.name!r} is the name of an operator of the library, and this is another one: pass op={self.name!r}, or give "
                    "yours a name of its own"
                )

    def neutral_of(self, dtype: DTypeLike) -> Any:
        """Return the neutral element as a NumPy scalar of ``dtype``."""
        dtype = np.dtype(dtype)
        value = self.neutral(dtype) if callable(self.neutral) else self.neutral
        return dtype.type(value)

    @cached_property
    def is_sum(self) -> bool:
        """True if it is an addition with neutral element 0, as for "sum" and "mean", so that absent positions need no mask."""
        return self.ufunc is np.add and _is_number(self.neutral) and bool(self.neutral == 0)

    @property
    def is_mean(self) -> bool:
        """True if the sum is to be divided by the number of ranks."""
        return self.name == _MEAN

    def term(self, dtype: np.dtype[Any]) -> str:
        """Return the text by which ranks compare their operators, for streams of a dtype.

        Raises
        ------
        StreamTypeError
            For the mean of integers, and the minimum and maximum of complex numbers.
        AlgorithmError
            If there is no neutral element of this dtype.

        Examples
        --------
        >>> SUM.term(np.dtype("int32")), Operator("bor", np.bitwise_or, 0).term(np.dtype("int32"))
        ('sum', 'bor (bitwise_or, neutral element 0)')
        """
        if dtype.kind == "c" and self.name in _ORDERED:
            raise StreamTypeError(f"{dtype} values have no order, and so no {self.name}: reduce their magnitudes")
        if self.is_mean and dtype.kind in "iu":
            raise StreamTypeError(f"the mean of {dtype} values is not {dtype}: convert them to floats, or divide the result of op='sum'")
        if self.name in _KNOWN:
            return self.name
        try:
            neutral = self.neutral_of(dtype)
        except Exception as error:  # of the user's function, or of NumPy
            raise AlgorithmError(f"operator {self.name!r} has no neutral element of {dtype}: {error}") from error
        function = getattr(self.ufunc, "__qualname__", None) or getattr(self.ufunc, "__name__", type(self.ufunc).__name__)
        return f"{self.name} ({function}, neutral element {neutral})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex | np.number)


SUM, PROD, MIN, MAX, MEAN = (Operator(name, *known) for name, known in _KNOWN.items())
OPERATORS = {operator.name: operator for operator in (SUM, PROD, MIN, MAX)}  # those that MPI has as well


def as_operator(op: str | Operator | Any) -> Operator:
    """Return the operator that ``op`` names.

    Parameters
    ----------
    op : str, Operator or mpi4py.MPI.Op
        ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"mean"``, MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, or an :class:`Operator`.

    Raises
    ------
    AlgorithmError
        If it names none of them.
    """
    if isinstance(op, Operator):
        return op
    if isinstance(op, str) and op in OPERATORS:
        return OPERATORS[op]
    if isinstance(op, str) and op == _MEAN:
        return MEAN
    mpi = sys.modules.get("mpi4py.MPI")  # loaded if op is an MPI operator; these do not know their names
    for name, operator in OPERATORS.items():
        if mpi is not None and isinstance(op, mpi.Op) and op == getattr(mpi, name.upper()):
            return operator
    raise AlgorithmError(f"unknown operator {op!r}: use one of {', '.join(sorted(_KNOWN))}, or an Operator(name, ufunc, neutral)")
