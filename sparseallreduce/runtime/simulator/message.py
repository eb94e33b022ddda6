"""A message between two simulated ranks."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sparseallreduce.streams.stream import SparseStream

__all__ = ["Content", "Message"]

Content: TypeAlias = tuple[SparseStream, ...] | bytes


class Message(NamedTuple):
    """What one rank has sent to another."""

    source: int
    dest: int
    content: Content
    nbytes: int  # on the wire, headers included
    coding: float = 0.0  # seconds of writing and reading it that do not pass while it travels
