"""Buckets: parameters whose gradients are packed into one vector and summed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.errors import AlgorithmError, StreamTypeError
from sparseallreduce.reducers import ErrorFeedback, Reducer
from sparseallreduce.reducers.base import Reduced, ReducerOperation
from sparseallreduce.reducers.dense import Dense
from sparseallreduce.runtime.api import Request
from sparseallreduce.streams.kernels.backend import array_module
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.torch.devices import as_array
from sparseallreduce.torch.recipes import recipe_of

__all__ = ["Bucket", "Member", "arranged", "grouped", "listed", "sum_dtype"]

Array = NDArray[Any]
Make = Callable[[int, int], Reducer]  # takes the size of the bucket and k, and returns its reducer


@dataclass(eq=False)
class Member:
    """A parameter of an optimiser, and the parameter group that it belongs to."""

    index: int  # the position among the parameters of all groups
    parameter: torch.Tensor
    group: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the parameter in error messages."""
        names, parameters = self.group.get("param_names"), self.group["params"]
        own = next(place for place, each in enumerate(parameters) if each is self.parameter)
        return f"parameter {self.index}" if names is None else f"parameter {names[own]!r}"

    @property
    def kind(self) -> str:
        """The dtype and the type of device, which must be the same on all ranks."""
        return f"{self.parameter.dtype} on a {self.parameter.device.type}"

    @property
    def is_dense(self) -> bool:
        """True if all elements of the gradient are summed.

        By default this holds for parameters with at most one dimension, such as biases and the weights of normalisation layers.
        """
        dense = self.group["dense"]
        return bool(self.parameter.ndim <= 1 if dense is None else dense)


def sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of the residual and the sum: float64 for float64 parameters, otherwise float32."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def listed(groups: Iterable[dict[str, Any]], correction: bool) -> list[Member]:
    """Return the parameters of the groups.

    Parameters
    ----------
    groups : iterable of dict
        The parameter groups of an optimiser.
    correction : bool
        Whether the optimiser uses momentum correction.

    Raises
    ------
    StreamTypeError
        If a parameter has a dtype that is not floating-point, or has no values, as on PyTorch's meta device.
    AlgorithmError
        If a density is outside (0, 1], if a group names an unknown reducer, or if momentum correction does not support its momentum.
    """
    for group in groups:
        if group.get("reducer") is not None:
            recipe_of(group["reducer"])
    parameters = [(parameter, group) for group in groups for parameter in group["params"]]
    for parameter, group in parameters:
        if not parameter.is_floating_point():
            raise StreamTypeError(f"parameters are floating-point numbers, not {parameter.dtype}")
        density = group["density"]
        if correction and (group["nesterov"] or group["dampening"] or not 0 <= group["momentum"] < 1):
            raise AlgorithmError("momentum correction requires a momentum below 1, without Nesterov momentum and dampening")
        if not callable(density) and not 0 < density <= 1:
            raise AlgorithmError(f"the density is a share of the elements, above 0 and at most 1, not {density}")
    members = [Member(index, *each) for index, each in enumerate(parameters)]
    for member in members:
        if member.parameter.is_meta:
            remedy = "give it values first, as by module.to_empty(device=...) and an initialisation"
            raise StreamTypeError(f"{member.name} is on the meta device, where it has a shape and no values: {remedy}")
    return members


def arranged(
    members: Sequence[Member],
    nbytes: int,
    make: Make,
    everything: bool,
    correction: bool = False,
    of_group: Callable[[str], Make] | None = None,
) -> list[Bucket]:
    """Divide the parameters into buckets, beginning with the last parameters, whose gradients back-propagation computes first.

    Parameters
    ----------
    members : sequence of Member
        Parameters without elements are left out.
    nbytes : int
        The largest size of a bucket in bytes. A larger parameter gets a bucket of its own.
    make : callable
        Makes the reducer of a bucket from its size and k.
    everything : bool
        Whether all elements of all gradients are summed, unless their group names a reducer.
    correction : bool
        Whether buckets with a residual also get a velocity, for momentum correction.
    of_group : callable, optional
        Takes the name of a reducer in a group, and returns the callable that makes it.
    """
    full = grouped(members, nbytes, everything)
    buckets = []
    for (dtype, density, _, reducer), own in full:
        chosen = make if reducer is None or of_group is None else of_group(reducer)
        buckets.append(Bucket(own, dtype, None if density is None else chosen))
    for made in buckets:
        if correction and made.feedback is not None:
            made.velocity = array_module(made.vector).zeros_like(made.vector)
    return buckets


