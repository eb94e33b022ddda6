"""Compile the CUDA kernels to PTX where there is no GPU, for the types that the tests under the simulator give them.

That shows what the simulator does not: whether numba finds types for all of them, and compiles them for CUDA. It takes NVVM, as of the
wheel nvidia-cuda-nvcc-cu12, in whose folder CUDA_HOME is: nvidia/cuda_nvcc. By hand:

    export PYTHONPATH=tools KERNELS=build/kernels.txt
    NUMBA_ENABLE_CUDASIM=1 NUMBA_DISABLE_JIT=1 python -m pytest -p compile_kernels tests/cuda -W ignore::RuntimeWarning
    NUMBA_ENABLE_CUDASIM=1 python -m pytest -p compile_kernels tests/cuda_training -W ignore::RuntimeWarning
    CUDA_HOME=.../nvidia/cuda_nvcc python tools/compile_kernels.py
"""

import atexit
import importlib
import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

CAPABILITY = 8, 0


def record(file):
    """Have the simulator note each kernel that it runs, with the types of its arguments and of what a factory gave it."""
    from numba.cuda.simulator.kernel import FakeCUDAKernel

    noted, run = {}, FakeCUDAKernel.__call__

    def note(kernel, *arguments):
        if not kernel._device:
            noted[json.dumps([*named(kernel.fn), [type_of(each) for each in arguments]])] = None
        return run(kernel, *arguments)

    def named(function):
        held = zip(function.__code__.co_freevars, map(content, function.__closure__ or ()))
        return function.__module__, function.__qualname__, dict(held)

    def content(cell):
        held = cell.cell_contents
        return named(held.fn) if isinstance(held, FakeCUDAKernel) else None

    def write():
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.writelines(f"{each}\n" for each in noted)

    FakeCUDAKernel.__call__ = note
    atexit.register(write)


def type_of(argument):
    """An argument in a kind of words that :func:`signature` reads."""
    array = getattr(argument, "_ary", argument)
    if isinstance(array, np.ndarray):
        return [array.dtype.str, array.ndim, "C" if array.flags.c_contiguous else "A"]
    return [array.dtype.str if isinstance(array, np.generic) else np.dtype(type(array)).str]


def signature(words):
    """The type of numba's that an argument has."""
    from numba import types
    from numba.np.numpy_support import from_dtype

    dtype = from_dtype(np.dtype(words[0]))
    return types.Array(dtype, *words[1:]) if len(words) > 1 else dtype


def kernel_of(module, name, held, arguments):
    """The kernel or device function of that name, made by its factory if it has one; a factory takes device functions, or a dtype."""
    factory, _, inner = name.partition(".<locals>.")
    found = getattr(importlib.import_module(module), factory)
    if not inner:
        return found
    asked = inspect.signature(getattr(found, "__wrapped__", found)).parameters
    made = found(*[np.dtype(arguments[0][0]) if each == "dtype" else kernel_of(*held[each], arguments) for each in asked])
    several = made if isinstance(made, tuple) else (made,)
    return next(each for each in several if each.py_func.__qualname__ == name)


def main():
    from numba import cuda
    from numba.cuda import dispatcher

    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=CAPABILITY)  # for which device functions are compiled
    failed, lines = 0, sorted(set(Path(os.environ["KERNELS"]).read_text().splitlines()))
    for line in lines:
        *name, arguments = json.loads(line)
        try:
            cuda.compile_ptx(kernel_of(*name, arguments).py_func, tuple(map(signature, arguments)), cc=CAPABILITY)
        except Exception as error:
            failed += 1
            print(f"{name[0]}.{name[1]} of {arguments}: {type(error).__name__}: {error}")
    print(f"{len(lines) - failed} of {len(lines)} compile")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
elif os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    record(Path(os.environ["KERNELS"]))
