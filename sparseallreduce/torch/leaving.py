"""How a rank leaves a step after an error.

It sends the error to the other ranks in place of every operation that they wait for in the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseallreduce.runtime import launching
from sparseallreduce.torch.buckets import Member, grouped
from sparseallreduce.torch.header import SPARSE
from sparseallreduce.torch.rows import Layout

if TYPE_CHECKING:
    from sparseallreduce.torch.flight import Flight
    from sparseallreduce.torch.optimizer import DistributedOptimizer

__all__ = ["leave", "leave_backward", "note_layouts", "sparse", "strided"]


def leave(optimizer: DistributedOptimizer, error: BaseException) -> None:
    """Leave a step after an error in the call of the step."""
    flight = optimizer._flight
    if flight is None:
        return
    if flight.closed and not flight.arranged:  # the other ranks start as many sums as there are buckets
        flight.buckets = []
        note_layouts(optimizer, flight)
        buckets = len(grouped(strided(optimizer), optimizer.bucket_bytes, optimizer._everything))
        flight.tell_rest(error, buckets, bool(sparse(optimizer)))
    flight.leave(error)
    if isinstance(error, Exception):
        flight.give_back()
        optimizer._flight = optimizer._arranged = None


def leave_backward(optimizer: DistributedOptimizer, error: BaseException) -> None:
    """Leave a step after an error in a hook, which ends back-propagation."""
    if optimizer._flight is not None and optimizer._flight.closed:
        return
    optimizer._open().leave(error)
    launching.leave(optimizer.comm, error, launching.latest(optimizer.comm))  # in place of the agreement on the step


def note_layouts(optimizer: DistributedOptimizer, flight: Flight) -> None:
    """Record the kinds of this step's gradients."""
    optimizer._layouts = bytes(max(pair) for pair in zip(optimizer._layouts, flight.layouts))


def strided(optimizer: DistributedOptimizer) -> list[Member]:
    """Return the parameters whose gradients are not sparse tensors."""
    return [member for member in optimizer._members if optimizer._layouts[member.index] < SPARSE]


def sparse(optimizer: DistributedOptimizer) -> list[tuple[Member, Layout]]:
    """Return the parameters whose gradients are sparse tensors, and how these are laid out."""
    found = ((member, optimizer._layouts[member.index] - SPARSE + 1) for member in optimizer._members)
    return [(member, Layout(member.parameter.shape, dims)) for member, dims in found if dims >= 1]
