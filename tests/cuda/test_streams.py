"""Streams on the device, and everything that is done with them, against the same on the host: bits are the same, but for those of NaN."""

import device_arrays as xp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_reduction
from simulated import same_bits, values_of
from strategies import ALL_OPERATORS, cases

import sparseallreduce as sar
from sparseallreduce import SparseAllreduceError, SparseStream, StreamError, StreamTypeError
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import concatenate, parts_of, slice_range, split
from sparseallreduce.streams.reduction import Reduction, divided

SIZE = 12
some = settings(max_examples=15, deadline=None)


def drawn(ranks):
    """Operations that CuPy has the dtypes of, and that are small enough for the simulator.

    Products of complex numbers are exact ones: NumPy rounds others one way in vector instructions and another way without.
    """

    def fits(case):
        rounded_in_two_ways = case.op == "prod" and case.dtype.startswith("complex") and not case.exact
        return case.dtype != "bfloat16" and case.size <= 60 and not rounded_in_two_ways

    return cases(ranks=ranks).filter(fits)


def on_device(stream):
    """The same stream, made of arrays on the device."""
    moved = stream.to_device(xp)
    assert moved.on_device and moved.is_dense == stream.is_dense
    return moved


def same(device, host):
    """Two streams are the same to the bit, in all that a user can see of them."""
    assert isinstance(device._stored, xp.ndarray) and type(host._stored) is np.ndarray
    assert all(array is None or isinstance(array, xp.ndarray) for array in device._arrays)
    for name in ("size", "lo", "hi", "dtype", "width", "is_dense", "nnz", "stored", "switch_density"):
        assert getattr(device, name) == getattr(host, name), name
    same_bits(device.indices.get(), host.indices)
    same_bits(device.values.get(), host.values)
    same_bits(device.to_dense().get(), host.to_dense())


@some
@given(case=drawn(st.just(1)))
def test_a_stream_of_device_arrays_is_that_of_the_hosts(case):
    (entries,), (host,) = case.entries, case.streams
    indices, values = xp.asarray(entries.indices.astype(np.uint32)), xp.asarray(entries.values)
    same(SparseStream(indices, values, case.size), SparseStream(entries.indices, entries.values, case.size))
    same(SparseStream.from_dense(xp.asarray(host.to_dense())), SparseStream.from_dense(host.to_dense()))
    twice = [np.concatenate([each, each[::-1]]) for each in entries]
    with np.errstate(all="ignore"):
        same(SparseStream.from_coo(*map(xp.asarray, twice), case.size), SparseStream.from_coo(*twice, case.size))
    moved = on_device(host)
    same(moved, host)
    same(moved.copy(), host)
    assert not moved.copy().overlaps(moved) and moved.overlaps(moved) == bool(host.stored)
    back = moved.to_host()
    assert back.indices.tobytes() == host.indices.tobytes() and back.values.tobytes() == host.values.tobytes() and back.to_host() is back
    with np.errstate(all="ignore"):
        same(-moved, -host)
        wider = "complex128" if host.dtype.kind == "c" else "float64"
        same(moved.astype(wider), host.astype(wider))
        if host.dtype.kind != "i":
            same(moved / 3, host / 3)
        total, expected = xp.asarray(np.ones_like(host.to_dense())), np.ones_like(host.to_dense())
        moved.add_to(total)
        host.add_to(expected)
    same_bits(total.get(), expected)


@some
@given(case=drawn(st.integers(1, 5)), dense=st.integers(0, 31), owned=st.booleans())
def test_reductions_are_those_of_the_host(case, dense, owned):
    results = []
    for move in (on_device, lambda stream: stream):
        reduction = Reduction(case.operator)
        streams = [reduction.enter(move(stream)) for stream in case.streams]
        streams = [reduction.densify(stream) if dense >> rank & 1 else stream for rank, stream in enumerate(streams)]
        if not owned:
            streams = [reduction.freeze(stream) for stream in streams]
        with np.errstate(all="ignore"):
            result = reduction.leave(reduction.many(streams))
            results.append((result, divided(result, 3) if result.dtype.kind != "i" else result, reduction.work, reduction.dense_work))
    (device, mean, *work), (host, expected, *counted) = results
    same(device, host)
    same(mean, expected)
    assert work == counted
    assert_reduction(device.to_host(), case.entries, case.size, case.operator, case.exact)


