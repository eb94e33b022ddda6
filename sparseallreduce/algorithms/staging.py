"""Run algorithms on streams in GPU memory over a network that sends host memory.

Outgoing streams are copied to the host, and arriving ones to the device; nothing else needs to know where a stream is. Every runner
executes such a schedule like any other. Copies are made in pieces, on separate CUDA streams (:mod:`~sparseallreduce.streams.transfers`): a
message between hosts is encoded piece by piece as it is copied from the device, and copied to the device piece by piece as it arrives.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.steps import (
    DenseAllgather,
    DenseAllreduce,
    DeviceMessages,
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
from sparseallreduce.streams.kernels.devices import Queue
from sparseallreduce.streams.merging import Arriving, Merging
from sparseallreduce.streams.staged import StagedStream
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.transfers import PIECE, Upload, transfers_of
from sparseallreduce.streams.wire import CodedStream

__all__ = ["handed_over", "queued", "staged"]

DIRECT_BYTES = 1 << 14  # streams up to this size go through the host even if MPI accepts device memory, packed in one message


def staged(schedule: Schedule, xp: Any, exact: bool, dtype: np.dtype[Any]) -> Generator[Step, Any, Any]:
    """Wrap the schedule of an algorithm on device streams into one whose messages are on the host.

    Parameters
    ----------
    schedule : generator
    xp : module
        CuPy or a compatible module.
    exact : bool
        Whether no values are quantised.
    dtype : dtype
        Dtype of the values. Streams of another dtype are counts exchanged by the algorithm, which are and stay on the host.
    """
    staging = _Staging(xp, dtype)
    try:
        return (yield from _staged(schedule, staging, exact))
    finally:
        staging.leave()


def _staged(schedule: Schedule, staging: _Staging, exact: bool) -> Generator[Step, Any, Any]:
    value: Any = None
    while True:
        try:
            step = schedule.send(value)
        except StopIteration as stop:
            return stop.value
        if staging.direct is None and isinstance(step, Send | Exchange | Shift):
            staging.direct = exact and bool((yield DeviceMessages()))
        match step:
            case Quantise() if exact:
                value = step.stream
            case Exchange() | Shift() if not isinstance(step.stream, tuple):
                value = yield step._replace(stream=staging.to_message(step.stream), merging=_Uploading(staging, step.merging))
            case Send() | Exchange() | Shift():
                value = staging.to_device((yield step._replace(stream=staging.to_message(step.stream))))
            case HostGather():
                value = staging.to_device((yield step._replace(part=staging.to_host(step.part))))
            case DenseAllreduce() | DenseAllgather() | HostReduceScatter() | Quantise():
                value = staging.to_device((yield step._replace(stream=staging.to_host(step.stream))))
            case Recv():
                value = staging.to_device((yield step))
            case RecvAny():
                source, stream = yield step
                value = source, staging.to_device(stream)
            case _:
                value = yield step


def queued(schedule: Generator[Step, Any, Any], queue: Queue | None) -> Generator[Step, Any, Any]:
    """Return a schedule whose device work is put on one CUDA stream, whichever thread runs it; the schedule itself without a queue."""
    return schedule if queue is None else _queued(schedule, queue)


def _queued(schedule: Generator[Step, Any, Any], queue: Queue) -> Generator[Step, Any, Any]:
    value: Any = None
    try:
        while True:
            with queue:
                try:
                    step = schedule.send(value)
                except StopIteration as stop:
                    return stop.value
            value = yield step
    finally:
        with queue:
            schedule.close()


def handed_over(result: Any, queue: Queue) -> Any:
    """Return the result of an operation, ready for use on the current CUDA stream.

    If that is not the operation's stream, it waits for the operation, and the result is copied: the operation's memory returns to the pool
    of its own stream, and might be reused while kernels of another stream still read it.
    """
    with queue.device:
        ours = queue.xp.cuda.get_current_stream()
        if ours == queue.stream:
            return result
        ours.wait_event(queue.stream.record())
        copied = _copied(result)
        queue.stream.wait_event(ours.record())
        return copied


def _copied(result: Any) -> Any:
    if isinstance(result, SparseStream):
        if not result.on_device:
            return result
        copied = result.copy()
        copied._owned = False
        return copied
    if isinstance(result, tuple):
        each = map(_copied, result)
        return type(result)(*each) if hasattr(result, "_fields") else tuple(each)
    return result.copy() if hasattr(result, "__cuda_array_interface__") else result


def _settled(payload: Any) -> Any:
    """Wait for a staged stream, and return the stream itself."""
    return payload.settled() if isinstance(payload, StagedStream) else payload


class _Staging:
    """Copies between host and device, and the encoded forms in which streams have arrived or were quantised, to be forwarded."""

    direct: bool | None = None  # whether messages may use device memory; None until known

    def __init__(self, xp: Any, dtype: np.dtype[Any]) -> None:
        self.transfers, self.dtype = transfers_of(xp), dtype
        self.queue = Queue(xp)
        self._coded: dict[int, tuple[SparseStream, CodedStream]] = {}  # by the id of the device stream, which is stored with it

    def to_host(self, stream: Any) -> Any:
        """Return a stream on the host whose arrays are not shared."""
        return _settled(self._coming(stream))

    def to_message(self, payload: Any) -> Any:
        """Return a stream, or a tuple, that may be sent: being copied to the host, or in device memory once it is complete."""
        if not isinstance(payload, tuple):
            return self.to_message((payload,))[0]
        direct = [self.direct and stream.on_device and stream.nbytes > DIRECT_BYTES for stream in payload]
        if any(direct):
            self.queue.stream.synchronize()
        for stream in payload:
            stream._owned = False
        return tuple(stream if whole else self._coming(stream) for stream, whole in zip(payload, direct, strict=True))

    def _coming(self, payload: Any) -> Any:
        if payload is None or not payload.on_device:
            return payload
        payload._owned = False  # as for all sent streams: the copy may read it after this call
        known = self._coded.get(id(payload))
        return StagedStream.of(payload, self.transfers) if known is None else known[1]

    def to_device(self, payload: Any, upload: Upload | None = None) -> Any:
        """Return an arrived stream in reusable device arrays; ``upload`` if some of it has already been copied."""
        if isinstance(payload, tuple):
            return tuple(map(self.to_device, payload))
        payload = _settled(payload)
        if payload is None or payload.on_device or payload.dtype != self.dtype:
            return payload
        arrays = [array for array in payload._arrays if array is not None]
        if upload is None:
            upload = Upload(self.transfers, [(array.shape, array.dtype) for array in arrays])
        upload.take(arrays, len(arrays[0]))
        received = iter(upload.finish())
        moved = payload._moved(lambda _: next(received))
        if isinstance(payload, CodedStream):
            self._coded[id(moved)] = moved, payload
        else:
            moved._owned = True
        return moved

    def leave(self) -> None:
        """Finish the operation: the user's arrays may be modified on the current stream from now on."""
        self.transfers.release()


class _Uploading(Merging):
    """A merge that copies an arriving stream to the device piece by piece, and reduces it there once it is complete.

    Its receiver calls it in any thread, with any CUDA stream as the current one.
    """

    def __init__(self, staging: _Staging, merging: Merging | None) -> None:
        self._staging, self._merging = staging, merging
        self._upload: Upload | None = None

    def advance(self, theirs: Arriving) -> None:
        indices, values = theirs.prefix()
        staging = self._staging
        arrays: list[NDArray[Any]] = [values] if indices is None else [indices, values]
        done = 0 if self._upload is None else self._upload.done
        nbytes = sum(array.nbytes for array in arrays)
        if theirs.masked or values.dtype != staging.dtype or nbytes * (theirs.arrived - done) < PIECE * theirs.arrived:
            return
        with staging.queue:
            if self._upload is None:
                self._upload = Upload(staging.transfers, [((theirs.stored, *array.shape[1:]), array.dtype) for array in arrays])
            self._upload.take(arrays, theirs.arrived)

    def finish(self, theirs: SparseStream) -> SparseStream:
        with self._staging.queue:
            received: SparseStream = self._staging.to_device(theirs, self._upload)
            return received if self._merging is None else self._merging.finish(received)
