"""A copy of the library for each rank of one process: what belongs to a process, its modules' globals, belongs to a rank here.

The packages in ``OWN`` are executed once for each rank. What they import is what any program gets, but for a few modules that lead to
the world: MPI, the clock, the system's calls by which a core is offered, and compiled kernels. A kernel of the runtime is run as the
Python function that it is compiled from, on words which make every read and store a point where other ranks may come in between.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numba import types

from sparseallreduce.algorithms.allreduce import allreduce
from sparseallreduce.algorithms.collectives.call import run_collective
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.many import allreduce_list
from sparseallreduce.streams.kernels import dispatch
from world import hooks

OWN = (  # these packages and the modules in them
    "sparseallreduce",
    "sparseallreduce.runtime",
    "sparseallreduce.reducers",
    "sparseallreduce.linear.data",
    "sparseallreduce.linear.solvers",
)
SHARED = ("sparseallreduce.linear.data.dataset", "sparseallreduce.linear.solvers.local")  # but for these, whose objects ranks send

# Numbers and functions of the library that a world of small streams replaces. A name that is not there any more is an error.
RUNTIME = "sparseallreduce.runtime."
CONSTANTS: dict[str, dict[str, Any]] = {
    RUNTIME + "progress": {"_SPINS": 1, "HANDSHAKE_SPINS": 2, "COLLECTIVE_SPINS": 1},
    RUNTIME + "predictions": {"_ALWAYS_PACKED": 0, "_ALWAYS_PACKED_SHARED": 0},
    RUNTIME + "memory.words": {"_SPINS_OVERSUBSCRIBED": 2},
    RUNTIME + "memory.sparse": {"_BYTES": 1 << 20},
    RUNTIME + "memory.host": {"_BYTES": 1 << 20, "_MAPPED": 1 << 12},
    RUNTIME + "inside_hosts": {"_LEAST": 1},
    RUNTIME + "shortcuts.sparse_shared": {"_LITTLE": 0},
}
MACHINE = Machine(alpha_dense=4e-6, beta_blocking=2e-10, codec=4e-9, alpha_local=2e-6, beta_local=1e-10, gamma_far=3e-10)
SPINS = 2  # looks at a word before a wait is a long one


class _Calibration:
    """Nothing is kept from run to run."""

    def __init__(self, *_: Any) -> None:
        pass

    def like(self, measured: Machine) -> Machine:
        return measured

    def keep(self, measured: Machine) -> None:
        pass


def _measured(*_: Any, **__: Any) -> Any:
    """In place of the measurement of the network."""
    return MACHINE
    yield


def _exchange_times(_: Any) -> Any:
    """In place of another: pieces pay."""
    return 2.0, 1.0
    yield


# By module: what is put in the place of names of the library, for those who import them after that.
REPLACED: dict[str, dict[str, Any]] = {
    RUNTIME + "memory.words": {"_spins": lambda: SPINS},
    RUNTIME + "calibration": {"Calibration": _Calibration},
    RUNTIME + "predictions": {"_fastest": hooks.begins, "_fastest_of": lambda _, __, *args: hooks.begins(*args)},
    RUNTIME + "setup": {"exchange_times": _exchange_times},
    RUNTIME + "stalls": {"blocked": lambda *_: nullcontext()},  # whose thread is outside of the world
    "sparseallreduce.algorithms.measuring": {"measure": _measured},
}


class Words:
    """Words that ranks share, as a kernel sees them."""

    __slots__ = ("array", "world")

    def __init__(self, array: np.ndarray, world: Any) -> None:
        self.array, self.world = array, world

    def __getitem__(self, at: Any) -> Any:
        self.world.word_read(self.array, at)
        return self.array[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        self.world.word_stored(self.array, at, value)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape


class Library:
    """The library of one rank.

    Parameters
    ----------
    world : World
    rank : int
    MPI : object
        What it takes for ``mpi4py.MPI``.
    host : str
        The name of its host, of at most 8 bytes.
    cores : int
        That all ranks may run on.
    constants : mapping
        As ``CONSTANTS``, for more or other numbers.
    """

    def __init__(self, world: Any, rank: int, MPI: Any, host: str, cores: int, constants: Mapping[str, Mapping[str, Any]] = {}) -> None:
        self.modules: dict[str, ModuleType] = {}
        self._constants = {name: {**CONSTANTS.get(name, {}), **constants.get(name, {})} for name in {*CONSTANTS, *constants}}
        self._stand_ins = _stand_ins(world, MPI)
        self._replaced = {**REPLACED, RUNTIME + "hosts": {"this_place": lambda: self._place(host, cores)}}
        self._builtins = {**vars(builtins), "__import__": self._import}
        self.sar = self.load("sparseallreduce")

    def load(self, name: str) -> Any:
        """A module as this rank sees it."""
        if name in self.modules:
            return self.modules[name]
        parent, _, last = name.rpartition(".")
        if name in SHARED or (not _is_own(name) and parent not in OWN):
            module = self._substituted(name)
        elif (code := _code(name, self._frozen(name))) is None:
            module = self._substituted(name)  # a package that all ranks share
        else:
            if parent:
                self.load(parent)
            module = self._executed(name, *code)
        self.modules[name] = module
        if _is_own(parent):
            setattr(self.modules[parent], last, module)
        return module

    def _place(self, host: str, cores: int) -> Any:
        """Where the rank runs: ranks of one host share memory and these cores."""
        name = host.encode().ljust(8, b"\0")
        return self.load(RUNTIME + "hosts").Place(name, name, ((1 << cores) - 1).to_bytes(-(-cores // 8), "little"))

    def _frozen(self, name: str) -> tuple[tuple[str, Any], ...]:
        return tuple(sorted(self._constants.get(name, {}).items()))

    def _executed(self, name: str, code: CodeType, path: list[str] | None, file: str) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(__builtins__=self._builtins, __file__=file, __package__=name if path else name.rpartition(".")[0])
        if path:
            module.__path__ = path
        self.modules[name] = module
        known = sys.modules.get(name)
        sys.modules[name] = module  # where dataclasses look for the names in annotations
        try:
            exec(code, module.__dict__)
        finally:
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
        for replaced, value in self._replaced.get(name, {}).items():
            assert hasattr(module, replaced), f"there is no {replaced} in {name} any more: see {__name__}"
            setattr(module, replaced, value)
        return module

    def _substituted(self, name: str) -> ModuleType:
        """A module that all ranks share, with other names in the place of some of its own."""
        if name in self._stand_ins and not isinstance(self._stand_ins[name], dict):
            return self._stand_ins[name]  # type: ignore[no-any-return]
        original = importlib.import_module(name)
        changes = {**self._stand_ins.get(name, {}), **self._replaced.get(name, {})}
        if not changes:
            return original
        module = ModuleType(name)
        module.__dict__.update(vars(original))
        for replaced in changes:
            assert hasattr(original, replaced), f"there is no {replaced} in {name} any more: see {__name__}"
        module.__dict__.update(changes)
        return module

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level:
            name = importlib.util.resolve_name("." * level + name, globals["__package__"])
        if name.partition(".")[0] != "sparseallreduce" and name not in self._stand_ins:
            return builtins.__import__(name, globals, locals, fromlist or ())
        module = self.load(name)
        if not fromlist:
            return self.load(name.partition(".")[0])
        for wanted in fromlist:
            submodule = f"{name}.{wanted}"
            if submodule in self.modules or submodule in self._stand_ins or not hasattr(module, wanted):
                setattr(module, wanted, self.load(submodule)) if _is_own(module.__name__) else None
        return _with_substitutes(self, module, name, fromlist)


def _is_own(name: str) -> bool:
    return name in OWN or any(name.startswith(package + ".") for package in OWN[1:])


def _with_substitutes(library: Library, module: Any, name: str, fromlist: Any) -> Any:
    """``from package import module`` gives the rank's own view of the module, also where all ranks share the package."""
    changed = {}
    for wanted in fromlist:
        submodule = f"{name}.{wanted}"
        if submodule in library._stand_ins or submodule in library._replaced:
            changed[wanted] = library.load(submodule)
    return SimpleNamespace(**{**vars(module), **changed}) if changed else module


