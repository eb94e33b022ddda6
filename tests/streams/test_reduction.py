"""The eight cases of stream summation (thesis section 4.1.3) one by one, all operators, and reductions of many streams."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Entries, assert_reduction, bits
from strategies import ALL_OPERATORS, CUSTOM, DTYPES, SMALL, cases

from sparseallreduce import AlgorithmError, Operator, SparseStream, StreamTypeError
from sparseallreduce.streams.operator import MAX, MEAN, MIN, PROD, SUM, as_operator
from sparseallreduce.streams.partition import concatenate, slice_range
from sparseallreduce.streams.reduction import Reduction, Tree

SIZE = 16  # phi is 8 for float32
FIRST = Entries(np.array([1, 4, 5, 9], np.uint64), np.array([10, 40, 50, 90], np.float32))
SECOND = Entries(np.array([4, 9, 12], np.uint64), np.array([-40, 1, 2], np.float32))
OPERATORS = pytest.mark.parametrize("op", ALL_OPERATORS.values(), ids=ALL_OPERATORS.keys())


def entered(entries, reduction, dense=False, lo=0, hi=SIZE, owned=True):
    """A stream as the algorithms hold it; a dense one in an array of its own, unless it was sent or is the user's."""
    stream = slice_range(reduction.enter(SparseStream(entries.indices, entries.values, SIZE)), lo, hi)
    if dense:
        stream = reduction.densify(stream)
        assert stream.is_dense and stream._owned
    return stream if owned else reduction.freeze(stream)


def skip_without_order(op, dtype):
    if np.dtype(dtype).kind == "c" and op.name in ("min", "max"):
        pytest.skip("complex numbers have no order")


@OPERATORS
def test_case_1a_two_sparse_make_a_sparse_one(op):
    reduction = Reduction(op)
    result = reduction.pair(entered(FIRST, reduction), entered(SECOND, reduction))
    assert not result.is_dense
    assert result.indices.tolist() == [1, 4, 5, 9, 12]  # a sum of zero is an entry too
    assert_reduction(reduction.leave(result), [FIRST, SECOND], SIZE, op)


@OPERATORS
def test_case_1a_two_sparse_make_a_dense_one_when_both_together_exceed_phi(op):
    reduction = Reduction(op)
    longer = Entries(np.array([0, 4, 5, 9, 12, 13], np.uint64), np.arange(6, dtype=np.float32))
    for second, dense in ((SECOND, False), (longer._replace(indices=longer.indices[:4], values=longer.values[:4]), False), (longer, True)):
        result = reduction.pair(entered(FIRST, reduction), entered(second, reduction))
        assert result.is_dense == dense == (len(FIRST.indices) + len(second.indices) > 8)
        assert_reduction(reduction.leave(result), [FIRST, second], SIZE, op)


@OPERATORS
@pytest.mark.parametrize("owned", [(True, True), (True, False), (False, True), (False, False)])
def test_case_1b_two_dense_are_added_in_place_where_one_may_be_reused(op, owned):
    reduction = Reduction(op)
    first, second = (entered(part, reduction, True, owned=own) for part, own in zip((FIRST, SECOND), owned))
    before = bits(first), bits(second)
    result = reduction.pair(first, second)
    assert result.is_dense
    assert [np.shares_memory(result._stored, stream._stored) for stream in (first, second)] == [owned[0], owned[1] and not owned[0]]
    assert [
        bits(stream) == old for stream, old in zip((first, second), before) if not np.shares_memory(result._stored, stream._stored)
    ] == [True] * (1 if any(owned) else 2)
    assert_reduction(reduction.leave(result), [FIRST, SECOND], SIZE, op)


@OPERATORS
@pytest.mark.parametrize("owned", [True, False])
def test_case_1c_a_sparse_one_is_added_into_a_dense_one(op, owned):
    reduction = Reduction(op)
    first, second = entered(FIRST, reduction, True, owned=owned), entered(SECOND, reduction)
    before = bits(first), bits(second)
    result = reduction.pair(first, second)
    assert result.is_dense
    assert np.shares_memory(result._stored, first._stored) == owned
    assert bits(second) == before[1] and (owned or bits(first) == before[0])
    assert_reduction(reduction.leave(result), [FIRST, SECOND], SIZE, op)


