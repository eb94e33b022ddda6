"""What the library takes from numba beyond its documented interface, each thing by itself.

pyproject.toml keeps numba below the first version that these tests have not passed with. Where one fails with a newer version, its
message names what has changed and the file that uses it: mend that file, then raise the bound.
"""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from llvmlite import ir
from numba import types
from numba.core import cgutils, config, errors, event
from numba.core.compiler_lock import global_compiler_lock
from numba.cuda import libdevice
from numba.extending import intrinsic

import sparseallreduce

PACKAGE = Path(sparseallreduce.__file__).parent
COMPILATION = "streams/kernels/compilation.py"
COMPILED = "streams/kernels/compiled.py"
SELECTION = "streams/kernels/selection_compiled.py"
FLOATS = types.Array(types.float64, 1, "C")


def private(owner, name, user):
    """An attribute of an object of numba; the test fails if there is none."""
    found = getattr(owner, name, None)
    owner = getattr(owner, "__name__", type(owner).__name__)
    assert found is not None, f"numba {numba.__version__} has no {owner}.{name}, which sparseallreduce/{user} uses"
    return found


def changed(what, user):
    return f"numba {numba.__version__} behaves otherwise: {what}; sparseallreduce/{user} relies on that"


def first(array):
    return array[0]


def same(array):
    return array


def test_no_other_private_module_is_imported():
    imports = r"^\s*(?:from (numba\.(?!extending)[\w.]+) import (\w+(?:, \w+)*)|import (numba\.[\w.]+))"
    used = {found for path in PACKAGE.rglob("*.py") for found in re.findall(imports, path.read_text(), re.MULTILINE)}
    tried_here = {("numba.core", "config", ""), ("numba.core", "cgutils", ""), ("numba.core.errors", "NumbaWarning", "")}
    tried_here |= {("numba.core.compiler_lock", "global_compiler_lock", ""), ("numba.cuda", "libdevice", "")}
    tried_here |= {("numba.cuda.cudadrv.devicearray", "FakeCUDAArray", "")}
    tried_here |= {("numba.core", "event", ""), ("numba.core.event", "Listener", "")}
    assert used == tried_here, "whatever is imported from numba's private modules gets a test in this file"


def test_listeners_are_told_of_compilations():
    """The command line announces them (sparseallreduce/cli/compiling.py)."""
    told = []

    class Noting(event.Listener):
        def on_start(self, event):
            told.append("start")

        def on_end(self, event):
            told.append("end")

    listener = Noting()
    event.register("numba:compile", listener)
    try:
        numba.njit(lambda value: value + 1)(1)
    finally:
        event.unregister("numba:compile", listener)
    assert told[:1] == ["start"] and told.count("start") == told.count("end")


def code(function, **options):
    """The machine code, as text of LLVM, that a function becomes with options of ``numba.njit``."""
    dispatcher = numba.njit(**options)(function)
    try:
        dispatcher.compile((FLOATS,))
    except KeyError as error:
        pytest.fail(f"numba.njit of {numba.__version__} does not take {options}, which sparseallreduce/{COMPILATION} gives it: {error}")
    return dispatcher.inspect_llvm((FLOATS,))


@pytest.mark.parametrize(
    "option,value,function,mark",
    [("no_cfunc_wrapper", True, first, "cfunc."), ("no_cpython_wrapper", True, first, "7cpython"), ("_nrt", False, same, "@NRT_incref")],
)
def test_an_option_leaves_out_code(option, value, function, mark):
    others = {} if option == "no_cpython_wrapper" else {"no_cpython_wrapper": True}
    assert mark in code(function, **others), f"this test no longer shows what numba.njit({option}={value}) does: there is no {mark!r}"
    assert mark not in code(function, **others, **{option: value}), changed(f"njit({option}={value}) keeps {mark!r}", COMPILATION)


def test_the_option_forceinline_makes_a_function_part_of_its_callers():
    assert "alwaysinline" not in code(first)
    assert "alwaysinline" in code(first, forceinline=True), changed("njit(forceinline=True) marks nothing 'alwaysinline'", COMPILATION)


def test_compile_returns_the_entry_point_that_overloads_keeps_by_argument_types():
    dispatcher = numba.njit(first)
    assert private(dispatcher, "overloads", COMPILATION).get((FLOATS,)) is None
    entry = dispatcher.compile((FLOATS,))
    assert callable(entry), changed("dispatcher.compile() does not return an entry point", COMPILATION)
    kept = dispatcher.overloads.get((FLOATS,))
    assert kept is not None, changed("dispatcher.overloads has other keys than tuples of argument types", COMPILATION)
    assert private(kept, "entry_point", COMPILATION) is entry, changed("entry_point is not what compile() returned", COMPILATION)
    assert entry(np.array([3.0])) == 3.0


