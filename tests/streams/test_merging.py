"""A reduction that goes on while its second operand arrives: the same bits and the same form as with all of it there."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_OPERATORS, DTYPES, cases

from sparseallreduce import SparseStream
from sparseallreduce.streams import merging
from sparseallreduce.streams.dtypes import is_float
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.partition import slice_range
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import INDEX_CODECS, Assembly, packets
from sparseallreduce.streams.wire.values import quantised


class Coming:
    """A stream of which the first entries are here, as many as it is told."""

    def __init__(self, stream):
        self._stream, self.stored, self.arrived = stream, stream.stored, 0

    def prefix(self):
        indices = None if self._stream.is_dense else self._stream._entries()[0][: self.arrived]
        return indices, self._stream._stored[: self.arrived]


def merged(reduction, mine, theirs, first, steps, least):
    with mock.patch.object(merging, "_LEAST", least):
        sum_of_both, coming = Merging(reduction, mine, first), Coming(theirs)
        for step in steps:
            coming.arrived = min(coming.arrived + step, coming.stored)
            sum_of_both.advance(coming)
        return sum_of_both.finish(theirs)


def paired(reduction, mine, theirs, first):
    return reduction.pair(mine, theirs) if first else reduction.pair(theirs, mine)


def same(one, other):
    assert (one.is_dense, one.dtype, one.size, one.lo, one.hi, one.stored) == (
        *(other.is_dense, other.dtype, other.size, other.lo, other.hi, other.stored),
    )
    assert one._stored.shape == other._stored.shape and one._stored.tobytes() == other._stored.tobytes()
    assert (one._present is None) == (other._present is None)
    if not one.is_dense:
        assert one._entries()[0].dtype == other._entries()[0].dtype
        assert one._entries()[0].tobytes() == other._entries()[0].tobytes()
    elif one._present is not None:
        assert one._present.tobytes() == other._present.tobytes()


def operand(reduction, seed, dtype, width, size, density, form):
    """A stream as an algorithm holds it: values of small range, NaN with payloads, zeros of both signs."""
    rng = np.random.default_rng(seed)
    present = np.flatnonzero(rng.random(size) < density)
    shape = (len(present),) if width is None else (len(present), width)
    values = rng.integers(-3, 4, shape).astype(dtype)
    if is_float(values.dtype):
        bits = values.view(f"u{values.itemsize}")
        strange = rng.random(shape) < 0.2
        bits[strange] = rng.integers(0, 2 ** (8 * values.itemsize) - 1, np.count_nonzero(strange), bits.dtype, endpoint=True)
        values[rng.random(shape) < 0.1] = -0.0
    stream = reduction.enter(SparseStream(present, values, size, switch_density=1.0))
    if form == "part":
        return slice_range(stream, size // 4, size - size // 5)
    if form == "dense":
        return reduction.densify(stream)
    return Reduction.freeze(reduction.densify(stream)) if form == "frozen" else stream


def held(stream):
    """All that may not change: the arrays of an operand that is frozen or sparse."""
    return None if stream.is_dense and stream._owned else stream._stored.tobytes()


STEPS = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 700)), max_size=12)


@pytest.mark.parametrize("op", ALL_OPERATORS)
@given(data=st.data(), first=st.booleans(), steps=STEPS, least=st.sampled_from([1, 2, 50, 4096]))
def test_the_sum_is_that_of_the_pair_however_the_other_arrives(op, data, first, steps, least):
    operator = ALL_OPERATORS[op]
    dtype = data.draw(st.sampled_from([dtype for dtype in DTYPES if not (np.dtype(dtype).kind == "c" and op not in ("sum", "prod"))]))
    reduction = Reduction(operator, data.draw(st.sampled_from([None, 0.0, 0.1, 0.5, 1.0])))
    shared = (dtype, data.draw(st.sampled_from([None, None, 1, 3])), data.draw(st.sampled_from([1, 40, 1000])))
    part = data.draw(st.booleans())
    operands = []
    for seed in (1, 2):
        form = "part" if part else data.draw(st.sampled_from(["sparse", "sparse", "dense", "frozen"]))
        density = data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.6, 1.0]))
        draw = data.draw(st.integers(0, 2**30))
        operands.append([operand(reduction, draw * 2 + seed, *shared, density, form) for _ in range(2)])
    (mine, ours), (theirs, other) = operands
    before = held(mine)
    with np.errstate(all="ignore"):
        got = merged(reduction, mine, theirs, first, steps, least)
        expected = paired(Reduction(operator, reduction.switch_density), ours, other, first)
    same(got, expected)
    assert got.switch_density == expected.switch_density
    assert held(mine) == before or before is None


@given(case=cases(ranks=st.just(2)), first=st.booleans(), steps=STEPS, density=st.sampled_from([None, 0.0, 0.05, 1.0]))
def test_the_sum_of_any_two_streams_is_that_of_the_pair(case, first, steps, density):
    reduction = Reduction(case.operator, density)
    mine, theirs = (Reduction.freeze(reduction.enter(stream)) for stream in case.streams)
    with np.errstate(all="ignore"):
        same(merged(reduction, mine, theirs, first, steps, 1), paired(reduction, mine, theirs, first))


@given(data=st.data(), first=st.booleans(), nbytes=st.sampled_from([1, 1 << 14]), name=st.sampled_from(["exact", "float16", "qsgd4"]))
def test_the_sum_goes_on_with_the_pieces_of_a_message(data, first, nbytes, name):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    reduction = Reduction(switch_density=data.draw(st.sampled_from([None, 0.2, 1.0])))
    streams = []
    for density in (0.1, data.draw(st.sampled_from([0.001, 0.1, 0.4]))):
        present = np.flatnonzero(rng.random(9000) < density)
        streams.append(reduction.enter(SparseStream(present, rng.standard_normal(len(present)), 9000)))
    mine, theirs = (Reduction.freeze(stream) for stream in (streams[0], quantised(streams[1], name, 3)))
    expected = paired(reduction, mine, theirs, first)
    assembly, sum_of_both = Assembly(), Merging(reduction, mine, first)
    for packet in packets([theirs], [INDEX_CODECS[2]], nbytes):
        assembly.take(packet)
        if assembly.growing is not None:
            with mock.patch.object(merging, "_LEAST", 1):
                sum_of_both.advance(assembly.growing)
    same(sum_of_both.finish(assembly.streams[0]), expected)
