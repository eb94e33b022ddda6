"""Plans of device streams on one rank, against those of the host; on several they are in tests/mpi/test_device_streams.py."""

import device_arrays as xp
import numpy as np
import pytest
from test_streams import same

import sparseallreduce as sar
from sparseallreduce import SparseStream, StreamError, StreamTypeError

SIZE = 24


def streams_of(seed):
    """Sparse, dense, and with rows."""
    rng = np.random.default_rng(seed)
    made = []
    for places, row, density in (([1, 5, 9], (), None), (range(0, 22, 2), (), 0.1), ([3, 4], (2,), None)):
        values = rng.integers(1, 9, (len(places), *row)).astype(np.float64)
        made.append(SparseStream(np.array(places), values, SIZE, switch_density=density))
    return made


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("is_list", [False, True])
def test_a_plan_of_device_streams_has_the_bits_of_one_of_the_host(fixed, is_list, op):
    def planned(streams):
        return sar.allreduce_init(streams if is_list else streams[1], sar.SERIAL, op, fixed_indices=fixed)

    ours, theirs = planned([stream.to_device(xp) for stream in streams_of(0)]), planned(streams_of(0))
    kept = []
    for seed in range(1, 4):
        given = streams_of(seed)
        with xp.cuda.Stream():
            there = [stream.to_device(xp) for stream in given]
            ours.start(there if is_list else there[1])
            if fixed:
                for stream in there:
                    stream._stored.fill(0)  # it has been copied
        theirs.start(given if is_list else given[1])
        device, host = ours.wait(), theirs.wait()
        for our, their in zip(device, host, strict=True) if is_list else [(device, host)]:
            same(our, their)
            kept.append((our, their.copy()))
    for our, their in kept:  # on memory of their own
        same(our, their)


def test_values_alone_are_taken_from_the_device():
    stream = streams_of(0)[0].to_device(xp)
    plan = sar.allreduce_init(stream, sar.SERIAL, fixed_indices=True)
    plan.start(xp.asarray(np.float32([1, 2, 3])))
    assert plan.wait().values.tolist() == [1, 2, 3]
    other = SparseStream([1, 5, 10], [1.0, 2.0, 3.0], SIZE)
    for wrong, error, text in (
        (np.ones(3), StreamTypeError, r"streams on a GPU, but was given one on the host.*to_device"),
        ([1.0, 2.0, 3.0], StreamTypeError, "was given one on the host"),
        (stream.to_host(), StreamTypeError, "was given one on the host"),
        (xp.zeros(4), StreamError, "shape"),
        (xp.zeros(3, np.complex64), StreamTypeError, "complex64"),
        (other.to_device(xp), StreamError, "differ from the 3 of the plan"),
        (SparseStream.from_dense(other.to_dense()).to_device(xp), StreamError, "differ from the 3 of the plan"),
        (SparseStream([1], [1.0], 9).to_device(xp), StreamError, "size, dtype or width"),
    ):
        plan.start(wrong)
        with pytest.raises(error, match=text):
            plan.wait()
    plan.start(stream)
    same(plan.wait(), stream.to_host())
    plan.free()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_plan_of_the_host_is_told_what_lies_on_a_gpu(fixed):
    stream = streams_of(0)[0]
    plan = sar.allreduce_init([stream], sar.SERIAL, fixed_indices=fixed)
    plan.start([stream.to_device(xp)])
    with pytest.raises(StreamTypeError, match=r"streams on the host, but was given one on a GPU.*to_host"):
        plan.wait()
    plan = sar.allreduce_init([stream.to_device(xp)], sar.SERIAL, fixed_indices=fixed)
    plan.start([stream])
    with pytest.raises(StreamTypeError, match=r"streams on a GPU.*to_device"):
        plan.wait()
