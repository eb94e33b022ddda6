"""Persistent sums (MPI's persistent operations): the base class ``Plan``, and the state shared by the sums of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError
from sparseallreduce.runtime import launching
from sparseallreduce.runtime.communicators import check_owner, size_of
from sparseallreduce.runtime.request import Request, checked_timeout
from sparseallreduce.runtime.work import Launched, Work
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["MISMATCH", "Common", "Plan", "Streams"]

MISMATCH = "size, dtype or width of a stream are not those of the plan: create another with allreduce_init"

Streams = list[SparseStream] | tuple[SparseStream, ...]


class Plan:
    """A sum that can be started repeatedly, created by :func:`allreduce_init`.

    All ranks must start the sums of their plans, and other operations on a communicator, in the same order. Sums of several plans may be in
    flight together. A sum that fails raises on all ranks, and the plan can then be started again.
    """

    _fixed_indices = True  # whether only values are sent

    def __init__(self, common: Common) -> None:
        self._common = common
        self._request: Request | None = None
        self._active = self._freed = False

    def __repr__(self) -> str:
        state = "freed" if self._freed else "started" if self._active else "ready"
        return f"Plan(ranks={self._common.ranks}, fixed_indices={self._fixed_indices}, {state})"

    def start(self, stream: SparseStream | Streams | ArrayLike | Sequence[ArrayLike]) -> None:
        """Start a sum.

        Parameters
        ----------
        stream : SparseStream, or list or tuple of SparseStream
            Streams of the same sizes, dtypes and widths as those of the plan. With fixed indices the values alone may be given: for each
            stream an array of shape (nnz,) or (nnz, width), in the order of the positions. They are copied. A stream whose positions are
            not those of the plan raises an error on all ranks.

        Raises
        ------
        AlgorithmError
            If the previous sum has not been waited for, or the plan is freed; all ranks that start a sum then raise it. Errors in
            ``stream`` are raised by ``test`` or ``wait``, on all ranks.
        """
        fault = None
        if self._freed:
            fault = AlgorithmError("this plan has been freed: create another with allreduce_init")
        elif self._active:
            fault = AlgorithmError("this plan has been started and not waited for: call wait() first, or create several plans")
        if fault is not None:
            self._common.fail(fault)
            raise fault
        with launching.ErrorReporter(self._common.comm):
            self._request, self._active = self._begun(stream), True

    def _begun(self, stream: Any) -> Request:
        raise NotImplementedError

    def test(self) -> tuple[bool, Any]:
        """Progress the sum. Return ``(True, result)`` if it is complete, else ``(False, None)``. Raises as :meth:`wait`."""
        with launching.WaitErrorReporter(self._common.comm):
            request, self._active = self._started(), False  # inactive if this raises
            done, result = request.test()
            self._active = not done
            return done, self._finished(result) if done else None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the sum and return its result, a stream or a list. With fixed indices it is valid until the next :meth:`start`.

        Parameters
        ----------
        timeout : float, optional
            Seconds, as in :meth:`Request.wait`.

        Returns
        -------
        SparseStream or list of SparseStream
            The sum, in the form of what was passed to :func:`~sparseallreduce.allreduce_init`.

        Raises
        ------
        SparseAllreduceError
            If the sum failed; the same error on all ranks. AlgorithmError if no sum has been started.
        """
        with launching.WaitErrorReporter(self._common.comm):
            request = self._started()
            if timeout is not None:
                checked_timeout(timeout)
            self._active = False  # however this ends
            return self._finished(request.wait(timeout))

    def free(self) -> None:
        """Release the memory of the plan; a sum in flight completes. Not collective. Also done when the plan is garbage-collected."""
        self._freed, self._active, self._request = True, False, None
        self._release()

    def _release(self) -> None:
        """Release memory held by a subclass."""

    def _started(self) -> Request:
        if self._request is None:
            raise AlgorithmError("this plan has been freed" if self._freed else "this plan has not been started: call start() first")
        return self._request

    def _finished(self, result: Any) -> Any:
        return result


class Common:
    """The state that all sums of a plan share.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL
    call : Call or ListCall or None
    intent : Intent
        Includes an error if the arguments are wrong.
    progress : str
    """

    comm: Any
    progress: str
    call: Any
    intent: Intent

    def __init__(self, comm: Any, call: Any, intent: Intent, progress: str) -> None:
        self.comm, self.call, self.intent, self.progress = comm, call, intent, progress
        self.ranks: int = size_of(comm)
        self.channel: Channel | None = None  # set when several ranks create the plan

    def checked(self) -> Intent:
        """Return the intent, with an error if ``progress`` is wrong."""
        return launching.checked_intent(self.intent, self.comm, self.progress)

    def settle(self) -> None:
        """Release the streams, once the plan has everything that it needs from them."""
        self.call = None

    def numbered(self, channel: Channel) -> None:
        """Add the number of the creating operation to the intent, which identifies the plan on its communicator."""
        self.intent = self.intent._replace(terms=(*self.intent.terms, ("number of the plan", str(channel.sequence + 1))))

    def carry_out(self, schedule: Any) -> Any:
        """Run a schedule, made from rank, number of ranks and machine, and return its result."""
        intent = self.checked()
        if self.ranks == 1:
            return launching.alone(lambda: schedule(0, 1, None), intent, True).wait()

        def work_on(channel: Channel) -> Work:
            self.numbered(channel)
            self.channel = channel
            return Launched(intent, lambda: schedule(channel.rank, self.ranks, channel.machine))

        return launching.launched(self.comm, work_on, None, True, "manual").wait()

    def begin(self, work: Work, schedule: Any, stream: SparseStream | None = None) -> Request:
        """Start one sum."""
        check_owner(self.comm)
        if self.ranks == 1:
            return launching.alone(schedule, work.intent(None), False)
        return launching.launched(self.comm, lambda channel: work, stream, False, self.progress)

    def fail(self, error: Exception) -> None:
        """Raise ``error`` on all ranks that start a sum now."""
        if self.ranks > 1:
            with launching.ErrorReporter(self.comm):
                launching.agree(self.comm, Intent((), 0, error), blocking=False)
