"""The selection kernels as numba compiles them: 64 values are compared together, and those chosen taken from the bits of the result.

Magnitudes are compared as integers, the bits of a value without its sign, which orders NaN above infinity. What a comparison chose is
written without a branch: entries for the first four of 64 values, of which as many count as were chosen. (A branch on whether there
are any would be mispredicted for every second group at a density of one per cent.) Memory is asked for 4 KiB ahead, which takes a
quarter off the time: the processor itself does not look beyond the page that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

from sparseallreduce.streams.kernels import magnitude
from sparseallreduce.streams.kernels.compilation import compiled_entry, inlined, kernel
from sparseallreduce.streams.kernels.intrinsics import count_bits, lowest_bit

__all__ = ["collect", "draw", "kth", "moments", "norms", "sample", "select", "top"]

GROUP = 64  # values compared together
AT_ONCE = 4  # entries written for each group at least: more are rare up to a density of a few per cent
MIX = (0x7FEB352D, 0x846CA68B)  # lowbias32, a hash of 32 bits whose multipliers were searched for (C. Wellons)
AHEAD = 4096  # bytes from where memory is read to where it is asked for
LINE = 64  # bytes of a cache line
CHUNK = 4096  # values after which those chosen are cleared, while they are in the L1 cache
RANGE = (2.0**-60, 2.0**60)  # of the largest magnitude of a bucket within which chances are computed without scaling, and
LIFT = 2.0**100  # by what magnitudes are multiplied, or divided, beyond: so that neither chances nor norms leave the range of float32
LANES = 8  # sums that grow side by side, each of every eighth value
DIGIT = 11  # bits that one pass of a radix selection looks at: its counts fill half an L1 cache

Array = NDArray[Any]
U: Any = np.uint64
_INT32 = ir.IntType(32)


def _intrinsic(function: Any) -> Any:
    return numba_intrinsic(function)


@_intrinsic
def _over(typing: Any, bits: Any, start: Any, over: Any) -> Any:
    """Which of 64 values have a magnitude above ``over``, as the bits of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, over = arguments
        vector = ir.VectorType(over.type, GROUP)
        pointer = _pointer(context, builder, signature.args[0], bits, start, vector)
        _ask_ahead(builder, pointer, GROUP * over.type.width // 8)
        return _compare(builder, builder.load(pointer, align=1), over)

    return types.uint64(bits, types.uint64, bits.dtype), generate


@_intrinsic
def _add_over(typing: Any, accumulator: Any, gradient: Any, start: Any, over: Any) -> Any:
    """Add 64 values in place, and compare the sums as :func:`_over` does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        accumulator, gradient, start, over = arguments
        vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), GROUP)
        target = _pointer(context, builder, signature.args[0], accumulator, start, vector)
        source = _pointer(context, builder, signature.args[1], gradient, start, vector)
        for pointer in (target, source):
            _ask_ahead(builder, pointer, GROUP * over.type.width // 8)
        total = builder.fadd(builder.load(target, align=1), builder.load(source, align=1))
        builder.store(total, target, align=1)
        return _compare(builder, builder.bitcast(total, ir.VectorType(over.type, GROUP)), over)

    return types.uint64(accumulator, gradient, types.uint64, over), generate


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, start: Any, vector: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [start]), vector.as_pointer())


def _ask_ahead(builder: Any, pointer: Any, size: int) -> None:
    """Ask for the memory that lies as much behind ``size`` bytes as :data:`AHEAD` says; where there is none, nothing happens."""
    byte = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    to_read, keep, as_data = _INT32(0), _INT32(3), _INT32(1)
    kind = ir.FunctionType(ir.VoidType(), [byte.type, _INT32, _INT32, _INT32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte.type], kind)
    for line in range(AHEAD, AHEAD + size, LINE):
        builder.call(prefetch, [builder.gep(byte, [_INT32(line)]), to_read, keep, as_data])


def _compare(builder: Any, bits: Any, over: Any) -> Any:
    vector = bits.type
    unsigned = ir.Constant(vector, [2 ** (over.type.width - 1) - 1] * GROUP)
    return builder.bitcast(builder.icmp_signed(">", builder.and_(bits, unsigned), _spread(builder, over)), ir.IntType(GROUP))


@_intrinsic
def _leading_zeros(typing: Any, integer: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@inlined
def _emit(word: Any, start: Any, source: Array, indices: Array, values: Array, n: Any) -> Any:
    """Write place and value for each bit of ``word``; there must be room for 64 entries."""
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
def _select(
    accumulator: Array, bits: Array, gradient: Array | None, mask: Any, over: Any, clear: bool, start: Any, indices: Array, values: Array
) -> Any:
    """Choose from place ``start`` on until the end or until there is no room; ``bits`` are those of the accumulator."""
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
        return _over(bits, start, over)
    return _add_over(accumulator, gradient, start, over)


@kernel
def _collect(bits: Array, mask: Any, below: Any, over: Any, found: Array) -> Any:
    """Count the magnitudes above ``over``, and count and write those above ``below`` and not above ``over``, as many as fit."""
    size, room = U(bits.shape[0]), U(found.shape[0])
    whole, above, inside, start = size & ~U(GROUP - 1), U(0), U(0), U(0)
    while start < whole and inside + U(GROUP) <= room:
        beyond = _over(bits, start, over)
        word = _over(bits, start, below) & ~beyond
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
        beyond = _over(bits, start, over)
        above += count_bits(beyond)
        inside += count_bits(_over(bits, start, below) & ~beyond)
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
def _kth(bits: Array, mask: Any, largest: Any, rank: Any, scratch: Array) -> Any:
    """Radix selection: count the values of one digit, keep what agrees with the digit of the wanted one, take the next digit.

    Keys count from the lowest one, so that already the first digit tells many apart.
    """
    n = U(bits.shape[0])
    lowest, highest = largest, largest & 0
    for i in range(n):
        key = min(bits[i] & mask, largest)
        scratch[i] = key
        lowest, highest = min(lowest, key), max(highest, key)
    for i in range(n):
        scratch[i] -= lowest
    width = U(64) - _leading_zeros(U(highest - lowest))
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
def _sample(accumulator: Array, gradient: Array | None, stride: Any, seed: Any, sampled: Array) -> None:
    """Take one value of each ``stride``, at a place that a hash of its number chooses."""
    for entry in range(U(sampled.shape[0])):
        i = entry * stride + _hash(seed + entry) % stride
        if gradient is None:
            sampled[entry] = accumulator[i]
        else:
            sampled[entry] = accumulator[i] + gradient[i]


@inlined
def _hash(number: Any) -> Any:
    """SplitMix64, whose results pass for random."""
    number = (number + U(1)) * U(0x9E3779B97F4A7C15)
    number = (number ^ (number >> U(30))) * U(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> U(27))) * U(0x94D049BB133111EB)
    return number ^ (number >> U(31))


@kernel
def _top(bits: Array, mask: Any, largest: Any, key: Any, ties: Any, positions: Array) -> Any:
    """Where magnitudes are above ``key``, and the first ``ties`` places where they equal it, as many as fit with one to spare."""
    n, last = U(0), U(positions.shape[0]) - U(1)
    for i in range(U(bits.shape[0])):
        magnitude = min(bits[i] & mask, largest)
        tie = U(magnitude == key) & U(ties > U(0))
        ties -= tie
        positions[min(n, last)] = i  # there are more than were counted if the array has changed since
        n += U(magnitude > key) | tie
    return np.int64(min(n, last))


def _sums(signed: bool, fused: bool) -> Any:
    """An intrinsic that adds up values in lanes of float64, those not finite as zeros.

    ``signed`` sums up the values and their squares; else their magnitudes are summed up, and the largest is found.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_types, arrays = signature.args[: 1 + fused], arguments[: 1 + fused]
        start, end, lanes = arguments[1 + fused :]
        element = context.get_data_type(array_types[0].dtype)
        integer = ir.IntType(64 if element == ir.DoubleType() else 32)
        vector, bits, doubles = (ir.VectorType(of, LANES) for of in (element, integer, ir.DoubleType()))
        infinity = magnitude.nan(np.dtype(f"i{integer.width // 8}")) - 1
        unsigned, infinite, zeros = (ir.Constant(bits, [of] * LANES) for of in (2 ** (integer.width - 1) - 1, infinity, 0))
        results = [_pointer(context, builder, signature.args[-1], lanes, ir.IntType(64)(at), doubles) for at in (0, LANES)]
        kept_in = cgutils.alloca_once_value  # a register, after optimisation
        totals = [kept_in(builder, builder.load(result, align=8)) for result in results]  # type: ignore[no-untyped-call]

        def widened(value: Any) -> Any:
            value = builder.bitcast(value, vector)
            return value if vector == doubles else builder.fpext(value, doubles)

        with cgutils.for_range_slice(builder, start, end, start.type(LANES)) as (i, _):
            pointers = [_pointer(context, builder, kind, array, i, vector) for kind, array in zip(array_types, arrays)]
            value = builder.load(pointers[0], align=1)
            if fused:
                value = builder.fadd(value, builder.load(pointers[1], align=1))
                builder.store(value, pointers[0], align=1)
            value = builder.bitcast(value, bits)
            size = builder.and_(value, unsigned)
            finite = builder.icmp_signed("<", size, infinite)
            kept = widened(builder.select(finite, value if signed else size, zeros))
            builder.store(builder.fadd(builder.load(totals[0]), kept), totals[0])
            if signed:
                second = builder.fadd(builder.load(totals[1]), builder.fmul(kept, kept))
            else:
                largest = builder.load(totals[1])
                second = builder.select(builder.fcmp_ordered(">", kept, largest), kept, largest)
            builder.store(second, totals[1])
        for total, result in zip(totals, results):
            builder.store(builder.load(total), result, align=8)
        return context.get_dummy_value()

    def typed_of_sum(typing: Any, accumulator: Any, gradient: Any, start: Any, end: Any, lanes: Any) -> Any:
        return types.void(accumulator, gradient, types.uint64, types.uint64, lanes), generate

    def typed(typing: Any, accumulator: Any, start: Any, end: Any, lanes: Any) -> Any:
        return types.void(accumulator, types.uint64, types.uint64, lanes), generate

    return _intrinsic(typed_of_sum if fused else typed)


_moments_of, _moments_of_sum = _sums(signed=True, fused=False), _sums(signed=True, fused=True)
_norms_of, _norms_of_sum = _sums(signed=False, fused=False), _sums(signed=False, fused=True)


@inlined
def _write_rest(accumulator: Array, gradient: Array | None, begin: Any, end: Any, rest: Array) -> None:
    """Write what is left of a range beyond whole vectors, increased by the gradient, with zeros to fill up."""
    for i in range(rest.shape[0]):
        rest[i] = 0
    for i in range(begin, end):
        if gradient is not None:
            accumulator[i] += gradient[i]
        rest[i - begin] = accumulator[i]


@kernel
def _moments(accumulator: Array, gradient: Array | None) -> Any:
    size = U(accumulator.shape[0])
    whole, lanes = size & ~U(LANES - 1), np.zeros(2 * LANES)
    if gradient is None:
        _moments_of(accumulator, U(0), whole, lanes)
    else:
        _moments_of_sum(accumulator, gradient, U(0), whole, lanes)
    if whole < size:
        rest = np.empty(LANES, accumulator.dtype)
        _write_rest(accumulator, gradient, whole, size, rest)
        _moments_of(rest, U(0), U(LANES), lanes)
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
        _norms_of(accumulator, begin, whole, lanes)
    else:
        _norms_of_sum(accumulator, gradient, begin, whole, lanes)
    if whole < end:
        _write_rest(accumulator, gradient, whole, end, rest)
        _norms_of(rest, U(0), U(LANES), lanes)
    total, largest = 0.0, 0.0
    for lane in range(LANES):
        total += lanes[lane]
        largest = max(largest, lanes[LANES + lane])
    return total, largest


@kernel
def _norms(accumulator: Array, gradient: Array | None) -> Any:
    lanes, rest = np.empty(2 * LANES), np.empty(LANES, accumulator.dtype)
    return _norms_in(accumulator, gradient, U(0), U(accumulator.shape[0]), lanes, rest)


@_intrinsic
def _drawn(typing: Any, values: Any, start: Any, unit: Any, shift: Any, scale: Any, seed: Any) -> Any:
    """Which of 64 values are drawn with probability ``(magnitude * unit + shift) * scale``, as the bits of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, start, unit, shift, scale, seed = arguments
        element = shift.type
        vector, numbers = ir.VectorType(element, GROUP), ir.VectorType(_INT32, GROUP)
        bits = ir.VectorType(ir.IntType(64 if element == ir.DoubleType() else 32), GROUP)
        pointer = _pointer(context, builder, signature.args[0], values, start, bits)
        _ask_ahead(builder, pointer, GROUP * bits.element.width // 8)
        unsigned = ir.Constant(bits, [2 ** (bits.element.width - 1) - 1] * GROUP)
        size = builder.bitcast(builder.and_(builder.load(pointer, align=1), unsigned), vector)
        lifted = builder.fmul(size, _spread(builder, unit))
        chance = builder.fmul(builder.fadd(lifted, _spread(builder, shift)), _spread(builder, scale))
        low = _spread(builder, builder.trunc(seed, _INT32))
        high = _spread(builder, builder.trunc(builder.lshr(seed, seed.type(32)), _INT32))

        def mixed(number: Any, by: int) -> Any:
            return builder.xor(number, builder.lshr(number, ir.Constant(numbers, [by] * GROUP)))

        number = builder.add(ir.Constant(numbers, list(range(GROUP))), low)
        number = builder.mul(mixed(number, 16), ir.Constant(numbers, [MIX[0]] * GROUP))
        number = builder.add(mixed(number, 15), high)
        number = mixed(builder.mul(number, ir.Constant(numbers, [MIX[1]] * GROUP)), 16)
        number = builder.lshr(number, ir.Constant(numbers, [8] * GROUP))  # 24 bits, which float32 holds exactly
        drawn = builder.fmul(builder.sitofp(number, vector), ir.Constant(vector, [2.0**-24] * GROUP))
        return builder.bitcast(builder.fcmp_unordered("<", drawn, chance), ir.IntType(GROUP))  # NaN is drawn

    return types.uint64(values, types.uint64, values.dtype, values.dtype, values.dtype, types.uint64), generate


def _spread(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, GROUP)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT32, GROUP), [0] * GROUP))


@inlined
def _unit(largest: float) -> float:
    """By what magnitudes are multiplied before chances are made of them."""
    if largest > RANGE[1]:
        return 1 / LIFT
    return LIFT if largest < RANGE[0] else 1.0


@inlined
def _lifted(array: Array, begin: Any, end: Any, unit: float) -> float:
    """The sum of the magnitudes times ``unit``, where the sum itself overflows."""
    total = 0.0
    for i in range(begin, end):
        size = abs(float(array[i])) * unit
        if size < np.inf:
            total += size
    return total


@inlined
def _chances(norm: float, largest: float, size: Any, share: float, at_most: bool) -> Any:
    """Shift and scale that make probabilities of magnitudes (thesis 2.4.1)."""
    if share >= size:
        return 1.0, np.inf
    if not at_most and share * largest > norm:
        shift = (share * largest - norm) / (size - share)
        return shift, share / (norm + size * shift)
    return 0.0, share / norm if norm > 0.0 else 0.0


@kernel
def _draw(
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
    """Draw bucket after bucket from ``start`` on, while there is room for a whole one; ``fixed`` as many of each, unless it is 0."""
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
            n = _emit(_drawn(accumulator, group, unit, shift, scale, _hash(seed + group)), group, bits, indices, values, n)
        if whole < end:
            for i in range(whole, end):
                last[i - whole] = accumulator[i]
            word = _drawn(last, U(0), unit, shift, scale, _hash(seed + whole))
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
    """Add zeros at the first places that were not drawn, and sort them in."""
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


def select(
    accumulator: Array, gradient: Array | None, over: int, clear: bool, start: int, indices: Array, values: Array
) -> tuple[int, int]:
    """See :mod:`~sparseallreduce.streams.kernels.selection`, also for the others."""
    bits = magnitude.bits_of(accumulator)
    entry = _entry("select", accumulator.dtype, indices.dtype, gradient is None)
    start, n = entry(accumulator, bits, gradient, magnitude.mask(bits.dtype), over, clear, start, indices, magnitude.bits_of(values))
    return start, n


def collect(array: Array, below: int, over: int, found: Array) -> tuple[int, int]:
    bits = magnitude.bits_of(array)
    above, inside = _entry("collect", array.dtype)(bits, magnitude.mask(bits.dtype), below, over, found)
    return above, inside


def kth(array: Array, k: int) -> tuple[int, int]:
    bits = magnitude.bits_of(array)
    key, ties = _entry("kth", array.dtype)(bits, magnitude.mask(bits.dtype), magnitude.nan(bits.dtype), k, np.empty_like(bits))
    return key, ties


def sample(accumulator: Array, gradient: Array | None, count: int, seed: int) -> Array:
    sampled = np.empty(count, accumulator.dtype)
    _entry("sample", accumulator.dtype, unfused=gradient is None)(accumulator, gradient, len(accumulator) // count, seed, sampled)
    return sampled


def moments(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    return _entry("moments", accumulator.dtype, unfused=gradient is None)(accumulator, gradient)  # type: ignore[no-any-return]


def norms(accumulator: Array, gradient: Array | None) -> tuple[float, float]:
    return _entry("norms", accumulator.dtype, unfused=gradient is None)(accumulator, gradient)  # type: ignore[no-any-return]


def draw(
    accumulator: Array, gradient: Array | None, options: tuple[int, float, bool, int, int, bool], start: int, indices: Array, values: Array
) -> tuple[int, int]:
    entry = _entry("draw", accumulator.dtype, indices.dtype, gradient is None)
    outputs = start, indices, magnitude.bits_of(values)
    return entry(accumulator, magnitude.bits_of(accumulator), gradient, *options, *outputs)  # type: ignore[no-any-return]


def top(array: Array, key: int, ties: int, positions: Array) -> int:
    bits = magnitude.bits_of(array)
    entry = _entry("top", array.dtype, positions.dtype)
    n: int = entry(bits, magnitude.mask(bits.dtype), magnitude.nan(bits.dtype), key, ties, positions)
    return n


@lru_cache
def _entry(name: str, dtype: Any, index_dtype: Any = np.uint32, unfused: bool = True) -> Callable[..., Any]:
    """The machine code of a kernel for values of a dtype, compiled or from numba's cache on disk."""
    f, i = (numba.from_dtype(np.dtype(of)) for of in (dtype, f"i{np.dtype(dtype).itemsize}"))
    floats, bits, indices = (types.Array(of, 1, "C", aligned=False) for of in (f, i, numba.from_dtype(np.dtype(index_dtype))))
    gradient = types.none if unfused else types.Array(f, 1, "C", readonly=True, aligned=False)
    u, flag = types.uint64, types.boolean
    dispatcher, signature = {
        "select": (_select, (floats, bits, gradient, i, i, flag, u, indices, bits)),
        "collect": (_collect, (bits, i, i, i, bits)),
        "kth": (_kth, (bits, i, i, u, bits)),
        "sample": (_sample, (floats, gradient, u, u, floats)),
        "moments": (_moments, (floats, gradient)),
        "norms": (_norms, (floats, gradient)),
        "draw": (_draw, (floats, bits, gradient, u, types.float64, flag, u, u, flag, u, indices, bits)),
        "top": (_top, (bits, i, i, i, u, indices)),
    }[name]
    return compiled_entry(dispatcher, signature)
