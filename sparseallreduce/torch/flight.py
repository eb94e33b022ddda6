"""The sums of one step on their way: started in the same order on all ranks, waited for, and given back if one of them fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError, StreamTypeError
from sparseallreduce.runtime.api import Request, iallreduce
from sparseallreduce.runtime.launching import Telling, agree
from sparseallreduce.runtime.objects import mark_known
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.torch.buckets import Bucket, Member

__all__ = ["Flight", "translated"]

T = TypeVar("T")

_FAILED = "another sum of this step has failed"


class Flight:
    """The sums of a step.

    Parameters
    ----------
    comm : communicator
    buckets : sequence of Bucket
        In the order in which they are summed.
    step : int
        The number of the step.
    early : bool
        Whether sums start as gradients come, before the ranks agree to make the step.

    Attributes
    ----------
    ready : dict
        Of parameters whose gradients have come, by their index; each with the gradient, and how often it had been changed then.
    means : dict
        Of buckets, as far as sums are done.
    rows : list of SparseStream
        The means of the sparse gradients, when done.
    failure : Exception or None
        The first of this step.
    closed : bool
        Whether all ranks agree to make the step: it is to be finished, whatever interrupts it.
    broken : bool
        Whether this rank was interrupted before that.
    """

    def __init__(self, comm: Any, buckets: Sequence[Bucket], step: int, early: bool) -> None:
        self.comm = comm
        self.buckets = list(buckets)
        self.step = step
        self.early = early
        self.ready: dict[int, tuple[torch.Tensor, int]] = {}
        self.started = 0
        self.means: dict[Bucket, SparseStream] = {}
        self.rows: list[SparseStream] = []
        self.failure: Exception | None = None
        self.error: Exception | None = None  # of this rank alone, which it has to tell the others
        self.closed = False
        self.arranged = early  # whether the buckets are those of this step
        self.broken = False
        self.agreeing = False  # whether the ranks have begun to agree on the step
        self.has_rows = self.rows_started = False
        self.layouts = b""  # of the gradients of this step
        self._pending: list[tuple[Bucket | None, Request | None, Exception | None]] = []

    def came(self, index: int, parameter: torch.Tensor) -> None:
        """Note that a gradient has come."""
        if index in self.ready and self.error is None:
            self.error = AlgorithmError("a gradient has come twice in one step with overlap: make all but the last backward in no_sync()")
        assert parameter.grad is not None
        self.ready[index] = parameter.grad, parameter.grad._version

    def check(self, members: Sequence[Member]) -> None:
        """Note if a gradient was changed after it had come."""
        for index, (gradient, version) in self.ready.items():
            if members[index].parameter.grad is not gradient or gradient._version != version:
                changed = f"the gradient of {members[index].name} was changed after its sum had begun: construct with overlap=False"
                self.error = self.error or AlgorithmError(changed)

    def start(self, pack: Callable[[Bucket], None]) -> None:
        """Start the sum of the next bucket, into which ``pack`` puts gradients; what goes wrong on this rank is told in its place."""
        bucket, before = self.buckets[self.started], len(self._pending)
        self.started += 1
        try:
            if self.has_failed():
                raise SparseAllreduceError(_FAILED)
            pack(bucket)
            operation = bucket.planned(self.step, {"bucket": bucket.key(), "step of the optimiser": self.step})
            self._add(bucket, lambda: operation.start(self.comm, blocking=False))
        except BaseException as error:  # the other ranks wait to be told of it
            if len(self._pending) == before:
                self.tell(error)
            if not isinstance(error, Exception):
                raise

    def start_rows(self, streams: Callable[[], list[SparseStream]]) -> None:
        """Start the sum of the sparse gradients, all at once."""
        self.rows_started = True
        before = len(self._pending)
        try:
            given = streams()
            self._add(None, lambda: iallreduce(given, self.comm, op="mean"))
        except BaseException as error:
            if len(self._pending) == before:
                self.tell(error)
            if not isinstance(error, Exception):
                raise

    def tell_rest(self, error: BaseException, buckets: int = 0, has_rows: bool = False) -> None:
        """Tell the other ranks of what has interrupted this one, in place of the sums that it has not started; of so many, where they have
        not been arranged.
        """
        self.has_rows |= has_rows
        while self.started < max(buckets, len(self.buckets)):
            self.started += 1
            self.tell(error)
        if self.has_rows and not self.rows_started:
            self.rows_started = True
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks what is wrong, in place of a sum."""
        told = translated(error) if isinstance(error, Exception) else error  # an interrupt waits for nobody
        failed = self.has_failed()

        def start() -> Request:
            if failed:  # by a rank that may take part in nothing more: it is not waited for
                raise SparseAllreduceError(_FAILED)
            return agree(self.comm, Intent((), 0, told), blocking=False)

        with suppress(KeyboardInterrupt, SystemExit, GeneratorExit):  # which the caller raises
            self._add(None, start)
        mark_known(self.comm, error)

    def agreed(self, agree: Callable[[], T]) -> T:
        """Return what the ranks agree on for the step, by ``agree``. Raise the error of a sum that has failed, as the other ranks do."""
        if self.has_failed():
            self.give_up()
        self.agreeing = True
        try:
            return agree()
        except SparseAllreduceError:
            if self.early:  # another rank may have given up because of a sum
                self.wait()
                if self.failure is not None:
                    raise self.failure from None
            raise

    def give_up(self) -> NoReturn:
        """Tell the other ranks, in place of the agreement on the step, that a sum has failed, and raise its error."""
        self.agreeing = True
        self.tell(SparseAllreduceError(_FAILED))
        self.wait()
        raise self.failure or SparseAllreduceError(_FAILED)

    def leave(self, error: BaseException) -> None:
        """Tell the other ranks of an error that ends the step on this one, in place of all that they wait for in it."""
        self.broken = not self.closed
        if self.early or self.closed:
            self.tell_rest(error)
        if self.early and not self.agreeing:
            self.agreeing = True
            self.tell(error)
        if isinstance(error, Exception):
            self.wait()

    def has_failed(self) -> bool:
        """Return whether one of the sums is known to have failed."""
        failed = (error is not None if request is None else request.has_failed() for _, request, error in self._pending)
        return self.failure is not None or any(failed)

    def test(self) -> None:
        """Move the sums on."""
        for _, request, _ in self._pending:
            if request is not None:
                try:
                    request.test()
                except Exception:  # which waiting for it raises again
                    continue
                return  # all that are in flight have moved on

    def wait(self) -> None:
        """Wait for all sums that have started, as far as they are not waited for already."""
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
                with suppress(Exception):  # the other ranks wait for it, whatever has been raised here
                    if request is not None:
                        request.wait()
                if bucket is not None:
                    bucket.failed()
            del self._pending[0]

    def corrected(self) -> set[torch.Tensor]:
        """The parameters whose momentum is in what was summed."""
        return {member.parameter for bucket in self.buckets if bucket.velocity is not None for member in bucket.members}

    def give_back(self) -> None:
        """Wait for what has started, and put what it came to into the residuals: this step is not made on any rank."""
        self.wait()
        while self.means:
            bucket, mean = self.means.popitem()
            bucket.give_back(mean)

    def abandon(self) -> None:
        """Of a step that this rank was interrupted in before all had agreed to make it: tell the others in place of what they wait for."""
        self.leave(SparseAllreduceError("a step was interrupted before it was made"))
        self.give_back()

    def _add(self, bucket: Bucket | None, start: Callable[[], Request]) -> None:
        telling = Telling(self.comm)
        try:
            with telling:
                self._pending.append((bucket, start(), None))
        except BaseException as error:
            self._pending.append((bucket, None, translated(error)))
            if not isinstance(error, Exception):
                raise


def translated(error: BaseException) -> Exception:
    """The error as all ranks can raise it, which know the library's own classes only."""
    if isinstance(error, SparseAllreduceError):
        return error
    text = str(error) or type(error).__name__
    if isinstance(error, TypeError | NotImplementedError):
        return StreamTypeError(text)
    if isinstance(error, ValueError | KeyError):
        return AlgorithmError(text)
    return SparseAllreduceError(f"{type(error).__name__}: {text}")


def unscaled(optimizer: Any) -> tuple[float, bool]:
    """By what gradients are to be multiplied, and whether one is infinite, as a GradScaler has told the optimiser."""
    scale, found = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    factor = 1.0 if scale is None else 1.0 / float(torch.as_tensor(scale))
    return factor, found is not None and bool(float(found))
