"""Remember how the index sets of all ranks overlap and where their entries are, so that not every operation takes new samples.

Gradients overlap about as much from step to step. The choice of an algorithm, and the cuts of the index space, must be the same on all
ranks, and a rank may have missed an operation. Each rank therefore sends the digest of what it remembers, which is used if all digests are
equal.

What is remembered is used for 16 sums, and after new samples for twice as many as before, as long as results agree with it. If a part of
the index space, or the whole result, has a third more or fewer entries than in the first result, the ranks take new samples.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_of
from sparseallreduce.streams import kernels
from sparseallreduce.streams.stream import SparseStream

__all__ = ["REMEMBERED", "Overlaps"]

_SAMPLED, REMEMBERED = b"\1", b"\2"  # first byte of a note
_USES, _MOST_USES = 16, 256  # sums between two samples: first and most
_REVIEWED = 4  # one result in this many is checked, which takes 30 microseconds
_MISSES = 4  # operations with differing notes that are tolerated, such as those in flight when samples arrive
_KINDS = 256  # kinds of operations remembered
_LOOKS = 4096  # values of a dense result that are checked


class _Known:
    """The overlap remembered for one kind of operation, and how long it is used."""

    def __init__(self, overlap: Overlap, period: int) -> None:
        self.overlap, self.digest, self.period = overlap, overlap.digest, period
        self.uses, self.misses = period, 0
        self.shares: NDArray[np.float64] | None = None  # entries of the first result in each part, then in total


class Overlaps:
    """The stored overlaps of a channel's operations, by the digest of their terms.

    Parameters
    ----------
    rank, ranks : int
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._known: dict[int, _Known] = {}
        # By their own digests: an operation that has sent a digest may be the last to use it.
        self._latest: OrderedDict[bytes, Overlap] = OrderedDict()

    def note(self, digest: int, stream: SparseStream) -> bytes:
        """Return the bytes to send to the other ranks: a digest of the stored overlap if it is still in use, otherwise a sample."""
        known = self._known.get(digest)
        if known is not None and known.uses > 0 and known.digest in self._latest:
            known.uses -= 1
            return REMEMBERED + known.digest
        return self.sample(stream)

    def sample(self, stream: SparseStream) -> bytes:
        """Return a note with a sample of this rank's stream."""
        return _SAMPLED + sample_of(stream, self._rank, self._ranks)

    def update(self, digest: int, notes: Sequence[bytes], size: int) -> Overlap | None:
        """Return the overlap that all ranks use, given the notes of all ranks; None if the notes do not match."""
        known, first = self._known.get(digest), notes[0]
        if first[:1] == REMEMBERED and notes.count(first) == len(notes):
            self._latest.move_to_end(first[1:])
            return self._latest[first[1:]]
        if any(note[:1] != _SAMPLED for note in notes):
            if known is not None:
                known.misses += 1
                known.uses *= known.misses < _MISSES
            return None
        overlap = estimated([note[1:] for note in notes], size)
        if overlap is not None:
            if len(self._known) >= _KINDS:
                self._known.clear()
            period = _USES if known is None or known.period == 0 else min(2 * known.period, _MOST_USES)
            known = self._known[digest] = _Known(overlap, period)
            self._latest[known.digest] = overlap
            if len(self._latest) > 2 * _KINDS:
                self._latest.popitem(last=False)
        return overlap

    def review(self, digest: int, result: SparseStream) -> None:
        """Check from time to time that what is remembered still matches a result; if not, the next operation takes samples.

        The result is the same on all ranks, and so is the decision.
        """
        known = self._known.get(digest)
        if known is None or known.overlap.spread is None or (known.shares is not None and known.uses % _REVIEWED):
            return
        bounds = known.overlap.spread.parts(0, result.size, self._ranks).bounds
        counts, found = _counts(result, bounds), known.shares
        if found is None:
            known.shares = counts
            return
        noise = 4 * np.sqrt(found) + 4
        if (np.abs(counts - found) > np.maximum(found, found[-1] / self._ranks) / 3 + noise).any():
            known.uses = known.period = 0


def _counts(result: SparseStream, bounds: Sequence[int]) -> NDArray[np.float64]:
    """Return the entries of a result in each part and in total. In a dense result, evenly spaced positions are counted instead."""
    if not result.is_dense:
        below = np.array(kernels.cuts(result._entries()[0], bounds, result.lo, result.hi), np.float64)
    else:
        step = max(1, result.extent // _LOOKS)
        looked: Any = result._stored[::step] != 0
        held = np.concatenate([[0], np.cumsum(looked.reshape(len(looked), -1).any(axis=1))])
        below = held[-(-np.array(bounds) // step)].astype(np.float64)
    return np.append(np.diff(below), below[-1] - below[0])
