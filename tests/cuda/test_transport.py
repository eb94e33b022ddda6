"""Copies between host and device, and who waits for whom, where copies are made as late as can be."""

import gc

import device_arrays as xp
import numpy as np
import pytest
from device_streams import Device, Misuse, Stream, get_current_stream, limits, under_way
from simulated import same_bits
from test_streams import same

import sparseallreduce as sar
from sparseallreduce import SparseStream, StreamError
from sparseallreduce.algorithms import staging
from sparseallreduce.algorithms.staging import handed_over, queued, staged
from sparseallreduce.algorithms.steps import DeviceMessages, Exchange
from sparseallreduce.streams import transfers, wire
from sparseallreduce.streams.kernels.backend import current_queue
from sparseallreduce.streams.pinned import PinnedPool, bound_of
from sparseallreduce.streams.staged import StagedStream
from sparseallreduce.streams.transfers import Transfers, Upload

MEASURE = 1 << 16


@pytest.fixture
def copies(monkeypatch):
    """Those of a device whose pool holds little, of pieces of 64 bytes."""
    monkeypatch.setattr(transfers, "PIECE", 64)
    made = Transfers(xp, PinnedPool(lambda nbytes: xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(nbytes), 0), MEASURE))
    monkeypatch.setattr(transfers, "_known", {("device_arrays", 0): made})
    yield made
    gc.collect()
    Device().synchronize()
    made.tidy()
    assert made.pool.in_use == 0, "page-locked memory has not come back"
    assert not under_way


def stream_of(count, row=(), dense=False):
    rng = np.random.default_rng(count)
    values = rng.standard_normal((count, *row)).astype(np.float32)
    return SparseStream.from_dense(values) if dense else SparseStream(3 * np.arange(count), values, 4 * count + 8)


def test_the_stand_in_finds_who_does_not_wait():
    array, other = xp.asarray(np.arange(8)), Stream()
    with other, pytest.raises(Misuse, match="reads what stream"):
        array + 1
    host = np.zeros(8, int)
    other.wait_event(get_current_stream().record())
    array.get(stream=other, out=host, blocking=False)
    assert (host != np.arange(8)).all()  # garbage, until the event behind it is waited for
    with pytest.raises(Misuse, match="writes to what"):
        array[:] = 0
    with other, pytest.raises(Misuse, match="used again"):
        xp.asarray(np.arange(8)).set(host, stream=other)
    event = other.record()
    event.synchronize()
    assert (host == np.arange(8)).all()
    array[:] = 0
    block = xp.cuda.PinnedMemory(64)
    source = np.frombuffer(xp.cuda.PinnedMemoryPointer(block, 0), np.int64, 8)
    other.wait_event(get_current_stream().record())
    array.set(source, stream=other)
    with pytest.raises(Misuse, match="reads what stream"):
        array.get()
    source[0] = 7
    with pytest.raises(Misuse, match="has been changed"):
        other.synchronize()


@pytest.mark.parametrize("row, dense", [((), False), ((3,), False), ((), True)])
def test_a_stream_is_there_piece_by_piece_and_written_so(copies, row, dense):
    stream = stream_of(100, row, dense)
    coming = StagedStream.of(stream.to_device(xp), copies)
    pieces = len(under_way)
    assert pieces > 4 and (coming.stored, coming.dtype, coming.width, coming.is_dense) == (100, np.float32, stream.width, dense)
    coming.upto(10)
    assert 0 < len(under_way) < pieces
    codecs = [wire.PLAIN]
    for ours, theirs in zip(wire.packets([coming], codecs, 1), wire.packets([stream], codecs, 1), strict=True):
        same_bits(ours, theirs)
    same_bits(coming.values, stream.values)
    assert not under_way and coming.nnz == 100


def begun(schedule):
    """Its first message, of one whose messages carry nothing that lies on a device."""
    assert next(schedule) == DeviceMessages()
    return schedule.send(False)


class Arriving:
    """A stream of which one half is there, and then all."""

    masked = False

    def __init__(self, stream):
        self.of, self.stored, self.arrived = stream, stream.stored, stream.stored // 2

    def prefix(self):
        return None if self.of.is_dense else self.of._indices[: self.arrived], self.of._stored[: self.arrived]


