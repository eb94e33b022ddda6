"""What the simulator accepts and a GPU would not, read off the source of the kernels."""

import ast
from pathlib import Path

import pytest

from sparseallreduce.linear.kernels import cuda as of_rows
from sparseallreduce.streams.kernels import cuda

FILES = sorted(path for package in (cuda, of_rows) for path in Path(package.__file__).parent.glob("*.py"))


def functions_of(path):
    """Kernels and device functions, by their decorators."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and {ast.unparse(each) for each in node.decorator_list} & {"kernel", "device"}:
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_call_nothing_that_numba_does_not_compile_for_cuda(path):
    for function in functions_of(path):
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"min", "max", "sum", "sorted", "print"}, f"{path.name}:{node.lineno} calls {called}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_atomic_operations_only_count(path):
    for function in functions_of(path):
        for node in ast.walk(function):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert not name.startswith("cuda.atomic.") or (name == "cuda.atomic.add" and path.name == "ranking.py"), f"{path.name} {name}"


def test_kernels_were_found():
    assert sum(1 for path in FILES for _ in functions_of(path)) >= 5
