"""Error feedback: nothing is ever lost, whatever the reducer, the ranks, the order of delivery, and what fails."""

import pickle
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from lossy import INTEGERS, REDUCERS, Vectors, top, vectors
from oracle import bits
from strategies import deliveries
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError

every_reducer = pytest.mark.parametrize("name", REDUCERS)


def feedbacks(case, make):
    return [sar.ErrorFeedback(reducer, case.dtype) for reducer in case.reducers(make)]


def assert_nothing_is_lost(feedbacks, came_in, applied, magnitudes):
    """``came_in`` = ``applied`` + all residuals, within the rounding of that many additions; all in longer floats."""
    residuals = np.sum([feedback.residual.astype(np.longdouble) for feedback in feedbacks], axis=0)
    eps = np.finfo(feedbacks[0].residual.dtype).eps
    off = np.abs(came_in - applied - residuals)
    assert (off <= 8 * eps * magnitudes).all(), f"off by {off.max()}, of {8 * eps * magnitudes[off.argmax()]} allowed"


@every_reducer
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_nothing_is_lost_over_hundreds_of_steps(name, ranks):
    case = Vectors(ranks, 300, 6, "float32", seed=ranks)
    group = feedbacks(case, REDUCERS[name])
    came_in, applied, magnitudes = np.zeros((3, case.size), np.longdouble)
    returned = 0
    for step in range(200):
        gradients = case.step(step)
        out = sar.simulate(gradients, group)
        came_in += np.sum(gradients, axis=0, dtype=np.longdouble)
        applied += ranks * out.outputs[0].to_dense().astype(np.longdouble)
        magnitudes += np.sum(np.abs(gradients), axis=0) + sum(np.abs(feedback.residual) for feedback in group)
        returned += sum(feedback.reducer.returned.nnz for feedback in group)
    assert_nothing_is_lost(group, came_in, applied, magnitudes)
    assert all(feedback.gradients == 200 for feedback in group)
    assert (returned > 0) == (name == "gtopk" and ranks > 2), "this test is to see partial sums that were dropped"


@every_reducer
@given(case=vectors(contents=(INTEGERS,)), delivery=deliveries())
@settings(max_examples=examples(30))
def test_nothing_is_lost_whatever_the_case(name, case, delivery):
    group = feedbacks(case, REDUCERS[name])
    came_in, applied, magnitudes = np.zeros((3, case.size), np.longdouble)
    for step in range(3):
        gradients = case.step(step)
        out = sar.simulate(gradients, group, delivery=delivery if step == 2 else None)
        assert len({bits(mean) for mean in out.outputs}) == 1
        came_in += np.sum(gradients, axis=0)
        applied += case.ranks * out.outputs[0].to_dense().astype(np.longdouble)
        magnitudes += case.ranks * np.max(np.abs(gradients), axis=0, initial=0)
    assert_nothing_is_lost(group, came_in, applied, magnitudes)


@given(case=vectors())
def test_the_residual_of_topka_is_what_was_not_sent(case):
    """Thesis algorithm 2."""
    group = feedbacks(case, sar.TopkA)
    sums = [np.zeros(case.size, case.dtype) for _ in group]
    for step in range(3):
        gradients = case.step(step)
        out = sar.simulate(gradients, group)
        for feedback, total, gradient in zip(group, sums, gradients):
            total += gradient
            sent = top(total, case.k)
            total[sent != 0] = 0
            np.testing.assert_array_equal(feedback.residual, total)
            assert set(feedback.contributed.tolist()) >= set(np.flatnonzero(sent).tolist())
    assert out.outputs[0].size == case.size


def test_gtopk_puts_back_what_was_sent_and_not_chosen():
    """gTop-k algorithm 4, line 10."""
    group = [sar.ErrorFeedback(sar.GTopk(4, 1)) for _ in range(2)]
    out = sar.simulate([np.float32([3, 0, 1, 0]), np.float32([0, 5, 0, 1])], group)
    assert out.outputs[0].to_dense().tolist() == [0, 2.5, 0, 0]
    assert [feedback.residual.tolist() for feedback in group] == [[3, 0, 1, 0], [0, 0, 0, 1]]


