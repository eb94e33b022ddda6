"""The sums of one step, which all ranks start in the same order.

If one of the sums fails, the others are returned to the residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError, StreamTypeError
from sparseallreduce.runtime.api import Request, iallreduce
from sparseallreduce.runtime.launching import ErrorReporter, agree
from sparseallreduce.runtime.objects import mark_known
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.torch.buckets import Bucket, Member

__all__ = ["Flight", "translated"]

T = TypeVar("T")

_FAILED = "another sum of this step has failed"


class Flight:
    """The sums of one step while they are running.

    Parameters
    ----------
    comm : communicator
        The communicator of the optimiser.
    buckets : sequence of Bucket
        The buckets in the order in which they are summed.
    step : int
        The number of the step.
    early : bool
        Whether sums start as soon as their gradients are computed, before the ranks agree to make the step.

    Attributes
    ----------
    ready : dict
        The gradients that have been computed, by the index of their parameter, each with PyTorch's version counter at that time.
    means : dict
        The means of the buckets whose sums are done.
    rows : list of SparseStream
        The means of the sparse gradients, when they are done.
    failure : Exception or None
        The first error of this step.
    closed : bool
        Whether all ranks have agreed to make the step. It must then be completed, even after an interrupt.
    broken : bool
        Whether this rank was interrupted before the ranks agreed to make the step.
    """

    has_rows: bool
    rows_started: bool

    def __init__(self, comm: Any, buckets: Sequence[Bucket], step: int, early: bool) -> None:
        self.comm = comm
        self.buckets: list[Bucket] = list(buckets)
        self.step = step
        self.early = early
        self.ready: dict[int, tuple[torch.Tensor, int]] = {}
        self.started: int = 0
        self.means: dict[Bucket, SparseStream] = {}
        self.rows: list[SparseStream] = []
        self.failure: Exception | None = None
        self.error: Exception | None = None  # an error of this rank that the other ranks do not know yet
        self.closed = False
        self.arranged = early  # whether the buckets are arranged for this step
        self.broken: bool = False
        self.agreeing: bool = False  # whether this rank has started the agreement on the step
        self.has_rows = self.rows_started = False
        self.layouts = b""  # the kinds of this step's gradients
        self._pending: list[tuple[Bucket | None, Request | None, Exception | None]] = []

    def gradient_ready(self, index: int, parameter: torch.Tensor) -> None:
        """Record that the gradient of a parameter has been computed."""
        if index in self.ready and self.error is None:
            self.error = AlgorithmError("a gradient was computed twice in a step with overlap: run all but the last backward in no_sync()")
        assert parameter.grad is not None
        self.ready[index] = parameter.grad, parameter.grad._version

    def check(self, members: Sequence[Member]) -> None:
        """Record an error if a gradient was changed after it had been computed."""
        for index, (gradient, version) in self.ready.items():
            if members[index].parameter.grad is not gradient or gradient._version != version:
                changed = f"the gradient of {members[index].name} was changed after its sum had begun: construct with overlap=False"
                self.error = self.error or AlgorithmError(changed)

    def start(self, pack: Callable[[Bucket], None]) -> None:
        """Start the sum of the next bucket, which ``pack`` fills with its gradients.

        If this rank fails, it sends the error to the other ranks in place of the sum.
        """
        bucket, before = self.buckets[self.started], len(self._pending)
        self.started += 1
        try:
            if self.has_failed():
                raise SparseAllreduceError(_FAILED)
            pack(bucket)
            operation = bucket.planned(self.step, {"bucket": bucket.key(), "step of the optimiser": self.step})
            self._add(bucket, lambda: operation.start(self.comm, blocking=False))
        except BaseException as error:  # the other ranks wait for this error
            if len(self._pending) == before:
                self.report_error(error)
            if not isinstance(error, Exception):
                raise

    def start_rows(self, streams: Callable[[], list[SparseStream]]) -> None:
        """Start the sum of all sparse gradients."""
        self.rows_started = True
        before = len(self._pending)
        try:
            given = streams()
            self._add(None, lambda: iallreduce(given, self.comm, op="mean"))
        except BaseException as error:
            if len(self._pending) == before:
                self.report_error(error)
            if not isinstance(error, Exception):
                raise

    def tell_rest(self, error: BaseException, buckets: int = 0, has_rows: bool = False) -> None:
        """Send an error to the other ranks in place of every sum that this rank has not started.

        Parameters
        ----------
        error : BaseException
            What has interrupted this rank.
        buckets : int
            The number of buckets in the step, for a step whose buckets are not arranged yet.
        has_rows : bool
            Whether the step sums sparse gradients.
        """
        self.has_rows |= has_rows
        while self.started < max(buckets, len(self.buckets)):
            self.started += 1
            self.report_error(error)
        if self.has_rows and not self.rows_started:
            self.rows_started = True
            self.report_error(error)

    def report_error(self, error: BaseException) -> None:
        """Send an error to the other ranks in place of a sum."""
        shared = translated(error) if isinstance(error, Exception) else error  # an interrupted rank does not wait for the others
        failed = self.has_failed()

        def start() -> Request:
            if failed:  # by a rank that may not take part in any further operation, so do not wait for it
                raise SparseAllreduceError(_FAILED)
            return agree(self.comm, Intent((), 0, shared), blocking=False)

        with suppress(KeyboardInterrupt, SystemExit, GeneratorExit):  # the caller raises it
            self._add(None, start)
        mark_known(self.comm, error)

    def agreed(self, agree: Callable[[], T]) -> T:
        """Call ``agree``, by which the ranks agree on the step, and return its result.

        If a sum has failed, raise the error of that sum, as the other ranks do.
        """
        if self.has_failed():
            self.give_up()
        self.agreeing = True
        try:
            return agree()
        except SparseAllreduceError:
            if self.early:  # a sum may have failed on another rank
                self.wait()
                if self.failure is not None:
                    raise self.failure from None
            raise

    def give_up(self) -> NoReturn:
        """Raise the error of a failed sum, after telling the other ranks in place of the agreement on the step that a sum has failed."""
        self.agreeing = True
        self.report_error(SparseAllreduceError(_FAILED))
        self.wait()
        raise self.failure or SparseAllreduceError(_FAILED)

    def leave(self, error: BaseException) -> None:
        """Send an error that ends the step to the other ranks, in place of every operation that they wait for in the step."""
        self.broken = not self.closed
        if self.early or self.closed:
            self.tell_rest(error)
        if self.early and not self.agreeing:
            self.agreeing = True
            self.report_error(error)
        if isinstance(error, Exception):
            self.wait()

    def has_failed(self) -> bool:
        """Return whether one of the sums is known to have failed."""
        failed = (error is not None if request is None else request.has_failed() for _, request, error in self._pending)
        return self.failure is not None or any(failed)

    def test(self) -> None:
        """Advance the running sums."""
        for _, request, _ in self._pending:
            if request is not None:
                try:
                    request.test()
                except Exception:  # raised again by the wait for this sum
                    continue
                return  # this has advanced all running sums

    def wait(self) -> None:
        """Wait for all sums that have started."""
        while self._pending:
            bucket, request, error = self._pending[0]
            try:
                if request is None:
                    raise error or SparseAllreduceError("a sum of this step did not start")
                if bucket is not None:
                    self.means[bucket] = bucket.wait(request, self.comm.size)
                else:
                    self.rows = request.wait() or []
            except Exception as failure:
                self.failure = self.failure or failure
                with suppress(Exception):  # the other ranks wait for this sum even if an error was raised here
                    if request is not None:
                        request.wait()
                if bucket is not None:
                    bucket.failed()
            del self._pending[0]

    def corrected(self) -> set[torch.Tensor]:
        """Return the parameters whose momentum is already part of the sum."""
        return {member.parameter for bucket in self.buckets if bucket.velocity is not None for member in bucket.members}

    def give_back(self) -> None:
        """Wait for the sums, and return their means to the residuals because no rank makes this step."""
        self.wait()
        while self.means:
            bucket, mean = self.means.popitem()
            bucket.give_back(mean)

    def abandon(self) -> None:
        """End a step that was interrupted on this rank before all ranks had agreed to make it."""
        self.leave(SparseAllreduceError("a step was interrupted before it was made"))
        self.give_back()

    def _add(self, bucket: Bucket | None, start: Callable[[], Request]) -> None:
        reporter = ErrorReporter(self.comm)
        try:
            with reporter:
                self._pending.append((bucket, start(), None))
        except BaseException as error:
            self._pending.append((bucket, None, translated(error)))
            if not isinstance(error, Exception):
                raise


def translated(error: BaseException) -> Exception:
    """Return an error that every rank can raise, converted to one of the library's own classes if necessary."""
    if isinstance(error, SparseAllreduceError):
        return error
    text = str(error) or type(error).__name__
    if isinstance(error, TypeError | NotImplementedError):
        return StreamTypeError(text)
    if isinstance(error, ValueError | KeyError):
        return AlgorithmError(text)
    return SparseAllreduceError(f"{type(error).__name__}: {text}")


def unscaled(optimizer: Any) -> tuple[float, bool]:
    """Return the factor for unscaled gradients, and whether one of them is infinite.

    A GradScaler sets both as attributes of the optimiser.
    """
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    factor = 1.0 if scale is None else 1.0 / float(torch.as_tensor(scale))
    return factor, found is not None and bool(float(found))
