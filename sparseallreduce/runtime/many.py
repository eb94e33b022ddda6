"""Start a sum of a list of streams: as a single fused stream if all have one dtype and width, otherwise by a schedule."""

from __future__ import annotations

from typing import Any

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.runtime import communicators, launching
from sparseallreduce.runtime.request import Request
from sparseallreduce.streams.fusion import Fusion, fused_alike
from sparseallreduce.streams.operator import MEAN
from sparseallreduce.streams.stream import SparseStream

__all__ = ["start"]


def start(streams: Any, comm: Any, op: Any, algorithm: Any, options: dict[str, Any], blocking: bool) -> Request:
    """Start a sum of one stream or a list. Same as :func:`sparseallreduce.runtime.launching.start`, with a fast path for fusible lists."""
    made = None
    if isinstance(streams, list | tuple) and not options and type(op) is str and type(algorithm) is str:
        channel = communicators.known_channel(comm)
        if channel is not None:
            fast = communicators.over_mpi().fast
            if fast.is_idle(channel) if blocking else fast.has_begun(channel):
                try:
                    found = fused_alike(streams)
                except BaseException as error:  # reported to the other ranks
                    found, made = None, (None, Intent((), 0, error))
                if found is not None:
                    request = _begun(*found, op, algorithm, channel, blocking)
                    if request is not None:
                        return request
    return launching.start(streams, comm, op, algorithm, options, blocking, made)


def _begun(fusion: Fusion, fused: SparseStream, op: str, algorithm: str, channel: Any, blocking: bool) -> Request | None:
    operation = communicators.over_mpi().fast.start(fused, op, algorithm, channel, blocking, fusion)
    if operation is None:
        return None
    cut = _Cut(fusion, operation.work.is_sum)
    divisor = channel.ranks if op == MEAN.name else 0
    if blocking:
        return Request(None, operation.result, operation.error, divisor, cut)
    return Request(operation, divisor=divisor, cut=cut)


class _Cut:
    """A callable that cuts the result of a fused stream into the results of the list."""

    __slots__ = ("_fusion", "_is_sum")

    def __init__(self, fusion: Fusion, is_sum: bool) -> None:
        self._fusion, self._is_sum = fusion, is_sum

    def __call__(self, result: SparseStream) -> list[SparseStream]:
        return self._fusion.cut((result,), None, self._is_sum)
