"""The base class of all optimisers: stochastic gradient descent of replicas with sparsified sums."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, CheckpointError, SparseAllreduceError, StreamError, StreamTypeError
from sparseallreduce.optim.arrays import as_array, as_flat_parameter, finite_norm, norms, place_of
from sparseallreduce.optim.descent import PackDescent
from sparseallreduce.optim.packs import Array, Pack
from sparseallreduce.optim.rules import Adam
from sparseallreduce.optim.settings import Settings
from sparseallreduce.optim.warmup import Density
from sparseallreduce.reducers import Reducer
from sparseallreduce.reducers.arrays import is_array
from sparseallreduce.runtime.api import Request
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.launching import ErrorReporter, agree, latest, leave
from sparseallreduce.runtime.objects import is_known, mark_known
from sparseallreduce.streams.kernels.backend import as_host, on_device
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Optimizer"]

_INTERRUPTED = "a sum of this step was interrupted before it had started"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # addresses in the text of a function or an object, which differ from rank to rank


class Optimizer(ABC):
    """Updates parameters by the mean of selected gradient values of all ranks.

    A step has four parts: each rank adds its gradient to its residual, and selects values from it; the selected values are summed over the
    ranks; the parameters are updated by the mean; values that were not summed stay in the residual.

    Parameters
    ----------
    parameters : array, or sequence of arrays
        Of float32 or float64, C-contiguous, of any shapes: ndarrays, PyTorch CPU tensors, or other objects with the buffer protocol,
        ``__array_interface__`` or DLPack; or on a GPU, such as CuPy arrays, in which case the gradients must be there, too. They are
        updated in place, and must be equal on all ranks.
    learning_rate : float or callable
        The rate, at least 0, or a function of the step number (from 0). A step with rate 0 changes no parameter, but counts: velocity and
        moments are updated, and summed values are removed from the residuals.
    density : float or callable
        The approximate fraction of elements that a step sums (k / N), at least one element, or a function of the step number such as a
        :class:`DensityWarmup`.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    momentum : float
    momentum_correction : bool
        Whether momentum applies to each rank's gradients before the selection, as in DGC, instead of to the updates.
    momentum_masking : bool
        With the correction, whether a rank's velocity is set to zero where its value was applied, as in DGC. This also removes momentum
        from values that are applied often, which slows descent at a density of 1 %.
    weight_decay : float
        Multiple of the parameters that is added to their gradient; with ``adam`` it is decoupled from the gradients.
    clip_norm : float, optional
        Limit of the L2 norm of the gradient over all parameters; each rank's own gradient is limited to 1 / sqrt(P) of it (DGC).
    adam : Adam, optional
        Applies Adam to the means, as Ok-Topk section 5 does for BERT. The learning rate is then applied after the sum.
    by_layer : bool
        Whether values are selected and summed separately for each parameter, concurrently and starting with the last one. By default all
        parameters are packed into one vector.
    **options
        Options of the optimiser's reducer or selector.

    Attributes
    ----------
    steps : int
        Number of steps taken.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: StreamError or StreamTypeError for unsuitable parameters, AlgorithmError for settings out of range,
        MismatchError if parameters or settings differ. Construction is collective.
    """

    name: ClassVar[str]
    #: Whether gradients are multiplied by their learning rates before they enter residuals; otherwise updates are by the current rate.
    rate_first: ClassVar[bool] = False

    def __init__(
        self,
        parameters: Any,
        learning_rate: float | Callable[[int], float],
        density: Density = 0.01,
        comm: MPI.Intracomm | SerialCommunicator | None = None,
        *,
        momentum: float = 0.0,
        momentum_correction: bool = False,
        momentum_masking: bool = True,
        weight_decay: float = 0.0,
        clip_norm: float | None = None,
        adam: Adam | None = None,
        by_layer: bool = False,
        **options: Any,
    ) -> None:
        before = latest(comm)
        try:
            self.comm: Any = resolve(comm)
            self.learning_rate = learning_rate
            self.density = density
            self.options = options
            self.steps: int = 0
            self._pending: list[_Pending] = []
            self._summed: list[tuple[_Pending, SparseStream]] = []  # completed sums of the unfinished step that are not applied yet
            self._updates: dict[PackDescent, SparseStream] = {}  # applied updates of the unfinished step
            self._failure: Exception | None = None  # its first error
            self._left = False  # whether a step was interrupted before all of its sums started, and so cannot be completed
            self._missed: set[int] = set()  # parameters whose sums it skips, which has been reported to the other ranks
            self._sums = 0  # number of sums of the latest step
            self._descents: list[PackDescent] = []
            try:
                self.settings: Settings = Settings(momentum, momentum_correction, momentum_masking, weight_decay, clip_norm, adam, by_layer)
                self._descents = self._begin(parameters)
                intent = Intent(self._terms(), 0)
            except Exception as error:  # the other ranks wait to be told of it
                intent = Intent((), 0, error)
            self._agree(intent).wait()
        except BaseException as error:
            leave(comm, error, before)
            raise

    def step(self, gradients: Any, rate: float | None = None) -> list[SparseStream]:
        """Sum the gradients of all ranks, and update the parameters. Collective.

        Parameters
        ----------
        gradients : array, or sequence of arrays
            This rank's gradients, each of the shape and dtype of its parameter; they are not modified. The gradient of a loss that is a
            mean over a rank's samples has the right scale.
        rate : float, optional
            Replaces the learning rate; the same on all ranks.

        Returns
        -------
        list of SparseStream
            The means by which the parameters were updated, one for each pack, multiplied by the rate if ``rate_first``.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank: StreamError or StreamTypeError for unsuitable gradients, DivergenceError if a gradient to be
            clipped is not finite, MismatchError if steps or rates differ. Parameters and residuals are then unchanged.
        """
        before, idle, finishing = latest(self.comm), False, False
        try:
            try:
                self._take_up()
                idle = True
                for descent, vector, used in reversed(self.prepare(gradients, rate, self.comm.size)):
                    self._sum(descent, vector, used)
            except BaseException as error:  # the other ranks wait to be told of it, in as many sums
                self._tell_rest(error, len(self._descents), idle)
                if not (idle and isinstance(error, Exception)):
                    if idle and all(pending.descent is None for pending in self._pending):
                        self._pending.clear()  # nothing has begun
                    self._left = self._left or (idle and bool(self._pending))
                    self._complete(error)
                    raise
            finishing, self._sums = True, 0
            return self.finish()
        except BaseException as error:
            if finishing and not self._sums:  # finish has not begun, and the other ranks complete the step
                self._left = True
                self._complete(error)
            leave(self.comm, error, before)
            raise

    def start(self, layer: int, gradient: Any, rate: float | None = None) -> None:
        """Start to sum the gradient of one parameter, while those of others are still being computed. Requires ``by_layer``.

        All ranks must start the same parameters in the same order; :meth:`finish` ends the step. Do not modify ``gradient`` until then.
        Communication progresses in calls of ``start`` and ``finish``. Errors in the gradient are raised by ``finish``, on all ranks. If
        anything else is raised here, such as KeyboardInterrupt, this rank has left the step, and the other ranks raise an error in
        ``finish``.

        Raises
        ------
        AlgorithmError
            If parameters are packed, or gradients are to be clipped, which needs the norm of all gradients.
        """
        before, underway = latest(self.comm), False
        try:
            if not self.settings.by_layer:
                raise AlgorithmError("parameters are packed into one vector: give all gradients to step, or construct with by_layer=True")
            if self.settings.clip_norm is not None:
                raise AlgorithmError("clipping takes the norm over all parameters: give all gradients to step")
            if layer in self._missed:
                self._missed.remove(layer)
                return
            if self._left:
                self._take_up()
            sums, underway = len(self._pending), True
            try:
                descent = self._startable(layer)
                used = self._rate(rate)
                self._sum(descent, self._fed(descent, descent.pack.checked([gradient]), used, 1.0), used)
            except Exception as error:
                self._tell_rest(error, sums + 1)
            with suppress(Exception):  # which finish raises
                self._pending[-1].test()
        except BaseException as error:
            if underway:
                self._leave(layer, error)
            leave(self.comm, error, before)
            raise

    def finish(self) -> list[SparseStream]:
        """Wait for all sums of this step, in the order in which they were started, and apply them.

        Returns
        -------
        list of SparseStream
            As for :meth:`step`.

        Raises
        ------
        SparseAllreduceError
            The first error of the step, the same on every rank. Parameters are unchanged, the values of completed sums return to the
            residuals, which have lost nothing, see :class:`~sparseallreduce.ErrorFeedback`, and the step does not count. If a rank was
            interrupted while it waited, and other ranks have completed the step, the next step raises its error on all ranks, and later
            ones raise MismatchError, because the parameters differ.

        Notes
        -----
        After any other exception, such as KeyboardInterrupt while this rank waits, or MemoryError while a sum is applied, the step is not
        over: call ``finish`` again to continue. Completed sums, which the other ranks may have applied, are not lost.
        """
        try:
            if not (self._left or self._summed or self._updates or self._failure):
                self._sums = len(self._pending)
            self._missed.clear()
            self._finish()
            updates, failure = self._updates, self._failure
            self._updates, self._failure, self._left = {}, None, False
            if failure is not None:
                raise failure
            self.steps += 1
            return [updates[descent] for descent in self._descents if descent in updates]
        except BaseException as error:
            self._complete(error)
            leave(self.comm, error, 0)  # after sums that the other ranks may have completed
            raise

    def _finish(self) -> None:
        """Wait for the sums of this step, and apply them if none has failed."""
        while self._pending:
            pending = self._pending[0]
            try:
                update = pending.wait()
            except Exception as error:
                self._failure = self._failure or error
                with suppress(Exception):  # the other ranks wait for it, whatever was raised here
                    pending.wait()
                pending.failed()
            else:
                self._summed.append((pending, update))
            del self._pending[0]
        if self._failure is not None:
            self._put_back()
        while self._summed:
            pending, update = self._summed[0]
            assert pending.descent is not None
            pending.descent.apply(update, pending.rate)
            self._updates[pending.descent] = update
            del self._summed[0]

    def _put_back(self) -> None:
        """Return the completed sums of a failed step to the residuals, so that no rank applies them: another rank may lack one of them."""
        while self._summed:
            pending, _ = self._summed[0]
            assert pending.descent is not None
            with suppress(AlgorithmError):  # it was put back before an interrupt
                pending.descent.feedback.put_back()
            pending.failed()
            del self._summed[0]

    def _complete(self, error: BaseException) -> None:
        """Wait for the sums in flight before an error is raised, so that no rank waits for this one; interrupts end them."""
        if isinstance(error, Exception):
            for pending in self._pending:
                with suppress(Exception):  # which finish raises
                    pending.wait()

    @property
    def parameters(self) -> list[Array]:
        """The parameters as views of the given arrays."""
        return [flat.reshape(shape) for descent in self._descents for flat, shape in zip(descent.pack.parameters, descent.pack.shapes)]

    @property
    def residuals(self) -> list[Array]:
        """For each pack, the values of this rank's gradients that have not been applied yet."""
        return [descent.feedback.residual for descent in self._descents]

    def state(self) -> dict[str, Any]:
        """Return everything that later steps of this rank depend on, except the parameters: copies of arrays, and JSON values, by name.

        It differs from rank to rank.

        Raises
        ------
        AlgorithmError
            If a step is not finished.
        """
        self._expect_idle()
        state: dict[str, Any] = {"optimizer": self.name, "steps": self.steps}
        for number, descent in enumerate(self._descents):
            for name, value in descent.state().items():
                state[f"{number}.{name}"] = _copied(value)
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state` of this rank and the parameters of that time; later steps are bitwise identical.

        Raises
        ------
        CheckpointError
            If the state belongs to another optimiser, or to other parameters or settings.
        AlgorithmError
            If a step is not finished.
        """
        before = self.state()
        try:
            self._restore(state)
        except BaseException:
            self._restore(before)
            raise

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state.get("optimizer") != self.name:
            raise CheckpointError(f"this state is of the optimiser {state.get('optimizer')!r}, and this one is {self.name!r}")
        try:
            self.steps = int(state["steps"])
            for number, descent in enumerate(self._descents):
                prefix = f"{number}."
                own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
                descent.feedback.reducer = self._reducer_of(descent.pack.size, own["k"])
                descent.restore(own)
        except (KeyError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"this state is of other parameters or settings: {error}") from error

    def _reducer_of(self, size: int, k: int) -> Reducer:
        """Return the reducer of the latest step, by its density, or of the next step, which may have failed before."""
        latest = self._k(size, max(0, self.steps - 1))
        return self.reducer(size, latest if k == latest else self._k(size))

    @classmethod
    @abstractmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        """Return a reducer that sums k of size elements on that rank."""

    def reducer(self, size: int, k: int) -> Reducer:
        """Return a reducer for vectors of ``size`` elements, of which it sums ``k``, with the options of this optimiser."""
        return self.reducer_of(size, k, self.comm.rank, **self.options)

    def prepare(self, gradients: Any, rate: float | None, ranks: int) -> list[Prepared]:
        """Return the vector that each pack adds to its sum in this step, and the learning rate. Parameters and residuals are unchanged."""
        given = self._listed(gradients)
        checked = [descent.pack.checked([given[layer] for layer in descent.pack.layers]) for descent in self._descents]
        clip = self._clip(checked, ranks)
        used = self._rate(rate)
        return [Prepared(descent, self._fed(descent, own, used, clip), used) for descent, own in zip(self._descents, checked)]

    def _begin(self, parameters: Any) -> list[PackDescent]:
        self._single = not isinstance(parameters, Iterable) or is_array(parameters)
        given = [parameters] if self._single else list(parameters)
        if not given:
            raise StreamError("an optimiser needs parameters: pass an array, or a sequence of arrays")
        shapes = [as_array(parameter).shape for parameter in given]
        flat = [as_flat_parameter(parameter) for parameter in given]
        on_gpus = sorted({place_of(array) for array in flat} - {"host"})
        if len(on_gpus) > 1:
            raise StreamTypeError(f"parameters lie on several GPUs ({', '.join(on_gpus)}): move them to one, or give each an optimiser")
        if self.settings.by_layer:
            packs = [Pack([layer], [array], [shape]) for layer, (array, shape) in enumerate(zip(flat, shapes))]
        else:
            packs = [Pack(range(len(flat)), flat, shapes)]
        if any(array.dtype != pack.dtype for pack in packs for array in pack.parameters):
            raise StreamTypeError("parameters that are packed into one vector have to be of one dtype: convert them, or take by_layer=True")
        rate_first = self.rate_first and self.settings.adam is None
        revocable = len(packs) > 1  # a sum may fail after another one is complete
        return [PackDescent(pack, self.settings, self._reducer(pack.size), rate_first, revocable) for pack in packs]

    def _startable(self, layer: int) -> PackDescent:
        if layer not in range(len(self._descents)):
            raise AlgorithmError(f"there is no parameter {layer}: they are numbered from 0 to {len(self._descents) - 1}")
        started = (*self._pending, *(each for each, _ in self._summed))
        if any(pending.descent is self._descents[layer] for pending in started):
            raise AlgorithmError(f"parameter {layer} was started in this step already: finish the step")
        return self._descents[layer]

    def _reducer(self, size: int) -> Reducer:
        """Return a reducer with the density of this step."""
        return self.reducer(size, self._k(size))

    def _k(self, size: int, step: int | None = None) -> int:
        density = self.density(self.steps if step is None else step) if callable(self.density) else self.density
        if not 0 < density <= 1:
            raise AlgorithmError(f"the density is a share of the elements, above 0 and at most 1, not {density}")
        return min(size, max(1, round(density * size)))

    def _rate(self, rate: float | None) -> float:
        if rate is None:
            rate = self.learning_rate(self.steps) if callable(self.learning_rate) else self.learning_rate
        if not 0 <= rate < math.inf:
            raise AlgorithmError(f"the learning rate must be a number, at least 0, not {rate}")
        return float(rate)

    def _clip(self, checked: Sequence[Sequence[Array]], ranks: int) -> float:
        if self.settings.clip_norm is None:
            return 1.0
        norm = math.hypot(*norms([gradient for gradients in checked for gradient in gradients]))
        return self.settings.clipped(finite_norm(norm), ranks)

    def _fed(self, descent: PackDescent, gradients: Sequence[Array], rate: float, clip: float) -> Array:
        """Return the vector that a pack adds to its sum, and set the density of this step."""
        reducer = descent.feedback.reducer
        if reducer.k != self._k(reducer.size):
            descent.feedback.reducer = self._reducer(reducer.size)
        return descent.fed(gradients, rate, clip)

    def _sum(self, descent: PackDescent, vector: Array, rate: float) -> None:
        """Start a sum that the ranks match by step, parameters and rate."""
        described = {"parameters": descent.pack.layers, "step of the optimiser": self.steps, "learning rate": rate}
        pending = _Pending(descent, rate, descent.feedback.gradients)
        self._pending.append(pending)

        def start() -> Request:
            if any(each.has_failed() for each in self._pending):  # a rank that has failed takes no part in further sums
                raise SparseAllreduceError("another sum of this step has failed")
            operation = descent.feedback.planned(vector)
            terms = operation.intent.terms + tuple((name, str(value)) for name, value in described.items())
            operation.intent = operation.intent._replace(terms=terms)
            return operation.start(self.comm, blocking=False)

        pending.start(self.comm, start)

    def _tell_rest(self, error: BaseException, sums: int, idle: bool = True) -> None:
        """Report an error to the other ranks in place of the sums that this rank has not started.

        If not ``idle``, because sums of another step are in flight, it is reported in place of all ``sums`` sums.
        """
        pendings = self._pending if idle else []
        pendings += [_Pending() for _ in range(sums - len(pendings))]
        for pending in pendings:
            if not pending.begun:
                pending.descent = None
                with suppress(KeyboardInterrupt, SystemExit, GeneratorExit):  # which the caller raises
                    pending.start(self.comm, lambda: self._agree(Intent((), 0, error)))

    def _leave(self, layer: int, error: BaseException) -> None:
        """Abandon a step whose parameters are started separately: report the error in place of the sums of the other parameters.

        If this rank has all sums already, so have the other ranks: they complete the step, and raise the error in their next operation.
        """
        self._left = True
        started = [pending.descent for pending in self._pending]
        self._missed = {place for place, each in enumerate(self._descents) if place != layer and each not in started}
        self._tell_rest(error, self._sums or len(self._descents))
        self._complete(error)
        if all(pending.has_succeeded() for pending in self._pending):  # the step has not failed on any rank
            return
        if isinstance(error, Exception):  # an interrupt ends sums on this rank alone, and the other ranks are to know
            mark_known(self.comm, error)

    def _take_up(self) -> None:
        """Finish a step that an error has left unfinished on all ranks.

        Raises
        ------
        AlgorithmError
            If a step was started that the caller has to finish.
        """
        if not self._left:
            self._expect_idle()
            return
        try:
            self.finish()
        except SparseAllreduceError as error:
            if not is_known(error):
                raise

    def _listed(self, gradients: Any) -> list[Any]:
        given = [gradients] if self._single else list(gradients)
        layers = sum(len(descent.pack.layers) for descent in self._descents)
        if len(given) != layers:
            raise StreamError(f"a step takes a gradient for each of the {layers} parameters, not {len(given)}")
        return given

    def _expect_idle(self) -> None:
        if self._pending or self._summed or self._failure is not None:
            raise AlgorithmError("a step was started and not finished: call finish first")

    def _terms(self) -> tuple[tuple[str, str], ...]:
        """Return the terms that must be equal on all ranks."""
        digest = hashlib.blake2b(digest_size=8)
        for descent in self._descents:
            for parameter in descent.pack.parameters:
                digest.update(as_host(parameter).data)
        shapes = [shape for descent in self._descents for shape in descent.pack.shapes]
        described = {"optimiser": self.name, "settings": self.settings, "options": self.options, "shapes of the parameters": shapes}
        described["dtypes of the parameters"] = [descent.pack.dtype.name for descent in self._descents]
        described["memory of the parameters"] = ["a GPU's" if descent.pack.on_device else "the host's" for descent in self._descents]
        described["parameters, whose digest is"] = digest.hexdigest()
        return tuple((name, _ADDRESS.sub("", str(value))) for name, value in described.items())

    def _agree(self, intent: Intent) -> Request:
        """Start an operation in which ranks only compare an intent, or raise the error of one rank on all of them."""
        return agree(self.comm, intent, blocking=False)


def _copied(value: Any) -> Any:
    """Return a copy of a value of a state, on the host."""
    if isinstance(value, np.ndarray):
        return np.copy(value)
    return as_host(value) if on_device(value) else value


class Prepared(NamedTuple):
    """What one pack adds to its sum."""

    descent: PackDescent
    vector: Array
    rate: float


@dataclass(eq=False)
class _Pending:
    """A sum of a step, from its start until its update is applied."""

    descent: PackDescent | None = None  # None if the operation only reports an error
    rate: float = 0.0
    gradients: int = 0  # gradients added to the residual before this sum
    begun: bool = False  # whether an operation was started; without a request, it has failed
    request: Request | None = None
    error: Exception | None = None  # set if there is no request

    def start(self, comm: Any, start: Callable[[], Request]) -> None:
        """Start the sum, or report the error to the other ranks in its place.

        Errors and interrupts are also stored, and raised by :meth:`wait`.
        """
        reporter = ErrorReporter(comm)
        try:
            with reporter:
                self.begun = True
                self.request = start()
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.error = SparseAllreduceError(f"{_INTERRUPTED}: {type(error).__name__}")
            self.error.on_all_ranks = True
            raise

    def test(self) -> None:
        """Progress the sum."""
        if self.request is not None:
            self.request.test()

    def wait(self) -> SparseStream:
        """Wait for the sum, and return the mean over the ranks."""
        if self.request is None:
            raise self.error or SparseAllreduceError(_INTERRUPTED)
        mean: SparseStream = self.request.wait()
        return mean

    def has_failed(self) -> bool:
        """Return True if the sum is known to have failed."""
        return self.error is not None if self.request is None else self.request.has_failed()

    def has_succeeded(self) -> bool:
        """Return True if the sum is known to be complete."""
        return self.request is not None and self.request.has_succeeded()

    def failed(self) -> None:
        """Commit the gradient if it is in the residual although the sum failed."""
        if self.descent is not None and self.descent.feedback.gradients > self.gradients:
            self.gradients = self.descent.feedback.gradients
            self.descent.taken()
