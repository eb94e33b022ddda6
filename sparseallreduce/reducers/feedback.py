"""Error feedback: what a reducer leaves out of one update is kept, and takes part in the next.

The residuals are those of each paper's algorithm (thesis algorithm 2, gTop-k algorithm 4, Ok-Topk algorithm 2), which all come to one
rule: a gradient is added to the residual; the reducer selects from it; and what has become part of the update is taken out.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, CheckpointError, StreamTypeError
from sparseallreduce.reducers.arrays import DTYPES, no_indices
from sparseallreduce.reducers.base import Reduced, Reducer, ReducerOperation
from sparseallreduce.runtime.api import Request
from sparseallreduce.runtime.launching import Telling
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
    """Keeps the residual of one tensor around a reducer.

    Nothing is ever lost, unless the residual decays: the gradients of all ranks, summed over all steps, are P times the updates plus the
    residuals of all ranks, to rounding.

    Parameters
    ----------
    reducer : Reducer
        For this one only.
    dtype : data-type, optional
        Of the residual, and of the gradients: float32 or float64.
    decay : float
        What the residual is multiplied by before a gradient is added to it, above 0 and at most 1. Below 1 what is old counts less, as
        with SparseLoCo's beta (Sarfi et al., 2025, algorithm 1), which takes the place of momentum.
    revocable : bool
        Keep what a step takes out of the residual, so that :meth:`put_back` can undo it. Costs a copy of the values that were sent.

    Attributes
    ----------
    residual : array, shape (size,)
        What has come in on this rank and was not applied yet. It is the operation's own while one is in flight. It lies where the
        gradients do: with the first of them, and the first after a :meth:`reset` or :meth:`restore`, it moves to a GPU or to the host.
    contributed : array
        The indices of this rank's residual and gradient that were in the latest update, in increasing order; ``slice(None)`` where a
        reducer sums all.
    gradients : int
        Gradients that the residual has taken in.

    Raises
    ------
    StreamTypeError
        If the dtype is another.
    AlgorithmError
        If the decay is out of range.

    Notes
    -----
    A step that fails, whatever is raised, loses nothing. If the arguments of any rank were wrong, or the step was interrupted before the
    ranks had agreed on it, nothing has happened: ``gradients`` has not grown, and the step may be made again. If a rank fails later (it
    is out of memory, say, or interrupted, which the others are told), the residuals of the ranks that raise the error hold the gradient,
    and nothing was taken out of them: ``gradients`` has grown, and the next step is to be made with the next gradient. Only an interrupt
    that strikes while a rank adds its gradient, and not while it waits, may leave a part of the gradient out. A rank that had received
    all it needed by then has its update, as with any collective, and the next step is a MismatchError on all ranks: make the replicas
    alike again, and call ``reducer.reset()`` on all ranks, which leaves the residuals as they are.

    Of a request that is dropped, the step takes place all the same, and its mean is lost.

    In the simulator error feedback stands in the place of a reducer, and gradients in that of accumulators.

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

    def __init__(self, reducer: Reducer, dtype: DTypeLike = np.float32, *, decay: float = 1.0, revocable: bool = False) -> None:
        if np.dtype(dtype) not in DTYPES:
            raise StreamTypeError(f"residuals are of float32 or float64, not {np.dtype(dtype)}")
        if not 0 < decay <= 1:
            raise AlgorithmError(f"decay is what a residual is multiplied by in each step, above 0 and at most 1, not {decay}")
        self.reducer, self.decay = reducer, float(decay)
        self.residual: NDArray[Any] = np.zeros(reducer.size, dtype)
        self.contributed: Any = no_indices(reducer.size)
        self.gradients = 0
        self.revocable = revocable
        self._taken: tuple[Any, Any] | None = None  # places of the residual, and what lay there before the latest step took its part out
        self._settled = False  # whether a gradient has said where the residual is to lie

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.reducer!r}, dtype={self.residual.dtype}, gradients={self.gradients})"

    @property
    def reduction(self) -> Reduction:
        """The reducer's."""
        return self.reducer.reduction

    def step(self, gradient: Any, comm: MPI.Intracomm | SerialCommunicator | None = None) -> SparseStream:
        """The mean over the ranks of what is selected of residuals and gradients; the residuals keep the rest.

        Parameters
        ----------
        gradient : ndarray, shape (size,)
            Of the residual's dtype, or anything with the buffer protocol, ``__array_interface__`` or DLPack; or a SparseStream, which
            takes one pass over memory less. It is left as it is. All gradients lie on a GPU, on all ranks, or none does.
        comm : mpi4py.MPI.Intracomm or SERIAL, optional
            ``MPI.COMM_WORLD`` by default.

        Returns
        -------
        SparseStream
            The same on every rank, to the bit.

        Raises
        ------
        SparseAllreduceError
            On every rank the same, as for :meth:`~sparseallreduce.Reducer.allreduce`.
        """
        with Telling(comm):
            mean: SparseStream = self.planned(gradient).start(comm, blocking=True).wait()
            return mean

    def istep(
        self, gradient: Any, comm: MPI.Intracomm | SerialCommunicator | None = None, *, progress: str = "manual"
    ) -> Request:
        """Start a :meth:`step`, and return a request at once; ``gradient`` has to stay as it is until that is done.

        ``progress`` is that of :func:`sparseallreduce.iallreduce`.
        """
        with Telling(comm):
            return self.planned(gradient).start(comm, blocking=False, progress=progress)

    def planned(self, gradient: Any) -> ReducerOperation:
        """A step about to start; nothing is raised here."""
        try:
            if not self._settled:
                self._place(gradient)
        except Exception as error:  # the other ranks wait to be told of it
            return _Step(self, self.reducer, Intent((), 0, error))
        return self.reducer.planned(self.residual, gradient, kind=partial(_Step, self))

    def put_back(self) -> None:
        """Return what the latest step has sent to the residual, as if its update had never been; the gradient stays in the residual.

        Call it before the next step, and :meth:`Reducer.reset` on all ranks, where a step's update is given up because other ranks do not
        have it.

        Raises
        ------
        AlgorithmError
            If the error feedback is not ``revocable``, or no step has been completed since the latest call.
        """
        if self._taken is None:
            raise AlgorithmError("there is no step to put back: construct with revocable=True, and call this once behind a completed step")
        places, values = self._taken
        if isinstance(places, slice):
            self.residual[places] = values
        else:
            kernels.scatter_set(places, values, 0, self.residual)
        self.contributed = no_indices(self.reducer.size)
        self._taken = None

    def reset(self) -> None:
        """Forget residual and history; raises AlgorithmError if a step is in flight."""
        self.reducer.reset()
        self._taken = None
        self.residual[:] = 0
        self.contributed = no_indices(self.reducer.size)
        self.gradients = 0
        self._settled = False

    def state(self) -> dict[str, Any]:
        """All that later steps depend on, for checkpoints: the reducer's state, and a copy of the residual, which lies on the host.

        Raises
        ------
        AlgorithmError
            If a step is in flight.
        """
        return {**self.reducer.state(), "residual": as_host(self.residual.copy()), "gradients": self.gradients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`: the steps that follow are those that would have followed it, to the bit.

        Raises
        ------
        CheckpointError
            If it is that of another kind of reducer, or of one for another size, k or dtype.
        AlgorithmError
            If a step is in flight.
        """
        residual = np.asarray(state.get("residual"))
        if (residual.shape, residual.dtype) != (self.residual.shape, self.residual.dtype):
            ours = f"shape {self.residual.shape} and dtype {self.residual.dtype}"
            raise CheckpointError(f"this state has a residual of shape {residual.shape} and dtype {residual.dtype}, not of {ours}")
        self.reducer.restore(state)
        self._taken = None
        self.residual[:] = array_module(self.residual).asarray(residual)
        self.contributed = no_indices(self.reducer.size)
        self.gradients = int(state["gradients"])
        self._settled = False

    def _place(self, gradient: Any) -> None:
        """Have the residual lie where a gradient does."""
        where = gradient._stored if isinstance(gradient, SparseStream) else gradient
        if on_device(where) != on_device(self.residual):
            self.reducer._check_idle()
            self.residual = array_module(where).asarray(self.residual) if on_device(where) else as_host(self.residual)


class _Step(ReducerOperation):
    """The reducer's operation, between taking the gradient in and taking out what was applied."""

    def __init__(self, feedback: ErrorFeedback, reducer: Reducer, intent: Intent, *operands: Any) -> None:
        if feedback.decay != 1 and intent.error is None:
            intent = intent._replace(terms=(*intent.terms, ("decay of the residual", str(feedback.decay))))
        super().__init__(reducer, intent, *operands)
        self.feedback = feedback

    def take_in(self) -> None:
        if self.feedback.decay != 1 and self.accumulator is not None:
            self.accumulator *= self.accumulator.dtype.type(self.feedback.decay)
        super().take_in()
        self.feedback._settled, self.feedback._taken = True, None
        self.feedback.gradients += 1

    def completed(self, reduced: Reduced, ranks: int) -> SparseStream:
        mean, returned = _divided(reduced.update, ranks), self.reducer.returned
        assert self.accumulator is not None and returned is not None
        taken = _held(self.accumulator, reduced.contributed, returned) if self.feedback.revocable else None
        _take_out(self.accumulator, reduced.contributed, returned)
        self.feedback.contributed, self.feedback._taken = reduced.contributed, taken
        return mean


def _held(residual: NDArray[Any], contributed: Any, returned: SparseStream) -> tuple[Any, Any]:
    """Return the places of a residual that :func:`_take_out` changes, and copies of their values."""
    if isinstance(contributed, slice):
        return contributed, residual[contributed].copy()
    places = array_module(residual).union1d(contributed, returned.indices) if returned.stored else contributed
    return places, residual[places]


def _take_out(residual: NDArray[Any], contributed: Any, returned: SparseStream) -> None:
    """Leave in a residual what was not applied; if anything is raised, all of it."""
    if isinstance(contributed, slice):
        residual[contributed] = 0
        if returned.stored:  # of a sum by hosts: dense, on this rank's part
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


def _divided(stream: SparseStream, ranks: int) -> SparseStream:
    """The stream with its values divided by a number of ranks."""
    if ranks == 1:
        return stream
    indices, stored, present = stream._indices, stream._stored / stream.dtype.type(ranks), stream._present
    if indices is None:
        return Reduction.freeze(SparseStream._dense_form(stored, stream.size, present=present, density=stream.switch_density))
    return SparseStream._sparse_form(indices, stored, stream.size, density=stream.switch_density)
