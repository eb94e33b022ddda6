"""The mean gradients of a step, as the optimiser beneath takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

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

Gradients = dict[torch.Tensor, torch.Tensor | None]


def means(
    flight: Flight,
    members: Sequence[Member],
    sparse: Sequence[tuple[Member, Layout]],
    unit: Callable[[Member], float],
    masters: Masters,
    limit: Settings | None,
    masking: bool = False,
) -> Gradients:
    """The mean gradient of each parameter, None of those that stay as they are.

    Parameters
    ----------
    flight : Flight
        Whose sums are done.
    members : sequence of Member
        All parameters.
    sparse : sequence of (Member, Layout)
        Those whose gradients are sparse tensors.
    unit : callable
        What a gradient is multiplied by to go into a residual.
    masters : Masters
    limit : Settings, optional
        By which the norm of the mean is clipped, if it is.
    masking : bool
        Whether velocity stops where a value is applied.

    Raises
    ------
    DivergenceError
        If the norm to be clipped is not finite: the same on all ranks.
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
        if not member.parameter.numel() and member.index in present:  # which is in no bucket
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
    """In units of gradients, and in the memory and layout of the parameter."""
    part = bucket.flat[own]
    if bucket.feedback is not None and unit == 0:  # the rate comes first, and nothing may move: what has come is kept
        bucket.feedback.residual[own] += bucket.vector[own]
        part.zero_()
    elif bucket.feedback is not None and unit != 1:
        part.div_(unit)
    gradient, parameter = part.view(member.parameter.shape), member.parameter
    if not parameter.is_contiguous():
        gradient = torch.empty_like(masters.of(parameter)).copy_(gradient)
    return gradient
