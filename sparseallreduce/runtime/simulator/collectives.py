"""MPI's collectives as schedules of messages, which determine their cost on the virtual network."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Share, Shift, Step
from sparseallreduce.streams.reduction import Reduction

__all__ = ["COLLECTIVES", "collective"]

Collective: TypeAlias = DenseAllreduce | DenseAllgather | Share
COLLECTIVES = (DenseAllreduce, DenseAllgather, Share)  # a tuple, since isinstance is slower for a union


def collective(step: Collective, rank: int, ranks: int, joining: Reduction) -> Generator[Step, Any, Any]:
    """Return one rank's schedule of a collective step; ``joining`` joins blocks that are gathered."""
    if isinstance(step, DenseAllreduce):
        return rabenseifner(step.stream, rank, ranks, Reduction(step.op))
    if isinstance(step, DenseAllgather):
        return join_blocks(step.stream, rank, ranks, joining, step.in_step)
    return _share(step, rank, ranks)


def _share(step: Share, rank: int, ranks: int) -> Generator[Step, Any, list[bytes]]:
    """Exchange the records of all ranks by dissemination."""
    held, length = [step.record], len(step.record)
    while len(held) < ranks:
        distance = len(held)
        message = b"".join(held[: ranks - distance])
        arrived: bytes = yield Shift((rank - distance) % ranks, message, (rank + distance) % ranks)  # type: ignore[arg-type]
        held += [arrived[at : at + length] for at in range(0, len(arrived), length)]
    return held[ranks - rank :] + held[: ranks - rank]
