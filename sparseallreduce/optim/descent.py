"""The descent of one pack of parameters: what a rank adds to the sum, and how it applies the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparseallreduce.optim.packs import Array, Pack, add_scaled
from sparseallreduce.optim.rules import AdamRule, MomentumRule, PlainRule, Rule
from sparseallreduce.optim.settings import Settings
from sparseallreduce.reducers import ErrorFeedback, Reducer
from sparseallreduce.streams.stream import SparseStream

__all__ = ["PackDescent"]


class PackDescent:
    """One pack of parameters with its residual, velocity and moments.

    By default momentum is that of the updates: all ranks keep the same velocity. With momentum correction (Lin et al., *Deep gradient
    compression*, 2018, sections 3.1 and 3.2) each rank keeps the velocity of its own gradients, and values are selected from that and
    summed, so that a value that waits in the residual gains as much momentum as others. With masking, the velocity is set to zero where a
    value was applied, so that late values do not move the parameters in an old direction.

    Parameters
    ----------
    pack : Pack
    settings : Settings
    reducer : Reducer
    rate_first : bool
        Whether gradients are multiplied by the learning rate before they are added to the residual, or updates afterwards.
    revocable : bool
        Whether an update can be returned to the residual instead of being applied.
    """

    def __init__(self, pack: Pack, settings: Settings, reducer: Reducer, rate_first: bool, revocable: bool = False) -> None:
        self.pack = pack
        self.settings = settings
        self.rate_first = rate_first
        self.feedback: ErrorFeedback = ErrorFeedback(reducer, pack.dtype, revocable=revocable)
        self.rule: Rule = _rule(pack, settings)
        self.velocity: Any = pack.xp.zeros(pack.size, pack.dtype) if settings.momentum_correction else None
        self._spare: Array | None = None

    def fed(self, gradients: Sequence[Array], rate: float, clip: float) -> Array:
        """Return the vector that this rank adds to its residual: the scaled gradients, without a copy if no scaling is needed."""
        scale = rate if self.rate_first else 1.0
        penalty = self.settings.penalty
        gradient = gradients[0]
        if scale * clip == 1 and not penalty and self.velocity is None and len(gradients) == 1 and gradient.flags.c_contiguous:
            return gradient.reshape(-1)
        if self._spare is None:
            self._spare = self.pack.xp.empty(self.pack.size, self.pack.dtype)
        out = self._spare
        self.pack.write(gradients, scale * clip, out)
        if penalty:
            for parameter, own in self.pack.parts():
                add_scaled(out[own], parameter, scale * penalty)
        if self.velocity is not None:
            add_scaled(out, self.velocity, self.settings.momentum)
        return out

    def apply(self, update: SparseStream, rate: float) -> None:
        """Update the parameters by the mean of what all ranks have selected.

        If memory runs out, nothing is changed.
        """
        if self.velocity is not None and self.settings.momentum_masking:
            assert self._spare is not None
            # With hosts, all values contribute; those in the update stay with none of the host's ranks.
            self._spare[update.indices if self.feedback.reducer.hosts else self.feedback.contributed] = 0
        self.rule.apply(update, 1.0 if self.rate_first else rate)
        self.taken()

    def taken(self) -> None:
        """Commit the values that were added to the residual or applied to the parameters: the velocity of this rank continues from them."""
        if self.velocity is not None:
            assert self._spare is not None
            self.velocity, self._spare = self._spare, self.velocity

    def state(self) -> dict[str, Any]:
        """Return what later steps depend on, except the parameters: arrays, and values that JSON supports."""
        velocity = {} if self.velocity is None else {"local_velocity": self.velocity}
        return {**self.feedback.state(), **velocity, **self.rule.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.feedback.restore(state)
        if self.velocity is not None:
            self.velocity[:] = self.pack.xp.asarray(state["local_velocity"])
        self.rule.restore(state)


def _rule(pack: Pack, settings: Settings) -> Rule:
    if settings.adam is not None:
        return AdamRule(pack, settings.adam, settings.weight_decay)
    if settings.momentum and not settings.momentum_correction:
        return MomentumRule(pack, settings.momentum)
    return PlainRule(pack)
