"""The agreement of simulated ranks on an operation, determined without messages."""

from __future__ import annotations

from collections.abc import Sequence

from sparseallreduce.algorithms.agreement import Intent, disagreement
from sparseallreduce.algorithms.allreduce import Call, takes_samples
from sparseallreduce.algorithms.choose import is_worth_a_sample
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_of

__all__ = ["expect_agreement", "overlap_of"]


def expect_agreement(intents: Sequence[Intent]) -> None:
    """Raise the error that all ranks of a real operation would raise, if the intents disagree."""
    if any(intent.error is not None or intent.terms != intents[0].terms for intent in intents):
        raise disagreement(intents)


def overlap_of(calls: Sequence[Call], machine: Machine, hosts: Hosts) -> Overlap | None:
    """Return the overlap that the ranks would estimate from samples, or None. Overlaps remembered from earlier sums are not simulated."""
    streams, ranks = [call.stream for call in calls], len(calls)
    entries = sum(stream.stored for stream in streams) / ranks
    near = len(hosts.members) == 1
    if not (takes_samples(calls[0].algorithm) and is_worth_a_sample(streams[0], entries, ranks, calls[0].machine or machine, near)):
        return None
    return estimated([sample_of(stream, rank, ranks) for rank, stream in enumerate(streams)], streams[0].size)
