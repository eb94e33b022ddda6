"""Selectors on arrays of the device, against the same on the host; the codecs of positions and of dense arrays likewise."""

import device_arrays as xp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import FLOATS, indices_of, same_bits, seeds, values_of

from sparseallreduce import SparseStream
from sparseallreduce.errors import StreamError, StreamTypeError
from sparseallreduce.streams import kernels, selection
from sparseallreduce.streams.wire.bitmap import Bitmap
from sparseallreduce.streams.wire.gaps import Gaps

SELECTORS = {
    "exact": lambda k: selection.ExactTopK(k),
    "chunks": lambda k: selection.ChunkTopK(k, 7),
    "not zero": lambda k: selection.NonZeroTopK(k),
    "threshold": lambda k: selection.Threshold(1 / (1 + k)),
    "reuse": lambda k: selection.ThresholdReuse(k, 3),
    "drawn": lambda k: selection.ApproximateTopK(k, bucket=16, seed=k),
    "drawn, fixed": lambda k: selection.ApproximateTopK(k, bucket=8, fixed=True, form="at most"),
    "random": lambda k: selection.RandomK(k, 3),
    "sampled": lambda k: selection.DoubleSampling(k, share=0.5),
    "mstopk": lambda k: selection.MSTopK(k),
    "gaussian": lambda k: selection.Gaussian(k),
}
ROUNDED = ("mstopk", "gaussian")  # whose sums are made in another order: numbers of few digits, whose sums are exact


@pytest.mark.parametrize("name", SELECTORS)
@settings(max_examples=8, deadline=None)
@given(seed=seeds, size=st.integers(1, 60), share=st.sampled_from([0.0, 0.1, 0.5, 1.0]), clear=st.booleans(), added=st.booleans())
def test_chosen_and_left_are_those_of_the_host(name, seed, size, share, clear, added):
    rng = np.random.default_rng(seed)
    dtype, k = rng.choice(FLOATS), int(share * size)
    ours, theirs = SELECTORS[name](k), SELECTORS[name](k)
    make = values_of if name not in ROUNDED else lambda rng, size, dtype: rng.integers(-40, 40, size).astype(dtype)
    residual = make(rng, size, dtype)
    on_device, on_host = xp.asarray(residual), residual.copy()
    for _ in range(3):  # with what a selector remembers
        gradient = make(rng, size, dtype) if added else None
        given = None if gradient is None else xp.asarray(gradient)
        with np.errstate(all="ignore"):
            got, wanted = ours(on_device, given, clear=clear), theirs(on_host, gradient, clear=clear)
        assert got.on_device
        same_bits(got.indices.get(), wanted.indices)
        same_bits(got.values.get(), wanted.values)
        same_bits(on_device.get(), on_host)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, size=st.integers(1, 60))
def test_magnitudes_and_entries_of_streams(seed, size):
    rng = np.random.default_rng(seed)
    array, k = values_of(rng, size, np.float32), int(rng.integers(1, size + 1))
    np.testing.assert_equal(selection.kth_magnitude(xp.asarray(array), k), selection.kth_magnitude(array, k))
    host = SparseStream(np.arange(0, 2 * size, 2), array, 10 * size)
    device = host.to_device(xp)
    for choose in (
        lambda stream: selection.top_of_stream(stream, k - 1),
        lambda stream: selection.stream_at_least(stream, 0.5),
        lambda stream: SparseStream(*stream._entries(), stream.size),
    ):
        same_bits(choose(device).indices.get(), choose(host).indices)
        same_bits(choose(device).values.get(), choose(host).values)
    same_bits(selection.select_at_least(xp.asarray(array), 0.5).values.get(), selection.select_at_least(array, 0.5).values)


def test_residual_and_gradient_lie_in_one_place():
    for first, second in ((np.zeros(3), xp.zeros(3)), (xp.zeros(3), np.zeros(3))):
        for make in SELECTORS.values():
            with pytest.raises(StreamTypeError, match="to_device"):
                make(1)(first, second)
    with pytest.raises(StreamTypeError, match="int64"):
        selection.ExactTopK(1)(xp.asarray([1, 2]))
    with pytest.raises(StreamError, match="k"):
        selection.ExactTopK(4)(xp.zeros(3))


@settings(max_examples=20, deadline=None)
@given(seed=seeds, count=st.integers(0, 40), index_dtype=st.sampled_from([np.uint32, np.uint64]))
def test_codecs_write_the_bytes_of_the_host_and_read_them(seed, count, index_dtype):
    rng = np.random.default_rng(seed)
    indices, lo = indices_of(rng, count, 100, index_dtype, 7), 5
    for codec in (Bitmap(), Gaps()):
        room = codec.bound(indices, lo)
        written, on_device = np.zeros(room, np.uint8), xp.zeros(room, np.uint8)
        assert codec.bound(xp.asarray(indices), lo) == room
        length = codec.write(indices, lo, written)
        assert codec.write(xp.asarray(indices), lo, on_device) == length
        same_bits(on_device[:length].get(), written[:length])
        back = xp.zeros(count, index_dtype)
        assert codec.read(on_device[:length], lo, 200, back)
        same_bits(back.get(), indices)
        if length:
            assert codec.read(on_device[: length - 1], lo, 200, back) == codec.read(written[: length - 1], lo, 200, indices.copy())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.complex128])
def test_dense_arrays_are_written_as_their_non_zeros(dtype):
    rng = np.random.default_rng(4)
    for shape in ((13,), (9, 2)):
        dense = values_of(rng, shape, dtype)
        dense[rng.random(len(dense)) < 0.5] = 0
        bits, values = np.zeros((len(dense) + 7) // 8, np.uint8), np.zeros_like(dense)
        on_device = xp.zeros(bits.shape, np.uint8), xp.zeros(shape, dtype)
        count = kernels.encode_nonzero(dense, bits, values)
        assert kernels.encode_nonzero(xp.asarray(dense), *on_device) == count
        same_bits(on_device[0].get(), bits)
        same_bits(on_device[1][:count].get(), values[:count])
        back = xp.zeros(shape, dtype)
        assert kernels.decode_nonzero(on_device[0], on_device[1][:count], back)
        same_bits(back.get(), dense)
