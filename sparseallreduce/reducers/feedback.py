"""Error feedback: values that a reducer leaves out of an update are kept in a residual and take part in the next one.

The residuals of the papers' algorithms (thesis algorithm 2, gTop-k algorithm 4, Ok-Topk algorithm 2) follow one rule: the gradient is added
to the residual, the reducer selects from it, and values that are part of the update are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, CheckpointError, StreamTypeError
from sparseallreduce.reducers.arrays import DTYPES, no_indices
from sparseallreduce.reducers.base import Reduced, Reducer, ReducerOperation
from sparseallreduce.runtime.api import Request
from sparseallreduce.runtime.launching import ErrorReporter
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.backend import array_module, as_host, on_device
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.selection.base import clear_places
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """A reducer with the residual of one tensor.

    Nothing is lost, unless the residual decays or the reducer averages over senders (see :class:`~sparseallreduce.TopkA`): the gradients of
    all ranks, summed over all steps, equal P times the updates plus the residuals of all ranks, up to rounding.

    Parameters
    ----------
    reducer : Reducer
        Used by this object only.
    dtype : data-type, optional
        Dtype of the residual and of the gradients: float32 or float64.
    decay : float
        Factor by which the residual is multiplied before a gradient is added, above 0 and at most 1, like SparseLoCo's beta (Sarfi et al.,
        2025, algorithm 1), which takes the place of momentum.
    revocable : bool
        Whether :meth:`put_back` can undo a step, which takes a copy of the values that were sent.

    Attributes
    ----------
    residual : array, shape (size,)
        Gradients of this rank that have not been applied yet. Do not access it while an operation is in flight. It is on the GPU or the
        host like the gradients: it moves with the first of them, and the first after a :meth:`reset` or :meth:`restore`.
    contributed : array
        Increasing indices of this rank's residual and gradient that were in the latest update; ``slice(None)`` for all.
    gradients : int
        Number of gradients added to the residual.

    Raises
    ------
    StreamTypeError
        If the dtype is not supported.
    AlgorithmError
        If the decay is out of range.

    Notes
    -----
    A failed step loses nothing. If the arguments of any rank were wrong, or the step was interrupted before the ranks agreed on it, nothing
    has changed: ``gradients`` has not increased, and the step can be repeated. If a rank fails later (for example out of memory, or
    interrupted), the residuals of the ranks that raise contain the gradient, and nothing was removed: ``gradients`` has increased, and the
    next step takes the next gradient. Only an interrupt while a rank adds its gradient may leave out part of it. A rank that had received
    everything by then has its update, as with any collective, and the next step raises MismatchError on all ranks: make the replicas equal
    again, and call ``reducer.reset()`` on all ranks, which keeps the residuals.

    If a request is dropped, the step still takes place, and its mean is lost. In the simulator error feedback takes the place of a reducer,
    and gradients that of accumulators.

    Examples
    --------
    >>> import numpy as np
    >>> import sparseallreduce as sar
    >>> feedback = sar.ErrorFeedback(sar.TopkA(4, k=1))
    >>> [feedback.step(np.float32([3, 0, 0, 2]), sar.SERIAL).indices.tolist() for _ in range(3)]
    [[0], [3], [0]]
    >>> feedback.residual
    array([0., 0., 0., 2.], dtype=float32)
    """

    reducer: Reducer
    decay: float

    def __init__(self, reducer: Reducer, dtype: DTypeLike = np.float32, *, decay: float = 1.0, revocable: bool = False) -> None:
        if np.dtype(dtype) not in DTYPES:
            raise StreamTypeError(f"residuals are of float32 or float64, not {np.dtype(dtype)}")
        if not 0 < decay <= 1:
            raise AlgorithmError(f"decay is the factor of the residual in each step, above 0 and at most 1, not {decay}")
        self.reducer, self.decay = reducer, float(decay)
        self.residual: NDArray[Any] = np.zeros(reducer.size, dtype)
        self.contributed: Any = no_indices(reducer.size)
        self.gradients: int = 0
        self.revocable = revocable
        self._undo: _Undo | None = None
        self._settled = False  # whether the residual has been moved to where the gradients are

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.reducer!r}, dtype={self.residual.dtype}, gradients={self.gradients})"

    @property
    def reduction(self) -> Reduction:
        """The reduction of the reducer."""
        return self.reducer.reduction

    def step(self, gradient: Any, comm: MPI.Intracomm | SerialCommunicator | None = None) -> SparseStream:
        """Return the mean over the ranks of values selected from residuals plus gradients; the residuals keep the rest.

        Parameters
        ----------
        gradient : ndarray, shape (size,)
            Of the residual's dtype; any object with the buffer protocol, ``__array_interface__`` or DLPack; or a SparseStream, which takes
            one pass over memory less. It is not modified. The gradients of all ranks must be on GPUs, or none.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Returns
        -------
        SparseStream
            Bitwise identical on every rank.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank, as for :meth:`~sparseallreduce.Reducer.allreduce`.
        """
        with ErrorReporter(comm):
            mean: SparseStream = self.planned(gradient).start(comm, blocking=True).wait()
            return mean

    def istep(self, gradient: Any, comm: MPI.Intracomm | SerialCommunicator | None = None, *, progress: str = "manual") -> Request:
        """Start a :meth:`step` and return a request immediately; do not modify ``gradient`` until it is complete.

        ``progress`` is as in :func:`sparseallreduce.iallreduce`.
        """
        with ErrorReporter(comm):
            return self.planned(gradient).start(comm, blocking=False, progress=progress)

    def planned(self, gradient: Any) -> ReducerOperation:
        """Return a step that is about to start; errors are stored in it."""
        try:
            if not self._settled:
                self._place(gradient)
        except Exception as error:  # reported to the other ranks
            return _Step(self, self.reducer, Intent((), 0, error))
        return self.reducer.planned(self.residual, gradient, kind=partial(_Step, self))

    def put_back(self) -> None:
        """Undo the latest step except for its gradient, which the residual keeps with the values that were sent.

        Use it if the update of a step is not applied because other ranks do not have it. Call it before the next step.

        Raises
        ------
        AlgorithmError
            If the error feedback is not ``revocable``, or if no step has been completed since the latest call.
        """
        undo = self._undo
        if undo is None:
            raise AlgorithmError("there is no step to put back: construct with revocable=True, and call this once after a completed step")
        if isinstance(undo.places, slice):
            self.residual[undo.places] = undo.values
        else:
            kernels.scatter_set(undo.places, undo.values, 0, self.residual)
        self.reducer._take_back(dict(undo.kept))
        self.contributed = no_indices(self.reducer.size)
        self._undo = None

    def reset(self) -> None:
        """Clear residual and state; raise AlgorithmError if a step is in flight."""
        self.reducer.reset()
        self._undo = None
        self.residual[:] = 0
        self.contributed = no_indices(self.reducer.size)
        self.gradients = 0
        self._settled = False

    def state(self) -> dict[str, Any]:
        """Return everything that later steps depend on, for checkpoints: the reducer's state, and a copy of the residual on the host.

        Raises
        ------
        AlgorithmError
            If a step is in flight.
        """
        return {**self.reducer.state(), "residual": as_host(self.residual.copy()), "gradients": self.gradients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state`; the following steps are bitwise identical to those that would have followed it.

        Raises
        ------
        CheckpointError
            If it belongs to another kind of reducer, or to another size, k or dtype.
        AlgorithmError
            If a step is in flight.
        """
        residual = np.asarray(state.get("residual"))
        if (residual.shape, residual.dtype) != (self.residual.shape, self.residual.dtype):
            ours = f"shape {self.residual.shape} and dtype {self.residual.dtype}"
            raise CheckpointError(f"this state has a residual of shape {residual.shape} and dtype {residual.dtype}, not of {ours}")
        self.reducer.restore(state)
        self._undo = None
        self.residual[:] = array_module(self.residual).asarray(residual)
        self.contributed = no_indices(self.reducer.size)
        self.gradients = int(state["gradients"])
        self._settled = False

    def _place(self, gradient: Any) -> None:
        """Move the residual to where a gradient is, on the host or a GPU."""
        where = gradient._stored if isinstance(gradient, SparseStream) else gradient
        if on_device(where) != on_device(self.residual):
            self.reducer._check_idle()
            self.residual = array_module(where).asarray(self.residual) if on_device(where) else as_host(self.residual)


