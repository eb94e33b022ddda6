"""Rules of the house, read off the source: imports point one way and in no circle, and some rooms' files and functions are short."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import sparseallreduce as sar

PACKAGE = Path(sar.__file__).parent
NAME = PACKAGE.name
# Each layer may use those before it and itself. Neither of two on one line may use the other.
LAYERS = (
    ("kernels",),
    ("streams",),
    ("algorithms",),
    ("runtime",),
    ("reducers", "data_cache"),
    ("optim", "testing"),
    ("linear", "torch"),
    ("cli",),
)
LEVELS = {layer: level for level, layers in enumerate(LAYERS) for layer in layers}
# Likewise the rooms of linear, of which those above may use those before them.
ROOMS = (
    ("kernels", "models", "encoding"),
    ("multiclass",),
    ("exporting",),
    ("data", "model_file"),
    ("metrics", "interpretation"),
    ("weights",),
    ("gradients",),
    ("strategies",),
    ("training",),
    ("solvers",),
    ("defaults",),
    ("estimators",),
)
STOREYS = {room: storey for storey, rooms in enumerate(ROOMS) for room in rooms}
# What kernels take beside their own folder: operators, dtypes, and how arrays are allocated.
KERNELS = ("streams.kernels", "streams.operator", "streams.memory", "streams.dtypes")
# Packages that are not there for everyone, or take long to load: an import of what needs them may wait until it is called for.
LATE = {"mpi4py", "numba", "llvmlite", "scipy", "sklearn", "torch", "cupy", "matplotlib", "pyarrow", "zstandard"}
# Other imports inside functions, and why there is no other way.
DEFERRED = {
    ("streams.stream", "streams.reduction"): "+ of two streams is a reduction, which is made of streams",
}
LAYERS_OF_OPERATIONS = ("kernels", "streams", "algorithms", "runtime", "reducers", "optim")
FILE_LINES, FUNCTION_LINES = 450, 60


class Import(NamedTuple):
    """One module of a file's imports."""

    target: str
    line: int
    in_function: bool
    for_types: bool  # under TYPE_CHECKING, so that it is never executed


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def short(module: str) -> str:
    """The name without that of the package."""
    return module.removeprefix(NAME + ".")


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    return tuple(found_in(ast.parse(MODULES[module].read_text())))


def found_in(node: ast.AST, in_function: bool = False, for_types: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, in_function, for_types) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module is not None, f"line {child.lineno} imports relatively"
            names = {f"{child.module}.{alias.name}" for alias in child.names}
            targets = {name if name in MODULES else child.module for name in names}
            yield from (Import(target, child.lineno, in_function, for_types) for target in sorted(targets))
        elif isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from found_in(ast.Module(child.body, []), in_function, True)
            yield from found_in(ast.Module(child.orelse, []), in_function, for_types)
        else:
            yield from found_in(child, in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda), for_types)


def uses(module: str, functions: bool = False, types: bool = False) -> set[str]:
    """Return the modules of ours that this one loads: with itself, or with ``functions`` at any time, or with ``types`` for annotations."""
    executed = (each for each in imports_of(module) if (types or not each.for_types) and (functions or not each.in_function))
    return {each.target for each in executed if each.target in MODULES}


def reached(module: str, functions: bool = False, types: bool = False) -> set[str]:
    """Return the modules of ours that come to be loaded so, itself only if there is a circle."""
    found: set[str] = set()
    left = [module]
    while left:
        new = uses(left.pop(), functions, types) - found
        found |= new
        left += new
    return found


def needs(module: str) -> set[str]:
    """Packages of others in LATE that loading a module loads."""
    loaded = {module, *reached(module)}
    targets = {each.target for one in loaded for each in imports_of(one) if not each.for_types and not each.in_function}
    return {target.partition(".")[0] for target in targets} & LATE


def layer_of(module: str) -> str | None:
    """Of a module of ours; None for those beside the layers, such as errors."""
    name = short(module)
    if any(name == kernels or name.startswith(kernels + ".") for kernels in KERNELS):
        return "kernels"
    first = name.partition(".")[0]
    return first if first in LEVELS else None


@pytest.mark.parametrize("module", [module for module in MODULES if layer_of(module)], ids=short)
def test_imports_point_one_way(module):
    own = layer_of(module)
    for each in imports_of(module):
        other = layer_of(each.target) if each.target.startswith(NAME + ".") else None
        if other is not None:
            below = LEVELS[other] < LEVELS[own] or other == own
            assert below, f"{MODULES[module].relative_to(PACKAGE)}:{each.line} imports {each.target}: {own} may not use {other}"


def room_of(module: str) -> str | None:
    """The room of linear that a module is in, None for those of other layers, and for the face of linear."""
    layer, _, inside = short(module).partition(".")
    return inside.partition(".")[0] or None if layer == "linear" else None


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module)], ids=short)
def test_imports_between_the_rooms_of_linear_point_one_way(module):
    own = room_of(module)
    assert own in STOREYS, f"{own} has no place among the rooms of linear: {ROOMS}"
    for each in imports_of(module):
        assert each.target != f"{NAME}.linear", f"line {each.line} imports from the face of linear, which is made of its rooms"
        other = room_of(each.target)
        if other is not None:
            below = STOREYS[other] < STOREYS[own] or other == own
            assert below, f"{MODULES[module].relative_to(PACKAGE)}:{each.line} imports {each.target}: {own} may not use {other}"


