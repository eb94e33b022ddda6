"""Fuse several streams into one: they are placed one after another in one index space, reduced together, and cut apart again.

Streams of one dtype and width form a group, which is fused to one stream whose size is the sum of theirs. The layout of such a list of
streams is a :class:`Fusion`, created once for all lists with the same sizes, dtypes and widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import StreamTypeError
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.kernels.backend import MIXED, array_module
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream, index_dtype, switch_point

__all__ = ["Fusion", "Group", "fused_alike", "fusion_of"]

_LARGEST = 2**63 - 1  # size of a stream
_LONG = 512  # average entries above which the indices of each stream are shifted by a separate call
# Counting the zeros of a dense part takes a pass over it; for a longer one, a sample shows whether that is worth it.
_SAMPLED, _SAMPLES = 1 << 14, 1 << 10

Kind = tuple[np.dtype[Any], tuple[int, ...]]  # dtype, and shape of a row: empty, or the width alone


class Group:
    """The streams of a list that have one dtype and width, and the offset of each in the fused stream.

    Parameters
    ----------
    members : sequence of int
        Their indices in the list.
    sizes : sequence of int
    kind : Kind
    """

    members: Sequence[int]
    sizes: Sequence[int]
    dtype: np.dtype[Any]
    row: tuple[int, ...]

    def __init__(self, members: Sequence[int], sizes: Sequence[int], kind: Kind) -> None:
        self.members, self.sizes, (self.dtype, self.row) = members, sizes, kind
        self.bounds: list[int] = [0, *accumulate(sizes)]
        self.size: int = self.bounds[-1]
        self.indices: np.dtype[Any] = index_dtype(self.size)
        self._offsets = np.array([min(bound, max(self.size - 1, 0)) for bound in self.bounds[:-1]], self.indices)
        inner = [bound for bound in self.bounds[1:-1] if bound < self.size]  # the others, of streams of no size, may be 2**32
        self._inner, self._behind = np.array(inner, self.indices), len(sizes) - 1 - len(inner)
        self._limits: dict[float | None, NDArray[np.int64]] = {}  # entries of a sparse part, by switch density

    def fuse(self, streams: Sequence[SparseStream], masked: bool) -> SparseStream:
        """Return the fused stream, on new arrays; ``masked`` if zeros of a dense form must be distinguished from absent entries."""
        width = self.row[0] if self.row else None
        if sum([len(stream._stored) for stream in streams]) > switch_point(self.size, self.dtype, self.size, width):
            return self._fuse_dense(streams, masked)
        return self.fuse_sparse(*zip(*[stream._entries() for stream in streams]))

    def fuse_sparse(self, indices: Sequence[NDArray[Any]], values: Sequence[NDArray[Any]]) -> SparseStream:
        """Return the fused stream, given the indices and values of each stream."""
        counts = [len(each) for each in indices]
        count = sum(counts)
        if values[0].__class__ is not np.ndarray:
            xp = array_module(values[0])
            fused = xp.concatenate([each.astype(self.indices, copy=False) for each in indices])
            self._shift(np.add, fused, counts, fused)
            return SparseStream._sparse_form(fused, xp.concatenate(values), self.size)
        fused = np.concatenate(indices, out=memory.empty(count, self.indices))
        self._shift(np.add, fused, counts, fused)
        joined = np.concatenate(values, out=memory.empty((count, *self.row), self.dtype))
        return SparseStream._sparse_form(fused, joined, self.size)

    def _fuse_dense(self, streams: Sequence[SparseStream], masked: bool) -> SparseStream:
        xp = array_module(streams[0]._stored)
        array = memory.full((self.size, *self.row), self.dtype.type(0), xp)
        present = xp.zeros(self.size, np.bool_) if masked else None
        for stream, (low, high) in zip(streams, pairwise(self.bounds), strict=True):
            if stream.is_dense:
                array[low:high] = stream._stored
                if present is not None:
                    present[low:high] = stream._mask()
            else:
                indices, values = stream._entries()
                kernels.scatter_set(indices, values, 0, array[low:high])
                if present is not None:
                    present[low:high][kernels.places(indices, 0, stream.size)] = True
        return SparseStream._dense_form(array, self.size, present=present)

    def cut(self, fused: SparseStream, density: float | None, is_sum: bool) -> list[SparseStream]:
        """Return the parts of a reduced stream, each sparse or dense by its own switch point; they share the memory of the whole."""
        limits = self._limits_of(density)
        if fused._array is not None:
            ranges = zip(self.sizes, pairwise(self.bounds), limits.tolist(), strict=True)
            return [_dense_part(fused, size, low, high, limit, density) for size, (low, high), limit in ranges]
        indices, values = fused._entries()
        xp = array_module(indices)
        inner = (np.searchsorted(indices, self._inner) if xp is np else xp.searchsorted(indices, xp.asarray(self._inner))).tolist()
        cuts = [0, *accumulate(inner, max), *[len(indices)] * (self._behind + 1)]
        counts = [high - low for low, high in pairwise(cuts)]
        shifted = memory.empty(len(indices), self.indices, xp)
        self._shift(np.subtract, indices, counts, shifted)
        make = SparseStream._sparse_form
        if index_dtype(min(self.sizes)) == self.indices:
            ranges = zip(self.sizes, cuts, cuts[1:])
            parts = [make(shifted[low:high], values[low:high], size, 0, size, density) for size, low, high in ranges]
        else:
            parts = []
            for size, (low, high) in zip(self.sizes, pairwise(cuts), strict=True):
                parts.append(make(shifted[low:high].astype(index_dtype(size)), values[low:high], size, 0, size, density))
        for place in np.flatnonzero(np.array(counts) > limits).tolist():
            parts[place]._switch()
            if is_sum:
                parts[place]._present = None  # as of any dense sum
            Reduction.freeze(parts[place])
        return parts

    def _shift(self, by: np.ufunc, indices: NDArray[Any], counts: Sequence[int], out: NDArray[Any]) -> None:
        """Add the offset of each stream to its indices, or subtract it."""
        if indices.__class__ is not np.ndarray:  # by a few kernels, however many streams there are
            xp = array_module(indices)
            streams = xp.searchsorted(xp.asarray(np.cumsum(counts)), xp.arange(len(indices)), side="right")
            by(indices, xp.asarray(self._offsets)[streams], out=out)
            return
        if len(indices) <= _LONG * len(counts):
            by(indices, np.repeat(self._offsets, counts), out=out)
            return
        low = 0
        for offset, count in zip(self._offsets, counts, strict=True):
            high = low + count
            by(indices[low:high], offset, out=out[low:high], dtype=self.indices)
            low = high

    def _limits_of(self, density: float | None) -> NDArray[np.int64]:
        limits = self._limits.get(density)
        if limits is None:
            width = self.row[0] if self.row else None
            limits = np.array([switch_point(size, self.dtype, size, width, density) for size in self.sizes], np.int64)
            self._limits = {density: limits}
        return limits


class Fusion:
    """The layout of a list of streams with these sizes and kinds; one object serves all such lists.

    Parameters
    ----------
    sizes : tuple of int
    kinds : tuple of Kind
        The kind of each stream.
    """

    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]

    def __init__(self, sizes: tuple[int, ...], kinds: tuple[Kind, ...]) -> None:
        self.sizes, self.kinds = sizes, kinds
        open_groups: dict[Kind, list[int]] = {}
        totals: dict[Kind, int] = {}
        members: list[tuple[Kind, list[int]]] = []
        for place, (size, kind) in enumerate(zip(sizes, kinds, strict=True)):
            if kind not in open_groups or totals[kind] + size > _LARGEST:
                open_groups[kind], totals[kind] = [], 0
                members.append((kind, open_groups[kind]))
            open_groups[kind].append(place)
            totals[kind] += size
        self.groups: list[Group] = [Group(group, [sizes[place] for place in group], kind) for kind, group in members]

    def fuse(self, streams: Sequence[SparseStream], masked: bool) -> tuple[SparseStream, ...]:
        """Return a fused stream for each group."""
        return tuple(group.fuse([streams[place] for place in group.members], masked) for group in self.groups)

    def cut(self, fused: Iterable[SparseStream], density: float | None, is_sum: bool) -> list[SparseStream]:
        """Return the parts of the groups' reductions, in the order of the list."""
        if len(self.groups) == 1:
            (only,) = fused
            return self.groups[0].cut(only, density, is_sum)
        parts: list[Any] = [None] * len(self.sizes)
        for group, whole in zip(self.groups, fused, strict=True):
            for place, part in zip(group.members, group.cut(whole, density, is_sum), strict=True):
                parts[place] = part
        return parts


