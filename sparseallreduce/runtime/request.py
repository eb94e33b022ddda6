"""The handle of a non-blocking operation, with the interface of mpi4py's requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count
from numbers import Real
from typing import TYPE_CHECKING, Any

from sparseallreduce.algorithms.staging import handed_over
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.finalizer import Finalizer
from sparseallreduce.runtime.communicators import over_mpi
from sparseallreduce.runtime.stalls import LongWait, default_timeout
from sparseallreduce.runtime.work import pending
from sparseallreduce.streams.reduction import divided

if TYPE_CHECKING:
    from sparseallreduce.runtime.operation import Operation
    from sparseallreduce.streams.kernels.devices import Queue

__all__ = ["Request", "checked_timeout"]

_numbers = count()


class Request:
    """A non-blocking operation, which may be in flight or complete.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> first, second = (sar.iallreduce(sar.SparseStream([i], [1.0], 8), comm=sar.SERIAL) for i in range(2))
    >>> done, result = second.test()
    >>> [stream.nnz for stream in sar.Request.waitall([first, second])]
    [1, 1]
    """

    def __init__(
        self,
        operation: Operation | None,
        result: Any = None,
        error: BaseException | None = None,
        divisor: int = 0,
        cut: Callable[[Any], Any] | None = None,
    ) -> None:
        self._operation = operation
        self._result = result
        self._error = error
        self._divisor = divisor  # the number by which the result of a mean is still to be divided, else 0
        self._timeout: float | None = None  # default timeout of this request, in seconds
        self._tests: LongWait | None = None  # starts at the first test that finds it incomplete
        self._cut = cut  # makes of the result what this rank gets, if that is still to be done: a list, or a part
        self._queue: Queue | None = None  # queue of GPU work that the result may still depend on
        self._number = next(_numbers)
        if operation is not None:
            self._forgotten = Finalizer(pending.discard, self._number)
            pending.add(self._number)

    def __repr__(self) -> str:
        operation = self._operation
        error = self._error if operation is None else operation.error
        state = f"failed: {type(error).__name__}" if error is not None else "done" if operation is None or operation.done else "in flight"
        return f"Request({state})"

    def test(self) -> tuple[bool, Any]:
        """Progress the operation. Return ``(True, result)`` if it is complete, else ``(False, None)``.

        Raises
        ------
        SparseAllreduceError
            If the operation failed; the same error on all ranks.
        """
        operation = self._operation
        try:
            if operation is not None:
                over_mpi().progress.advance()
                if not operation.done:
                    if self._tests is None:
                        self._tests = LongWait(lambda: over_mpi().deadline.describe_wait(operation), verb="tested")
                    self._tests.check()
                    return False, None
                if self._tests is not None:
                    self._tests.over()
            return True, self._outcome()
        except BaseException as error:
            _leave(operation, error)
            raise

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return its result.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which the operation fails on all ranks. The default is the environment variable ``SPARSEALLREDUCE_TIMEOUT``; if it
            is unset, the rank waits indefinitely and logs warnings. The ranks may take another second to agree on the error. Ranks that
            call the library later raise the same error. If this rank has its result when the time is over, data still to be sent to other
            hosts is copied; ranks of the same host may read the input stream until they have their result.

        Returns
        -------
        object
            What the blocking call returns, such as a SparseStream or a list of them.

        Raises
        ------
        SparseAllreduceError
            If the operation failed; the same error on all ranks. WaitTimeoutError, which is also a TimeoutError, if the time of a rank is
            over; it names the missing ranks if they are known. AlgorithmError, on this rank alone and with the operation still in flight,
            if ``timeout`` is not a positive, finite number.
        """
        operation: Any = None
        try:
            if timeout is None:
                timeout = self._timeout
            seconds = None if timeout is None else checked_timeout(timeout)
            operation = self._operation
            if seconds is None:
                self._finish()
            else:
                _finish_within([self], seconds)
            return self._outcome()
        except BaseException as error:
            _leave(operation or (None if isinstance(error, Exception) else self._operation), error)
            raise

    @staticmethod
    def waitall(requests: Sequence[Request], timeout: float | None = None) -> list[Any]:
        """Wait for all requests and return their results in the same order.

        Parameters
        ----------
        requests : sequence of Request
        timeout : float, optional
            Seconds for all of them together, as in :meth:`wait`.

        Returns
        -------
        list
            The results, as of :meth:`wait`.

        Raises
        ------
        SparseAllreduceError
            The error of the first request that failed, once all are complete.
        """
        if timeout is None and any(request._operation is not None and not request._operation.done for request in requests):
            timeout = default_timeout()
        if timeout is not None:
            _finish_within(requests, checked_timeout(timeout))
        for request in requests:
            request._finish()
        return [request.wait() for request in requests]

    def has_failed(self) -> bool:
        """Return True if the operation is known to have failed, without progressing it."""
        operation = self._operation
        if operation is None:
            return self._error is not None
        return operation.error is not None or operation.failure is not None  # in the latter case the ranks are still agreeing on the error

    def has_succeeded(self) -> bool:
        """Return whether the operation is over and its result there, without moving it on."""
        operation = self._operation
        if operation is None:
            return self._error is None
        return operation.done and operation.error is None

    def _finish(self) -> None:
        if self._operation is not None:
            try:
                over_mpi().deadline.finish(self._operation)
            except BaseException:  # an interrupt, whose traceback may keep this request alive: the operation has failed
                pending.discard(self._number)
                raise

    def _outcome(self) -> Any:
        if self._operation is not None:
            self._result, self._error, self._queue = self._operation.result, self._operation.error, self._operation.queue
            self._operation = self._tests = None
            pending.discard(self._number)
        if self._error is not None:
            raise self._error
        if self._queue is not None:
            self._result, self._queue = handed_over(self._result, self._queue), None
        if self._divisor or self._cut is not None:
            self._result, self._divisor, self._cut = self._finished(), 0, None
        return self._result

    def _finished(self) -> Any:
        """Return the result in its public form: divided for a mean, and cut for a list."""
        result, ranks = self._result, self._divisor
        if ranks:
            result = tuple(divided(each, ranks) for each in result) if type(result) is tuple else divided(result, ranks)
        return result if self._cut is None else self._cut(result)


def _leave(operation: Operation | None, error: BaseException) -> None:
    """Report an error that a call for an operation raises to the other ranks, unless they know of it."""
    if operation is not None:
        operation.channel.late.leave(error, operation.sequence)


def checked_timeout(timeout: Any) -> float:
    """Return a timeout in seconds as a float, after checking it.

    Raises
    ------
    AlgorithmError
        If it is not a positive, finite number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not 0 < float(timeout) < math.inf:
        raise AlgorithmError(f"timeout is a positive, finite number of seconds, or None to wait for ever, not {timeout!r}")
    return float(timeout)


def _finish_within(requests: Sequence[Request], seconds: float) -> None:
    operations = [request._operation for request in requests if request._operation is not None]
    if operations:
        try:
            over_mpi().deadline.finish_within(operations, seconds)
        except BaseException:
            for request in requests:  # as in `_finish`; also those still in flight, which are no longer waited for
                if request._operation is None or request._operation.done:
                    pending.discard(request._number)
            raise
