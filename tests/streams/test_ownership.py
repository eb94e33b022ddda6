"""Who may write to the arrays of a stream: the stream says so, and no flag of its arrays.

Here arrays bear no marks, as CuPy's do not, so that whoever takes a frozen array for its own does change it.
"""

from contextlib import ExitStack, contextmanager
from itertools import product
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ALL_OPERATORS, cases
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce import SparseStream, StreamError
from sparseallreduce.streams import reduction as reductions
from sparseallreduce.streams import stream as streams
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.partition import concatenate, parts_of, slice_range, split
from sparseallreduce.streams.reduction import Reduction, divided
from sparseallreduce.streams.wire import decode, encode, values
from sparseallreduce.streams.wire.values import quantised

SIZE = 12  # phi is 6 for float32


@contextmanager
def without_marks():
    """No array is marked as read-only; yields the streams that come to be frozen, with the bytes that they had then."""
    frozen, freeze = [], Reduction.freeze

    def recording(stream):
        frozen.append((stream, held(stream)))
        return freeze(stream)

    with ExitStack() as stack:
        for module in (streams, reductions, values):
            stack.enter_context(mock.patch.object(module, "mark_read_only"))
        stack.enter_context(mock.patch.object(Reduction, "freeze", staticmethod(recording)))
        yield frozen


def held(stream):
    return [None if array is None else array.tobytes() for array in stream._arrays]


def unchanged(frozen):
    return all(held(stream) == before for stream, before in frozen)


def operand(reduction, seed, form, dtype="float32"):
    """A frozen stream in one of the forms that it may come in."""
    rng = np.random.default_rng(seed)
    places = np.sort(rng.choice(SIZE, 3, replace=False))
    stream = SparseStream(places, rng.integers(1, 9, 3).astype(dtype), SIZE)
    if form == "sparse":
        return reduction.enter(stream)
    if form == "sent":
        return reduction.freeze(reduction.densify(reduction.enter(stream)))
    if form == "the user's":
        return reduction.enter(SparseStream.from_dense(stream.to_dense(), switch_density=0.0))
    if form == "quantised":
        return quantised(reduction.densify(reduction.enter(stream)), "float16", 1)
    return reduction.leave(reduction.pair(reduction.densify(reduction.enter(stream)), reduction.enter(stream)))


@pytest.mark.parametrize("op", ALL_OPERATORS)
def test_no_reduction_changes_a_frozen_operand(op):
    reduction = Reduction(ALL_OPERATORS[op])
    forms = ["sparse", "sent", "the user's"] + ["quantised", "a result"] * reduction.op.is_sum  # the others enter before they are reduced
    with without_marks():
        for both in product(forms, forms):
            first, second = (operand(reduction, seed, form) for seed, form in enumerate(both))
            before = held(first), held(second)
            assert all(array is None or array.flags.writeable for stream in (first, second) for array in stream._arrays)
            for result in results_of(reduction, first, second):
                reduction.leave(result)
                if result.is_dense and result._owned:
                    result._stored[...] = 99  # it is the result's alone
            assert (held(first), held(second)) == before, both


def results_of(reduction, first, second):
    yield from (reduction.pair(first, second), reduction.pair(second, first), reduction.many([first, second, first]))
    yield from (Merging(reduction, first, place).finish(second) for place in (True, False))
    yield from (reduction.densify(first), reduction.pair(reduction.densify(first), second), divided(first, 2))
    cut = [split(stream, parts_of(stream, 2)) for stream in (first, second)]
    yield concatenate([reduction.pair(a, b) for a, b in zip(*cut, strict=True)], reduction)
    yield reduction.pair(slice_range(first, 0, 5), slice_range(second, 0, 5))
    if reduction.op.is_sum:
        yield from (first + second, *decode(encode([first, second])))


def test_a_dense_stream_that_is_owned_is_reused():
    for op, place in product(ALL_OPERATORS.values(), (0, 1)):
        reduction = Reduction(op)
        pair = [operand(reduction, seed, "sent") for seed in range(2)]
        pair[place] = reduction.densify(pair[place])
        assert np.shares_memory(reduction.pair(*pair)._stored, pair[place]._stored)


def test_an_array_has_one_owner_at_a_time():
    for op in ALL_OPERATORS.values():
        reduction = Reduction(op)
        with without_marks():
            first, second = (reduction.densify(operand(reduction, seed, "sent")) for seed in range(2))
            total = reduction.pair(first, second)
            assert total._owned and not first._owned and total._stored is first._stored
            left = reduction.leave(total)
            before = held(left)
            reduction.leave(total)
            for other in (first, total):
                reduction.pair(other, second)
            assert not total._owned and held(left) == before


def test_parts_of_what_is_owned_are_owned_and_of_what_is_frozen_frozen():
    reduction = Reduction()
    with without_marks():
        dense = reduction.densify(operand(reduction, 1, "sparse"))
        assert [part._owned for part in split(dense, [0, 5, SIZE])] == [True, True]
        assert [part._owned for part in split(reduction.freeze(dense), [0, 5, SIZE])] == [False, False]


@settings(max_examples=examples(20))
@given(case=cases(ranks=st.integers(1, 9)), algorithm=st.sampled_from([name for name in sar.algorithms() if name != "auto"]))
def test_what_was_sent_and_what_users_gave_stays_as_it_was_in_every_algorithm(case, algorithm):
    given = [held(stream) for stream in case.streams]
    with without_marks() as frozen, np.errstate(all="ignore"):
        sar.simulate(case.streams, algorithm=algorithm, op=case.operator)
        assert unchanged(frozen) and (frozen or case.ranks == 1)
    assert [held(stream) for stream in case.streams] == given


@pytest.mark.parametrize("reducer", [sar.OkTopk, sar.GTopk, sar.TopkA, sar.TopkDSA, sar.GaussianK, sar.HiTopK], ids=lambda each: each.name)
def test_what_was_sent_stays_as_it_was_in_every_reducer(reducer):
    rng = np.random.default_rng(5)
    accumulators = [rng.standard_normal(300).astype(np.float32) for _ in range(4)]
    given = [each.tobytes() for each in accumulators]
    with without_marks() as frozen:
        sar.simulate(accumulators, algorithm=[reducer(300, 20) for _ in accumulators], network=sar.Network(hosts=2))
        assert frozen and unchanged(frozen)
    assert [each.tobytes() for each in accumulators] == given


@pytest.mark.parametrize("dense", [False, True])
def test_users_can_write_to_copies_and_to_nothing_else(dense):
    stream = SparseStream([1, 3], np.float32([2, 4]), SIZE, switch_density=0.0 if dense else None)
    result = stream + stream
    for each in (stream, result, result.copy().astype("float64"), 2 * result.copy(), decode(encode([result]))[0]):
        before = held(each)
        with pytest.raises(StreamError, match="copy"):
            each.values = [0, 0]
        for array in (each.indices, each.values):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0
        assert held(each) == before
    mine = result.copy()
    mine.values = [0, 1]
    assert mine.values.tolist() == [0, 1] and result.values.tolist() == [4, 8]
    Reduction.freeze(mine)  # as a stream that was sent
    with pytest.raises(StreamError, match="copy"):
        mine.values = [5, 5]
