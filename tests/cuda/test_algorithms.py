"""Algorithms on streams of the device, which travel by way of the host, against the same on the host."""

import device_arrays as xp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Expected
from strategies import cases
from test_streams import same

import sparseallreduce as sar
from sparseallreduce import MismatchError, SparseStream, StreamTypeError

ALGORITHMS = sar.algorithms()


def few(case):
    """A small one that CuPy takes; of complex numbers NumPy rounds products one way in vector instructions and another way without."""
    return case.dtype != "bfloat16" and case.size <= 40 and not (case.op == "prod" and case.dtype.startswith("complex"))


def both(streams, algorithm, **options):
    """What a simulation of device streams has, and one of the same on the host."""
    with np.errstate(all="ignore"):
        return [sar.simulate(moved, algorithm, **options) for moved in ([stream.to_device(xp) for stream in streams], streams)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=4, deadline=None)
@given(
    case=cases(ranks=st.integers(1, 6)).filter(few),
    through_wire=st.booleans(),
    hosts=st.sampled_from([None, 2]),
)
def test_every_algorithm_has_the_bits_and_the_bytes_of_the_host(algorithm, case, through_wire, hosts):
    network = sar.Network(hosts=hosts)
    device, host = both(case.streams, algorithm, op=case.operator, through_wire=through_wire, network=network)
    for ours, theirs in zip(device.outputs, host.outputs, strict=True):
        same(ours, theirs)
        with pytest.raises(sar.StreamError, match="copy"):
            ours.values = ours.values
    np.testing.assert_array_equal(device.bytes_sent, host.bytes_sent)
    np.testing.assert_array_equal(device.messages, host.messages)
    assert device.time == host.time
    Expected(case.entries, case.size, case.operator).check(device.outputs[0].to_host(), case.exact)


@pytest.mark.parametrize("codec", ["float16", "qsgd8"])
@pytest.mark.parametrize("algorithm", ["ssar_ring", "ssar_split_allgather", "dsar_split_allgather"])
def test_values_that_are_quantised_are_sent_as_they_came(algorithm, codec):
    rng = np.random.default_rng(1)
    streams = [SparseStream(np.sort(rng.choice(60, 9, replace=False)), rng.standard_normal(9), 60) for _ in range(3)]
    device, host = both(streams, algorithm, value_codec=codec, seed=3, through_wire=True)
    for ours, theirs in zip(device.outputs, host.outputs, strict=True):
        same(ours, theirs)
    np.testing.assert_array_equal(device.bytes_sent, host.bytes_sent)


def test_ranks_of_host_and_gpu_are_told_so_and_so_is_who_gives_what_only_the_host_takes():
    host = SparseStream([1], [2.0], 8)
    device = host.to_device(xp)
    with pytest.raises(MismatchError, match="memory of the streams: the host's on rank 0; a GPU's on rank 1"):
        sar.simulate([host, device])
    with pytest.raises(StreamTypeError, match="to_host"):
        sar.simulate([[device, device], [device, device]])
    same(sar.allreduce(device, sar.SERIAL, op="mean"), host)
