"""The parallel tensor operator: each rank computes a part of what all ranks need, and they gather the parts (CommLib section 4.2)."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.errors import StreamTypeError
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.launching import ErrorReporter, launch
from sparseallreduce.torch.flight import translated

__all__ = ["parallel_map", "parallel_operator", "shares"]

_LENGTH_BYTES = 8


def parallel_operator(operator: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, comm: Any = None) -> torch.Tensor:
    """Return ``operator(tensor)``, of which each rank computes a part (CommLib equations 12 to 14). Collective.

    Parameters
    ----------
    operator : callable
        Takes some rows of the tensor and returns the same rows of the result. A row of the result must not depend on other rows, as with
        elementwise functions or the norms of rows.
    tensor : tensor
        A tensor with at least one dimension, the same on all ranks.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Returns
    -------
    tensor
        The result, bitwise identical on all ranks.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: an error of the operator on any rank, a MismatchError if shapes or dtypes differ, a StreamTypeError if
        the operator does not return as many rows as it was given.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> parallel_operator(lambda rows: rows.norm(dim=1), torch.tensor([[3.0, 4.0], [0.0, 2.0]]), sar.SERIAL)
    tensor([5., 2.])
    """
    comm = resolve(comm)

    def piece() -> list[torch.Tensor]:
        if not tensor.ndim:
            raise StreamTypeError("a tensor without dimensions cannot be divided: call the operator directly")
        bounds = [rank * len(tensor) // comm.size for rank in (comm.rank, comm.rank + 1)]
        result = operator(tensor[bounds[0] : bounds[1]])
        if not isinstance(result, torch.Tensor) or not result.ndim or len(result) != bounds[1] - bounds[0]:
            raise StreamTypeError(f"the operator returns as many rows as it is given, {bounds[1] - bounds[0]}, in a tensor")
        return [result]

    with ErrorReporter(comm):
        pieces = _joined(comm, piece, "a parallel tensor operator", [tensor])
        filled = [each for each in pieces if len(each)]
        return torch.cat(filled or pieces[:1]).to(tensor.device)


def parallel_map(operator: Callable[..., torch.Tensor], tensors: Sequence[Any], comm: Any = None) -> list[torch.Tensor]:
    """Return ``[operator(tensor) for tensor in tensors]``, of which each rank computes some. Collective.

    Each rank gets consecutive tensors with about the same number of elements in all. (CommLib section 4.2 gives each rank the same number
    of layers.)

    Parameters
    ----------
    operator : callable
        Takes a tensor, or several if ``tensors`` contains tuples.
    tensors : sequence of tensors, or of tuples of tensors
        The arguments, the same on all ranks.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Returns
    -------
    list of tensor
        The results on the CPU, bitwise identical on all ranks.

    Raises
    ------
    SparseAllreduceError
        See :func:`parallel_operator`.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> parallel_map(torch.sum, [torch.ones(3), torch.ones(2, 2)], sar.SERIAL)
    [tensor(3.), tensor(4.)]
    """
    comm = resolve(comm)
    given: list[tuple[torch.Tensor, ...]] = []

    def own() -> list[torch.Tensor]:
        bounds = shares([sum(tensor.numel() for tensor in each) for each in given], comm.size)
        return [operator(*each) for each in given[bounds[comm.rank] : bounds[comm.rank + 1]]]

    with ErrorReporter(comm):
        given += [each if isinstance(each, tuple) else (each,) for each in tensors]
        return _joined(comm, own, "a parallel map", [tensor for each in given for tensor in each])


def shares(weights: Sequence[int], ranks: int) -> list[int]:
    """Divide items into consecutive parts of about equal weight, one for each rank, and return the bounds of the parts.

    >>> shares([1, 1, 8, 1, 1], 3), shares([5], 2), shares([], 2)
    ([0, 2, 3, 5], [0, 1, 1], [0, 0, 0])
    """
    total, passed, bounds = sum(weights), 0, [0]
    for place, weight in enumerate(weights):
        middle = passed + weight / 2  # an item belongs to the part that contains its middle, so that a heavy item gets a part of its own
        while len(bounds) < ranks and middle > total * len(bounds) / ranks:
            bounds.append(place)
        passed += weight
    return bounds + [len(weights)] * (ranks + 1 - len(bounds))


def _joined(comm: Any, compute: Callable[[], list[torch.Tensor]], what: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that the ranks have computed, in the order of the ranks."""
    record = b""
    try:
        record = _packed(compute())
        described = {"operation": what, "shapes": [tuple(each.shape) for each in tensors], "dtypes": [each.dtype for each in tensors]}
        intent = Intent(tuple((name, str(value)) for name, value in described.items()), 0)
    except Exception as error:  # the other ranks wait for this error
        intent = Intent((), 0, translated(error))

    def schedule(_rank: int, _ranks: int) -> Generator[Step, Any, list[bytes]]:
        lengths = [int.from_bytes(each, "little") for each in (yield Share(len(record).to_bytes(_LENGTH_BYTES, "little")))]
        records = yield Share(record.ljust(max(lengths), b"\0"))
        return [each[:length] for each, length in zip(records, lengths)]

    records: list[bytes] = launch(comm, intent, schedule, blocking=True).wait()
    return [tensor for each in records for tensor in _unpacked(each)]


def _packed(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the tensors as bytes: their dtypes and shapes, followed by their values."""
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise StreamTypeError("the operator returns a tensor")
    outline = pickle.dumps([(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in tensors])
    values = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors if each.numel()]
    together = torch.cat(values).cpu().numpy().tobytes() if values else b""  # one copy from a GPU
    return b"".join([len(outline).to_bytes(_LENGTH_BYTES, "little"), outline, together])


def _unpacked(record: bytes) -> list[torch.Tensor]:
    content = io.BytesIO(record)
    outline = pickle.loads(content.read(int.from_bytes(content.read(_LENGTH_BYTES), "little")))
    tensors = []
    for name, shape in outline:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        values = content.read(tensor.numel() * tensor.element_size())
        tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(values), dtype=torch.uint8)) if values else None
        tensors.append(tensor)
    return tensors