@functools.cache
def _code(name: str, constants: tuple[tuple[str, Any], ...]) -> tuple[CodeType, list[str] | None, str] | None:
    """The compiled source of a module of the library, its path if it is a package, and its file."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, f"there is no module {name} any more: see {__name__}"
    path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else None
    if path and not _is_own(name):
        return None
    if name.rpartition(".")[0] == "sparseallreduce" and name not in OWN:
        return None  # a module of the top, as errors and version
    with open(spec.origin) as file:
        tree = ast.parse(file.read(), spec.origin)
    missing = dict(constants)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
            pairs = zip(target.elts, value.elts) if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) else [(target, value)]
            changed = [
                ast.copy_location(ast.Constant(missing.pop(name.id)), old) if isinstance(name, ast.Name) and name.id in missing else old
                for name, old in pairs
            ]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                value.elts = changed
            else:
                statement.value = changed[0]
    assert not missing, f"there is no {', '.join(missing)} in {name} any more: see {__name__}"
    return compile(tree, spec.origin, "exec", dont_inherit=True), path, spec.origin


def _stand_ins(world: Any, MPI: Any) -> dict[str, Any]:
    """What the library imports that leads to the world: whole modules, or names in them."""

    def load_acquire(words: Words, at: Any) -> Any:
        world.word_read(words.array, at)
        return words.array[at]

    def store_release(words: Words, at: Any, value: Any) -> None:
        world.word_stored(words.array, at, value)

    def compare_exchange(words: Words, at: Any, expected: Any, value: Any) -> bool:
        return bool(world.word_exchanged(words.array, at, expected, value))

    def call(address: Any) -> int:
        world.wait("offered")
        return 0

    def compiled_entry(function: Callable[..., Any], signature: tuple[Any, ...]) -> Callable[..., Any]:
        return twin(world, function, signature)

    def allocating(name: str) -> Callable[..., Any]:
        original = getattr(np, name)

        def allocate(*args: Any, **kwargs: Any) -> Any:
            world.point(f"numpy.{name}")
            return original(*args, **kwargs)

        return allocate

    def perf_counter() -> float:
        world.clock += 1e-7
        return float(world.clock)

    def sleep(seconds: float) -> None:
        world.clock += seconds
        world.wait("sleep")

    mpi4py = ModuleType("mpi4py")
    mpi4py.MPI = MPI  # type: ignore[attr-defined]
    return {
        "atexit": SimpleNamespace(register=lambda function: function),
        "mpi4py": mpi4py,
        "mpi4py.MPI": MPI,
        "time": {"perf_counter": perf_counter, "monotonic": perf_counter, "sleep": sleep},
        "os": {
            "sched_yield": lambda: world.wait("sched_yield"),
            "register_at_fork": lambda **_: None,
        },
        "numpy": {name: allocating(name) for name in ("empty", "zeros")},
        "sparseallreduce.streams.kernels.compilation": {
            "kernel": lambda function: function,
            "inlined": lambda function: function,
            "compiled_entry": compiled_entry,
        },
        "sparseallreduce.streams.kernels.intrinsics": {
            "load_acquire": load_acquire,
            "store_release": store_release,
            "compare_exchange": compare_exchange,
            "call": call,
        },
        "sparseallreduce.streams.kernels.compiled": {"cut": cut, "sum_cut": sum_cut},
        "sparseallreduce.algorithms.allreduce": {"allreduce": lambda *args: hooks.resumable(lambda: world, allreduce(*args))},
        "sparseallreduce.algorithms.collectives.call": {
            "run_collective": lambda *args: hooks.resumable(lambda: world, run_collective(*args))
        },
        "sparseallreduce.algorithms.many": {"allreduce_list": lambda *args: hooks.resumable(lambda: world, allreduce_list(*args))},
    }


def twin(world: Any, function: Callable[..., Any], signature: tuple[Any, ...]) -> Callable[..., Any]:
    """A kernel as the Python function that it is compiled from; faults come before or after it, other ranks also in between."""
    name = f"kernel {function.__name__.lstrip('_')}"
    convert = [_converter(world, of) for of in signature]

    def run(*args: Any) -> Any:
        world.point(name)
        if name in world.lies:
            return world.lies[name](*args)
        with np.errstate(over="ignore"):
            result = function(*[to(value) for to, value in zip(convert, args, strict=True)])
        world.after(name)
        return result.item() if isinstance(result, np.generic) else result

    return run


def _converter(world: Any, of: Any) -> Callable[[Any], Any]:
    if isinstance(of, types.Array):
        return (lambda array: Words(array, world)) if of.dtype == types.uint64 and of.ndim == 1 else lambda array: array
    return np.uint64 if of == types.uint64 else lambda value: value


def cut(rows: Any, itemsize: Any, counts: Any, size: Any, part: Any, parts: Any, bounds: Any) -> Any:
    """What kernels call of the compiled sums, as a call of its own."""
    entry = dispatch.find("rows.cut_rows", None, rows.dtype, np.dtype(np.uint32), 1)
    assert entry is not None
    return entry(rows, itemsize, counts, size, part, parts, bounds)


def sum_cut(op: int, rows: Any, values: Any, start: Any, counts: Any, bounds: Any, whole: Any, at_end: Any, *rest: Any) -> Any:
    """Likewise."""
    entry = dispatch.find("rows.sum_cut_rows", np.add, rows.dtype, values.dtype, 1)
    assert entry is not None
    return entry(rows, values, start, counts, bounds, bool(whole), bool(at_end), *rest)
