"""The base of all optimisers of this package, which sum the gradients of all ranks and apply their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, SparseAllreduceError
from sparseallreduce.optim import Optimizer as Recipe
from sparseallreduce.optim.arrays import finite_norm
from sparseallreduce.optim.settings import Settings
from sparseallreduce.reducers import Reducer
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.launching import ErrorReporter, agree, latest, leave
from sparseallreduce.torch import header, leaving, replicas, state
from sparseallreduce.torch.buckets import Bucket, Member, arranged, listed
from sparseallreduce.torch.devices import Order, collective_in_order, in_order
from sparseallreduce.torch.flight import Flight, translated, unscaled
from sparseallreduce.torch.header import NONE
from sparseallreduce.torch.inner import in_full_precision, made, settings_of, taken
from sparseallreduce.torch.masters import Masters, apply
from sparseallreduce.torch.means import means
from sparseallreduce.torch.overlap import Overlap
from sparseallreduce.torch.recipes import check_unchanged, maker_of, recipe_of
from sparseallreduce.torch.rows import as_stream

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimiser that makes its steps with the mean gradient of all ranks and sends only a few values of it.

    A step has four parts. The ranks agree on the step. The gradients are packed into buckets. For each bucket, the values of largest
    magnitude are summed over the ranks, and the others stay in the residual of their rank. An optimiser of PyTorch (``base``) makes its
    step with the means. Construction is collective.

    Parameters
    ----------
    params : iterable of tensors, of (name, tensor) pairs, or of dicts; or an optimiser
        The parameters, as for any optimiser of PyTorch, or an existing optimiser of the class ``base``, whose groups and state are taken
        over; use this one in its place. **The parameters, and the state, are set to the values of rank 0.**
    lr : float or tensor, optional
        The learning rate of ``base``.
    density : float or callable
        The approximate share of a bucket's elements that a step sums, or a callable that returns it for the number of a step, such as a
        :class:`~sparseallreduce.optim.DensityWarmup`. It can be set for each group.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    bucket_bytes : int
        The largest size of a bucket in bytes.
    overlap : bool
        Whether the sum of a bucket starts as soon as its gradients are computed, while back-propagation continues. Gradients must then not
        be changed between ``backward`` and ``step``, and all but the last ``backward`` of a step must be in :meth:`no_sync`. There is no
        overlap in the first step, with a GradScaler, or in sparse sums with ``clip_norm``, which needs the norm of all gradients.
    clip_norm : float, optional
        Limits the L2 norm of the gradient over all parameters. With a dense sum, such as DenseSGD, it limits the mean, as
        ``torch.nn.utils.clip_grad_norm_`` does with DistributedDataParallel. With residuals, it limits each rank's own gradient to
        1/sqrt(P) of this norm before adding it to the residual (Lin et al., *Deep gradient compression*, 2018, section 3.2).
    check_every : int
        The ranks compare digests of their parameters after this many steps; 0 for never. See :meth:`check_replicas`.
    dense : bool, optional
        Whether all elements of the gradients are summed. By default this holds for parameters with at most one dimension, such as biases
        and the weights of normalisation layers. It can be set for each group, as can ``reducer``, the name of another reducer as for
        :func:`distributed`, which takes none of the options below.
    momentum_correction : bool
        Whether each rank applies momentum to its own gradients before it selects values, for parameters with a residual (Lin et al.,
        sections 3.1 and 3.2). It is available for SGD without Nesterov momentum and dampening. Weight decay is multiplied by
        1/(1-momentum), as momentum would do. It takes 4 bytes for each parameter.
    momentum_masking : bool
        With momentum correction, whether the velocity is set to zero where its value was applied.
    **options
        Options of ``base``, such as ``momentum``, ``nesterov``, ``weight_decay`` or ``betas``. Any other option is passed to the reducer;
        see :mod:`sparseallreduce.optim`.

    Attributes
    ----------
    steps : int
        The number of steps made, without skipped steps.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: AlgorithmError (a ValueError) or StreamTypeError (a TypeError) if an argument is wrong on any rank,
        MismatchError if the parameters or settings differ.

    Notes
    -----
    Weight decay needs no communication: each rank adds it to the mean. A parameter without a gradient on one rank counts as zero there.
    If no rank has a gradient for it, only the values in its residuals can change it.
    """

    recipe: ClassVar[type[Recipe]]
    base: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    _step_supports_amp_scaling = True  # a GradScaler lets the step decide whether to skip, which all ranks must agree on

    def __init__(
        self,
        params: Any,
        lr: Any = None,
        *,
        density: float | Callable[[int], float] = 0.01,
        comm: Any = None,
        bucket_bytes: int = 25 * 2**20,
        overlap: bool = False,
        clip_norm: float | None = None,
        check_every: int = 100,
        dense: bool | None = None,
        momentum_correction: bool = False,
        momentum_masking: bool = True,
        **options: Any,
    ) -> None:
        before, wraps = latest(comm), isinstance(params, torch.optim.Optimizer)
        try:
            self.comm: Any = resolve(comm)
            self.steps: int = 0
            self.bucket_bytes: int = bucket_bytes
            self.check_every: int = check_every
            self._flight: Flight | None = None
            self._buckets: list[Bucket] = []
            self._arranged: Any = None  # what the buckets were arranged for; None if they must be arranged again
            self._layouts = b""  # the kinds of the parameters' gradients so far
            self._waiting, self._masters, self._order = state.Waiting(), Masters(), Order()
            self._scaled = False  # whether the last step was made by a GradScaler
            self._overlap: Overlap | None = None
            self._constructed = False
            self._fresh = False  # whether parameters may have been replaced since the last comparison
            try:
                known = settings_of(self.base)
                self.options: dict[str, Any] = {name: value for name, value in options.items() if name not in known}
                momentum = options.get("momentum", 0.0) if momentum_correction else 0.0
                self._settings = Settings(momentum, momentum_correction, momentum_masking, clip_norm=clip_norm)
                self._check_settings()
                given = ({} if lr is None else {"lr": lr}) | {name: value for name, value in options.items() if name in known}
                self._inner = taken(params, type(self), given) if wraps else made(params, self, given)
                super().__init__(self._inner.param_groups, {**self._inner.defaults, "density": density, "dense": dense, "reducer": None})
                self._collect()
                intent = Intent(header.terms(self, self._members), 0)
            except Exception as error:  # the other ranks wait for this error
                intent = Intent((), 0, translated(error))
            agree(self.comm, intent, blocking=True)
            replicas.broadcast(self.comm, (member.parameter for member in self._members))
            self._constructed = True
            if wraps:
                self.state.update(in_full_precision(self._inner.state))
                state.synchronize(self)
            if overlap:
                self._overlap = Overlap(self._gradient_ready, self._leave_backward)
                self._overlap.watch(member.parameter for member in self._members)
        except BaseException as error:
            leave(comm, error, before)
            raise

    @collective_in_order
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with the mean of the ranks' gradients in ``.grad``, which does not change. Collective.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients, and returns the loss, which should be the mean over this rank's samples.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank: MismatchError if the settings of the groups differ, or the parameters in a step that compares
            them; StreamTypeError if the gradients do not fit together; DivergenceError if a gradient to be clipped is not finite. The
            parameters then do not change, and no gradient is lost from the residuals.

        Notes
        -----
        With a ``torch.amp.GradScaler``, all ranks skip the step if a gradient is infinite on any rank. The residuals do not change.

        If a KeyboardInterrupt ends a step whose sums have begun, the other ranks may have applied the sums, and raise an error that names
        the interrupt in their next step. So does this rank, after it has completed the interrupted step. Sums that it had not received
        are lost to it: :meth:`synchronize` makes the replicas equal again.
        """
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._flight is not None and self._flight.closed:
                with suppress(SparseAllreduceError):  # the other ranks have raised it in that step
                    self._finish(self._flight)
            flight = self._open()
            infinite = self._agree(flight)
        except BaseException as error:
            leaving.leave(self, error)
            raise
        if infinite:
            self._flight = None
        else:
            self._finish(flight)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings, and set them to the values of rank 0. Collective."""
        if not self._constructed:
            super().add_param_group(param_group)
            return
        with ErrorReporter(self.comm):
            try:
                self._expect_idle()
                super().add_param_group(param_group)
                added = listed(self.param_groups, self._settings.momentum_correction)[len(self._members) :]
                intent = Intent(header.terms(self, added), 0)
            except Exception as error:
                intent = Intent((), 0, translated(error))
            try:
                agree(self.comm, intent, blocking=True)
            except Exception:
                if intent.error is None:
                    self.param_groups.pop()
                raise
            replicas.broadcast(self.comm, (member.parameter for member in added))
            self._collect()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which ``backward`` starts no sums: with overlap, for all but the last ``backward`` of a step."""
        if self._overlap is None:
            yield
        else:
            with self._overlap.pause():
                yield

    def check_replicas(self) -> None:
        """Check that the parameters are bitwise identical on all ranks. Collective.

        Raises
        ------
        MismatchError
            On every rank, if they differ.
        """
        replicas.check(self.comm, self._members)

    @collective_in_order
    def synchronize(self) -> None:
        """Set the parameters, the optimiser state and the number of steps to those of rank 0. Residuals do not change. Collective."""
        if self._flight is not None:
            self._flight.give_back()
            self._flight = None
        state.synchronize(self)

    @in_order
    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, with its residuals and thresholds under ``"sums"``.

        For a checkpoint, each rank saves its own state, or rank 0 saves the state of :meth:`gather_state_dict`.
        """
        self._expect_idle()
        own = super().state_dict()
        for group in own["param_groups"]:
            if callable(group["density"]):  # a function cannot be saved: loading keeps the one of the optimiser
                del group["density"]
        return {**own, "sums": state.of_sums(self)}

    @collective_in_order
    def gather_state_dict(self) -> dict[str, Any] | None:
        """Return the state with the residuals of all ranks on rank 0, and None on other ranks. Collective."""
        return state.gathered(self)

    @collective_in_order
    def load_state_dict(self, state_dict: Any, *, missing: str = "raise") -> None:
        """Load a state, after the parameters of the same time were loaded. Collective.

        If there are as many ranks as before and each loads the state that it has saved, training continues with bitwise identical results.
        With another number of ranks, residuals are scaled and divided among the ranks, and thresholds are estimated again.

        Parameters
        ----------
        state_dict : dict, or list of dict
            The state that this rank has saved, a list of states of several ranks, the state gathered on rank 0, or a state of ``base``,
            which has no residuals.
        missing : str
            What to do if no rank has the residual of some rank: "raise" a CheckpointError, or begin with "zeros".
        """
        state.load(self, state_dict, missing)

    @property
    @in_order
    def residuals(self) -> list[torch.Tensor | None]:
        """The copies of this rank's residuals, in the order of the parameters, in float32 or float64.

        An entry is None for a parameter without a residual. Ok-Topk with SGD keeps gradients multiplied by their learning rates.
        """
        return state.residuals(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} works with other processes and cannot be copied or pickled: use state_dict()")

    @property
    def _everything(self) -> bool:
        """True if all elements of all gradients are summed."""
        return self.recipe.name == "dense"

    def _unit(self, member: Member) -> float:
        """Return the factor of a parameter's gradient in the residual: with Ok-Topk and plain SGD its learning rate, otherwise 1."""
        rate_first = recipe_of(member.group["reducer"], self.recipe).rate_first and self.base is torch.optim.SGD
        return float(member.group["lr"]) if rate_first else 1.0

    def _make(self, size: int, k: int) -> Reducer:
        return self.recipe.reducer_of(size, k, self.comm.rank, **self.options)

    def _arranged_anew(self, members: Sequence[Member]) -> list[Bucket]:
        of_group, correction = partial(maker_of, rank=self.comm.rank), self._settings.momentum_correction
        return arranged(members, self.bucket_bytes, self._make, self._everything, correction, of_group)

    def _check_settings(self) -> None:
        if self.bucket_bytes < 1:
            raise AlgorithmError(f"bucket_bytes is the most that a bucket holds, at least 1, not {self.bucket_bytes}")
        if self.check_every < 0:
            raise AlgorithmError(f"check_every is a number of steps, or 0 for never, not {self.check_every}")
        if self._settings.momentum_correction and self.base is not torch.optim.SGD:
            raise AlgorithmError(f"momentum correction is available for SGD only, not for {self.base.__name__}")
        self._make(64, 8)  # raises an error for an unknown option

    def _collect(self) -> None:
        """Collect the parameters of the groups. The next step arranges the buckets."""
        self._members = listed(self.param_groups, self._settings.momentum_correction)
        self._order = self._order.of(member.parameter for member in self._members)
        self._index = {member.parameter: member.index for member in self._members}
        self._reducers = [group["reducer"] for group in self.param_groups]
        self._layouts = self._layouts[: len(self._members)].ljust(len(self._members), bytes([NONE]))
        self._arranged = None
        if self._overlap is not None:
            self._overlap.watch(self._index)

    def _expect_idle(self) -> None:
        if self._flight is not None and (self._flight.started or self._flight.closed):
            raise AlgorithmError("a step has begun and is not finished: call step first")

    def _wanted(self) -> Any:
        """Return what the arrangement of the buckets depends on: the kinds of gradients, and the densities."""
        return self._layouts, [(group["density"], group["dense"]) for group in self.param_groups]

    def _arrange(self) -> None:
        """Arrange the buckets again. Residuals stay with their parameters, thresholds with unchanged buckets."""
        self._waiting.take_from(self._buckets, self._unit)
        self._buckets = self._arranged_anew(leaving.strided(self))
        self._waiting.give_to(self._buckets, self._unit)
        self._arranged = self._wanted()

    def _open(self) -> Flight:
        """Return the sums of this step, and begin them if necessary."""
        if self._flight is None or self._flight.broken:
            if self._flight is not None:
                self._flight.abandon()
            clips = self._settings.clip_norm is not None and not self._everything
            early = self._overlap is not None and not clips and not self._scaled and self._arranged == self._wanted()
            self._flight = Flight(self.comm, self._buckets, self.steps, early)
            self._flight.has_rows = bool(leaving.sparse(self))
        return self._flight

    @in_order
    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        """Record that the gradient of a parameter has been computed, and start each sum whose gradients are now complete."""
        if self._flight is not None and self._flight.closed:
            return  # the previous step was interrupted and must be completed first
        flight = self._open()
        if not flight.early or self._overlap is None:
            return
        flight.gradient_ready(self._index[parameter], parameter)
        while flight.started < len(flight.buckets):
            waited = (member for member in flight.buckets[flight.started].members if member.parameter in self._overlap)
            if not all(member.index in flight.ready for member in waited):
                break
            self._start(flight, 1.0)
        flight.test()

    def _leave_backward(self, error: BaseException) -> None:
        leaving.leave_backward(self, error)

    def _agree(self, flight: Flight) -> bool:
        """Let the ranks agree on this step, and start its sums. Return whether the step is skipped."""
        scaled = hasattr(self, "found_inf")
        if flight.early:
            if scaled:
                flight.error = AlgorithmError("a GradScaler is used after steps without one, and some sums have started already")
            flight.check(self._members)
            self._start_all(flight, 1.0)
        self._scaled = scaled
        factor, infinite = unscaled(self)
        try:
            check_unchanged(self.param_groups, self._reducers)
            factor *= 1.0 if infinite else self._clip(factor)
        except Exception as error:
            flight.error = flight.error or error
        check = self.check_every > 0 and (self._fresh or self.steps % self.check_every == 0)
        given = self.comm, self._members, self.param_groups, self.steps, infinite, check
        found = flight.agreed(lambda: header.exchange(*given, flight.error))
        self._fresh = False
        if found.infinite:
            return True
        flight.layouts = found.layouts
        flight.closed = True
        leaving.note_layouts(self, flight)
        if not flight.early:
            if self._arranged != self._wanted():
                self._arrange()
            flight.buckets, flight.arranged = self._buckets, True
            self._start_all(flight, factor)
        return False

    def _start_all(self, flight: Flight, factor: float) -> None:
        try:
            while flight.started < len(flight.buckets):
                self._start(flight, factor)
            sparse = leaving.sparse(self)
            flight.has_rows = bool(sparse)
            if sparse and not flight.rows_started:
                flight.start_rows(lambda: [as_stream(member, layout, factor) for member, layout in sparse])
        except BaseException as error:
            flight.tell_rest(error)
            raise

    def _start(self, flight: Flight, factor: float) -> None:
        """Start the sum of the next bucket."""

        def pack(bucket: Bucket) -> None:
            units = [1.0 if bucket.feedback is None else self._unit(member) for member in bucket.members]
            bucket.fill([member.parameter.grad for member in bucket.members], [factor * unit for unit in units])

        flight.start(pack)

    def _clip(self, factor: float) -> float:
        """Return the factor by which this rank's gradient is clipped."""
        if self._settings.clip_norm is None or self._everything:
            return 1.0
        norm = header.norm_of(member.parameter.grad for member in self._members) * factor
        return self._settings.clipped(finite_norm(norm), self.comm.size)

    def _finish(self, flight: Flight) -> None:
        """Wait for the sums, and apply their means."""
        flight.wait()
        self._flight = None
        if flight.failure is not None:
            flight.give_back()
            self._arranged = None
            raise flight.failure
        limit = self._settings if self._everything and self._settings.clip_norm is not None else None
        gradients = means(flight, self._members, leaving.sparse(self), self._unit, self._masters, limit, self._settings.momentum_masking)
        apply(self._inner, self.param_groups, self.state, gradients, self._masters, flight.corrected())
        self.steps += 1
