"""Messages in pieces: whatever their size, codec and order, what arrives is what was sent, or an error that says so."""

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import ALL_OPERATORS, DTYPES, cases

from sparseallreduce import SparseStream, StreamError, WireError
from sparseallreduce.streams.dtypes import is_float
from sparseallreduce.streams.partition import boundaries, slice_range, split
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import HEADER_BYTES, INDEX_CODECS, Assembly, CodedStream, Encoding, packets, piece_bytes, read_headers
from sparseallreduce.streams.wire.values import quantised

SIZES = st.one_of(st.sampled_from([1, 100, 4096, 1 << 14, 1 << 30]), st.integers(1, 50_000))
CODECS = st.sampled_from(list(INDEX_CODECS.values()))
VALUE_CODECS = st.sampled_from(["float16", "bfloat16", "qsgd8", "qsgd4"])
LAYOUT = struct.Struct("<4sBBBBBBB5xQQQQQQQI")
FIELDS = (
    *("magic", "version", "dtype", "form", "index_codec", "value_codec", "last", "more"),
    *("size", "lo", "hi", "stored", "first", "count", "payload", "width"),
)


def sealed(packet, number=0, **changes):
    """A packet with fields of one of its headers changed, and a checksum that fits."""
    at = HEADER_BYTES * number
    fields = dict(zip(FIELDS, LAYOUT.unpack_from(packet, at))) | changes
    raw = LAYOUT.pack(*fields.values())
    out = packet.copy()
    out[at : at + HEADER_BYTES] = np.frombuffer(raw + struct.pack("<I", zlib.crc32(raw)), np.uint8)
    return out


def assembled(arriving):
    assembly = Assembly()
    for packet in arriving:
        assert not assembly.complete
        assembly.take(packet)
    assert assembly.complete and assembly.growing is None
    return assembly.streams


def same(stream, back):
    """That two streams are the same to the bit, also where the form does not show."""
    for name in ("size", "lo", "hi", "dtype", "width", "is_dense", "stored"):
        assert getattr(stream, name) == getattr(back, name), name
    ours, theirs = stream._stored, back._stored
    assert ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    assert stream.indices.dtype == back.indices.dtype and stream.indices.tobytes() == back.indices.tobytes()
    if stream.is_dense:
        assert (stream._present is None) == (back._present is None)
        assert stream._present is None or stream._present.tobytes() == back._present.tobytes()
    if isinstance(stream, CodedStream):
        assert isinstance(back, CodedStream) and back.codec is stream.codec
        assert [part.tobytes() for part in back.coded] == [part.tobytes() for part in stream.coded]


def long(seed, dtype="float32", form="sparse", width=None, size=30_000, density=0.2):
    """A stream of several pieces, with NaN of all payloads, zeros of both signs and what a plain value is."""
    rng = np.random.default_rng(seed)
    present = np.flatnonzero(rng.random(size) < density)
    shape = (len(present),) if width is None else (len(present), width)
    values = rng.integers(-9, 10, shape).astype(dtype)
    if is_float(values.dtype):
        bits = values.view(f"u{values.itemsize}")
        strange = rng.random(shape) < 0.2
        bits[strange] = rng.integers(0, 2 ** (8 * values.itemsize) - 1, np.count_nonzero(strange), bits.dtype, endpoint=True)
        values[rng.random(shape) < 0.1] = -0.0
    dimension = 2**33 if form == "64 bits" else size
    stream = SparseStream(present + (dimension - size), values, dimension, switch_density=1.0)
    if form == "dense":
        return Reduction().densify(Reduction(switch_density=1.0).enter(stream))
    if form == "masked":
        return Reduction(ALL_OPERATORS["prod"]).densify(Reduction(ALL_OPERATORS["prod"], 1.0).enter(stream))
    return slice_range(stream, dimension - size + size // 7, dimension - size // 9) if form == "part" else stream


longs = st.builds(
    long,
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from(["sparse", "64 bits", "part", "dense", "masked"]),
    st.sampled_from([None, None, 1, 3]),
    st.sampled_from([1, 600, 6_000]),
    st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.9, 1.0]),
)


