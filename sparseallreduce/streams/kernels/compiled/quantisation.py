"""Compiled kernels that encode values in fewer bits: 16-bit floats, random levels (QSGD), and two levels."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, is_list, split_mix
from sparseallreduce.streams.kernels.compiled.signatures import BYTES, BYTES_IN, Kernel, array_type
from sparseallreduce.streams.kernels.contract import ABSENT, LEVEL_PARTS, LEVEL_ROUNDS, MALFORMED, QSGD_BLOCK, Array, Values
from sparseallreduce.streams.kernels.intrinsics import GROUP, as_bits, as_float

__all__ = ["KERNELS"]

CHUNK = 4096  # values converted before an overflow is searched for
DOUBLE_MANTISSA, DOUBLE_BIAS = 52, 1023


@kernel
def narrow(values: Values, wide_mantissa: Any, wide_bias: Any, mantissa: Any, bias: Any, out: Array) -> Any:
    """Round to 16-bit floats, to nearest, ties to even; return the position of the first finite value that would become infinite."""
    count = U(values.shape[0])
    if U(out.shape[0]) != count or not (is_list(values) and is_list(out)):
        return MALFORMED
    shift, offset = wide_mantissa - mantissa, (wide_bias - bias) << mantissa
    wide_infinity, infinity = (U(2) * wide_bias + U(1)) << wide_mantissa, (U(2) * bias + U(1)) << mantissa
    half, magnitudes = (U(1) << (shift - U(1))) - U(1), wide_infinity | ((U(1) << wide_mantissa) - U(1))
    sign, to_sign = magnitudes + U(1), U(16) if wide_mantissa < U(DOUBLE_MANTISSA) else U(48)
    normal = U(0) if bias == wide_bias else (wide_bias - bias + U(1)) << wide_mantissa  # smaller ones lose bits of their mantissa
    # A sum with ``magic`` rounds to multiples of the smallest number in 16 bits, of which there are ``unit`` in 1.
    magic = as_float((U(DOUBLE_BIAS + DOUBLE_MANTISSA + 1) - bias - mantissa) << U(DOUBLE_MANTISSA))
    unit = as_float((U(DOUBLE_BIAS - 1) + bias + mantissa) << U(DOUBLE_MANTISSA))
    for start in range(U(0), count, U(CHUNK)):
        end, wrong = min(start + U(CHUNK), count), U(0)
        for i in range(start, end):
            bits = U(as_bits(values[i]))
            size = bits & magnitudes
            short = ((size + half + ((size >> shift) & U(1))) >> shift) - offset
            small = np.float64(abs(values[i])) if size < normal else 0.0
            short = U(np.int64(((small + magic) - magic) * unit)) if size < normal else short
            wrong |= U(short >= infinity) & U(size < wide_infinity)
            short = infinity if size >= wide_infinity else min(short, infinity)
            short |= (U(1) << (mantissa - U(1))) if size > wide_infinity else U(0)
            out[i] = short | ((bits & sign) >> to_sign)
        if wrong:
            for i in range(start, end):
                if (U(out[i]) & U(0x7FFF)) == infinity and (U(as_bits(values[i])) & magnitudes) < wide_infinity:
                    return np.int64(i)
    return ABSENT


@kernel
def widen(halves: Array, wide_mantissa: Any, wide_bias: Any, mantissa: Any, bias: Any, out: Values) -> Any:
    """Convert 16-bit floats to longer floats."""
    count = U(halves.shape[0])
    if U(out.shape[0]) != count or not (is_list(halves) and is_list(out)):
        return MALFORMED
    shift, offset = wide_mantissa - mantissa, (wide_bias - bias) << wide_mantissa
    infinity, to_sign = (U(2) * bias + U(1)) << mantissa, U(16) if wide_mantissa < U(DOUBLE_MANTISSA) else U(48)
    normal = U(0) if bias == wide_bias else U(1) << mantissa
    smallest = as_float((U(DOUBLE_BIAS + 1) - bias - mantissa) << U(DOUBLE_MANTISSA))
    from_double = U(DOUBLE_MANTISSA) - wide_mantissa, (U(DOUBLE_BIAS) - wide_bias) << wide_mantissa
    for i in range(count):
        size = U(halves[i]) & U(0x7FFF)
        wide = (size << shift) + offset
        wide += offset if size >= infinity else U(0)
        small = (as_bits(np.float64(np.int64(size)) * smallest) >> from_double[0]) - from_double[1]
        small = small if size > U(0) else U(0)
        wide = small if size < normal else wide
        out[i] = wide | ((U(halves[i]) & U(0x8000)) << to_sign)
    return 0


@kernel
def quantise(values: Values, start: Any, key: Any, bits: Any, scales: Values, codes: Array) -> Any:
    """Encode all blocks; return the position of the first value that cannot be encoded."""
    count, at, whole = U(values.shape[0]), U(0), bits == U(8)
    blocks = (count + U(QSGD_BLOCK - 1)) // U(QSGD_BLOCK)
    nbytes = count if whole else (count + U(1)) >> U(1)
    if U(scales.shape[0]) != blocks or U(codes.shape[0]) != nbytes or not (is_list(values) and is_list(scales) and is_list(codes)):
        return MALFORMED
    seed, levels = split_mix(key), np.int64(127) if whole else np.int64(7)
    for block in range(blocks):
        begin = block * U(QSGD_BLOCK)
        end = min(begin + U(QSGD_BLOCK), count)
        scale = _scale(values, begin, end)
        if not scale < np.inf:
            return np.int64(_unfit(values, begin, end))
        scales[block] = scale
        unit = np.float64(levels) / np.float64(scale) if scale > 0 else 0.0
        if whole:
            _draw(values, begin, end, start, seed, unit, levels, U(0), U(255), U(0), codes, at)
            at += end - begin
        else:
            middle = begin + ((end - begin + U(1)) >> U(1))
            _draw(values, begin, middle, start, seed, unit, levels, U(0), U(15), U(0), codes, at)
            _draw(values, middle, end, start, seed, unit, levels, U(15), U(15), U(4), codes, at)
            at += middle - begin
    return ABSENT


@inlined
def _scale(values: Values, begin: Any, end: Any) -> Any:
    """Return the largest magnitude as a float32, rounded up; infinity or NaN if a value is beyond float32."""
    largest = as_bits(values[begin]) & U(0)
    sign = U(1) << U(8 * values.itemsize - 1)
    for i in range(begin, end):
        largest = max(largest, U(as_bits(values[i])) & (sign - U(1)))
    if values.itemsize == 4:
        return as_float(np.uint32(largest))
    exact = as_float(U(largest))
    scale = np.float32(exact)
    if np.float64(scale) < exact:
        scale = as_float(np.uint32(as_bits(scale) + np.uint32(1)))
    return scale


@inlined
def _unfit(values: Values, begin: Any, end: Any) -> Any:
    """Return the position of the first value beyond float32."""
    for i in range(begin, end):
        if not _scale(values, i, i + U(1)) < np.inf:
            return i
    return begin


@inlined
def _draw(
    values: Values,
    begin: Any,
    end: Any,
    start: Any,
    seed: Any,
    unit: Any,
    levels: Any,
    kept: Any,
    mask: Any,
    shift: Any,
    codes: Array,
    at: Any,
) -> None:
    """Write a level for each value, drawn with a random number that depends on the seed and the position in the message.

    A group of positions shares a 64-bit hash, whose multiplications few processors have as vector instructions.
    """
    group = begin
    while group < end:
        place = start + group
        within = place & U(GROUP - 1)
        upto = min(group + U(GROUP) - within, end)
        hashed = split_mix(seed + (place - within))
        low, high = np.uint32(hashed & U(0xFFFFFFFF)), np.uint32(hashed >> U(32))
        first = np.uint32(within)
        for j in range(U(0), upto - group):
            number = np.uint32(np.uint32(first + np.uint32(j)) + low)
            number = np.uint32(np.uint32(number ^ np.uint32(number >> np.uint32(16))) * np.uint32(0x7FEB352D))
            number = np.uint32(np.uint32(number ^ np.uint32(number >> np.uint32(15))) + high)
            number = np.uint32(number * np.uint32(0x846CA68B))
            number = np.uint32(number ^ np.uint32(number >> np.uint32(16)))
            value = np.float64(values[group + j])
            scaled = abs(value) * unit
            level = np.int64(scaled)
            level += np.int64(np.float64(number) * 2.0**-32 < scaled - np.float64(level))
            level = min(level, levels)
            level = -level if value < 0 else level
            to = at + (group - begin) + j
            codes[to] = (U(codes[to]) & kept) | ((U(level) & mask) << shift)
        group = upto


@kernel
def restore(scales: Values, codes: Array, bits: Any, out: Values) -> Any:
    """Write ``scale * level / levels``, rounded to a double and then to the dtype; return whether all scales and levels are valid."""
    count, at, whole = U(out.shape[0]), U(0), bits == U(8)
    blocks = (count + U(QSGD_BLOCK - 1)) // U(QSGD_BLOCK)
    nbytes = count if whole else (count + U(1)) >> U(1)
    if U(scales.shape[0]) != blocks or U(codes.shape[0]) != nbytes or not (is_list(scales) and is_list(codes) and is_list(out)):
        return MALFORMED
    for block in range(blocks):
        begin = block * U(QSGD_BLOCK)
        end = min(begin + U(QSGD_BLOCK), count)
        scale = scales[block]
        if not (scale >= 0 and scale < np.inf):
            return ABSENT
        if whole:
            wrong = _multiply(codes, at, begin, end, np.float64(scale), 127.0, U(0), U(128), out)
            at += end - begin
        else:
            middle = begin + ((end - begin + U(1)) >> U(1))
            wrong = _multiply(codes, at, begin, middle, np.float64(scale), 7.0, U(0), U(8), out)
            wrong |= _multiply(codes, at, middle, end, np.float64(scale), 7.0, U(4), U(8), out)
            if (end - begin) & U(1):
                wrong |= U(codes[at + (middle - begin) - U(1)] > 15)
            at += middle - begin
        if wrong:
            return ABSENT
    return 0


@inlined
def _multiply(codes: Array, at: Any, begin: Any, end: Any, scale: Any, levels: Any, shift: Any, sign: Any, out: Values) -> Any:
    """Write the values of levels; return whether one is below the lowest."""
    wrong, mask = U(0), U(2) * sign - U(1)
    for i in range(begin, end):
        code = (U(codes[at + (i - begin)]) >> shift) & mask
        wrong |= U(code == sign)
        level = np.int32(code ^ sign) - np.int32(sign)
        out[i] = scale * np.float64(level) / levels
    return wrong


@kernel
def to_two_levels(values: Values, scales: Values, codes: Array) -> Any:
    """Encode all blocks; return the position of the first value that cannot be encoded."""
    count, at = U(values.shape[0]), U(0)
    blocks = (count + U(QSGD_BLOCK - 1)) // U(QSGD_BLOCK)
    fits = U(scales.shape[0]) == U(2) * blocks and U(codes.shape[0]) == (count + U(3)) >> U(2)
    if not (fits and is_list(values) and is_list(scales) and is_list(codes)):
        return MALFORMED
    parts, marks = np.empty(QSGD_BLOCK, np.int32), np.empty(QSGD_BLOCK, np.uint8)
    for block in range(blocks):
        begin = block * U(QSGD_BLOCK)
        end = min(begin + U(QSGD_BLOCK), count)
        largest = _scale(values, begin, end)
        if not largest < np.inf:
            return np.int64(_unfit(values, begin, end))
        unit = np.float64(LEVEL_PARTS) / np.float64(largest) if largest > 0 else 0.0
        n, total = end - begin, np.int32(0)
        for i in range(n):
            parts[i] = np.int32(abs(np.float64(values[begin + i])) * unit + 0.5)
            total = np.int32(total + parts[i])
        middle = np.int32(np.int64(total) // np.int64(n))
        low, high = 0.0, 0.0
        for _ in range(LEVEL_ROUNDS):
            below = few = np.int32(0)
            for i in range(n):  # in 32 bits, of which a vector has most
                is_low = parts[i] <= middle
                below = np.int32(below + (parts[i] if is_low else np.int32(0)))
                few = np.int32(few + np.int32(is_low))
            many = np.int64(n) - few  # few is at least 1: the smallest is not above the middle
            low = np.float64(below) / np.float64(few)
            high = np.float64(np.int32(total - below)) / np.float64(many) if many > 0 else low
            middle = np.int32((low + high) / 2)
        scales[U(2) * block] = low / LEVEL_PARTS * np.float64(largest)
        scales[U(2) * block + U(1)] = high / LEVEL_PARTS * np.float64(largest)
        quarter = (n + U(3)) >> U(2)
        for i in range(n):
            marks[i] = np.uint8(np.uint8(parts[i] > middle) + np.uint8(np.uint8(2) * np.uint8(values[begin + i] < 0)))
        for i in range(n, U(4) * quarter):
            marks[i] = 0
        for j in range(quarter):
            low_half = marks[j] | (marks[j + quarter] << np.uint8(2))
            codes[at + j] = low_half | (marks[j + U(2) * quarter] << np.uint8(4)) | (marks[j + U(3) * quarter] << np.uint8(6))
        at += quarter
    return ABSENT


@kernel
def from_two_levels(scales: Values, codes: Array, out: Values) -> Any:
    """Write the values of codes; return whether all scales and codes are valid."""
    count, at, wrong = U(out.shape[0]), U(0), U(0)
    blocks = (count + U(QSGD_BLOCK - 1)) // U(QSGD_BLOCK)
    fits = U(scales.shape[0]) == U(2) * blocks and U(codes.shape[0]) == (count + U(3)) >> U(2)
    if not (fits and is_list(scales) and is_list(codes) and is_list(out)):
        return MALFORMED
    for block in range(blocks):
        begin = block * U(QSGD_BLOCK)
        n = min(U(QSGD_BLOCK), count - begin)
        low, high = scales[U(2) * block], scales[U(2) * block + U(1)]
        if not (low >= 0 and high >= low and high < np.inf):
            return ABSENT
        quarter = (n + U(3)) >> U(2)
        for part in range(U(4)):
            first, last = min(part * quarter, n), min((part + U(1)) * quarter, n)
            shift = U(2) * part
            for i in range(first, last):
                code = U(codes[at + i - first]) >> shift
                level = high if code & U(1) else low
                out[begin + i] = -level if code & U(2) else level
            for i in range(max(part * quarter, n), (part + U(1)) * quarter):
                wrong |= (U(codes[at + i - part * quarter]) >> shift) & U(3)
        at += quarter
    return ABSENT if wrong else 0


_HALVES, _HALVES_IN = array_type(np.uint16, 1, False), array_type(np.uint16, 1, True)
_SCALES, _SCALES_IN = array_type(np.float32, 1, False), array_type(np.float32, 1, True)
_WORD = types.uint64
KERNELS = {
    "narrow": Kernel((narrow,), lambda of: (of.values, _WORD, _WORD, _WORD, _WORD, _HALVES)),
    "widen": Kernel((widen,), lambda of: (_HALVES_IN, _WORD, _WORD, _WORD, _WORD, of.vout)),
    "quantise": Kernel((quantise,), lambda of: (of.values, _WORD, _WORD, _WORD, _SCALES, BYTES)),
    "to_two_levels": Kernel((to_two_levels,), lambda of: (of.values, _SCALES, BYTES)),
    "from_two_levels": Kernel((from_two_levels,), lambda of: (_SCALES_IN, BYTES_IN, of.vout)),
    "restore": Kernel((restore,), lambda of: (_SCALES_IN, BYTES_IN, _WORD, of.vout)),
}
