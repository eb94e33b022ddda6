"""What all optimisers have in common: stochastic gradient descent of replicas by sums of few values."""

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
from sparseallreduce.errors import AlgorithmError, CheckpointError, MismatchError, SparseAllreduceError, StreamError, StreamTypeError
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
from sparseallreduce.runtime.launching import Telling, agree, latest, leave
from sparseallreduce.runtime.objects import is_known
from sparseallreduce.streams.kernels.backend import as_host, on_device
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Optimizer"]

_INTERRUPTED = "a sum of this step was interrupted before it had started"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the text of a function or an object, which differs from rank to rank


class Optimizer(ABC):
    """Changes parameters by the mean of the gradients of all ranks, few values at a time.

    A step has four parts: each rank adds its gradient to its residual, and selects from it; what is selected is summed over the
    ranks; the parameters descend by the mean; what was not summed stays in the residual.

    Parameters
    ----------
    parameters : array, or sequence of arrays
        Of float32 or float64, C-contiguous, of any shapes: ndarrays, PyTorch CPU tensors, or anything else with the buffer
        protocol, ``__array_interface__`` or DLPack; or on a GPU, as of CuPy, and then the gradients are there, too. They are changed in
        place, and have to be the same on all ranks.
    learning_rate : float or callable
        The rate, at least 0, or what tells it from the number of the step, counted from 0. At a rate of 0 a step moves no parameter:
        it counts, velocity and moments go on, and what is summed has had its effect.
    density : float or callable
        The share of the elements that a step sums, about (k / N), likewise; such as a :class:`DensityWarmup`. One element at least.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    momentum : float
    momentum_correction : bool
        Whether momentum is that of each rank's gradients before the selection, as in DGC, and not that of the updates.
    momentum_masking : bool
        With the correction, whether a rank's velocity stops where its value was applied, as in DGC. That also takes momentum from
        values that are applied often, which slows descent down at a density of 1 %.
    weight_decay : float
        Adds so many times the parameters to their gradient; with ``adam`` it is decoupled from the gradients.
    clip_norm : float, optional
        Limits the L2 norm of the gradient over all parameters; each rank's own gradient is limited to 1 / sqrt(P) of that (DGC).
    adam : Adam, optional
        Sends the means through Adam's moments, as Ok-Topk section 5 does for BERT. The learning rate then comes after the sum.
    by_layer : bool
        Whether each parameter is selected from and summed for itself, all at the same time, the last one first. By default all are
        packed into one vector, which is selected from as a whole.
    **options
        Of the optimiser's reducer or selector.

    Attributes
    ----------
    steps : int
        Steps taken.

    Raises
    ------
    SparseAllreduceError
        On every rank the same: StreamError or StreamTypeError for parameters that do not fit, AlgorithmError for settings out of
        range, MismatchError if parameters or settings differ. Construction is collective.
    """

    name: ClassVar[str]
    #: Whether residuals are of gradients times their learning rates; else updates are multiplied by the rate of the step they come in.
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
            self.comm = resolve(comm)
            self.learning_rate = learning_rate
            self.density = density
            self.options = options
            self.steps = 0
            self._pending: list[_Pending] = []
            self._summed: list[tuple[_Pending, SparseStream]] = []  # sums of the step that is not finished which are not applied yet
            self._updates: dict[PackDescent, SparseStream] = {}  # those that are
            self._failure: Exception | None = None  # the first of it
            self._left = False  # whether a step was interrupted before all of its sums had begun: it is never made
            self._missed: set[int] = set()  # parameters that it does not sum, of which the other ranks have been told
            self._sums = 0  # of the latest step
            self._held: frozenset[PackDescent] = frozenset()  # whose sums this rank has, as it has told the other ranks
            self._vote: Request | None = None  # by which the ranks find out whether all of them have the same sums of a step that fails
            self._alike: bool | None = None  # what came of it
            self._unsure = 0  # steps of which this rank could not find that out
            self._descents: list[PackDescent] = []
            try:
                self.settings = Settings(momentum, momentum_correction, momentum_masking, weight_decay, clip_norm, adam, by_layer)
                self._descents = self._begin(parameters)
                intent = Intent(self._terms(), 0)
            except Exception as error:  # the other ranks wait to be told of it
                intent = Intent((), 0, error)
            self._agree(intent).wait()
        except BaseException as error:
            leave(comm, error, before)
            raise

    def step(self, gradients: Any, rate: float | None = None) -> list[SparseStream]:
        """Take a step.

        Parameters
        ----------
        gradients : array, or sequence of arrays
            This rank's gradients, each of the shape and dtype of its parameter; they are left as they are. A loss that is a mean over
            a rank's samples has the right scale.
        rate : float, optional
            Instead of the learning rate; the same on all ranks.

        Returns
        -------
        list of SparseStream
            The means by which the parameters descended, one for each pack: times the rate where ``rate_first``.

        Raises
        ------
        SparseAllreduceError
            On every rank the same: StreamError or StreamTypeError for gradients that do not fit, DivergenceError where a gradient to
            be clipped is not finite, MismatchError if steps or rates differ. Parameters and residuals are as before then.
        """
        before, idle = latest(self.comm), False
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
                    self._start_vote(idle)
                    if idle and not self._left:  # there is no step to finish, in which the outcome would matter
                        self._vote = None
                    self._complete(error)
                    raise
            return self.finish()
        except BaseException as error:
            leave(self.comm, error, before)
            raise

    def start(self, layer: int, gradient: Any, rate: float | None = None) -> None:
        """Start to sum the gradient of one parameter, while those of others are still computed; needs ``by_layer``.

        All ranks start the same parameters in the same order; :meth:`finish` ends the step. ``gradient`` has to stay as it is until
        then. Communication moves on in calls of ``start`` and ``finish``. What is wrong with the gradient is raised by ``finish``, on all
        ranks; so is that a rank was interrupted here, which raises the KeyboardInterrupt itself.

        Raises
        ------
        AlgorithmError
            If parameters are packed, or gradients to be clipped, which takes the norm of all.
        """
        before = latest(self.comm)
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
            sums = len(self._pending)
            try:
                descent = self._startable(layer)
                used = self._rate(rate)
                self._sum(descent, self._fed(descent, descent.pack.checked([gradient]), used, 1.0), used)
            except BaseException as error:
                self._tell_rest(error, sums + 1)
                if not isinstance(error, Exception):
                    self._leave(layer, error)
                    raise
            with suppress(Exception):  # which finish raises
                self._pending[-1].test()
        except BaseException as error:
            leave(self.comm, error, before)
            raise

    def finish(self) -> list[SparseStream]:
        """Wait for all sums of this step, in the order in which they were started, and apply them.

        Returns
        -------
        list of SparseStream
            As of :meth:`step`.

        Raises
        ------
        SparseAllreduceError
            On every rank the same, the first there was. The parameters whose sums failed are as before; their residuals have lost
            nothing, see :class:`~sparseallreduce.ErrorFeedback`. Sums that all ranks have are applied; if one rank lacks a sum that
            another has, because it was interrupted, no rank applies any, and what they sent returns to their residuals. The step does not
            count, and the optimiser is ready for the next.

        Notes
        -----
        Where something else is raised, such as a KeyboardInterrupt while this rank waits, or a MemoryError where a sum is applied, the
        step is not over: ``finish`` may be called again, and goes on where it stopped. A sum that is there is not lost so, which the
        other ranks may have applied.
        """
        try:
            if not (self._left or self._summed or self._updates or self._failure):
                self._sums = len(self._pending)
            self._missed.clear()
            self._finish()
            updates, failure = self._updates, self._failure
            self._vote = self._alike = None
            self._updates, self._failure, self._left = {}, None, False
            if failure is not None:
                raise failure
            self.steps += 1
            return [updates[descent] for descent in self._descents if descent in updates]
        except BaseException as error:
            self._complete(error)
            leave(self.comm, error, 0)  # behind sums that the other ranks may have completed
            raise

    def _finish(self) -> None:
        """Wait for the sums of this step, and apply them, if all ranks have the same ones."""
        while self._pending:
            pending = self._pending[0]
            try:
                update = pending.wait()
            except Exception as error:
                self._failure = self._failure or error
                with suppress(Exception):  # the other ranks wait for it, whatever has been raised here
                    pending.wait()
                pending.failed()
            else:
                self._summed.append((pending, update))
            del self._pending[0]
        if self._failure is not None:
            self._put_back_uneven()
        while self._summed:
            pending, update = self._summed[0]
            assert pending.descent is not None
            pending.descent.apply(update, pending.rate)
            self._updates[pending.descent] = update
            del self._summed[0]

    def _start_vote(self, idle: bool = True) -> None:
        """Start to compare with the other ranks which sums of a step that fails this rank has.

        Every rank on which a step fails does so, and one that leaves a step does so before; an interrupted rank may have lost sums that
        other ranks have. A step of one sum needs no comparison: it fails on a rank only if that has not got it. Where this rank is not
        ``idle``, its sums are those of another step.
        """
        if self._vote is not None or len(self._descents) == 1:
            return
        done = {each.descent for each in self._pending if each.has_succeeded()} | {each.descent for each, _ in self._summed}
        done = done if idle else set()
        numbers = [number for number, descent in enumerate(self._descents) if descent in done]
        vote = self._agree(Intent((("sums that this rank has of a step that fails", str(numbers)),), 0))
        if idle:
            self._held, self._vote = frozenset(self._descents[number] for number in numbers), vote

    def _put_back_uneven(self) -> None:
        """Give up all sums of a step that fails, if some ranks have others than this one, so that no rank applies them."""
        self._start_vote()
        if self._vote is not None and self._alike is None:
            try:
                self._vote.wait()
                self._alike = True
            except Exception as error:
                self._alike = False
                self._unsure += not isinstance(error, MismatchError)
        kept = self._held if self._alike else frozenset()
        for pending, update in tuple(self._summed):
            assert pending.descent is not None
            if self._vote is not None and pending.descent not in kept:
                pending.descent.feedback.put_back()
                pending.failed()
                self._summed.remove((pending, update))
        if self._alike is False:
            for descent in self._descents:
                descent.feedback.reducer.reset()

    def _complete(self, error: BaseException) -> None:
        """Wait for the sums in flight before an error is raised, so that no rank waits for this one there; interrupts end them."""
        if isinstance(error, Exception):
            for pending in self._pending:
                with suppress(Exception):  # which finish raises
                    pending.wait()

    @property
    def parameters(self) -> list[Array]:
        """The parameters as arrays, on the memory of those given."""
        return [flat.reshape(shape) for descent in self._descents for flat, shape in zip(descent.pack.parameters, descent.pack.shapes)]

    @property
    def residuals(self) -> list[Array]:
        """What has come in on this rank and was not applied yet, of each pack."""
        return [descent.feedback.residual for descent in self._descents]

    def state(self) -> dict[str, Any]:
        """All that later steps of this rank depend on, besides the parameters: copies of arrays, and what JSON can express, by name.

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
        """Go on from a :meth:`state` of this rank, with the parameters of that time: every bit is as it would have been.

        Raises
        ------
        CheckpointError
            If the state is of another optimiser, or of other parameters or settings.
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
        """Of the latest step, which had the density of that step; or of the next, which may have failed before."""
        latest = self._k(size, max(0, self.steps - 1))
        return self.reducer(size, latest if k == latest else self._k(size))

    @classmethod
    @abstractmethod
    def reducer_of(cls, size: int, k: int, rank: int, **options: Any) -> Reducer:
        """What sums k of size elements on that rank."""

    def reducer(self, size: int, k: int) -> Reducer:
        """What sums k of size elements here, with the options of this optimiser."""
        return self.reducer_of(size, k, self.comm.rank, **self.options)

    def prepare(self, gradients: Any, rate: float | None, ranks: int) -> list[Prepared]:
        """What each pack feeds into its sum in this step, and the rate; parameters and residuals stay as they are."""
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
        revocable = len(packs) > 1
        return [PackDescent(pack, self.settings, self._reducer(pack.size), rate_first, revocable) for pack in packs]

    def _startable(self, layer: int) -> PackDescent:
        if layer not in range(len(self._descents)):
            raise AlgorithmError(f"there is no parameter {layer}: they are numbered from 0 to {len(self._descents) - 1}")
        started = (*self._pending, *(each for each, _ in self._summed))
        if any(pending.descent is self._descents[layer] for pending in started):
            raise AlgorithmError(f"parameter {layer} was started in this step already: finish the step")
        return self._descents[layer]

    def _reducer(self, size: int) -> Reducer:
        """For the density of this step."""
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
        """What a pack feeds into its sum, which then has the density of this step."""
        reducer = descent.feedback.reducer
        if reducer.k != self._k(reducer.size):
            descent.feedback.reducer = self._reducer(reducer.size)
        return descent.fed(gradients, rate, clip)

    def _sum(self, descent: PackDescent, vector: Array, rate: float) -> None:
        """Start a sum, of which all ranks know that it is of the same step, parameters and rate."""
        said = {"parameters": descent.pack.layers, "step of the optimiser": self.steps, "learning rate": rate}
        if self._unsure:
            said["step of the optimiser"] = f"{self.steps}, behind {self._unsure} that may not have been applied by all ranks"
        pending = _Pending(descent, rate, descent.feedback.gradients)
        self._pending.append(pending)

        def start() -> Request:
            if any(each.has_failed() for each in self._pending):  # a rank that has left takes part in no more of them
                raise SparseAllreduceError("another sum of this step has failed")
            operation = descent.feedback.planned(vector)
            terms = operation.intent.terms + tuple((name, str(value)) for name, value in said.items())
            operation.intent = operation.intent._replace(terms=terms)
            return operation.start(self.comm, blocking=False)

        pending.start(self.comm, start)

    def _tell_rest(self, error: BaseException, sums: int, idle: bool = True) -> None:
        """Tell the other ranks of an error in place of those of so many sums that this rank has not begun; of all, if it is not ``idle``,
        but has sums of another step in flight.
        """
        pendings = self._pending if idle else []
        pendings += [_Pending() for _ in range(sums - len(pendings))]
        for pending in pendings:
            if not pending.begun:
                pending.descent = None
                with suppress(KeyboardInterrupt, SystemExit, GeneratorExit):  # which the caller raises
                    pending.start(self.comm, lambda: self._agree(Intent((), 0, error)))

    def _leave(self, layer: int, error: BaseException) -> None:
        """Leave a step whose parameters are started one by one: tell the other ranks, which wait for as many sums as in the latest."""
        self._left = True
        started = [pending.descent for pending in self._pending]
        self._missed = {place for place, each in enumerate(self._descents) if place != layer and each not in started}
        self._tell_rest(error, self._sums or len(self._descents))
        self._start_vote()

    def _take_up(self) -> None:
        """Finish what an error has left, which all ranks know of.

        Raises
        ------
        AlgorithmError
            If a step was started and is to be finished by the caller.
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
        """What has to be the same on all ranks."""
        digest = hashlib.blake2b(digest_size=8)
        for descent in self._descents:
            for parameter in descent.pack.parameters:
                digest.update(as_host(parameter).data)
        shapes = [shape for descent in self._descents for shape in descent.pack.shapes]
        said = {"optimiser": self.name, "settings": self.settings, "options": self.options, "shapes of the parameters": shapes}
        said["dtypes of the parameters"] = [descent.pack.dtype.name for descent in self._descents]
        said["memory of the parameters"] = ["a GPU's" if descent.pack.on_device else "the host's" for descent in self._descents]
        said["parameters, whose digest is"] = digest.hexdigest()
        return tuple((name, _ADDRESS.sub("", str(value))) for name, value in said.items())

    def _agree(self, intent: Intent) -> Request:
        """An operation that only makes sure that all ranks want the same, or raises on all of them what is wrong on one."""
        return agree(self.comm, intent, blocking=False)


def _copied(value: Any) -> Any:
    """A value of a state that does not change: of arrays a copy, on the host."""
    if isinstance(value, np.ndarray):
        return np.copy(value)
    return as_host(value) if on_device(value) else value


class Prepared(NamedTuple):
    """What one pack feeds into its sum."""

    descent: PackDescent
    vector: Array
    rate: float


@dataclass(eq=False)
class _Pending:
    """A sum in flight."""

    descent: PackDescent | None = None  # None if the operation only tells of an error
    rate: float = 0.0
    gradients: int = 0  # that the residual had taken in before
    begun: bool = False  # whether it counts as an operation of this rank: one that has failed, if no request has come of it
    request: Request | None = None
    error: Exception | None = None  # if no request has come of it

    def start(self, comm: Any, start: Callable[[], Request]) -> None:
        """Start it, or tell the other ranks in its place; what goes wrong then is raised by :meth:`wait`, and an interrupt here, too."""
        telling = Telling(comm)
        try:
            with telling:
                self.begun = True
                self.request = start()
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.error = SparseAllreduceError(f"{_INTERRUPTED}: {type(error).__name__}")
            self.error.on_all_ranks = True
            raise

    def test(self) -> None:
        """Move it on."""
        if self.request is not None:
            self.request.test()

    def wait(self) -> SparseStream:
        """The mean over the ranks."""
        if self.request is None:
            raise self.error or SparseAllreduceError(_INTERRUPTED)
        mean: SparseStream = self.request.wait()
        return mean

    def has_failed(self) -> bool:
        """Return whether it is known to have failed."""
        return self.error is not None if self.request is None else self.request.has_failed()

    def has_succeeded(self) -> bool:
        """Return whether its result is there."""
        return self.request is not None and self.request.has_succeeded()

    def failed(self) -> None:
        """Note what has come of it all the same."""
        if self.descent is not None and self.descent.feedback.gradients > self.gradients:
            self.descent.taken()
