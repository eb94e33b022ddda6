"""Sorted index sets as the gaps between them, in plain NumPy.

The format is little-endian, the lowest bit of a byte first. A gap is the number of indices missing before an index, for the first one
counted from ``lo``. A block holds ``GAPS_BLOCK`` gaps, the last one the rest, and consists of

1. a header of six bytes: ``low`` (1 byte), ``width`` (1), the number of exceptions (2), and the size of part 3 in bytes (2);
2. the ``low`` lowest bits of each gap, concatenated, padded to a whole byte;
3. the rest of each gap, its high part, as that many zeros and a one (Rice code); an exception has no zeros;
4. for each exception its position in the block, in ``GAPS_PLACE`` bits, and its high part, in ``width`` bits.

If ``low`` is ``GAPS_RUN``, parts 2 and 3 are absent: all gaps are zero except the exceptions, whose high parts are whole gaps. An encoder
chooses ``low`` to make the block shortest, by steps downwards from the logarithm of the mean gap, and makes exceptions of high parts that
would take more bits otherwise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.contract import (
    GAPS_BLOCK,
    GAPS_HEADER,
    GAPS_LONGEST,
    GAPS_LOW,
    GAPS_PLACE,
    GAPS_RUN,
    MALFORMED,
    Indices,
    Positions,
)

__all__ = ["decode_gaps", "encode_gaps"]

Bytes = NDArray[np.uint8]


def encode_gaps(indices: Indices, lo: int, out: Bytes) -> int:
    """Write the blocks; return the number of bytes written."""
    places = indices.astype(np.uint64)
    if len(places) and (int(places[0]) < lo or (places[1:] <= places[:-1]).any()):
        return MALFORMED
    gaps = np.diff(places, prepend=np.uint64((lo - 1) % 2**64)) - np.uint64(1)
    blocks = [_block(gaps[start : start + GAPS_BLOCK]) for start in range(0, len(gaps), GAPS_BLOCK)]
    octets = np.concatenate([*blocks, np.empty(0, np.uint8)])
    if len(octets) > len(out):
        return MALFORMED
    out[: len(octets)] = octets
    return len(octets)


def _block(gaps: Positions) -> Bytes:
    low, width = _parameters(gaps)
    shift = 0 if low == GAPS_RUN else low
    high = gaps >> np.uint64(shift)
    beyond = high > (0 if low == GAPS_RUN else min(GAPS_PLACE + width, GAPS_LONGEST))
    exceptions = np.flatnonzero(beyond)
    surplus = np.concatenate([_bits(exceptions.astype(np.uint64), GAPS_PLACE), _bits(high[exceptions], width)], axis=1)
    parts = [_packed(_bits(gaps, shift)), np.empty(0, np.uint8), _packed(surplus)]
    if low != GAPS_RUN:
        ends = np.cumsum(np.where(beyond, 0, high.astype(np.int64)) + 1)
        ones = np.zeros(ends[-1], np.bool_)
        ones[ends - 1] = True
        parts[1] = _packed(ones)
    header = np.array([low, width, len(exceptions) & 255, len(exceptions) >> 8, len(parts[1]) & 255, len(parts[1]) >> 8], np.uint8)
    return np.concatenate([header, *parts])


def _parameters(gaps: Positions) -> tuple[int, int]:
    longest = int(np.bitwise_or.reduce(gaps)).bit_length()
    total = sum(gaps.tolist()) + len(gaps) - 1
    low = min((total // len(gaps)).bit_length(), longest, GAPS_LOW)
    best = _cost(gaps, low, longest)
    while low > 0:
        cost = _cost(gaps, low - 1, longest)
        if cost >= best:
            break
        low, best = low - 1, cost
    if low == 0 and np.count_nonzero(gaps) * (GAPS_PLACE + longest) < best:
        return GAPS_RUN, longest
    plain = min(longest, GAPS_LOW)
    if _cost(gaps, plain, longest) < best:
        low = plain
    return low, longest - low


def _cost(gaps: Positions, low: int, longest: int) -> int:
    """Return the size of a block in bits, without its header."""
    exception = GAPS_PLACE + longest - low
    high = gaps >> np.uint64(low)
    return int(np.where(high <= min(exception, GAPS_LONGEST), high, np.uint64(exception)).sum()) + len(gaps) * (low + 1)


def _bits(numbers: Positions, width: int) -> NDArray[np.uint8]:
    """Return the lowest bits of numbers, a row for each."""
    return np.unpackbits(numbers.astype("<u8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little")[:, :width]


def _packed(bits: NDArray[np.uint8] | NDArray[np.bool_]) -> Bytes:
    return np.packbits(bits.reshape(-1), bitorder="little")


def decode_gaps(octets: Bytes, lo: int, hi: int, out: Indices) -> bool:
    """Read the blocks; each is validated as it is decoded."""
    at, before = 0, lo - 1
    for start in range(0, len(out), GAPS_BLOCK):
        block = out[start : start + GAPS_BLOCK]
        n = len(block)
        if len(octets) - at < GAPS_HEADER:
            return False
        low, width, *counts = octets[at : at + GAPS_HEADER].tolist()
        exceptions, length = counts[0] + 256 * counts[1], counts[2] + 256 * counts[3]
        shift = 0 if low == GAPS_RUN else low
        at += GAPS_HEADER
        ends = at + np.cumsum([-(-n * shift // 8), length, -(-exceptions * (GAPS_PLACE + width) // 8)])
        if shift > GAPS_LOW or width > 64 or exceptions > n or ends[-1] > len(octets) or (low == GAPS_RUN and length):
            return False
        lows, highs, surplus = np.split(octets[at : ends[-1]], ends[:2] - at)
        at = int(ends[-1])
        ones = np.arange(n) if low == GAPS_RUN else np.flatnonzero(np.unpackbits(highs, bitorder="little"))
        places = _numbers(surplus, exceptions, GAPS_PLACE + width, 0, GAPS_PLACE).astype(np.int64)
        if len(ones) != n or (places >= n).any() or (places[1:] <= places[:-1]).any():
            return False
        high = np.diff(ones, prepend=-1).astype(np.uint64) - np.uint64(1)
        high[places] += _numbers(surplus, exceptions, GAPS_PLACE + width, GAPS_PLACE, width)
        gaps = (high << np.uint64(shift)) + _numbers(lows, n, shift, 0, shift)
        block[:] = (np.cumsum(gaps + np.uint64(1)) + np.uint64(before % 2**64)).astype(out.dtype)
        if (block[1:] <= block[:-1]).any() or int(block[0]) < lo or int(block[-1]) >= hi or (start and int(block[0]) <= before):
            return False
        before = int(block[-1])
    return at == len(octets)


def _numbers(octets: Bytes, count: int, stride: int, skip: int, width: int) -> Positions:
    """Return numbers of ``width`` bits, one every ``stride`` bits, after ``skip`` bits."""
    bits = np.unpackbits(octets, bitorder="little", count=count * stride).reshape(count, stride)[:, skip : skip + width]
    padded = np.zeros((count, 64), np.uint8)
    padded[:, :width] = bits
    return np.packbits(padded, axis=1, bitorder="little").reshape(-1).view("<u8").astype(np.uint64)
