"""A mistake on one rank is the same error on every rank of the operation, within a second, and the communicator stays usable."""

import time

import numpy as np
from mpi_cases import each, skip
from mpi_inputs import Inputs, check_usable

import sparseallreduce as sar
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.runtime.mailbox import Failure

GOOD = sar.SparseStream([1, 5], np.float64([1, 2]), 10)

# What one rank passes instead of GOOD, the sum, by ssar_ring; the class of the error; what its text has to say.
MISTAKES = {
    "stream is None": ({"stream": None}, sar.StreamTypeError, "not NoneType"),
    "stream is an array": ({"stream": np.ones(10)}, sar.StreamTypeError, "not ndarray"),
    "dtype": ({"stream": sar.SparseStream([1], np.float32([1]), 10)}, sar.MismatchError, "dtype: float64 on rank"),
    "size": ({"stream": sar.SparseStream([1], [1.0], 11)}, sar.MismatchError, "size: 10 on rank"),
    "width": ({"stream": sar.SparseStream([1], [[1.0, 2.0]], 10)}, sar.MismatchError, "row width: None on rank"),
    "operator": ({"op": "max"}, sar.MismatchError, "operator: sum on rank"),
    "mean": ({"op": "mean"}, sar.MismatchError, "operator: sum on rank"),
    "mean of integers": (
        {"op": "mean", "stream": sar.SparseStream([1], np.int32([1]), 10)},
        sar.StreamTypeError,
        "the mean of int32 values is not int32: convert them to floats, or divide the result of op='sum'",
    ),
    "no neutral element": (
        {"op": sar.Operator("ours", np.minimum, "none")},
        sar.AlgorithmError,
        "operator 'ours' has no neutral element of float64",
    ),
    "unknown operator": ({"op": "median"}, sar.AlgorithmError, "unknown operator 'median'"),
    "algorithm": ({"algorithm": "dense"}, sar.MismatchError, "algorithm: ssar_ring on rank"),
    "unknown algorithm": ({"algorithm": "magic"}, sar.AlgorithmError, "unknown algorithm 'magic'"),
    "no name of an algorithm": ({"algorithm": 7}, sar.AlgorithmError, "unknown algorithm 7"),
    "option": ({"algorithm": "dsar_early_switch", "group_size": 0}, sar.AlgorithmError, "group_size=0"),
    "unknown option": ({"colour": "blue"}, sar.AlgorithmError, "unknown option 'colour'"),
    "switch_density": ({"switch_density": 0.25}, sar.MismatchError, "switch_density: None on rank"),
    "switch_density out of range": ({"switch_density": 1.5}, sar.AlgorithmError, "not 1.5"),
    "machine": ({"machine": sar.Machine()}, sar.MismatchError, "machine: None on rank"),
    "no machine": ({"machine": "fast"}, sar.AlgorithmError, "not str"),
}


@each(mistake=MISTAKES, how=["blocking", "wait", "test"])
def case_mistake_on_one_rank_is_raised_on_all(comm, mistake, how):
    wrong, kind, text = MISTAKES[mistake]
    if comm.size == 1 and kind is sar.MismatchError:
        skip("one rank agrees with itself")
    culprit = comm.size // 2
    arguments = wrong if comm.rank == culprit else {}
    error = raised(lambda: call(comm, how, **arguments))
    assert type(error) is kind, repr(error)
    assert text in str(error)
    assert f"on rank {culprit}" in str(error) or comm.size == 1
    check_same_everywhere(comm, error)
    check_usable(comm)


@each(how=["blocking", "wait"])
def case_mistake_on_all_ranks_is_raised_without_a_rank(comm, how):
    error = raised(lambda: call(comm, how, algorithm="magic"))
    assert isinstance(error, sar.AlgorithmError)
    assert "rank" not in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)


def case_different_mistakes_on_all_ranks_are_one_error(comm):
    error = raised(lambda: call(comm, "wait", algorithm=f"magic {comm.rank}"))
    assert isinstance(error, sar.AlgorithmError)
    assert "magic 0" in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)


@each(how=["blocking", "wait"])
def case_mean_of_integers_is_refused_on_all_ranks(comm, how):
    error = raised(lambda: call(comm, how, op="mean", stream=sar.SparseStream([1], np.int64([1]), 10), algorithm="auto"))
    assert isinstance(error, sar.StreamTypeError) and "rank" not in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)


def case_operators_of_one_name_that_differ(comm):
    needs_two(comm)
    ufunc = np.maximum if comm.rank else np.minimum
    error = raised(lambda: call(comm, "blocking", op=sar.Operator("ours", ufunc, 0.0)))
    assert isinstance(error, sar.MismatchError)
    assert "ours (minimum, neutral element 0.0) on rank 0" in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)


def case_options_that_differ(comm):
    needs_two(comm)
    error = raised(lambda: call(comm, "blocking", algorithm="dsar_early_switch", group_size=2 + comm.rank % 2))
    assert isinstance(error, sar.MismatchError)
    assert "group_size=2 on rank" in str(error) and "group_size=3 on rank" in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)


def case_progress_of_another_kind(comm):
    error = raised(lambda: sar.iallreduce(GOOD, comm, progress="magic" if comm.rank == 0 else "manual").wait())
    assert isinstance(error, sar.AlgorithmError)
    assert "'magic'" in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)


