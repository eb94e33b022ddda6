"""Replicas of the parameters on all ranks: copied from rank 0, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sparseallreduce.algorithms.agreement import named_ranks
from sparseallreduce.errors import MismatchError
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, collective, gather_results
from sparseallreduce.torch.buckets import Member

__all__ = ["broadcast", "check", "difference", "digests"]

DIGEST_BYTES = 8


@collective
def broadcast(comm: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Set the tensors to the values of rank 0. They must have the same shapes and dtypes on all ranks. Collective."""
    if comm.size == 1:
        return
    listed = [tensor for tensor in tensors if tensor.numel()]
    with torch.no_grad():
        own = agreed(comm, lambda: {str(place): _content(tensor) for place, tensor in enumerate(listed)} if comm.rank == 0 else None)
        arrays = broadcast_arrays(comm, own)
        if comm.rank > 0:
            for place, tensor in enumerate(listed):
                received = torch.from_numpy(arrays[str(place)]).view(tensor.dtype).reshape(tensor.shape)
                tensor.detach().copy_(received)


def digests(members: Sequence[Member]) -> bytes:
    """Return 8 bytes for each parameter, a digest of its values that does not depend on its memory layout."""
    return b"".join(hashlib.blake2b(_content(member.parameter).data, digest_size=DIGEST_BYTES).digest() for member in members)


def difference(members: Sequence[Member], of_ranks: Sequence[bytes]) -> MismatchError | None:
    """Return an error that names the differing parameter if the ranks' digests differ, otherwise None."""
    for place, member in enumerate(members):
        own = [each[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] for each in of_ranks]
        if len(set(own)) > 1:
            common = max(own, key=own.count)
            others = named_ranks([rank for rank, each in enumerate(own) if each != common])
            shape = tuple(member.parameter.shape)
            return MismatchError(
                f"the replicas differ: {member.name} of shape {shape} has other values on {others} than elsewhere. Something besides the "
                "optimiser has changed it on some ranks only: change it on all, or call synchronize() to begin anew from rank 0"
            )
    return None


@collective
def check(comm: Any, members: Sequence[Member]) -> None:
    """Raise a MismatchError on every rank if the parameters are not bitwise identical. Collective."""
    error = difference(members, gather_results(comm, lambda: digests(members)))
    if error is not None:
        raise error


def _content(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of the values in C order."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    values = tensor.detach().cpu().contiguous().reshape(-1)
    content: np.ndarray[Any, np.dtype[np.uint8]] = values.view(torch.uint8).numpy()
    return content
