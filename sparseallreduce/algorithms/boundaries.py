"""Cut the index space into parts of about equal cost, based on estimates of where the ranks' entries are.

Each rank sends quantiles of its positions: one for every 64th of its entries, with an offset that depends on the rank, so that ranks with
equal sets send different positions. Together they give the number of entries below any position, and sampled positions
(:mod:`~sparseallreduce.algorithms.overlap`) give how many of these remain in the sum. All computations use integers, so that every rank
finds the same boundaries.

A part costs its rank the entries that it receives and adds, and all ranks its share of the sum, in bits: neighbouring positions take few.
If sets are skewed, no cut balances both: frequent positions have many entries, but few in the sum. Several mixtures of the two are tried,
and the one in which a rank receives least in both phases together is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms.exchange import halvings, lower_power_of_two, places_of
from sparseallreduce.streams.partition import boundaries, parts_of
from sparseallreduce.streams.stream import SparseStream

__all__ = [
    "MOST_POSITIONS",
    "QUANTILES",
    "UNIT",
    "Cutter",
    "Figures",
    "Parts",
    "Spread",
    "bounds_of",
    "is_uneven",
    "nearest_cut",
    "quantile_places",
]

QUANTILES = 64  # sent by each rank
MOST_POSITIONS = 1 << 40  # up to which products of positions and shares are 64-bit integers
UNIT = 1 << 20  # denominator of fractions
_MIXTURES = 4  # quarters of the sum's entries in a mixture
_EVEN = 27, 25  # equal widths are kept up to this cost relative to equal loads: 1.08, the noise of the samples
_BITS = 32  # bits of a value, and of an uncompressed position
_BINS = 64  # bins of equal numbers of entries, within which positions are assumed to be uniformly random

Counts: TypeAlias = NDArray[np.int64]
Cutter: TypeAlias = Callable[[int, int, int, int], Sequence[int]]  # from a range, a number of parts, and the ranks of a group, to bounds


class Figures(NamedTuple):
    """Expected loads of a cut, each relative to those of a cut into equal parts."""

    entries: float = 1.0  # input entries of the fullest part
    summed: float = 1.0  # entries of the sum in the fullest part
    gathered: float = 1.0  # bytes that the slowest rank waits for in an allgather of the sums
    grouped: float = 1.0  # entries of the fullest section of one group, if groups split
    in_step: bool = False  # whether the sums are gathered in step, as those of parts of unequal widths are


class Parts(NamedTuple):
    """A cut of a range, with its expected loads."""

    bounds: tuple[int, ...]
    figures: Figures = Figures()


def quantile_places(count: int, rank: int, ranks: int) -> Counts:
    """Return the indices, among ``count`` entries of a rank, of the entries whose positions it sends to the other ranks.

    Examples
    --------
    >>> quantile_places(128, 0, 2)[:3], quantile_places(128, 1, 2)[:3]
    (array([0, 2, 4]), array([1, 3, 5]))
    """
    fractions = 2 * ranks * np.arange(QUANTILES, dtype=np.int64) + 2 * rank + 1
    whole, rest = divmod(count, 2 * ranks * QUANTILES)
    return fractions * whole + fractions * rest // (2 * ranks * QUANTILES)


def nearest_cut(below: Mapping[int, int], parts: int) -> list[int]:
    """Return the given places that best cut everything into equal parts, given how much is below each place.

    It is used where only these places have been counted, as in Ok-Topk (section 3.1.1).

    Examples
    --------
    >>> nearest_cut({0: 0, 10: 90, 40: 130, 100: 200}, 2)
    [0, 10, 100]
    """
    places, counts = zip(*sorted(below.items()), strict=True)
    wanted = np.arange(1, parts) * counts[-1] // parts
    after = np.maximum(np.searchsorted(counts, wanted), 1)
    nearer = np.take(counts, after) - wanted < wanted - np.take(counts, after - 1)
    return [0, *(places[at] for at in np.where(nearer, after, after - 1).tolist()), places[-1]]


def bounds_of(stream: SparseStream, parts: int, cut: Cutter | None, group: int = 0) -> Sequence[int]:
    """Return the bounds of ``parts`` parts of a stream's range: those of ``cut`` (see :meth:`Spread.parts`), or equal widths."""
    return parts_of(stream, parts) if cut is None else cut(stream.lo, stream.hi, parts, group or parts)


def is_uneven(stream: SparseStream, bounds: Sequence[int]) -> bool:
    """Return whether bounds of parts of a stream's range are not those of equal widths."""
    return list(bounds) != parts_of(stream, len(bounds) - 1)


