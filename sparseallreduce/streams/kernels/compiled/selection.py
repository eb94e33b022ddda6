"""Compiled kernels for selection: 64 values are compared together, and the selected ones are taken from the bits of the result.

Magnitudes are compared as integers, the bits of a value without its sign, which orders NaN above infinity. Selected values are written
without a branch: for each group four entries are always written, and only as many are kept as were selected. (A branch on whether any was
selected would be mispredicted for every second group at a density of 1 %.) Memory is prefetched 4 KiB ahead, which saves a quarter of the
time, since the processor's own prefetching stops at a page boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from sparseallreduce.streams.kernels.compilation import inlined, kernel
from sparseallreduce.streams.kernels.compiled.arrays import U, split_mix
from sparseallreduce.streams.kernels.compiled.signatures import Kernel, Types
from sparseallreduce.streams.kernels.contract import Array
from sparseallreduce.streams.kernels.intrinsics import (
    GROUP,
    LANES,
    add_over_of_64,
    count_bits,
    drawn_of_64,
    leading_zeros,
    lowest_bit,
    moments_of,
    moments_of_sum,
    norms_of,
    norms_of_sum,
    over_of_64,
)

__all__ = ["KERNELS"]

AT_ONCE = 4  # entries always written for each group; more are rare up to a density of a few per cent
CHUNK = 4096  # values after which selected ones are cleared, while they are in the L1 cache
RANGE = (2.0**-60, 2.0**60)  # range of a bucket's largest magnitude in which probabilities need no scaling
LIFT = 2.0**100  # factor or divisor of magnitudes outside it, which keeps probabilities and norms in the range of float32
DIGIT = 11  # bits of a digit in the radix selection: its counts fill half an L1 cache


@inlined
def _emit(word: Any, start: Any, source: Array, indices: Array, values: Array, n: Any) -> Any:
    """Write position and value for each bit of ``word``; there must be room for 64 entries."""
    end = n + count_bits(word)
    for entry in range(n, n + U(AT_ONCE)):
        i = start + (lowest_bit(word) & U(GROUP - 1))
        indices[entry] = i
        values[entry] = source[i]
        word &= word - U(1)
    for entry in range(n + U(AT_ONCE), end):
        i = start + lowest_bit(word)
        indices[entry] = i
        values[entry] = source[i]
        word &= word - U(1)
    return end


@kernel
def select(
    accumulator: Array, bits: Array, gradient: Array | None, mask: Any, over: Any, clear: bool, start: Any, indices: Array, values: Array
) -> Any:
    """Select from position ``start`` on until the end, or until there is no room; ``bits`` is a view of the accumulator."""
    size, room, n = U(bits.shape[0]), U(indices.shape[0]), U(0)
    whole = size & ~U(GROUP - 1)
    while start < size and n + U(GROUP) <= room:
        begin = n
        if start < whole:
            end = min(start + U(CHUNK), whole)
            while start < end and n + U(GROUP) <= room:
                n = _emit(_compared(accumulator, bits, gradient, start, over), start, bits, indices, values, n)
                start += U(GROUP)
        else:
            for i in range(start, size):
                if gradient is not None:
                    accumulator[i] += gradient[i]
                indices[n] = i
                values[n] = bits[i]
                n += U(bits[i] & mask > over)
            start = size
        if clear:
            for entry in range(begin, n):
                bits[indices[entry]] = 0
    return np.int64(start), np.int64(n)


@inlined
def _compared(accumulator: Array, bits: Array, gradient: Array | None, start: Any, over: Any) -> Any:
    if gradient is None:  # known at compile time
        return over_of_64(bits, start, over)
    return add_over_of_64(accumulator, gradient, start, over)


@kernel
def collect(bits: Array, mask: Any, below: Any, over: Any, found: Array) -> Any:
    """Count the magnitudes above ``over``, and those in (``below``, ``over``]; write as many of the latter as fit."""
    size, room = U(bits.shape[0]), U(found.shape[0])
    whole, above, inside, start = size & ~U(GROUP - 1), U(0), U(0), U(0)
    while start < whole and inside + U(GROUP) <= room:
        beyond = over_of_64(bits, start, over)
        word = over_of_64(bits, start, below) & ~beyond
        above += count_bits(beyond)
        end = inside + count_bits(word)
        for entry in range(inside, inside + U(AT_ONCE)):
            found[entry] = bits[start + (lowest_bit(word) & U(GROUP - 1))] & mask
            word &= word - U(1)
        for entry in range(inside + U(AT_ONCE), end):
            found[entry] = bits[start + lowest_bit(word)] & mask
            word &= word - U(1)
        inside = end
        start += U(GROUP)
    while start < whole:
        beyond = over_of_64(bits, start, over)
        above += count_bits(beyond)
        inside += count_bits(over_of_64(bits, start, below) & ~beyond)
        start += U(GROUP)
    for i in range(whole, size):
        magnitude = bits[i] & mask
        above += U(magnitude > over)
        if (magnitude > below) & (magnitude <= over):
            if inside < room:
                found[inside] = magnitude
            inside += U(1)
    return np.int64(above), np.int64(inside)


@kernel
def kth(bits: Array, mask: Any, largest: Any, rank: Any, scratch: Array) -> Any:
    """Select by radix: count the values of one digit, keep those that agree with the digit of the wanted key, continue with the next digit.

    Keys are counted from the lowest one, so that the first digit already separates many.
    """
    n = U(bits.shape[0])
    lowest, highest = largest, largest & 0
    for i in range(n):
        key = min(bits[i] & mask, largest)
        scratch[i] = key
        lowest, highest = min(lowest, key), max(highest, key)
    for i in range(n):
        scratch[i] -= lowest
    width = U(64) - leading_zeros(U(highest - lowest))
    counts = np.empty(2**DIGIT, np.uint64)
    while width > U(0) and n > U(1):
        shift = width - min(width, U(DIGIT))
        counts[:] = U(0)
        for i in range(n):
            counts[U(scratch[i]) >> shift & U(2**DIGIT - 1)] += U(1)
        digit = U(2**DIGIT - 1)
        while counts[digit] < rank:
            rank -= counts[digit]
            digit -= U(1)
        kept = U(0)
        for i in range(n):
            key = scratch[i]
            scratch[kept] = key
            kept += U(U(key) >> shift & U(2**DIGIT - 1) == digit)
        n, width = kept, shift
    return np.int64(scratch[U(0)] + lowest), np.int64(rank)


@kernel
def sample(accumulator: Array, gradient: Array | None, stride: Any, seed: Any, sampled: Array) -> None:
    """Take one value of each ``stride``, at a position given by a hash of its number."""
    for entry in range(U(sampled.shape[0])):
        i = entry * stride + split_mix(seed + entry) % stride
        if gradient is None:
            sampled[entry] = accumulator[i]
        else:
            sampled[entry] = accumulator[i] + gradient[i]


@kernel
def top(bits: Array, mask: Any, largest: Any, key: Any, ties: Any, positions: Array) -> Any:
    """Write the positions of magnitudes above ``key``, and the first ``ties`` equal to it, as many as fit with one to spare."""
    n, last = U(0), U(positions.shape[0]) - U(1)
    for i in range(U(bits.shape[0])):
        magnitude = min(bits[i] & mask, largest)
        tie = U(magnitude == key) & U(ties > U(0))
        ties -= tie
        positions[min(n, last)] = i  # there may be more than counted if the array has changed since
        n += U(magnitude > key) | tie
    return np.int64(min(n, last))


@kernel
def top_of_chunks(
    accumulator: Array,
    bits: Array,
    gradient: Array | None,
    mask: Any,
    largest: Any,
    lower: Any,
    chunk: Any,
    k: Any,
    places: Array,
    found: Array,
    scratch: Array,
    indices: Array,
    values: Array,
) -> None:
    """Select the largest of each chunk among those above a guess, the previous chunk's k-th key less ``lower``."""
    size, n, owed, over = U(bits.shape[0]), U(0), U(0), largest & 0
    for begin in range(U(0), size, chunk):
        end = min(begin + chunk, size)
        if gradient is not None:
            for i in range(begin, end):
                accumulator[i] += gradient[i]
        owed += (end - begin) * k
        wanted = owed // size
        owed -= wanted * size
        if wanted > U(0):
            count, step = _above(bits, mask, begin, end, over, places, found), lower
            while count < wanted:  # the guess was too high
                over, step = max(over - step, ~(largest & 0)), step << 2
                count = _above(bits, mask, begin, end, over, places, found)
            key, left = _kth_of_few(found, count, mask, largest, wanted, scratch)
            for entry in range(count):
                magnitude = scratch[entry]
                tie = U(magnitude == key) & U(left > U(0))
                left -= tie
                indices[n], values[n] = places[entry], found[entry]
                n += U(magnitude > key) | tie
            over = max(key - lower, largest & 0)


