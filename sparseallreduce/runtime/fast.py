"""Start operations that can start immediately, and complete blocking ones without creating a request.

An operation on a few kilobytes takes about ten microseconds, so every object and lock counts. Checked arguments, the agreed description of
the operation and the choice of algorithm are cached by size, dtype, operator and algorithm. The operation is added to the list of pending
operations, and the channel's lock is taken, only if there is something to wait for. From then on it proceeds like any other.
"""

from __future__ import annotations

from typing import Any

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.collectives.call import Collective, make_collective_call
from sparseallreduce.algorithms.many import make_fused_call
from sparseallreduce.algorithms.registration import term_of
from sparseallreduce.runtime import deadline, progress
from sparseallreduce.runtime.channel import Channel
from sparseallreduce.runtime.collective_work import work_of
from sparseallreduce.runtime.handshake.shared import SLOTS
from sparseallreduce.runtime.operation import Operation
from sparseallreduce.runtime.signature import Signature
from sparseallreduce.runtime.states import READY
from sparseallreduce.runtime.work import Launched, level
from sparseallreduce.streams.fusion import Fusion
from sparseallreduce.streams.kernels.backend import current_queue
from sparseallreduce.streams.stream import SparseStream

__all__ = ["has_begun", "is_idle", "start"]

_REMEMBERED = 256  # signatures cached for a channel
_AT_ONCE = (False,)  # argument of `acquire` for a non-blocking attempt
_FAILED_WORK = Launched(Intent((), 0))  # stands for the work of an operation that failed before its work was known


def is_idle(channel: Channel) -> bool:
    """Return True if the channel has no pending operation, so that a blocking call can start immediately."""
    return channel.state == READY and not (progress.operations or progress.preparing or progress.freed or channel.stale)


def has_begun(channel: Channel) -> bool:
    """Return True if every operation that was called on the channel has begun."""
    return channel.state == READY and channel.begun == channel.sequence and not channel.stale


def start(
    stream: SparseStream | None, op: str, algorithm: str, channel: Channel, blocking: bool, fusion: Any = None, collective: Any = None
) -> Operation | None:
    """Start an operation and return it, completed if ``blocking``. Return None if it cannot start yet.

    It cannot start if earlier operations on this channel have not started, or are in flight and ``blocking`` is true; if the arguments need
    checking; if another thread is progressing this channel; or if another rank is more than four operations behind. ``fusion`` (a Fusion)
    describes the list of streams that were fused into ``stream``; ``collective`` (a Collective) is another one than allreduce.

    Raises
    ------
    BaseException
        An interrupt (not an Exception), by which the operation has failed. All other errors are stored in the operation.
    """
    with channel.start_lock:
        idle = is_idle(channel)
        if not idle and (blocking or not has_begun(channel)):
            return None
        sequence, slots = channel.sequence + 1, channel.slots
        operation: Any = None
        locked: list[bool] = []
        try:
            if not (idle and slots):  # otherwise nothing is touched that another thread may be progressing
                locked.extend(map(channel.lock.acquire, _AT_ONCE))  # no interrupt can separate this call from storing its result
                if not locked[0]:
                    return None
            like = fusion  # None on all ranks but the root of a broadcast, which pass no stream
            if fusion is None and stream is not None:
                like = (stream.size, (stored := stream._stored).dtype, stored.shape[1:], type(stored))
            signature = channel.signatures.get(key := (like, op, term_of(algorithm), collective))
            if signature is None and (signature := _signature_of(key, stream, op, algorithm, channel, fusion, collective)) is None:
                return None
            handshake = slots[sequence % SLOTS] if slots else channel.handshake_of(sequence)
            if not handshake.is_free(sequence):
                return None
            channel.sequence = sequence
            operation = Operation(channel, signature, stream, sequence, level(blocking))
            if signature.on_device:
                operation.queue = current_queue()
            operation.begin(handshake)
            if blocking and operation.agree(handshake.spins):
                shortcut = operation.shortcut
                if operation.done or (shortcut is not None and operation.poll(shortcut.spins)):
                    return operation  # type: ignore[no-any-return]
            operation.enlist()
        except BaseException as error:
            channel.sequence = sequence
            if operation is None:
                operation = Operation(channel, _FAILED_WORK, None, sequence)
            with channel.lock:  # another thread may be progressing other operations
                operation.fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            if locked and locked[0]:
                channel.lock.release()
    if blocking:
        deadline.finish(operation)
    return operation  # type: ignore[no-any-return]


def _signature_of(
    key: tuple[Any, ...],
    stream: SparseStream | None,
    op: str,
    algorithm: str,
    channel: Channel,
    fusion: Fusion | None,
    collective: Collective | None,
) -> Any:
    """Return the cached signature of operations on such streams, creating it if needed. Return None if the arguments are wrong."""
    call: Any
    if collective is not None:
        call, intent = make_collective_call(collective, stream, op, algorithm, {}, channel.rank, channel.ranks)
    else:
        call, intent = make_call(stream, op, algorithm, {})
    if call is not None and fusion is not None and stream is not None:
        intent = make_fused_call(fusion, stream, op, algorithm)[1]
    if intent.error is not None and not isinstance(intent.error, Exception):
        raise intent.error  # an interrupt, which a second attempt would lose
    if call is None or intent.error is not None:
        return None
    signature = Signature(call, intent, channel) if collective is None else work_of(call, intent, channel)
    if len(channel.signatures) >= _REMEMBERED:
        channel.signatures.clear()
    channel.signatures[key] = signature
    return signature
