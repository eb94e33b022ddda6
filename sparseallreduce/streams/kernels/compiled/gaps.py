"""Compiled kernels for gaps between sorted indices as Rice codes; the reference module of the same name describes the format."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, is_list, word_at
from sparseallreduce.streams.kernels.compiled.signatures import BYTES, BYTES_IN, Kernel
from sparseallreduce.streams.kernels.contract import (
    ABSENT,
    GAPS_BLOCK,
    GAPS_HEADER,
    GAPS_LONGEST,
    GAPS_LOW,
    GAPS_PLACE,
    GAPS_RUN,
    MALFORMED,
    Array,
    Indices,
)
from sparseallreduce.streams.kernels.intrinsics import count_bits, gap_cost, leading_zeros, load_word, lowest_bit, move, select, store_word

__all__ = ["KERNELS"]

HALF = 32  # bits of an exception's surplus that are written at a time


@kernel
def encode(indices: Indices, lo: Any, out: Array) -> Any:
    """Write all blocks, each with the parameters that make it shortest; return the number of bytes written."""
    count, at, before = U(indices.shape[0]), U(0), U(lo) - U(1)
    if not (is_list(indices) and is_list(out)):
        return MALFORMED
    for start in range(U(0), count, U(GAPS_BLOCK)):
        end = min(start + U(GAPS_BLOCK), count)
        first = U(indices[start]) - before - U(1)
        if indices[start] < lo or (start > U(0) and indices[start] <= before):
            return MALFORMED
        increasing, union = _survey(indices, start, end, first)
        if not increasing:
            return MALFORMED
        last = U(indices[end - U(1)])
        low, width = _parameters(indices, start, end, first, last, union)
        at = _write_block(indices, start, end, before, low, width, out, at)
        if at > U(out.shape[0]):
            return MALFORMED
        before = last
    return np.int64(at)


@inlined
def _survey(indices: Indices, start: Any, end: Any, first: Any) -> Any:
    """Return whether the indices of a block are increasing, and the bitwise OR of its gaps."""
    union, wrong = first, U(0)
    for i in range(start + U(1), end):
        union |= U(indices[i]) - U(indices[i - U(1)]) - U(1)
        wrong |= U(indices[i] <= indices[i - U(1)])
    return wrong == U(0), union


@inlined
def _parameters(indices: Indices, start: Any, end: Any, first: Any, last: Any, union: Any) -> Any:
    """Return the number of low bits of a gap that are written verbatim, and the bits of an exception's surplus."""
    count, longest = end - start, U(64) - leading_zeros(union)
    low = min(U(64) - leading_zeros((first + (last - indices[start])) // count), min(longest, U(GAPS_LOW)))
    best = _cost(indices, start, end, first, low, longest)
    while low > U(0):
        cost = _cost(indices, start, end, first, low - U(1), longest)
        if cost >= best:
            break
        low, best = low - U(1), cost
    if low == U(0) and _jumps(indices, start, end, first) * (U(GAPS_PLACE) + longest) < best:
        return U(GAPS_RUN), longest
    plain = min(longest, U(GAPS_LOW))  # gaps_bound depends on this choice
    if _cost(indices, start, end, first, plain, longest) < best:
        low = plain
    return low, longest - low


@inlined
def _cost(indices: Indices, start: Any, end: Any, first: Any, low: Any, longest: Any) -> Any:
    """Return the size of a block in bits, without its header."""
    exception = U(GAPS_PLACE) + (longest - low)
    limit = min(exception, U(GAPS_LONGEST))
    high, total = first >> low, np.uint32(0)
    for i in range(start + U(1), end):
        total = np.uint32(total + gap_cost(indices, i, low, limit, exception))
    return U(total) + (high if high <= limit else exception) + (end - start) * (low + U(1))


@inlined
def _jumps(indices: Indices, start: Any, end: Any, first: Any) -> Any:
    """Return the number of non-zero gaps."""
    jumps = U(first != U(0))
    for i in range(start + U(1), end):
        jumps += U(U(indices[i]) - U(indices[i - U(1)]) != U(1))
    return jumps


@inlined
def _write_block(indices: Indices, start: Any, end: Any, before: Any, low: Any, width: Any, out: Array, at: Any) -> Any:
    """Write header, low bits, high parts and exceptions; return the end, or a position beyond the array if there is no room.

    Whole words are written, and later data overwrites their unused bits.
    """
    header, at, exceptions, octets, room = at, at + U(GAPS_HEADER), end - start, U(0), U(out.shape[0])
    lows = U(0) if low == U(GAPS_RUN) else ((end - start) * low + U(7)) >> U(3)
    if at + lows + U(16) > room:
        return room + U(1)
    if low == U(GAPS_RUN):
        at, exceptions = _write_exceptions(indices, start, end, before, U(0), width, U(0), out, at)
    else:
        limit = min(U(GAPS_PLACE) + width, U(GAPS_LONGEST))
        at, octets, exceptions = _write_gaps(indices, start, end, before, low, limit, out, at)
        if exceptions:
            at, exceptions = _write_exceptions(indices, start, end, before, low, width, limit, out, at)
    behind = load_word(out, header) & (U(0xFFFF) << U(48))
    store_word(out, header, low | (width << U(8)) | (exceptions << U(16)) | (octets << U(32)) | behind)
    return at


@inlined
def _write_gaps(indices: Indices, start: Any, end: Any, before: Any, low: Any, limit: Any, out: Array, at: Any) -> Any:
    """Write the low bits of all gaps, then the high part of each as that many zeros and a one; exceptions have no high part.

    Two gaps are written at a time. The high parts leave room for the last word of low bits, and are moved at the end. If indices change
    during the call, the high parts may not fit and then overwrite each other.
    """
    mask, highs = (U(1) << low) - U(1), at + (((end - start) * low + U(7)) >> U(3))
    together, last = low <= U(28), U(out.shape[0]) - U(8)
    held, fill, exceptions = U(0), U(0), U(0)
    ones, place, to = U(0), U(0), highs + U(8)
    for i in range(start, end, U(2)):
        index = U(indices[i])
        gap = index - before - U(1)
        other, before, second = U(0), index, U(0)
        if i + U(1) < end:
            before, second = U(indices[i + U(1)]), U(1)
            other = before - index - U(1)
        if together:
            held |= ((gap & mask) | ((other & mask) << low)) << fill
            fill += low + low
        else:
            held |= (gap & mask) << fill
            store_word(out, at, held)
            fill += low
            at += fill >> U(3)
            held >>= fill & U(56)
            fill &= U(7)
            held |= (other & mask) << fill
            fill += low
        store_word(out, at, held)
        at += fill >> U(3)
        held >>= fill & U(56)
        fill &= U(7)
        gap >>= low
        other >>= low
        exceptions += U(gap > limit) + U(other > limit)
        gap = select(gap > limit, U(0), gap)
        other = select(other > limit, U(0), other)
        ones |= ((second << (other + U(1)) | U(1)) << gap) << place
        place += gap + other + U(1) + second
        store_word(out, to, ones)
        to = min(to + (place >> U(3)), last)
        ones >>= place & U(56)
        place &= U(7)
    octets = to + ((place + U(7)) >> U(3)) - (highs + U(8))
    move(out, highs, out, highs + U(8), octets)
    return highs + octets, octets, exceptions


@inlined
def _write_exceptions(indices: Indices, start: Any, end: Any, before: Any, low: Any, width: Any, limit: Any, out: Array, at: Any) -> Any:
    """Write the position in the block and the high part of each exception."""
    held, fill, exceptions = U(0), U(0), U(0)
    for i in range(start, end):
        index = U(indices[i])
        high = (index - before - U(1)) >> low
        before = index
        if high > limit:
            exceptions += U(1)
            if at + U(24) > U(out.shape[0]):
                return U(out.shape[0]) + U(1), exceptions
            for field in range(U(0), U(3)):
                if field == U(0):
                    bits, value = U(GAPS_PLACE), i - start
                elif field == U(1):
                    bits = min(width, U(HALF))
                    value = high & ((U(1) << bits) - U(1))
                else:
                    bits = width - min(width, U(HALF))
                    value = select(bits > U(0), high >> U(HALF), U(0))
                held |= value << fill
                store_word(out, at, held)
                fill += bits
                at += fill >> U(3)
                held >>= fill & U(56)
                fill &= U(7)
    return at + ((fill + U(7)) >> U(3)), exceptions


@kernel
def decode(octets: Array, lo: Any, hi: Any, out: Indices) -> Any:
    """Read all blocks; each is validated as it is decoded, so that no number in a message is trusted."""
    count, length, at, before = U(out.shape[0]), U(octets.shape[0]), U(0), U(lo) - U(1)
    if not (is_list(octets) and is_list(out)):
        return MALFORMED
    for start in range(U(0), count, U(GAPS_BLOCK)):
        end = min(start + U(GAPS_BLOCK), count)
        n = end - start
        if length - at < U(GAPS_HEADER):
            return ABSENT
        header = word_at(octets, at, length)
        low, width = header & U(255), (header >> U(8)) & U(255)
        exceptions, nbytes = (header >> U(16)) & U(0xFFFF), (header >> U(32)) & U(0xFFFF)
        run = low == U(GAPS_RUN)
        shift = U(0) if run else low
        lows = at + U(GAPS_HEADER)
        highs = lows + ((n * shift + U(7)) >> U(3))
        extra = highs + nbytes
        at = extra + ((exceptions * (U(GAPS_PLACE) + width) + U(7)) >> U(3))
        if shift > U(GAPS_LOW) or width > U(64) or exceptions > n or at > length or (run and nbytes):
            return ABSENT
        if run:
            for i in range(start, end):
                out[i] = before + (i - start) + U(1)
        elif not _read_gaps(octets, lows, highs, extra, length, before, shift, out, start, end):
            return ABSENT
        if exceptions and not _add_exceptions(octets, extra, length, exceptions, shift, width, out, start, end):
            return ABSENT
        wrong = U(0)
        for i in range(start + U(1), end):
            wrong |= U(out[i] <= out[i - U(1)])
        first, last = U(out[start]), U(out[end - U(1)])
        if wrong or first < lo or last >= hi or (start > U(0) and first <= before):
            return ABSENT
        before = last
    return 0 if at == length else ABSENT


@inlined
def _read_gaps(
    octets: Array, lows: Any, highs: Any, behind: Any, length: Any, before: Any, low: Any, out: Indices, start: Any, end: Any
) -> Any:
    """Write the indices of a block, computed from the positions of bits among the high parts and the sums of low bits."""
    mask, bit, i = (U(1) << low) - U(1), lows << U(3), start
    for at in range(highs, behind, U(8)):
        word = word_at(octets, at, length)
        if behind - at < U(8):
            word &= (U(1) << ((behind - at) << U(3))) - U(1)
        ones = count_bits(word)
        if ones > end - i:
            return False
        place = (at - highs) << U(3)
        for j in range(i, i + ones):
            low_bits = (word_at(octets, bit >> U(3), length) >> (bit & U(7))) & mask
            bit += low
            before += low_bits + U(1)
            out[j] = before + ((place + lowest_bit(word) - (j - start)) << low)
            word &= word - U(1)
        i += ones
    return i == end


@inlined
def _add_exceptions(octets: Array, at: Any, length: Any, exceptions: Any, low: Any, width: Any, out: Indices, start: Any, end: Any) -> bool:
    """Add the high parts of exceptions to all following indices."""
    bit, surplus, i = at << U(3), U(0), start
    for j in range(U(0), exceptions + U(1)):
        to, added = end, U(0)
        if j < exceptions:
            to = start + ((word_at(octets, bit >> U(3), length) >> (bit & U(7))) & U((1 << GAPS_PLACE) - 1))
            if to >= end or (j > U(0) and to <= i):
                return False
            bit += U(GAPS_PLACE)
            bits = min(width, U(HALF))
            added = (word_at(octets, bit >> U(3), length) >> (bit & U(7))) & ((U(1) << bits) - U(1))
            bit += bits
            if width > U(HALF):
                bits = width - U(HALF)
                added |= ((word_at(octets, bit >> U(3), length) >> (bit & U(7))) & ((U(1) << bits) - U(1))) << U(HALF)
                bit += bits
        for k in range(i, to):
            out[k] += surplus
        surplus += added << low
        i = to
    return True


KERNELS = {
    "encode": Kernel((encode,), lambda of: (of.indices, types.uint64, BYTES)),
    "decode": Kernel((decode,), lambda of: (BYTES_IN, types.uint64, types.uint64, of.iout)),
}
