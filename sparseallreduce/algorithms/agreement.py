"""What every operation starts with: the ranks tell each other what they are about to do, and all or none of them go on.

One small allgather makes sure that a bad argument on one rank, or a dimension, dtype, operator, algorithm or option that differs,
raises the same error on every rank; it costs one latency. What is little travels with it: see :func:`agree`. A second one, of
texts, follows only when there is something to say.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sparseallreduce import errors
from sparseallreduce.algorithms.steps import DenseAllreduce, Share, Step
from sparseallreduce.errors import MismatchError, SparseAllreduceError

__all__ = ["RECORD", "Agreed", "Intent", "agree", "common_error", "digest_of"]

RECORD = struct.Struct("<?B6xQq")  # whether all is well, flags, digest of the terms, entries
_TEXT_BYTES = 1024


class Intent(NamedTuple):
    """What a rank is about to do.

    ``terms`` are (name, value as text) pairs, the same on all ranks if they agree; ``entries`` is its own. ``error`` is what is
    wrong with its arguments, if anything is.
    """

    terms: tuple[tuple[str, str], ...]
    entries: int
    error: BaseException | None = None

    def said(self) -> dict[str, str]:
        """The intent as the other ranks are told of it when something is wrong."""
        return dict(self.terms) if self.error is None else {"error": type(self.error).__name__, "text": str(self.error)}


class Agreed(NamedTuple):
    """What a rank knows of all ranks once they agree."""

    entries: tuple[int, ...]  # of each rank
    payloads: tuple[bytes, ...]  # of each rank
    flags: int  # that all ranks have set


def agree(
    intent: Intent, rank: int, ranks: int, payload: bytes = b"", room: int = 0, flags: int = 0, ready: DenseAllreduce | None = None
) -> Generator[Step, Any, Agreed]:
    """What all ranks say, once it is certain that they mean the same operation.

    Parameters
    ----------
    intent : Intent
    rank, ranks : int
    payload : bytes, optional
        What else to tell the others, up to ``room`` bytes; ``room`` is the same on all ranks.
    flags : int, optional
        Eight bits to tell the others.
    ready : DenseAllreduce, optional
        The step in which this rank blocks next, if the flags say so on all ranks.

    Raises
    ------
    SparseAllreduceError
        The same on every rank: the error of the first rank that has one, or a MismatchError.
    """
    if ranks == 1:
        if intent.error is not None:
            raise common_error([intent.said()])
        return Agreed((intent.entries,), (payload,), flags)
    digest = digest_of(intent.terms)
    ours = RECORD.pack(intent.error is None, flags, digest, intent.entries)
    said: list[bytes] = yield Share(ours, payload, room, ready)
    entries, payloads, common, alike = [], [], flags, intent.error is None
    for message in said:
        well, theirs, of_theirs, count = RECORD.unpack_from(message)
        alike = alike and well and of_theirs == digest
        common &= theirs
        entries.append(count)
        payloads.append(message[RECORD.size :])
    if alike:
        return Agreed(tuple(entries), tuple(payloads), common)
    texts: Sequence[bytes] = yield Share(_text(intent))
    raise common_error([json.loads(text.rstrip(b"\0")) for text in texts])


def common_error(intents: Sequence[Mapping[str, Any]]) -> SparseAllreduceError:
    """The error that all ranks raise, from what each of them said; every rank computes the same one."""
    error = _error(intents)
    error.on_all_ranks = True
    return error


def _error(intents: Sequence[Mapping[str, Any]]) -> SparseAllreduceError:
    faulty = [rank for rank, intent in enumerate(intents) if "error" in intent]
    if faulty:
        said = intents[faulty[0]]
        alike = len(faulty) == len(intents) and all(intent == said for intent in intents)
        where = "" if alike else f"on rank {faulty[0]}: "
        kind = getattr(errors, str(said["error"]), None)
        if isinstance(kind, type) and issubclass(kind, SparseAllreduceError):
            return kind(where + str(said["text"]))
        return SparseAllreduceError(f"{where}{said['error']}: {said['text']}")
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
    said = intent.said()
    text = json.dumps(said).encode()
    while len(text) > _TEXT_BYTES:
        longest = max(said, key=lambda name: len(said[name]))
        said[longest] = said[longest][: len(said[longest]) // 2 - 3] + "..."
        text = json.dumps(said).encode()
    return text.ljust(_TEXT_BYTES, b"\0")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown}, ... ({len(ranks)} in all)"
