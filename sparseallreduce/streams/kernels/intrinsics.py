"""Processor instructions and vector operations for compiled loops that NumPy and Python cannot express.

This is the only code that generates LLVM instructions; kernels are written in Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from sparseallreduce.streams.kernels import magnitude

__all__ = [
    "GROUP",
    "LANES",
    "LINE",
    "add_over_of_64",
    "address_of",
    "as_bits",
    "as_float",
    "call",
    "compare_exchange",
    "count_bits",
    "drawn_of_64",
    "finish_streaming",
    "gap_cost",
    "leading_zeros",
    "load_acquire",
    "load_word",
    "lowest_bit",
    "moments_of",
    "moments_of_sum",
    "move",
    "norms_of",
    "norms_of_sum",
    "over_of_64",
    "prefetch",
    "prefetch_to_write",
    "present_of_64",
    "select",
    "store_release",
    "store_word",
    "stream_16_bytes",
]

LINE = 64  # bytes of a cache line, to which memory shared by processes is aligned
GROUP = 64  # values compared together
LANES = 8  # parallel partial sums, each of every eighth value

_AHEAD = 4096  # distance in bytes of prefetches
_MIX = (0x7FEB352D, 0x846CA68B)  # lowbias32, a hash of 32 bits whose multipliers were searched for (C. Wellons)

_INT32 = ir.IntType(32)
_READ, _WRITE = _INT32(0), _INT32(1)  # purpose of a prefetch


def _intrinsic(function: Any) -> Any:
    return numba_intrinsic(function)


@_intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an array's element, without waiting for it."""
    return types.void(array, types.uint64), _prefetching(_READ)


@_intrinsic
def prefetch_to_write(typing: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of an element that will be modified, so that other cores give it up."""
    return types.void(array, types.uint64), _prefetching(_WRITE)


def _prefetching(purpose: ir.Constant) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _prefetch(builder, _element(context, builder, signature.args[0], *arguments), purpose)
        return context.get_dummy_value()

    return generate


def _prefetch(builder: Any, pointer: Any, purpose: ir.Constant, places: range = range(1)) -> None:
    """Prefetch the lines at these offsets from a pointer into all cache levels; invalid addresses have no effect."""
    byte = builder.bitcast(pointer, ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [byte.type, _INT32, _INT32, _INT32])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte.type], kind)
    for place in places:
        builder.call(prefetch, [builder.gep(byte, [_INT32(place)]), purpose, _INT32(3), _INT32(1)])


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return a pointer to an element by its flat position; a non-contiguous array must have one dimension."""
    made = context.make_array(array_type)(context, builder, array)
    if array_type.ndim > 1 or array_type.layout in "CF":
        return builder.gep(made.data, [index])
    stride = cgutils.unpack_tuple(builder, made.strides, 1)[0]  # type: ignore[no-untyped-call]
    return cgutils.pointer_add(builder, made.data, builder.mul(index, stride))  # type: ignore[no-untyped-call]


@_intrinsic
def address_of(typing: Any, array: Any, index: Any) -> Any:
    """Return the address of an element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(_element(context, builder, signature.args[0], *arguments), ir.IntType(64))

    return types.uint64(array, types.uint64), generate


@_intrinsic
def stream_16_bytes(typing: Any, target: Any, to: Any, source: Any, start: Any) -> Any:
    """Copy 16 bytes past the caches, between flat positions of two arrays; the target must be aligned to 16 bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, to, source, start = arguments
        words = ir.VectorType(ir.IntType(64), 2)
        target = _vector(context, builder, signature.args[0], target, to, words)
        source = _vector(context, builder, signature.args[2], source, start, words)
        written = builder.store(builder.load(source, align=1), target, align=16)
        written.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64), generate


