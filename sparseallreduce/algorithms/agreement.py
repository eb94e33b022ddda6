"""The agreement that starts every operation: ranks exchange what they are about to do, and all of them proceed or none.

A digest of the terms ensures that a bad argument on one rank, or a different dimension, dtype, operator, algorithm or option, raises the
same error on every rank; it is sent in one small record (:mod:`sparseallreduce.runtime.handshake`). A second round, of texts, follows only
if the digests differ or there is an error: :func:`explain`.
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

__all__ = ["STREAMS", "Intent", "common_error", "digest_of", "disagreement", "explain", "named_ranks", "is_common_error"]

STREAMS = "streams"  # the term that summarises the parts of an intent
_TEXT_BYTES = 1024

Terms = tuple[tuple[str, str], ...]


class Intent(NamedTuple):
    """What a rank is about to do.

    ``terms`` are (name, value as text) pairs, equal on all ranks if they agree; ``entries`` is the rank's own number. ``error`` is an error
    in its arguments, if any. ``parts`` are the terms of each stream of a list, which a single term of ``terms`` summarises.
    """

    terms: Terms
    entries: int
    error: BaseException | None = None
    parts: tuple[Terms, ...] = ()

    def announcement(self) -> dict[str, str]:
        """Return the form of the intent that is sent to the other ranks after a disagreement."""
        return dict(self.terms) if self.error is None else {"error": type(self.error).__name__, "text": str(self.error)}


def explain(intent: Intent) -> Generator[Step, Any, Any]:
    """Return the schedule of ranks that disagree, or of which one has an error.

    If only the streams of a list differ, the ranks exchange digests, and then the terms of the first stream that differs.

    Raises
    ------
    SparseAllreduceError
        The same on every rank: the error of the lowest rank that has one, or a MismatchError.
    """
    texts: Sequence[bytes] = yield Share(_text(intent.announcement()))
    announced = [json.loads(text.rstrip(b"\0")) for text in texts]
    if _differing(announced) == STREAMS:
        digests: Sequence[bytes] = yield Share(b"".join(_digest(part) for part in intent.parts))
        texts = yield Share(_text(dict(intent.parts[_first_part(digests)])))
        announced = [json.loads(text.rstrip(b"\0")) for text in texts]
    raise common_error(announced)


def disagreement(intents: Sequence[Intent]) -> SparseAllreduceError:
    """Return the error of :func:`explain`, given the intents of all ranks."""
    announced: list[Mapping[str, str]] = [intent.announcement() for intent in intents]
    if _differing(announced) == STREAMS:
        place = _first_part([b"".join(_digest(part) for part in intent.parts) for intent in intents])
        announced = [dict(intent.parts[place]) for intent in intents]
    return common_error(announced)


def common_error(intents: Sequence[Mapping[str, Any]]) -> SparseAllreduceError:
    """Return the error that all ranks raise, given their announcements; it is the same on every rank."""
    error = _error(intents)
    error.on_all_ranks = True
    return error


def is_common_error(intent: Intent, error: BaseException) -> bool:
    """Return True if ``error`` is the common error of ranks that have all announced this intent."""
    alone = _error([json.loads(_text(intent.announcement()).rstrip(b"\0"))])
    return type(error) is type(alone) and str(error) == str(alone)


def _error(intents: Sequence[Mapping[str, Any]]) -> SparseAllreduceError:
    faulty = [rank for rank, intent in enumerate(intents) if "error" in intent]
    if faulty:
        announced = intents[faulty[0]]
        same = len(faulty) == len(intents) and all(intent == announced for intent in intents)
        where = "" if same else f"on rank {faulty[0]}: "
        kind = getattr(errors, str(announced["error"]), None)
        if isinstance(kind, type) and issubclass(kind, SparseAllreduceError):
            return kind(where + str(announced["text"]))
        return SparseAllreduceError(f"{where}{announced['error']}: {announced['text']}")
    term = _differing(intents)
    if term is None:
        return MismatchError("the ranks disagree on the operation: all ranks must start the same operations in the same order")
    values: dict[str, list[int]] = {}
    for rank, intent in enumerate(intents):
        values.setdefault(str(intent.get(term, "another operation")), []).append(rank)
    parts = [f"{value} on {named_ranks(where)}" for value, where in values.items()]
    return MismatchError(f"the ranks disagree on the {term}: {'; '.join(parts)}. All ranks must pass the same")


def _differing(announced: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first term in which the ranks differ; None if one has an error, or there is no such term."""
    if any("error" in each for each in announced):
        return None
    return next((term for term in announced[0] if len({str(each.get(term)) for each in announced}) > 1), None)


def _digest(part: Terms) -> bytes:
    return digest_of(part).to_bytes(8, "little")


def _first_part(digests: Sequence[bytes]) -> int:
    """Return the index of the first part whose digests differ."""
    places = range(0, len(digests[0]), 8)
    return next(at // 8 for at in places if len({each[at : at + 8] for each in digests}) > 1)


@lru_cache(maxsize=256)
def digest_of(terms: Terms) -> int:
    """Return a digest of the terms as an integer of eight bytes."""
    return int.from_bytes(hashlib.blake2b(repr(terms).encode(), digest_size=8).digest(), "little")


def _text(announced: dict[str, str]) -> bytes:
    text = json.dumps(announced).encode()
    while len(text) > _TEXT_BYTES:
        longest = max(announced, key=lambda name: len(announced[name]))
        announced[longest] = announced[longest][: len(announced[longest]) // 2 - 3] + "..."
        text = json.dumps(announced).encode()
    return text.ljust(_TEXT_BYTES, b"\0")


def named_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text for error messages.

    Examples
    --------
    >>> named_ranks([2]), named_ranks([0, 3])
    ('rank 2', 'ranks 0, 3')
    """
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f", ... ({len(ranks)} in all)" if len(ranks) > 8 else "")
