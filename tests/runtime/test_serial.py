"""One rank alone: every algorithm gives back the stream, errors come where they do under MPI, and requests are requests."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import cases

import sparseallreduce as sar
from sparseallreduce import SERIAL, AlgorithmError, StreamTypeError

STREAM = sar.SparseStream([3, 5], np.float32([2, 4]), 40)


@pytest.mark.parametrize("algorithm", sar.algorithms())
@given(case=cases(ranks=st.just(1)))
def test_the_reduction_over_one_rank_is_its_stream(algorithm, case):
    before = bits(case.streams[0])
    blocking = sar.allreduce(case.streams[0], SERIAL, op=case.operator, algorithm=algorithm)
    assert_reduction(blocking, case.entries, case.size, case.operator)
    assert bits(sar.iallreduce(case.streams[0], SERIAL, op=case.operator, algorithm=algorithm).wait()) == bits(blocking)
    assert bits(sar.simulate(case.streams, algorithm, op=case.operator).outputs[0]) == bits(blocking)
    assert bits(case.streams[0]) == before


def test_a_request_is_done_at_once_and_stays_so():
    request = sar.iallreduce(STREAM, SERIAL)
    for _ in range(2):
        done, result = request.test()
        assert done and bits(result) == bits(request.wait())


def test_waitall_gives_the_results_in_order():
    requests = [sar.iallreduce(sar.SparseStream([rank], [1.0], 8), SERIAL) for rank in range(4)]
    assert [result.indices.tolist() for result in sar.Request.waitall(requests)] == [[0], [1], [2], [3]]
    assert sar.Request.waitall([]) == []


def test_errors_of_a_request_come_when_it_is_waited_for():
    request = sar.iallreduce(STREAM, SERIAL, algorithm="fast")
    for finish in (request.test, request.wait, lambda: sar.Request.waitall([request])):
        with pytest.raises(AlgorithmError, match=r"^unknown algorithm 'fast': use one of dense, "):
            finish()
    assert sar.allreduce(STREAM, SERIAL).nnz == 2


REFUSED = {
    "no stream": (
        lambda: sar.allreduce(np.ones(3), SERIAL),
        StreamTypeError,
        "allreduce takes a SparseStream, not ndarray: make one, as with SparseStream.from_dense",
    ),
    "no communicator": (
        lambda: sar.allreduce(STREAM, 5),
        StreamTypeError,
        "comm must be an mpi4py intracommunicator or sparseallreduce.SERIAL, not int",
    ),
    "no algorithm": (
        lambda: sar.allreduce(STREAM, SERIAL, algorithm=None),
        AlgorithmError,
        f"unknown algorithm None: use one of {', '.join(sar.algorithms())}, or a schedule function",
    ),
    "an array for algorithm": (
        lambda: sar.allreduce(STREAM, SERIAL, algorithm=np.array(["dense", "auto"])),
        AlgorithmError,
        f"unknown algorithm array(['dense', 'auto'], dtype='<U5'): use one of {', '.join(sar.algorithms())}, or a schedule function",
    ),
    "unknown operator": (
        lambda: sar.allreduce(STREAM, SERIAL, op="median"),
        AlgorithmError,
        "unknown operator 'median': use one of max, mean, min, prod, sum, or an Operator(name, ufunc, neutral)",
    ),
    "unknown option": (
        lambda: sar.allreduce(STREAM, SERIAL, algorithm="dense", group_size=3),
        AlgorithmError,
        "unknown option 'group_size' of algorithm 'dense': it takes none",
    ),
    "unknown progress": (
        lambda: sar.iallreduce(STREAM, SERIAL, progress="magic").wait(),
        AlgorithmError,
        "progress is 'manual' or 'thread', not 'magic'",
    ),
    "density that is no number": (
        lambda: sar.allreduce(STREAM, SERIAL, switch_density="half"),
        AlgorithmError,
        "switch_density is a fraction of the size, from 0 to 1, not 'half'",
    ),
}


@pytest.mark.parametrize("call, kind, text", REFUSED.values(), ids=REFUSED.keys())
def test_bad_arguments_say_what_is_wrong(call, kind, text):
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    assert str(raised.value) == text


def test_options_of_numpys_number_types_are_numbers():
    streams = [STREAM] * 4
    plain = sar.simulate(streams, "dsar_early_switch", group_size=2, switch_density=0.25)
    numpys = sar.simulate(streams, "dsar_early_switch", group_size=np.int64(2), switch_density=np.float32(0.25))
    assert bits(numpys.outputs[0]) == bits(plain.outputs[0])
    np.testing.assert_array_equal(numpys.messages, plain.messages)


def test_the_communicator_of_one_rank_looks_like_one():
    assert (SERIAL.rank, SERIAL.size, SERIAL.Get_rank(), SERIAL.Get_size()) == (0, 1, 0, 1)
    assert repr(SERIAL) == "sparseallreduce.SERIAL"