@_intrinsic
def finish_streaming(typing: Any) -> Any:
    """Make data written past the caches visible to others before any later write."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def load_word(typing: Any, octets: Any, at: Any) -> Any:
    """Load eight bytes of a uint8 array as a uint64, lowest byte first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        octets, at = arguments
        return builder.load(_vector(context, builder, signature.args[0], octets, at, ir.IntType(64)), align=1)

    return types.uint64(octets, types.uint64), generate


@_intrinsic
def store_word(typing: Any, octets: Any, at: Any, word: Any) -> Any:
    """Store a uint64 as eight bytes of a uint8 array, lowest byte first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        octets, at, word = arguments
        builder.store(word, _vector(context, builder, signature.args[0], octets, at, word.type), align=1)
        return context.get_dummy_value()

    return types.void(octets, types.uint64, types.uint64), generate


@_intrinsic
def load_acquire(typing: Any, array: Any, index: Any) -> Any:
    """Load an element of a uint64 array that another process may write; later reads are not moved before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_element(context, builder, signature.args[0], *arguments), "acquire", 8)

    return types.uint64(array, types.uint64), generate


@_intrinsic
def store_release(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Store an element of a uint64 array that another process may read, ordered after all previous accesses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _element(context, builder, signature.args[0], *arguments[:2]), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate


@_intrinsic
def compare_exchange(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Write an element of a uint64 array atomically if it has the expected value; return whether it had."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = _element(context, builder, signature.args[0], *arguments[:2])
        return builder.extract_value(builder.cmpxchg(word, *arguments[2:], "acq_rel", "acquire"), 1)

    return types.boolean(array, types.uint64, types.uint64, types.uint64), generate


@_intrinsic
def call(typing: Any, address: Any) -> Any:
    """Call the C function without parameters at an address, and return its int."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], ir.FunctionType(_INT32, []).as_pointer()), [])

    return types.int32(types.uint64), generate


@_intrinsic
def count_bits(typing: Any, word: Any) -> Any:
    """Return the number of set bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@_intrinsic
def as_bits(typing: Any, value: Any) -> Any:
    """Return the bits of a float as an unsigned integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(signature.return_type.bitwidth))

    return (types.uint64 if value == types.float64 else types.uint32)(value), generate


@_intrinsic
def as_float(typing: Any, bits: Any) -> Any:
    """Return the float32 or float64 with the bits of a uint32 or uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType() if bits == types.uint64 else ir.FloatType())

    return (types.float64 if bits == types.uint64 else types.float32)(bits), generate


@_intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """Return the position of the lowest set bit of a uint64; 64 if none is set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


@_intrinsic
def move(typing: Any, target: Any, to: Any, source: Any, start: Any, count: Any) -> Any:
    """Copy ``count`` elements between flat positions of two C-contiguous arrays; they may overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target = _element(context, builder, signature.args[0], *arguments[:2])
        source = _element(context, builder, signature.args[2], *arguments[2:4])
        itemsize = context.get_abi_sizeof(context.get_data_type(signature.args[0].dtype))
        cgutils.raw_memmove(builder, target, source, arguments[4], itemsize)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64, types.uint64), generate