def fusion_of(streams: Sequence[Any]) -> Fusion:
    """Return the layout of a list of streams, all on the host or all on a GPU.

    Raises
    ------
    StreamTypeError
        If the list contains anything else, or streams in both places.
    """
    for place, stream in enumerate(streams):
        if not isinstance(stream, SparseStream):
            raise StreamTypeError(f"element {place} of the list is no SparseStream, but of type {type(stream).__name__}")
    stored = [stream._stored for stream in streams]
    if set(map(type, stored)) > {np.ndarray}:  # and others
        devices = [stream.on_device for stream in streams]
        if True in devices:
            first, second = devices.index(True), devices.index(False)
            raise StreamTypeError(f"of the list element {first} lies on a GPU, and element {second} on the host: {MIXED}")
    return _fusion(tuple([stream.size for stream in streams]), tuple([(array.dtype, array.shape[1:]) for array in stored]))


def fused_alike(streams: Sequence[Any]) -> tuple[Fusion, SparseStream] | None:
    """Return the fused stream of streams that are all sparse and of one dtype and width, otherwise None.

    This takes a quarter of the two microseconds a stream of the general method.
    """
    if set(map(type, streams)) != {SparseStream}:
        return None
    values = [stream._values for stream in streams]
    if sum([each is None for each in values]):
        return None
    if set(map(type, values)) != {np.ndarray} or len({each.dtype for each in values}) > 1 or len({each.shape[1:] for each in values}) > 1:
        return None
    kind = values[0].dtype, values[0].shape[1:]
    fusion = _fusion_alike(tuple([stream.size for stream in streams]), kind)
    return None if len(fusion.groups) > 1 else (fusion, fusion.groups[0].fuse_sparse([stream._indices for stream in streams], values))


@lru_cache(maxsize=256)
def _fusion(sizes: tuple[int, ...], kinds: tuple[Kind, ...]) -> Fusion:
    return Fusion(sizes, kinds)


@lru_cache(maxsize=256)
def _fusion_alike(sizes: tuple[int, ...], kind: Kind) -> Fusion:
    return _fusion(sizes, (kind,) * len(sizes))


def _dense_part(fused: SparseStream, size: int, low: int, high: int, limit: int, density: float | None) -> SparseStream:
    """Return a part of a dense reduction, in sparse form if few of its values are non-zero."""
    array, present = fused._stored[low:high], fused._present
    part = SparseStream._dense_form(array, size, present=None if present is None else present[low:high], density=density)
    if size > _SAMPLED and present is None:
        sample = array[:: size // _SAMPLES]
        xp = array_module(array)
        filled = xp.asarray(sample != 0 if sample.ndim == 1 else sample.any(axis=1))
        if int(xp.count_nonzero(filled)) * size > 2 * limit * len(filled):
            return part
    if part.nnz > limit:
        return part
    return SparseStream._sparse_form(*part._entries(), size, density=density)
