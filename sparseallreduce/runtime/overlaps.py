"""What a rank remembers of how the sets of all ranks overlap and where they lie, so that not every operation takes new samples.

Gradients overlap from step to step about as much. What an algorithm is chosen by, and where it cuts the index space, has to be the same on
all ranks, and a rank may have missed an operation: so each tells the digest of what it remembers, and they go by it if all tell the same.

What is remembered is used for 16 sums, and after those for twice as many as before, as long as the results say that it still holds: if a
part of the index space holds a third more or less of a result than of the first, or the result does, the ranks take new samples.
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

_SAMPLED, REMEMBERED = b"\1", b"\2"  # what a note begins with
_USES, _MOST_USES = 16, 256  # of what is remembered
_REVIEWED = 4  # sums, of one of which the result is looked at, which takes 30 microseconds
_MISSES = 4  # operations in which others did not remember the same, as those that are in flight when samples come
_KINDS = 256  # of operations
_LOOKS = 4096  # values of a dense result that are looked at


class _Known:
    """What is remembered of one kind of operation."""

    def __init__(self, overlap: Overlap, period: int) -> None:
        self.overlap, self.digest, self.period = overlap, overlap.digest, period
        self.uses, self.misses = period, 0
        self.shares: NDArray[np.float64] | None = None  # of the first result in each part, and behind them its entries


class Overlaps:
    """The overlap of each kind of operation, by the digest of its terms.

    Parameters
    ----------
    rank, ranks : int
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._known: dict[int, _Known] = {}
        # By their own digests: an operation that has told one may be the last to go by it.
        self._latest: OrderedDict[bytes, Overlap] = OrderedDict()

    def note(self, digest: int, stream: SparseStream) -> bytes:
        """Return what to tell the others: the digest of what is remembered, or a sample."""
        known = self._known.get(digest)
        if known is not None and known.uses > 0 and known.digest in self._latest:
            known.uses -= 1
            return REMEMBERED + known.digest
        return self.sample(stream)

    def sample(self, stream: SparseStream) -> bytes:
        """Return a note with a sample of our stream."""
        return _SAMPLED + sample_of(stream, self._rank, self._ranks)

    def learn(self, digest: int, notes: Sequence[bytes], size: int) -> Overlap | None:
        """Return the overlap that all ranks go by, from what all of them have told; None if they told different things."""
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
        """Look, now and then, whether what is remembered still holds for a result; if not, the next operation takes samples.

        The result is the same on all ranks, and so is what they find.
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
    """The entries of a result in each part, and in all; of a dense one, those of some positions that lie as far apart."""
    if not result.is_dense:
        below = np.array(kernels.cuts(result._entries()[0], bounds, result.lo, result.hi), np.float64)
    else:
        step = max(1, result.extent // _LOOKS)
        looked: Any = result._stored[::step] != 0
        held = np.concatenate([[0], np.cumsum(looked.reshape(len(looked), -1).any(axis=1))])
        below = held[-(-np.array(bounds) // step)].astype(np.float64)
    return np.append(np.diff(below), below[-1] - below[0])
