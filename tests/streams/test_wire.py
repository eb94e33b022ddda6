"""Streams as bytes: nothing is lost, nothing foreign gets in, and the sizes are those announced."""

import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_OPERATORS, DTYPES, cases

from sparseallreduce import SparseStream, StreamError, WireError
from sparseallreduce.streams.operator import MIN, SUM
from sparseallreduce.streams.partition import boundaries, concatenate, slice_range, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import (
    HEADER_BYTES,
    VERSION,
    decode,
    enclose,
    encode,
    join,
    message_bytes,
    part_lengths,
    read_header,
    read_headers,
)

LAYOUT = struct.Struct("<4sBBBBBBB5xQQQQQQQI")
FIELDS = (
    *("magic", "version", "dtype", "form", "index_codec", "value_codec", "last", "more"),
    *("size", "lo", "hi", "stored", "first", "count", "payload", "width"),
)


def sealed(frame, **changes):
    """The frame with fields of its header changed, and a checksum that fits."""
    fields = dict(zip(FIELDS, LAYOUT.unpack_from(frame))) | changes
    raw = LAYOUT.pack(*fields.values())
    return np.concatenate([np.frombuffer(raw + struct.pack("<I", zlib.crc32(raw)), np.uint8), frame[HEADER_BYTES:]])


def examples():
    """A stream of every form: sparse, dense, dense with a mask, of rows, a part, empty, of 64-bit indices."""
    sparse = SparseStream([1, 4, 9], np.float32([1, np.nan, -0.0]), 20)
    rows = SparseStream([1, 9], np.ones((2, 3)), 20)
    yield from (sparse, rows, SparseStream([], [], 0), SparseStream([2**40 - 1], np.int64([7]), 2**40))
    for op in ALL_OPERATORS.values():
        yield from (Reduction(op).densify(sparse), Reduction(op).densify(rows))
    yield from split(sparse, [0, 4, 20])
    for dtype in DTYPES:
        yield SparseStream.from_dense(np.arange(7).astype(dtype))


EXAMPLES = list(examples())
every_form = pytest.mark.parametrize("stream", EXAMPLES, ids=range(len(EXAMPLES)))


@every_form
def test_every_form_comes_back_to_the_bit(stream):
    (back,) = decode(encode([stream]))
    assert (back.size, back.lo, back.hi, back.dtype, back.width) == (stream.size, stream.lo, stream.hi, stream.dtype, stream.width)
    assert back.is_dense == stream.is_dense
    assert back.indices.tobytes() == stream.indices.tobytes() and back.indices.dtype == stream.indices.dtype
    assert back.values.tobytes() == stream.values.tobytes()
    assert back._stored.tobytes() == stream._stored.tobytes()


@given(case=cases(ranks=st.integers(1, 6)), parts=st.integers(1, 5), dense=st.booleans())
def test_several_streams_travel_in_one_message(case, parts, dense):
    reduction = Reduction(case.operator)
    streams = [reduction.densify(reduction.enter(stream)) if dense else reduction.enter(stream) for stream in case.streams]
    streams = [part for stream in streams for part in split(stream, boundaries(case.size, parts))]
    message = encode(streams)
    assert message.dtype == np.uint8 and len(message) == message_bytes(streams)
    back = decode(message)
    assert len(back) == len(streams)
    for stream, copy in zip(streams, back):
        assert (copy.lo, copy.hi, copy.is_dense, copy.width, copy.dtype) == (
            stream.lo,
            stream.hi,
            stream.is_dense,
            stream.width,
            stream.dtype,
        )
        assert copy._stored.tobytes() == stream._stored.tobytes()
        assert copy.indices.tobytes() == stream.indices.tobytes()


@given(case=cases())
def test_no_message_is_larger_than_the_dense_form_and_a_header(case):
    for stream in case.streams:
        dense = case.size * np.dtype(case.dtype).itemsize * (case.width or 1)
        mask = (case.size + 7) // 8 if stream.is_dense and stream._present is not None else 0
        assert message_bytes([stream]) <= HEADER_BYTES + dense + mask
        assert message_bytes([Reduction().enter(stream)]) <= HEADER_BYTES + dense  # a sum carries no mask


