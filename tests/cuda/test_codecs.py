"""Bitmaps and gaps: the bytes of the CPU's, and what is read from any bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import few, indices_of, same_bits, seeds, there, values_of

from sparseallreduce.errors import StreamError
from sparseallreduce.streams import kernels
from sparseallreduce.streams.kernels.contract import GAPS_BLOCK

bitmap, gaps = there("bitmap"), there("gaps")

BLOCK = {"block": 8}


def check_bitmap(indices, lo, extent):
    wanted = np.empty(-(-extent // 8), np.uint8)
    kernels.encode_bitmap(indices, lo, extent, wanted)
    bits = bitmap.encode_bitmap(indices, lo, extent, np, **BLOCK)
    same_bits(bits, wanted)
    same_bits(bitmap.decode_bitmap(bits, lo, extent, len(indices), indices.dtype, np, **BLOCK), indices)
    for other in {len(indices) - 1, len(indices) + 1} - {-1}:
        assert bitmap.decode_bitmap(bits, lo, extent, other, indices.dtype, np, **BLOCK) is None


@few
@given(seeds, st.integers(0, 150), st.sampled_from([(np.uint32, 0), (np.uint32, 2**32 - 150), (np.uint64, 2**64 - 150)]))
def test_bitmaps_of_index_sets(seed, extent, kind):
    rng = np.random.default_rng(seed)
    dtype, lo = kind
    check_bitmap(indices_of(rng, int(rng.integers(0, extent + 1)), extent, dtype, lo), lo, extent)


@pytest.mark.parametrize("extent", [0, 1, 7, 8, 63, 64, 65])
def test_empty_and_full_bitmaps(extent):
    for count in {0, min(1, extent), extent}:
        check_bitmap(np.arange(count, dtype=np.uint32) + np.uint32(3), 3, extent)


def test_what_is_no_index_set_or_no_bitmap():
    for indices, lo, extent in (([1, 1], 0, 8), ([3, 2], 0, 8), ([8], 0, 8), ([0], 1, 8)):
        with pytest.raises(StreamError, match="must increase"):
            bitmap.encode_bitmap(np.array(indices, np.uint32), lo, extent, np)
    with pytest.raises(StreamError, match="vector"):
        bitmap.encode_bitmap(np.ones(2), 0, 8, np)
    bits = np.array([1, 8], np.uint8)
    assert bitmap.decode_bitmap(bits, 0, 11, 2, np.uint32, np) is None  # the last bit is beyond
    for wrong in (bits[:1], bits.astype(np.int16), np.zeros(4, np.uint8)[::2]):
        with pytest.raises(StreamError, match="no bitmap"):
            bitmap.decode_bitmap(wrong, 0, 12, 2, np.uint32, np)
    with pytest.raises(StreamError, match="no bitmap"):
        bitmap.decode_bitmap(bits, 2**32 - 11, 12, 2, np.uint32, np)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int8, np.int64, np.complex128])
@pytest.mark.parametrize("shape", [(0,), (1,), (8,), (19,), (9, 3), (4, 0)], ids=str)
def test_bitmaps_of_dense_arrays(dtype, shape):
    rng = np.random.default_rng(8)
    dense = values_of(rng, shape, dtype)
    dense[rng.random(shape[0]) < 0.5] = 0
    bits, values = np.empty(-(-shape[0] // 8), np.uint8), np.empty(shape, dtype)
    count = kernels.encode_nonzero(dense, bits, values)
    got = bitmap.encode_nonzero(dense, np, **BLOCK)
    same_bits(got[0], bits)
    same_bits(got[1], values[:count])
    same_bits(bitmap.decode_nonzero(*got, len(dense), np, **BLOCK), dense)
    assert bitmap.decode_nonzero(got[0], dense[:0] if count else np.zeros((1, *shape[1:]), dtype), len(dense), np, **BLOCK) is None


def encoded(indices, lo):
    out = np.empty(kernels.gaps_bound(len(indices), indices.dtype), np.uint8)
    return out[: kernels.encode_gaps(indices, lo, out)]


def check_gaps(indices, lo, hi):
    octets = gaps.encode_gaps(indices, lo, np, **BLOCK)
    same_bits(octets, encoded(indices, lo))
    same_bits(gaps.decode_gaps(octets, lo, hi, len(indices), indices.dtype, np, **BLOCK), indices)
    if len(indices):
        read_alike(octets, lo, int(indices[-1]), len(indices), indices.dtype)
        read_alike(octets[:-1], lo, hi, len(indices), indices.dtype)
        read_alike(octets, lo, hi, len(indices) - 1, indices.dtype)
        read_alike(octets, lo + 1, hi, len(indices), indices.dtype)


def read_alike(octets, lo, hi, count, dtype):
    """Both read the same, or both find that these are not the bytes of such a set."""
    wanted = np.empty(count, dtype)
    valid = kernels.decode_gaps(octets, lo, hi, wanted)
    got = gaps.decode_gaps(octets, lo, hi, count, dtype, np, **BLOCK)
    assert (got is not None) == valid
    if valid:
        same_bits(got, wanted)


@few
@given(seeds, st.integers(0, 40), st.sampled_from([40, 10**3, 2**20, 2**32 - 1]), st.integers(0, 9))
def test_gaps_have_the_bytes_of_the_cpu(seed, count, size, lo):
    indices = np.unique(np.random.default_rng(seed).integers(lo, size, count, dtype=np.uint64)).astype(np.uint32)
    check_gaps(indices, lo, size)


SETS = {
    "a run": np.arange(7, 37),
    "runs with jumps": np.concatenate([np.arange(20), 1000 + np.arange(20), 10**6 + np.arange(5)]),
    "one far away": np.array([*range(0, 90, 3), 2**31]),
    "one": np.array([2**32 - 2]),
    "far from each other": np.array([0, 2**20, 2**31, 2**32 - 1]),
}


@pytest.mark.parametrize("name", SETS)
def test_gaps_of_all_shapes(name):
    for lo in {0, int(SETS[name][0])}:
        check_gaps(SETS[name].astype(np.uint32), lo, 2**32)
        check_gaps(SETS[name].astype(np.uint64), lo, 2**32)


LONG = ([2**64 - 1], [0, 2**64 - 1], [5, 6, 7, 2**63, 2**63 + 1, 2**64 - 2], [2**60, 2**61, 2**62, 2**63])


@pytest.mark.parametrize("indices", LONG, ids=str)
def test_gaps_of_64_bits(indices):
    check_gaps(np.array(indices, np.uint64), 0, 2**64)


def test_gaps_of_several_blocks():
    rng = np.random.default_rng(9)
    dense, sparse = np.arange(GAPS_BLOCK), GAPS_BLOCK + np.cumsum(rng.integers(1, 400, GAPS_BLOCK + 3))
    check_gaps(np.concatenate([dense, sparse]).astype(np.uint32), 0, 2**31)


def test_what_is_no_index_set():
    for indices, lo in (([1, 1], 0), ([3, 2], 0), ([4], 5)):
        with pytest.raises(StreamError, match="must increase"):
            gaps.encode_gaps(np.array(indices, np.uint32), lo, np)
    with pytest.raises(StreamError, match="vector"):
        gaps.encode_gaps(np.ones(2, np.int64), 0, np)
    with pytest.raises(StreamError, match="vector"):
        gaps.decode_gaps(np.ones(2, np.int8), 0, 9, 1, np.uint32, np)


@few
@given(seeds, st.integers(1, 12), st.sampled_from([np.uint32, np.uint64]), st.data())
def test_altered_bytes_are_read_as_by_the_cpu(seed, count, dtype, data):
    rng = np.random.default_rng(seed)
    indices = indices_of(rng, count, 10**4, dtype)
    octets = encoded(indices, 0).copy()
    for _ in range(data.draw(st.integers(1, 3))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    read_alike(octets, 0, 10**6, count, dtype)
