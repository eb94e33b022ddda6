"""Cutting a stream into ranges and joining ranges again loses nothing, copies nothing, and knows the ends."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import cases

from sparseallreduce import SparseStream
from sparseallreduce.streams.partition import boundaries, concatenate, slice_range, split
from sparseallreduce.streams.reduction import Reduction


@given(size=st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1)), parts=st.integers(1, 1024), lo=st.integers(0, 2**40))
def test_ranges_cover_all_and_differ_by_at_most_one(size, parts, lo):
    bounds = boundaries(size, parts, lo)
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (lo, lo + size)
    extents = {after - before for before, after in pairwise(bounds)}
    assert extents <= {size // parts, -(-size // parts)}


@given(case=cases(ranks=st.just(1)), parts=st.integers(1, 20), forced=st.booleans())
def test_a_split_stream_joins_to_itself(case, parts, forced):
    reduction = Reduction(case.operator)
    stream = reduction.enter(case.streams[0])
    stream = reduction.densify(stream) if forced else stream
    bounds = boundaries(case.size, parts)
    pieces = split(stream, bounds)
    assert [(piece.lo, piece.hi) for piece in pieces] == list(pairwise(bounds))
    assert sum(piece.nnz for piece in pieces) == stream.nnz
    for piece in pieces:
        assert (piece.size, piece.dtype, piece.width) == (stream.size, stream.dtype, stream.width)
        assert piece.is_dense == stream.is_dense
        assert all(piece.lo <= index < piece.hi for index in piece.indices.tolist())
        assert bits(piece) == bits(slice_range(stream, piece.lo, piece.hi))
    joined = concatenate(pieces, reduction)
    assert (joined.lo, joined.hi) == (0, case.size)
    assert_reduction(reduction.leave(joined), case.entries, case.size, case.operator)


@given(case=cases(ranks=st.just(1)), bounds=st.lists(st.integers(0, 300), min_size=2, max_size=9))
def test_any_bounds_cut_where_they_say(case, bounds):
    bounds = sorted(min(bound, case.size) for bound in bounds)
    (stream,), (entries,) = case.streams, case.entries
    for piece, lo, hi in zip(split(stream, bounds), bounds, bounds[1:]):
        inside = (entries.indices >= lo) & (entries.indices < hi)
        assert piece.indices.tolist() == entries.indices[inside].tolist()
        assert piece.values.tobytes() == entries.values[inside].tobytes()


@given(case=cases(ranks=st.integers(1, 4)), dense=st.lists(st.booleans(), min_size=9, max_size=9), parts=st.integers(1, 9))
def test_parts_in_mixed_forms_join_to_the_whole(case, dense, parts):
    reduction = Reduction(case.operator)
    whole = reduction.many([reduction.enter(stream) for stream in case.streams])
    pieces = [reduction.densify(piece) if force else piece for piece, force in zip(split(whole, boundaries(case.size, parts)), dense)]
    before = [bits(piece) for piece in pieces]
    joined = concatenate(pieces, reduction)
    assert [bits(piece) for piece in pieces] == before
    assert_reduction(reduction.leave(joined), case.entries, case.size, case.operator, case.exact)


def test_a_part_of_a_part():
    stream = SparseStream([1, 5, 6, 9], np.float32([1, 5, 6, 9]), 10)
    for form in (stream, Reduction().densify(stream)):
        middle = slice_range(form, 4, 8)
        assert slice_range(middle, 6, 8).indices.tolist() == [6]
        assert [part.nnz for part in split(middle, [4, 4, 6, 7, 8])] == [0, 1, 1, 0]
        assert middle.to_dense().tolist() == [0, 0, 0, 0, 0, 5, 6, 0, 0, 0]
        assert repr(middle).startswith("SparseStream(size=10, range=[4, 8), nnz=2, dtype=float32, ")


def test_parts_are_views():
    stream = SparseStream([1, 5], np.float32([1, 5]), 10)
    for form in (stream, Reduction().densify(stream)):
        assert all(np.shares_memory(part._stored, form._stored) for part in split(form, [0, 3, 10]))


@pytest.mark.parametrize("size", [2**32, 2**32 + 1, 2**40, 2**63 - 1])
@pytest.mark.parametrize("parts", [1, 2, 7, 64])
def test_the_ends_of_large_dimensions(size, parts):
    indices = np.array([0, size // 2, size - 1], np.uint64)
    stream = SparseStream(indices, np.float32([1, 2, 3]), size)
    bounds = boundaries(size, parts)
    pieces = split(stream, bounds)
    assert sum(piece.nnz for piece in pieces) == 3
    assert pieces[-1].indices.tolist()[-1] == size - 1
    assert slice_range(stream, size, size).nnz == slice_range(stream, 0, 0).nnz == 0
    assert concatenate(pieces, Reduction()).indices.tolist() == indices.tolist()


def test_fewer_positions_than_parts_leave_some_empty():
    assert boundaries(2, 5) == [0, 0, 0, 1, 1, 2]
    pieces = split(SparseStream([0, 1], np.float32([1, 2]), 2), boundaries(2, 5))
    assert [piece.nnz for piece in pieces] == [0, 0, 1, 0, 1]
    assert concatenate(pieces, Reduction()).to_dense().tolist() == [1, 2]
