"""Conversion between tensors and NumPy or CuPy arrays that share their memory, and the order of work on CUDA streams."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from sparseallreduce.errors import StreamTypeError
from sparseallreduce.runtime.launching import latest, leave
from sparseallreduce.streams.kernels.backend import device_module, on_device

__all__ = ["Order", "as_array", "as_tensor", "collective_in_order", "future_for", "in_order", "lies_on_gpu", "norms"]

Array = NDArray[Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def lies_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is on a GPU that CuPy can use."""
    return bool(tensor.device.type == "cuda")


def as_array(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor as an array on the same memory, of CuPy if it is on a GPU and otherwise of NumPy.

    Raises
    ------
    StreamError
        If the tensor is on a GPU and CuPy is not installed.
    """
    detached = tensor.detach()
    if not lies_on_gpu(tensor):
        return detached.numpy()  # type: ignore[no-any-return]
    return device_module().from_dlpack(detached)  # type: ignore[no-any-return]


def as_tensor(array: Array) -> torch.Tensor:
    """Return a writable NumPy or CuPy array as a tensor on the same memory."""
    return torch.from_dlpack(array) if on_device(array) else torch.from_numpy(array)


def norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Return the L2 norms of the tensors, computed in double precision.

    The norms of one device are copied to the host together, so that the host waits for the device only once.
    """
    given = [tensor.detach() for tensor in tensors]
    found = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in given]
    numbers = [0.0] * len(found)
    for device in {norm.device: None for norm in found}:
        places = [place for place, norm in enumerate(found) if norm.device == device]
        for place, number in zip(places, torch.stack([found[place] for place in places]).tolist()):
            numbers[place] = number if math.isfinite(number) else _large_norm(given[place])
    return numbers


def _large_norm(tensor: torch.Tensor) -> float:
    """Return the L2 norm of a tensor whose squares overflow."""
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(tensor.double() / largest))


def future_for(tensor: torch.Tensor) -> Any:
    """Return a future whose result is a tensor on the same device.

    With a GPU tensor, the code that takes the result waits on its own stream.
    """
    return torch.futures.Future(devices=[tensor.device]) if tensor.device.type == "cuda" else torch.futures.Future()


class Order:
    """A context manager that orders GPU work across streams.

    CuPy uses PyTorch's current stream inside a ``with`` block. The work of a block starts after everything enqueued on that stream before
    and after the work of the previous block, even if PyTorch calls hooks on other streams than the step. Only the GPU waits.

    Parameters
    ----------
    gpu : torch.device, optional
        The GPU. With None the context manager does nothing.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        self.gpu = gpu
        self._last: Any = None  # stream
        self._inside: list[ExitStack] = []

    def of(self, tensors: Iterable[torch.Tensor]) -> Order:
        """Return the order for the device of these tensors: this one, or a new one for another device.

        Raises
        ------
        StreamTypeError
            If the tensors are on several GPUs; a process uses only one.
        """
        found = {tensor.device: None for tensor in tensors if lies_on_gpu(tensor)}
        if len(found) > 1:
            listed = ", ".join(str(device) for device in found)
            raise StreamTypeError(f"parameters lie on several GPUs ({listed}): move them to one, or give each GPU a process")
        gpu = next(iter(found), None)
        return self if gpu == self.gpu else Order(gpu)

    def __enter__(self) -> None:
        entered = ExitStack()
        if self.gpu is not None:
            stream = torch.cuda.current_stream(self.gpu)
            if self._last is not None and self._last != stream:
                stream.wait_stream(self._last)
            self._last = stream
            cuda, number = device_module().cuda, self.gpu.index or 0
            entered.enter_context(cuda.Device(number))
            entered.enter_context(cuda.ExternalStream(stream.cuda_stream, number))
        self._inside.append(entered)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._inside.pop().__exit__(kind, error, trace)


def in_order(method: Method) -> Method:
    """Decorate a method to run inside the :class:`Order` in the object's ``_order``."""

    @functools.wraps(method)
    def ordered(self: Any, *args: Any, **options: Any) -> Any:
        with self._order:
            return method(self, *args, **options)

    return ordered  # type: ignore[return-value]


def collective_in_order(method: Method) -> Method:
    """Decorate a collective method to run inside the object's :class:`Order`.

    If the method raises an error, the other ranks of the object's ``comm`` are told of it.
    """

    @functools.wraps(method)
    def ordered(self: Any, *args: Any, **options: Any) -> Any:
        before = latest(self.comm)
        try:
            with self._order:
                return method(self, *args, **options)
        except BaseException as error:
            leave(self.comm, error, before)
            raise

    return ordered  # type: ignore[return-value]