@some
@given(case=drawn(st.just(1)), parts=st.integers(1, 4), dense=st.integers(0, 15))
def test_parts_and_wholes_are_those_of_the_host(case, parts, dense):
    cut, joined = [], []
    for move in (on_device, lambda stream: stream):
        reduction = Reduction(case.operator)
        stream = reduction.enter(move(case.streams[0]))
        cut.append(split(stream, parts_of(stream, parts)))
        cut[-1].append(slice_range(stream, case.size // 3, case.size))
        pieces = [reduction.densify(part) if dense >> place & 1 else part for place, part in enumerate(cut[-1][:-1])]
        joined.append(reduction.leave(concatenate(pieces, reduction)))
    for ours, theirs in zip(*cut, strict=True):
        same_bits(ours.values.get(), theirs.values)
        same_bits(ours.indices.get(), theirs.indices)
    same(*joined)


@some
@given(case=drawn(st.just(2)))
def test_plus_leaves_its_operands(case):
    first, second = map(on_device, case.streams)
    with np.errstate(all="ignore"):
        same(first + second, case.streams[0] + case.streams[1])
    same(first, case.streams[0])
    same(second, case.streams[1])


@pytest.mark.parametrize("op", ALL_OPERATORS)
def test_frozen_operands_stay_as_they_were(op):
    reduction = Reduction(ALL_OPERATORS[op])
    host = [SparseStream([1, 4, 7], np.float32([1, 2, 3]), SIZE), SparseStream([0, 4], np.float32([5, 6]), SIZE)]
    for dense in range(4):
        streams = [reduction.enter(on_device(stream)) for stream in host]
        streams = [reduction.freeze(reduction.densify(each)) if dense >> place & 1 else each for place, each in enumerate(streams)]
        before = [[None if array is None else array.get().tobytes() for array in each._arrays] for each in streams]
        results = [reduction.pair(*streams), reduction.pair(*streams[::-1]), reduction.many([*streams, streams[0]])]
        for result in map(reduction.leave, results):
            assert not result._owned
        assert [[None if array is None else array.get().tobytes() for array in each._arrays] for each in streams] == before
    owned = reduction.densify(streams[0])
    owned = owned if owned._owned else reduction._copied(owned)
    assert reduction.pair(owned, streams[1])._stored is owned._stored


def test_copies_can_be_written_to():
    for density in (None, 0.0):
        stream = on_device(SparseStream([1, 3], np.float32([2, 4]), SIZE, switch_density=density))
        with pytest.raises(StreamError, match="copy"):
            stream.values = [0, 0]
        mine = stream.copy()
        mine.values = [0, 1]
        mine.values = mine.values * 3
        assert mine.values.tolist() == [0, 3] and mine.nnz == 2 and stream.values.tolist() == [2, 4]


def test_the_host_and_a_gpu_do_not_meet_unasked():
    indices, values = np.uint32([1, 3]), np.float32([2, 4])
    host, device = SparseStream(indices, values, SIZE), SparseStream(xp.asarray(indices), xp.asarray(values), SIZE)
    moved = r"to_device\(\) or stream\.to_host\(\)"
    for meet in (
        lambda: host + device,
        lambda: device + host,
        lambda: SparseStream(indices, xp.asarray(values), SIZE),
        lambda: SparseStream(xp.asarray(indices), values, SIZE),
        lambda: SparseStream.from_coo(xp.asarray(indices), values, SIZE),
        lambda: device.add_to(np.zeros(SIZE, np.float32)),
        lambda: host.add_to(xp.zeros(SIZE, np.float32)),
        lambda: Reduction().pair(Reduction().densify(host), device),
        lambda: Reduction().pair(host, Reduction().densify(device)),
        lambda: Reduction().pair(Reduction().enter(host), Reduction().enter(device)),
    ):
        with pytest.raises(StreamTypeError, match=moved):
            meet()
    same(host.to_device(xp) + device, host + host)
    with pytest.raises(StreamTypeError, match="bfloat16"):
        SparseStream([1], [2.0], SIZE).astype("bfloat16").to_device(xp)
    assert device.to_scipy().toarray().tolist() == host.to_scipy().toarray().tolist()


@pytest.mark.parametrize("made", [
    lambda: SparseStream(xp.asarray([3, 1]), xp.asarray([1.0, 2.0]), SIZE),
    lambda: SparseStream(xp.asarray([1, 1]), xp.asarray([1.0, 2.0]), SIZE),
    lambda: SparseStream(xp.asarray([1, SIZE]), xp.asarray([1.0, 2.0]), SIZE),
    lambda: SparseStream(xp.asarray([-1, 2]), xp.asarray([1.0, 2.0]), SIZE),
    lambda: SparseStream(xp.asarray([1]), xp.asarray([1.0, 2.0]), SIZE),
    lambda: SparseStream(xp.asarray([1.5]), xp.asarray([1.0]), SIZE),
    lambda: SparseStream(xp.asarray([1]), xp.asarray(np.uint8([1])), SIZE),
    lambda: SparseStream.from_coo(xp.asarray([SIZE]), xp.asarray([1.0]), SIZE),
])  # fmt: skip
def test_what_is_refused_on_the_host_is_refused_with_the_same_words(made, monkeypatch):
    with pytest.raises(SparseAllreduceError) as raised:
        made()
    monkeypatch.setattr(xp, "asarray", np.asarray)
    with pytest.raises(SparseAllreduceError) as expected:
        made()
    assert (type(raised.value), str(raised.value)) == (type(expected.value), str(expected.value))


def test_large_dimensions_are_ordinary():
    for size, dtype in ((2**32, np.uint32), (2**40, np.uint64)):
        indices = np.array([0, size - 2, size - 1], dtype)
        stream = SparseStream(xp.asarray(indices), xp.asarray(np.arange(3.0)), size)
        total = stream + SparseStream(xp.asarray(indices[1:]), xp.asarray(np.ones(2)), size)
        assert total.indices.dtype == dtype and total.indices.tolist() == indices.tolist() and total.values.tolist() == [0, 2, 3]
        assert [part.stored for part in split(stream, [0, size // 2, size])] == [1, 2]


def test_values_of_a_dense_form_that_are_zero_are_entries():
    host = SparseStream(np.arange(8), np.where(np.arange(8) % 3, 1.0, 0.0), 8)
    device = SparseStream(xp.asarray(np.arange(8)), xp.asarray(np.where(np.arange(8) % 3, 1.0, 0.0)), 8)
    same(device, host)
    assert sar.simulate([host, host], op=SUM).outputs[0].nnz == 5
    rows = values_of(np.random.default_rng(3), (6, 2), np.float32)
    same(SparseStream.from_dense(xp.asarray(rows)), SparseStream.from_dense(rows))
