"""What each reducer comes to, in the simulator: the right sum, the same bits on all ranks in any order of delivery, nothing touched."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lossy import INTEGERS, REDUCERS, top, tree, vectors
from oracle import bits
from strategies import deliveries

import sparseallreduce as sar
from sparseallreduce.reducers import gtopk

every_reducer = pytest.mark.parametrize("name", REDUCERS)


@every_reducer
@given(case=vectors(), delivery=deliveries(), through_wire=st.booleans())
def test_every_rank_holds_the_same_bits_in_any_order_of_delivery(name, case, delivery, through_wire):
    before = [accumulator.copy() for accumulator in case.first]
    by_time = sar.simulate(case.first, case.reducers(REDUCERS[name]))
    otherwise = sar.simulate(case.first, case.reducers(REDUCERS[name]), delivery=delivery, through_wire=through_wire)
    assert len({bits(reduced.update) for reduced in by_time.outputs + otherwise.outputs}) == 1
    for first, second in zip(by_time.outputs, otherwise.outputs):
        np.testing.assert_array_equal(first.contributed, second.contributed)
    np.testing.assert_array_equal(by_time.bytes_sent, otherwise.bytes_sent)
    np.testing.assert_array_equal(case.first, before, "accumulators are left as they were")
    assert not any(np.shares_memory(by_time.outputs[0].update._stored, accumulator) for accumulator in case.first)


@pytest.mark.parametrize("name", [name for name in REDUCERS if name != "gaussiank"])  # which chooses about k
@given(case=vectors(ranks=st.just(1)))
def test_one_rank_alone_gets_its_top_k(name, case):
    (accumulator,) = case.first
    (reducer,) = case.reducers(REDUCERS[name])
    update, contributed = reducer.allreduce(accumulator, sar.SERIAL)
    expected = top(accumulator, case.k)
    np.testing.assert_array_equal(update.to_dense(), expected)
    assert set(np.flatnonzero(expected)) <= set(contributed.tolist())
    assert len(contributed) <= case.k
    assert reducer.returned.nnz == 0


@pytest.mark.parametrize("name", ["topka", "topkdsa", "topkdsa, dense parts"])
@given(case=vectors(contents=(INTEGERS,)), delivery=deliveries())
def test_the_sum_of_all_top_k(name, case, delivery):
    out = sar.simulate(case.first, case.reducers(REDUCERS[name]), delivery=delivery)
    chosen = [top(accumulator, case.k) for accumulator in case.first]
    np.testing.assert_array_equal(out.outputs[0].update.to_dense(), np.sum(chosen, axis=0))
    for reduced, ours in zip(out.outputs, chosen):
        assert set(np.flatnonzero(ours)) <= set(reduced.contributed.tolist())
        assert (np.diff(reduced.contributed.astype(int)) > 0).all() and len(reduced.contributed) <= case.k


@given(case=vectors(), delivery=deliveries())
def test_gtopk_is_its_tree_evaluated_by_one(case, delivery):
    out = sar.simulate(case.first, case.reducers(sar.GTopk), delivery=delivery)
    expected = tree(case.first, case.k)
    update = out.outputs[0].update
    np.testing.assert_array_equal(update.to_dense(), expected)
    for accumulator, reduced in zip(case.first, out.outputs):
        assert set(reduced.contributed.tolist()) <= set(update.indices.tolist())
        assert set(np.flatnonzero(top(accumulator, case.k))) & set(update.indices.tolist()) <= set(reduced.contributed.tolist())


@given(case=vectors(contents=(INTEGERS,)), delivery=deliveries())
def test_gtopk_by_allgather_is_the_top_k_of_the_sum(case, delivery):
    reducers = case.reducers(sar.GTopk, form="allgather")
    out = sar.simulate(case.first, reducers, delivery=delivery)
    expected = top(np.sum([top(accumulator, case.k) for accumulator in case.first], axis=0), case.k)
    np.testing.assert_array_equal(out.outputs[0].update.to_dense(), expected)
    assert all(reducer.returned.nnz == 0 for reducer in reducers)


@given(case=vectors(ranks=st.integers(1, 2)))
def test_of_two_ranks_both_forms_of_gtopk_are_one(case):
    first, second = (sar.simulate(case.first, case.reducers(sar.GTopk, form=form)) for form in ("tree", "allgather"))
    assert bits(first.outputs[0].update) == bits(second.outputs[0].update)


@given(case=vectors(contents=(INTEGERS,)), delivery=deliveries())
def test_gtopk_returns_what_was_dropped_on_the_way(case, delivery):
    """What has contributed is the update, or a partial sum that the rank which dropped it returns."""
    reducers = case.reducers(sar.GTopk)
    out = sar.simulate(case.first, reducers, delivery=delivery)
    contributed = np.zeros(case.size, case.dtype)
    for accumulator, reduced in zip(case.first, out.outputs):
        contributed[reduced.contributed] += accumulator[reduced.contributed]
    returned = sum((reducer.returned.to_dense() for reducer in reducers), np.zeros(case.size, case.dtype))
    np.testing.assert_array_equal(contributed, out.outputs[0].update.to_dense() + returned)


def test_an_index_dropped_in_one_subtree_comes_in_by_another():
    """Rank 0 drops its 6 where it meets rank 1, and the same index comes in by ranks 2 and 3."""
    accumulators = [np.float32(values) for values in ([6, 0, 0], [2, 9, 0], [8, 0, 0], [6, 0, 0])]
    reducers = [sar.GTopk(3, 1) for _ in range(4)]
    out = sar.simulate(accumulators, reducers)
    assert out.outputs[0].update.to_dense().tolist() == [14, 0, 0]
    assert [reducer.returned.to_dense().tolist() for reducer in reducers] == [[6, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert [reduced.contributed.tolist() for reduced in out.outputs] == [[0], [], [0], [0]]


def test_what_is_dropped_on_several_levels_is_returned_together():
    """Rank 0 drops its 1 where it meets rank 1, and the 2 of ranks 2 and 3 on the next level; the same index comes in by ranks 4 to 7."""
    rows = ([1, 0, 0], [0, 9, 0], [2, 0, 0], [0, 0, 1], [50, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1])
    reducers = [sar.GTopk(3, 1) for _ in rows]
    out = sar.simulate([np.float32(row) for row in rows], reducers)
    assert out.outputs[0].update.to_dense().tolist() == [50, 0, 0]
    assert [reducer.returned.to_dense()[0] for reducer in reducers] == [3, 0, 0, 0, 0, 0, 0, 0]
    assert not any(reducer.returned.to_dense()[1:].any() for reducer in reducers)


@given(case=vectors(contents=(INTEGERS,)))
def test_what_a_gpu_finds_dropped_is_what_the_host_does(case):
    """By other kernels, which NumPy stands for here."""
    kernels = SimpleNamespace(
        contained=lambda ours, theirs: np.isin(ours, theirs), marked=lambda flags, count: np.flatnonzero(flags)[:count]
    )
    dropped, seen = sar.GTopk._dropped, []

    def both(self, levels, update):
        expected = dropped(self, levels, update)
        ours = np.arange(0, self.size, 2, dtype=update.indices.dtype)
        found, contributed = self._settled_there(levels, update, ours)
        np.testing.assert_array_equal(found.to_dense(), expected.to_dense())
        np.testing.assert_array_equal(contributed, np.intersect1d(ours, update.indices))
        seen.append(len(levels))
        return expected

    with mock.patch.object(sar.GTopk, "_dropped", both), mock.patch.object(gtopk, "device_kernels", return_value=kernels):
        sar.simulate(case.first, case.reducers(sar.GTopk))
    assert len(seen) == case.ranks
