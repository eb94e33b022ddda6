"""The agreement: one error, the same text, on every rank, whatever is wrong and wherever."""

import numpy as np
import pytest

from sparseallreduce import AlgorithmError, Machine, MismatchError, Operator, SparseAllreduceError, SparseStream, StreamError
from sparseallreduce.algorithms.agreement import Intent, digest_of, explain
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.steps import Share
from sparseallreduce.runtime.handshake.base import RECORD
from sparseallreduce.runtime.simulator import run
from sparseallreduce.streams.operator import SUM

STREAM = SparseStream([1, 3], np.float32([1, 3]), 8)


def outcomes(intents, **options):
    """What each rank gets of the agreement: the entries of all, or the error that it raises."""

    def caught(rank):
        try:
            ours = intents[rank]
            records = yield Share(RECORD.pack(True, 0, ours.error is None, 0, digest_of(ours.terms), ours.entries))
            _, _, valid, _, digests, entries = zip(*map(RECORD.unpack, records))
            if all(valid) and len(set(digests)) == 1:
                return entries
            yield from explain(ours)
        except Exception as error:
            return error

    return run([caught(rank) for rank in range(len(intents))], **options)


def intent(stream=STREAM, op="sum", algorithm="auto", **options):
    return make_call(stream, op, algorithm, options)[1]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 33])
def test_ranks_that_agree_know_each_others_entries(ranks):
    intents = [intent(SparseStream(np.arange(rank), np.ones(rank), 100)) for rank in range(ranks)]
    for delivery in (None, 1, 2):
        out = outcomes(intents, delivery=delivery)
        assert out.outputs == [tuple(range(ranks))] * ranks
        assert (out.messages == (ranks - 1).bit_length()).all()  # one allgather, and a small one
        assert (out.bytes_sent == RECORD.size * (ranks - 1)).all()


def test_a_dense_stream_tells_what_it_stores_without_a_pass_over_it():
    dense = SparseStream.from_dense(np.arange(8, dtype=np.float32))
    assert outcomes([intent(dense), intent()]).outputs == [(8, 2), (8, 2)]


OTHERWISE = {
    "size": (intent(SparseStream([1], np.float32([1]), 9)), "the size: 8 on ranks 0, 2; 9 on rank 1"),
    "dtype": (intent(SparseStream([1], [1.0], 8)), "the dtype: float32 on ranks 0, 2; float64 on rank 1"),
    "row width": (intent(SparseStream([1], np.ones((1, 2), np.float32), 8)), "the row width: None on ranks 0, 2; 2 on rank 1"),
    "operator": (intent(op="max"), "the operator: sum on ranks 0, 2; max on rank 1"),
    "algorithm": (intent(algorithm="dense"), "the algorithm: auto on ranks 0, 2; dense on rank 1"),
    "switch_density": (intent(switch_density=0.25), "the switch_density: None on ranks 0, 2; 0.25 on rank 1"),
    "machine": (intent(machine=Machine(1.0)), f"the machine: None on ranks 0, 2; {Machine(1.0)} on rank 1"),
    "the first of several": (
        intent(SparseStream([1], [1.0], 9), op="max"),
        "the size: 8 on ranks 0, 2; 9 on rank 1",
    ),
}


@pytest.mark.parametrize("other, text", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_a_term_that_differs_is_named_with_its_values_and_ranks(other, text):
    for delivery in (None, 3):
        errors = outcomes([intent(), other, intent()], delivery=delivery).outputs
        assert {type(error) for error in errors} == {MismatchError}
        assert {str(error) for error in errors} == {f"the ranks disagree on {text}. All ranks must pass the same"}
        assert all(error.on_all_ranks for error in errors)


def test_options_that_differ_are_named():
    intents = [intent(algorithm="dsar_early_switch", group_size=size) for size in (4, 2)] + [intent(algorithm="dsar_early_switch")]
    assert {str(error) for error in outcomes(intents).outputs} == {
        "the ranks disagree on the options: group_size=4 on rank 0; group_size=2 on rank 1; none on rank 2. All ranks must pass the same"
    }


def test_many_ranks_are_summed_up():
    errors = outcomes([intent(op="max" if rank == 5 else "sum") for rank in range(20)]).outputs
    assert {str(error) for error in errors} == {
        "the ranks disagree on the operator: "
        "sum on ranks 0, 1, 2, 3, 4, 6, 7, 8, ... (19 in all); max on rank 5. All ranks must pass the same"
    }


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("faulty", [0, 1])
def test_what_is_wrong_on_one_rank_is_raised_on_all(ranks, faulty):
    intents = [intent(algorithm="fast" if rank == faulty else "auto") for rank in range(ranks)]
    errors = outcomes(intents).outputs
    assert {type(error) for error in errors} == {AlgorithmError}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"on rank {faulty}: unknown algorithm 'fast': use one of dense, ")


def test_the_first_of_several_faulty_ranks_is_named():
    errors = outcomes([intent(), intent(op="median"), intent("no stream"), intent(algorithm="fast")]).outputs
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("on rank 1: unknown operator 'median'")


def test_what_is_wrong_on_all_ranks_alike_names_none():
    errors = outcomes([intent(op="median")] * 3).outputs
    assert {str(error).split(":")[0] for error in errors} == {"unknown operator 'median'"}
    assert str(outcomes([intent(op="median")]).outputs[0]).startswith("unknown operator 'median'")


def test_an_exception_that_is_none_of_ours_is_named():
    errors = outcomes([Intent((), 0, MemoryError("4 GiB")), intent()]).outputs
    assert {type(error) for error in errors} == {SparseAllreduceError}
    assert {str(error) for error in errors} == {"on rank 0: MemoryError: 4 GiB"}
    errors = outcomes([intent(), Intent((), 0, StreamError("bad"))]).outputs
    assert {(type(error), str(error)) for error in errors} == {(StreamError, "on rank 1: bad")}


@pytest.mark.parametrize("text", ["x" * 5000, "é" * 5000, "\N{GRINNING FACE}" * 5000, '"\\' * 5000, "\0" * 5000])
def test_texts_of_any_length_and_script_arrive(text):
    by_name = [intent(algorithm=text), intent()]
    by_operator = [intent(op=Operator(text, np.add, 0)), intent(op=SUM)]
    for intents, kind in ((by_name, AlgorithmError), (by_operator, MismatchError)):
        errors = outcomes(intents).outputs
        assert {type(error) for error in errors} == {kind}
        assert len({str(error) for error in errors}) == 1
        assert text[:10] in str(errors[0]) or repr(text)[1:10] in str(errors[0])
        assert len(str(errors[0])) < 2000


def test_equal_terms_do_not_hide_another_order_of_calls():
    errors = outcomes([intent(), Intent((("file", "data.svm"),), 0)]).outputs
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
