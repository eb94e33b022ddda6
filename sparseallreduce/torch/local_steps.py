"""Optimisers whose ranks take several steps alone, and then sum what these have changed: SparseLoCo, DiLoCo and local SGD."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError, CheckpointError, MismatchError, StreamTypeError
from sparseallreduce.reducers import ErrorFeedback, TopkA
from sparseallreduce.runtime.api import allreduce
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather, tell, together
from sparseallreduce.streams.selection import ChunkTopK
from sparseallreduce.streams.stream import SparseStream

__all__ = ["DiLoCo", "LocalSGD", "LocalSteps", "SparseLoCo"]

Array = NDArray[Any]
VERSION = 1


class LocalSteps(torch.optim.Optimizer):
    """The base of optimisers that take ``H`` steps of another optimiser on each rank alone between two sums over the ranks.

    After ``H`` steps a rank's *change* is what its parameters were after the last sum, less what they are. The ranks combine their changes,
    and all set their parameters to the same values, those after the last sum less the combined change times ``outer_lr``.

    It is an ``Optimizer`` with the parameter groups of the inner one, for learning rate schedulers and the like. Buffers, such as running
    means of normalisation layers, and the state of the inner optimiser stay each rank's own.

    Parameters
    ----------
    inner : torch.optim.Optimizer
        Takes the steps of each rank. Its parameters are set to the values of rank 0. Construction is collective.
    H : int
        Steps between two sums, at least 1.
    outer_lr : float
        What the combined change is multiplied by.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.

    Attributes
    ----------
    steps : int
        Steps of the inner optimiser.
    sums : int
        Sums over the ranks.

    Raises
    ------
    SparseAllreduceError
        On every rank the same: AlgorithmError or StreamTypeError for an argument that is wrong on any rank, MismatchError if ranks differ
        in their settings or in the number of their parameters.
    """

    def __init__(self, inner: torch.optim.Optimizer, H: int = 30, *, outer_lr: float = 1.0, comm: Any = None) -> None:
        self.comm = resolve(comm)
        self.inner, self.H, self.outer_lr = inner, H, outer_lr
        self.steps = self.sums = 0
        together(self.comm, self._begin)

    def _begin(self) -> None:
        agreed(self.comm, self._check)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.state = self.inner.state
        self._parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        settings = {name: str(value) for name, value in self._settings().items()}
        settings["elements of the parameters"] = str([parameter.numel() for parameter in self._parameters])
        _check_alike(gather(self.comm, settings))
        self._anchor = self._flat()
        self._take(broadcast_arrays(self.comm, {"parameters": self._anchor} if self.comm.rank == 0 else None)["parameters"])

    def _check(self) -> None:
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise StreamTypeError(f"inner is an optimiser of PyTorch's, such as torch.optim.AdamW, not {type(self.inner).__name__}")
        if hasattr(self.inner, "gather_state_dict") or isinstance(self.inner, LocalSteps):
            raise AlgorithmError(f"{type(self.inner).__name__} sums over the ranks already: pass an optimiser of PyTorch's")
        if self.H < 1:
            raise AlgorithmError(f"H is the number of steps between two sums, at least 1, not {self.H}")
        parameters = [parameter for group in self.inner.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if not parameter.is_floating_point() or parameter.is_meta:
                raise StreamTypeError(f"parameters are real numbers in memory, not {parameter.dtype} on {parameter.device}")

    def _settings(self) -> dict[str, Any]:
        """Return what has to be the same on all ranks, by name."""
        return {"optimiser": type(self).__name__, "H": self.H, "outer_lr": self.outer_lr}

    @abstractmethod
    def _combined(self, change: Array) -> Array | SparseStream:
        """Return the change that all ranks make, from this rank's own, which is left as it is. Collective."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the inner optimiser; after every ``H`` of them, combine the changes of all ranks, which is collective.

        Raises
        ------
        SparseAllreduceError
            On every rank the same, if the sum fails on any. The parameters are those before the sum then, to rounding where they had been
            written, and :meth:`synchronize` goes on.
            What the inner optimiser raises on one rank is raised on the others in their next sum.
        """
        try:
            loss = self.inner.step(closure)
            self.steps += 1
        except BaseException as error:
            raise tell(self.comm, error) from None
        if self.steps % self.H == 0:
            self.synchronize()
        return loss

    def synchronize(self) -> None:
        """Combine the changes since the last sum now, so that all ranks have the same parameters, as at the end of training. Collective."""
        together(self.comm, self._combine)

    def _combine(self) -> None:
        change, kept = agreed(self.comm, lambda: (self._change(), self._kept()))
        before, written = self._anchor, False
        try:
            combined = self._combined(change)
            anchor, rate = before.copy(), before.dtype.type(self.outer_lr)
            if isinstance(combined, SparseStream) and not combined.is_dense:
                anchor[combined.indices] -= rate * combined.values
            else:
                anchor -= rate * (combined.to_dense() if isinstance(combined, SparseStream) else combined)
            written = True
            agreed(self.comm, lambda: self._take(anchor))
        except BaseException:
            self._keep(kept, same_ranks=True)  # the parameters have the change again, which the next sum takes
            if written:
                self._take(before - change)
                self._anchor = before
            raise
        self.sums += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse to add parameters once there are some: a sum has all of them."""
        if hasattr(self, "_parameters"):
            raise AlgorithmError("parameters cannot be added: construct a new optimiser, and load the state of the inner one")
        super().add_param_group(param_group)

    def check_replicas(self) -> None:
        """Make sure that all ranks had bitwise identical parameters after the last sum. Collective.

        Raises
        ------
        MismatchError
            On every rank, if they had not.
        """
        digests = gather(self.comm, hashlib.blake2b(self._anchor.tobytes()).digest())
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise MismatchError(f"the replicas differ: rank {rank} has other parameters than rank 0")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: that of the inner optimiser, and under ``"local_steps"`` that of the sums.

        Each rank saves its own, with the parameters of that time.
        """
        sums = {"version": VERSION, **self._settings(), "ranks": self.comm.size, "steps": self.steps, "sums": self.sums}
        sums |= {"anchor": torch.from_numpy(self._anchor.copy()), "kept": self._kept()}
        return {**self.inner.state_dict(), "local_steps": sums}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state that this rank has saved; the model's parameters are those of that time. Collective.

        With as many ranks, every bit is as it would have been. A rank without a state of its own, as where there are more ranks now, loads
        that of rank 0. With another number of ranks SparseLoCo leaves out what they have kept for later sums.

        Raises
        ------
        CheckpointError
            On every rank, if a state does not fit.
        """
        together(self.comm, lambda: self._load(state_dict))

    def _load(self, state_dict: Mapping[str, Any]) -> None:
        sums = agreed(self.comm, lambda: self._checked(state_dict))
        everyones = gather(self.comm, (sums["ranks"], sums["steps"], sums["sums"]))
        agreed(self.comm, lambda: self._same_run(everyones))
        inner = {name: value for name, value in state_dict.items() if name != "local_steps"}
        agreed(self.comm, lambda: self.inner.load_state_dict(inner))
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.steps, self.sums = sums["steps"], sums["sums"]
        self._anchor = sums["anchor"].numpy().astype(self._anchor.dtype)
        self._keep(sums["kept"], same_ranks=sums["ranks"] == self.comm.size)

    def _checked(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        sums = state_dict.get("local_steps")
        if sums is None:
            raise CheckpointError("this state is none of local steps: load it into the inner optimiser")
        for name, value in {"version": VERSION, **self._settings()}.items():
            if sums.get(name) != value:
                raise CheckpointError(f"this state has {name} {sums.get(name)!r}, and this optimiser has {value!r}")
        if len(sums["anchor"]) != len(self._anchor):
            raise CheckpointError(f"this state is of {len(sums['anchor'])} parameters, and this optimiser has {len(self._anchor)}")
        return sums  # type: ignore[no-any-return]

    def _same_run(self, everyones: Sequence[tuple[int, int, int]]) -> None:
        if len(set(everyones)) > 1:
            raise CheckpointError("the ranks load states of different steps: load those of one step")

    def _kept(self) -> dict[str, Any]:
        """Return what later sums depend on, as tensors, numbers and texts; no later step changes the tensors."""
        return {}

    def _keep(self, kept: Mapping[str, Any], same_ranks: bool) -> None:
        """Take over what :meth:`_kept` has returned, on this rank if the number of ranks is the same."""

    def _flat(self) -> Array:
        """Return the parameters as one vector, of float64 if any of them is."""
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in self._parameters) else torch.float32
        parts = [each.detach().reshape(-1).to("cpu", dtype) for each in self._parameters]
        return torch.cat(parts).numpy() if parts else np.empty(0, np.float32)

    def _change(self) -> Array:
        """Return what the parameters were after the last sum, as they were rounded then, less what they are."""
        change, begin = self._flat(), 0
        for parameter in self._parameters:
            part, end = change[begin : begin + parameter.numel()], begin + parameter.numel()
            before = torch.from_numpy(self._anchor[begin:end]).to(parameter.dtype).to(torch.from_numpy(part).dtype).numpy()
            np.subtract(before, part, out=part)
            begin = end
        return change

    def _take(self, anchor: Array) -> None:
        """Set all parameters."""
        begin = 0
        with torch.no_grad():
            for parameter in self._parameters:
                end = begin + parameter.numel()
                parameter.copy_(torch.from_numpy(anchor[begin:end]).reshape(parameter.shape))
                begin = end
        self._anchor = anchor

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{type(self).__name__} works with other processes and cannot be copied or pickled: use state_dict()")


