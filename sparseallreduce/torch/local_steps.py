"""Optimisers whose ranks make several steps on their own and then combine their changes: SparseLoCo, DiLoCo and local SGD."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from sparseallreduce import optim
from sparseallreduce.errors import AlgorithmError, CheckpointError, StreamTypeError
from sparseallreduce.optim.local_vectors import Vector
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, report_error, together
from sparseallreduce.torch.flight import unscaled
from sparseallreduce.torch.warmup import average_gradients

__all__ = ["DiLoCo", "LocalSGD", "LocalSteps", "SparseLoCo"]

Array = NDArray[Any]


class LocalSteps(torch.optim.Optimizer):
    """The base of optimisers that make ``H`` steps of another optimiser on each rank between two sums over the ranks.

    After ``H`` steps the *change* of a rank is the value of its parameters after the last sum minus their value now. The ranks combine
    their changes. All ranks then set their parameters to the values after the last sum minus ``outer_lr`` times the combined change.

    It has the parameter groups of the inner optimiser, so that learning rate schedulers work with it. Buffers, such as the running means of
    normalisation layers, and the state of the inner optimiser are not shared between ranks. Construction is collective.

    Parameters
    ----------
    inner : torch.optim.Optimizer
        Makes the steps of each rank. Its parameters are set to the values of rank 0.
    H : int
        The number of steps between two sums of the same parameters, at least 1.
    outer_lr : float
        The factor of the combined change.
    delay : int
        The number of steps between the start of a sum and its application, from 0 to ``H``. With 0, a rank waits for the sum at once.
        Otherwise it continues from its own parameters, and these later changes are part of the next sum.
    fragments : int
        The parameters are divided into this number of parts of about equal size, at most ``H``, which are summed in turn, ``H / fragments``
        steps apart.
    progress : str
        How a running sum advances: "manual", in each step, or "thread", see :func:`sparseallreduce.iallreduce`.
    warmup : int
        The number of steps before the local ones, which the ranks make by the mean of their gradients. Models that have learned nothing yet
        gain most from it.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Attributes
    ----------
    local : sparseallreduce.optim.LocalSteps
        The object that combines the changes.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: AlgorithmError or StreamTypeError if an argument is wrong on any rank, MismatchError if the ranks
        differ in their settings or in the number of their parameters.
    """

    state: Any
    param_groups: Any

    _step_supports_amp_scaling = True  # a GradScaler would leave out a step on some ranks, which then fall behind in their sums

    def __init__(self, inner: torch.optim.Optimizer, *, comm: Any = None, **settings: Any) -> None:
        comm = resolve(comm)
        self.inner = inner
        together(comm, lambda: self._begin(comm, settings))

    def _begin(self, comm: Any, settings: Mapping[str, Any]) -> None:
        agreed(comm, self._check)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        self.local: optim.LocalSteps = self._new_local(_Tensors(self.inner.param_groups), comm=comm, **settings)

    def _check(self) -> None:
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise StreamTypeError(f"inner is an optimiser of PyTorch's, such as torch.optim.AdamW, not {type(self.inner).__name__}")
        if hasattr(self.inner, "gather_state_dict") or isinstance(self.inner, LocalSteps):
            raise AlgorithmError(f"{type(self.inner).__name__} sums over the ranks already: pass an optimiser of PyTorch's")
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if not parameter.is_floating_point() or parameter.is_meta:
                    raise StreamTypeError(f"parameters are real numbers in memory, not {parameter.dtype} on {parameter.device}")

    @abstractmethod
    def _new_local(self, parameters: Vector, **settings: Any) -> optim.LocalSteps:
        """Return the object that combines the changes of these parameters."""

    @property
    def comm(self) -> Any:
        """The communicator."""
        return self.local.comm

    @property
    def H(self) -> int:
        """The number of steps between two sums of the same parameters."""
        return self.local.H

    @property
    def outer_lr(self) -> float:
        """The factor of the combined change."""
        return self.local.outer_lr

    @property
    def steps(self) -> int:
        """The number of steps of the inner optimiser."""
        return self.local.steps

    @property
    def sums(self) -> int:
        """The number of sums over the ranks, where each fragment counts."""
        return self.local.sums

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the inner optimiser. After every ``H`` steps, combine the changes of all ranks, which is collective.

        If a ``GradScaler`` finds infinite gradients on a rank, the step counts, but does not change the parameters of this rank.

        Raises
        ------
        SparseAllreduceError
            The same error on every rank, if the sum fails on any rank. The parameters then have the values from before the sum, and
            :meth:`synchronize` repeats it.

            If the inner optimiser raises an error on one rank, the other ranks raise it in their next sum.
        """
        try:
            loss = self._warmup_step(closure) if self.local.warming_up else self._inner_step(closure)
        except BaseException as error:
            raise report_error(self.comm, error) from None
        self.local.step()
        return loss

    def _warmup_step(self, closure: Callable[[], Any] | None) -> Any:
        """Make a step of the inner optimiser by mean gradients, unless one of them is infinite on any rank."""

        def average() -> bool:
            parameters = (parameter for group in self.param_groups for parameter in group["params"])
            return average_gradients(self.local, parameters, *unscaled(self))

        def averaged() -> Any:
            assert closure is not None
            loss = closure()
            average()
            return loss

        if closure is None:
            return self.inner.step() if average() else None
        return self.inner.step(averaged)

    def _inner_step(self, closure: Callable[[], Any] | None) -> Any:
        """Make a step of the inner optimiser by unscaled gradients, unless one of them is infinite."""
        factor, infinite = unscaled(self)
        if infinite:
            return None
        if factor != 1:
            gradients = (parameter.grad for group in self.param_groups for parameter in group["params"])
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(factor)
        return self.inner.step(closure)

    def synchronize(self) -> None:
        """Combine the changes since the last sum now, so that all ranks have the same parameters. Collective.

        Call it at the end of training.
        """
        self.local.synchronize()

    def finish(self) -> None:
        """Wait for the running sums, and apply them. Collective."""
        self.local.finish()

    def set_communicator(self, comm: Any) -> None:
        """Continue with the ranks of another communicator.

        Each new rank constructs the same optimiser at this time. See :class:`.optim.LocalSteps`.
        """
        comm = resolve(comm)

        def move() -> None:
            agreed(comm, lambda: None)  # matches the check in the constructor on new ranks
            self.local.set_communicator(comm)

        together(comm, move)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: parameters cannot be added after construction, because each sum contains all of them."""
        if hasattr(self, "local"):
            raise AlgorithmError("parameters cannot be added: construct a new optimiser, and load the state of the inner one")
        super().add_param_group(param_group)

    def check_replicas(self) -> None:
        """Check that all ranks had bitwise identical parameters after the last sum. Collective.

        Raises
        ------
        MismatchError
            On every rank, if the parameters differ.
        """
        self.local.check_replicas()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: that of the inner optimiser, and the state of the sums under ``"local_steps"``.

        For a checkpoint, each rank saves its own state together with its parameters. The call waits for a running sum, which is still
        applied later.
        """
        return {**self.inner.state_dict(), "local_steps": _as_tensors(self.local.state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state that this rank has saved, after the parameters of the model were loaded. Collective.

        With the same number of ranks, training continues with bitwise identical results. A rank without a state of its own, as when there
        are more ranks than before, loads the state of rank 0. With fewer ranks, the residuals that SparseLoCo kept on the other ranks are
        lost.

        Raises
        ------
        CheckpointError
            On every rank, if a state does not fit.
        """
        together(self.comm, lambda: self._load(state_dict))

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        sums = agreed(self.comm, lambda: _sums_of(state_dict))
        self.local.restore(_as_arrays(sums))
        inner = {name: value for name, value in state_dict.items() if name != "local_steps"}
        agreed(self.comm, lambda: self.inner.load_state_dict(inner))
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} works with other processes and cannot be copied or pickled: use state_dict()")


class _Tensors(Vector):
    """The parameters of an optimiser, on any device and also with 16 bits."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._tensors = [parameter for group in groups for parameter in group["params"]]
        double = any(each.dtype == torch.float64 for each in self._tensors)
        super().__init__((each.numel() for each in self._tensors), np.float64 if double else np.float32)
        self._dtype = torch.float64 if double else torch.float32
        self.exact = all(each.dtype == self._dtype for each in self._tensors)

    def read_part(self, number: int, part: slice) -> Array:
        values: Array = self._tensors[number].detach().reshape(-1)[part].to("cpu", self._dtype).numpy()
        return values

    def write_part(self, number: int, part: slice, values: Array) -> None:
        parameter = self._tensors[number]
        with torch.no_grad():
            if parameter.is_contiguous():
                parameter.view(-1)[part].copy_(torch.from_numpy(values))
            else:
                flat = parameter.reshape(-1)  # a copy if its elements are not stored in order
                flat[part].copy_(torch.from_numpy(values))
                parameter.copy_(flat.reshape(parameter.shape))


def _sums_of(state_dict: Mapping[str, Any]) -> Any:
    sums = state_dict.get("local_steps")
    if sums is None:
        raise CheckpointError("this is not a state of local steps: load it into the inner optimiser")
    return sums


def _as_tensors(state: Any) -> Any:
    """Return a state with arrays replaced by tensors, which ``torch.load`` accepts with ``weights_only=True``."""
    if isinstance(state, Mapping):
        return {name: _as_tensors(value) for name, value in state.items()}
    if isinstance(state, list):
        return list(map(_as_tensors, state))
    return torch.from_numpy(state) if isinstance(state, np.ndarray) else state


def _as_arrays(state: Any) -> Any:
    if isinstance(state, Mapping):
        return {name: _as_arrays(value) for name, value in state.items()}
    if isinstance(state, list):
        return list(map(_as_arrays, state))
    return state.numpy() if isinstance(state, torch.Tensor) else state


class SparseLoCo(LocalSteps):
    """SparseLoCo (Sarfi et al., *Communication efficient LLM pre-training with SparseLoCo*, 2025, algorithm 1).

    A sum has four parts. Each rank adds its change to ``beta`` times its residual; selects the values of largest magnitude in each chunk;
    sends them with 2 bits each; and keeps the other values and the quantisation error in the residual. All ranks apply the mean.

    Parameters
    ----------
    inner, H, outer_lr, delay, fragments, progress, warmup, comm
        See :class:`LocalSteps`.
    density : float
        The share of the parameters that a sum sends, above 0 and at most 1.
    beta : float
        The factor of the residual in each sum, above 0 and at most 1. It takes the place of momentum.
    codec : str
        The encoding of the values: "qsgd2", "qsgd4", "qsgd8", "float16", "bfloat16" or "exact"; see :class:`~sparseallreduce.TopkA`.
    chunk : int
        The number of parameters in a chunk.
    average : str
        What all ranks apply of a parameter: "senders", the mean of the values that were sent for it, as the authors' program does; or
        "ranks", the sum of these values divided by the number of ranks, as algorithm 1 says. At small densities few ranks send the same
        parameter, so that a mean over all ranks makes much smaller steps.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> model = torch.nn.Linear(20, 10)
    >>> inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> optimizer = SparseLoCo(inner, H=2, density=0.1, comm=sar.SERIAL)               # under mpiexec without comm
    >>> for _ in range(4):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(20)).square().sum().backward()
    ...     optimizer.step()
    >>> optimizer.sums
    2
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        H: int = 30,
        density: float = 0.02,
        beta: float = 0.95,
        outer_lr: float = 1.0,
        codec: str = "qsgd2",
        chunk: int = 4096,
        average: str = "senders",
        *,
        delay: int = 0,
        fragments: int = 1,
        progress: str = "manual",
        warmup: int = 0,
        comm: Any = None,
    ) -> None:
        own = {"density": density, "beta": beta, "codec": codec, "chunk": chunk, "average": average}
        super().__init__(
            inner, comm=comm, H=H, outer_lr=outer_lr, delay=delay, fragments=fragments, progress=progress, warmup=warmup, **own
        )

    def _new_local(self, parameters: Vector, **settings: Any) -> optim.LocalSteps:
        return optim.SparseLoCo(parameters, **settings)


class DiLoCo(LocalSteps):
    """DiLoCo (Douillard et al., *DiLoCo: Distributed low-communication training of language models*, 2023, algorithm 1).

    The mean change of the ranks, which is sent in full, is the gradient of an outer SGD with Nesterov momentum.

    Parameters
    ----------
    inner, H, outer_lr, delay, fragments, progress, warmup, comm
        See :class:`LocalSteps`. The paper uses an ``outer_lr`` of 0.7.
    outer_momentum : float
        The momentum of the outer SGD, at least 0 and below 1.
    nesterov : bool
        Whether the outer SGD uses Nesterov momentum.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> model = torch.nn.Linear(20, 10)
    >>> optimizer = DiLoCo(torch.optim.AdamW(model.parameters(), lr=0.01), H=10, comm=sar.SERIAL)
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        H: int = 30,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        nesterov: bool = True,
        *,
        delay: int = 0,
        fragments: int = 1,
        progress: str = "manual",
        warmup: int = 0,
        comm: Any = None,
    ) -> None:
        own = {"outer_momentum": outer_momentum, "nesterov": nesterov}
        super().__init__(
            inner, comm=comm, H=H, outer_lr=outer_lr, delay=delay, fragments=fragments, progress=progress, warmup=warmup, **own
        )

    def _new_local(self, parameters: Vector, **settings: Any) -> optim.LocalSteps:
        return optim.DiLoCo(parameters, **settings)


class LocalSGD(LocalSteps):
    """Local SGD (Stich, *Local SGD converges fast and communicates little*, 2019), which averages the parameters after every ``H`` steps.

    Parameters
    ----------
    inner, H, delay, fragments, progress, warmup, comm
        See :class:`LocalSteps`.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> model = torch.nn.Linear(20, 10)
    >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), H=8, comm=sar.SERIAL)
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        H: int = 30,
        *,
        delay: int = 0,
        fragments: int = 1,
        progress: str = "manual",
        warmup: int = 0,
        comm: Any = None,
    ) -> None:
        super().__init__(inner, comm=comm, H=H, delay=delay, fragments=fragments, progress=progress, warmup=warmup)

    def _new_local(self, parameters: Vector, **settings: Any) -> optim.LocalSteps:
        return optim.LocalSGD(parameters, **settings)