@inlined
def _kth_of_few(found: Array, count: Any, mask: Any, largest: Any, rank: Any, keys: Array) -> Any:
    """Write the keys of some hundred values; return the key of a rank, and how many equal keys are among the values up to that rank.

    The range of keys is bisected by counting, which is faster in vectors than a radix selection for so few values.
    """
    low, high = largest, largest & 0
    for entry in range(count):
        key = min(found[entry] & mask, largest)
        keys[entry] = key
        low, high = min(low, key), max(high, key)
    while low < high:
        middle, above = low + ((high - low) >> 1), largest & 0
        for entry in range(count):
            above += keys[entry] > middle
        if U(above) >= rank:
            low = middle + (largest & 0 | 1)
        else:
            high = middle
    above = largest & 0
    for entry in range(count):
        above += keys[entry] > low
    return low, rank - U(above)


@inlined
def _above(bits: Array, mask: Any, begin: Any, end: Any, over: Any, places: Array, found: Array) -> Any:
    """Write positions and bits of the values in a range whose magnitude is above ``over``; return their number."""
    whole, n = begin + ((end - begin) & ~U(GROUP - 1)), U(0)
    for start in range(begin, whole, U(GROUP)):
        n = _emit(over_of_64(bits, start, over), start, bits, places, found, n)
    for i in range(whole, end):
        places[n], found[n] = i, bits[i]
        n += U(bits[i] & mask > over)
    return n


