"""Streams fused to one and cut again are what they were, wherever they begin and whatever their form."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_reduction
from strategies import cases

from sparseallreduce import SparseStream
from sparseallreduce.streams.fusion import Fusion, fused_alike, fusion_of


@given(case=cases(ranks=st.integers(1, 6)), density=st.sampled_from([None, None, 0.05]))
def test_a_fusion_is_cut_to_what_was_fused(case, density):
    """The streams of several ranks stand for those of a list."""
    is_sum = case.operator.is_sum
    fusion = fusion_of(case.streams)
    (whole,) = fusion.fuse(case.streams, masked=not is_sum)
    assert whole.size == case.size * len(case.streams)
    for part, entries in zip(fusion.cut((whole,), density, is_sum), case.entries, strict=True):
        assert_reduction(part, [entries], case.size, case.operator)
        assert part.is_dense == (part.nnz > part.switch_point) or case.size == 0 or is_sum
        assert part.switch_density == density
    alike = fused_alike(case.streams)
    if any(stream.is_dense for stream in case.streams):
        assert alike is None
    else:
        assert alike[1].indices.tolist() == whole.indices.tolist() and alike[1].values.tobytes() == whole.values.tobytes()


def test_a_fusion_shares_no_memory_with_what_was_fused():
    stream = SparseStream([1, 3], np.float32([1, 3]), 10)
    for streams in ([stream], [stream, stream], [stream] * 3):
        fusion, whole = fused_alike(streams)
        assert not whole.overlaps(stream)
        parts = fusion.cut((whole,), None, True)
        assert [part.indices.tolist() for part in parts] == [[1, 3]] * len(streams)
        assert not any(one.overlaps(other) for place, one in enumerate(parts) for other in parts[:place])


@pytest.mark.parametrize("size", [2**32, 2**32 - 1, 2**63 - 1])
def test_indices_are_as_long_as_the_sizes_need(size):
    streams = [SparseStream([0, size - 1], [1.0, 2.0], size), SparseStream([], [], 0), SparseStream([4], [3.0], 5), SparseStream([], [], 0)]
    fusion = fusion_of(streams)
    parts = fusion.cut(fusion.fuse(streams, masked=False), None, True)
    assert [part.indices.tolist() for part in parts] == [[0, size - 1], [], [4], []]
    assert [part.indices.dtype for part in parts] == [stream.indices.dtype for stream in streams]
    assert len(fusion.groups) == (2 if size == 2**63 - 1 else 1)  # of which no size is above what a stream may have


@pytest.mark.parametrize("empty", [1, 3])
def test_streams_of_no_size_end_where_32_bits_do(empty):
    streams = [SparseStream([2**32 - 1], [1.0], 2**32)] + [SparseStream([], [], 0)] * empty
    fusion, whole = fused_alike(streams)
    assert whole.indices.dtype == np.uint32
    assert [part.nnz for part in fusion.cut((whole,), None, True)] == [1] + [0] * empty


def test_streams_of_a_kind_go_together_in_the_order_of_the_list():
    kinds = [(np.dtype("float32"), ()), (np.dtype("float64"), ()), (np.dtype("float32"), (3,))]
    fusion = Fusion((5, 6, 7, 8, 9), tuple(kinds[place] for place in (0, 1, 0, 2, 1)))
    assert [list(group.members) for group in fusion.groups] == [[0, 2], [1, 4], [3]]
    assert [group.size for group in fusion.groups] == [12, 15, 8]


def test_many_long_streams_are_shifted_like_short_ones():
    rng = np.random.default_rng(0)
    streams = [made(rng) for _ in range(4)]
    fusion, whole = fused_alike(streams)
    dense = np.concatenate([stream.to_dense() for stream in streams])
    np.testing.assert_array_equal(whole.to_dense(), dense)
    for part, stream in zip(fusion.cut((whole,), None, True), streams, strict=True):
        np.testing.assert_array_equal(part.to_dense(), stream.to_dense())


def made(rng):
    indices = np.flatnonzero(rng.random(9000) < 0.3)
    return SparseStream(indices, np.arange(1, len(indices) + 1, dtype=np.float32), 9000)
