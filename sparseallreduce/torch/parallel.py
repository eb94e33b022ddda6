"""The parallel tensor operator: what all ranks would compute of the same tensors, each computes in part (CommLib section 4.2)."""

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
from sparseallreduce.runtime.launching import Telling, launch
from sparseallreduce.torch.flight import translated

__all__ = ["parallel_map", "parallel_operator", "shares"]

_LENGTH_BYTES = 8


def parallel_operator(operator: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor, comm: Any = None) -> torch.Tensor:
    """``operator(tensor)``, of which each rank computes a piece (CommLib equations 12 to 14). Collective.

    Parameters
    ----------
    operator : callable
        Takes a piece along the first dimension, and returns that piece of the result: what it does to a row depends on no other row, as of
        elementwise functions, or norms of rows.
    tensor : tensor
        The same on all ranks, with a dimension at least.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Returns
    -------
    tensor
        The same on all ranks, to the bit.

    Raises
    ------
    SparseAllreduceError
        On every rank the same: what the operator raises on any, a MismatchError if shapes or dtypes differ, a StreamTypeError if a piece of
        the result has not as many rows as it was given.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> parallel_operator(lambda rows: rows.norm(dim=1), torch.tensor([[3.0, 4.0], [0.0, 2.0]]), sar.SERIAL)
    tensor([5., 2.])
    """
    comm = resolve(comm)

    def piece() -> list[torch.Tensor]:
        if not tensor.ndim:
            raise StreamTypeError("a tensor without dimensions has no pieces: call the operator itself")
        bounds = [rank * len(tensor) // comm.size for rank in (comm.rank, comm.rank + 1)]
        result = operator(tensor[bounds[0] : bounds[1]])
        if not isinstance(result, torch.Tensor) or not result.ndim or len(result) != bounds[1] - bounds[0]:
            raise StreamTypeError(f"the operator returns as many rows as it is given, {bounds[1] - bounds[0]}, in a tensor")
        return [result]

    with Telling(comm):
        pieces = _joined(comm, piece, "a parallel tensor operator", [tensor])
        filled = [each for each in pieces if len(each)]
        return torch.cat(filled or pieces[:1]).to(tensor.device)


def parallel_map(operator: Callable[..., torch.Tensor], tensors: Sequence[Any], comm: Any = None) -> list[torch.Tensor]:
    """``[operator(tensor) for tensor in tensors]``, of which each rank computes some. Collective.

    Layers are shared out as they follow each other, so that each rank has about as many elements (CommLib section 4.2 shares out as many
    layers).

    Parameters
    ----------
    operator : callable
        Of a tensor, or of several where ``tensors`` has tuples of them.
    tensors : sequence of tensors, or of tuples of tensors
        The same on all ranks.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional

    Returns
    -------
    list of tensor
        The same on all ranks, to the bit, on the processor.

    Raises
    ------
    SparseAllreduceError
        As of :func:`parallel_operator`.

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

    with Telling(comm):
        given += [each if isinstance(each, tuple) else (each,) for each in tensors]
        return _joined(comm, own, "a parallel map", [tensor for each in given for tensor in each])


def shares(weights: Sequence[int], ranks: int) -> list[int]:
    """Where the share of each rank begins, and the last ends, of things that weigh so much, in their order.

    >>> shares([1, 1, 8, 1, 1], 3), shares([5], 2), shares([], 2)
    ([0, 2, 3, 5], [0, 1, 1], [0, 0, 0])
    """
    total, passed, bounds = sum(weights), 0, [0]
    for place, weight in enumerate(weights):
        middle = passed + weight / 2  # where most of it lies, so that a heavy one is alone
        while len(bounds) < ranks and middle > total * len(bounds) / ranks:
            bounds.append(place)
        passed += weight
    return bounds + [len(weights)] * (ranks + 1 - len(bounds))


def _joined(comm: Any, compute: Callable[[], list[torch.Tensor]], what: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that the ranks have computed, in their order."""
    record = b""
    try:
        record = _packed(compute())
        said = {"operation": what, "shapes": [tuple(each.shape) for each in tensors], "dtypes": [each.dtype for each in tensors]}
        intent = Intent(tuple((name, str(value)) for name, value in said.items()), 0)
    except Exception as error:  # the other ranks wait to be told of it
        intent = Intent((), 0, translated(error))

    def told(_rank: int, _ranks: int) -> Generator[Step, Any, list[bytes]]:
        lengths = [int.from_bytes(each, "little") for each in (yield Share(len(record).to_bytes(_LENGTH_BYTES, "little")))]
        records = yield Share(record.ljust(max(lengths), b"\0"))
        return [each[:length] for each, length in zip(records, lengths)]

    records: list[bytes] = launch(comm, intent, told, blocking=True).wait()
    return [tensor for each in records for tensor in _unpacked(each)]


def _packed(tensors: Sequence[torch.Tensor]) -> bytes:
    """As bytes: dtypes and shapes, and the values."""
    if not all(isinstance(each, torch.Tensor) for each in tensors):
        raise StreamTypeError("the operator returns a tensor")
    outline = pickle.dumps([(str(each.dtype).removeprefix("torch."), tuple(each.shape)) for each in tensors])
    values = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors if each.numel()]
    together = torch.cat(values).cpu().numpy().tobytes() if values else b""  # of a GPU in one copy
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