def test_an_entry_point_takes_arrays_as_they_come_but_none_with_items_of_another_size():
    entry = numba.njit(first).compile((types.Array(types.float64, 1, "C", readonly=True, aligned=False),))
    array = np.frombuffer(b"\0" + np.array([3.0, 4.0]).tobytes(), np.float64, offset=1)
    assert not array.flags.writeable and not array.flags.aligned
    assert entry(array) == 3.0, changed("an entry point does not read an unaligned read-only array", COMPILATION)
    for other in (np.ones(2, np.float32), 3.0):
        try:
            entry(other)
        except TypeError:
            continue
        pytest.fail(changed(f"an entry point for an array of float64 takes {other!r}", COMPILED))


def test_an_entry_point_for_a_literal_takes_its_value():
    entry = numba.njit(lambda op, array: array[op]).compile((private(types, "literal", COMPILED)(1), FLOATS))
    assert entry(1, np.array([3.0, 4.0])) == 4.0, changed("an entry point for types.literal(1) does not take 1", COMPILED)


def test_products_can_be_kept_from_fusing_with_sums():
    for name in ("fmul_rn", "dmul_rn"):
        private(libdevice, name, "streams/kernels/cuda/arrays.py")


def test_the_simulator_takes_an_array_where_it_lies():
    """It is asked in a process of its own, as all that simulates CUDA."""
    program = """
import numpy as np
from numba import cuda
from numba.cuda.cudadrv.devicearray import FakeCUDAArray

@cuda.jit
def first(array):
    array[0] = 7

given = np.zeros(2)
first[1, 1](FakeCUDAArray(given))
assert given[0] == 7
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, changed(f"the simulator's FakeCUDAArray: {done.stderr}", "streams/kernels/cuda/launching.py")


@pytest.fixture
def function(tmp_path, monkeypatch):
    """A function in the file of a module, as numba needs it to cache what it compiles."""
    (tmp_path / "with_plus_one.py").write_text("def plus_one(array):\n    return array[0] + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("with_plus_one").plus_one
    del sys.modules["with_plus_one"]


def cached(dispatcher):
    """What the cache on disk has for arrays of floats; None if nothing."""
    for name in ("typingctx", "targetctx"):
        private(private(dispatcher, name, COMPILATION), "refresh", COMPILATION)()
    return private(private(dispatcher, "_cache", COMPILATION), "load_overload", COMPILATION)((FLOATS,), dispatcher.targetctx)


def test_the_cache_is_asked_without_compiling(function):
    before, after = (numba.njit(cache=True)(function) for _ in range(2))
    assert cached(before) is None
    before.compile((FLOATS,))
    assert cached(after) is not None, changed("_cache.load_overload() does not find what another dispatcher has compiled", COMPILATION)
    assert cached(numba.njit(function)) is None, changed("_cache.load_overload() finds something where nothing is cached", COMPILATION)


def test_a_cache_is_asked_again_without_preparing_the_dispatcher(function):
    before, after = (numba.njit(cache=True)(function) for _ in range(2))
    before.compile((FLOATS,))
    assert cached(after) is not None
    with private(after._cache, "_guard_against_spurious_io_errors", COMPILATION)():
        found = private(after._cache, "_load_overload", COMPILATION)((FLOATS,), after.targetctx)
    assert found is not None, changed("_cache._load_overload() does not find what is cached", COMPILATION)


def test_what_the_cache_has_becomes_an_overload_without_compiling(function):
    before, after = (numba.njit(cache=True)(function) for _ in range(2))
    before.compile((FLOATS,))
    with global_compiler_lock:
        found = cached(after)
        private(after.targetctx, "insert_user_function", COMPILATION)(found.entry_point, found.fndesc, [found.library])
        private(after, "add_overload", COMPILATION)(found)
    assert after.overloads[(FLOATS,)] is found, changed("add_overload() does not add what was in the cache", COMPILATION)
    assert found.entry_point(np.array([3.0])) == 4.0 == after(np.array([3.0]))
    caller = numba.njit(lambda array: after(array) + 1)
    assert caller(np.array([3.0])) == 5.0, changed("a loaded function cannot be called by another one", COMPILATION)
    assert not after.stats.cache_misses


def test_stats_know_the_folder_of_the_cache_and_what_was_not_in_it(function):
    dispatcher, later = (numba.njit(cache=True)(function) for _ in range(2))
    folder = private(private(dispatcher, "stats", COMPILATION), "cache_path", COMPILATION)
    dispatcher.compile((FLOATS,))
    later.compile((FLOATS,))
    assert list(Path(folder).glob("*plus_one*.nbi")), changed(f"nothing is cached in stats.cache_path, {folder}", COMPILATION)
    assert private(dispatcher.stats, "cache_misses", "cli/doctor.py"), changed("stats.cache_misses is empty after a miss", "cli/doctor.py")
    assert not later.stats.cache_misses, changed("stats.cache_misses is not empty after a hit", "cli/doctor.py")
    assert numba.njit(function).stats.cache_path is None, changed("stats.cache_path is not None without a cache", COMPILATION)


def test_a_function_that_cannot_be_cached_raises_runtime_error():
    names = {}
    exec(compile("def f(array):\n    return array[0]\n", "/nowhere/at/all.py", "exec"), names)
    try:
        numba.njit(cache=True)(names["f"])
    except RuntimeError:
        return
    except Exception as error:
        pytest.fail(changed(f"njit(cache=True) without a place to cache raises {error!r}, not RuntimeError", COMPILATION))
    pytest.fail(changed("njit(cache=True) without a place to cache raises nothing", COMPILATION))


def test_settings_say_whether_kernels_are_compiled():
    assert private(config, "DISABLE_JIT", "streams/kernels/__init__.py") in (0, 1)


def test_numbas_warnings_are_of_one_class():
    assert issubclass(private(errors, "NumbaWarning", COMPILATION), Warning)


def generated(result, *arguments):
    """An intrinsic whose machine code a function writes, called with arrays and numbers."""

    def decorate(generate):
        names = ", ".join(f"x{i}" for i in range(len(arguments)))
        scope = {"result": result, "generate": generate}
        exec(f"def typed(typing, {names}): return result({names}), generate\ndef call({names}): return op({names})", scope)
        scope["op"] = intrinsic(scope["typed"])
        return numba.njit(scope["call"])(*arguments)

    return decorate


def context():
    """What machine code is generated with, once numba has loaded all that it knows."""
    dispatcher = numba.njit(first)
    dispatcher.compile((FLOATS,))
    return dispatcher.targetctx


def test_the_elements_of_an_array_are_found_by_make_array():
    private(context(), "make_array", COMPILED)

    @generated(types.float64, np.array([3.0, 4.0]), np.uint64(1))
    def found(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        return builder.load(builder.gep(private(array, "data", COMPILED), [arguments[1]]))

    assert found == 4.0, changed("context.make_array(type)(context, builder, array).data does not point to the elements", COMPILED)


def test_what_returns_nothing_returns_the_dummy_value():
    private(context(), "get_dummy_value", COMPILED)

    @generated(types.void, np.uint64(1))
    def returned(context, builder, signature, arguments):
        return context.get_dummy_value()

    assert returned is None, changed("context.get_dummy_value() is not what a void function returns", COMPILED)


def test_types_are_known_to_llvm():
    target = context()
    double = private(target, "get_data_type", COMPILED)(types.float64)
    assert double == ir.DoubleType(), changed("context.get_data_type(float64) is not double", COMPILED)
    assert private(target, "get_value_type", COMPILED)(types.float64) == double, changed("get_value_type(float64) is not double", COMPILED)
    assert private(target, "get_abi_sizeof", COMPILED)(double) == 8, changed("context.get_abi_sizeof() does not give bytes", COMPILED)


def test_the_processor_is_named():
    triple, _, features = private(private(context(), "codegen", COMPILED)(), "magic_tuple", COMPILED)()
    assert "-" in triple and isinstance(features, str), changed("codegen().magic_tuple() is not a triple, a name and features", COMPILED)


def test_memory_is_moved():
    private(cgutils, "raw_memmove", COMPILED)
    target, source = np.zeros(3), np.array([1.0, 2.0, 3.0])

    @generated(types.void, target, source, np.uint64(2))
    def _(context, builder, signature, arguments):
        target, source = (context.make_array(FLOATS)(context, builder, array).data for array in arguments[:2])
        cgutils.raw_memmove(builder, target, source, arguments[2], 8)
        return context.get_dummy_value()

    assert target.tolist() == [1, 2, 0], changed("cgutils.raw_memmove(builder, target, source, count, itemsize) copies otherwise", COMPILED)


def test_a_loop_keeps_a_sum():
    private(cgutils, "alloca_once_value", SELECTION)
    private(cgutils, "for_range_slice", SELECTION)

    @generated(types.uint64, np.uint64(3), np.uint64(20))
    def total(context, builder, signature, arguments):
        start, end = arguments
        kept = cgutils.alloca_once_value(builder, start.type(0))
        with cgutils.for_range_slice(builder, start, end, start.type(8)) as (i, _):
            builder.store(builder.add(builder.load(kept), i), kept)
        return builder.load(kept)

    assert total == 3 + 11 + 19, changed("a loop of cgutils.for_range_slice takes other steps", SELECTION)
