"""Algorithms on streams that lie on a GPU, over a network that takes them from the host: one interface between the two.

What is sent is copied to the host first, and what comes is copied to the device; in between nothing else knows where a stream lies. Every
runner carries out such a schedule as any other. Copies wait for the kernels before them, and are not overlapped with anything.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from sparseallreduce.algorithms.steps import (
    DenseAllgather,
    DenseAllreduce,
    Exchange,
    HostGather,
    HostReduceScatter,
    Quantise,
    Recv,
    RecvAny,
    Schedule,
    Send,
    Shift,
    Step,
)
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import CodedStream

__all__ = ["staged"]


def staged(schedule: Schedule, xp: Any, exact: bool, dtype: np.dtype[Any]) -> Generator[Step, Any, Any]:
    """The schedule of an algorithm on device streams, as one of which all that travels lies on the host.

    Parameters
    ----------
    schedule : generator
    xp : module
        That makes arrays on the device.
    exact : bool
        Whether no values are quantised.
    dtype : dtype
        Of the values. Streams of another dtype are counts that ranks tell each other, which are and stay on the host.
    """
    staging, value = _Staging(xp, dtype), None  # type: _Staging, Any
    while True:
        try:
            step = schedule.send(value)
        except StopIteration as stop:
            return stop.value
        match step:
            case Quantise() if exact:
                value = step.stream
            case Exchange() | Shift():
                came = staging.to_device((yield step._replace(stream=staging.to_host(step.stream), merging=None)))
                value = came if step.merging is None else step.merging.finish(came)
            case HostGather():
                value = staging.to_device((yield step._replace(part=staging.to_host(step.part))))
            case Send() | DenseAllreduce() | DenseAllgather() | HostReduceScatter() | Quantise():
                value = staging.to_device((yield step._replace(stream=staging.to_host(step.stream))))
            case Recv():
                value = staging.to_device((yield step))
            case RecvAny():
                source, stream = yield step
                value = source, staging.to_device(stream)
            case _:
                value = yield step


class _Staging:
    """Copies between host and device, and the coded forms in which streams have come, or were quantised, and are handed on."""

    def __init__(self, xp: Any, dtype: np.dtype[Any]) -> None:
        self._xp, self._dtype = xp, dtype
        self._coded: dict[int, tuple[SparseStream, CodedStream]] = {}  # by the id of the stream on the device, which is kept with it

    def to_host(self, payload: Any) -> Any:
        """A stream, or a tuple of them, that may be sent; its arrays are nobody else's."""
        if isinstance(payload, tuple):
            return tuple(map(self.to_host, payload))
        if payload is None or not payload.on_device:
            return payload
        known = self._coded.get(id(payload))
        if known is not None:
            return known[1]
        moved = payload.to_host()
        moved._owned = True
        return moved

    def to_device(self, payload: Any) -> Any:
        """What has come, in arrays that may be reused."""
        if isinstance(payload, tuple):
            return tuple(map(self.to_device, payload))
        if payload is None or payload.dtype != self._dtype:
            return payload
        moved = payload.to_device(self._xp)
        if isinstance(payload, CodedStream):
            self._coded[id(moved)] = moved, payload
        else:
            moved._owned = True
        return moved