class _Step(ReducerOperation):
    """The operation of a step: adds the gradient before the reducer's operation, and removes applied values after it."""

    def __init__(self, feedback: ErrorFeedback, reducer: Reducer, intent: Intent, *operands: Any) -> None:
        if feedback.decay != 1 and intent.error is None:
            intent = intent._replace(terms=(*intent.terms, ("decay of the residual", str(feedback.decay))))
        super().__init__(reducer, intent, *operands)
        self.feedback = feedback

    def take_in(self) -> None:
        if self.feedback.decay != 1 and self.accumulator is not None:
            self.accumulator *= self.accumulator.dtype.type(self.feedback.decay)
        super().take_in()
        self.feedback._settled, self.feedback._undo = True, None
        self.feedback.gradients += 1

    def completed(self, reduced: Reduced, ranks: int) -> SparseStream:
        mean, returned = _divided(reduced.update, self.reducer.divisor(ranks)), self.reducer.returned
        assert self.accumulator is not None and returned is not None
        undo = self._undo(reduced.contributed, returned) if self.feedback.revocable else None
        _take_out(self.accumulator, reduced.contributed, returned)
        self.feedback.contributed, self.feedback._undo = reduced.contributed, undo
        return mean

    def _undo(self, contributed: Any, returned: SparseStream) -> _Undo:
        """Return a copy of what this step changes beside the gradient that it has added."""
        assert self.accumulator is not None and self._before is not None
        if isinstance(contributed, slice):
            places, values = contributed, self.accumulator[contributed].copy()
        else:
            places = array_module(self.accumulator).union1d(contributed, returned.indices) if returned.stored else contributed
            values = self.accumulator[places]
        return _Undo(places, values, self._before)


