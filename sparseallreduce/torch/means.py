"""The mean gradients of a step, in the form that the inner optimiser takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from sparseallreduce.optim.arrays import finite_norm
from sparseallreduce.optim.arrays import norms as norms_of_arrays
from sparseallreduce.optim.settings import Settings
from sparseallreduce.torch import header
from sparseallreduce.torch.buckets import Bucket, Member
from sparseallreduce.torch.devices import norms
from sparseallreduce.torch.flight import Flight
from sparseallreduce.torch.masters import Masters
from sparseallreduce.torch.rows import Layout, as_gradient

__all__ = ["means"]

Gradients: TypeAlias = "dict[torch.Tensor, torch.Tensor | None]"


def means(
    flight: Flight,
    members: Sequence[Member],
    sparse: Sequence[tuple[Member, Layout]],
    unit: Callable[[Member], float],
    masters: Masters,
    limit: Settings | None,
    masking: bool = False,
) -> Gradients:
    """Return the mean gradient of each parameter, or None for a parameter that does not change.

    Parameters
    ----------
    flight : Flight
        The sums of the step, which are done.
    members : sequence of Member
        All parameters.
    sparse : sequence of (Member, Layout)
        The parameters whose gradients are sparse tensors.
    unit : callable
        Returns the factor of a parameter's gradient in the residual.
    masters : Masters
        The float32 copies of 16-bit parameters.
    limit : Settings, optional
        The settings that limit the norm of the mean, if it is clipped.
    masking : bool
        Whether the velocity is set to zero where a value was applied.

    Raises
    ------
    DivergenceError
        If the norm to be clipped is not finite, the same on all ranks.
    """
    present = {member.index for member in members if flight.layouts[member.index] != header.NONE}
    gradients: Gradients = {}
    for bucket in flight.buckets:
        mean = flight.means[bucket]
        bucket.take(mean, masking)
        for member, own in bucket.parts():
            comes = member.index in present or bucket.has_entries(mean, own)
            gradients[member.parameter] = _mean_of(bucket, member, own, unit(member), masters) if comes else None
    for (member, layout), mean in zip(sparse, flight.rows):
        gradients[member.parameter] = as_gradient(mean, layout, member.parameter) if member.index in present else None
    for member in members:
        if not member.parameter.numel() and member.index in present:  # a parameter without elements is not in a bucket
            gradients[member.parameter] = torch.zeros_like(masters.of(member.parameter))
    if limit is not None:
        sparse_norms = norms_of_arrays([rows._stored.astype(np.float64) for rows in flight.rows])
        norm = math.hypot(*norms(bucket.flat for bucket in flight.buckets), *sparse_norms)
        factor = limit.clipped(finite_norm(norm), 1)
        for gradient in gradients.values():
            if gradient is not None:
                gradient.mul_(factor)
    return gradients


def _mean_of(bucket: Bucket, member: Member, own: slice, unit: float, masters: Masters) -> torch.Tensor:
    """Return the mean of a parameter in the units of gradients, with the memory layout of the parameter."""
    part = bucket.flat[own]
    if bucket.feedback is not None and unit == 0:  # the learning rate is 0, so nothing may change: keep the mean in the residual
        bucket.feedback.residual[own] += bucket.vector[own]
        part.zero_()
    elif bucket.feedback is not None and unit != 1:
        part.div_(unit)
    gradient, parameter = part.view(member.parameter.shape), member.parameter
    if not parameter.is_contiguous():
        gradient = torch.empty_like(masters.of(parameter)).copy_(gradient)
    return gradient
