"""What all reducers promise: which arrays they take, what they refuse, one operation at a time, and state that can be kept."""

import copy
import pickle
from array import array
from functools import partial

import numpy as np
import pytest
from lossy import REDUCERS, Vectors
from oracle import bits

import sparseallreduce as sar
from sparseallreduce.algorithms.agreement import digest_of, explain
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.errors import CheckpointError
from sparseallreduce.reducers import base
from sparseallreduce.reducers.arrays import as_vector
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams.selection import ExactTopK

every_reducer = pytest.mark.parametrize("name", REDUCERS)


class DLPackOnly:
    """An array of another library, which speaks DLPack and nothing else."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


class InterfaceOnly:
    def __init__(self, values):
        self._values = values
        self.__array_interface__ = values.__array_interface__


class OnAnotherDevice(DLPackOnly):
    def __dlpack__(self, **options):
        raise BufferError("on device 0 of kind 2")


FOREIGN = {"DLPack": DLPackOnly, "array interface": InterfaceOnly, "memoryview": memoryview, "ndarray": lambda values: values}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_of_other_libraries_are_read_in_place(kind, dtype):
    values = np.arange(5, dtype=dtype)
    vector = as_vector(FOREIGN[kind](values), 5)
    assert np.shares_memory(vector, values)
    update, _ = sar.TopkA(5, 1).allreduce(FOREIGN[kind](values), sar.SERIAL)
    assert (update.indices.tolist(), update.values.tolist(), update.dtype) == ([4], [4.0], dtype)


def test_a_read_only_array_is_taken():
    values = np.frombuffer(np.arange(4, dtype=np.float32).tobytes(), np.float32)
    assert sar.GTopk(4, 1).allreduce(values, sar.SERIAL).contributed.tolist() == [3]


def test_an_array_at_an_odd_address_is_taken():
    memory = np.zeros(4 * 100 + 1, np.uint8)
    values = memory[1:].view(np.float32)
    values[:] = np.arange(100)
    update, _ = sar.TopkA(100, 2).allreduce(values, sar.SERIAL)
    assert update.indices.tolist() == [98, 99]


def test_tensors_of_pytorch_are_read_in_place():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(5, dtype=torch.float32)
    assert as_vector(tensor, 5).ctypes.data == tensor.data_ptr()
    with pytest.raises(sar.StreamTypeError, match="detach"):
        as_vector(tensor.clone().requires_grad_(), 5)
    with pytest.raises(sar.StreamTypeError):
        as_vector(tensor.bfloat16(), 5)


@pytest.mark.parametrize(
    "wrong,kind,text",
    [
        (None, sar.StreamTypeError, "not NoneType"),
        ([1.0, 2.0, 3.0, 4.0], sar.StreamTypeError, "not list"),
        (np.zeros(4, int), sar.StreamTypeError, "int64"),
        (np.zeros(4, np.float16), sar.StreamTypeError, "float16"),
        (np.zeros(4, ">f4"), sar.StreamTypeError, ">f4"),
        (array("d", [1, 2, 3]), sar.StreamError, r"\(4,\), not \(3,\)"),
        (np.zeros((2, 2)), sar.StreamError, r"\(4,\), not \(2, 2\)"),
        (np.zeros(8)[::2], sar.StreamError, "contiguous"),
        (np.ma.masked_array(np.zeros(4), [0, 1, 0, 0]), sar.StreamTypeError, "masked"),
        (np.zeros(4, complex), sar.StreamTypeError, "complex128"),
        (OnAnotherDevice(np.zeros(4)), sar.StreamTypeError, "on device 0"),
        (sar.SparseStream([1], [1.0], 4), sar.StreamTypeError, "not SparseStream"),
    ],
)
def test_what_is_no_accumulator_is_refused(wrong, kind, text):
    reducer = sar.TopkA(4, 1)
    with pytest.raises(kind, match=text) as caught:
        reducer.allreduce(wrong, sar.SERIAL)
    assert caught.value.on_all_ranks
    assert reducer.allreduce(np.ones(4), sar.SERIAL).update.nnz == 1, "usable as before"


@pytest.mark.parametrize(
    "make,kind,text",
    [
        (partial(sar.TopkA, -1, 0), sar.AlgorithmError, "at least 0, not -1"),
        (partial(sar.TopkA, 10, 0), sar.AlgorithmError, "from 1 to the size, 10, not 0"),
        (partial(sar.TopkA, 10, 11), sar.AlgorithmError, "not 11"),
        (partial(sar.TopkA, 10, 0.5), sar.StreamTypeError, "k must be an integer, not 0.5"),
        (partial(sar.TopkA, 10.0, 1), sar.StreamTypeError, "size must be an integer"),
        (partial(sar.GTopk, 10, 1, form="ring"), sar.AlgorithmError, "tree, allgather, not 'ring'"),
        (partial(sar.TopkDSA, 10, 1, algorithm="magic"), sar.AlgorithmError, "unknown algorithm 'magic'"),
        (partial(sar.TopkDSA, 10, 1, algorithm="auto"), sar.AlgorithmError, "measured network"),
        (partial(sar.TopkDSA, 10, 1, group_size=2), sar.AlgorithmError, "unknown option 'group_size'"),
        (partial(sar.TopkDSA, 10, 1, switch_density=2), sar.AlgorithmError, "not 2"),
        (partial(sar.TopkA, 10, 1, selector=int), sar.AlgorithmError, "not <class 'int'>"),
        (partial(sar.TopkA, 10, 1, selector=ExactTopK(1)), sar.AlgorithmError, "class MSTopK"),
        (partial(sar.ErrorFeedback, sar.TopkA(4, 1), np.float16), sar.StreamTypeError, "not float16"),
    ],
)
def test_bad_arguments_are_refused_where_a_reducer_is_made(make, kind, text):
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize("comm", ["world", 7])
def test_what_is_no_communicator_leaves_the_reducer_free(comm):
    reducer = sar.TopkA(4, 1)
    with pytest.raises(sar.StreamTypeError, match="communicator"):
        reducer.allreduce(np.ones(4), comm)
    assert reducer.allreduce(np.ones(4), sar.SERIAL).update.nnz == 1


@every_reducer
def test_an_empty_vector_has_an_empty_sum(name):
    out = sar.simulate([np.zeros(0, np.float32)] * 3, [REDUCERS[name](0, 0) for _ in range(3)])
    for update, contributed in out.outputs:
        assert (update.size, update.nnz, len(contributed), update.dtype) == (0, 0, 0, np.float32)


DIFFERENT = {
    "reducer": (lambda: sar.TopkA(8, 2), "topka on rank 1"),
    "k": (lambda: sar.GTopk(8, 3), "k: 2 on ranks 0, 2; 3 on rank 1"),
    "form": (lambda: sar.GTopk(8, 2, form="allgather"), "form: tree on ranks 0, 2; allgather"),
    "selector": (lambda: sar.GTopk(8, 2, selector=Renamed), "selector: ExactTopK on ranks 0, 2; Renamed"),
    "algorithm": (lambda: sar.TopkDSA(8, 2, algorithm="ssar_ring"), "reducer: gtopk on ranks 0, 2; topkdsa"),
}


class Renamed(ExactTopK):
    pass


@pytest.mark.parametrize("term", DIFFERENT)
def test_reducers_that_differ_are_a_mismatch(term):
    other, text = DIFFERENT[term]
    reducers = [sar.GTopk(8, 2), other(), sar.GTopk(8, 2)]
    with pytest.raises(sar.MismatchError, match=text):
        sar.simulate([np.ones(8)] * 3, reducers)
    assert sar.simulate([np.ones(8)] * 2, reducers[::2]).outputs[0].update.nnz == 2, "usable as before"


def planned(make, *options, **named):
    return lambda: make(8, 2, *options, **named).planned(np.ones(8))


PERIODS = {"threshold_period": 5, "boundary_period": 5, "balance_boundaries": False, "max_imbalance": None, "bucket": 2}
PLANNED = {
    "k": lambda: sar.TopkA(8, 3).planned(np.ones(8)),
    "size": lambda: sar.TopkA(9, 2).planned(np.ones(9)),
    "dtype": lambda: sar.TopkA(8, 2).planned(np.ones(8, np.float32)),
    "residual": lambda: sar.ErrorFeedback(sar.TopkA(8, 2), np.float64).planned(np.ones(8)),
    "selector": lambda: planned(sar.TopkA, selector=Renamed)(),
    "switch density": planned(sar.TopkDSA, switch_density=0.5),
    "group size": planned(sar.TopkDSA, algorithm="dsar_early_switch", group_size=2),
    **{option: planned(sar.OkTopk, **{option: value}) for option, value in PERIODS.items()},
    **{name: planned(make) for name, make in REDUCERS.items()},
}


def test_no_two_operations_are_taken_for_one():
    """A reducer's, another's, that of the lossless sum: whatever ranks have confused, they hear of it, and none waits for another."""
    operations = {name: make() for name, make in PLANNED.items()}
    intents = {name: operation.intent for name, operation in operations.items()}
    intents["allreduce"] = make_call(sar.SparseStream.from_dense(np.ones(8)), "sum", "auto", {})[1]
    assert all(intent.error is None for intent in intents.values())
    assert len({digest_of(intent.terms) for intent in intents.values()}) == len(intents)
    for name, intent in intents.items():
        with pytest.raises(sar.MismatchError, match="the ranks disagree on the"):
            run([explain(intents["topka"] if name != "topka" else intents["allreduce"]), explain(intent)])


def test_ranks_that_are_steps_apart_are_a_mismatch():
    reducers = [sar.TopkA(8, 2), sar.TopkA(8, 2)]
    reducers[0].allreduce(np.ones(8), sar.SERIAL)
    with pytest.raises(sar.MismatchError, match="operations before this one: 1 on rank 0; 0 on rank 1"):
        sar.simulate([np.ones(8)] * 2, reducers)


def test_accumulators_of_two_dtypes_are_a_mismatch():
    with pytest.raises(sar.MismatchError, match="dtype: float32 on rank 0; float64 on rank 1"):
        sar.simulate([np.ones(8, np.float32), np.ones(8)], [sar.TopkA(8, 2) for _ in range(2)])


@every_reducer
def test_a_reducer_takes_one_operation_at_a_time(name):
    reducer = REDUCERS[name](8, 2)
    operation = reducer.planned(np.ones(8))
    for refused in (lambda: reducer.allreduce(np.ones(8), sar.SERIAL), reducer.reset, reducer.state, lambda: reducer.restore({})):
        with pytest.raises(sar.AlgorithmError, match="in flight"):
            refused()
    operation.abandon()
    assert reducer.allreduce(np.float64([0, 0, 0, 9, 0, 0, 10, 0]), sar.SERIAL).contributed.tolist() == [3, 6]


class Interrupting:
    """Picks what goes on in the simulator at random, and is interrupted at a number of its turns."""

    def __init__(self, turn, error):
        self.turn, self.error, self.turns, self.rng = turn, error, 0, np.random.default_rng(turn)

    def __call__(self, choices):
        self.turns += 1
        if self.turns == self.turn:
            raise self.error
        return int(self.rng.integers(choices))


def assert_same_sums(first, second, accumulators):
    ours, theirs = (sar.simulate(accumulators, group).outputs for group in (first, second))
    for one, other in zip(ours, theirs):
        assert bits(one.update) == bits(other.update)
        np.testing.assert_array_equal(one.contributed, other.contributed)


@every_reducer
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_operation_that_is_interrupted_anywhere_has_not_been(name, error):
    """Nor does it go on when the reducers have others, or when what is left of it is collected."""
    case = Vectors(3, 60, 5, seed=1)
    reducers, others = case.reducers(REDUCERS[name]), case.reducers(REDUCERS[name])
    assert_same_sums(reducers, others, case.step(0))
    turn = 0
    while True:
        turn += 1
        before = [(one.state(), one.returned) for one in reducers]
        chooser, caught = Interrupting(turn, error()), None
        try:
            sar.simulate(case.step(turn), reducers, delivery=chooser)
        except error as raised:
            caught = raised  # with all frames that its traceback holds
        for one, (state, returned) in zip(reducers, before):
            if one.steps == state["steps"]:
                assert (one.state(), one.returned) == (state, returned)
            else:  # this rank had all it needed
                one.restore(state)
        assert_same_sums(reducers, others, case.step(turn))
        if caught is None:
            break
    assert turn > 4


class Choosing(ExactTopK):
    """Remembers more than its number of selections, and fails when told to."""

    error = None

    def __init__(self, k):
        super().__init__(k)
        self.steps, self.counts, self.part = 0, np.zeros(3), ExactTopK(2)

    def choose(self, accumulator, gradient, clear):
        self.steps += 1
        self.counts += 1
        self.part.k += 1
        if Choosing.error is not None:
            raise Choosing.error
        return super().choose(accumulator, gradient, clear)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), MemoryError("no room"), ValueError("no sense")], ids=repr)
def test_a_selection_that_fails_leaves_the_selector_as_it_was(monkeypatch, error):
    reducer = sar.TopkA(8, 2, selector=Choosing)
    reducer.allreduce(np.ones(8), sar.SERIAL)
    before = reducer.state()
    monkeypatch.setattr(Choosing, "error", error)
    for operate in (lambda: reducer.allreduce(np.ones(8), sar.SERIAL), lambda: reducer.iallreduce(np.ones(8), sar.SERIAL).wait()):
        with pytest.raises(type(error)) as caught:
            operate()
        after = reducer.state()
        assert caught.value is error and before.keys() == after.keys()
        assert all(np.array_equal(before[term], after[term]) for term in before)
    monkeypatch.undo()
    reducer.allreduce(np.ones(8), sar.SERIAL)
    assert (reducer.steps, reducer.selector.steps, reducer.selector.counts.tolist(), reducer.selector.part.k) == (2, 2, [2, 2, 2], 4)


@every_reducer
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, sar.StreamTypeError])
@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "while others wait"])
def test_a_start_that_fails_leaves_the_reducer_free(monkeypatch, name, error, begun):
    """And what may have been started of it neither goes on nor counts, but tells the others that it does not."""
    reducer, left = REDUCERS[name](8, 2), []

    def launch(_comm, _intent, schedule, **_):
        left.append(schedule(1, 2))
        if begun:
            left[-1].send(None)
        raise error

    before = reducer.state()
    for start in (lambda: reducer.allreduce(np.ones(8)), lambda: reducer.iallreduce(np.ones(8))):
        with monkeypatch.context() as patch:
            patch.setattr(base, "launch", launch)
            with pytest.raises(error):
                start()
        assert reducer.state() == before
    assert reducer.allreduce(np.arange(8.0), sar.SERIAL).contributed.tolist() == [6, 7]
    after = reducer.state()
    for schedule in left:
        if begun:
            with pytest.raises(sar.AlgorithmError, match="has abandoned this operation"):
                schedule.send(None)
        schedule.close()
    assert reducer.state() == after


def test_an_operation_that_never_began_and_is_forgotten_is_over():
    reducer = sar.TopkA(8, 2)
    operation = reducer.planned(np.ones(8))
    schedule = operation.run(0, 2)
    schedule.close()
    with pytest.raises(sar.AlgorithmError, match="in flight"):
        reducer.reset()
    del operation, schedule
    reducer.reset()


class Broken(sar.TopkA):
    def options(self):
        raise RuntimeError("no options")


def test_whatever_is_wrong_on_one_rank_is_told_to_all():
    reducers = [sar.TopkA(8, 2), Broken(8, 2)]
    with pytest.raises(sar.SparseAllreduceError, match="on rank 1: RuntimeError: no options") as caught:
        sar.simulate([np.ones(8)] * 2, reducers)
    assert caught.value.on_all_ranks
    reducers[0].reset()
    reducers[1].reset()


@every_reducer
def test_a_reset_reducer_is_a_new_one(name):
    reducer = REDUCERS[name](8, 2)
    reducer.allreduce(np.ones(8), sar.SERIAL)
    assert reducer.steps == 1
    reducer.reset()
    assert (reducer.state(), reducer.returned) == (REDUCERS[name](8, 2).state(), None)


@every_reducer
def test_state_goes_to_a_new_reducer(name):
    case = Vectors(3, 50, 5)
    reducers = case.reducers(REDUCERS[name])
    for step in range(3):
        sar.simulate(case.step(step), reducers)
    restored = case.reducers(REDUCERS[name])
    for new, old in zip(restored, reducers):
        new.restore(pickle.loads(pickle.dumps(old.state())))
    first, second = (sar.simulate(case.step(3), group).outputs for group in (reducers, restored))
    for ours, theirs in zip(first, second):
        np.testing.assert_array_equal(ours.update.to_dense(), theirs.update.to_dense())
        np.testing.assert_array_equal(ours.contributed, theirs.contributed)
    assert [new.steps for new in restored] == [4, 4, 4]


@pytest.mark.parametrize("other", [sar.GTopk(8, 2), sar.TopkA(9, 2), sar.TopkA(8, 3)])
def test_state_of_another_reducer_is_refused(other):
    with pytest.raises(CheckpointError, match="this state is of a reducer with"):
        sar.TopkA(8, 2).restore(other.state())


@every_reducer
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda reducer: pickle.loads(pickle.dumps(reducer))])
def test_a_reducer_can_be_copied(name, copied):
    reducer = REDUCERS[name](8, 2)
    reducer.allreduce(np.ones(8), sar.SERIAL)
    again = copied(reducer)
    assert again.state() == reducer.state()
    assert again.allreduce(np.arange(8.0), sar.SERIAL).contributed.tolist() == [6, 7]


def test_zeros_are_not_sent():
    reducers = [sar.TopkA(100, 10) for _ in range(2)]
    out = sar.simulate([np.eye(100, dtype=np.float32)[7], np.zeros(100, np.float32)], reducers)
    assert [reduced.contributed.tolist() for reduced in out.outputs] == [[7], []]
    assert (out.bytes_sent - out.header_bytes).tolist() == [8, 0]


def test_state_of_another_selector_is_refused():
    with pytest.raises(CheckpointError, match="selector Renamed, and this one has ExactTopK"):
        sar.TopkA(8, 2).restore(sar.TopkA(8, 2, selector=Renamed).state())


def test_a_trace_counts_the_entries_of_the_update():
    with sar.trace() as counts:
        sar.TopkA(8, 2).allreduce(np.arange(8.0), sar.SERIAL)
    assert (counts.operations, counts.entries_in, counts.entries_out) == (1, 2, 2)