@every_reducer
def test_the_mean_is_the_sum_over_the_ranks(name):
    case = Vectors(3, 60, 5, "float64", seed=2)
    sums = sar.simulate(case.first, case.reducers(REDUCERS[name])).outputs
    means = sar.simulate(case.first, feedbacks(case, REDUCERS[name])).outputs
    np.testing.assert_array_equal(means[1].to_dense(), sums[1].update.to_dense() / 3)
    assert (means[0].is_dense, means[0].indices.tolist()) == (sums[0].update.is_dense, sums[0].update.indices.tolist())


@every_reducer
def test_gradients_are_left_as_they_were(name):
    case = Vectors(4, 60, 5, seed=3)
    before = [gradient.copy() for gradient in case.first]
    group = feedbacks(case, REDUCERS[name])
    sar.simulate(case.first, group)
    np.testing.assert_array_equal(case.first, before)
    assert not any(np.shares_memory(feedback.residual, gradient) for feedback in group for gradient in case.first)


@every_reducer
def test_a_sparse_gradient_is_taken_for_its_array(name):
    case = Vectors(3, 60, 5, seed=4)
    sparse, dense = feedbacks(case, REDUCERS[name]), feedbacks(case, REDUCERS[name])
    for step in range(3):
        arrays = [top(vector, 20) for vector in case.step(step)]
        first = sar.simulate([sar.SparseStream.from_dense(array) for array in arrays], sparse)
        second = sar.simulate(arrays, dense)
        assert bits(first.outputs[0]) == bits(second.outputs[0])
    for ours, theirs in zip(sparse, dense):
        np.testing.assert_array_equal(ours.residual, theirs.residual)


WRONG = {
    "no gradient": (None, sar.StreamTypeError, "not NoneType"),
    "size": (np.zeros(9, np.float32), sar.StreamError, r"\(8,\), not \(9,\)"),
    "dtype": (np.zeros(8), sar.StreamTypeError, "the gradient is of float64, but the residual of float32"),
    "list": ([0.0] * 8, sar.StreamTypeError, "not list"),
    "sparse of another size": (sar.SparseStream([1], np.float32([1]), 9), sar.StreamError, r"\(8,\), not \(9,\)"),
    "rows": (sar.SparseStream([1], np.float32([[1, 2]]), 8), sar.StreamError, r"\(8,\), not \(8, 2\)"),
    "sparse of another dtype": (sar.SparseStream([1], [1.0], 8), sar.StreamTypeError, "float64"),
}


@pytest.mark.parametrize("wrong", WRONG)
@every_reducer
def test_a_bad_gradient_changes_nothing(name, wrong):
    gradient, kind, text = WRONG[wrong]
    group = [sar.ErrorFeedback(REDUCERS[name](8, 2)) for _ in range(3)]
    good = np.arange(8, dtype=np.float32)
    sar.simulate([good] * 3, group)
    before = [feedback.residual.copy() for feedback in group]
    with pytest.raises(kind, match=text):
        sar.simulate([good, gradient, good], group)
    np.testing.assert_array_equal([feedback.residual for feedback in group], before)
    assert [feedback.gradients for feedback in group] == [1, 1, 1]
    sar.simulate([good] * 3, group)


class Failing:
    """In place of what adds streams: fails when it is first asked to."""

    def __init__(self, reduction):
        self._reduction = reduction

    def __getattr__(self, name):
        return getattr(self._reduction, name)

    def pair(self, *streams):
        raise MemoryError("no room for a sum")

    many = uncounted = pair


@every_reducer
def test_a_step_that_fails_on_its_way_keeps_the_gradient(name):
    case = Vectors(2, 40, 4, seed=5)
    group = feedbacks(case, REDUCERS[name])
    sar.simulate(case.first, group)
    before = [feedback.residual.copy() for feedback in group]
    reduction = group[0].reducer.reduction
    group[0].reducer.reduction = Failing(reduction)
    gradients = case.step(1)
    with pytest.raises(MemoryError):
        sar.simulate(gradients, group)
    group[0].reducer.reduction = reduction
    for feedback, old, gradient in zip(group, before, gradients):
        kept = old + gradient
        if feedback.reducer.steps == 2:  # this rank had all it needed, and has its update
            kept[feedback.contributed] = 0
        np.testing.assert_array_equal(feedback.residual, kept)
    assert [feedback.gradients for feedback in group] == [2, 2]
    assert group[0].reducer.steps == 1