def case_operations_in_another_order_on_one_rank(comm):
    """Two operations of different sizes, started the other way round: neither hangs, and both are mismatches everywhere."""
    needs_two(comm)
    sizes = (100, 50) if comm.rank == 0 else (50, 100)
    requests = [sar.iallreduce(Inputs(comm.size, size).stream(comm.rank), comm, algorithm="ssar_ring") for size in sizes]
    for request in requests:
        error = raised(request.wait)
        assert isinstance(error, sar.MismatchError)
        assert "size: " in str(error)
        check_same_everywhere(comm, error)
    check_usable(comm)


@each(mistake=["stream is None", "dtype", "algorithm"])
def case_only_the_bad_one_of_several_in_flight_fails(comm, mistake):
    wrong, kind, _ = MISTAKES[mistake]
    if comm.size == 1 and kind is sar.MismatchError:
        skip("one rank agrees with itself")
    for algorithm in ("ssar_split_allgather", "dense"):
        inputs = Inputs(comm.size, 1000)
        stream = inputs.stream(comm.rank)
        good = [sar.iallreduce(stream, comm, algorithm=algorithm)]
        bad = sar.iallreduce(**{"stream": GOOD, "comm": comm, "algorithm": "ssar_ring"} | (wrong if comm.rank == comm.size - 1 else {}))
        good += [sar.iallreduce(stream, comm, algorithm=algorithm) for _ in range(2)]
        error = raised(lambda requests=(good[0], bad, *good[1:]): sar.Request.waitall(requests))
        assert type(error) is kind
        check_same_everywhere(comm, error)
        for request in good:
            inputs.check(request.wait())
        assert raised(bad.wait) is error, "a request that failed stays so"


def case_errors_in_flight_on_two_operations_keep_apart(comm):
    requests = [sar.iallreduce(GOOD, comm, algorithm=f"magic {number}") for number in range(3)]
    for number in (2, 0, 1):
        assert f"magic {number}" in str(raised(requests[number].wait))
    check_usable(comm)


def case_long_texts_are_the_same_everywhere(comm):
    name = "magic" * 1000 + "é" * 1000
    for arguments in ({"algorithm": name}, {"op": sar.Operator(name + str(comm.rank), np.add, 0)}):
        if comm.size == 1 and "op" in arguments:
            continue
        error = raised(lambda arguments=arguments: call(comm, "blocking", **arguments))
        assert isinstance(error, sar.MismatchError if "op" in arguments else sar.AlgorithmError), repr(error)
        check_same_everywhere(comm, error)
        check_usable(comm)


def case_error_comes_within_a_second(comm):
    seconds = []
    for _ in range(3):  # of which one may meet a busy machine
        comm.Barrier()
        start = time.monotonic()
        raised(lambda: call(comm, "blocking", **({"stream": None} if comm.rank == 0 else {})))
        seconds.append(max(comm.allgather(time.monotonic() - start)))
    assert min(seconds) < 1, seconds


def case_nothing_is_lost_by_an_error(comm):
    stream = Inputs(comm.size, 100).stream(comm.rank)
    before = stream.indices.tobytes(), stream.values.tobytes()
    raised(lambda: sar.allreduce(stream, comm, algorithm="magic"))
    assert (stream.indices.tobytes(), stream.values.tobytes()) == before


def call(comm, how, **arguments):
    arguments = {"stream": GOOD, "comm": comm, "algorithm": "ssar_ring"} | arguments
    if how == "blocking":
        return sar.allreduce(**arguments)
    request = sar.iallreduce(**arguments)
    while how == "test":
        done, result = request.test()
        if done:
            return result
    return request.wait()


def raised(function):
    """The library's error that the function raises."""
    try:
        function()
    except sar.SparseAllreduceError as error:
        return error
    raise AssertionError("no error was raised")


def check_same_everywhere(comm, error):
    assert error.on_all_ranks
    for theirs in comm.allgather((type(error).__name__, str(error))):
        assert theirs == (type(error).__name__, str(error))


def needs_two(comm):
    if comm.size == 1:
        skip("one rank agrees with itself")


def case_a_rank_that_gives_up_behind_an_operation_ends_it_on_no_other_rank(comm):
    """The last rank's announcement arrives while the operation is in flight on the others, to which it has sent all that they need."""
    if comm.size == 1:
        skip("needs two ranks")
    last = comm.rank == comm.size - 1
    sar.allreduce(GOOD, comm, algorithm="ssar_ring")
    channel = channel_of(comm)
    request = None if last else sar.iallreduce(GOOD, comm, algorithm="ssar_ring")
    failure = Failure.of(MemoryError("no room"), channel.sequence + last, comm.rank)._replace(later=True)
    if last:
        channel.late.post(failure)
    while not last and not channel.late.may_strand(0):
        assert request.test() == (False, None)
    comm.Barrier()
    request = request or sar.iallreduce(GOOD, comm, algorithm="ssar_ring")
    np.testing.assert_array_equal(request.wait().to_dense()[GOOD.indices], GOOD.values * comm.size)
    if last:
        channel.late.note(failure.number, failure)
    error = raised(lambda: sar.allreduce(GOOD, comm))
    assert "MemoryError" in str(error) and f"rank {comm.size - 1} gave up: no room" in str(error)
    check_same_everywhere(comm, error)
    check_usable(comm)