@pytest.mark.parametrize("module", [module for module in MODULES if layer_of(module) in ("kernels", "streams", "algorithms")], ids=short)
def test_streams_and_algorithms_know_nothing_of_mpi(module):
    assert not [each for each in imports_of(module) if each.target.partition(".")[0] == "mpi4py"]


def test_nothing_but_its_own_room_imports_torch():
    importing = {module for module in MODULES for each in imports_of(module) if each.target.partition(".")[0] == "torch"}
    assert {layer_of(module) for module in importing} == {"torch"}


def test_what_everyone_imports_does_not_load_torch():
    loading = [module for module in MODULES if layer_of(module) not in ("torch", "cli") and "torch" in needs(module)]
    assert not loading and "torch" not in needs(NAME) and "torch" not in needs(f"{NAME}.cli")


def test_no_module_needs_itself_to_be_loaded():
    circles = [short(module) for module in MODULES if module in reached(module)]
    assert not circles, f"these import each other when they are loaded: {circles}"


def test_no_module_of_the_runtime_needs_itself_to_be_understood():
    """The annotations of a module count, too: what a channel and its operations know of each other is in runtime/interfaces.py."""
    modules = [module for module in MODULES if layer_of(module) == "runtime"]
    circles = [short(module) for module in modules if module in reached(module, functions=True, types=True)]
    assert not circles, f"these know each other: {circles}"


def late_imports() -> set[tuple[str, str]]:
    """Imports of our own modules inside functions: who, and whom."""
    late = {(module, each) for module in MODULES for each in imports_of(module) if each.in_function and not each.for_types}
    return {(module, each.target) for module, each in late if each.target in MODULES}


def test_functions_close_no_circle_of_imports_where_there_is_another_way():
    closing = {(short(module), short(target)) for module, target in late_imports() if module in {target, *reached(target, functions=True)}}
    assert closing == set(DEFERRED)


def test_imports_wait_in_functions_for_what_not_everyone_needs():
    needless = {(short(module), short(target)) for module, target in late_imports() if not needs(target) - needs(module)}
    assert needless <= set(DEFERRED), "these can be imported at the top of the module: they load nothing large"


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).partition("(")[0] in ("kernel", "inlined") for decorator in function.decorator_list)


@pytest.mark.parametrize("module", [module for module in MODULES if layer_of(module) in ("runtime", "torch")], ids=short)
def test_files_and_functions_of_the_runtime_and_of_torch_are_short(module):
    source = MODULES[module].read_text()
    lengths = {"the file": len(source.splitlines())}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
            assert node.end_lineno is not None
            lengths[f"{node.name}, line {node.lineno}"] = node.end_lineno - node.lineno + 1
    long = {what: lines for what, lines in lengths.items() if lines > (FILE_LINES if what == "the file" else FUNCTION_LINES)}
    assert not long, f"more than {FILE_LINES} lines of a file, or {FUNCTION_LINES} of a function with its docstring"


GOING = ("__del__", "finalize", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary")


@pytest.mark.parametrize("module", [module for module in MODULES if layer_of(module) in LAYERS_OF_OPERATIONS], ids=short)
def test_nothing_of_operations_runs_python_as_it_goes(module):
    """In which Python would lose an interrupt: see sparseallreduce/finalizer.py. A weak reference with a callback is not seen here."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        name = getattr(node, "name", getattr(node, "attr", getattr(node, "id", None)))
        is_setting = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "rc"  # mpi4py.rc.finalize
        assert name not in GOING or is_setting, f"line {node.lineno}"


@pytest.mark.parametrize("module", [module for module in MODULES if layer_of(module) not in (None, "kernels")], ids=short)
def test_who_owns_an_array_is_not_read_off_its_flags(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        reads = isinstance(node, ast.Attribute) and node.attr == "writeable" and isinstance(node.ctx, ast.Load)
        assert not reads, f"{short(module)}:{node.lineno} asks NumPy's flag: ask the stream, or may_be_written of a user's array"


def test_tests_of_pytorch_are_skipped_where_it_is_not_installed():
    for path in sorted(Path(__file__).parent.glob("pytorch/test_*.py")):
        statements = ast.parse(path.read_text()).body
        skips = [i for i, node in enumerate(statements) if "pytest.importorskip('torch')" in ast.unparse(node)]
        late = [ast.unparse(node) for node in statements[: skips[0] if skips else None] if needs_torch(node)]
        assert not late, f"{path.name} imports before pytest.importorskip('torch'): {late}"


def needs_torch(node: ast.stmt) -> bool:
    """Return whether a statement imports PyTorch or sparseallreduce.torch."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
    return any(name.split(".")[0] == "torch" or name.startswith(f"{NAME}.torch") for name in names)