class SparseLoCo(LocalSteps):
    """SparseLoCo (Sarfi et al., *Communication efficient LLM pre-training with SparseLoCo*, 2025, algorithm 1).

    A sum has four parts. Each rank adds its change to what earlier sums left of it, times ``beta``; selects the largest values of each
    chunk; sends these, in 2 bits each; and keeps the rest, and what the 2 bits lack. The mean over the ranks is applied.

    Parameters
    ----------
    inner, H, outer_lr, comm
        As for :class:`LocalSteps`.
    density : float
        The share of the parameters that a sum sends, above 0 and at most 1.
    beta : float
        What is left of earlier changes counts by this factor in each sum, above 0 and at most 1; it takes the place of momentum.
    codec : str
        How values travel: "qsgd2", "qsgd4", "qsgd8", "float16", "bfloat16" or "exact"; see :class:`~sparseallreduce.TopkA`.
    chunk : int
        Parameters in a chunk.

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
        *,
        comm: Any = None,
    ) -> None:
        self.density, self.beta, self.codec, self.chunk = density, beta, codec, chunk
        super().__init__(inner, H, outer_lr=outer_lr, comm=comm)
        self._feedback = agreed(self.comm, self._new_feedback)

    def _check(self) -> None:
        super()._check()
        if not 0 < self.density <= 1:
            raise AlgorithmError(f"density is the share of the parameters that a sum sends, above 0 and at most 1, not {self.density}")

    def _settings(self) -> dict[str, Any]:
        own = {"density": self.density, "beta": self.beta, "codec": self.codec, "chunk": self.chunk}
        return super()._settings() | own

    def _new_feedback(self) -> ErrorFeedback:
        size = len(self._anchor)
        k = min(size, max(1, round(self.density * size)))
        reducer = TopkA(size, k, selector=partial(ChunkTopK, chunk=self.chunk), value_codec=self.codec)
        return ErrorFeedback(reducer, self._anchor.dtype, decay=self.beta)

    def _combined(self, change: Array) -> Array | SparseStream:
        return self._feedback.step(change, self.comm)

    def _kept(self) -> dict[str, Any]:
        state = self._feedback.state()
        return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in state.items()}

    def _keep(self, kept: Mapping[str, Any], same_ranks: bool) -> None:
        self._feedback = self._new_feedback()
        if same_ranks:
            self._feedback.restore({name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in kept.items()})


class DiLoCo(LocalSteps):
    """DiLoCo (Douillard et al., *DiLoCo: Distributed low-communication training of language models*, 2023, algorithm 1).

    The mean change of the ranks, which travels whole, is the gradient of an outer SGD with Nesterov's momentum.

    Parameters
    ----------
    inner, H, outer_lr, comm
        As for :class:`LocalSteps`; the paper's outer rate is 0.7.
    outer_momentum : float
        Of the outer SGD, from 0 to below 1.
    nesterov : bool
        Whether that is Nesterov's.

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
        comm: Any = None,
    ) -> None:
        self.outer_momentum, self.nesterov = outer_momentum, nesterov
        self._velocity: Array | None = None
        super().__init__(inner, H, outer_lr=outer_lr, comm=comm)

    def _check(self) -> None:
        super()._check()
        if not 0 <= self.outer_momentum < 1:
            raise AlgorithmError(f"outer_momentum is from 0 to below 1, not {self.outer_momentum}")

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"outer_momentum": self.outer_momentum, "nesterov": self.nesterov}

    def _combined(self, change: Array) -> Array:
        mean = allreduce(SparseStream.from_dense(change), self.comm, "mean").to_dense()
        if not self.outer_momentum:
            return mean
        factor = mean.dtype.type(self.outer_momentum)
        velocity = mean.copy() if self._velocity is None else factor * self._velocity + mean
        combined = mean + factor * velocity if self.nesterov else velocity
        self._velocity = velocity
        return combined

    def _kept(self) -> dict[str, Any]:
        return {} if self._velocity is None else {"velocity": torch.from_numpy(self._velocity)}

    def _keep(self, kept: Mapping[str, Any], same_ranks: bool) -> None:
        self._velocity = kept["velocity"].numpy() if "velocity" in kept else None  # the same on all ranks, however many


class LocalSGD(DiLoCo):
    """Local SGD (Stich, *Local SGD converges fast and communicates little*, 2019): after ``H`` steps parameters are set to their mean.

    Parameters
    ----------
    inner, H, comm
        As for :class:`LocalSteps`.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> model = torch.nn.Linear(20, 10)
    >>> optimizer = LocalSGD(torch.optim.SGD(model.parameters(), lr=0.1), H=8, comm=sar.SERIAL)
    """

    def __init__(self, inner: torch.optim.Optimizer, H: int = 30, *, comm: Any = None) -> None:
        super().__init__(inner, H, outer_lr=1.0, outer_momentum=0.0, nesterov=False, comm=comm)


def _check_alike(settings: Sequence[Mapping[str, str]]) -> None:
    for name, value in settings[0].items():
        for rank, others in enumerate(settings):
            if others.get(name) != value:
                raise MismatchError(f"the ranks differ: {name} is {value} on rank 0, and {others.get(name)} on rank {rank}")
