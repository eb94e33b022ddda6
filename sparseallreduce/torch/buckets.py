"""Parameters whose gradients are summed as one vector: which they are, what they feed into the sum, and the mean that comes out."""

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
Make = Callable[[int, int], Reducer]  # of a size and a k


@dataclass(eq=False)
class Member:
    """A parameter of an optimiser, and the group that it is in."""

    index: int  # among all parameters, counted through the groups
    parameter: torch.Tensor
    group: dict[str, Any]

    @property
    def name(self) -> str:
        """As errors name it."""
        names, parameters = self.group.get("param_names"), self.group["params"]
        own = next(place for place, each in enumerate(parameters) if each is self.parameter)
        return f"parameter {self.index}" if names is None else f"parameter {names[own]!r}"

    @property
    def kind(self) -> str:
        """What has to be the same on all ranks besides its shape: the dtype, and whether it lies on a GPU."""
        return f"{self.parameter.dtype} on a {self.parameter.device.type}"

    @property
    def is_dense(self) -> bool:
        """Whether all of its gradient is summed: of biases and normalisation layers, if the group does not say otherwise."""
        dense = self.group["dense"]
        return bool(self.parameter.ndim <= 1 if dense is None else dense)


def sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Of the residual and the sum: float32 also where gradients are of 16 bits."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def listed(groups: Iterable[dict[str, Any]], correction: bool) -> list[Member]:
    """The parameters of these groups.

    Raises
    ------
    StreamTypeError
        If one has other numbers than floating-point ones, or has none, as on PyTorch's meta device.
    AlgorithmError
        If a density is no share, there is no such reducer, or a group's momentum is none that can be corrected where it is to be.
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
            raise AlgorithmError("momentum correction is for a momentum below 1, without Nesterov's form and without dampening")
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
    """The parameters in buckets, those whose gradients come first in back-propagation, which are the last, first.

    Parameters
    ----------
    members : sequence of Member
        Those without elements are left out.
    nbytes : int
        Most bytes of a bucket; a parameter that has more is one of its own.
    make : callable
        Makes the reducer of a bucket.
    everything : bool
        Whether all gradients are summed whole, where their group does not say otherwise.
    correction : bool
        Whether those that are not have a velocity.
    of_group : callable, optional
        Returns what makes the reducer of the buckets of a group that names one.
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
    """The parameters of each bucket, with their dtype, density, device and reducer; see :func:`arranged`."""
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
    """Some parameters, their gradients behind each other as one vector in C order, and their residuals.

    Parameters
    ----------
    members : sequence of Member
        With elements, on one device, where the vector lies, too.
    dtype : torch.dtype
        Of the sum: float32 or float64.
    make : callable, optional
        Makes the reducer of a size and a k. Without it, everything is summed and there is no residual.

    Attributes
    ----------
    flat : tensor, shape (size,)
        What is fed into a sum until that is done, and then its mean.
    vector : array
        On the same memory.
    owed : ndarray or None
        Where there is no residual any more: what was in it, which the next sum takes in.
    velocity : array or None
        With momentum correction: of this rank's own gradients, in units of the residual. It is what is fed into a sum.
    """

    def __init__(self, members: Sequence[Member], dtype: torch.dtype, make: Make | None) -> None:
        self.members = list(members)
        self.bounds: list[int] = [0, *accumulate(member.parameter.numel() for member in members)]
        self.size = self.bounds[-1]
        self.flat = torch.zeros(self.size, dtype=dtype, device=members[0].parameter.device)
        self.vector: Array = as_array(self.flat)
        self.owed: Array | None = None
        self.make = make
        self.feedback = None if make is None else ErrorFeedback(make(self.size, 1), self.vector.dtype)
        self._dense = Dense(self.size, self.size) if make is None else None
        self.velocity: Array | None = None
        self._gradients = 0  # that the residual had taken in before the latest sum

    def parts(self) -> Iterator[tuple[Member, slice]]:
        """Each parameter, and the elements of the vector that are its own."""
        for member, (lo, hi) in zip(self.members, pairwise(self.bounds)):
            yield member, slice(lo, hi)

    def key(self) -> tuple[Any, ...]:
        """By which two buckets are the same: their parameters, and whether they have residuals."""
        return (*(member.index for member in self.members), self.make is not None)

    def fill(self, gradients: Sequence[torch.Tensor | None], factors: Sequence[float]) -> None:
        """Pack gradients, each times its factor; None counts as zero."""
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
        if self.owed is not None:
            self.vector += array_module(self.vector).asarray(self.owed)

    def planned(self, step: int, said: dict[str, Any]) -> ReducerOperation:
        """The sum of what was packed, about to start, in the density of this step; all ranks have to say the same of it."""
        if self.feedback is None:
            assert self._dense is not None
            self._dense.steps = 0  # nothing depends on it: the step that is said is the optimiser's
            operation = self._dense.planned(self.vector)
        else:
            assert self.make is not None
            k = self.k(step)
            if self.feedback.reducer.k != k:
                self.feedback.reducer = self.make(self.size, k)
            self._gradients = self.feedback.gradients
            operation = self.feedback.planned(self.vector)
        terms = operation.intent.terms + tuple((name, str(value)) for name, value in said.items())
        operation.intent = Intent(terms, operation.intent.entries, operation.intent.error)
        return operation

    def k(self, step: int) -> int:
        """How many elements to sum in that step.

        Raises
        ------
        AlgorithmError
            If the density is no share.
        """
        given = self.members[0].group["density"]
        density = float(given(step) if callable(given) else given)
        if not 0 < density <= 1:
            raise AlgorithmError(f"the density is a share of the elements, above 0 and at most 1, not {density}")
        return min(self.size, max(1, round(density * self.size)))

    def wait(self, request: Request, ranks: int) -> SparseStream:
        """Wait for a sum: the mean over the ranks of what was fed."""
        outcome: Any = request.wait()
        if isinstance(outcome, Reduced):  # of a sum of everything, which is not divided yet
            update = outcome.update
            return SparseStream._dense_form(update._stored / update.dtype.type(ranks), self.size)
        mean: SparseStream = outcome
        return mean

    def take(self, mean: SparseStream, masking: bool = False) -> None:
        """Make the mean the content of ``flat``; nothing is owed any more. With masking, velocity stops where a value was applied."""
        self._keep_velocity()
        if self.velocity is not None and masking:
            assert self.feedback is not None
            # Of a sum by hosts, in which all values are, those that stay with none of the host's ranks.
            self.velocity[mean.indices if self.feedback.reducer.hosts else self.feedback.contributed] = 0
        self.owed = None
        if mean.is_dense:
            self.vector[:] = mean._stored
        else:
            self.vector[:] = 0
            mean.add_to(self.vector)

    def give_back(self, mean: SparseStream) -> None:
        """A mean that is not applied on any rank goes into the residuals of all, so that it is not lost."""
        self._keep_velocity()
        if self.feedback is not None:
            mean.add_to(self.feedback.residual)

    def failed(self) -> None:
        """Go on from what has come of a sum that failed: the residual may have taken in what was fed."""
        if self.feedback is not None and self.feedback.gradients > self._gradients:
            self._keep_velocity()

    def _keep_velocity(self) -> None:
        """What was fed is part of the residual, or of the mean, for good."""
        if self.velocity is not None:
            self.velocity[:] = self.vector

    def has_entries(self, mean: SparseStream, own: slice) -> bool:
        """Whether the mean has values for some of the elements."""
        if mean.is_dense:
            return bool(mean._stored[own].any())
        indices = mean._entries()[0]
        xp = array_module(indices)
        lo, hi = xp.searchsorted(indices, xp.asarray([own.start, own.stop], indices.dtype)).tolist()
        return bool(lo < hi)