@OPERATORS
@pytest.mark.parametrize("owned", [True, False])
def test_case_1d_a_dense_one_takes_a_sparse_one_before_it(op, owned):
    reduction = Reduction(op)
    first, second = entered(FIRST, reduction), entered(SECOND, reduction, True, owned=owned)
    before = bits(first), bits(second)
    result = reduction.pair(first, second)
    assert result.is_dense
    assert np.shares_memory(result._stored, second._stored) == owned
    assert bits(first) == before[0] and (owned or bits(second) == before[1])
    assert_reduction(reduction.leave(result), [FIRST, SECOND], SIZE, op)


@OPERATORS
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.startswith("int")])
@pytest.mark.parametrize("size", [1, 2, 3, 17, 100])
def test_whose_array_is_reused_shows_in_no_bit(op, dtype, size):
    # On one rank an operand is the user's, on another it came by the wire and may be reused.
    skip_without_order(op, dtype)
    first, second = np.full(size, np.nan, dtype), np.full(size, -np.nan, dtype)
    results = set()
    for owned in ((True, True), (True, False), (False, True), (False, False)):
        reduction = Reduction(op)
        streams = [reduction.densify(reduction.enter(SparseStream.from_dense(array))) for array in (first, second)]
        for stream, own in zip(streams, owned):
            if not own:
                reduction.freeze(stream)
        results.add(reduction.pair(*streams)._stored.tobytes())
    assert len(results) == 1


LOW = Entries(np.array([1, 4, 5], np.uint64), np.array([10, 40, 50], np.float32))
HIGH = Entries(np.array([9, 12], np.uint64), np.array([90, 120], np.float32))


@OPERATORS
@pytest.mark.parametrize("dense", [(False, False), (True, True), (True, False), (False, True)], ids=["2a", "2b", "2c", "2d"])
def test_case_2_adjoining_ranges_are_joined(op, dense):
    reduction = Reduction(op)
    low, high = entered(LOW, reduction, dense[0], 0, 8), entered(HIGH, reduction, dense[1], 8, 16)
    before = bits(low), bits(high)
    result = concatenate([low, high], reduction)
    assert result.is_dense == any(dense)
    assert (result.lo, result.hi, result.size) == (0, SIZE, SIZE)
    assert (bits(low), bits(high)) == before
    assert_reduction(reduction.leave(result), [LOW, HIGH], SIZE, op)


def test_case_2_stays_sparse_where_the_whole_is_below_phi_by_count():
    reduction = Reduction()
    parts = [entered(LOW, reduction, True, 0, 6), entered(HIGH, reduction, False, 6, SIZE)]
    joined = concatenate(parts, reduction)
    assert parts[0].stored + parts[1].stored == 8 and not joined.is_dense
    assert_reduction(joined, [LOW, HIGH], SIZE, SUM)


@given(case=cases(ranks=st.just(2)), forms=st.tuples(st.booleans(), st.booleans()), owned=st.booleans())
def test_any_two_streams_reduce_to_the_dense_reduction(case, forms, owned):
    reduction = Reduction(case.operator)
    first, second = (
        reduction.densify(reduction.enter(stream)) if dense else reduction.enter(stream) for stream, dense in zip(case.streams, forms)
    )
    if not owned:
        first, second = reduction.freeze(first), reduction.freeze(second)
    reusable = any(stream.is_dense and stream._owned for stream in (first, second))
    before = bits(first), bits(second)
    result = reduction.pair(first, second)
    if not reusable:
        assert (bits(first), bits(second)) == before
    assert_reduction(reduction.leave(result), case.entries, case.size, case.operator, case.exact)


@given(case=cases(ranks=st.integers(1, 20)), density=st.sampled_from([None, 0.0, 0.1]))
def test_many_streams_reduce_to_the_dense_reduction(case, density):
    reduction = Reduction(case.operator, density)
    result = reduction.leave(reduction.many([reduction.enter(stream) for stream in case.streams]))
    assert_reduction(result, case.entries, case.size, case.operator, case.exact)
    assert result.is_dense or result.stored <= result.switch_point
    assert result.switch_density == density


@given(case=cases(ranks=st.integers(1, 20)), data=st.data())
def test_a_tree_gives_the_same_bits_in_any_order_of_arrival(case, data):
    results = []
    for order in (range(case.ranks), data.draw(st.permutations(range(case.ranks)))):
        reduction = Reduction(case.operator)
        tree = Tree(reduction, case.ranks)
        for position in order:
            tree.add(position, reduction.enter(case.streams[position]))
        results.append(bits(reduction.leave(tree.result())))
    assert results[0] == results[1]


