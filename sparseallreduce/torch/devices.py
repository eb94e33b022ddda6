"""Tensors on a GPU as arrays of CuPy's, and back, by DLPack: in one memory, and on PyTorch's current stream."""

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
    """Whether its memory is a GPU's that CuPy can use."""
    return bool(tensor.device.type == "cuda")


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a tensor without gaps: as an ndarray, or on a GPU as an array of CuPy's.

    Raises
    ------
    StreamError
        If there is no CuPy for a tensor on a GPU.
    """
    detached = tensor.detach()
    if not lies_on_gpu(tensor):
        return detached.numpy()  # type: ignore[no-any-return]
    return device_module().from_dlpack(detached)  # type: ignore[no-any-return]


def as_tensor(array: Array) -> torch.Tensor:
    """The memory of an array of NumPy's or CuPy's that may be written to."""
    return torch.from_dlpack(array) if on_device(array) else torch.from_numpy(array)


def norms(tensors: Iterable[torch.Tensor]) -> list[float]:
    """L2 norms, in double precision where tensors have 16 bits or 64, else in pairwise sums of 32.

    Those of one device come to the host together, so that it waits once.
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
    """The L2 norm of a tensor of values whose squares overflow."""
    largest = float(tensor.abs().max())
    if not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(tensor.double() / largest))


def future_for(tensor: torch.Tensor) -> Any:
    """A future whose result is such a tensor; of one on a GPU, who takes it waits on its stream."""
    return torch.futures.Future(devices=[tensor.device]) if tensor.device.type == "cuda" else torch.futures.Future()


class Order:
    """Has what is done in a ``with`` of it follow what was enqueued on PyTorch's current stream, and what was done in one before.

    CuPy works on that stream then. Hooks may come on streams other than that of the step: each waits, on the GPU, for the one before.

    Parameters
    ----------
    gpu : torch.device, optional
        None if nothing lies on a GPU: it does nothing then.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        self.gpu = gpu
        self._last: Any = None  # stream
        self._inside: list[ExitStack] = []

    def of(self, tensors: Iterable[torch.Tensor]) -> Order:
        """That for these tensors: itself, unless they lie elsewhere.

        Raises
        ------
        StreamTypeError
            If they lie on several GPUs: a process works on one.
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
    """A method in the :class:`Order` that its object has as ``_order``."""

    @functools.wraps(method)
    def ordered(self: Any, *args: Any, **options: Any) -> Any:
        with self._order:
            return method(self, *args, **options)

    return ordered  # type: ignore[return-value]


def collective_in_order(method: Method) -> Method:
    """A method of all ranks in the :class:`Order` of its object; the ranks of the object's ``comm`` are told of an error that it raises."""

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