def grouped(members: Sequence[Member], nbytes: int, everything: bool) -> list[tuple[Any, list[Member]]]:
    """Return the parameters of each bucket with their dtype, density, device and reducer. See :func:`arranged`."""
    filling: dict[Any, list[Member]] = {}
    full: list[tuple[Any, list[Member]]] = []
    for member in reversed([member for member in members if member.parameter.numel()]):
        dtype, reducer = sum_dtype(member.parameter), member.group.get("reducer")
        dense = everything if reducer is None else reducer == "dense"
        whole = dense or member.is_dense or member.group["density"] == 1
        key = (dtype, None if whole else member.group["density"], member.parameter.device, None if whole else reducer)
        bucket = filling.setdefault(key, [])
        if bucket and sum(each.parameter.numel() for each in [*bucket, member]) * dtype.itemsize > nbytes:
            full.append((key, bucket))
            bucket = filling[key] = []
        bucket.append(member)
    full += filling.items()
    full.sort(key=lambda each: -each[1][-1].index)
    return full


class Bucket:
    """Parameters whose gradients are packed into one vector, with the residual of that vector.

    Parameters
    ----------
    members : sequence of Member
        Parameters with elements, all on one device. The vector is on the same device.
    dtype : torch.dtype
        The dtype of the sum: float32 or float64.
    make : callable, optional
        Makes the reducer from a size and a k. Without it, all elements are summed and there is no residual.

    Attributes
    ----------
    flat : tensor, shape (size,)
        The packed gradients, and after the sum their mean over the ranks.
    vector : array
        The same memory as ``flat``, as an array of NumPy or CuPy.
    carry : ndarray or None
        The former residual of a bucket that no longer has one. It is added to the next sum.
    velocity : array or None
        With momentum correction, the velocity of this rank's own gradients in the units of the residual. It is summed in place of the
        gradients.
    """

    def __init__(self, members: Sequence[Member], dtype: torch.dtype, make: Make | None) -> None:
        self.members: list[Member] = list(members)
        self.bounds: list[int] = [0, *accumulate(member.parameter.numel() for member in members)]
        self.size: int = self.bounds[-1]
        self.flat: Any = torch.zeros(self.size, dtype=dtype, device=members[0].parameter.device)
        self.vector: Array = as_array(self.flat)
        self.carry: Array | None = None
        self.make = make
        self.feedback: ErrorFeedback | None = None if make is None else ErrorFeedback(make(self.size, 1), self.vector.dtype)
        self._dense = Dense(self.size, self.size) if make is None else None
        self.velocity: Array | None = None
        self._gradients = 0  # the number of gradients added to the residual before the latest sum

    def parts(self) -> Iterator[tuple[Member, slice]]:
        """Yield each parameter with the slice of the vector that holds its gradient."""
        for member, (lo, hi) in zip(self.members, pairwise(self.bounds)):
            yield member, slice(lo, hi)

    def key(self) -> tuple[Any, ...]:
        """Return what identifies the bucket: the indices of its parameters, and whether it has a residual."""
        return (*(member.index for member in self.members), self.make is not None)

    def fill(self, gradients: Sequence[torch.Tensor | None], factors: Sequence[float]) -> None:
        """Pack the gradients, each multiplied by its factor. None counts as zero."""
        for (member, own), gradient, factor in zip(self.parts(), gradients, factors):
            part = self.flat[own]
            if gradient is None:
                part.zero_()
                continue
            part.view(member.parameter.shape).copy_(gradient.detach())
            if factor != 1:
                part.mul_(factor)
        if self.velocity is not None:
            for member, own in self.parts():
                self.vector[own] += self.velocity.dtype.type(member.group["momentum"]) * self.velocity[own]
        if self.carry is not None:
            self.vector += array_module(self.vector).asarray(self.carry)

    def planned(self, step: int, described: dict[str, Any]) -> ReducerOperation:
        """Return the operation that sums the packed vector, ready to start, with the density of this step.

        Parameters
        ----------
        step : int
            The number of the step.
        described : dict
            Properties by name. The ranks compare them when the sum starts, and all ranks must give the same.
        """
        if self.feedback is None:
            assert self._dense is not None
            self._dense.steps = 0  # has no effect: the ranks compare the optimiser's step instead
            operation = self._dense.planned(self.vector)
        else:
            assert self.make is not None
            k = self.k(step)
            if self.feedback.reducer.k != k:
                self.feedback.reducer = self.make(self.size, k)
            self._gradients = self.feedback.gradients
            operation = self.feedback.planned(self.vector)
        terms = operation.intent.terms + tuple((name, str(value)) for name, value in described.items())
        operation.intent = Intent(terms, operation.intent.entries, operation.intent.error)
        return operation

    def k(self, step: int) -> int:
        """Return how many elements to sum in the given step.

        Raises
        ------
        AlgorithmError
            If the density is outside (0, 1].
        """
        given = self.members[0].group["density"]
        density = float(given(step) if callable(given) else given)
        if not 0 < density <= 1:
            raise AlgorithmError(f"the density is a share of the elements, above 0 and at most 1, not {density}")
        return min(self.size, max(1, round(density * self.size)))

    def wait(self, request: Request, ranks: int) -> SparseStream:
        """Wait for a sum, and return its mean over the ranks."""
        outcome: Any = request.wait()
        if isinstance(outcome, Reduced):  # a sum of all elements, not yet divided by the number of ranks
            update = outcome.update
            return SparseStream._dense_form(update._stored / update.dtype.type(ranks), self.size)
        mean: SparseStream = outcome
        return mean

    def take(self, mean: SparseStream, masking: bool = False) -> None:
        """Write the mean into ``flat``, and discard what ``carry`` holds.

        With ``masking``, the velocity is set to zero where this rank's values contributed to the mean.
        """
        self._keep_velocity()
        if self.velocity is not None and masking:
            assert self.feedback is not None
            # A sum by hosts contains the values of all ranks of a host, so the velocity stops at every index of the mean.
            self.velocity[mean.indices if self.feedback.reducer.hosts else self.feedback.contributed] = 0
        self.carry = None
        if mean.is_dense:
            self.vector[:] = mean._stored
        else:
            self.vector[:] = 0
            mean.add_to(self.vector)

    def give_back(self, mean: SparseStream) -> None:
        """Add the mean to the residuals of all ranks because no rank applies it, so that no gradient is lost."""
        self._keep_velocity()
        if self.feedback is not None:
            mean.add_to(self.feedback.residual)

    def failed(self) -> None:
        """Clean up after a failed sum, which may already have added the gradients to the residual."""
        if self.feedback is not None and self.feedback.gradients > self._gradients:
            self._keep_velocity()

    def _keep_velocity(self) -> None:
        """Update the velocity: the packed vector is now part of the residual or of the mean."""
        if self.velocity is not None:
            self.velocity[:] = self.vector

    def has_entries(self, mean: SparseStream, own: slice) -> bool:
        """Return whether the mean has values for any element of the slice."""
        if mean.is_dense:
            return bool(mean._stored[own].any())
        indices = mean._entries()[0]
        xp = array_module(indices)
        lo, hi = xp.searchsorted(indices, xp.asarray([own.start, own.stop], indices.dtype)).tolist()
        return bool(lo < hi)
