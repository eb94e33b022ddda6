"""Declare and launch CUDA kernels, and compute prefix sums of counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.core import config

from sparseallreduce.errors import StreamError

__all__ = ["BLOCK", "RUN", "device", "exclusive", "kernel", "launch", "threads_for"]

BLOCK = 256  # threads of a block, unless a caller says otherwise
RUN = 16  # neighbouring elements that one thread counts and places


def kernel(function: Callable[..., Any]) -> Any:
    """Decorate a kernel, which is compiled for the device at its first launch with given types."""
    return cuda.jit(function)


def device(function: Callable[..., Any]) -> Any:
    """Decorate a function that only kernels call. It must not use ``cuda`` itself, which numba's simulator cannot resolve across files."""
    return cuda.jit(device=True)(function)


def threads_for(count: int, run: int) -> int:
    """Return the number of threads for ``count`` elements if each processes ``run`` of them."""
    return -(-count // run)


def launch(function: Any, threads: int, block: int, xp: Any, *arguments: Any) -> None:
    """Launch at least ``threads`` threads in blocks of ``block`` on CuPy's current stream; nothing is launched for no threads.

    Arrays are passed without numba's stream synchronisation, which would wait at each launch for the stream on which an array was created.

    Raises
    ------
    StreamError
        If ``xp`` is NumPy and numba's simulator is off.
    """
    if threads <= 0:
        return
    if config.ENABLE_CUDASIM:
        from numba.cuda.cudadrv.devicearray import FakeCUDAArray  # the simulator's; it would copy a plain array, and each view of it apart

        given = [FakeCUDAArray(_on_host(each)) if _is_array(each) else each for each in arguments]
        block = min(block, threads)  # each is a thread of Python's
        function[-(-threads // block), block](*given)
        return
    if xp is np:
        raise StreamError("CUDA kernels take NumPy arrays under numba's simulator alone (NUMBA_ENABLE_CUDASIM=1): pass CuPy's")
    stream = cuda.external_stream(xp.cuda.get_current_stream().ptr)
    given = [cuda.as_cuda_array(each, sync=False) if hasattr(each, "__cuda_array_interface__") else each for each in arguments]
    function[-(-threads // block), block, stream](*given)


def _is_array(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) or hasattr(argument, "__cuda_array_interface__")


class _HostView:
    """Exposes the simulator's device memory to NumPy, for as long as a view of it exists."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.__array_interface__ = array.__cuda_array_interface__


def _on_host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else np.asarray(_HostView(array))


def exclusive(counts: Any, xp: Any) -> tuple[Any, Any]:
    """Return the exclusive prefix sums of counts, and their total: device arrays of int64 of shapes (n,) and (1,)."""
    if not len(counts):
        return xp.zeros(0, np.int64), xp.zeros(1, np.int64)
    ends = xp.cumsum(counts, dtype=np.int64)
    return ends - counts, ends[-1:]
