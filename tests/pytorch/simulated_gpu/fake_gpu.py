"""Tensors of the processor that are taken for a GPU's: CuPy's stand-in has them by DLPack, and numba's simulator runs the kernels."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import device_arrays as xp
import device_streams
import numpy as np
import pytest
import simulated as simulated_kernels
import torch

from sparseallreduce.torch import devices

simulated_kernels.prepare()


class Stream:
    """A stream of PyTorch's, with what it has waited for."""

    def __init__(self, number):
        self.cuda_stream = number
        self.waited = []

    def wait_stream(self, other):
        self.waited.append(other.cuda_stream)


class Gpu:
    """What is asked of PyTorch and CuPy for their streams: ``current`` is PyTorch's, and ``entered`` what CuPy was told."""

    def __init__(self):
        self.current = Stream(7)
        self.entered = []

    def external_stream(self, pointer, number):
        return self._noting(pointer)

    def device(self, number=None):
        return Device(self, number)

    @contextmanager
    def _noting(self, what):
        self.entered.append(what)
        yield
        self.entered.append(None)


class Device(device_streams.Device):
    """The stand-in's, which says that it was entered by its number."""

    def __init__(self, gpu, number):
        super().__init__(number)
        self._gpu, self._named = gpu, number is not None

    def __enter__(self):
        if self._named:
            self._gpu.entered.append(f"GPU {self.id}")
        return super().__enter__()

    def __exit__(self, *args):
        super().__exit__(*args)
        if self._named:
            self._gpu.entered.append(None)


def from_dlpack(tensor):
    """Without a copy."""
    array = np.from_dlpack(tensor)
    if not array.flags.writeable:  # of NumPy before DLPack said who may write
        array = tensor.numpy()
    assert array.size == 0 or array.ctypes.data == tensor.data_ptr()
    return xp.ndarray(array)


@contextmanager
def simulated():
    """Until its end every tensor is one on a GPU."""
    gpu = Gpu()
    cuda = SimpleNamespace(**vars(xp.cuda) | {"Device": gpu.device, "ExternalStream": gpu.external_stream})
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.object(devices, "lies_on_gpu", return_value=True),
        mock.patch("sparseallreduce.torch.rows.lies_on_gpu", return_value=True),
        mock.patch.object(torch.cuda, "current_stream", side_effect=lambda device=None: gpu.current),
        mock.patch.dict(vars(xp), from_dlpack=from_dlpack, cuda=cuda),
        mock.patch.object(xp.ndarray, "__dlpack__", lambda array, **how: array._array.__dlpack__(), create=True),
        mock.patch.object(xp.ndarray, "__dlpack_device__", lambda array: array._array.__dlpack_device__(), create=True),
    ):
        patch.setitem(sys.modules, "cupy", xp)  # mock would forget the modules that are imported meanwhile
        yield gpu
