"""What all optimisers of this room have in common: a step sums the gradients of all ranks, and one of PyTorch's applies their mean."""

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
from sparseallreduce.runtime.launching import Telling, agree, latest, leave
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
    """A step by the mean of the gradients of all ranks, of which few values are sent.

    A step has four parts: the ranks agree on what they are about to do; gradients are packed into buckets; of each bucket the values of
    largest magnitude are summed over the ranks, and the others wait in the residual of their rank; an optimiser of PyTorch's
    (``base``) makes its step by the means.

    Parameters
    ----------
    params : iterable of tensors, of (name, tensor) pairs, or of dicts; or an optimiser
        As for any optimiser of PyTorch's. **They are set to the values of rank 0**, as is the state of an optimiser of ``base``, which is
        taken over with its groups; use this one in its place. Construction is collective.
    lr : float or tensor, optional
        As of ``base``.
    density : float or callable
        The share of a bucket's elements that a step sums, about, or what tells it from the number of the step, such as a
        :class:`~sparseallreduce.optim.DensityWarmup`. A group may have its own.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    bucket_bytes : int
        Most bytes of the gradients that are summed as one vector.
    overlap : bool
        Whether the sum of a bucket starts as soon as its gradients have come, while others are still computed. Gradients may then not be
        changed between ``backward`` and ``step``, and all but the last ``backward`` of a step have to be in :meth:`no_sync`. The first
        step does not overlap yet, nor do steps that a GradScaler makes, nor those of lossy sums with ``clip_norm``, which take the norm
        of all gradients.
    clip_norm : float, optional
        Limits the L2 norm of the gradient over all parameters: of a DenseSGD and the like that of the mean, as
        ``torch.nn.utils.clip_grad_norm_`` does under DistributedDataParallel. With residuals each rank's own gradient is limited to
        1 / sqrt(P) of it, before it is added to them (Lin et al., *Deep gradient compression*, 2018, section 3.2).
    check_every : int
        Every so many steps the ranks compare digests of their parameters; 0 for never. See :meth:`check_replicas`.
    dense : bool, optional
        Whether gradients are summed whole. By default those of parameters with one dimension or none are: biases, and the weights of
        normalisation layers. A group may have its own, and ``reducer``, the name of another way to sum, as for :func:`distributed`, which
        takes none of the options below.
    momentum_correction : bool
        Whether momentum is that of each rank's own gradients, before values are selected, as far as they have residuals (Lin et al.,
        sections 3.1 and 3.2): what waits gains as much momentum as what does not. For SGD, without Nesterov's form and dampening. Weight
        decay counts 1 / (1 - momentum) times, as momentum would make of it. It takes 4 bytes a parameter.
    momentum_masking : bool
        With the correction: whether a velocity stops where its value was applied.
    **options
        Of ``base``, such as ``momentum``, ``nesterov``, ``weight_decay`` or ``betas``; all others are those of the sum, see
        :mod:`sparseallreduce.optim`.

    Attributes
    ----------
    steps : int
        Steps taken, skipped ones left out.

    Raises
    ------
    SparseAllreduceError
        On every rank the same: AlgorithmError (a ValueError) or StreamTypeError (a TypeError) for what is wrong with an argument on any
        rank, MismatchError if parameters or settings differ.

    Notes
    -----
    Weight decay is not sent: each rank adds it to the mean, as all have the same parameters. A parameter without a gradient counts with
    one of zero on that rank; if no rank has one, it stays as it is but for what its residuals still send.
    """

    recipe: ClassVar[type[Recipe]]
    base: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    _step_supports_amp_scaling = True  # a GradScaler leaves it to the step whether to be skipped, for which all ranks have to agree

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
            self.comm = resolve(comm)
            self.steps = 0
            self.bucket_bytes, self.check_every = bucket_bytes, check_every
            self._flight: Flight | None = None
            self._buckets: list[Bucket] = []
            self._arranged: Any = None  # for what the buckets are arranged; None if they have to be
            self._layouts = b""  # of the parameters' gradients, so far
            self._waiting, self._masters, self._order = state.Waiting(), Masters(), Order()
            self._scaled = False  # whether a GradScaler makes the steps
            self._overlap: Overlap | None = None
            self._constructed = False
            self._fresh = False  # whether parameters may come from elsewhere since they were last compared
            try:
                known = settings_of(self.base)
                self.options = {name: value for name, value in options.items() if name not in known}
                momentum = options.get("momentum", 0.0) if momentum_correction else 0.0
                self._settings = Settings(momentum, momentum_correction, momentum_masking, clip_norm=clip_norm)
                self._check_settings()
                given = ({} if lr is None else {"lr": lr}) | {name: value for name, value in options.items() if name in known}
                self._inner = taken(params, type(self), given) if wraps else made(params, self, given)
                super().__init__(self._inner.param_groups, {**self._inner.defaults, "density": density, "dense": dense, "reducer": None})
                self._collect()
                intent = Intent(header.terms(self, self._members), 0)
            except Exception as error:  # the other ranks wait to be told of it
                intent = Intent((), 0, translated(error))
            agree(self.comm, intent, blocking=True)
            replicas.broadcast(self.comm, (member.parameter for member in self._members))
            self._constructed = True
            if wraps:
                self.state.update(in_full_precision(self._inner.state))
                state.synchronize(self)
            if overlap:
                self._overlap = Overlap(self._came, self._leave_backward)
                self._overlap.watch(member.parameter for member in self._members)
        except BaseException as error:
            leave(comm, error, before)
            raise

    @collective_in_order
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step; ``.grad`` of the parameters is read, and left as it is; a loss is a mean over a rank's samples. Collective.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients, and returns the loss.

        Raises
        ------
        SparseAllreduceError
            On every rank the same: MismatchError if the groups' settings differ, or the parameters in a step that compares them;
            StreamTypeError for gradients that do not fit each other; DivergenceError where a gradient to be clipped is not finite.
            Parameters are as before then, and residuals have lost nothing.

        Notes
        -----
        A step of a ``torch.amp.GradScaler`` is left out on all ranks if a gradient is infinite on any. Residuals are as before then.

        Where a KeyboardInterrupt ends a step whose sums have begun, the other ranks may have applied them, and raise an error that names
        it in their next step. So does this rank, which finishes the interrupted step before. Sums that it had not received yet are lost
        to it: :meth:`synchronize` makes the replicas the same again.
        """
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if self._flight is not None and self._flight.closed:
                with suppress(SparseAllreduceError):  # which the other ranks have raised in that step
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
        """Add parameters, with settings of their own. Collective; they are set to the values of rank 0."""
        if not self._constructed:
            super().add_param_group(param_group)
            return
        with Telling(self.comm):
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
        """Let gradients add up in ``backward`` without being summed over the ranks, for all but the last one of a step with overlap."""
        if self._overlap is None:
            yield
        else:
            with self._overlap.pause():
                yield

    def check_replicas(self) -> None:
        """Make sure that parameters are the same on all ranks, to the bit. Collective.

        Raises
        ------
        MismatchError
            On every rank, if they are not.
        """
        replicas.check(self.comm, self._members)

    @collective_in_order
    def synchronize(self) -> None:
        """Begin anew from rank 0: its parameters, momenta and number of steps on all ranks. Residuals stay. Collective."""
        if self._flight is not None:
            self._flight.give_back()
            self._flight = None
        state.synchronize(self)

    @in_order
    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, as of any optimiser of PyTorch's, and under ``"sums"`` the residuals and thresholds of this rank.

        For a checkpoint each rank saves its own, or rank 0 that of :meth:`gather_state_dict`.
        """
        self._expect_idle()
        own = super().state_dict()
        for group in own["param_groups"]:
            if callable(group["density"]):  # a program, which a state does not hold: the one that is there goes on
                del group["density"]
        return {**own, "sums": state.of_sums(self)}

    @collective_in_order
    def gather_state_dict(self) -> dict[str, Any] | None:
        """The state with the residuals of all ranks, on rank 0, and None elsewhere. Collective."""
        return state.gathered(self)

    @collective_in_order
    def load_state_dict(self, state_dict: Any, *, missing: str = "raise") -> None:
        """Go on from a state, with the parameters of that time. Collective.

        With as many ranks, each of which loads what it has saved, every bit is as it would have been. With another number residuals are
        shared out, in the measure in which they count for the mean then, and thresholds are found anew.

        Parameters
        ----------
        state_dict : dict, or list of dict
            What this rank has saved, the same of several ranks, what rank 0 has gathered, or the state of ``base`` itself, which has no
            residuals.
        missing : str
            What to do if no rank brings the residual of some rank: "raise" a CheckpointError, or begin with "zeros".
        """
        state.load(self, state_dict, missing)

    @property
    @in_order
    def residuals(self) -> list[torch.Tensor | None]:
        """What has come in on this rank and was not applied yet, of each parameter in the order of the groups, in float32 or float64.

        None where there is no residual. With Ok-Topk and plain SGD, of gradients times their rates. They are copies.
        """
        return state.residuals(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} works with other processes and cannot be copied or pickled: use state_dict()")

    @property
    def _everything(self) -> bool:
        """Whether all gradients are summed whole."""
        return self.recipe.name == "dense"

    def _unit(self, member: Member) -> float:
        """What a gradient is multiplied by to go into a residual: with Ok-Topk and plain SGD its learning rate."""
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
            raise AlgorithmError(f"momentum correction is one of SGD's momentum: {self.base.__name__} has none")
        self._make(64, 8)  # whether it knows the options

    def _collect(self) -> None:
        """Note which parameters there are; buckets are arranged by the next step."""
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
        """For what buckets are arranged: densities, and what is dense or sparse."""
        return self._layouts, [(group["density"], group["dense"]) for group in self.param_groups]

    def _arrange(self) -> None:
        """Arrange the parameters in buckets; residuals go with their parameters, thresholds with buckets that are as before."""
        self._waiting.take_from(self._buckets, self._unit)
        self._buckets = self._arranged_anew(leaving.strided(self))
        self._waiting.give_to(self._buckets, self._unit)
        self._arranged = self._wanted()

    def _open(self) -> Flight:
        """The sums of this step."""
        if self._flight is None or self._flight.broken:
            if self._flight is not None:
                self._flight.abandon()
            clips = self._settings.clip_norm is not None and not self._everything
            early = self._overlap is not None and not clips and not self._scaled and self._arranged == self._wanted()
            self._flight = Flight(self.comm, self._buckets, self.steps, early)
            self._flight.has_rows = bool(leaving.sparse(self))
        return self._flight

    @in_order
    def _came(self, parameter: torch.Tensor) -> None:
        """A gradient has come: start the sums that wait for no other one."""
        if self._flight is not None and self._flight.closed:
            return  # the step before was interrupted, and is finished first
        flight = self._open()
        if not flight.early or self._overlap is None:
            return
        flight.came(self._index[parameter], parameter)
        while flight.started < len(flight.buckets):
            waited = (member for member in flight.buckets[flight.started].members if member.parameter in self._overlap)
            if not all(member.index in flight.ready for member in waited):
                break
            self._start(flight, 1.0)
        flight.test()

    def _leave_backward(self, error: BaseException) -> None:
        leaving.leave_backward(self, error)

    def _agree(self, flight: Flight) -> bool:
        """Have the ranks agree on this step, and start its sums; returns whether it is to be left out instead."""
        scaled = hasattr(self, "found_inf")
        if flight.early:
            if scaled:
                flight.error = AlgorithmError("a GradScaler makes a step after others without one, of which some sums have started already")
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
        """What this rank's gradient is multiplied by besides."""
        if self._settings.clip_norm is None or self._everything:
            return 1.0
        norm = header.norm_of(member.parameter.grad for member in self._members) * factor
        return self._settings.clipped(finite_norm(norm), self.comm.size)

    def _finish(self, flight: Flight) -> None:
        """Wait for the sums, and apply them."""
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