@inlined
def _write_rest(accumulator: Array, gradient: Array | None, begin: Any, end: Any, rest: Array) -> None:
    """Write the rest of a range beyond whole vectors, with the gradient added, padded with zeros."""
    for i in range(rest.shape[0]):
        rest[i] = 0
    for i in range(begin, end):
        if gradient is not None:
            accumulator[i] += gradient[i]
        rest[i - begin] = accumulator[i]


@kernel
def moments(accumulator: Array, gradient: Array | None) -> Any:
    size = U(accumulator.shape[0])
    whole, lanes = size & ~U(LANES - 1), np.zeros(2 * LANES)
    if gradient is None:
        moments_of(accumulator, U(0), whole, lanes)
    else:
        moments_of_sum(accumulator, gradient, U(0), whole, lanes)
    if whole < size:
        rest = np.empty(LANES, accumulator.dtype)
        _write_rest(accumulator, gradient, whole, size, rest)
        moments_of(rest, U(0), U(LANES), lanes)
    total, squares = 0.0, 0.0
    for lane in range(LANES):
        total += lanes[lane]
        squares += lanes[LANES + lane]
    return total, squares


@inlined
def _norms_in(accumulator: Array, gradient: Array | None, begin: Any, end: Any, lanes: Array, rest: Array) -> Any:
    lanes[:] = 0.0
    whole = begin + ((end - begin) & ~U(LANES - 1))
    if gradient is None:
        norms_of(accumulator, begin, whole, lanes)
    else:
        norms_of_sum(accumulator, gradient, begin, whole, lanes)
    if whole < end:
        _write_rest(accumulator, gradient, whole, end, rest)
        norms_of(rest, U(0), U(LANES), lanes)
    total, largest = 0.0, 0.0
    for lane in range(LANES):
        total += lanes[lane]
        largest = max(largest, lanes[LANES + lane])
    return total, largest


@kernel
def norms(accumulator: Array, gradient: Array | None) -> Any:
    lanes, rest = np.empty(2 * LANES), np.empty(LANES, accumulator.dtype)
    return _norms_in(accumulator, gradient, U(0), U(accumulator.shape[0]), lanes, rest)


@inlined
def _unit(largest: float) -> float:
    """Return the factor by which magnitudes are scaled before probabilities are computed."""
    if largest > RANGE[1]:
        return 1 / LIFT
    return LIFT if largest < RANGE[0] else 1.0


@inlined
def _lifted(array: Array, begin: Any, end: Any, unit: float) -> float:
    """Return the sum of the scaled magnitudes, for sums that would overflow without scaling."""
    total = 0.0
    for i in range(begin, end):
        size = abs(float(array[i])) * unit
        if size < np.inf:
            total += size
    return total


@inlined
def _chances(norm: float, largest: float, size: Any, share: float, at_most: bool) -> Any:
    """Return the shift and scale that turn magnitudes into probabilities (thesis 2.4.1)."""
    if share >= size:
        return 1.0, np.inf
    if not at_most and share * largest > norm:
        shift = (share * largest - norm) / (size - share)
        return shift, share / (norm + size * shift)
    return 0.0, share / norm if norm > 0.0 else 0.0


