"""The state of an optimiser's sums, that is residuals and thresholds.

It can be saved by each rank or gathered on one, and loaded by any number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparseallreduce.errors import AlgorithmError, CheckpointError
from sparseallreduce.runtime.objects import agreed, collective, gather, gather_on_first
from sparseallreduce.streams.kernels.backend import array_module, as_host
from sparseallreduce.torch import replicas
from sparseallreduce.torch.buckets import Bucket, Member, sum_dtype

if TYPE_CHECKING:
    from sparseallreduce.torch.optimizer import DistributedOptimizer

__all__ = ["Waiting", "gathered", "load", "of_sums", "residuals", "synchronize"]

Array = NDArray[Any]
VERSION = 1


class Waiting:
    """Residuals and velocities by parameter, and reducer states by bucket, kept until the buckets are arranged."""

    def __init__(self) -> None:
        self.residuals: dict[int, Array] = {}
        self.velocities: dict[int, Array] = {}
        self.reducers: dict[tuple[Any, ...], dict[str, Any]] = {}

    def take_from(self, buckets: Sequence[Bucket], unit: Callable[[Member], float]) -> None:
        """Take over the residuals, velocities and reducer states of buckets.

        ``unit`` returns the factor of a parameter's gradient in the residual.
        """
        self.velocities |= {index: own.copy() for index, own in _velocities(buckets).items()}
        for bucket in buckets:
            if bucket.feedback is not None:
                residual = as_host(bucket.feedback.residual)
                self.residuals |= {member.index: residual[own].copy() for member, own in bucket.parts()}
                self.reducers[bucket.key()] = bucket.feedback.reducer.state()
            elif bucket.carry is not None:
                carry = bucket.carry
                self.residuals |= {member.index: carry[own] * carry.dtype.type(unit(member)) for member, own in bucket.parts()}

    def give_to(self, buckets: Sequence[Bucket], unit: Callable[[Member], float]) -> None:
        """Move the residuals, velocities and reducer states into the buckets that they belong to.

        A bucket without a residual adds the values to its next sum.
        """
        for bucket in buckets:
            for member, own in bucket.parts():
                velocity = self.velocities.pop(member.index, None)
                if velocity is not None and bucket.velocity is not None:
                    bucket.velocity[own] = array_module(bucket.velocity).asarray(velocity)
                if member.index not in self.residuals or (bucket.feedback is None and unit(member) == 0):
                    continue  # with a learning rate of 0 the value cannot be converted to a gradient yet
                residual = self.residuals.pop(member.index)
                if bucket.feedback is not None:
                    bucket.feedback.residual[own] = residual
                elif residual.any():
                    if bucket.carry is None:
                        bucket.carry = np.zeros(bucket.size, bucket.vector.dtype)
                    bucket.carry[own] = residual / residual.dtype.type(unit(member))
            state = self.reducers.pop(bucket.key(), None)
            if state is not None and bucket.feedback is not None and state["reducer"] == bucket.feedback.reducer.name:
                assert bucket.make is not None
                bucket.feedback.reducer = bucket.make(bucket.size, state["k"])
                bucket.feedback.reducer.restore(state)
        self.reducers.clear()

    def as_tensors(self) -> dict[str, Any]:
        """Return the state as tensors, numbers and texts, which ``torch.load`` accepts with ``weights_only=True``."""
        reducers = [{"bucket": list(key), "state": _as_tensors(state)} for key, state in self.reducers.items()]
        held = {"residuals": self.residuals, "velocities": self.velocities}
        tensors = {kind: {index: torch.from_numpy(own.copy()) for index, own in arrays.items()} for kind, arrays in held.items()}
        return {**tensors, "reducers": reducers}

    @classmethod
    def from_tensors(cls, saved: Mapping[str, Any]) -> Waiting:
        """Return the object for a state of :meth:`as_tensors`."""
        waiting = cls()
        waiting.residuals = {index: own.numpy().reshape(-1).copy() for index, own in saved["residuals"].items()}
        waiting.velocities = {index: own.numpy().reshape(-1).copy() for index, own in saved.get("velocities", {}).items()}
        waiting.reducers = {tuple(each["bucket"]): _as_arrays(each["state"]) for each in saved["reducers"]}
        return waiting


def residuals(optimizer: DistributedOptimizer) -> list[torch.Tensor | None]:
    """Return a copy of the residual of each parameter, or None for a parameter without one."""
    found = _residuals(optimizer)
    return [
        torch.from_numpy(found[member.index].copy()).reshape(member.parameter.shape) if member.index in found else None
        for member in optimizer._members
    ]


def _residuals(optimizer: DistributedOptimizer) -> dict[int, Array]:
    found = dict(optimizer._waiting.residuals)
    for bucket in optimizer._buckets:
        if bucket.feedback is not None:
            residual = as_host(bucket.feedback.residual)
            found |= {member.index: residual[own] for member, own in bucket.parts()}
        elif bucket.carry is not None:
            found |= {member.index: bucket.carry[own] * bucket.carry.dtype.type(optimizer._unit(member)) for member, own in bucket.parts()}
    return found


def _velocities(buckets: Sequence[Bucket]) -> dict[int, Array]:
    """Return the velocities by parameter, for parameters that have one, in the memory of the host."""
    found: dict[int, Array] = {}
    for bucket in buckets:
        if bucket.velocity is not None:
            velocity = as_host(bucket.velocity)
            found |= {member.index: velocity[own] for member, own in bucket.parts()}
    return found


def of_sums(optimizer: DistributedOptimizer) -> dict[str, Any]:
    """Return the entry "sums" of ``state_dict``, which ``torch.load`` accepts with ``weights_only=True``."""
    everything = Waiting()
    everything.residuals = _residuals(optimizer)
    everything.velocities = optimizer._waiting.velocities | _velocities(optimizer._buckets)
    everything.reducers = dict(optimizer._waiting.reducers)
    everything.reducers |= {bucket.key(): bucket.feedback.reducer.state() for bucket in optimizer._buckets if bucket.feedback is not None}
    rank, tensors = optimizer.comm.rank, everything.as_tensors()
    return {
        "version": VERSION,
        "optimiser": type(optimizer).__name__,
        "ranks": optimizer.comm.size,
        "steps": optimizer.steps,
        "layouts": list(optimizer._layouts),
        "masters": optimizer._masters.state(member.parameter for member in optimizer._members),
        "residuals": {rank: tensors["residuals"]},
        "velocities": {rank: tensors["velocities"]},
        "reducers": {rank: tensors["reducers"]},
    }


@collective
def gathered(optimizer: DistributedOptimizer) -> dict[str, Any] | None:
    """Return the state with the residuals of all ranks on rank 0, and None on other ranks. Collective."""
    comm = optimizer.comm
    own: dict[str, Any] = agreed(comm, optimizer.state_dict)
    sums = own["sums"]
    whole = {kind: _gathered(optimizer, sums[kind][comm.rank]) for kind in ("residuals", "velocities")}
    reducers = gather(comm, sums["reducers"][comm.rank])
    if comm.rank > 0:
        return None
    return {**own, "sums": {**sums, **whole, "reducers": dict(enumerate(reducers))}}


def _gathered(optimizer: DistributedOptimizer, mine: Mapping[int, torch.Tensor]) -> dict[int, dict[int, torch.Tensor]]:
    """Return what each rank holds for its parameters on rank 0. Collective."""
    comm, ranks = optimizer.comm, optimizer.comm.size
    of_ranks: dict[int, dict[int, torch.Tensor]] = {rank: {} for rank in range(ranks)}
    for index in sorted({index for held in gather(comm, list(mine)) for index in held}):
        member = optimizer._members[index]
        size, dtype = member.parameter.numel(), np.float64 if sum_dtype(member.parameter) == torch.float64 else np.float32
        array = mine[index].numpy().reshape(-1) if index in mine else np.zeros(size, dtype)
        whole = gather_on_first(comm, array, [size] * ranks)
        if comm.rank == 0:
            for rank, part in enumerate(np.split(whole, ranks)):
                of_ranks[rank][index] = torch.from_numpy(part.copy())
    return of_ranks


@collective
def load(optimizer: DistributedOptimizer, state_dict: Any, missing: str) -> None:
    """Load a state. See :meth:`DistributedOptimizer.load_state_dict`."""
    comm = optimizer.comm
    agreed(comm, optimizer._expect_idle)
    states = agreed(comm, lambda: _checked(optimizer, state_dict, missing))
    held: dict[int, tuple[Any, Any, Any]] = {}
    for state in states:
        sums = state.get("sums", {})
        velocities = sums.get("velocities", {})
        held |= {rank: (own, sums["reducers"].get(rank, []), velocities.get(rank, {})) for rank, own in sums.get("residuals", {}).items()}
    first = states[0].get("sums")
    saved = None if first is None else (first["ranks"], first["steps"])
    gathered = gather(comm, (saved, sorted(held)))
    mine = agreed(comm, lambda: _shared_out(gathered, comm, missing))
    agreed(comm, lambda: _load_base(optimizer, states[0]))
    ranks = comm.size if saved is None else saved[0]
    optimizer._buckets, optimizer._flight = [], None
    waiting = optimizer._waiting = Waiting()
    for rank in mine:
        _add_to(waiting.residuals, held[rank][0], comm.size / ranks)
        _add_to(waiting.velocities, held[rank][2], comm.size / ranks)
    if all(own == [rank] for rank, own in enumerate(gather(comm, mine))) and ranks == comm.size:
        waiting.reducers = {tuple(each["bucket"]): _as_arrays(each["state"]) for each in held[comm.rank][1]}
    parameters = [member.parameter for member in optimizer._members]
    optimizer._masters.restore(parameters, {} if first is None else first["masters"])
    optimizer.steps = 0 if first is None else first["steps"]
    optimizer._layouts = bytes(len(parameters)) if first is None else bytes(first["layouts"])
    optimizer._fresh = True
    optimizer._collect()


def _add_to(arrays: dict[int, Array], held: Mapping[int, torch.Tensor], factor: float) -> None:
    """Add values that a rank has saved, scaled for a mean over the new number of ranks."""
    for index, own in held.items():
        scaled = np.array(own.numpy()).reshape(-1)
        if factor != 1:
            scaled *= scaled.dtype.type(factor)
        arrays[index] = arrays[index] + scaled if index in arrays else scaled


def _checked(optimizer: DistributedOptimizer, state_dict: Any, missing: str) -> list[Mapping[str, Any]]:
    """Return the given states as a list, after checking that they fit the parameters."""
    if missing not in ("raise", "zeros"):
        raise AlgorithmError(f"missing is 'raise' or 'zeros', not {missing!r}")
    states = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
    if not states or not all(isinstance(state, Mapping) and {"state", "param_groups"} <= set(state) for state in states):
        raise CheckpointError("load_state_dict takes what state_dict or gather_state_dict has returned, or a list of that")
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    for state in states:
        of_state = [len(group["params"]) for group in state["param_groups"]]
        if of_state != lengths:
            raise CheckpointError(f"this state is of groups of {of_state} parameters, and this optimiser has groups of {lengths}")
        sums = state.get("sums")
        if sums is None:
            continue
        if sums["version"] != VERSION:
            raise CheckpointError(f"this state is of version {sums['version']}, and this library reads version {VERSION}")
        if sums["optimiser"] != type(optimizer).__name__:
            raise CheckpointError(f"this state is of a {sums['optimiser']}, and this is a {type(optimizer).__name__}")
        for own in (*sums["residuals"].values(), *sums.get("velocities", {}).values()):
            for index, residual in own.items():
                parameter = optimizer._members[index].parameter
                if (residual.numel(), residual.dtype) != (parameter.numel(), sum_dtype(parameter)):
                    raise CheckpointError(
                        f"this state has a residual of {residual.numel()} elements of {residual.dtype} for "
                        f"{optimizer._members[index].name} of shape {tuple(parameter.shape)}: it is of other parameters"
                    )
    if len({(state["sums"]["ranks"], state["sums"]["steps"]) if "sums" in state else None for state in states}) > 1:
        raise CheckpointError("these states are not of the same step of one run")
    return states


def _shared_out(gathered: Sequence[tuple[Any, list[int]]], comm: Any, missing: str) -> list[int]:
    """Return the saved ranks whose residuals this rank takes over."""
    of_run = {saved for saved, _ in gathered}
    if len(of_run) > 1:
        raise CheckpointError("the ranks load states of different runs or steps: load those of one step")
    saved = gathered[0][0]
    if saved is None:
        return []
    mine, lost = [], []
    for rank in range(saved[0]):
        holders = [holder for holder, (_, held) in enumerate(gathered) if rank in held]
        if not holders:
            lost.append(rank)
        elif comm.rank == (rank % comm.size if rank % comm.size in holders else holders[0]):
            mine.append(rank)
    if lost and missing == "raise":
        raise CheckpointError(
            f"no rank brings the residuals of {lost[:8]} of the {saved[0]} ranks that have saved: load the state that each rank has saved, "
            "several on a rank if there are fewer now, or one of gather_state_dict(); or begin without them: missing='zeros'"
        )
    return mine


def _load_base(optimizer: DistributedOptimizer, state: Mapping[str, Any]) -> None:
    """Load the state of the inner optimiser in the precision in which it was saved."""
    own = {name: value for name, value in state.items() if name != "sums"}
    own["param_groups"] = [
        {name: given for name, given in (optimizer.defaults | now | group).items() if name != "params"} | {"params": group["params"]}
        for now, group in zip(optimizer.param_groups, own["param_groups"])
    ]
    torch.optim.Optimizer.load_state_dict(optimizer, own)
    numbers = [number for group in own["param_groups"] for number in group["params"]]
    numbered = {number: member.parameter for number, member in zip(numbers, optimizer._members)}
    for number, kept in own["state"].items():
        parameter = numbered.get(number)
        if parameter is not None and parameter in optimizer._masters:  # PyTorch has converted their state to 16 bits
            optimizer.state[parameter] = {name: _moved(value, parameter) for name, value in kept.items()}


def _moved(value: Any, parameter: torch.Tensor) -> Any:
    return value.detach().to(parameter.device, copy=True) if isinstance(value, torch.Tensor) and value.ndim else value


@collective
def synchronize(optimizer: DistributedOptimizer) -> None:
    """Set the parameters, the optimiser state and the number of steps to those of rank 0, and reset the reducers. Collective."""
    comm = optimizer.comm
    replicas.broadcast(comm, (member.parameter for member in optimizer._members))
    kept = None
    if comm.rank == 0:
        by_index = {optimizer._index[each]: state for each, state in optimizer.state.items() if each in optimizer._index}
        masters = optimizer._masters.state(member.parameter for member in optimizer._members)
        kept = (optimizer.steps, by_index, masters, optimizer._layouts)
    if comm.size > 1:
        kept = gather(comm, kept)[0]
    assert kept is not None
    optimizer.steps, by_index, masters, optimizer._layouts = kept
    if comm.rank > 0:
        optimizer.state = defaultdict(dict, {optimizer._members[index].parameter: state for index, state in by_index.items()})
        optimizer._masters.restore([member.parameter for member in optimizer._members], masters)
    optimizer._waiting.take_from(optimizer._buckets, optimizer._unit)
    optimizer._waiting.reducers.clear()
    optimizer._buckets = []
    optimizer._collect()


def _as_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _as_tensor(value) for name, value in state.items()}


def _as_tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    return list(map(_as_tensor, value)) if isinstance(value, tuple | list) else value


def _as_arrays(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy().copy() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
