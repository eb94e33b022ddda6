"""A message between two simulated ranks."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from sparseallreduce.streams.stream import SparseStream

__all__ = ["Content", "Message"]

Content: TypeAlias = tuple[SparseStream, ...] | bytes


class Message(NamedTuple):
    """A message from one simulated rank to another."""

    source: int
    dest: int
    content: Content
    nbytes: int  # bytes on the wire, including headers
    coding: float = 0.0  # seconds of encoding and decoding that do not overlap with the transfer