@_intrinsic
def select(typing: Any, condition: Any, a: Any, b: Any) -> Any:
    """Return ``a if condition else b`` without a branch.

    On x86 before AVX-512, LLVM turns such a choice between floats into a branch (measured: 4.8 instead of 1.5 ns an output of a merge).
    There the bits go through integer registers, with an empty assembly statement that LLVM cannot optimise away.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        condition, a, b = arguments
        if condition.type.width != 1:
            condition = builder.trunc(condition, ir.IntType(1))
        triple, _, features = context.codegen().magic_tuple()
        if not isinstance(signature.return_type, types.Float) or not triple.startswith("x86_64") or "+avx512f" in features:
            return builder.select(condition, a, b)
        bits = ir.IntType(context.get_abi_sizeof(a.type) * 8)
        opaque = ir.InlineAsm(ir.FunctionType(bits, [bits]), "", "=r,0")
        a, b = (builder.call(opaque, [builder.bitcast(x, bits)]) for x in (a, b))
        return builder.bitcast(builder.select(condition, a, b), context.get_value_type(signature.return_type))

    return a(types.boolean, a, a), generate  # casts b to the type of a, as it must where numba widened int32 to int64


@_intrinsic
def present_of_64(typing: Any, bits: Any, start: Any, mask: Any) -> Any:
    """Return a bit mask of the 64 elements that have a bit under ``mask``; numba alone would test them one by one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, mask = arguments
        vector = ir.VectorType(mask.type, GROUP)
        elements = builder.load(_vector(context, builder, signature.args[0], bits, start, vector), align=1)
        present = builder.icmp_unsigned("!=", builder.and_(elements, _spread(builder, mask)), ir.Constant(vector, [0] * GROUP))
        return builder.bitcast(present, ir.IntType(GROUP))

    return types.uint64(bits, types.uint64, bits.dtype), generate