@pytest.mark.parametrize("dense", [False, True])
def test_what_comes_goes_to_the_device_as_it_comes(copies, dense, monkeypatch):
    monkeypatch.setattr(staging, "PIECE", 64)
    ours, theirs = stream_of(40), stream_of(200, dense=dense)

    def algorithm():
        return (yield Exchange(1, ours.to_device(xp)))

    schedule = staged(algorithm(), xp, True, np.dtype(np.float32))
    step = begun(schedule)
    same_bits(step.stream.values, ours.values)
    own = Stream()
    with own:  # of whoever receives
        step.merging.advance(Arriving(theirs))
        assert under_way
        came = step.merging.finish(theirs)
    with pytest.raises(StopIteration) as stop:
        schedule.send(came)
    same(stop.value.value, theirs)


def test_memory_comes_back_from_what_is_given_up_or_raises(copies, monkeypatch):
    def algorithm(stream):
        received = yield Exchange(1, stream)
        raise ValueError(received)

    stream = stream_of(300)
    for raises in (False, True):
        schedule = staged(algorithm(stream.to_device(xp)), xp, True, stream.dtype)
        step = begun(schedule)
        assert copies.pool.in_use > 0
        if raises:
            came = step.merging.finish(stream)
            with pytest.raises(ValueError):
                schedule.send(came)
        else:
            schedule.close()
        del step, schedule
    monkeypatch.setattr(xp.ndarray, "get", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        StagedStream.of(stream.to_device(xp), copies)


def test_where_the_pool_ends_memory_is_pageable(copies, monkeypatch):
    stream = stream_of(2 * MEASURE // 8)
    device = stream.to_device(xp)
    kept = [StagedStream.of(device, copies) for _ in range(3)]
    assert copies.pool.allocated <= MEASURE
    for each in kept:
        same_bits(each.values, stream.values)
    upload = Upload(copies, [(stream._values.shape, stream.dtype)])
    upload.take([stream._values], len(stream._values))
    same_bits(upload.finish()[0].get(), stream.values)
    del kept, upload
    copies.tidy()
    monkeypatch.setitem(limits, "pinned", 0)  # the system has none to give
    copies.pool._idle.clear()
    copies.pool.allocated = 0
    same_bits(StagedStream.of(device, copies).values, stream.values)
    same_bits(copies.to_device([stream.values])[0].get(), stream.values)


def test_blocks_of_other_sizes_make_room():
    pool = PinnedPool(np.zeros, 1 << 16)
    first = pool.take(1 << 15, np.uint8)
    assert pool.take(1 << 16, np.uint8) is None and pool.in_use == 1 << 15
    del first
    assert pool.in_use == 0 and pool.take(1 << 16, np.uint8) is not None and pool.allocated == 1 << 16
    with pytest.raises(StreamError, match="number of bytes"):
        bound_of({"SPARSEALLREDUCE_PINNED": "much"})


def test_an_operation_is_on_the_stream_on_which_it_was_called_and_its_result_on_any():
    host = [SparseStream([1, 5], [1.0, 2.0], 9), SparseStream([1, 7], [4.0, 8.0], 9)]
    first, second = Stream(), Stream()
    with first:
        device = [stream.to_device(xp) for stream in host]
        request = sar.iallreduce(device[0], sar.SERIAL, "mean")
        several = sar.iallreduce(device, sar.SERIAL)
        lossy = sar.TopkA(9, 2).iallreduce(xp.asarray(np.arange(9.0)), sar.SERIAL)
    with second:
        same(request.wait(), host[0])
        for ours, theirs in zip(several.wait(), host, strict=True):
            same(ours, theirs)
        reduced = lossy.wait()
        assert reduced.update.values.tolist() == [7, 8] and reduced.contributed.tolist() == [7, 8]


def test_a_schedule_is_moved_on_wherever_its_stream_is_not_current():
    with Stream() as ours:
        array = xp.asarray(np.arange(4))
        queue = current_queue()

    def algorithm():
        total = array + 1
        yield
        try:
            yield
        finally:
            total += 1  # is given up where that stream is not current
        return total

    schedule = queued(algorithm(), queue)
    next(schedule)
    next(schedule)
    with pytest.raises(StopIteration) as stop:
        next(schedule)
    assert get_current_stream() != ours
    assert handed_over(stop.value.value, queue).tolist() == [2, 3, 4, 5]
    assert handed_over((None, 3), queue) == (None, 3)
    with queue:
        stream = SparseStream.from_dense(array)
        assert handed_over(stream, queue) is stream
    assert not handed_over((stream,), queue)[0].overlaps(stream)  # whose memory goes back to its own stream
    for _ in range(2):
        given_up = queued(algorithm(), queue)
        next(given_up), next(given_up)
        given_up.close()