def test_a_tree_of_rounding_sums_gives_the_same_bits_in_all_orders():
    values = np.float32([1e8, 1, -1e8, 3, 0.1])  # another grouping of these gives another sum
    results = set()
    for order in permutations(range(5)):
        tree = Tree(Reduction(), 5)
        for position in order:
            tree.add(position, SparseStream([3], values[position : position + 1], 8))
        results.add(tree.result().values.tobytes())
    assert len(results) == 1
    assert results != {Reduction().many([SparseStream([3], values[[i]], 8) for i in (0, 2, 1, 3, 4)]).values.tobytes()}


@given(case=cases(ranks=st.integers(2, 9)))
def test_operands_of_a_user_are_never_changed(case):
    before = [bits(stream) for stream in case.streams]
    reduction = Reduction(case.operator)
    for _ in range(2):
        reduction.leave(reduction.many([reduction.enter(stream) for stream in case.streams]))
        reduction.whole(case.streams[0], case.streams[1])
    assert [bits(stream) for stream in case.streams] == before


@given(case=cases(ranks=st.just(1)), density=st.sampled_from([None, 0.0, 0.1]))
def test_entering_and_leaving_loses_nothing(case, density):
    reduction = Reduction(case.operator, density)
    (stream,) = case.streams
    for through in (
        reduction.enter(stream),
        reduction.densify(reduction.enter(stream)),
        reduction.enter(reduction.leave(reduction.enter(stream))),
    ):
        assert_reduction(reduction.leave(through), case.entries, case.size, case.operator)


@pytest.mark.parametrize("density, limit", [(None, 8), (0.25, 4), (1.0, 8), (0.0, 0)])
def test_results_go_dense_above_the_reductions_own_switch_point(density, limit):
    for count in range(1, 16):
        reduction = Reduction(SUM, density)
        halves = [SparseStream(np.arange(start, count, 2), np.ones(len(range(start, count, 2)), np.float32), SIZE) for start in (0, 1)]
        result = reduction.pair(*(reduction.enter(half) for half in halves))
        assert result.is_dense == (count > limit)


def test_work_counts_the_entries_read():
    reduction = Reduction()
    first, second = entered(FIRST, reduction), entered(SECOND, reduction)
    reduction.pair(first, second)
    assert reduction.work == 4 + 3
    dense = reduction.densify(first)
    assert reduction.work == 4 + 3 + 4
    reduction.pair(dense, second)
    assert reduction.work == 4 + 3 + 4 + 3
    reduction.pair(dense, reduction.densify(second))
    assert reduction.work == 4 + 3 + 4 + 3 + 3


def test_dense_work_counts_the_values_written():
    reduction = Reduction()
    first, second = entered(FIRST, reduction), entered(SECOND, reduction)
    reduction.pair(first, second)
    assert reduction.dense_work == 0
    dense = reduction.densify(first)
    assert reduction.dense_work == 2 * SIZE  # it is filled, and all of its few cache lines are written to
    reduction.pair(dense, second)  # in its place
    assert reduction.dense_work == 3 * SIZE
    frozen = reduction.freeze(dense)
    reduction.pair(frozen, second)
    assert reduction.dense_work == 5 * SIZE
    reduction.pair(frozen, reduction.densify(second))
    assert reduction.dense_work == 8 * SIZE


@pytest.mark.parametrize("dtype, width, each", [(np.float32, None, 16), (np.float64, None, 8), (np.float32, 3, 16), (np.float32, 100, 100)])
def test_an_entry_of_many_takes_a_cache_line_of_a_dense_array(dtype, width, each):
    size = 1000
    values = np.ones(5 if width is None else (5, width), dtype)
    stream = SparseStream(np.arange(0, size, 200), values, size)
    reduction = Reduction()
    reduction.densify(reduction.enter(stream))
    assert (reduction.work, reduction.dense_work) == (5, size * (width or 1) + 5 * each)


def test_dense_parts_are_joined_in_one_pass():
    reduction = Reduction()
    whole = SparseStream.from_dense(np.arange(1, SIZE + 1, dtype=np.float32))
    parts = [slice_range(reduction.enter(whole), lo, hi) for lo, hi in ((0, 3), (3, SIZE))]
    assert all(part.is_dense for part in parts)
    assert concatenate(parts, reduction).to_dense().tolist() == whole.to_dense().tolist()
    assert reduction.dense_work == SIZE


