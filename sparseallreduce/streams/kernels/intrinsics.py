"""Instructions of the processor that NumPy's and Python's operations do not express, for compiled loops."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

__all__ = [
    "LINE",
    "address_of",
    "call",
    "compare_exchange",
    "count_bits",
    "finish_streaming",
    "load_acquire",
    "lowest_bit",
    "prefetch",
    "prefetch_to_write",
    "store_release",
    "stream_16_bytes",
]

LINE = 64  # bytes that a core fetches at once: what one process writes and others read starts at multiples of it

_INT32 = ir.IntType(32)
_READ, _WRITE = _INT32(0), _INT32(1)  # what a line is fetched for
_KEEP_DATA = [_INT32(3), _INT32(1)]  # into all levels of cache, as data


def _intrinsic(function: Any) -> Any:
    return numba_intrinsic(function)


@_intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask the processor to bring the cache line of an array's element; the program goes on at once."""
    return types.void(array, types.uint64), _prefetching(_READ)


@_intrinsic
def prefetch_to_write(typing: Any, array: Any, index: Any) -> Any:
    """As :func:`prefetch`, of an element that is going to be changed: the caches of other cores are to give the line up."""
    return types.void(array, types.uint64), _prefetching(_WRITE)


def _prefetching(purpose: ir.Constant) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT32, _INT32, _INT32])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind), [pointer, purpose, *_KEEP_DATA])
        return context.get_dummy_value()

    return generate


@_intrinsic
def address_of(typing: Any, array: Any, index: Any) -> Any:
    """The address of an element."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(64))

    return types.uint64(array, types.uint64), generate


@_intrinsic
def stream_16_bytes(typing: Any, target: Any, to: Any, source: Any, start: Any) -> Any:
    """Copy 16 bytes past the caches, between flat positions of two arrays; in the target to a multiple of 16 bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, to, source, start = arguments
        target = context.make_array(signature.args[0])(context, builder, target).data
        source = context.make_array(signature.args[2])(context, builder, source).data
        words = ir.VectorType(ir.IntType(64), 2).as_pointer()
        copied = builder.load(builder.bitcast(builder.gep(source, [start]), words), align=1)
        written = builder.store(copied, builder.bitcast(builder.gep(target, [to]), words), align=16)
        written.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(target, types.uint64, source, types.uint64), generate


@_intrinsic
def finish_streaming(typing: Any) -> Any:
    """Let what was written past the caches be seen by others before what is written from now on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def load_acquire(typing: Any, array: Any, index: Any) -> Any:
    """An element of a uint64 array that another process may be writing; nothing that follows is read before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load_atomic(builder.gep(data, [arguments[1]]), "acquire", 8)

    return types.uint64(array, types.uint64), generate


@_intrinsic
def store_release(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write an element of a uint64 array that another process may be reading, after all that came before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store_atomic(arguments[2], builder.gep(data, [arguments[1]]), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate


@_intrinsic
def compare_exchange(typing: Any, array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Write an element of a uint64 array that other processes may be writing, if it is as expected; return whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        found = builder.cmpxchg(builder.gep(data, [arguments[1]]), arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(found, 1)

    return types.boolean(array, types.uint64, types.uint64, types.uint64), generate


@_intrinsic
def call(typing: Any, address: Any) -> Any:
    """Call the C function without parameters that lies at an address, and return its int."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(builder.inttoptr(arguments[0], ir.FunctionType(_INT32, []).as_pointer()), [])

    return types.int32(types.uint64), generate


@_intrinsic
def count_bits(typing: Any, word: Any) -> Any:
    """How many bits of a uint64 are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@_intrinsic
def lowest_bit(typing: Any, word: Any) -> Any:
    """The place of the lowest bit that is set in a uint64; 64 if none is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(0))

    return types.uint64(types.uint64), generate
