"""Values in fewer bits, in plain NumPy.

QSGD (Alistarh et al., NIPS 2017) in the form used here: a block of ``QSGD_BLOCK`` values has a float32 ``scale``, its largest magnitude
rounded up. A value has the level ``floor(|value| / scale * s + u)`` with its sign, where ``s`` is 127 for levels of 8 bits and 7 for levels
of 4, and ``u`` in [0, 1) is drawn from the key and the position in the message. A level of 8 bits is a byte in two's complement. For levels
of 4 bits, the first half of a block is in the low halves of its bytes, the second half in the high ones.

Two levels: a block has two float32 magnitudes, and a value is encoded as the nearer one and its sign. The magnitudes are those of Lloyd's
algorithm (1982), started from the mean magnitude: each is the mean of the magnitudes on its side of their midpoint. Magnitudes are counted
in integer parts of the largest, so that sums do not depend on their order. The low bit of a code selects the magnitude, the high bit is the
sign; the four quarters of a block are in the bits of its bytes, from the lowest on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.contract import (
    ABSENT,
    LEVEL_PARTS,
    LEVEL_ROUNDS,
    LONG_FLOATS,
    QSGD_BLOCK,
    QSGD_LEVELS,
    SHORT_FLOATS,
    Array,
    Values,
)
from sparseallreduce.streams.kernels.reference.arrays import split_mix
from sparseallreduce.streams.kernels.reference.selection import GROUP, MIX

__all__ = ["from_two_levels", "narrow", "quantise", "restore", "to_two_levels", "widen"]

_QUARTERS = np.array([[0], [2], [4], [6]], np.uint8)  # where the codes of each quarter of a block lie in its bytes


def narrow(values: Values, form: str, out: Array) -> int:
    """Round to nearest, ties to even."""
    mantissa, bias = SHORT_FLOATS[form]
    with np.errstate(all="ignore"):
        sizes = np.abs(values.astype(np.float64))
        exponents = np.maximum(np.frexp(sizes)[1] - 1, 1 - bias) - mantissa
        rounded = np.where(np.isfinite(sizes), np.ldexp(np.rint(np.ldexp(sizes, -exponents)), exponents), sizes)
        if form == "float16":
            halves = rounded.astype(np.float16).view(np.uint16)
        else:
            halves = (rounded.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    infinity = (2 * bias + 1) << mantissa
    overflows = np.flatnonzero((halves == infinity) & np.isfinite(sizes))
    halves = np.where(np.isnan(values), np.uint16(infinity | 1 << (mantissa - 1)), halves)
    out[:] = halves | (np.signbit(values).astype(np.uint16) << np.uint16(15))
    return int(overflows[0]) if len(overflows) else ABSENT


def widen(halves: Array, form: str, out: Values) -> None:
    """Convert as NumPy does, except for NaN, in which processors set a bit."""
    mantissa, bias = SHORT_FLOATS[form]
    with np.errstate(all="ignore"):
        out[:] = halves.view(np.float16) if form == "float16" else (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    bits = out.view(f"u{out.itemsize}")
    wide, wide_bias = LONG_FLOATS[out.dtype]
    nan = (halves & np.uint16(0x7FFF)) > (2 * bias + 1) << mantissa
    payload = halves[nan].astype(bits.dtype) & bits.dtype.type((1 << mantissa) - 1)
    sign = halves[nan].astype(bits.dtype) >> bits.dtype.type(15) << bits.dtype.type(8 * out.itemsize - 1)
    bits[nan] = payload << bits.dtype.type(wide - mantissa) | sign | bits.dtype.type((2 * wide_bias + 1) << wide)


def quantise(values: Values, bits: int, key: int, start: int, scales: Values, codes: Array) -> int:
    """Encode all blocks."""
    levels, at = QSGD_LEVELS[bits], 0
    for block, begin in enumerate(range(0, len(values), QSGD_BLOCK)):
        part = values[begin : begin + QSGD_BLOCK].astype(np.float64)
        singles = _rounded_up(part)
        unfit = np.flatnonzero(~(singles < np.inf))
        if len(unfit):
            return begin + int(unfit[0])
        scale = scales[block] = singles.max()
        scaled = np.abs(part) * (levels / float(scale) if scale > 0 else 0.0)
        drawn = np.floor(scaled) + (_uniform(start + begin, len(part), key) < scaled - np.floor(scaled))
        signed = np.where(part < 0, -1, 1) * np.minimum(drawn, levels).astype(np.int64)
        written = _coded(signed, bits)
        codes[at : at + len(written)] = written
        at += len(written)
    return ABSENT


def _coded(levels: NDArray[np.int64], bits: int) -> Array:
    codes: Array = (levels & (2**bits - 1)).astype(np.uint8)
    if bits == 8:
        return codes
    middle = (len(codes) + 1) // 2
    codes[: len(codes) - middle] |= codes[middle:] << np.uint8(4)
    return codes[:middle]


def _uniform(start: int, count: int, key: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position, from a hash of its group and its position there."""
    places = np.arange(count, dtype=np.uint64) + np.uint64(start)
    within = places % np.uint64(GROUP)
    hashed = split_mix(split_mix(np.array([key], np.uint64)) + (places - within))
    number = within.astype(np.uint32) + hashed.astype(np.uint32)
    number = (number ^ (number >> np.uint32(16))) * MIX[0]
    number = (number ^ (number >> np.uint32(15))) + (hashed >> np.uint64(32)).astype(np.uint32)
    number *= MIX[1]
    number ^= number >> np.uint32(16)
    return number.astype(np.float64) * 2.0**-32


