"""Values in fewer bytes, for those who accept loss: floats of 16 bits, or stochastic levels (QSGD, the thesis's low-precision extension).

A stream is quantised once, by :class:`~sparseallreduce.algorithms.steps.Quantise`, and has then the values that receivers decode, so that
whoever sends a stream and whoever receives it add the same. Who hands a stream on sends it in the form in which it came.
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

EXACT = 0  # the number of values as they are


class CodedStream(SparseStream):
    """A stream whose values are those of a coded form, which it keeps."""

    __slots__ = ("codec", "coded")

    codec: ValueCodec
    coded: tuple[NDArray[Any], ...]  # of all values, in order

    @classmethod
    def of(cls, stream: SparseStream, values: NDArray[Any], codec: ValueCodec, coded: tuple[NDArray[Any], ...]) -> CodedStream:
        """A stream like another, with these values, which nobody may write to: the coded form would be that of others."""
        mark_read_only(values)
        form: Any
        if stream.is_dense:
            form = cls._dense_form(values, stream.size, stream.lo, stream.hi, stream._present, stream.switch_density)
        else:
            form = cls._sparse_form(stream._entries()[0], values, stream.size, stream.lo, stream.hi, stream.switch_density)
        form.codec, form.coded = codec, coded
        return form  # type: ignore[no-any-return]


class ValueCodec(ABC):
    """How values are written; the coded form of any number of them is a few arrays of bytes, which can be cut at multiples of a block."""

    number: int
    name: str

    @abstractmethod
    def lengths(self, count: int) -> tuple[int, ...]:
        """Bytes of each array of the coded form of so many values."""

    @abstractmethod
    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        """Fill the coded form; the position of the first value that it cannot hold, -1 if there is none."""

    @abstractmethod
    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        """Fill ``out`` with the values; whether this is the coded form of any."""

    def empty(self, count: int) -> tuple[Bytes, ...]:
        """Room for the coded form."""
        return tuple(memory.empty(length, np.uint8) for length in self.lengths(count))

    def cut(self, coded: tuple[Bytes, ...], first: int, count: int) -> tuple[Bytes, ...]:
        """That of values from the ``first`` on, which begins a block."""
        starts, lengths = self.lengths(first), self.lengths(count)
        return tuple(array[start : start + length] for array, start, length in zip(coded, starts, lengths, strict=True))


class Halves(ValueCodec):
    """Floats of 16 bits."""

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
    """A scale for each block, and a signed level of 8 or 4 bits for each value."""

    def __init__(self, number: int, bits: int) -> None:
        self.number, self.name, self._bits = number, f"qsgd{bits}", bits

    def lengths(self, count: int) -> tuple[int, ...]:
        return 4 * -(-count // QSGD_BLOCK), -(-count * self._bits // 8)

    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        return kernels.quantise(values, self._bits, key, 0, coded[0].view(np.float32), coded[1])

    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        return kernels.restore(_aligned(coded[0], np.float32), np.ascontiguousarray(coded[1]), self._bits, out)


class TwoLevels(ValueCodec):
    """Two magnitudes for each block, and 2 bits for each value: which of them, and the sign. Values are not right on the mean.

    For the largest of many values, whose errors are fed back (Sarfi et al., *Communication efficient LLM pre-training with SparseLoCo*,
    2025, section 3): of the largest 2 % of normal values a squared error of 0.5 % remains, where levels of 2 bits that are right on the
    mean leave 24 to 50 %.
    """

    number, name = 5, "qsgd2"

    def lengths(self, count: int) -> tuple[int, ...]:
        return 8 * -(-count // QSGD_BLOCK), -(-count // 4)

    def encode(self, values: NDArray[Any], key: int, coded: tuple[Bytes, ...]) -> int:
        return kernels.to_two_levels(values, coded[0].view(np.float32), coded[1])

    def decode(self, coded: tuple[Bytes, ...], out: NDArray[Any]) -> bool:
        return kernels.from_two_levels(_aligned(coded[0], np.float32), np.ascontiguousarray(coded[1]), out)


def _aligned(octets: Bytes, dtype: Any) -> NDArray[Any]:
    """Bytes from anywhere in a message as items."""
    array = np.empty(len(octets) // np.dtype(dtype).itemsize, dtype)
    array.view(np.uint8)[:] = octets
    return array


VALUE_CODECS: dict[int, ValueCodec] = {
    codec.number: codec for codec in (Halves(1, "float16"), Halves(2, "bfloat16"), QSGD(3, 8), QSGD(4, 4), TwoLevels())
}
BIASED = (TwoLevels.name,)  # for those alone who feed errors back


def decoded(stream: SparseStream) -> SparseStream:
    """A stream without the coded form of its values, if it has one."""
    if not isinstance(stream, CodedStream):
        return stream
    if stream.is_dense:
        return SparseStream._dense_form(stream._stored, stream.size, stream.lo, stream.hi, stream._present, stream.switch_density)
    return SparseStream._sparse_form(*stream._entries(), stream.size, stream.lo, stream.hi, stream.switch_density)


def quantised(stream: SparseStream, name: str, key: int) -> SparseStream:
    """``stream`` as its receivers will know it.

    Parameters
    ----------
    stream : SparseStream
        Of float32 or float64.
    name : str
        Of a value codec, or "exact".
    key : int
        What is drawn, in ``[0, 2**64)``.

    Raises
    ------
    StreamError
        If a value is beyond what the codec can hold.
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