@every_reducer
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_is_interrupted_anywhere_loses_nothing(name, error):
    """Whoever has no update keeps residual and gradient whole; whoever has one has taken out what is in it."""
    case = Vectors(3, 60, 5, "float64", INTEGERS, seed=7)
    group, turn, interrupted = feedbacks(case, REDUCERS[name]), 0, True
    sar.simulate(case.step(0), group)
    while interrupted:
        turn += 1
        gradients = case.step(turn)
        before = [(feedback.residual.copy(), feedback.gradients, feedback.reducer.steps) for feedback in group]
        states = [feedback.reducer.state() for feedback in group]
        interrupted = False
        try:
            sar.simulate(gradients, group, delivery=interrupt_at(turn, error()))
        except error:
            interrupted = True
        for feedback, state, gradient, (residual, taken_in, steps) in zip(group, states, gradients, before):
            held = residual + gradient * (feedback.gradients - taken_in)
            if feedback.reducer.steps == steps:
                np.testing.assert_array_equal(feedback.residual, held)
            else:
                left = np.delete(feedback.residual - held, np.union1d(feedback.contributed, feedback.reducer.returned.indices))
                assert not left.any() and feedback.gradients == taken_in + 1
                feedback.reducer.restore(state)
    assert turn > 4


def interrupt_at(turn, error):
    """Picks what goes on in the simulator, and is interrupted at that one of its turns."""
    turns = iter(range(1, 10**6))

    def pick(choices):
        if next(turns) == turn:
            raise error
        return turn % choices

    return pick


@pytest.mark.parametrize("where", ["sparseallreduce.reducers.feedback._divided", "sparseallreduce.streams.stream.SparseStream.add_to"])
@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), MemoryError("no room")], ids=repr)
def test_a_residual_is_given_back_what_was_taken_out(where, error):
    """Of a step that fails when all ranks have summed, on rank 0 where a partial sum returns."""
    group = [sar.ErrorFeedback(sar.GTopk(3, 1)) for _ in range(4)]
    gradients = [np.float32(values) for values in ([6, 0, 0], [2, 9, 0], [8, 0, 0], [6, 0, 0])]
    before = [feedback.reducer.state() for feedback in group]
    with mock.patch(where, side_effect=error), pytest.raises(type(error)):
        sar.simulate(gradients, group)
    assert group[0].reducer.state() == before[0]
    for feedback, gradient in zip(group, gradients):
        held = gradient if feedback.reducer.steps == 0 else np.where(np.arange(3) == 0, 0, gradient)
        np.testing.assert_array_equal(feedback.residual, held * feedback.gradients)


def test_a_selection_that_runs_out_of_memory_has_taken_the_gradient_in(monkeypatch):
    feedback = sar.ErrorFeedback(sar.TopkA(100_000, 10))
    monkeypatch.setattr("sparseallreduce.streams.selection.exact.bracket", mock.Mock(side_effect=MemoryError))
    gradient = np.arange(100_000, dtype=np.float32)
    with pytest.raises(MemoryError):
        feedback.step(gradient, sar.SERIAL)
    np.testing.assert_array_equal(feedback.residual, gradient)
    assert (feedback.gradients, feedback.reducer.steps) == (1, 0)
    monkeypatch.undo()
    assert feedback.step(gradient, sar.SERIAL).indices.tolist() == list(range(99_990, 100_000))


@every_reducer
def test_a_read_only_residual_is_refused_before_anything_happens(name):
    group = [sar.ErrorFeedback(REDUCERS[name](8, 2)) for _ in range(2)]
    group[1].residual.flags.writeable = False
    for gradient in (np.ones(8, np.float32), sar.SparseStream([1], np.float32([1]), 8)):
        with pytest.raises(sar.StreamError, match="the residual is read-only"):
            sar.simulate([gradient] * 2, group)
    assert [(feedback.gradients, feedback.residual.any()) for feedback in group] == [(0, False)] * 2


def test_a_gradient_is_not_overwritten_as_a_part_of_the_residual():
    feedback = sar.ErrorFeedback(sar.TopkA(8, 2))
    feedback.step(np.ones(8, np.float32), sar.SERIAL)
    for gradient in (feedback.residual, feedback.residual[:]):
        with pytest.raises(sar.StreamError, match="pass a copy"):
            feedback.step(gradient, sar.SERIAL)


