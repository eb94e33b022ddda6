"""Packs of parameters that are summed as one vector: several parameters, or a single one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.optim.arrays import as_array
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module, on_device
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import split
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Pack", "add_scaled", "blocks"]

Array = NDArray[Any]

_BLOCK = 2**15  # elements of a block; several blocks of this size fit into the cache


class Pack:
    """Parameters that are summed as one vector, in which they are concatenated.

    Parameters
    ----------
    layers : sequence of int
        Numbers of these parameters among all.
    parameters : sequence of ndarray
        Flat, of one dtype.
    shapes : sequence of tuple of int
        Shapes of the gradients.

    Attributes
    ----------
    size : int
        Total number of elements.
    bounds : list of int
        Start of each parameter, and the end of the last.
    xp : module
        Their array module: NumPy or CuPy.
    on_device : bool
        Whether they are on a GPU.
    """

    def __init__(self, layers: Sequence[int], parameters: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> None:
        self.layers: list[int] = list(layers)
        self.parameters: list[Array] = list(parameters)
        self.shapes: list[tuple[int, ...]] = list(shapes)
        self.bounds: list[int] = [0, *accumulate(map(len, parameters))]
        self.size: int = self.bounds[-1]
        self.dtype: np.dtype[Any] = parameters[0].dtype
        self.xp: Any = array_module(parameters[0])
        self.on_device: bool = on_device(parameters[0])
        if any(on_device(parameter) != self.on_device for parameter in parameters):
            raise StreamTypeError("parameters that are packed into one vector have to lie on the host, or on a GPU: move some of them")

    def checked(self, gradients: Sequence[Any]) -> list[Array]:
        """Return the gradients of these parameters as arrays.

        Raises
        ------
        StreamError, StreamTypeError
            If one does not have the shape or dtype of its parameter.
        """
        arrays = [as_array(gradient) for gradient in gradients]
        for layer, array, shape in zip(self.layers, arrays, self.shapes):
            if array.shape != shape:
                raise StreamError(f"the gradient of parameter {layer} has to have its shape, {shape}, not {array.shape}")
            if array.dtype != self.dtype:
                raise StreamTypeError(f"the gradient of parameter {layer} has to be of its dtype, {self.dtype}, not {array.dtype}")
            if on_device(array) != self.on_device:
                raise StreamTypeError(f"the gradient of parameter {layer} and the parameter do not lie in one place: move one of them")
        return arrays

    def write(self, gradients: Sequence[Array], factor: float, out: Array) -> None:
        """Write the concatenated gradients, multiplied by a factor."""
        for gradient, shape, (lo, hi) in zip(gradients, self.shapes, pairwise(self.bounds)):
            np.multiply(gradient, gradient.dtype.type(factor), out=out[lo:hi].reshape(shape))

    def parts(self) -> Iterator[tuple[Array, slice]]:
        """Yield each parameter, and its elements in the pack."""
        for parameter, (lo, hi) in zip(self.parameters, pairwise(self.bounds)):
            yield parameter, slice(lo, hi)

    def descend(self, update: SparseStream, rate: float) -> None:
        """Subtract ``rate`` times a stream from the parameters, at a cost proportional to its entries."""
        parts = split(update, self.bounds)
        steps = [part._stored * -self.dtype.type(rate) for part in parts]  # allocate all memory before anything changes
        for parameter, part, step in zip(self.parameters, parts, steps):
            if part.is_dense:
                np.add(parameter, step, out=parameter)
            else:
                kernels.scatter(part._entries()[0], step, part.lo, SUM, parameter)


def blocks(array: Array) -> Iterator[slice]:
    """Yield slices of a vector that fit into the cache; a vector on a GPU is not cut."""
    size, step = len(array), _BLOCK if isinstance(array, np.ndarray) else max(1, len(array))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def add_scaled(out: Array, array: Array, factor: float) -> None:
    """Add ``factor * array`` to ``out`` in one pass over memory."""
    for block in blocks(out):
        out[block] += out.dtype.type(factor) * array[block]
