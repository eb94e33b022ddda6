"""Whether all ranks mean the same operation, found without a message: the simulator has what every rank would say."""

from __future__ import annotations

from collections.abc import Sequence

from sparseallreduce.algorithms.agreement import Intent, disagreement

__all__ = ["expect_agreement"]


def expect_agreement(intents: Sequence[Intent]) -> None:
    """Raise the error that all ranks of a real operation would raise, if they do not agree."""
    if any(intent.error is not None or intent.terms != intents[0].terms for intent in intents):
        raise disagreement(intents)