@_intrinsic
def over_of_64(typing: Any, bits: Any, start: Any, over: Any) -> Any:
    """Return a bit mask of the 64 values whose magnitude is above ``over``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, start, over = arguments
        vector = ir.VectorType(over.type, GROUP)
        pointer = _vector(context, builder, signature.args[0], bits, start, vector)
        _ask_ahead(builder, pointer, GROUP * over.type.width // 8)
        return _compare(builder, builder.load(pointer, align=1), over)

    return types.uint64(bits, types.uint64, bits.dtype), generate


@_intrinsic
def add_over_of_64(typing: Any, accumulator: Any, gradient: Any, start: Any, over: Any) -> Any:
    """Add 64 values in place, and compare the sums as :func:`over_of_64` does."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        accumulator, gradient, start, over = arguments
        vector = ir.VectorType(context.get_data_type(signature.args[0].dtype), GROUP)
        target = _vector(context, builder, signature.args[0], accumulator, start, vector)
        source = _vector(context, builder, signature.args[1], gradient, start, vector)
        for pointer in (target, source):
            _ask_ahead(builder, pointer, GROUP * over.type.width // 8)
        total = builder.fadd(builder.load(target, align=1), builder.load(source, align=1))
        builder.store(total, target, align=1)
        return _compare(builder, builder.bitcast(total, ir.VectorType(over.type, GROUP)), over)

    return types.uint64(accumulator, gradient, types.uint64, over), generate


@_intrinsic
def gap_cost(typing: Any, indices: Any, at: Any, low: Any, limit: Any, exception: Any) -> Any:
    """Return the gap before an index without its ``low`` lowest bits, or ``exception`` if that is above ``limit``; both fit into 32 bits.

    numba alone would widen 32-bit indices to 64 bits, and LLVM would compare half as many at a time.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        indices, at, *numbers = arguments
        after = builder.load(_element(context, builder, signature.args[0], indices, at), align=1)
        before = builder.load(_element(context, builder, signature.args[0], indices, builder.sub(at, at.type(1))), align=1)
        low, limit, exception = (number if number.type == after.type else builder.trunc(number, after.type) for number in numbers)
        high = builder.lshr(builder.add(builder.sub(after, before), after.type(-1)), low)
        cost = builder.select(builder.icmp_unsigned("<=", high, limit), high, exception)
        return cost if cost.type == _INT32 else builder.trunc(cost, _INT32)

    return types.uint32(indices, types.uint64, types.uint64, types.uint64, types.uint64), generate


@_intrinsic
def leading_zeros(typing: Any, integer: Any) -> Any:
    """Return the number of leading zero bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate


def _sums(signed: bool, fused: bool) -> Any:
    """Return an intrinsic that sums values in lanes of float64, counting non-finite ones as zeros.

    With ``signed`` it sums the values and their squares, otherwise their magnitudes, and finds the largest.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_types, arrays = signature.args[: 1 + fused], arguments[: 1 + fused]
        start, end, lanes = arguments[1 + fused :]
        element = context.get_data_type(array_types[0].dtype)
        integer = ir.IntType(64 if element == ir.DoubleType() else 32)
        vector, bits, doubles = (ir.VectorType(of, LANES) for of in (element, integer, ir.DoubleType()))
        infinity = magnitude.nan(np.dtype(f"i{integer.width // 8}")) - 1
        unsigned, infinite, zeros = (ir.Constant(bits, [of] * LANES) for of in (2 ** (integer.width - 1) - 1, infinity, 0))
        results = [_vector(context, builder, signature.args[-1], lanes, ir.IntType(64)(at), doubles) for at in (0, LANES)]
        kept_in = cgutils.alloca_once_value  # a register, after optimisation
        totals = [kept_in(builder, builder.load(result, align=8)) for result in results]  # type: ignore[no-untyped-call]

        def widened(value: Any) -> Any:
            value = builder.bitcast(value, vector)
            return value if vector == doubles else builder.fpext(value, doubles)

        with cgutils.for_range_slice(builder, start, end, start.type(LANES)) as (i, _):
            pointers = [_vector(context, builder, kind, array, i, vector) for kind, array in zip(array_types, arrays)]
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


moments_of: Any = _sums(signed=True, fused=False)
moments_of_sum: Any = _sums(signed=True, fused=True)
norms_of: Any = _sums(signed=False, fused=False)
norms_of_sum: Any = _sums(signed=False, fused=True)


@_intrinsic
def drawn_of_64(typing: Any, values: Any, start: Any, unit: Any, shift: Any, scale: Any, seed: Any) -> Any:
    """Return a bit mask of 64 values, each drawn with probability ``(magnitude * unit + shift) * scale``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, start, unit, shift, scale, seed = arguments
        element = shift.type
        vector, numbers = ir.VectorType(element, GROUP), ir.VectorType(_INT32, GROUP)
        bits = ir.VectorType(ir.IntType(64 if element == ir.DoubleType() else 32), GROUP)
        pointer = _vector(context, builder, signature.args[0], values, start, bits)
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
        number = builder.mul(mixed(number, 16), ir.Constant(numbers, [_MIX[0]] * GROUP))
        number = builder.add(mixed(number, 15), high)
        number = mixed(builder.mul(number, ir.Constant(numbers, [_MIX[1]] * GROUP)), 16)
        number = builder.lshr(number, ir.Constant(numbers, [8] * GROUP))  # 24 bits, which float32 holds exactly
        drawn = builder.fmul(builder.sitofp(number, vector), ir.Constant(vector, [2.0**-24] * GROUP))
        return builder.bitcast(builder.fcmp_unordered("<", drawn, chance), ir.IntType(GROUP))  # NaN is drawn

    return types.uint64(values, types.uint64, values.dtype, values.dtype, values.dtype, types.uint64), generate


def _vector(context: Any, builder: Any, array_type: Any, array: Any, start: Any, vector: Any) -> Any:
    """Return a pointer to consecutive elements of an array as a vector."""
    return builder.bitcast(_element(context, builder, array_type, array, start), vector.as_pointer())


def _ask_ahead(builder: Any, pointer: Any, size: int) -> None:
    """Prefetch as many bytes as are read now, further on in memory."""
    _prefetch(builder, pointer, _READ, range(_AHEAD, _AHEAD + size, LINE))


def _compare(builder: Any, bits: Any, over: Any) -> Any:
    vector = bits.type
    unsigned = ir.Constant(vector, [2 ** (over.type.width - 1) - 1] * GROUP)
    return builder.bitcast(builder.icmp_signed(">", builder.and_(bits, unsigned), _spread(builder, over)), ir.IntType(GROUP))


def _spread(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(value.type, GROUP)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _INT32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT32, GROUP), [0] * GROUP))
