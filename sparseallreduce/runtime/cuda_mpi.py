"""Determine whether the MPI library accepts pointers to GPU memory (CUDA-aware MPI)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from sparseallreduce.errors import StreamError

__all__ = ["VARIABLE", "Support", "cuda_support", "support_of"]

VARIABLE = "SPARSEALLREDUCE_CUDA_MPI"
_CUDA = 0  # MPICH's MPIX_GPU_SUPPORT_CUDA
# Variables that switch it off (MPICH), or on in libraries without a query function (Cray, MVAPICH).
_OFF, _ON = ("MPIR_CVAR_ENABLE_GPU",), ("MPICH_GPU_SUPPORT_ENABLED", "MVP_USE_CUDA", "MV2_USE_CUDA")


class Support(NamedTuple):
    """Whether MPI accepts GPU memory, and the reason."""

    used: bool  # whether GPU pointers are passed to MPI
    why: str


@lru_cache(maxsize=1)
def cuda_support() -> Support:
    """Return whether the MPI library that mpi4py has loaded accepts GPU memory."""
    from mpi4py import MPI

    return support_of(ctypes.CDLL(MPI.__file__), os.environ)


def support_of(library: Any, environment: Mapping[str, str]) -> Support:
    """Return whether an MPI library accepts GPU memory, from the environment and the library's own query functions.

    Parameters
    ----------
    library : ctypes.CDLL
    environment : mapping

    Raises
    ------
    StreamError
        If the variable ``SPARSEALLREDUCE_CUDA_MPI`` is neither 0 nor 1.
    """
    value = environment.get(VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise StreamError(f"{VARIABLE} is 1 if MPI can use GPU memory, or 0 if GPU memory must not be passed to it, not {value!r}")
    if value:
        return Support(value == "1", f"{VARIABLE}={value}")
    for name in _OFF:
        if environment.get(name) == "0":
            return Support(False, f"{name}=0")
    for name in _ON:
        if environment.get(name) == "1":
            return Support(True, f"{name}=1")
    try:
        return _answer("MPIX_Query_cuda_support", library.MPIX_Query_cuda_support())
    except AttributeError:
        pass
    try:
        answer = ctypes.c_int(0)
        failed = library.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer))
        return _answer("MPIX_GPU_query_support", 0 if failed else answer.value)
    except AttributeError:
        return Support(False, "the library cannot be asked")


def _answer(function: str, answer: int) -> Support:
    return Support(answer == 1, f"{function} says {'yes' if answer == 1 else 'no'}")
