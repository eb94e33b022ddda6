"""What a rank remembers of how the sets of all ranks overlap, and tells the others, so that not every operation takes a new sample.

Gradients overlap from step to step about as much. What an algorithm is chosen by has to be the same on all ranks, and a rank may have
missed an operation: so each tells what it remembers, and all go by what the first of them says.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_of
from sparseallreduce.streams.stream import SparseStream

__all__ = ["Overlaps"]

_SAMPLED, _REMEMBERED = b"\1", b"\2"  # what a note begins with
_USES = 16  # of what is remembered
_KINDS = 256  # of operations


class Overlaps:
    """The overlap of each kind of operation, by the digest of its terms."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, int]] = {}  # packed, and how often it may still be used

    def note(self, digest: int, stream: SparseStream) -> bytes:
        """What to tell the others: what is remembered, or a sample."""
        packed, uses = self._known.get(digest, (b"", 0))
        if uses > 0:
            self._known[digest] = packed, uses - 1
            return _REMEMBERED + packed
        return _SAMPLED + sample_of(stream)

    def learn(self, digest: int, notes: Sequence[bytes], size: int) -> Overlap | None:
        """The overlap, from what all ranks have told."""
        remembered = next((note for note in notes if note[:1] == _REMEMBERED), None)
        if remembered is not None:
            return Overlap.unpack(remembered[1:])
        if any(note[:1] != _SAMPLED for note in notes):  # of ranks with few entries
            return None
        overlap = estimated([note[1:] for note in notes], size)
        if overlap is not None:
            if len(self._known) >= _KINDS:
                self._known.clear()
            self._known[digest] = overlap.pack(), _USES
        return overlap
