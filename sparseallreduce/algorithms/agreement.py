"""What every operation starts with: the ranks tell each other what they are about to do, and all or none of them go on.

A digest of the terms makes sure that a bad argument on one rank, or a dimension, dtype, operator, algorithm or option that differs,
raises the same error on every rank; it travels in one small record (:mod:`sparseallreduce.runtime.handshake`). A second round, of texts,
follows only when there is something to say: :func:`explain`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sparseallreduce import errors
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.errors import MismatchError, SparseAllreduceError

__all__ = ["Intent", "common_error", "digest_of", "explain"]

_TEXT_BYTES = 1024


class Intent(NamedTuple):
    """What a rank is about to do.

    ``terms`` are (name, value as text) pairs, the same on all ranks if they agree; ``entries`` is its own. ``error`` is what is
    wrong with its arguments, if anything is.
    """

    terms: tuple[tuple[str, str], ...]
    entries: int
    error: BaseException | None = None

    def announcement(self) -> dict[str, str]:
        """The intent as the other ranks are told of it when something is wrong."""
        return dict(self.terms) if self.error is None else {"error": type(self.error).__name__, "text": str(self.error)}


def explain(intent: Intent) -> Generator[Step, Any, Any]:
    """What the ranks do that do not agree, or of which one has an error to tell.

    Raises
    ------
    SparseAllreduceError
        The same on every rank: the error of the first rank that has one, or a MismatchError.
    """
    texts: Sequence[bytes] = yield Share(_text(intent))
    raise common_error([json.loads(text.rstrip(b"\0")) for text in texts])


def common_error(intents: Sequence[Mapping[str, Any]]) -> SparseAllreduceError:
    """The error that all ranks raise, from what each of them announced; every rank computes the same one."""
    error = _error(intents)
    error.on_all_ranks = True
    return error


def _error(intents: Sequence[Mapping[str, Any]]) -> SparseAllreduceError:
    faulty = [rank for rank, intent in enumerate(intents) if "error" in intent]
    if faulty:
        announced = intents[faulty[0]]
        alike = len(faulty) == len(intents) and all(intent == announced for intent in intents)
        where = "" if alike else f"on rank {faulty[0]}: "
        kind = getattr(errors, str(announced["error"]), None)
        if isinstance(kind, type) and issubclass(kind, SparseAllreduceError):
            return kind(where + str(announced["text"]))
        return SparseAllreduceError(f"{where}{announced['error']}: {announced['text']}")
    for term in intents[0]:
        values: dict[str, list[int]] = {}
        for rank, intent in enumerate(intents):
            values.setdefault(str(intent.get(term)), []).append(rank)
        if len(values) > 1:
            parts = [f"{value} on rank{'s' if len(where) > 1 else ''} {_ranks(where)}" for value, where in values.items()]
            return MismatchError(f"the ranks disagree on the {term}: {'; '.join(parts)}. All ranks must pass the same")
    return MismatchError("the ranks disagree on the operation: all ranks must start the same operations in the same order")


@lru_cache(maxsize=256)
def digest_of(terms: tuple[tuple[str, str], ...]) -> int:
    """What stands for the terms of an intent in eight bytes."""
    return int.from_bytes(hashlib.blake2b(repr(terms).encode(), digest_size=8).digest(), "little")


def _text(intent: Intent) -> bytes:
    announced = intent.announcement()
    text = json.dumps(announced).encode()
    while len(text) > _TEXT_BYTES:
        longest = max(announced, key=lambda name: len(announced[name]))
        announced[longest] = announced[longest][: len(announced[longest]) // 2 - 3] + "..."
        text = json.dumps(announced).encode()
    return text.ljust(_TEXT_BYTES, b"\0")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