@every_form
def test_a_header_altered_in_any_byte_is_recognised(stream):
    frame = encode([stream])
    for position in range(HEADER_BYTES):
        for change in (0x01, 0x80, 0xFF):
            altered = frame.copy()
            altered[position] ^= change
            with pytest.raises(WireError) as raised:
                decode(altered)
            kind = "does not come from this library" if position < 4 else "layout version" if position == 4 else "checksum"
            assert kind in str(raised.value)


@every_form
def test_a_message_cut_short_anywhere_is_recognised(stream):
    message = encode([stream, SparseStream([3], [1.0], 8)])
    for length in range(len(message)):
        with pytest.raises(WireError, match="truncated"):
            decode(message[:length])


@pytest.mark.parametrize(
    "message, text",
    [
        (b"", "a message of 0 bytes is shorter than a header of 80: it was truncated or is foreign"),
        (b"hello", "a message of 5 bytes is shorter than a header of 80: it was truncated or is foreign"),
        (b"x" * 200, "a message starts with b'xxxx' instead of b'SARS': it does not come from this library"),
        (b"\0" * 80, "a message starts with b'\\x00\\x00\\x00\\x00' instead of b'SARS': it does not come from this library"),
    ],
)
def test_foreign_bytes_are_named(message, text):
    with pytest.raises(WireError) as raised:
        decode(np.frombuffer(message, np.uint8))
    assert str(raised.value) == text


def test_another_version_is_named():
    frame = encode([SparseStream([3], [1.0], 8)])
    with pytest.raises(WireError) as raised:
        decode(sealed(frame, version=VERSION + 1))
    assert str(raised.value) == "a message has layout version 3, this library reads 2: install the same release on all ranks"


@given(message=st.one_of(st.binary(max_size=300), st.binary(max_size=300).map(lambda tail: b"SARS\x02" + tail)))
def test_random_bytes_raise_nothing_but_a_wire_error(message):
    with pytest.raises(WireError):
        decode(np.frombuffer(message, np.uint8))


