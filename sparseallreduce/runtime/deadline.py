"""Wait for operations, with or without a timeout, and describe which ranks a long wait is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.agreement import named_ranks
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Exchange, Recv, RecvAny, Share, Shift
from sparseallreduce.errors import WaitTimeoutError
from sparseallreduce.runtime import progress
from sparseallreduce.runtime.collectives import Until
from sparseallreduce.runtime.handshake.shared import SLOTS
from sparseallreduce.runtime.stalls import default_timeout
from sparseallreduce.runtime.states import READY
from sparseallreduce.runtime.work import waiting

if TYPE_CHECKING:
    from sparseallreduce.runtime.operation import Operation

__all__ = ["finish", "finish_within", "outcome", "describe_wait"]

# For a communicator that is not duplicated yet. All ranks use the same text, since they cannot communicate.
_UNKNOWN = "not all ranks have started the first operation on this communicator in time, and MPI does not report which ranks are missing"


def finish(operation: Operation) -> None:
    """Progress until ``operation`` is done or the default timeout expires. An interrupt makes it fail on all ranks."""
    try:
        waiting.add(operation)
        operation.enlist()
        if progress.alone():
            operation.advance(spin=True)
        if operation.done:
            return
        timeout = default_timeout()
        if timeout is None:
            progress.wait_until(lambda: operation.done, lambda: describe_wait(operation))
        else:
            finish_within([operation], timeout)
    except BaseException as error:
        progress.give_up(operation, error)
        raise
    finally:
        waiting.discard(operation)


def outcome(operation: Operation) -> Any:
    """Wait for an operation and return its result.

    Raises
    ------
    SparseAllreduceError
        If the operation failed; the same error on all ranks.
    """
    finish(operation)
    if operation.error is not None:
        raise operation.error
    return operation.result


def finish_within(operations: Sequence[Operation], seconds: float) -> None:
    """Progress until all operations are done. Those that are not done within ``seconds`` fail with a timeout on all ranks."""
    limit = perf_counter() + seconds
    waited = list(operations)
    try:
        for operation in waited:
            operation.enlist()
        progress.wait_until(lambda: _all_done(waited) or perf_counter() > limit, lambda: _describe_any(waited))
        if _all_done(waited):
            return
        for operation in waited:
            with operation.channel.lock:  # another thread may be progressing it
                if operation.ended:
                    _leave_sends(operation)
                elif operation.failure is None:
                    is_first = operation.channel.mailbox is None
                    text = _UNKNOWN if is_first else f"not done within {seconds:g} s: {_awaited(operation)}"
                    progress.give_up(operation, WaitTimeoutError(text))
        progress.wait_until(lambda: _all_done(waited))  # until the ranks have agreed on the error
    except BaseException as error:
        for operation in waited:
            if not operation.done:
                progress.give_up(operation, error)
                break
        raise


def _all_done(operations: Sequence[Operation]) -> bool:
    return all(operation.done for operation in operations)


def describe_wait(operation: Operation) -> tuple[str, str]:
    """Return who is waiting for an operation, and a text that names the operation and what it waits for.

    Exceptions and interrupts here propagate to the caller, who is waiting.
    """
    channel = operation.channel
    name, who = _name(operation.work), f"rank {channel.rank} of {channel.ranks}"
    if not channel.lock.acquire(blocking=False):
        return who, f"{name}: a thread of this rank is progressing it"
    try:
        if operation.ended:
            text = "its last messages have not been received yet"
        elif operation.failure is not None:
            text = "it has failed, and the ranks are agreeing on the error to raise"
        else:
            text = _awaited(operation)
    finally:
        channel.lock.release()
    if text == _UNKNOWN:
        other = f"rank {1 - channel.rank} has not started it" if channel.ranks == 2 else "MPI does not report which ranks are missing"
        return who, f"{name}, the first operation on this communicator: {other}"
    return who, f"{name}: {text}"


def _describe_any(operations: Sequence[Operation]) -> tuple[str, str]:
    return describe_wait(next((operation for operation in operations if not operation.done), operations[0]))


def _name(work: Any) -> str:
    """Return the name of the collective that the user called."""
    intent = work.intent(None)
    terms = dict(intent.terms)
    if "operation" in terms:
        return str(terms["operation"])
    if "reducer" in terms:
        return f"a sum of the reducer {terms['reducer']}"
    if "plan" in terms:
        return "a sum of a plan" if "number of the plan" in terms else "the preparation of a plan"
    if "step of the optimiser" in terms:
        return "a step of an optimiser"
    if "size" not in terms:
        return "an operation"
    return "an allreduce of a list" if terms["size"].startswith("a list") else "an allreduce"


def _leave_sends(operation: Operation) -> None:
    """Stop waiting for other ranks to receive the last messages of an operation whose result is complete.

    If writing those messages fails, so does the operation.
    """
    if operation.done:
        return
    try:
        operation.outgoing().leave(operation.sequence)
    except BaseException as error:
        operation.fail(error)
        if not isinstance(error, Exception):
            raise
    operation.advance()


def _awaited(operation: Operation) -> str:
    """Return a text that says what an operation waits for, with the missing ranks if they are known."""
    channel = operation.channel
    if not operation.begun:
        return _awaited_before(operation)
    if operation.handshake is not None:
        return _absent(operation.handshake.missing(operation.sequence), "has not started this operation", "have not started this operation")
    if operation.shortcut is not None:
        return _absent(operation.shortcut.missing(operation.sequence), "has not finished its part", "have not finished their part")
    step, requests = operation.step, operation.requests
    if isinstance(step, Share | DenseAllreduce | DenseAllgather):
        sources = channel.others
        if isinstance(step, DenseAllgather):
            if not operation._is_direct(step):
                return _absent(None, "", "")
            sources = [rank for rank in sources if step.ranges[rank][0] < step.ranges[rank][1]]
        if isinstance(step, DenseAllreduce) or requests is None:
            return _absent(None, "", "")
        return _silent(sorted(rank for rank, request in zip(sources, requests) if not request.Test()))
    if isinstance(step, RecvAny):
        return _silent(sorted(step.sources))
    if isinstance(step, Exchange):
        return _silent([step.partner])
    if isinstance(step, Recv | Shift):
        return _silent([step.source])
    missing: list[int] = step.missing() if isinstance(step, Until) and step.missing is not None else []
    return _silent(missing) if missing else "it waits for other operations of this rank"


def _awaited_before(operation: Operation) -> str:
    """Return the same text for an operation that has not started."""
    channel = operation.channel
    if channel.state != READY:
        others: Iterator[Any] = (other for other in progress.operations if other.own and other.channel is channel and other.begun)
        own = next(others, None)
        if own is None:
            return _UNKNOWN
        return f"while the ranks prepare the communicator, {_awaited(own)}"
    first = min(channel.in_flight, key=lambda other: other.sequence, default=None)
    if first is not None:
        return f"in an earlier operation, {_awaited(first)}"
    held = channel.slots[operation.sequence % SLOTS].holding(operation.sequence) if channel.slots else []
    return _absent(held or None, "is still in an earlier operation", "are still in earlier operations")


def _silent(ranks: list[int]) -> str:
    return _absent(ranks, "has not sent an expected message", "have not sent an expected message")


def _absent(ranks: list[int] | None, one: str, several: str) -> str:
    if not ranks:
        return "ranks wait for each other in a collective of MPI, which does not report the missing ranks"
    return f"{named_ranks(ranks)} {one if len(ranks) == 1 else several}"
