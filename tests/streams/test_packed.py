"""Streams that are packed into rows of bytes, and their reduction there."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import DTYPES, cases

from sparseallreduce import SparseStream
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.packed import Layout, Rows, pack, packed_bytes
from sparseallreduce.streams.reduction import Reduction


def reduced(streams, op=SUM, density=None):
    reduction = Reduction(op, density)
    messages = [pack(stream) for stream in streams]
    rows = Rows.of(messages)
    result = rows.reduced([stream.stored for stream in streams], list(map(len, messages)), Layout.of(streams[0], reduction), reduction)
    before = bits(result)
    rows.bytes[:] = 255  # the next operation's
    assert bits(result) == before
    return result


@given(cases(ranks=st.integers(2, 9)), st.sampled_from([None, 0.1]))
def test_rows_hold_the_reduction(case, density):
    """Of any streams that travel so: those of other operators than the sum only if they are sparse."""
    assume(case.operator is SUM or not any(stream.is_dense for stream in case.streams))
    result = reduced(case.streams, case.operator, density)
    assert_reduction(result, case.entries, case.size, case.operator, case.exact)
    assert result.is_dense or result.stored <= Reduction(case.operator, density).limit(case.streams[0])
    assert result.switch_density == density


def test_a_sum_stays_sparse_while_its_entries_allow():
    many, few = (SparseStream(np.arange(count), np.ones(count, np.float32), 100) for count in (40, 10))
    assert reduced([many] * 2).is_dense  # 80 come together, of which 50 may be sparse
    result = reduced([few] * 9)  # 20 at a time
    assert not result.is_dense
    np.testing.assert_array_equal(result.values, np.full(10, 9, np.float32))


@pytest.mark.parametrize("size", [10, 2**33])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_indices_lie_where_they_can_be_read(size, dtype, count):
    stream = SparseStream(np.arange(count), np.ones(count, dtype), size)
    packed = pack(stream)
    assert len(packed) == packed_bytes(stream)
    assert (len(packed) - stream.indices.nbytes) % stream.indices.itemsize == 0
    assert reduced([stream, stream]).indices.tolist() == list(range(count))


def test_results_are_frozen():
    dense = SparseStream.from_dense(np.ones(5))
    assert len(pack(dense)) == packed_bytes(dense) == 40
    result = reduced([dense, dense])
    assert result.is_dense
    assert not result._stored.flags.writeable
