"""Parameters that are summed as one vector: a flat one, several packed together, or a layer by itself."""

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

_BLOCK = 2**15  # elements: several arrays of so many stay in the cache from one operation on them to the next


class Pack:
    """Some of the parameters, one behind the other.

    Parameters
    ----------
    layers : sequence of int
        Which of all parameters these are.
    parameters : sequence of ndarray
        Flat, of one dtype.
    shapes : sequence of tuple of int
        That gradients have.

    Attributes
    ----------
    size : int
        Elements of all together.
    bounds : list of int
        Where each begins, and the last ends.
    xp : module
        That makes arrays beside them: NumPy, or CuPy.
    on_device : bool
        Whether they lie on a GPU.
    """

    def __init__(self, layers: Sequence[int], parameters: Sequence[Array], shapes: Sequence[tuple[int, ...]]) -> None:
        self.layers = list(layers)
        self.parameters = list(parameters)
        self.shapes = list(shapes)
        self.bounds = [0, *accumulate(map(len, parameters))]
        self.size = self.bounds[-1]
        self.dtype = parameters[0].dtype
        self.xp = array_module(parameters[0])
        self.on_device = on_device(parameters[0])
        if any(on_device(parameter) != self.on_device for parameter in parameters):
            raise StreamTypeError("parameters that are packed into one vector have to lie on the host, or on a GPU: move some of them")

    def checked(self, gradients: Sequence[Any]) -> list[Array]:
        """The gradients of these parameters as arrays.

        Raises
        ------
        StreamError, StreamTypeError
            If one is not of the shape or dtype of its parameter.
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
        """Pack gradients, times a factor."""
        for gradient, shape, (lo, hi) in zip(gradients, self.shapes, pairwise(self.bounds)):
            np.multiply(gradient, gradient.dtype.type(factor), out=out[lo:hi].reshape(shape))

    def parts(self) -> Iterator[tuple[Array, slice]]:
        """Each parameter, and the elements of the pack that are its own."""
        for parameter, (lo, hi) in zip(self.parameters, pairwise(self.bounds)):
            yield parameter, slice(lo, hi)

    def descend(self, update: SparseStream, rate: float) -> None:
        """Change the parameters by ``-rate`` times a stream, at the cost of its entries alone."""
        parts = split(update, self.bounds)
        steps = [part._stored * -self.dtype.type(rate) for part in parts]  # all memory that it takes, before anything changes
        for parameter, part, step in zip(self.parameters, parts, steps):
            if part.is_dense:
                np.add(parameter, step, out=parameter)
            else:
                kernels.scatter(part._entries()[0], step, part.lo, SUM, parameter)


def blocks(array: Array) -> Iterator[slice]:
    """Cut a vector so that a piece stays in the cache; one on a GPU stays whole."""
    size, step = len(array), _BLOCK if isinstance(array, np.ndarray) else max(1, len(array))
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))


def add_scaled(out: Array, array: Array, factor: float) -> None:
    """``out += factor * array`` in one pass over memory."""
    for block in blocks(out):
        out[block] += out.dtype.type(factor) * array[block]
