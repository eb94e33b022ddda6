"""Indices encoded as gaps: 1 to 3 % above the entropy for uniformly random indices, and less for others."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from numpy.typing import NDArray

from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.wire.header import Bytes

_ROOT, _LOG2_E = 0.7071067811865476, 1.4426950408889634

__all__ = ["Gaps", "entropy_bits"]


class Gaps:
    """An index codec of Rice codes, in blocks with a parameter for each (:mod:`sparseallreduce.streams.kernels.gaps`)."""

    number = 2
    name = "gaps"
    seconds: float = 4e-9  # 2.5 to encode an index and 1.4 to decode it, at every density

    def bytes_each(self, density: float, index_bytes: int) -> float:
        return 1.03 * entropy_bits(density) / 8

    def bound(self, indices: NDArray[Any], lo: int) -> int:
        return kernels.gaps_bound(len(indices), indices.dtype)

    def write(self, indices: NDArray[Any], lo: int, out: Bytes) -> int:
        return kernels.encode_gaps(array_module(indices).ascontiguousarray(indices), lo, out)

    def read(self, payload: Bytes, lo: int, hi: int, out: NDArray[Any]) -> bool:
        return kernels.decode_gaps(payload, lo, hi, out)


@lru_cache(maxsize=1024)
def entropy_bits(density: float) -> float:
    """Return H(d) / d, the information in bits of one index of a uniformly random set of density d.

    Examples
    --------
    >>> round(entropy_bits(0.0625), 2)
    5.4
    """
    absent = 1.0 - density
    if density <= 0.0 or absent <= 0.0:
        return 0.0
    return -_log2(density) - absent / density * _log2(absent)


def _log2(number: float) -> float:
    """Return log2 to 1e-5, using only exactly rounded operations, so that ranks on different machines make the same choice."""
    mantissa, exponent = math.frexp(number)
    ratio = (mantissa - _ROOT) / (mantissa + _ROOT)
    square = ratio * ratio
    return exponent - 0.5 + 2 * _LOG2_E * ratio * (1.0 + square * (1 / 3 + square * (0.2 + square / 7)))
