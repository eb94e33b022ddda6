"""What the tests of the CUDA kernels share: where they run, small blocks and runs, values and indices, and equality to the bit."""

import inspect
import os
import threading
import time
from importlib import import_module

import device_arrays as xp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

ON_DEVICE = os.environ.get("SPARSEALLREDUCE_TEST_GPU") == "1"  # on a real one, with CuPy; conftest.py has it stand for its stand-in
stand_in = pytest.mark.skipif(ON_DEVICE, reason="asks what stands for CuPy about what CuPy does not tell")

# The simulator runs one thread of Python for each thread of the device.
SMALL = {"run": 3, "block": 4}
FLOATS = (np.float32, np.float64)
SPECIAL = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-40, 5e-324, 1e38, 1.0, -1.0)

few = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 2**32 - 1)


def same_bits(got, wanted):
    """Dtype, shape and bits are those of ``wanted``, but every NaN counts as the same."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    if got.dtype.kind == "c":
        got, wanted = (np.ascontiguousarray(each).view(each.real.dtype) for each in (got, wanted))
    np.testing.assert_array_equal(as_integers(got), as_integers(wanted))


def as_integers(values):
    if values.dtype.kind in "iu":
        return values
    integers = np.ascontiguousarray(values).view(f"u{values.itemsize}")
    return np.where(values != values, integers.dtype.type(7), integers)


def values_of(rng, shape, dtype, special=True):
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    if dtype.kind == "c":
        return values_of(rng, (*np.atleast_1d(shape), 2), f"f{dtype.itemsize // 2}").view(dtype)[..., 0]
    with np.errstate(all="ignore"):
        values = rng.standard_normal(shape).astype(dtype)
        return np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape).astype(dtype), values) if special else values


def indices_of(rng, count, size, dtype, lo=0):
    """So many strictly increasing indices from ``lo`` on, below ``lo + size``."""
    return (np.sort(rng.choice(size, count, replace=False)).astype(np.uint64) + np.uint64(lo)).astype(dtype)


def prepare():
    """Have the simulator let other threads run while it waits, and `device_streams.py` watch the kernels; before those are imported."""
    from device_streams import watched
    from numba.cuda.simulator import kernel, kernelapi

    from sparseallreduce.streams.kernels.cuda import launching

    def is_alive(self):
        """As any thread's; the simulator, which asks again and again, lets those run meanwhile that it waits for."""
        time.sleep(0)
        return threading.Thread.is_alive(self)

    kernel.BlockThread.is_alive = is_alive
    right, making = kernelapi.FakeCUDAShared.array, threading.Lock()

    def array(self, shape, dtype):
        """One array for all threads of a block, of which no kernel has two: the simulator makes another where two threads ask at once."""
        with making:
            return right(self, shape, dtype)

    kernelapi.FakeCUDAShared.array = array
    launching.launch = watched(launching.launch)


class there:
    """A file of kernels, whose functions take NumPy arrays and ``np`` in the tests: they are handed the device's, and hand back NumPy's."""

    def __init__(self, name):
        self._module = import_module(f"sparseallreduce.streams.kernels.cuda.{name}")

    def __getattr__(self, name):
        found = getattr(self._module, name)
        if inspect.isfunction(found):
            found = self._handing_over(found)
            setattr(self, name, found)
        return found

    @staticmethod
    def _handing_over(function):
        def call(*args, **options):
            changed = []
            try:
                return _to_host(function(*_to_device(args, changed), **_to_device(options, changed)))
            finally:
                for array, moved in changed:
                    array[...] = moved.get()

        return call


def _to_device(given, changed):
    if given is np:
        return xp
    if isinstance(given, np.ndarray):
        moved = xp.asarray(np.ascontiguousarray(given).reshape(given.shape))
        if not given.flags.c_contiguous:
            gaps = xp.zeros(tuple(2 * length for length in given.shape), given.dtype)[(slice(None, None, 2),) * given.ndim]
            gaps[...] = moved
            moved = gaps
        if given.flags.writeable:
            changed.append((given, moved))
        return moved
    return _inside(given, lambda each: _to_device(each, changed))


def _to_host(given):
    return given.get() if isinstance(given, xp.ndarray) else _inside(given, _to_host)


def _inside(given, move):
    """What a function makes of what a collection holds."""
    if isinstance(given, dict):
        return {name: move(value) for name, value in given.items()}
    if hasattr(given, "_fields"):
        return type(given)(*map(move, given))
    return type(given)(map(move, given)) if isinstance(given, tuple | list) else given