@kernel
def draw(
    accumulator: Array,
    bits: Array,
    gradient: Array | None,
    bucket: Any,
    share: float,
    at_most: bool,
    fixed: Any,
    seed: Any,
    clear: bool,
    start: Any,
    indices: Array,
    values: Array,
) -> Any:
    """Draw from buckets, from ``start`` on, while there is room for a whole one; with ``fixed``, exactly that many of each."""
    size, room, n, lanes = U(bits.shape[0]), U(indices.shape[0]), U(0), np.empty(2 * LANES)
    last, rest = np.zeros(GROUP, accumulator.dtype), np.empty(LANES, accumulator.dtype)
    while start < size and n + bucket + U(GROUP) <= room:
        end, begin = min(start + bucket, size), n
        length = float(end - start)
        norm, largest = _norms_in(accumulator, gradient, start, end, lanes, rest)
        unit = _unit(largest)
        norm = norm * unit if norm < np.inf else _lifted(accumulator, start, end, unit)
        shift, scale = _chances(norm, largest * unit, length, share * length / bucket, at_most)
        whole = start + ((end - start) & ~U(GROUP - 1))
        for group in range(start, whole, U(GROUP)):
            n = _emit(drawn_of_64(accumulator, group, unit, shift, scale, split_mix(seed + group)), group, bits, indices, values, n)
        if whole < end:
            for i in range(whole, end):
                last[i - whole] = accumulator[i]
            word = drawn_of_64(last, U(0), unit, shift, scale, split_mix(seed + whole))
            n = _emit(word & ((U(1) << (end - whole)) - U(1)), whole, bits, indices, values, n)
        wanted = min(fixed, end - start)
        if fixed > U(0):
            n = min(n, begin + wanted)
        if clear:
            for entry in range(begin, n):
                bits[indices[entry]] = 0
        if n < begin + wanted:
            n = _fill_up(start, indices, values, begin, n, begin + wanted)
        start = end
    return np.int64(start), np.int64(n)


@inlined
def _fill_up(place: Any, indices: Array, values: Array, begin: Any, n: Any, end: Any) -> Any:
    """Add zeros at the first positions that were not drawn, and sort them in."""
    drawn, chosen = begin, n
    while n < end:
        if drawn < chosen and indices[drawn] == place:
            drawn += U(1)
        else:
            indices[n] = place
            values[n] = 0
            n += U(1)
        place += U(1)
    for entry in range(chosen, end):
        at, index = entry, indices[entry]
        while at > begin and indices[at - U(1)] > index:
            indices[at], values[at] = indices[at - U(1)], values[at - U(1)]
            at -= U(1)
        indices[at], values[at] = index, 0
    return end


def _alone_and_of_sum(name: str, dispatcher: Any, signature: Callable[[Types, Any], tuple[Any, ...]]) -> dict[str, Kernel]:
    """Return a kernel for one array, and the same for an array to which another is added first."""
    return {
        name: Kernel((dispatcher,), lambda of: signature(of, types.none)),
        f"{name}_of_sum": Kernel((dispatcher,), lambda of: signature(of, of.values)),
    }


_WORD, _FLAG = types.uint64, types.boolean
KERNELS = {
    **_alone_and_of_sum(
        "select", select, lambda of, gradient: (of.vout, of.bits, gradient, of.key, of.key, _FLAG, _WORD, of.iout, of.bits)
    ),
    "collect": Kernel((collect,), lambda of: (of.bits, of.key, of.key, of.key, of.bits)),
    "kth": Kernel((kth,), lambda of: (of.bits, of.key, of.key, _WORD, of.bits)),
    **_alone_and_of_sum("sample", sample, lambda of, gradient: (of.vout, gradient, _WORD, _WORD, of.vout)),
    "top": Kernel((top,), lambda of: (of.bits, of.key, of.key, of.key, _WORD, of.iout)),
    **_alone_and_of_sum(
        "top_of_chunks",
        top_of_chunks,
        lambda of, gradient: (
            *(of.vout, of.bits, gradient, of.key, of.key, of.key, _WORD, _WORD),
            *(of.iout, of.bits, of.bits, of.iout, of.bits),
        ),
    ),
    **_alone_and_of_sum("moments", moments, lambda of, gradient: (of.vout, gradient)),
    **_alone_and_of_sum("norms", norms, lambda of, gradient: (of.vout, gradient)),
    **_alone_and_of_sum(
        "draw",
        draw,
        lambda of, gradient: (
            *(of.vout, of.bits, gradient, _WORD, types.float64, _FLAG, _WORD, _WORD, _FLAG),
            *(_WORD, of.iout, of.bits),
        ),
    ),
}
