"""How a rank leaves a step because of an error: the other ranks are told in place of all operations that they wait for in it."""

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
    """Leave a step because of an error that is raised in its call."""
    flight = optimizer._flight
    if flight is None:
        return
    if flight.closed and not flight.arranged:  # there are as many buckets as on the other ranks
        flight.buckets = []
        note_layouts(optimizer, flight)
        buckets = len(grouped(strided(optimizer), optimizer.bucket_bytes, optimizer._everything))
        flight.tell_rest(error, buckets, bool(sparse(optimizer)))
    flight.leave(error)
    if isinstance(error, Exception):
        flight.give_back()
        optimizer._flight = optimizer._arranged = None


def leave_backward(optimizer: DistributedOptimizer, error: BaseException) -> None:
    """Leave a step because of an error in a hook, and so in back-propagation."""
    if optimizer._flight is not None and optimizer._flight.closed:
        return
    optimizer._open().leave(error)
    launching.leave(optimizer.comm, error, launching.latest(optimizer.comm))  # in place of the step's beginning, if nothing has been told


def note_layouts(optimizer: DistributedOptimizer, flight: Flight) -> None:
    """Note of which kind the gradients of this step are."""
    optimizer._layouts = bytes(max(pair) for pair in zip(optimizer._layouts, flight.layouts))


def strided(optimizer: DistributedOptimizer) -> list[Member]:
    """Return the parameters whose gradients are no sparse tensors."""
    return [member for member in optimizer._members if optimizer._layouts[member.index] < SPARSE]


def sparse(optimizer: DistributedOptimizer) -> list[tuple[Member, Layout]]:
    """Return the parameters whose gradients are sparse tensors, and how these are laid out."""
    found = ((member, optimizer._layouts[member.index] - SPARSE + 1) for member in optimizer._members)
    return [(member, Layout(member.parameter.shape, dims)) for member, dims in found if dims >= 1]
