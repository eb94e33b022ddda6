"""The oracle of all tests: the dense NumPy reduction of what is present at each position, zero elsewhere.

What a rank contributes is given as ``Entries``, made by the test itself and not read back from a stream, so that a stream which
misrepresents its entries is caught. Tolerances: integers exactly; floats exactly where no rounding can occur (small integers, minima,
maxima), or else within the rounding of a different order of summation.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce import Operator, SparseStream
from sparseallreduce.streams.dtypes import epsilon


class Entries(NamedTuple):
    """Positions, strictly increasing, and what is there: shape (nnz,) or (nnz, width)."""

    indices: NDArray[np.uint64]
    values: NDArray[Any]


class Reduced(NamedTuple):
    """A dense reduction: ``values`` of shape (size,) or (size, width), ``present`` where any rank has an entry."""

    values: NDArray[Any]
    present: NDArray[np.bool_]


def reduction(parts: Sequence[Entries], size: int, op: Operator) -> Reduced:
    """The dense reduction, in the order of the ranks and the dtype of the values."""
    shape, dtype = (size, *parts[0].values.shape[1:]), parts[0].values.dtype
    total, present = np.full(shape, op.neutral_of(dtype)), np.zeros(size, bool)
    with np.errstate(all="ignore"):
        for part in parts:
            total[part.indices] = op.ufunc(total[part.indices], part.values)
            present[part.indices] = True
    total[~present] = 0
    return Reduced(total, present)


class Expected:
    """What a reduction comes to, worked out once for all results of it."""

    def __init__(self, parts: Sequence[Entries], size: int, op: Operator) -> None:
        self.parts, self.size, self.op = parts, size, op
        self.reduced = reduction(parts, size, op)

    @cached_property
    def doubles(self) -> NDArray[Any]:
        return dense_in_doubles(self.parts, self.size, self.op)

    @cached_property
    def rounding(self) -> NDArray[np.float64]:
        return rounding(self.parts, self.size, self.op)

    def check(self, result: SparseStream, exact: bool) -> None:
        """``result`` has these values, and which positions are present."""
        expected, got = self.reduced, result.to_dense()
        assert (result.size, result.dtype) == (self.size, expected.values.dtype)
        assert got.shape == expected.values.shape
        if exact or got.dtype.kind == "i":
            np.testing.assert_array_equal(comparable(got), comparable(expected.values))  # NaN equals NaN, and -0.0 equals 0.0
        else:
            some = expected.present | (got != 0 if got.ndim == 1 else (got != 0).any(axis=1))  # elsewhere both are zero
            off = np.abs(got[some].astype(self.doubles.dtype) - self.doubles[some])
            allowed = self.rounding[some] if self.rounding.shape == got.shape else self.rounding
            assert (off <= allowed).all(), f"off by {off.max()}, of {allowed.max()} allowed"
        assert_presence(result, expected, self.op)


def assert_reduction(result: SparseStream, parts: Sequence[Entries], size: int, op: Operator, exact: bool = True) -> None:
    """``result`` is the reduction of ``parts``: values, and which positions are present."""
    Expected(parts, size, op).check(result, exact)


def assert_presence(result: SparseStream, expected: Reduced, op: Operator) -> None:
    """``result`` has the entries of the union; a sum may leave out those that are zero, since a dense form on the way does."""
    got = np.zeros(len(expected.present), bool)
    got[result.indices] = True
    assert len(result.indices) == len(result.values) == result.nnz == np.count_nonzero(got)
    if op.name != "sum":
        np.testing.assert_array_equal(got, expected.present)
        return
    dense = result.to_dense()
    assert not (got & ~expected.present).any()
    assert got[dense != 0 if dense.ndim == 1 else dense.any(axis=1)].all()


def comparable(values: NDArray[Any]) -> NDArray[Any]:
    """The same numbers in a dtype of NumPy's own, whose tests do not know the NaN of bfloat16."""
    return values.astype(np.float32) if values.dtype.kind == "V" else values


def dense_in_doubles(parts: Sequence[Entries], size: int, op: Operator) -> NDArray[Any]:
    """The reduction without the rounding of the streams' own dtype, in float64 or complex128."""
    wide, double = (np.clongdouble, np.complex128) if parts[0].values.dtype.kind == "c" else (np.longdouble, np.float64)
    return reduction([Entries(part.indices, part.values.astype(wide)) for part in parts], size, op).values.astype(double)


def rounding(parts: Sequence[Entries], size: int, op: Operator) -> NDArray[np.float64]:
    """How far two orders of P operations may be apart: eps * P * sum |x| for a sum, eps * P * |product| for a product.

    Of complex numbers a product rounds its parts by up to twice as much, and of two other parts.
    """
    dtype = parts[0].values.dtype
    eps = 0.0 if dtype.kind == "i" else epsilon(dtype) * (4 if dtype.kind == "c" else 1)
    if op.name == "sum":
        magnitude = dense_in_doubles([Entries(part.indices, np.abs(part.values)) for part in parts], size, op)
    elif op.name == "prod":
        magnitude = np.abs(dense_in_doubles(parts, size, op))
    else:
        magnitude = np.zeros(1)  # an operator that picks one of its operands does not round
    return float(eps) * len(parts) * magnitude


def bits(stream: SparseStream) -> tuple[Any, ...]:
    """All that a user can see of a stream, as byte strings: equal for two streams only if they are the same to the bit."""
    dense = stream.to_dense().tobytes() if stream.size < 2**24 else b""
    form = (stream.size, stream.dtype.name, stream.width, stream.is_dense, stream.nnz, stream.switch_density)
    return (*form, stream.indices.dtype.name, stream.indices.tobytes(), stream.values.tobytes(), dense)