def floats():
    """Streams that every value codec can hold."""

    def made(seed, dtype, form, width, size, density, scale):
        rng = np.random.default_rng(seed)
        present = np.flatnonzero(rng.random(size) < density)
        shape = (len(present),) if width is None else (len(present), width)
        stream = SparseStream(present, (rng.standard_normal(shape) * scale).astype(dtype), size, switch_density=1.0)
        if form == "dense":
            return Reduction.freeze(Reduction().densify(Reduction(switch_density=1.0).enter(stream)))
        return slice_range(stream, size // 7, size - size // 9) if form == "part" else stream

    return st.builds(
        made,
        st.integers(0, 2**32 - 1),
        st.sampled_from(["float32", "float64"]),
        st.sampled_from(["sparse", "part", "dense"]),
        st.sampled_from([None, None, 1, 3]),
        st.sampled_from([1, 600, 10_000]),
        st.sampled_from([0.0, 0.01, 0.3, 1.0]),
        st.sampled_from([1.0, 1e-6, 0.0, 1e3]),
    )


@given(streams=st.lists(longs, min_size=1, max_size=3), data=st.data(), nbytes=SIZES)
def test_streams_come_back_to_the_bit_in_pieces_of_any_size(streams, data, nbytes):
    codecs = [data.draw(CODECS) for _ in streams]
    sent = [packet.copy() for packet in packets(streams, codecs, nbytes)]
    for stream, back in zip(streams, assembled(sent), strict=True):
        same(stream, back)


@given(case=cases(ranks=st.integers(1, 4)), parts=st.integers(1, 5), dense=st.booleans(), data=st.data(), nbytes=SIZES)
def test_every_form_comes_back_to_the_bit(case, parts, dense, data, nbytes):
    reduction = Reduction(case.operator)
    streams = [reduction.densify(reduction.enter(stream)) if dense else reduction.enter(stream) for stream in case.streams]
    streams = [part for stream in streams for part in split(stream, boundaries(case.size, parts))]
    codecs = [data.draw(CODECS) for _ in streams]
    for stream, back in zip(streams, assembled(packets(streams, codecs, nbytes)), strict=True):
        same(stream, back)


@given(stream=longs, name=st.sampled_from(["auto", "plain", "bitmap", "gaps"]), beta=st.sampled_from([0.0, 1e-10, 8e-9, 1e-6]))
def test_the_codec_that_is_chosen_loses_nothing(stream, name, beta):
    codec = Encoding(name).index_codec_for(stream, beta)
    (back,) = assembled(packets([stream], [codec], piece_bytes(stream._stored.nbytes)))
    same(stream, back)


@given(stream=floats(), name=VALUE_CODECS, codec=CODECS, key=st.integers(0, 2**64 - 1), nbytes=SIZES, further=SIZES)
def test_coded_values_arrive_as_they_were_quantised_and_are_sent_on_as_they_came(stream, name, codec, key, nbytes, further):
    sent = quantised(stream, name, key)
    (back,) = assembled(packets([sent], [codec], nbytes))
    same(sent, back)
    assert quantised(back, name, key + 1 if key < 2**64 - 1 else 0) is back or not back.stored
    (again,) = assembled(packets([back], [codec], further))
    same(sent, again)


@given(stream=floats(), other=longs, name=VALUE_CODECS, nbytes=SIZES)
def test_coded_and_plain_streams_travel_in_one_message(stream, other, name, nbytes):
    streams = [other, quantised(stream, name, 1), other]
    for sent, back in zip(streams, assembled(packets(streams, [INDEX_CODECS[2]] * 3, nbytes)), strict=True):
        same(sent, back)


@pytest.mark.parametrize("name, largest", [("float16", 65504.0), ("bfloat16", 2.0**128 - 2.0**120), ("qsgd8", 3.4e38), ("qsgd4", 3.4e38)])
def test_a_value_beyond_a_codec_is_named_with_its_index(name, largest):
    assert quantised(SparseStream([3, 9], [1.0, largest], 20), name, 0).values[1] == pytest.approx(largest)
    with pytest.raises(StreamError, match=rf"^the value 1e\+300 at index 9 is beyond what value_codec='{name}' can hold"):
        quantised(SparseStream([3, 9], [1.0, 1e300], 20), name, 0)
    dense = SparseStream.from_dense(np.array([1.0, 1.0, 1e300, 1.0]))
    with pytest.raises(StreamError, match="at index 2 "):
        quantised(slice_range(dense, 1, 4), name, 0)
    rows = SparseStream([3, 9], [[1.0, 1.0, 1.0], [1.0, 1e300, 1.0]], 20)
    with pytest.raises(StreamError, match="at index 9 "):
        quantised(rows, name, 0)


def accepted(arriving):
    """The streams of a message that may have been altered: valid ones, or none."""
    assembly = Assembly()
    try:
        for packet in arriving:
            assembly.take(packet)
    except WireError:
        return None
    for stream in assembly.streams:
        assert 0 <= stream.lo <= stream.hi <= stream.size and stream.stored <= stream.extent
        assert stream._stored.shape[0] == stream.stored
        if not stream.is_dense:
            SparseStream(stream.indices, stream.values, stream.size)
            assert stream.stored == 0 or stream.lo <= int(stream.indices[0]) <= int(stream.indices[-1]) < stream.hi
    return assembly.streams if assembly.complete else None


def several(seed=0, codec=2, form="sparse", name=None):
    """A message of some packets, which carries three streams."""
    first, second = long(seed, form=form), SparseStream([3], np.ones(1, np.float32), 9)
    if name is not None:
        first = quantised(SparseStream(first.indices, np.ones(first.nnz, np.float32), first.size, switch_density=1.0), name, 0)
    sent = list(packets([first, second, second], [INDEX_CODECS[codec]] * 3, 5000 if name is None else 2000))
    assert len(sent) > 2 and len(read_headers(sent[-1])) > 1
    return sent


MESSAGES = [
    several(codec=0),
    several(codec=1),
    several(codec=2),
    several(form="masked"),
    several(form="dense", codec=1),
    several(name="qsgd4"),
]


@pytest.mark.parametrize("sent", MESSAGES, ids=range(len(MESSAGES)))
def test_packets_that_are_lost_repeated_or_exchanged_are_recognised(sent):
    assert accepted(sent) is not None
    for number in range(len(sent)):
        assert accepted(sent[:number] + sent[number + 1 :]) is None
        assert accepted(sent[: number + 1] + sent[number:]) is None
        if number:
            assert accepted([*sent[: number - 1], sent[number], sent[number - 1], *sent[number + 1 :]]) is None


def test_packets_of_another_message_are_recognised():
    for ours in MESSAGES:
        for theirs in MESSAGES:
            if ours[0][:HEADER_BYTES].tobytes() != theirs[0][:HEADER_BYTES].tobytes():
                assert accepted([ours[0], *theirs[1:]]) is None or _kinds(ours) == _kinds(theirs)


def _kinds(sent):
    return [header._replace(index_codec=0, first=0, count=0, payload=0, more=False) for header in read_headers(sent[0])]


@pytest.mark.parametrize("sent", MESSAGES, ids=range(len(MESSAGES)))
def test_a_packet_cut_short_or_with_bytes_behind_it_is_recognised(sent):
    for number, packet in enumerate(sent):
        lengths = {0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(packet) // 2, len(packet) - 1} - {len(packet)}
        for length in lengths:
            with pytest.raises(WireError):
                assembled([*sent[:number], packet[:length]])
        with pytest.raises(WireError):
            assembled([*sent[:number], np.append(packet, np.uint8(0))])


ABSURD = st.one_of(
    st.integers(0, 20), st.sampled_from([2**31, 2**32, 2**47, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)
)
BYTE = st.one_of(st.integers(0, 5), st.integers(0, 255))
LIES = {
    **dict.fromkeys(("size", "lo", "hi", "stored", "first", "count", "payload"), ABSURD),
    **dict.fromkeys(("dtype", "form", "index_codec", "value_codec", "last", "more"), BYTE),
    "width": st.one_of(st.integers(0, 4), st.sampled_from([2**31, 2**32 - 1])),
}


@given(sent=st.sampled_from(MESSAGES), data=st.data(), changes=st.fixed_dictionaries({}, optional=LIES))
def test_headers_that_lie_give_an_error_or_valid_streams(sent, data, changes):
    number = data.draw(st.integers(0, len(sent) - 1))
    accepted([*sent[:number], sealed(sent[number], **changes), *sent[number + 1 :]])


@pytest.mark.parametrize("width", [0, 3, 2**32 - 1])
@pytest.mark.parametrize("stored", [2**40, 2**50, 2**60, 2**62, 2**63 - 1])
@pytest.mark.parametrize("form", [0, 1, 2])
def test_sizes_for_which_there_is_no_room_are_an_error_of_the_message(stored, width, form):
    changes = {"size": stored, "lo": 0, "hi": stored, "stored": stored, "width": width, "form": form}
    for sent in MESSAGES[:3] + MESSAGES[-1:]:
        assert accepted([sealed(sent[0], **changes), *sent[1:]]) is None


def test_a_codec_that_is_unknown_or_not_for_such_values_is_named():
    (packet,) = packets([SparseStream([1, 4, 9], np.int32([1, 2, 3]), 20)], [INDEX_CODECS[0]], 1000)
    for changes, text in (
        ({"index_codec": 9}, "positions in unknown form 9"),
        ({"value_codec": 9}, "values in form 9, which is unknown"),
        ({"value_codec": 1}, "values of int32 in form 1, which is impossible"),
        ({"count": 0, "payload": 0}, "a piece of a message is empty"),
        ({"first": 1, "count": 2}, "does not follow 0 entries"),
    ):
        altered = sealed(packet, **changes)
        with pytest.raises(WireError, match=text):
            Assembly().take(altered if "payload" not in changes else altered[:HEADER_BYTES])


@given(sent=st.sampled_from(MESSAGES), data=st.data())
def test_payloads_that_were_altered_give_an_error_or_valid_streams(sent, data):
    number = data.draw(st.integers(0, len(sent) - 1))
    packet = sent[number].copy()
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(HEADER_BYTES, len(packet) - 1))] = data.draw(st.integers(0, 255))
    accepted([*sent[:number], packet, *sent[number + 1 :]])