class Spread:
    """The distribution over positions of the entries of all ranks, and of the entries of their sum.

    Parameters
    ----------
    size : int
        N, at most ``MOST_POSITIONS``.
    places : ndarray of int64
        Positions, in any order.
    weights : ndarray of int64
        Number of entries of all ranks that each position represents, times ``QUANTILES``; not all zero.
    shares : ndarray of int64, optional
        Entries of the sum per input entry near each position, as fractions of ``UNIT``; by default the sum is dense.
    most : int
        Entries of the rank with most.
    owners : ndarray of int64, optional
        The rank of each position; by default all ranks have the same distribution.
    """

    size: int
    most: int
    union: int

    def __init__(self, size: int, places: Counts, weights: Counts, shares: Counts | None, most: int, owners: Counts | None = None) -> None:
        self._given = places, weights, owners
        order = np.argsort(places, kind="stable")
        places, weights = places[order], weights[order]
        self.size, self.most = size, most
        self.total: int = max(1, int(weights.sum()) // QUANTILES)
        self._places = np.concatenate([[0], places, [size]])
        self._entries = _below(weights)
        if shares is None:
            self.union, self._sum = size, self._places * UNIT // size
        else:
            weights = weights >> max(0, int(weights.sum()).bit_length() - 40)
            left = weights * shares[order]
            self.union = max(1, self.total * int(left.sum()) // (UNIT * int(weights.sum())))
            self._sum = _below(left)
        self._sent = self._in_bits()
        self._found: dict[tuple[int, int, int, int, int], Parts] = {}
        digest = hashlib.blake2b(repr((size, most, self.total, self.union)).encode(), digest_size=8)
        for array in (self._places, self._entries, self._sum):
            digest.update(array.astype("<i8").tobytes())
        self.digest: bytes = digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spread) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def cutter(self, dense_bits: int = 0) -> Cutter:
        """Return a function that returns the bounds of :meth:`parts`."""
        return lambda lo, hi, parts, group: self.parts(lo, hi, parts, dense_bits, group).bounds

    def parts(self, lo: int, hi: int, parts: int, dense_bits: int = 0, group: int = 0) -> Parts:
        """Return the best cut of a range, or equal widths if these cost about as little.

        Parameters
        ----------
        lo, hi : int
            The range.
        parts : int
        dense_bits : int
            Bits of a value if the sums of parts are gathered as dense blocks; a zero takes one bit.
        group : int, default parts
            Ranks of a group. Each group splits the range into that many sections of parts, and halves these among the groups; see
            :func:`~sparseallreduce.algorithms.exchange.places_of`.
        """
        group = group or parts
        key = lo, hi, parts, dense_bits, group
        if key not in self._found:
            even = boundaries(hi - lo, parts, lo)
            alone = parts == 1 or hi - lo < 2
            self._found[key] = Parts(tuple(even)) if alone else self._best(np.array(even, np.int64), dense_bits, group)
        return self._found[key]

    def _in_bits(self) -> Counts:
        """Return the encoded size of the sum below each position, as a fraction: bits of values, and of positions by the shortest codec.

        A range of the sum takes a bit for each of its positions, or, if entries are far apart, 32 bits for each entry.
        """
        edges = _cut(self._places, self._sum, _BINS)
        each = max(1, self.union // _BINS)
        bits = _BITS * each + np.minimum(np.diff(edges), _BITS * each)
        return _at(edges, _full(np.concatenate([[0], np.cumsum(bits)])), self._places)

    @cached_property
    def occupancy(self) -> tuple[float, float]:
        """The fraction of positions that the entries of a rank occupy, and the same for the sum.

        Entries occupy the positions on which as many random entries would be equally far apart. The distance is a geometric mean, since an
        encoded index has as many bits as the logarithm of the distance to the next.
        """
        return self._occupancy(self._entries), self._occupancy(self._sum)

    def _occupancy(self, below: Counts) -> float:
        widths = np.maximum(np.diff(_cut(self._places, below, _BINS)), 1) * _BINS
        # Logarithms to 0.09, of operations that all machines round alike; the inverse likewise.
        mantissas, exponents = np.frexp(widths / self.size)
        mean = (int(exponents.sum()) - 2 * _BINS + int((mantissas * 2 * UNIT).astype(np.int64).sum()) / UNIT) / _BINS
        whole = int(mean // 1)
        return min(1.0, (1.0 + mean - whole) * (2.0**whole))

    def _best(self, even: Counts, dense_bits: int, group: int) -> Parts:
        lo, hi, parts = int(even[0]), int(even[-1]), len(even) - 1
        inside = slice(*np.searchsorted(self._places, [lo + 1, hi]))
        places = np.concatenate([even[:1], self._places[inside], even[-1:]])
        found, amounts = [], []
        for below, total in ((self._entries, self.total), (self._sum, self.union)):
            low, high = _at(self._places, below, even[[0, -1]]).tolist()
            found.append(_full(np.concatenate([[0], below[inside] - low, [high - low]])))
            amounts.append(total * (high - low) // UNIT)
        (put_in, left), gathered = amounts, found[1]
        if not dense_bits:
            low, high = _at(self._places, self._sent, even[[0, -1]]).tolist()
            gathered = _full(np.concatenate([[0], self._sent[inside] - low, [high - low]]))
        if dense_bits:  # an entry of the sum takes a half of what one of a rank does, or more
            bits = max(1, left * dense_bits + hi - lo)
            share = left * dense_bits * UNIT // bits
            gathered = _full(gathered * share + (places - lo) * UNIT // (hi - lo) * (UNIT - share))
            left = bits // (2 * dense_bits)
        below = np.stack([*found, gathered])
        sent, evenly = self.most * put_in // self.total * UNIT, int(_waited(np.full((1, parts), UNIT // parts, np.int64))[0])
        groups = parts // group

        def loads(bounds: Counts, interleaved: bool) -> tuple[Counts, Counts, Counts]:
            """Return the entries of sections, the sums of parts, and the amounts awaited in the allgather, with a row for each cut."""
            each = np.diff(_at(places, below, bounds), axis=-1)
            held = places_of(parts, group, interleaved)
            return each[0][:, held].reshape(-1, groups, group).sum(axis=1), each[1], _waited(each[2][:, held])

        def costs_of(entries: Counts, waited: Counts) -> list[int]:
            return [
                max(most * put_in // groups, sent) + last * left
                for most, last in zip(entries.max(axis=1).tolist(), waited.tolist(), strict=True)
            ]

        entries, summed, waited = loads(even[np.newaxis], False)
        chosen, best = even, 0
        cost = costs_of(entries, waited)[0]
        least = max(UNIT // parts * put_in, sent) + evenly * left
        if cost * _EVEN[1] > least * _EVEN[0]:
            mixed = [(_MIXTURES - mixture) * below[0] + mixture * gathered for mixture in range(_MIXTURES + 1)]
            bounds = np.stack([_cut(places, each, parts) for each in mixed])
            tried = loads(bounds, True)
            costs = costs_of(tried[0], tried[2])
            if min(costs) < cost:
                best = costs.index(min(costs))
                chosen, (entries, summed, waited) = bounds[best], tried
        figures = Figures(
            max(1.0, int(entries[best].max()) * group / UNIT),
            max(1.0, int(summed[best].max()) * parts / UNIT),
            max(1.0, int(waited[best]) / evenly),
            max(1.0, self._grouped(chosen, group, chosen is not even)),
            in_step=chosen is not even,
        )
        return Parts(tuple(chosen.tolist()), figures)

    def _grouped(self, bounds: Counts, group: int, interleaved: bool) -> float:
        """Return the entries of the fullest section of a group, relative to the mean of all groups and sections."""
        places, weights, owners = self._given
        parts = len(bounds) - 1
        groups = parts // group
        if groups == 1 or owners is None:
            return 1.0
        part = np.searchsorted(bounds[1:-1], places, side="right")
        section = part % group if interleaved else part // groups
        put_in = np.zeros((groups, group), np.int64)
        np.add.at(put_in, (owners % parts // group, section), weights)
        return int(put_in.max()) * parts / max(1, int(put_in.sum()))


def _below(weights: Counts) -> Counts:
    """Return the fraction of the total weight below each position and the ends; a position's own weight counts half on either side."""
    weights = weights >> max(0, int(weights.sum()).bit_length() - 40)
    ends = np.cumsum(weights)
    return _full(np.concatenate([[0], ends - weights // 2, ends[-1:]]))


def _full(below: Counts) -> Counts:
    """Return increasing numbers as fractions of the last one, which becomes ``UNIT`` unless all are zero."""
    below = below >> max(0, int(below[-1]).bit_length() - 42)
    return below * UNIT // max(1, int(below[-1]))


def _cut(places: Counts, below: Counts, parts: int) -> Counts:
    """Return the bounds of parts as equal as possible, given the amount below each position, with linear interpolation."""
    wanted = int(below[-1]) * np.arange(1, parts, dtype=np.int64) // parts
    after = np.clip(np.searchsorted(below, wanted), 1, len(below) - 1)
    low, high, first, last = below[after - 1], below[after], places[after - 1], places[after]
    inner = first + (last - first) * (wanted - low) // np.maximum(high - low, 1)
    return np.concatenate([places[:1], inner, places[-1:]])


def _at(places: Counts, below: Counts, positions: Counts) -> Counts:
    """Return the interpolated amount below some positions; ``below`` may have leading axes."""
    after = np.clip(np.searchsorted(places, positions), 1, len(places) - 1)
    low, high, first, last = below[..., after - 1], below[..., after], places[after - 1], places[after]
    found: Counts = low + (high - low) * (positions - first) // np.maximum(last - first, 1)
    return found


def _waited(sizes: Counts) -> Counts:
    """Return, for each cut, the size that the slowest rank waits for in an allgather of its parts, summed over the rounds."""
    ranks, held = sizes.shape[1], 1
    waited = np.zeros(len(sizes), np.int64)
    if ranks == lower_power_of_two(ranks):
        for distance in halvings(ranks):
            waited += sizes.max(axis=1)
            sizes = sizes + sizes[:, np.arange(ranks) ^ distance]
        return waited
    ends = np.cumsum(np.concatenate([np.zeros_like(sizes[:, :1]), sizes, sizes], axis=1), axis=1)
    while held < ranks:
        width = min(held, ranks - held)
        waited += (ends[:, width : width + ranks] - ends[:, :ranks]).max(axis=1)
        held *= 2
    return waited