@pytest.mark.parametrize("op, shared, lone", [(SUM, 3, 5), (PROD, -10, 5), (MIN, -2, 5), (MAX, 5, 5), (CUSTOM, 5, 5)])
def test_an_absent_position_is_neutral(op, shared, lone):
    streams = [SparseStream([1, 2], np.float32([5, 5]), SIZE), SparseStream([1], np.float32([-2]), SIZE)]
    for density in (None, 0.0):
        result = Reduction(op, density).whole(*streams)
        assert result.indices.tolist() == [1, 2]
        assert result.values.tolist() == [shared, lone]


def test_an_operator_with_zero_as_neutral_element_keeps_its_zeros():
    bitwise_or = Operator("bor", np.bitwise_or, 0)
    streams = [SparseStream([1, 2], np.int32([0, 4]), 4), SparseStream([2, 3], np.int32([3, 0]), 4)]
    result = Reduction(bitwise_or).whole(*streams)
    assert result.is_dense
    assert result.indices.tolist() == [1, 2, 3]
    assert result.values.tolist() == [0, 7, 0]


def test_the_end_of_the_largest_range_of_32_bits_is_no_index():
    for op in ALL_OPERATORS.values():
        reduction = Reduction(op)
        end = slice_range(reduction.enter(SparseStream([5], np.float32([1]), 2**32)), 2**32, 2**32)
        assert (reduction.densify(end).nnz, reduction.densify(end).extent) == (0, 0)
        assert reduction.pair(reduction.densify(end), end).nnz == 0


@given(case=cases(ranks=st.just(2), contents=(SMALL,)))
def test_the_sum_of_two_is_the_operator_plus(case):
    first, second = case.streams
    if first.switch_density is None:
        assert bits(Reduction().whole(first, second)) == bits(first + second)


def test_operators_are_known_by_name():
    assert [as_operator(op) for op in ("sum", "prod", "min", "max", "mean", CUSTOM)] == [SUM, PROD, MIN, MAX, MEAN, CUSTOM]


def test_a_sum_is_what_adds_up_whatever_its_name():
    assert SUM.is_sum and MEAN.is_sum and Operator("ours", np.add, 0.0).is_sum and Operator("sum", np.add, 0).is_sum
    for other in (PROD, MIN, MAX, CUSTOM, Operator("bor", np.bitwise_or, 0), Operator("odd", np.add, 1), Operator("even", np.add, int)):
        assert not other.is_sum


@pytest.mark.parametrize(
    "name, ufunc, neutral",
    [("sum", np.maximum, 0), ("sum", np.add, 1), ("mean", np.maximum, 0), ("max", np.minimum, np.inf), ("prod", np.multiply, 0)],
)
def test_the_name_of_an_operator_of_the_library_is_refused_for_another(name, ufunc, neutral):
    with pytest.raises(AlgorithmError, match=f"'{name}' is the name of an operator of the library"):
        Operator(name, ufunc, neutral)


def test_operators_of_one_name_that_differ_are_told_apart():
    for dtype in ("float32", "int64"):
        told = {Operator("ours", ufunc, neutral).term(np.dtype(dtype)) for ufunc in (np.maximum, np.minimum) for neutral in (0, 1)}
        assert len(told) == 4
    with pytest.raises(AlgorithmError, match="operator 'ours' has no neutral element of int32"):
        Operator("ours", np.minimum, np.inf).term(np.dtype("int32"))
    with pytest.raises(StreamTypeError, match="convert them to floats, or divide the result of op='sum'"):
        MEAN.term(np.dtype("int32"))


@pytest.mark.parametrize("op", [MIN, MAX], ids=lambda op: op.name)
def test_complex_numbers_have_neither_minimum_nor_maximum(op):
    with pytest.raises(StreamTypeError, match=f"complex64 values have no order, and so no {op.name}"):
        op.term(np.dtype("complex64"))


@pytest.mark.parametrize("unknown", ["median", "SUM", None, 3, np.add, ["sum"]])
def test_an_unknown_operator_is_named(unknown):
    with pytest.raises(AlgorithmError) as raised:
        as_operator(unknown)
    assert str(raised.value) == f"unknown operator {unknown!r}: use one of max, mean, min, prod, sum, or an Operator(name, ufunc, neutral)"


@pytest.mark.parametrize("dtype", DTYPES)
@OPERATORS
def test_the_neutral_element_changes_nothing(op, dtype):
    skip_without_order(op, dtype)
    values = np.array([-3, 0, 1, 7], dtype)
    neutral = np.full(4, op.neutral_of(dtype))
    assert neutral.dtype == dtype
    assert op.ufunc(values, neutral).tolist() == op.ufunc(neutral, values).tolist() == values.tolist()
