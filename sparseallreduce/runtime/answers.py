"""Answers to the questions that a schedule asks its runner and that need no communication, over MPI."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.steps import Asked, Clock, Constants, Layout
from sparseallreduce.runtime.cuda_mpi import cuda_support

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import AnyOperation

__all__ = ["answer"]


def answer(step: Asked, operation: AnyOperation) -> Any:
    """Return the result of a step that completes immediately."""
    channel = operation.channel
    if isinstance(step, Clock):
        return perf_counter()
    if isinstance(step, Layout):
        return channel.hosts
    if isinstance(step, Constants):
        return channel.machine
    if operation.queue is None or not (operation.work.encoding.is_exact and cuda_support().used):
        return False
    channel.mailbox.box(operation.tag).queue = operation.queue  # messages received from now on go to the device
    return True
