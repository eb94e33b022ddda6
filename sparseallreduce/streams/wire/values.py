"""Lossy value codecs: 16-bit floats, and stochastic levels (QSGD, the thesis's low-precision extension).

A stream is quantised once, by :class:`~sparseallreduce.algorithms.steps.Quantise`, and then has the values that receivers decode, so that
sender and receivers add the same values. A rank that forwards a stream sends it in the form in which it arrived.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.kernels.backend import mark_read_only
from sparseallreduce.streams.kernels.contract import QSGD_BLOCK
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire.header import Bytes

__all__ = ["BIASED", "EXACT", "VALUE_CODECS", "CodedStream", "ValueCodec", "decoded", "quantised"]

EXACT = 0  # number of unencoded values


class CodedStream(SparseStream):
    """A stream that keeps the encoded form of its values."""

    __slots__ = ("codec", "coded")

    codec: ValueCodec
    coded: tuple[NDArray[Any], ...]  # encoded form of all values, in order

    @classmethod
    def of(cls, stream: SparseStream, values: NDArray[Any], codec: ValueCodec, coded: tuple[NDArray[Any], ...]) -> CodedStream:
        """Return a stream like ``stream`` with these values, which become read-only because the encoded form must match them."""
        mark_read_only(values)
        form: Any
        if stream.is_dense:
            form = cls._dense_form(values, stream.size, stream.lo, stream.hi, stream._present, stream.switch_density)
        else:
            form = cls._sparse_form(stream._entries()[0], values, stream.size, stream.lo, stream.hi, stream.switch_density)
        form.codec, form.coded = codec, coded
        return form  # type: ignore[no-any-return]


class ValueCodec(ABC):
    """A codec for values; the encoded form is a few arrays of bytes, which can be cut at multiples of a block."""

    number: int
    name: str

    @abstractmethod
    def lengths(self, count: int) -> tuple[int, ...]:
        """Return the size in bytes of each array of the encoded form of ``count`` values."""

    @abstractmethod
    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        """Encode values; return the position of the first value that is out of range, or -1."""

    @abstractmethod
    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        """Decode into ``out``; return True if the encoded form is valid."""

    def empty(self, count: int) -> tuple[Bytes, ...]:
        """Return uninitialised arrays for the encoded form."""
        return tuple(memory.empty(length, np.uint8) for length in self.lengths(count))

    def cut(self, coded: tuple[Bytes, ...], first: int, count: int) -> tuple[Bytes, ...]:
        """Return the encoded form of ``count`` values from ``first`` on, which must start a block."""
        starts, lengths = self.lengths(first), self.lengths(count)
        return tuple(array[start : start + length] for array, start, length in zip(coded, starts, lengths, strict=True))


class Halves(ValueCodec):
    """Codec for 16-bit floats."""

    number: int
    name: str

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name

    def lengths(self, count: int) -> tuple[int, ...]:
        return (2 * count,)

    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        return kernels.narrow(values, self.name, coded[0].view(np.uint16))

    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        kernels.widen(_aligned(coded[0], np.uint16), self.name, out)
        return True


class QSGD(ValueCodec):
    """Codec with a scale for each block, and a signed level of 8 or 4 bits for each value."""

    number: int
    name: str

    def __init__(self, number: int, bits: int) -> None:
        self.number, self.name, self._bits = number, f"qsgd{bits}", bits

    def lengths(self, count: int) -> tuple[int, ...]:
        return 4 * -(-count // QSGD_BLOCK), -(-count * self._bits // 8)

    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        return kernels.quantise(values, self._bits, key, 0, coded[0].view(np.float32), coded[1])

    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        return kernels.restore(_aligned(coded[0], np.float32), np.ascontiguousarray(coded[1]), self._bits, out)


class TwoLevels(ValueCodec):
    """Codec with two magnitudes for each block, and 2 bits for each value: one of the magnitudes and the sign. It is biased.

    It suits the largest of many values, whose errors are fed back (Sarfi et al., *Communication efficient LLM pre-training with
    SparseLoCo*, 2025, section 3): for the largest 2 % of normally distributed values a squared error of 0.5 % remains, where unbiased
    levels of 2 bits leave 24 to 50 %.
    """

    number: int
    name: str

    number, name = 5, "qsgd2"

    def lengths(self, count: int) -> tuple[int, ...]:
        return 8 * -(-count // QSGD_BLOCK), -(-count // 4)

    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        return kernels.to_two_levels(values, coded[0].view(np.float32), coded[1])

    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        return kernels.from_two_levels(_aligned(coded[0], np.float32), np.ascontiguousarray(coded[1]), out)


def _aligned(octets: Bytes, dtype: Any) -> NDArray[Any]:
    """Return a copy of bytes from any offset in a message as items of a dtype."""
    array = np.empty(len(octets) // np.dtype(dtype).itemsize, dtype)
    array.view(np.uint8)[:] = octets
    return array


VALUE_CODECS: dict[int, ValueCodec] = {
    codec.number: codec for codec in (Halves(1, "float16"), Halves(2, "bfloat16"), QSGD(3, 8), QSGD(4, 4), TwoLevels())
}
BIASED = [TwoLevels.name]  # only for use with error feedback


def decoded(stream: SparseStream) -> SparseStream:
    """Return a stream without the encoded form of its values."""
    if not isinstance(stream, CodedStream):
        return stream
    if stream.is_dense:
        return SparseStream._dense_form(stream._stored, stream.size, stream.lo, stream.hi, stream._present, stream.switch_density)
    return SparseStream._sparse_form(*stream._entries(), stream.size, stream.lo, stream.hi, stream.switch_density)


def quantised(stream: SparseStream, name: str, key: int) -> SparseStream:
    """Return ``stream`` with the values that its receivers will decode.

    Parameters
    ----------
    stream : SparseStream
        Of float32 or float64.
    name : str
        Name of a value codec, or "exact".
    key : int
        Seed of random numbers, in ``[0, 2**64)``.

    Raises
    ------
    StreamError
        If a value is out of range for the codec.
    """
    if name == "exact" or isinstance(stream, CodedStream) or not stream.stored:
        return stream
    codec = next(codec for codec in VALUE_CODECS.values() if codec.name == name)
    stored = np.ascontiguousarray(stream._stored)
    flat = stored.reshape(-1)
    coded = codec.empty(len(flat))
    position = codec.encode(flat, key, coded)
    if position >= 0:
        entry = position // (stream.width or 1)
        index = entry + stream.lo if stream.is_dense else int(stream._entries()[0][entry])
        raise StreamError(
            f"the value {float(flat[position])!r} at index {index} is beyond what value_codec={name!r} can hold: scale the values, or "
            "leave them exact"
        )
    values = memory.empty(stored.shape, stored.dtype)
    codec.decode(coded, values.reshape(-1))
    return CodedStream.of(stream, values, codec, coded)
