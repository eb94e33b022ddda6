"""Algorithms on streams of the device, which travel by way of the host, against the same on the host."""

import device_arrays as xp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Expected
from simulated import same_bits
from strategies import cases
from test_streams import same

import sparseallreduce as sar
from sparseallreduce import MismatchError, SparseStream, StreamTypeError
from sparseallreduce.algorithms.cost import without_copies
from sparseallreduce.runtime.simulator import machine_of
from sparseallreduce.streams import fusion

ALGORITHMS = sar.algorithms()


def few(case):
    """A small one that CuPy takes; of complex numbers NumPy rounds products one way in vector instructions and another way without."""
    return case.dtype != "bfloat16" and case.size <= 40 and not (case.op == "prod" and case.dtype.startswith("complex"))


def both(streams, algorithm, **options):
    """What a simulation of device streams has, and one of the same on the host; what is chosen is the same, as copies take no time."""
    if algorithm in ("auto", "hierarchical"):
        options["machine"] = without_copies(machine_of(options.get("network", sar.Network())))
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


@pytest.mark.parametrize("collective", ["reduce", "reduce_scatter", "allgather", "bcast"])
@settings(max_examples=4, deadline=None)
@given(data=st.data(), case=cases(ranks=st.integers(1, 5)).filter(few), through_wire=st.booleans())
def test_other_collectives_have_the_bits_and_the_bytes_of_the_host(collective, data, case, through_wire):
    algorithm, root = data.draw(st.sampled_from(sar.algorithms(collective)[:-1])), data.draw(st.integers(0, case.ranks - 1))
    join = data.draw(st.sampled_from(["ranges", case.operator]))
    options = {"op": case.operator, "collective": collective, "root": root, "join": join, "through_wire": through_wire}
    device, host = both(case.streams, algorithm, **options)
    for ours, theirs in zip(device.outputs, host.outputs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            same(ours, theirs)
    np.testing.assert_array_equal(device.bytes_sent, host.bytes_sent)


def test_the_ranks_of_a_broadcast_say_where_its_result_lies():
    stream = SparseStream([1, 4], [2.0, 3.0], 9)
    outputs = sar.simulate([stream.to_device(xp), None, stream, stream.to_device(xp)], collective="bcast").outputs
    assert [output.on_device for output in outputs] == [True, False, False, True]
    assert all(output.to_host() == stream for output in outputs)


KINDS = (("float32", ()), ("float64", ()), ("float32", (2,)), ("int64", ()))


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 4),
    count=st.integers(0, 5),
    op=st.sampled_from(["sum", "mean", "min"]),
    algorithm=st.sampled_from(["auto", "ssar_ring", "dsar_split_allgather"]),
    alike=st.booleans(),
)
def test_lists_have_the_bits_and_the_bytes_of_the_host(seed, ranks, count, op, algorithm, alike):
    rng = np.random.default_rng(seed)
    kinds = [KINDS[0 if alike else rng.integers(len(KINDS) - (op == "mean"))] for _ in range(count)]
    sizes = rng.integers(0, 9, count).tolist()
    lists = []
    for _ in range(ranks):
        streams = []
        for size, (dtype, row) in zip(sizes, kinds, strict=True):
            entries = int(rng.integers(0, size + 1))
            indices = np.sort(rng.choice(size, entries, replace=False))
            streams.append(SparseStream(indices, rng.integers(-2, 3, (entries, *row)).astype(dtype), size))
        lists.append(streams)
    options = {"op": op, "machine": without_copies(machine_of(sar.Network()))}
    device = sar.simulate([[stream.to_device(xp) for stream in each] for each in lists], algorithm, **options)
    host = sar.simulate(lists, algorithm, **options)
    for ours, theirs in zip(device.outputs, host.outputs, strict=True):
        for our, their in zip(ours, theirs, strict=True):
            same(our, their)
    np.testing.assert_array_equal(device.bytes_sent, host.bytes_sent)


def test_auto_knows_what_copies_take():
    streams = [SparseStream(np.arange(rank, 1000, 50), np.ones(20, np.float32), 1000) for rank in range(4)]
    machine = without_copies(machine_of(sar.Network(latency=1e-7, bandwidth=1e7)))._replace(beta_dense=1e-12)
    for copies, taken in ((0.0, "dense"), (1e-6, "ssar_recursive_doubling")):
        dear = machine._replace(beta_to_host=copies, beta_to_device=copies)
        auto, named = (sar.simulate([each.to_device(xp) for each in streams], name, machine=dear) for name in ("auto", taken))
        np.testing.assert_array_equal(auto.bytes_sent, named.bytes_sent)


def test_lists_beyond_32_bits_are_fused_and_cut():
    for sizes in ([2**32 - 1, 2**32 - 1, 5], [2**32, 0], [2**31, 2**31, 0]):
        host = [SparseStream([size - 1] if size else [], [2.0] if size else [], size) for size in sizes]
        device = [stream.to_device(xp) for stream in host]
        fused = fusion.fusion_of(host)
        (ours,), (theirs,) = fused.fuse(device, False), fused.fuse(host, False)
        same_bits(ours.indices.get(), theirs.indices)
        for our, their in zip(fused.cut((ours,), None, True), fused.cut((theirs,), None, True), strict=True):
            same_bits(our.indices.get(), their.indices)


def test_a_long_part_of_a_dense_list_is_looked_at_by_samples(monkeypatch):
    monkeypatch.setattr(fusion, "_SAMPLED", 32)
    monkeypatch.setattr(fusion, "_SAMPLES", 8)
    for values in (np.ones(64), np.arange(64) % 64 == 1):
        streams = [SparseStream.from_dense(values.astype(np.float32)), SparseStream.from_dense(np.ones(64, np.float32))]
        for ours, theirs in zip(
            sar.allreduce([stream.to_device(xp) for stream in streams], sar.SERIAL, "sum", "dense"),
            sar.allreduce(streams, sar.SERIAL, "sum", "dense"), strict=True,
        ):  # fmt: skip
            same(ours, theirs)


def test_ranks_of_host_and_gpu_are_told_so():
    host = SparseStream([1], [2.0], 8)
    device = host.to_device(xp)
    with pytest.raises(MismatchError, match="memory of the streams: the host's on rank 0; a GPU's on rank 1"):
        sar.simulate([host, device])
    with pytest.raises(MismatchError, match="memory of the streams: the host's on rank 0; a GPU's on rank 1"):
        sar.simulate([[host, host], [device, device]])
    with pytest.raises(StreamTypeError, match=r"element 1 lies on a GPU, and element 0 on the host.*to_device"):
        sar.simulate([[host, device], [host, device]])
    same(sar.allreduce(device, sar.SERIAL, op="mean"), host)