numbers = st.one_of(st.integers(0, 20), st.sampled_from([2**31, 2**32, 2**61, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
FIELD_VALUES = {
    "dtype": st.integers(0, 255),
    "form": st.integers(0, 255),
    "index_codec": st.integers(0, 255),
    "value_codec": st.integers(0, 255),
    "more": st.integers(0, 2),
    "first": numbers,
    "count": numbers,
    "size": numbers,
    "lo": numbers,
    "hi": numbers,
    "stored": numbers,
    "payload": numbers,
    "width": st.one_of(st.integers(0, 4), st.sampled_from([2**31, 2**32 - 1])),
    "last": st.integers(0, 2),
}


@given(stream=st.sampled_from(EXAMPLES), changes=st.fixed_dictionaries({}, optional=FIELD_VALUES))
def test_a_header_that_lies_gives_a_wire_error_or_a_stream_of_what_is_there(stream, changes):
    frame = sealed(encode([stream]), **changes)
    try:
        (back,) = decode(frame)
    except WireError:
        return
    assert back._stored.nbytes <= len(frame) - HEADER_BYTES
    assert back.stored == read_header(frame).stored
    assert 0 <= back.lo <= back.hi <= back.size
    assert back.stored <= back.extent


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": len(DTYPES)},
        {"form": 3},
        {"first": 1},
        {"count": 4},
        {"count": 2**64 - 1, "first": 2},
        {"lo": 21},
        {"hi": 21},
        {"lo": 9, "hi": 5},
        {"size": 19},
        {"hi": 2},
        {"form": 1},
        {"form": 2},
    ],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_refused(changes):
    frame = encode([SparseStream([1, 4, 9], np.float32([1, 2, 3]), 20)])
    assert decode(sealed(frame))[0].nnz == 3
    with pytest.raises(WireError, match=r"^the header of a message makes no sense: dtype="):
        decode(sealed(frame, **changes))


def test_a_payload_of_another_length_than_the_entries_take_is_refused():
    frame = encode([SparseStream([1, 4, 9], np.float32([1, 2, 3]), 20)])
    for changes in ({"payload": 23}, {"payload": 25}, {"stored": 2, "count": 2}, {"width": 2}, {"dtype": 1}, {"size": 2**40, "hi": 2**40}):
        with pytest.raises(WireError, match=r"^the header of a message announces a payload of \d+ bytes for \d entries, which take \d+$"):
            decode(sealed(frame, **changes))


def test_a_header_whose_numbers_overflow_is_a_wire_error():
    frame = encode([SparseStream.from_dense(np.ones(1, np.float32))])
    for stored, width in ((2**61, 8), (2**32, 2**32 - 2**2), (2**62, 0), (2**63, 2**31)):
        with pytest.raises(WireError):
            decode(sealed(frame, size=stored, lo=0, hi=stored, stored=stored, count=stored, width=width, payload=0)[:HEADER_BYTES])


@given(case=cases(ranks=st.integers(1, 6)))
def test_the_arrays_travel_as_they_lie_in_memory(case):
    streams = [Reduction(case.operator).enter(stream) for stream in case.streams]
    envelope, parts = enclose(streams)
    headers = read_headers(envelope)
    assert len(envelope) == HEADER_BYTES * len(streams)
    assert part_lengths(headers) == [len(part) for part in parts]
    assert encode(streams).tobytes() == b"".join([envelope.tobytes(), *(part.tobytes() for part in parts)])
    for stream, back in zip(streams, join(headers, parts)):
        assert back._stored.tobytes() == stream._stored.tobytes()
        assert stream._stored.nbytes == 0 or np.shares_memory(back._stored, stream._stored)


def test_the_header_says_what_follows():
    stream = SparseStream([2, 5], np.ones((2, 3), np.float64), 2**33)
    header = read_header(encode([stream]))
    assert header == (np.dtype("float64"), 0, 0, 0, 2**33, 0, 2**33, 2, 0, 2, 2 * 8 + 6 * 8, 3, True, False)


def test_an_entry_of_float32_is_eight_bytes_on_the_wire():
    for nnz in (0, 1, 3, 10, 1001):
        assert message_bytes([SparseStream(np.arange(nnz), np.ones(nnz, np.float32), 2**20)]) == HEADER_BYTES + 8 * nnz


def test_bytes_may_start_anywhere_in_a_buffer():
    message = encode([SparseStream([2, 5], np.float32([1, 2]), 40)])
    for offset in range(9):
        buffer = np.zeros(len(message) + offset, np.uint8)
        buffer[offset:] = message
        (back,) = decode(buffer[offset:])
        assert (back + back).to_dense()[[2, 5]].tolist() == [2, 4]


@given(seed=st.integers(0, 2**32 - 1), lo=st.sampled_from([0, 700]), op=st.sampled_from([SUM, MIN]))
def test_a_stream_whose_arrays_were_altered_is_garbage_or_an_error_and_nothing_worse(seed, lo, op):
    rng, size = np.random.default_rng(seed), 1000
    whole = SparseStream(np.sort(rng.choice(size, 300, replace=False)), rng.standard_normal(300), size)
    part = slice_range(whole, lo, size)
    indices, values = part.indices.copy(), part.values.copy()
    for array in (indices, values):
        array.view(np.uint8)[rng.integers(0, array.nbytes, 10)] = rng.integers(0, 256, 10)
    memory = np.zeros(3 * size)
    altered = SparseStream._sparse_form(indices, values, size, lo, size)
    reduction = Reduction(op)
    ours = reduction.enter(slice_range(whole, lo, size))
    for use in (
        lambda: altered.add_to(memory[size:-size]),
        lambda: reduction.pair(ours, altered),
        lambda: reduction.pair(reduction.densify(ours), altered),
        lambda: reduction.densify(altered),
        lambda: split(altered, [lo, 800, 900, size]),
        lambda: concatenate(split(altered, [lo, 800, 900, size]), reduction),
        altered.to_dense,
    ):
        with suppress(StreamError):
            use()
    assert not memory[:size].any() and not memory[-size:].any()


@given(seed=st.integers(0, 2**32 - 1), lo=st.sampled_from([0, 700]))
def test_a_message_whose_payload_was_altered_is_an_error_or_a_valid_stream(seed, lo):
    rng, size = np.random.default_rng(seed), 1000
    whole = SparseStream(np.sort(rng.choice(size, 300, replace=False)), rng.standard_normal(300), size)
    message = encode([slice_range(whole, lo, size)])
    message[rng.integers(HEADER_BYTES, len(message))] = rng.integers(0, 256)
    try:
        (altered,) = decode(message)
    except WireError:
        return
    assert altered.indices[0] >= lo
    SparseStream(altered.indices, altered.values, size)
