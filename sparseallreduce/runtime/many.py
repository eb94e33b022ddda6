"""How a sum of many streams at once is started: fused, it takes the way of a single stream; in several groups, that of a schedule."""

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
    """As :func:`sparseallreduce.runtime.launching.start`, which does what is no list, or cannot begin at once."""
    struck = None
    if isinstance(streams, list | tuple) and not options and type(op) is str and type(algorithm) is str:
        channel = communicators.known_channel(comm)
        if channel is not None:
            fast = communicators.over_mpi().fast
            if fast.is_idle(channel) if blocking else fast.has_begun(channel):
                try:
                    found = fused_alike(streams)
                except BaseException as error:  # which the others are told
                    found, struck = None, (None, Intent((), 0, error))
                if found is not None:
                    request = _begun(*found, op, algorithm, channel, blocking)
                    if request is not None:
                        return request
    return launching.start(streams, comm, op, algorithm, options, blocking, struck)


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
    """How the result of one group becomes those of the list."""

    __slots__ = ("_fusion", "_is_sum")

    def __init__(self, fusion: Fusion, is_sum: bool) -> None:
        self._fusion, self._is_sum = fusion, is_sum

    def __call__(self, result: SparseStream) -> list[SparseStream]:
        return self._fusion.cut((result,), None, self._is_sum)
