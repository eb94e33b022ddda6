"""Compiled kernels for index sets and dense arrays as bitmaps, the lowest bit of a byte first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, is_list, is_table, word_at
from sparseallreduce.streams.kernels.compiled.signatures import BYTES, BYTES_IN, Kernel
from sparseallreduce.streams.kernels.contract import ABSENT, MALFORMED, Array, Indices, Values
from sparseallreduce.streams.kernels.intrinsics import count_bits, lowest_bit, move, present_of_64, select, store_word

__all__ = ["KERNELS"]

STRIDE = 8  # positions that are written for each word whether or not it has as many, which avoids mispredicted branches


@kernel
def encode(indices: Indices, lo: Any, extent: Any, out: Array) -> Any:
    """Set the bit of each index.

    The current word is written at each step, so that no step waits for memory or depends on whether a word is complete.
    """
    count, length = U(indices.shape[0]), U(out.shape[0])
    if not (is_list(indices) and is_list(out)) or length != (extent >> U(3)) + U((extent & U(7)) != U(0)):
        return MALFORMED
    for i in range(length):
        out[i] = 0
    whole, n, word, before, wrong = length & ~U(7), U(0), U(0), ~U(0), U(0)
    while n < count:
        place = U(indices[n]) - lo
        if place >> U(3) >= whole:
            break
        bit = U(1) << (place & U(63))
        word = select((place ^ before) >> U(6) == U(0), word | bit, bit)
        store_word(out, (place >> U(6)) << U(3), word)
        wrong |= U(place <= before) & U(n > U(0))
        before = place
        n += U(1)
    for i in range(n, count):
        place = U(indices[i]) - lo
        if place >= extent or (i > U(0) and place <= before):
            return MALFORMED
        out[place >> U(3)] |= U(1) << (place & U(7))
        before = place
    return MALFORMED if wrong else 0


@kernel
def decode(bits: Array, lo: Any, extent: Any, out: Indices) -> Any:
    """Write the positions of the set bits; there must be exactly ``len(out)``, and none beyond ``extent``."""
    length, room, n = U(bits.shape[0]), U(out.shape[0]), U(0)
    if not (is_list(bits) and is_list(out)) or length != (extent >> U(3)) + U((extent & U(7)) != U(0)):
        return MALFORMED
    for at in range(U(0), length, U(8)):
        word = word_at(bits, at, length)
        ones, first = count_bits(word), lo + (at << U(3))
        if ones > room - n or (at + U(8) >= length and _beyond(word, at, extent)):
            return ABSENT
        if n + (ones | U(STRIDE - 1)) < room:
            for i in range(n, n + ones, U(STRIDE)):
                for j in range(i, i + U(STRIDE)):
                    out[j] = first + lowest_bit(word)
                    word &= word - U(1)
        else:
            for i in range(n, n + ones):
                out[i] = first + lowest_bit(word)
                word &= word - U(1)
        n += ones
    return 0 if n == room else ABSENT


@inlined
def _beyond(word: Any, at: Any, extent: Any) -> Any:
    """Return True if the last word has bits set beyond the last position."""
    places = extent - (at << U(3))
    return places < U(64) and word >> places != U(0)


@inlined
def _store(octets: Array, at: Any, length: Any, word: Any) -> None:
    """Write eight bytes, or those before the end of the array."""
    if at + U(8) <= length:
        store_word(octets, at, word)
    else:
        for i in range(at, length):
            octets[i] = (word >> ((i - at) << U(3))) & U(255)


@kernel
def encode_nonzero(dense: Values, mask: Any, bits: Array, out: Values) -> Any:
    """Set the bits of the non-zero elements, count them, and write those that fit."""
    size, room, length, n = U(dense.shape[0]), U(out.shape[0]), U(bits.shape[0]), U(0)
    if not (is_list(dense) and is_list(bits) and is_list(out)) or length != (size + U(7)) >> U(3):
        return MALFORMED
    whole = size & ~U(63)
    for start in range(U(0), size, U(64)):
        if start < whole:
            present = present_of_64(dense, start, mask)
        else:
            present = U(0)
            for i in range(start, size):
                present |= U(dense[i] != 0) << (i - start)
        _store(bits, start >> U(3), length, present)
        count = count_bits(present)
        if n + (count | U(STRIDE - 1)) < room and start < whole:
            for i in range(n, n + count, U(STRIDE)):
                for j in range(i, i + U(STRIDE)):
                    out[j] = dense[start + (lowest_bit(present) & U(63))]
                    present &= present - U(1)
        elif n + count <= room:
            for j in range(n, n + count):
                out[j] = dense[start + lowest_bit(present)]
                present &= present - U(1)
        n += count
    return np.int64(n)


@kernel
def encode_nonzero_rows(dense: Values, mask: Any, bits: Array, out: Values) -> Any:
    """Set the bits of the rows with a non-zero element, count them, and write those that fit."""
    size, width, room, length, n = U(dense.shape[0]), U(dense.shape[1]), U(out.shape[0]), U(bits.shape[0]), U(0)
    if not (is_table(dense) and is_list(bits) and is_table(out)) or length != (size + U(7)) >> U(3) or U(out.shape[1]) != width:
        return MALFORMED
    for start in range(U(0), size, U(64)):
        present = U(0)
        for i in range(start, min(start + U(64), size)):
            found = mask & ~mask
            for k in range(width):
                found |= dense[i, k]
            present |= U(found != 0) << (i - start)
            if found:
                if n < room:
                    move(out, n * width, dense, i * width, width)
                n += U(1)
        _store(bits, start >> U(3), length, present)
    return np.int64(n)


@kernel
def decode_nonzero(bits: Array, values: Values, out: Values) -> Any:
    """Write values to the positions of the set bits, and zeros elsewhere."""
    size, count, length, n = U(out.shape[0]), U(values.shape[0]), U(bits.shape[0]), U(0)
    if not (is_list(bits) and is_list(values) and is_list(out)) or length != (size + U(7)) >> U(3):
        return MALFORMED
    for at in range(U(0), length, U(8)):
        word, start = word_at(bits, at, length), at << U(3)
        ones = count_bits(word)
        if ones > count - n or (at + U(8) >= length and _beyond(word, at, size)):
            return ABSENT
        for i in range(start, min(start + U(64), size)):
            out[i] = 0
        for j in range(n, n + ones):
            out[start + lowest_bit(word)] = values[j]
            word &= word - U(1)
        n += ones
    return 0 if n == count else ABSENT


@kernel
def decode_nonzero_rows(bits: Array, values: Values, out: Values) -> Any:
    """Write rows of values to the positions of the set bits, and zeros elsewhere."""
    size, width, count, length, n = U(out.shape[0]), U(out.shape[1]), U(values.shape[0]), U(bits.shape[0]), U(0)
    if not (is_list(bits) and is_table(values) and is_table(out)) or length != (size + U(7)) >> U(3) or U(values.shape[1]) != width:
        return MALFORMED
    for at in range(U(0), length, U(8)):
        word, start = word_at(bits, at, length), at << U(3)
        ones = count_bits(word)
        if ones > count - n or (at + U(8) >= length and _beyond(word, at, size)):
            return ABSENT
        for i in range(start, min(start + U(64), size)):
            for k in range(width):
                out[i, k] = 0
        for j in range(n, n + ones):
            move(out, (start + lowest_bit(word)) * width, values, j * width, width)
            word &= word - U(1)
        n += ones
    return 0 if n == count else ABSENT


_WORD = types.uint64
KERNELS = {
    "encode": Kernel((encode,), lambda of: (of.indices, _WORD, _WORD, BYTES)),
    "decode": Kernel((decode,), lambda of: (BYTES_IN, _WORD, _WORD, of.iout)),
    "encode_nonzero": Kernel((encode_nonzero, encode_nonzero_rows), lambda of: (of.values, of.value, BYTES, of.vout)),
    "decode_nonzero": Kernel((decode_nonzero, decode_nonzero_rows), lambda of: (BYTES_IN, of.values, of.vout)),
}
