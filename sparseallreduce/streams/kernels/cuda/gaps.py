"""CUDA kernels for gaps between sorted indices, in the format of the CPU, described in ``streams.kernels.reference.gaps``.

Encoding evaluates the parameters of all blocks in parallel, with a thread for each candidate. Prefix sums give the sizes and positions of
blocks, and each output byte has a thread that computes it. For decoding, one thread first walks from header to header, since the position
of a block depends on the headers before it; everything else has a thread for each byte or index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike

from sparseallreduce.errors import StreamError
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK, GAPS_HEADER, GAPS_LONGEST, GAPS_LOW, GAPS_PLACE, GAPS_RUN
from sparseallreduce.streams.kernels.cuda.arrays import U, lower_bound, read_bits, smaller
from sparseallreduce.streams.kernels.cuda.launching import BLOCK, device, exclusive, kernel, launch, threads_for

__all__ = ["decode_gaps", "encode_gaps"]

CANDIDATES = GAPS_LOW + 1  # numbers of low bits


class _Sections(NamedTuple):
    """Sizes in bytes of the parts of each block, and what they contain; int64 arrays with a row or number for each block."""

    lows: Any
    octets: Any  # of the high parts
    extra: Any  # of the exceptions
    exceptions: Any  # how many
    ends: Any  # for each gap, behind which bit of the high parts its own ends
    ranks: Any  # how many exceptions there are up to a gap


def encode_gaps(indices: Any, lo: int, xp: Any, *, block: int = BLOCK) -> Any:
    """Encode a sorted index set as the gaps between indices, in blocks of Rice codes with a parameter for each block.

    Parameters
    ----------
    indices : device array of uint32 or uint64, shape (n,)
        Strictly increasing.
    lo : int
        Start of the first gap.
    xp : module
        NumPy or CuPy.

    Returns
    -------
    device array of uint8
        Its length is copied to the host.

    Raises
    ------
    StreamError
        If indices are not increasing or less than ``lo``, or not a contiguous vector of these dtypes.
    """
    if indices.ndim != 1 or indices.dtype not in (np.uint32, np.uint64) or not indices.flags.c_contiguous:
        raise StreamError(f"indices are a contiguous vector of uint32 or uint64, not {indices.dtype} of shape {indices.shape}")
    count, blocks = len(indices), threads_for(len(indices), GAPS_BLOCK)
    if not count:
        return xp.empty(0, np.uint8)
    places = indices.astype(np.uint64)
    wrong = (places[:1] < U(lo)).any() | (places[1:] <= places[:-1]).any()
    gaps = xp.zeros(blocks * GAPS_BLOCK, np.uint64)
    gaps[0] = places[0] - U(lo)
    gaps[1:count] = places[1:] - places[:-1] - U(1)
    table = gaps.reshape(blocks, GAPS_BLOCK)
    lengths = xp.minimum(xp.int64(GAPS_BLOCK), count - xp.arange(0, count, GAPS_BLOCK, dtype=np.int64))
    low, width = _parameters(table, lengths, xp, block)
    sections = _sections(table, lengths, low, width, xp)
    sizes = GAPS_HEADER + sections.lows + sections.octets + sections.extra
    starts, total = exclusive(sizes, xp)
    length, refused = xp.concatenate([total, wrong.reshape(1).astype(np.int64)]).tolist()
    if refused:
        raise StreamError(f"{count} indices cannot be written as gaps from {lo} on: they must increase from there")
    out = xp.empty(length, np.uint8)
    launch(_write_byte, length, block, xp, table, lengths, low, width, starts, *sections, out)
    return out


def decode_gaps(octets: Any, lo: int, hi: int, count: int, index_dtype: DTypeLike, xp: Any, *, block: int = BLOCK) -> Any:
    """Decode an index set written by :func:`encode_gaps`.

    Parameters
    ----------
    octets : device array of uint8
        The bytes written; any other bytes are safe, too.
    lo, hi : int
        The range of the indices.
    count : int
        Number of indices.
    index_dtype : {uint32, uint64}

    Returns
    -------
    device array, shape (count,), or None
        None unless the bytes encode ``count`` strictly increasing indices in ``[lo, hi)``. Three numbers are copied to the host, twice.

    Raises
    ------
    StreamError
        If ``octets`` is not a contiguous vector of bytes.
    """
    if octets.ndim != 1 or octets.dtype != np.uint8 or not octets.flags.c_contiguous:
        raise StreamError(f"gaps are read from a contiguous vector of uint8, not {octets.dtype} of shape {octets.shape}")
    if not count:
        return None if len(octets) else xp.empty(0, index_dtype)
    blocks = threads_for(count, GAPS_BLOCK)
    headers, octet_starts, exception_starts = (xp.zeros(shape, np.int64) for shape in ((blocks, 6), blocks + 1, blocks + 1))
    end = xp.zeros(1, np.int64)
    launch(_walk, 1, block, xp, octets, count, headers, octet_starts, exception_starts, end)
    reached, high_octets, exceptions = xp.concatenate([end, octet_starts[-1:], exception_starts[-1:]]).tolist()
    if reached != len(octets):
        return None
    ones, wrong = _ones(octets, count, headers, octet_starts, high_octets, xp, block)
    added, misplaced = xp.zeros(blocks * GAPS_BLOCK, np.uint64), xp.zeros(exceptions, np.bool_)
    launch(_read_exception, exceptions, block, xp, octets, count, headers, exception_starts, added, misplaced)
    steps = xp.empty(count, np.uint64)
    launch(_read_gap, count, block, xp, octets, headers, ones, added, steps)
    indices = (xp.cumsum(steps, dtype=np.uint64) + U((lo - 1) % 2**64)).astype(index_dtype)
    wrong = wrong | misplaced.any() | (indices[1:] <= indices[:-1]).any()
    ends = indices[:1].astype(np.uint64), indices[-1:].astype(np.uint64)
    refused, first, last = xp.concatenate([wrong.reshape(1).astype(np.uint64), *ends]).tolist()
    return None if refused or first < lo or last >= hi else indices


def _parameters(table: Any, lengths: Any, xp: Any, block: int) -> tuple[Any, Any]:
    """Return the number of low bits of each block that are written verbatim, and the bits of an exception's high part."""
    blocks = len(table)
    begins, longest = xp.empty(blocks, np.int64), xp.empty(blocks, np.int64)
    total = table.sum(axis=1, dtype=np.uint64) + (lengths - 1).astype(np.uint64)
    launch(_begin, blocks, block, xp, table.max(axis=1), total // lengths.astype(np.uint64), begins, longest)
    costs = xp.empty((blocks, CANDIDATES), np.int64)
    launch(_cost, costs.size, block, xp, table, lengths, begins, longest, costs)
    low, width = xp.empty(blocks, np.int64), xp.empty(blocks, np.int64)
    jumps = (table != 0).sum(axis=1, dtype=np.int64)
    launch(_choose, blocks, block, xp, costs, jumps, begins, longest, low, width)
    return low, width


def _sections(table: Any, lengths: Any, low: Any, width: Any, xp: Any) -> _Sections:
    run = low == GAPS_RUN
    shift = xp.where(run, 0, low)
    limit = xp.where(run, 0, xp.minimum(GAPS_PLACE + width, GAPS_LONGEST)).astype(np.uint64)
    high = table >> shift.astype(np.uint64)[:, None]
    taken = xp.arange(GAPS_BLOCK)[None, :] < lengths[:, None]
    beyond = taken & (high > limit[:, None])
    unary = xp.where(taken & ~run[:, None], xp.where(beyond, U(0), high).astype(np.int64) + 1, 0)
    ends, ranks = xp.cumsum(unary, axis=1, dtype=np.int64), xp.cumsum(beyond, axis=1, dtype=np.int64)
    exceptions = ranks[:, -1]
    octets, extra = (ends[:, -1] + 7) // 8, (exceptions * (GAPS_PLACE + width) + 7) // 8
    return _Sections((lengths * shift + 7) // 8, octets, extra, exceptions, ends, ranks)


def _ones(octets: Any, count: int, headers: Any, octet_starts: Any, high_octets: int, xp: Any, block: int) -> tuple[Any, Any]:
    """Return the bit positions at which the high parts of all gaps end, and whether the number of a block is wrong."""
    blocks = len(headers)
    counts = xp.empty(high_octets, np.int64)
    launch(_count_ones, high_octets, block, xp, octets, headers, octet_starts, counts)
    starts, total = exclusive(counts, xp)
    before = xp.concatenate([starts, total])
    ones = xp.zeros(blocks * GAPS_BLOCK, np.int64)
    launch(_place_ones, high_octets, block, xp, octets, headers, octet_starts, before, ones)
    lengths = xp.minimum(xp.int64(GAPS_BLOCK), count - xp.arange(0, count, GAPS_BLOCK, dtype=np.int64))
    found = before[octet_starts[1:]] - before[octet_starts[:-1]]
    return ones, ((headers[:, 0] != GAPS_RUN) & (found != lengths)).any()


@device
def _bit_length(number: Any) -> Any:
    length = 0
    while number != U(0):
        number >>= U(1)
        length += 1
    return length


@device
def _row_bound(table: Any, row: Any, value: Any) -> Any:
    """Return the first position of an increasing row whose value is at least ``value``."""
    lo, hi = 0, table.shape[1]
    while lo < hi:
        middle = (lo + hi) // 2
        if table[row, middle] < value:
            lo = middle + 1
        else:
            hi = middle
    return lo


@kernel
def _begin(highest: Any, means: Any, begins: Any, longest: Any) -> None:
    row = cuda.grid(1)
    if row < begins.shape[0]:
        longest[row] = _bit_length(highest[row])
        begins[row] = smaller(smaller(_bit_length(means[row]), longest[row]), GAPS_LOW)


@kernel
def _cost(table: Any, lengths: Any, begins: Any, longest: Any, costs: Any) -> None:
    """Compute the size of a block in bits, without its header, for each candidate number of low bits."""
    thread = cuda.grid(1)
    row = thread // CANDIDATES
    if row < table.shape[0]:
        low = thread - row * CANDIDATES
        if low <= begins[row] or low == smaller(longest[row], GAPS_LOW):
            exception = GAPS_PLACE + longest[row] - low
            limit, bits = U(smaller(exception, GAPS_LONGEST)), lengths[row] * (low + 1)
            for i in range(lengths[row]):
                high = table[row, i] >> U(low)
                bits += np.int64(high) if high <= limit else exception
            costs[row, low] = bits


@kernel
def _choose(costs: Any, jumps: Any, begins: Any, longest: Any, low: Any, width: Any) -> None:
    row = cuda.grid(1)
    if row < low.shape[0]:
        best = begins[row]
        while best > 0 and costs[row, best - 1] < costs[row, best]:
            best -= 1
        cost, plain = costs[row, best], smaller(longest[row], GAPS_LOW)
        if best == 0 and jumps[row] * (GAPS_PLACE + longest[row]) < cost:
            low[row] = GAPS_RUN
            width[row] = longest[row]
        else:
            if costs[row, plain] < cost:
                best = plain
            low[row] = best
            width[row] = longest[row] - best


@kernel
def _write_byte(
    table: Any, lengths: Any, low: Any, width: Any, starts: Any,
    lows: Any, octets: Any, extra: Any, exceptions: Any, ends: Any, ranks: Any, out: Any,
) -> None:  # fmt: skip
    """Compute one output byte: find its block and part, and assemble its bits."""
    thread = cuda.grid(1)
    if thread < out.shape[0]:
        row = lower_bound(starts, 0, starts.shape[0], thread + 1) - 1
        at = thread - starts[row]
        shift = low[row] if low[row] != GAPS_RUN else 0
        byte, filled = U(0), 0
        if at < GAPS_HEADER:
            fields = low[row] | (width[row] << 8) | (exceptions[row] << 16) | (octets[row] << 32)
            byte = U(fields) >> U(8 * at)
        elif at < GAPS_HEADER + lows[row]:
            bit = 8 * (at - GAPS_HEADER)
            while filled < 8 and bit < lengths[row] * shift:
                gap = bit // shift
                skipped = bit - gap * shift
                byte |= ((table[row, gap] & ((U(1) << U(shift)) - U(1))) >> U(skipped)) << U(filled)
                bit += shift - skipped
                filled += shift - skipped
        elif at < GAPS_HEADER + lows[row] + octets[row]:
            bit = 8 * (at - GAPS_HEADER - lows[row])
            gap = _row_bound(ends, row, bit + 1)
            while gap < lengths[row] and ends[row, gap] <= bit + 8:
                byte |= U(1) << U(ends[row, gap] - 1 - bit)
                gap += 1
        else:
            stride = GAPS_PLACE + width[row]
            bit = 8 * (at - GAPS_HEADER - lows[row] - octets[row])
            while filled < 8 and bit < exceptions[row] * stride:
                entry = bit // stride
                skipped = bit - entry * stride
                gap = _row_bound(ranks, row, entry + 1)
                if skipped < GAPS_PLACE:
                    byte |= (U(gap) >> U(skipped)) << U(filled)
                    taken = GAPS_PLACE - skipped
                else:
                    byte |= ((table[row, gap] >> U(shift)) >> U(skipped - GAPS_PLACE)) << U(filled)
                    taken = stride - skipped
                bit += taken
                filled += taken
        out[thread] = byte & U(255)


@kernel
def _walk(octets: Any, count: Any, headers: Any, octet_starts: Any, exception_starts: Any, end: Any) -> None:
    """Walk from header to header in one thread; stop early, or store -1, at an invalid header."""
    if cuda.grid(1) == 0:
        at, length = 0, octets.shape[0]
        for row in range(headers.shape[0]):
            n = smaller(GAPS_BLOCK, count - row * GAPS_BLOCK)
            if length - at < GAPS_HEADER:
                at = -1
                break
            low, width = np.int64(octets[at]), np.int64(octets[at + 1])
            exceptions = np.int64(octets[at + 2]) + 256 * np.int64(octets[at + 3])
            nbytes = np.int64(octets[at + 4]) + 256 * np.int64(octets[at + 5])
            shift = low if low != GAPS_RUN else 0
            lows = at + GAPS_HEADER
            highs = lows + (n * shift + 7) // 8
            extra = highs + nbytes
            at = extra + (exceptions * (GAPS_PLACE + width) + 7) // 8
            if shift > GAPS_LOW or width > 64 or exceptions > n or at > length or (low == GAPS_RUN and nbytes > 0):
                at = -1
                break
            headers[row, 0] = low
            headers[row, 1] = width
            headers[row, 2] = shift
            headers[row, 3] = lows
            headers[row, 4] = highs
            headers[row, 5] = extra
            octet_starts[row + 1] = octet_starts[row] + nbytes
            exception_starts[row + 1] = exception_starts[row] + exceptions
        end[0] = at


@kernel
def _count_ones(octets: Any, headers: Any, octet_starts: Any, counts: Any) -> None:
    thread = cuda.grid(1)
    if thread < counts.shape[0]:
        row = lower_bound(octet_starts, 0, octet_starts.shape[0], thread + 1) - 1
        counts[thread] = cuda.popc(np.int32(octets[headers[row, 4] + thread - octet_starts[row]]))


@kernel
def _place_ones(octets: Any, headers: Any, octet_starts: Any, before: Any, ones: Any) -> None:
    thread = cuda.grid(1)
    if thread < before.shape[0] - 1:
        row = lower_bound(octet_starts, 0, octet_starts.shape[0], thread + 1) - 1
        at = thread - octet_starts[row]
        octet, rank = np.int64(octets[headers[row, 4] + at]), before[thread] - before[octet_starts[row]]
        for bit in range(8):
            if (octet >> bit) & 1 and rank < GAPS_BLOCK:
                ones[row * GAPS_BLOCK + rank] = 8 * at + bit
                rank += 1


@kernel
def _read_exception(octets: Any, count: Any, headers: Any, exception_starts: Any, added: Any, misplaced: Any) -> None:
    thread = cuda.grid(1)
    if thread < misplaced.shape[0]:
        row = lower_bound(exception_starts, 0, exception_starts.shape[0], thread + 1) - 1
        width, number = headers[row, 1], thread - exception_starts[row]
        bit = 8 * headers[row, 5] + number * (GAPS_PLACE + width)
        place = np.int64(read_bits(octets, bit, GAPS_PLACE))
        wrong = place >= smaller(GAPS_BLOCK, count - row * GAPS_BLOCK)
        if number > 0 and place <= np.int64(read_bits(octets, bit - GAPS_PLACE - width, GAPS_PLACE)):
            wrong = True
        misplaced[thread] = wrong
        if not wrong:
            added[row * GAPS_BLOCK + place] = read_bits(octets, bit + GAPS_PLACE, width) << U(headers[row, 2])


@kernel
def _read_gap(octets: Any, headers: Any, ones: Any, added: Any, steps: Any) -> None:
    """Write each gap plus one."""
    i = cuda.grid(1)
    if i < steps.shape[0]:
        row = i // GAPS_BLOCK
        shift, place, high = headers[row, 2], i - row * GAPS_BLOCK, U(0)
        if headers[row, 0] != GAPS_RUN:
            high = U(ones[i] - (ones[i - 1] + 1 if place > 0 else 0))
        low = read_bits(octets, 8 * headers[row, 3] + place * shift, shift)
        steps[i] = (high << U(shift)) + low + added[i] + U(1)