def restore(scales: Values, codes: Array, bits: int, out: Values) -> bool:
    """Decode levels."""
    levels, at = QSGD_LEVELS[bits], 0
    for block, begin in enumerate(range(0, len(out), QSGD_BLOCK)):
        n, scale = min(QSGD_BLOCK, len(out) - begin), float(scales[block])
        written = codes[at : at + (n if bits == 8 else (n + 1) // 2)]
        at += len(written)
        unsigned = written if bits == 8 else np.concatenate([written & np.uint8(15), written >> np.uint8(4)])
        low = 2 ** (bits - 1)
        signed = (unsigned.astype(np.int64) ^ low) - low
        if not 0 <= scale < np.inf or (signed[:n] == -low).any() or signed[n:].any():
            return False
        with np.errstate(all="ignore"):
            out[begin : begin + n] = scale * signed[:n].astype(np.float64) / levels
    return True


def to_two_levels(values: Values, scales: Values, codes: Array) -> int:
    """Encode all blocks."""
    for block, begin in enumerate(range(0, len(values), QSGD_BLOCK)):
        part = values[begin : begin + QSGD_BLOCK].astype(np.float64)
        singles = _rounded_up(part)
        unfit = np.flatnonzero(~(singles < np.inf))
        if len(unfit):
            return begin + int(unfit[0])
        largest = float(singles.max())
        parts = (np.abs(part) * (LEVEL_PARTS / largest if largest > 0 else 0.0) + 0.5).astype(np.int64)
        middle, low, high = int(parts.sum()) // len(parts), 0.0, 0.0
        for _ in range(LEVEL_ROUNDS):
            is_low = parts <= middle
            low = float(parts[is_low].sum()) / np.count_nonzero(is_low)
            high = float(parts[~is_low].sum()) / np.count_nonzero(~is_low) if not is_low.all() else low
            middle = int((low + high) / 2)
        scales[2 * block : 2 * block + 2] = low / LEVEL_PARTS * largest, high / LEVEL_PARTS * largest
        quarter, padded = (len(part) + 3) // 4, np.zeros(4 * ((len(part) + 3) // 4), np.uint8)
        padded[: len(part)] = (parts > middle) | (part < 0).astype(np.uint8) << np.uint8(1)
        codes[begin // 4 : begin // 4 + quarter] = np.bitwise_or.reduce(padded.reshape(4, quarter) << _QUARTERS, axis=0)
    return ABSENT


def from_two_levels(scales: Values, codes: Array, out: Values) -> bool:
    """Decode codes."""
    for block, begin in enumerate(range(0, len(out), QSGD_BLOCK)):
        n, (low, high) = min(QSGD_BLOCK, len(out) - begin), scales[2 * block : 2 * block + 2]
        written = codes[begin // 4 : begin // 4 + (n + 3) // 4]
        unpacked = ((written[np.newaxis] >> _QUARTERS) & np.uint8(3)).reshape(-1)
        if not 0 <= low <= high < np.inf or unpacked[n:].any():
            return False
        levels = np.where(unpacked[:n] & 1, high, low)
        out[begin : begin + n] = np.where(unpacked[:n] & 2, -levels, levels)
    return True


def _rounded_up(part: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return magnitudes as float32, rounded up; infinity if out of range."""
    with np.errstate(all="ignore"):
        singles = np.abs(part).astype(np.float32)
        return np.where(singles < np.abs(part), np.nextafter(singles, np.float32(np.inf)), singles)