class _Undo(NamedTuple):
    """The values that the latest step has overwritten, with which :meth:`ErrorFeedback.put_back` undoes it."""

    places: Any  # positions of the residual: indices or a slice
    values: Any
    kept: dict[str, Any]  # state of the reducer


def _take_out(residual: NDArray[Any], contributed: Any, returned: SparseStream) -> None:
    """Remove applied values from a residual; on an error, it keeps all of them."""
    if isinstance(contributed, slice):
        residual[contributed] = 0
        if returned.stored:  # with hosts: dense, on this rank's part
            residual[returned.lo : returned.hi] = returned._stored
        return
    taken = residual[contributed] if returned.stored else None
    clear_places(residual, contributed)
    if taken is not None:
        try:
            returned.add_to(residual)
        except BaseException:
            kernels.scatter_set(contributed, taken, 0, residual)
            raise


def _divided(stream: SparseStream, divisor: int | NDArray[Any]) -> SparseStream:
    """Return the stream with its values divided by a number, or each by its own."""
    if isinstance(divisor, int):
        if divisor == 1:
            return stream
        divisor = stream.dtype.type(divisor)
    indices, stored, present = stream._indices, stream._stored / divisor, stream._present
    if indices is None:
        return Reduction.freeze(SparseStream._dense_form(stored, stream.size, present=present, density=stream.switch_density))
    return SparseStream._sparse_form(indices, stored, stream.size, density=stream.switch_density)
