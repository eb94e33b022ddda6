"""Whether an array has NaNs, and how they become the same one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import some_nans

from sparseallreduce import StreamError
from sparseallreduce.streams import dtypes, kernels
from sparseallreduce.streams.kernels import reference

FLOATS = [dtype.name for dtype in dtypes.DTYPES if dtype.kind != "i"]


@pytest.mark.parametrize("dtype", FLOATS)
@given(size=st.integers(0, 5000), nans=st.integers(0, 3), width=st.sampled_from([None, 1, 3]), seed=st.integers(0, 2**32))
def test_every_nan_becomes_numpys_and_nothing_else_changes(dtype, size, nans, width, seed):
    rng = np.random.default_rng(seed)
    shape = (size,) if width is None else (size, width)
    values = np.array([0.0, -0.0, 1.5, np.inf, -np.inf, 1e-7], dtype)[rng.integers(0, 6, shape)]
    flat = values.reshape(-1)
    parts = flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat
    places = rng.choice(parts.size, min(nans, parts.size), replace=False)
    parts[places] = some_nans(rng, len(places), parts.dtype)
    expected = parts.copy()
    expected[places] = np.nan
    assert kernels.has_nan(values) == bool(len(places))
    kernels.unify_nans(values)
    assert parts.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_integers_have_no_nans(dtype):
    values = np.array([-1, 0, np.iinfo(dtype).max], dtype)
    assert not kernels.has_nan(values)
    kernels.unify_nans(values)
    assert values.tolist() == [-1, 0, np.iinfo(dtype).max]


def test_an_array_without_nans_is_not_written_to():
    values = np.ones(10)
    values.flags.writeable = False
    kernels.unify_nans(values)


def test_an_array_with_gaps_is_an_error():
    with pytest.raises(StreamError, match="not C-contiguous"):
        kernels.has_nan(np.ones(10)[::2])


@given(numbers=st.lists(st.integers(0, 2**32 - 1), max_size=20), mask=st.sampled_from([2**31 - 1, 2**32 - 1]))
def test_the_compiled_kernel_is_its_twin(numbers, mask):
    compiled = pytest.importorskip("sparseallreduce.streams.kernels.compiled.nans")
    bits = np.array(numbers, np.uint32)
    for limit in {0, 2**30, *(number & mask for number in numbers)}:
        assert bool(compiled.any_above(bits, np.uint32(mask), np.uint32(limit))) == reference.any_above(bits, mask, limit)