@every_reducer
def test_steps_go_on_from_a_checkpoint_to_the_bit(name):
    case = Vectors(3, 80, 5, seed=6)
    group = feedbacks(case, REDUCERS[name])
    for step in range(3):
        sar.simulate(case.step(step), group)
    restored = feedbacks(case, REDUCERS[name])
    for new, old in zip(restored, group):
        new.restore(pickle.loads(pickle.dumps(old.state())))
    for step in range(3, 6):
        first, second = sar.simulate(case.step(step), group), sar.simulate(case.step(step), restored)
        assert bits(first.outputs[0]) == bits(second.outputs[0])
    for new, old in zip(restored, group):
        np.testing.assert_array_equal(new.residual, old.residual)
        assert new.gradients == old.gradients == 6


def test_state_is_a_copy():
    feedback = sar.ErrorFeedback(sar.TopkA(4, 1))
    feedback.step(np.ones(4, np.float32), sar.SERIAL)
    state = feedback.state()
    feedback.step(np.ones(4, np.float32), sar.SERIAL)
    assert state["residual"].tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("other", [sar.ErrorFeedback(sar.TopkA(4, 1), "float64"), sar.ErrorFeedback(sar.TopkA(5, 1))])
def test_state_of_another_residual_is_refused(other):
    with pytest.raises(CheckpointError, match="residual"):
        sar.ErrorFeedback(sar.TopkA(4, 1)).restore(other.state())
    with pytest.raises(CheckpointError, match="residual"):
        sar.ErrorFeedback(sar.TopkA(4, 1)).restore(sar.TopkA(4, 1).state())


def test_a_reset_forgets_residual_and_steps():
    feedback = sar.ErrorFeedback(sar.GTopk(4, 1))
    feedback.step(np.ones(4, np.float32), sar.SERIAL)
    feedback.reset()
    assert (feedback.residual.tolist(), feedback.gradients, feedback.reducer.steps, len(feedback.contributed)) == ([0] * 4, 0, 0, 0)


def test_one_step_at_a_time():
    feedback = sar.ErrorFeedback(sar.GTopk(4, 1))
    operation = feedback.planned(np.ones(4, np.float32))
    for refused in (lambda: feedback.step(np.ones(4, np.float32), sar.SERIAL), feedback.reset, feedback.state):
        with pytest.raises(sar.AlgorithmError, match="in flight"):
            refused()
    operation.abandon()
    assert feedback.istep(np.ones(4, np.float32), sar.SERIAL).wait().nnz == 1


def test_what_is_not_finite_leaves_the_residual_with_the_update():
    feedback = sar.ErrorFeedback(sar.TopkA(4, 1))
    mean = feedback.step(np.float32([1, np.nan, np.inf, 2]), sar.SERIAL)
    assert np.isnan(mean.values).tolist() == [True]
    assert feedback.residual.tolist() == [1, 0, np.inf, 2]


@pytest.mark.parametrize("name", REDUCERS)
def test_a_step_that_is_put_back_leaves_its_gradient_and_nothing_else(name):
    """Later sums are those of residuals that have held the gradient from the beginning, with the state that the reducers had before."""
    rng = np.random.default_rng(1)
    steps = [[rng.standard_normal(64).astype(np.float32) for _ in range(4)] for _ in range(4)]
    group, others = ([sar.ErrorFeedback(REDUCERS[name](64, 4), revocable=True) for _ in range(4)] for _ in range(2))
    for each in (group, others):
        sar.simulate(steps[0], each)
    sar.simulate(steps[1], group)
    for feedback, other, gradient in zip(group, others, steps[1]):
        feedback.put_back()
        other.residual += gradient
    for gradients in steps[2:]:
        np.testing.assert_array_equal(*(sar.simulate(gradients, each).outputs[0].to_dense() for each in (group, others)))
    for feedback, other in zip(group, others):
        np.testing.assert_array_equal(feedback.residual, other.residual)


def test_only_a_completed_step_of_a_revocable_feedback_is_put_back():
    for revocable in (False, True):
        feedback = sar.ErrorFeedback(sar.TopkA(4, 1), revocable=revocable)
        with pytest.raises(sar.AlgorithmError, match="no step to put back"):
            feedback.put_back()
        feedback.step(np.float32([1, 2, 3, 4]), sar.SERIAL)
        if revocable:
            feedback.put_back()
            np.testing.assert_array_equal(feedback.residual, [1, 2, 3, 4])
        with pytest.raises(sar.AlgorithmError, match="no step to put back"):
            feedback.put_back()
