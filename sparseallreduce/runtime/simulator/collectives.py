"""Collectives that MPI does itself, as schedules of messages: what they cost on the virtual network."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from sparseallreduce.algorithms.dense import join_blocks, rabenseifner
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Share, Shift, Step
from sparseallreduce.streams.reduction import Reduction

__all__ = ["COLLECTIVES", "collective"]

Collective: TypeAlias = DenseAllreduce | DenseAllgather | Share
COLLECTIVES = (DenseAllreduce, DenseAllgather, Share)  # for isinstance, which takes longer for a union


def collective(step: Collective, rank: int, ranks: int, joining: Reduction) -> Generator[Step, Any, Any]:
    """The schedule of one rank that ends with the result of the step; ``joining`` joins the blocks that are gathered."""
    if isinstance(step, DenseAllreduce):
        return rabenseifner(step.stream, rank, ranks, Reduction(step.op))
    if isinstance(step, DenseAllgather):
        return join_blocks(step.stream, rank, ranks, joining)
    return _share(step, rank, ranks)


def _share(step: Share, rank: int, ranks: int) -> Generator[Step, Any, list[bytes]]:
    """The records of all ranks, by dissemination."""
    held, length = [step.record], len(step.record)
    while len(held) < ranks:
        distance = len(held)
        message = b"".join(held[: ranks - distance])
        arrived: bytes = yield Shift((rank - distance) % ranks, message, (rank + distance) % ranks)  # type: ignore[arg-type]
        held += [arrived[at : at + length] for at in range(0, len(arrived), length)]
    return held[ranks - rank :] + held[: ranks - rank]
