"""Sparse gradients, as of ``nn.Embedding(sparse=True)``, which are summed exactly as row-sparse streams."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from sparseallreduce.streams.kernels.backend import device_module
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.torch.buckets import Member, sum_dtype
from sparseallreduce.torch.devices import as_array, as_tensor, lies_on_gpu

__all__ = ["Layout", "as_gradient", "as_stream"]


class Layout:
    """How the elements of a parameter are divided into the rows of a stream.

    Parameters
    ----------
    shape : sequence of int
        The shape of the parameter.
    sparse_dim : int
        The number of dimensions that the indices of its gradient have.
    """

    def __init__(self, shape: Sequence[int], sparse_dim: int) -> None:
        self.shape: tuple[int, ...] = tuple(shape)
        self.sparse_dim = sparse_dim
        self.rows: int = prod(self.shape[:sparse_dim])
        self.width: int | None = None if sparse_dim == len(self.shape) else prod(self.shape[sparse_dim:])


def as_stream(member: Member, layout: Layout, factor: float) -> SparseStream:
    """Return this rank's gradient times a factor as a stream, which is empty if there is no gradient."""
    dtype = sum_dtype(member.parameter)
    gradient = member.parameter.grad
    tail = () if layout.width is None else (layout.width,)
    if gradient is None:
        xp = device_module() if lies_on_gpu(member.parameter) else np
        nothing = xp.empty((0, *tail), np.float64 if dtype == torch.float64 else np.float32)
        return SparseStream(xp.empty(0, np.int64), nothing, layout.rows)
    gathered = gradient.detach().to(dtype).coalesce()  # adds rows with the same index, in the precision of the sum
    places = torch.zeros(gathered.indices().shape[1], dtype=torch.int64, device=gradient.device)
    for size, along in zip(layout.shape, gathered.indices()):
        places = places * size + along
    values = gathered.values().reshape(len(places), *tail)
    return SparseStream(as_array(places), as_array(values * factor if factor != 1 else values), layout.rows)


def as_gradient(mean: SparseStream, layout: Layout, parameter: torch.Tensor) -> torch.Tensor:
    """Return the mean as a sparse gradient of the parameter.

    A mean in dense form becomes a gradient with an entry for each row that is not zero.
    """
    indices, values = mean._entries()
    places = as_tensor(indices.astype(np.int64))
    along = []
    for size in reversed(layout.shape[: layout.sparse_dim]):
        along.append(places % size)
        places = places // size
    rows = as_tensor(values.copy()).reshape(-1, *layout.shape[layout.sparse_dim :])
    gathered = torch.sparse_coo_tensor(torch.stack(along[::-1]), rows, layout.shape, is_coalesced=True, check_invariants=False)
    return gathered.to(parameter.device)
