"""The kernels of the wire formats: what they write comes back, in few bits, and no bytes make them leave their arrays."""

from __future__ import annotations

import fuzz_codecs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels import reference
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK, QSGD_BLOCK

GUARD = 64
LARGEST = {np.uint32: 2**32, np.uint64: 2**63}

fast = settings(deadline=None, max_examples=examples(200), suppress_health_check=[HealthCheck.too_slow])


class Guarded:
    """An array between guard zones, of which nothing may change."""

    def __init__(self, count, dtype, width=None):
        shape = count if width is None else (count, width)
        self.room = np.full(2 * GUARD + np.empty(shape, dtype).nbytes, 0xA5, np.uint8)
        self.array = self.room[GUARD : len(self.room) - GUARD].view(dtype).reshape(shape)

    def check(self):
        assert (self.room[:GUARD] == 0xA5).all() and (self.room[len(self.room) - GUARD :] == 0xA5).all(), "guard zone"


@st.composite
def index_sets(draw, extent_at_most=None):
    """Indices, and a range that they lie in."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from([np.uint32, np.uint64]))
    count = draw(st.sampled_from([0, 1, 2, 7, 100, GAPS_BLOCK - 1, GAPS_BLOCK, GAPS_BLOCK + 1, 3 * GAPS_BLOCK, 5000]))
    kind = draw(st.sampled_from(["uniform", "runs", "skewed", "strided", "full", "far apart"]))
    most = min(extent_at_most or LARGEST[dtype], LARGEST[dtype])
    if kind == "uniform":
        gaps = rng.geometric(draw(st.sampled_from([1e-6, 1e-4, 0.01, 0.125, 0.5])), count) - 1
    elif kind == "runs":
        gaps = np.where(rng.random(count) < draw(st.sampled_from([0.001, 0.05, 0.3])), rng.integers(0, 10_000, count), 0)
    elif kind == "skewed":
        gaps = 2.0 ** rng.uniform(0, draw(st.sampled_from([4, 18, 40])), count)
    elif kind == "strided":
        gaps = np.full(count, draw(st.sampled_from([1, 999, 2**20])))
    elif kind == "full":
        gaps = np.zeros(count, np.int64)
    else:
        gaps = np.where(rng.random(count) < 0.01, most // 200, 0)
    places = np.cumsum(np.asarray(gaps, np.uint64) + np.uint64(1)) - np.uint64(1)
    places = places[places < most]
    extent = int(places[-1]) + 1 if len(places) else 0
    extent += draw(st.sampled_from([0, 1, 1000])) if extent + 1000 <= most else 0
    lo = draw(st.sampled_from([0, 1, 12_345, LARGEST[dtype] - extent]))
    lo = min(lo, LARGEST[dtype] - extent)
    return (places + np.uint64(lo)).astype(dtype), lo, lo + extent


def encoded_gaps(indices, lo, module=kernels):
    out = Guarded(kernels.gaps_bound(len(indices), indices.dtype), np.uint8)
    length = module.encode_gaps(indices, lo, out.array)
    out.check()
    return out.array[:length].copy()


@fast
@given(index_sets())
def test_gaps_come_back_and_both_twins_write_the_same_bytes(index_set):
    indices, lo, hi = index_set
    octets = encoded_gaps(indices, lo)
    assert octets.tobytes() == encoded_gaps(indices, lo, reference).tobytes()
    for module in (kernels, reference):
        out = Guarded(len(indices), indices.dtype)
        assert module.decode_gaps(octets, lo, hi, out.array)
        np.testing.assert_array_equal(out.array, indices)
        out.check()


@fast
@given(index_sets())
def test_gaps_beyond_the_range_are_refused(index_set):
    indices, lo, _ = index_set
    octets = encoded_gaps(indices, lo)
    if len(indices):
        for module in (kernels, reference):
            assert not module.decode_gaps(octets, lo, int(indices[-1]), np.empty_like(indices))
            assert module.decode_gaps(octets, lo, int(indices[-1]) + 1, np.empty_like(indices))


def altered(octets, rng):
    """The bytes with some changed, cut off, or put behind; or other bytes."""
    octets = octets.copy()
    for _ in range(rng.integers(1, 4)):
        what = rng.integers(5)
        if what == 0 and len(octets):
            octets[rng.integers(len(octets))] ^= np.uint8(1 << rng.integers(8))
        elif what == 1 and len(octets):
            octets[rng.integers(min(len(octets), 8))] = rng.choice([0, 1, 31, 32, 55, 56, 57, 64, 65, 255])
        elif what == 2:
            octets = octets[: rng.integers(len(octets) + 1)]
        elif what == 3:
            octets = np.append(octets, rng.integers(0, 256, rng.integers(1, 10), np.uint8))
        elif rng.random() < 0.2:
            octets = rng.integers(0, 256, rng.integers(0, 300), np.uint8)
    return octets


@fast
@given(index_sets(), st.integers(0, 2**32))
def test_altered_gaps_are_read_to_indices_in_range_or_refused(index_set, seed):
    indices, lo, hi = index_set
    octets = altered(encoded_gaps(indices, lo), np.random.default_rng(seed))
    out, twin = Guarded(len(indices), indices.dtype), np.empty_like(indices)
    valid = kernels.decode_gaps(octets, lo, hi, out.array)
    out.check()
    assert valid == reference.decode_gaps(octets, lo, hi, twin)
    if valid:
        np.testing.assert_array_equal(out.array, twin)
        assert (out.array[1:] > out.array[:-1]).all()
        assert len(out.array) == 0 or (out.array[0] >= lo and out.array[-1] < hi)


@pytest.mark.parametrize("count", [8192, 65536])
@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.01, 0.03, 0.0625, 0.125])
def test_gaps_of_uniform_sets_take_little_more_than_their_entropy(density, count):
    gaps = np.random.default_rng(0).geometric(density, count)
    indices = (np.cumsum(gaps) - 1).astype(np.uint32)
    entropy = -np.log2(density) - (1 - density) / density * np.log2(1 - density)
    assert 8 * len(encoded_gaps(indices, 0)) / count < 1.05 * entropy


@pytest.mark.parametrize("count", [1, 2, 5, 100, 1000, 3000])
def test_gaps_of_more_than_56_bits_come_back(count):
    rng = np.random.default_rng(count)
    far = np.unique(rng.integers(0, 2**63, count, dtype=np.uint64))
    near = np.unique(np.concatenate([np.arange(count, dtype=np.uint64), np.array([2**62, 2**63 - 1, 2**64 - 2], np.uint64)]))
    for indices in (far, near):
        octets, out = encoded_gaps(indices, 0), np.empty_like(indices)
        assert octets.tobytes() == encoded_gaps(indices, 0, reference).tobytes()
        for module in (kernels, reference):
            assert module.decode_gaps(octets, 0, 2**64 - 1, out)
            np.testing.assert_array_equal(out, indices)


def test_gaps_of_runs_take_less_than_a_bit_an_index():
    assert len(encoded_gaps(np.arange(100_000, dtype=np.uint32), 0)) < 1000
    runs = np.flatnonzero(np.arange(200_000) // 50 % 40 == 0).astype(np.uint32)
    assert 8 * len(encoded_gaps(runs, 0)) < 0.6 * len(runs)


def test_indices_that_do_not_increase_are_not_written():
    for wrong in ([5, 5], [6, 5], [*range(2000), 1999], [*range(2000), 5], [3]):
        indices = np.array(wrong, np.uint32)
        with pytest.raises(StreamError, match="must increase"):
            kernels.encode_gaps(indices, 4, np.empty(kernels.gaps_bound(len(indices), np.uint32), np.uint8))
        with pytest.raises(StreamError, match="must increase"):
            kernels.encode_bitmap(indices, 4, 5000, np.empty(625, np.uint8))
        assert reference.encode_gaps(indices, 4, np.empty(10_000, np.uint8)) < 0
        assert reference.encode_bitmap(indices, 4, 5000, np.empty(625, np.uint8)) < 0


def test_outputs_without_room_are_refused():
    indices = np.arange(10, dtype=np.uint32)
    with pytest.raises(StreamError, match="room"):
        kernels.encode_gaps(indices, 0, np.empty(kernels.gaps_bound(10, np.uint32) - 1, np.uint8))
    with pytest.raises(StreamError, match="bytes must be as many"):
        kernels.encode_bitmap(indices, 0, 10, np.empty(1, np.uint8))
    with pytest.raises(StreamError, match="no bitmap"):
        kernels.decode_bitmap(np.empty(3, np.uint8), 0, 10, indices)
    with pytest.raises(StreamError, match="take 2 bytes"):
        kernels.encode_nonzero(np.zeros(10), np.empty(1, np.uint8), np.zeros(10))
    with pytest.raises(StreamError, match="C-contiguous"):
        kernels.decode_gaps(np.empty(20, np.uint8)[::2], 0, 10, indices)
    with pytest.raises(StreamError, match="read-only"):
        kernels.decode_gaps(np.empty(20, np.uint8), 0, 10, np.broadcast_to(indices, 10))


@fast
@given(index_sets(extent_at_most=200_000))
def test_bitmaps_come_back_and_both_twins_write_the_same_bytes(index_set):
    indices, lo, hi = index_set
    written = []
    for module in (kernels, reference):
        bits = Guarded(-(-(hi - lo) // 8), np.uint8)
        module.encode_bitmap(indices, lo, hi - lo, bits.array)
        bits.check()
        written.append(bits.array)
        out = Guarded(len(indices), indices.dtype)
        assert module.decode_bitmap(bits.array, lo, hi - lo, out.array)
        np.testing.assert_array_equal(out.array, indices)
        out.check()
    assert written[0].tobytes() == written[1].tobytes()


@pytest.mark.parametrize("module", [kernels, reference])
def test_bitmaps_of_another_count_or_with_bits_beyond_are_refused(module):
    for extent in (1, 7, 8, 9, 63, 64, 65, 127, 130):
        bits = np.zeros(-(-extent // 8), np.uint8)
        module.encode_bitmap(np.array([extent - 1], np.uint32), 0, extent, bits)
        assert module.decode_bitmap(bits, 0, extent, np.empty(1, np.uint32))
        assert not module.decode_bitmap(bits, 0, extent, np.empty(0, np.uint32))
        assert not module.decode_bitmap(bits, 0, extent, np.empty(2, np.uint32))
        if extent % 8:
            bits[:] = 0
            bits[-1] = 128
            assert not module.decode_bitmap(bits, 0, extent, np.empty(1, np.uint32))
            dense = np.zeros(extent, np.float32)
            assert not module.decode_nonzero(bits, np.ones(1, np.uint32), dense.view(np.uint32))


@pytest.mark.parametrize("width", [None, 0, 1, 3, 16])
@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.float32, np.int32, np.float64, np.int64, np.complex128])
def test_nonzero_elements_come_back_to_the_bit(dtype, width):
    rng = np.random.default_rng(0)
    for size in (0, 1, 63, 64, 65, 1000):
        for density in (0.0, 0.05, 0.5, 1.0):
            dense = rng.integers(-5, 5, size if width is None else (size, width)).astype(dtype)
            dense[rng.random(size) >= density] = 0
            if dense.size and np.dtype(dtype).kind == "f":
                dense.reshape(-1)[0] = -0.0
            row = dense.itemsize * (1 if width is None else width)
            present = dense.reshape(-1).view(np.uint8).reshape(size, row).any(axis=1)
            bits, values, back = Guarded(-(-size // 8), np.uint8), Guarded(int(present.sum()), dtype, width), Guarded(size, dtype, width)
            assert kernels.encode_nonzero(dense, bits.array, values.array) == present.sum()
            np.testing.assert_array_equal(bits.array, np.packbits(present, bitorder="little"))
            assert values.array.tobytes() == dense[present].tobytes()
            assert kernels.decode_nonzero(bits.array, values.array, back.array)
            assert back.array.tobytes() == dense.tobytes()
            if present.any():
                assert kernels.encode_nonzero(dense, bits.array, values.array[:-1]) == present.sum()
                assert not kernels.decode_nonzero(bits.array, values.array[:-1], back.array)
                assert not kernels.decode_nonzero(bits.array, np.concatenate([values.array, values.array]), back.array)
            for guarded in (bits, values, back):
                guarded.check()


@pytest.mark.parametrize("width", [None, 3])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_both_twins_find_the_same_nonzero_elements(dtype, width):
    rng = np.random.default_rng(1)
    dense = (rng.integers(0, 3, 777 if width is None else (777, width)) // 2).astype(dtype)
    written = []
    for module in (kernels, reference):
        bits, values, back = np.empty(98, np.uint8), np.zeros_like(dense), np.ones_like(dense)
        count = module.encode_nonzero(dense, bits, values)
        assert module.decode_nonzero(bits, values[:count], back)
        np.testing.assert_array_equal(back, dense)
        written.append((count, bits.tobytes(), values[:count].tobytes()))
    assert written[0] == written[1]


FLOATS = (np.float32, np.float64)
FORMS = {"float16": (10, 15), "bfloat16": (7, 127)}


def hard_to_round(rng, dtype, form):
    """Values of all magnitudes, and those halfway between two short floats and next to them."""
    mantissa, bias = FORMS[form]
    halves = np.arange(2**15 - 1, dtype=np.uint16)
    short = halves.view(np.float16) if form == "float16" else (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        short = np.unique(short[np.isfinite(short)].astype(np.float64))
        middle = ((short[1:] + short[:-1]) / 2).astype(dtype)
        limit = dtype(2.0**bias * (2 - 2.0 ** -(mantissa + 1)))  # the first value that becomes infinite
        near = [
            np.nextafter(middle, dtype(0)),
            middle,
            np.nextafter(middle, dtype(np.inf)),
            short.astype(dtype),
            np.nextafter(limit, dtype(0))[None],
        ]
        any_bits = rng.integers(0, 2**63, 20_000).astype(np.uint64).view(np.uint8)[: 20_000 * np.dtype(dtype).itemsize].view(dtype)
        any_bits = any_bits[~(np.abs(any_bits) >= limit)]
    special = np.array([np.inf, np.nan, 0.0, np.finfo(dtype).smallest_subnormal], dtype)
    values = np.concatenate([*near, any_bits, special])
    return np.concatenate([values, -values])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_short_floats_are_the_nearest_and_both_twins_give_the_same_bits(dtype, form):
    values = hard_to_round(np.random.default_rng(0), dtype, form)
    written = Guarded(len(values), np.uint16), np.empty(len(values), np.uint16)
    assert kernels.narrow(values, form, written[0].array) == reference.narrow(values, form, written[1]) == -1
    written[0].check()
    np.testing.assert_array_equal(written[0].array, written[1])
    if form == "float16":
        with np.errstate(all="ignore"):
            expected = values.astype(np.float16)
        np.testing.assert_array_equal(written[0].array.view(np.float16), expected)
    back = np.empty(len(values), dtype)
    kernels.widen(written[1], form, back)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(values))
    np.testing.assert_array_equal(np.isinf(back), np.isinf(values))
    np.testing.assert_array_equal(np.signbit(back), np.signbit(values))
    again = np.empty(len(values), np.uint16)
    assert kernels.narrow(back, form, again) == -1
    np.testing.assert_array_equal(again, written[0].array)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_short_floats_become_the_values_they_stand_for(dtype, form):
    halves = np.arange(2**16, dtype=np.uint16)
    out, twin = Guarded(2**16, dtype), np.empty(2**16, dtype)
    kernels.widen(halves, form, out.array)
    reference.widen(halves, form, twin)
    out.check()
    assert out.array.tobytes() == twin.tobytes()
    mantissa, bias = FORMS[form]
    for half in (0, 1, 2**mantissa - 1, 2**mantissa, 0x3C00, 0x7BFF if form == "float16" else 0x7F7F):
        exponent, fraction = half >> mantissa, half % 2**mantissa
        expected = (fraction + (2**mantissa if exponent else 0)) * 2.0 ** (max(exponent, 1) - bias - mantissa)
        assert out.array[half] == expected and out.array[half + 2**15] == -expected


@pytest.mark.parametrize("form,limit", [("float16", 65520.0), ("bfloat16", 2.0**128 - 2.0**119)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_first_finite_value_that_would_become_infinite_is_found(dtype, form, limit):
    for count, position in ((1, 0), (5000, 4096), (5000, 4999), (10_000, 17)):
        values = np.full(count, np.inf, dtype)
        values[position:] = -np.nextafter(dtype(limit), dtype(0))
        for module in (kernels, reference):
            assert module.narrow(values, form, np.empty(count, np.uint16)) == -1
        for too_large in (-limit, dtype(1.001 * limit), np.finfo(dtype).max):
            values[position:] = too_large
            for module in (kernels, reference):
                assert module.narrow(values, form, np.empty(count, np.uint16)) == position


def quantised(values, bits, key=7, start=0, module=kernels):
    scales, codes = Guarded(-(-len(values) // QSGD_BLOCK), np.float32), Guarded(-(-len(values) * bits // 8), np.uint8)
    assert module.quantise(values, bits, key, start, scales.array, codes.array) == -1
    scales.check()
    codes.check()
    return scales.array, codes.array


def restored(scales, codes, bits, count, dtype, module=kernels):
    out = Guarded(count, dtype)
    assert module.restore(scales, codes, bits, out.array)
    out.check()
    return out.array


def blocks(rng, count, dtype):
    """Values in blocks of very different magnitudes, some of them zero."""
    with np.errstate(all="ignore"):
        scale = np.repeat(rng.choice([0.0, 1e-45, 1e-40, 1e-38, 1.0, 1e30], -(-count // QSGD_BLOCK)), QSGD_BLOCK)[:count]
        return (rng.standard_normal(count) * rng.choice([0, 1, 1e-3], count) * scale).astype(dtype)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 2, 101, 255, 256, 257, 1000, 5000])
def test_both_twins_draw_the_same_levels_and_restore_the_same_bits(dtype, bits, count):
    rng = np.random.default_rng(count)
    values = blocks(rng, count, dtype)
    for key, start in ((0, 0), (2**64 - 1, QSGD_BLOCK), (int(rng.integers(2**63)), 2**40)):
        scales, codes = quantised(values, bits, key, start)
        twins = quantised(values, bits, key, start, reference)
        assert scales.tobytes() == twins[0].tobytes() and codes.tobytes() == twins[1].tobytes()
        for wanted in FLOATS:
            out = restored(scales, codes, bits, count, wanted)
            assert out.tobytes() == restored(scales, codes, bits, count, wanted, reference).tobytes()
            step = np.repeat(scales.astype(np.float64), QSGD_BLOCK)[:count] / (127 if bits == 8 else 7)
            assert (np.abs(out - values.astype(np.float64)) <= step * 1.0001 + 2e-45).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_pieces_hold_the_bits_of_the_whole(bits):
    values = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    scales, codes = quantised(values, bits, start=512)
    pieces = [quantised(values[cut], bits, start=512 + cut.start) for cut in (slice(0, 256), slice(256, 1280), slice(1280, 2000))]
    assert b"".join(piece[0].tobytes() for piece in pieces) == scales.tobytes()
    assert b"".join(piece[1].tobytes() for piece in pieces) == codes.tobytes()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("largest", [1.0, 1.1, 3e-44, 1.4e-45, 3.4028234e38])
def test_the_mean_over_keys_is_the_value(largest, dtype, bits):
    rng = np.random.default_rng(0)
    parts = [1, -1, 1e-3, -1e-6, 1e-9, 0, 1 / 127, 1 / 7, 0.5, -0.999999]
    with np.errstate(all="ignore"):
        values = (np.array([*parts, *rng.uniform(-1, 1, 190)]) * largest).astype(dtype)
    keys, total = 10_000, np.zeros(len(values))
    scales, codes, out = np.empty(1, np.float32), np.empty(len(values) * bits // 8, np.uint8), np.empty(len(values))
    for key in range(keys):
        kernels.quantise(values, bits, key, 0, scales, codes)
        kernels.restore(scales, codes, bits, out)
        total += out
    step = float(scales[0]) / (127 if bits == 8 else 7)
    share = np.abs(values.astype(np.float64)) / step % 1
    deviation = step * np.sqrt(share * (1 - share) / keys)
    error = np.abs(total / keys - values)
    assert (error <= 5 * deviation + 3 * step / keys).all()  # the latter for what is drawn a few times
    if dtype == np.float32:
        np.testing.assert_allclose(total[:2] / keys, values[:2], rtol=1e-12)  # the largest are drawn as they are


def test_draws_of_neighbouring_keys_and_places_are_not_related():
    values = np.full(64 * QSGD_BLOCK, 0.5, np.float32)
    values[::QSGD_BLOCK] = 1.0  # the scale, so that the others lie in the middle between two levels of 127
    drawn = np.stack([quantised(values, 8, key)[1].astype(np.int8) for key in range(64)]).astype(np.float64)
    drawn = np.delete(drawn.reshape(64, 64, QSGD_BLOCK), 0, axis=2) - 63.5
    assert set(np.unique(drawn)) == {-0.5, 0.5}
    for axis in range(3):
        for apart in (1, 2, 3, 17):
            first, second = (np.take(drawn, range(*cut), axis) for cut in ((apart, drawn.shape[axis]), (0, drawn.shape[axis] - apart)))
            assert abs((4 * first * second).mean()) < 5 / np.sqrt(first.size)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "dtype,wrong", [*((dtype, wrong) for dtype in FLOATS for wrong in (np.nan, np.inf, -np.inf)), (np.float64, -3.5e38)]
)
def test_the_first_value_that_has_no_level_is_found(dtype, wrong, bits):
    for position in (0, 255, 256, 999):
        values = np.ones(1000, dtype)
        values[position:] = wrong
        for module in (kernels, reference):
            assert module.quantise(values, bits, 0, 0, np.empty(4, np.float32), np.empty(1000 * bits // 8, np.uint8)) == position


@pytest.mark.parametrize("module", [kernels, reference])
def test_levels_and_scales_that_are_never_written_are_refused(module):
    out = np.empty(3, np.float32)
    for scale in (-1.0, np.nan, np.inf):
        assert not module.restore(np.array([scale], np.float32), np.zeros(3, np.uint8), 8, out)
    one = np.ones(1, np.float32)
    assert not module.restore(one, np.array([0, 0, 128], np.uint8), 8, out)
    assert not module.restore(one, np.array([8, 0], np.uint8), 4, out)
    assert not module.restore(one, np.array([0x80, 0], np.uint8), 4, out)
    assert not module.restore(one, np.array([0, 0x10], np.uint8), 4, out)  # the half byte that is left over
    assert module.restore(one, np.array([0x91, 7], np.uint8), 4, out)
    np.testing.assert_array_equal(out, np.array([1 / 7, 1, -1], np.float32))


def in_two_levels(values, module=kernels):
    scales, codes = Guarded(2 * -(-len(values) // QSGD_BLOCK), np.float32), Guarded(-(-len(values) // 4), np.uint8)
    assert module.to_two_levels(values, scales.array, codes.array) == -1
    scales.check()
    codes.check()
    return scales.array, codes.array


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 255, 256, 257, 1000])
def test_both_twins_write_the_same_two_levels_and_each_value_takes_the_nearer_one(dtype, count):
    rng = np.random.default_rng(count)
    for values in (blocks(rng, count, dtype), rng.standard_normal(count).astype(dtype), np.full(count, -2.5, dtype)):
        scales, codes = in_two_levels(values)
        twins = in_two_levels(values, reference)
        assert scales.tobytes() == twins[0].tobytes() and codes.tobytes() == twins[1].tobytes()
        low, high = (np.repeat(each, QSGD_BLOCK)[:count].astype(np.float64) for each in (scales[::2], scales[1::2]))
        exact = np.abs(values.astype(np.float64))
        for wanted in FLOATS:
            for module in (kernels, reference):
                out = Guarded(count, wanted)
                assert module.from_two_levels(scales, codes, out.array)
                out.check()
                largest = np.repeat([exact[i : i + QSGD_BLOCK].max() for i in range(0, count, QSGD_BLOCK)], QSGD_BLOCK)[:count]
                nearer = np.minimum(np.abs(exact - low), np.abs(exact - high))
                assert (np.abs(out.array - values.astype(np.float64)) <= nearer + largest * 2e-5 + 1e-44).all()
        if count and (values == values[0]).all():
            np.testing.assert_allclose(out.array, values, rtol=2e-5)


def test_two_levels_lose_little_of_the_largest_values():
    values = np.sort(np.abs(np.random.default_rng(0).standard_normal(50 * 4096)))[-4096:].astype(np.float32)
    scales, codes = in_two_levels(values)
    out = np.empty_like(values)
    kernels.from_two_levels(scales, codes, out)
    assert ((out - values) ** 2).sum() < 0.01 * (values**2).sum()


@pytest.mark.parametrize("dtype,wrong", [(np.float32, np.nan), (np.float64, -np.inf), (np.float64, -3.5e38)])
def test_the_first_value_that_is_beyond_two_levels_is_found(dtype, wrong):
    for position in (0, 255, 256, 999):
        values = np.ones(1000, dtype)
        values[position:] = wrong
        for module in (kernels, reference):
            assert module.to_two_levels(values, np.empty(8, np.float32), np.empty(250, np.uint8)) == position


@pytest.mark.parametrize("module", [kernels, reference])
def test_two_levels_that_are_never_written_are_refused(module):
    out, codes = np.empty(3, np.float32), np.array([0b00_11_01_10], np.uint8)
    for scales in ([-1.0, 1.0], [1.0, np.inf], [np.nan, 1.0], [2.0, 1.0]):
        assert not module.from_two_levels(np.array(scales, np.float32), codes, out)
    scales = np.array([1.0, 2.0], np.float32)
    assert not module.from_two_levels(scales, np.array([0b01_11_01_10], np.uint8), out)  # of a fourth value, that there is not
    assert module.from_two_levels(scales, codes, out)
    np.testing.assert_array_equal(out, np.float32([-1, 2, -2]))


def test_arrays_that_do_not_fit_together_are_refused():
    values, halves, scales, codes = np.zeros(300, np.float32), np.zeros(300, np.uint16), np.zeros(2, np.float32), np.zeros(300, np.uint8)
    with pytest.raises(StreamError, match="cannot be converted"):
        kernels.narrow(values.astype(np.int32), "float16", halves)
    with pytest.raises(StreamError, match="fit together"):
        kernels.narrow(values, "float16", halves[1:])
    with pytest.raises(StreamError, match="fit together"):
        kernels.widen(halves[::2], "float16", values[:150])
    with pytest.raises(StreamError, match="multiples of 256"):
        kernels.quantise(values, 8, 0, 100, scales, codes)
    with pytest.raises(StreamError, match="8 or 4"):
        kernels.restore(scales, codes, 3, values)
    with pytest.raises(StreamError, match="fit together"):
        kernels.restore(scales[:1], codes, 8, values)
    for convert in (lambda *given: kernels.to_two_levels(given[2], *given[:2]), kernels.from_two_levels):
        with pytest.raises(StreamError, match="fit together"):
            convert(scales, codes[:75], values)
        with pytest.raises(StreamError, match="fit together"):
            convert(np.zeros(4, np.float32), codes[:74], values)


def test_altered_messages_next_to_protected_pages_are_read_in_bounds():
    counts, failures = fuzz_codecs.run(1, range(400))
    assert not failures
    assert {kind for kind, _ in counts} == set(fuzz_codecs.KINDS)


@pytest.mark.parametrize("name", ["decode_gaps", "decode_bitmap", "decode_nonzero", "restore"])
def test_the_fuzz_tool_notices_a_decoder_that_accepts_all(name, monkeypatch):
    decode = getattr(kernels, name)
    monkeypatch.setattr(kernels, name, lambda *arguments: decode(*arguments) or True)
    assert fuzz_codecs.run(1, range(100))[1]
