"""A stream times a number, as another dtype, and as a matrix of scipy."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import bits, comparable
from scipy.sparse import csr_array
from strategies import DTYPES, cases

from sparseallreduce import SparseStream, StreamError, StreamTypeError
from sparseallreduce.streams import dtypes
from sparseallreduce.streams.partition import split

OF_NUMPY = (np.float64(0.1), np.float32(2), np.int8(-3), np.array(4))
NUMBERS = st.sampled_from([0, 1, -1, 3, -0.0, 0.5, 0.1, -2.5, np.nan, np.inf, -np.inf, *OF_NUMPY])
anything = given(case=cases(ranks=st.just(1)), number=NUMBERS)
of_two_forms = pytest.mark.parametrize("dense", [False, True])


def made(values, dense=False, dtype=None):
    """A stream of few entries in 30, or of many in 5."""
    return SparseStream(np.arange(len(values)) + 1, np.array(values, dtype), len(values) + 2 if dense else 30)


def same_entries(ours, theirs):
    assert ours.indices.tobytes() == theirs.indices.tobytes()
    assert (ours.nnz, ours.size, ours.lo, ours.hi, ours.width) == (theirs.nnz, theirs.size, theirs.lo, theirs.hi, theirs.width)
    assert ours.switch_density == theirs.switch_density
    absent = np.ones(ours.size, bool)
    absent[ours.indices] = False
    assert ours.to_dense()[absent].tobytes() == bytes(ours.to_dense()[absent].nbytes)  # no -0.0, and no NaN


def as_numpy_has_it(values, number, ufunc=np.multiply):
    """In the values' dtype; of bfloat16 in floats, rounded."""
    if values.dtype.kind == "V":
        return ufunc(values.astype(np.float32), np.float32(number)).astype(values.dtype)
    return ufunc(values, values.dtype.type(number))


@anything
def test_each_entry_is_multiplied_and_remains_one(case, number):
    (stream,) = case.streams
    before = bits(stream)
    if stream.dtype.kind == "i" and np.asarray(number).dtype.kind == "f":
        with pytest.raises(StreamTypeError, match="convert them first, as with astype"):
            stream * number
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        product, twin = stream * number, number * stream
        expected = as_numpy_has_it(stream.values, number)
    same_entries(product, stream)
    assert product.dtype == stream.dtype and product.is_dense == stream.is_dense
    assert product.values.tobytes() == expected.tobytes()
    assert bits(twin) == bits(product) and bits(stream) == before
    assert not product.overlaps(stream) and not product.values.flags.writeable


@anything
def test_each_entry_is_divided_and_remains_one(case, number):
    (stream,) = case.streams
    if stream.dtype.kind == "i":
        with pytest.raises(StreamTypeError, match="convert them first, as with astype"):
            stream / number
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quotient = stream / number
        expected = as_numpy_has_it(stream.values, number, np.divide)
    same_entries(quotient, stream)
    assert quotient.values.tobytes() == expected.tobytes()


@given(case=cases(ranks=st.just(1)))
def test_minus_changes_every_sign(case):
    (stream,) = case.streams
    same_entries(-stream, stream)
    assert (-stream).values.tobytes() == np.negative(stream.values).tobytes()


@pytest.mark.parametrize("number", [0, 1, 2**31, -(2**31) - 1, True, np.int64(5), np.uint64(2**63)])
def test_an_integer_has_to_fit(number):
    stream = made([1, -2], dtype="int32")
    if -(2**31) <= int(number) < 2**31:
        assert (stream * number).values.tolist() == [int(number), -2 * int(number)] and (stream * number).dtype == np.int32
    else:
        with pytest.raises(StreamError, match="is out of range for values of int32"):
            stream * number


def test_products_of_integers_wrap_around():
    stream = made([2**31 - 1, -(2**31)], dtype="int32")
    assert (stream * 2).values.tolist() == [-2, 0] and (-stream).values.tolist() == [-(2**31) + 1, -(2**31)]


def test_an_integer_that_no_float_reaches_is_an_error():
    with pytest.raises(StreamError, match="an integer of 1329 bits is out of range for values of float32"):
        made([1.0], dtype="float32") * 10**400


@of_two_forms
def test_a_complex_number_needs_a_complex_stream(dense):
    assert (made([1 + 2j, 3], dense) * 1j).values.tolist() == [-2 + 1j, 3j]
    with pytest.raises(StreamTypeError, match=r"convert them first, as with astype\('complex128'\)"):
        made([1.0, 2.0], dense) * 1j


@of_two_forms
@pytest.mark.parametrize("other", [np.ones(7), np.ones((1, 1)), [2.0], "2", None, np.datetime64(1, "s"), np.str_("2"), object()])
def test_what_is_no_number_is_refused_and_no_array_takes_the_stream_apart(dense, other):
    stream = made([1.0, 2.0], dense)
    for use in (lambda: stream * other, lambda: other * stream, lambda: stream / other, lambda: other / stream, lambda: stream * stream):
        with pytest.raises(TypeError):
            use()
    for use in (lambda: np.add(np.ones(7), stream), lambda: 1 / stream, lambda: np.ones(7) - stream):
        with pytest.raises(TypeError):
            use()


def test_parts_stay_parts():
    for stream in (made([1.0, 2.0, 3.0]), made([1.0, 2.0, 3.0], dense=True)):
        for part in split(stream, [0, 2, stream.size]):
            product = 2 * part
            same_entries(product, part)
            same_entries(part.astype("float32"), part)
            assert product.values.tolist() == (2 * part.values).tolist()


def test_only_what_is_present_warns():
    stream = SparseStream.from_dense(np.array([1.0, 0.0, 2.0, 3.0]))
    assert stream.is_dense
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (stream * np.inf).values.tolist() == [np.inf] * 3
        assert stream.astype("float32").nnz == 3


@given(case=cases(ranks=st.just(1)), wanted=st.sampled_from(DTYPES))
def test_the_entries_of_another_dtype_are_those_that_numpy_casts(case, wanted):
    (stream,) = case.streams
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cast, expected = stream.astype(wanted), stream.values.astype(wanted)
    same_entries(cast, stream)
    assert cast.dtype == wanted and cast.is_dense == (cast.nnz > cast.switch_point)
    np.testing.assert_array_equal(comparable(cast.values), comparable(expected))
    assert not cast.overlaps(stream)
    assert stream.astype(stream.dtype, copy=False) is stream


def test_the_form_is_that_of_the_new_dtype():
    stream = SparseStream(np.arange(6), np.full(6, 0.25), 10)  # phi is 6 for float64, 5 for float32
    narrow = stream.astype("float32")
    assert not stream.is_dense and narrow.is_dense
    assert not narrow.astype("float64").is_dense
    zeros = narrow.astype("int32")  # zeros in a dense form, which a mask tells from what is absent
    assert zeros.is_dense and zeros.nnz == 6 and zeros.values.tolist() == [0] * 6
    assert bits(zeros.astype("float64")) == bits(SparseStream(np.arange(6), np.zeros(6), 10))


def test_imaginary_parts_are_dropped_with_the_warning_of_numpy():
    with pytest.warns(np.exceptions.ComplexWarning):
        assert made([1 + 2j, 3j]).astype("float32").values.tolist() == [1, 0]


def test_casts_that_are_not_asked_for_are_refused():
    stream = made([1.5, 2.5])
    assert stream.astype("float64", casting="no").values.tolist() == [1.5, 2.5]
    with pytest.raises(StreamTypeError, match="casting='safe' does not allow it"):
        stream.astype("float32", casting="safe")
    for unknown in ("uint8", "no such dtype", object):
        with pytest.raises(StreamTypeError, match=f"one of {', '.join(DTYPES)}"):
            stream.astype(unknown)


@given(case=cases(ranks=st.just(1)))
def test_a_row_of_scipy_is_the_stream_again(case):
    (stream,) = case.streams
    if stream.dtype in dtypes.HALVES:
        with pytest.raises(StreamTypeError, match=r"scipy has no sparse arrays of b?float16: take those of astype\('float32'\)"):
            stream.to_scipy()
        return
    before, matrix = bits(stream), stream.to_scipy()
    dense = stream.to_dense()
    assert isinstance(matrix, csr_array) and matrix.dtype == stream.dtype and matrix.has_canonical_format
    assert matrix.shape == ((1, stream.size) if stream.width is None else dense.shape) and matrix.nnz == stream.values.size
    np.testing.assert_array_equal(matrix.toarray(), dense.reshape(matrix.shape))
    if stream.width is None:
        back = SparseStream.from_scipy(matrix, switch_density=stream.switch_density)
        assert back.indices.tobytes() == stream.indices.tobytes() and back.values.tobytes() == stream.values.tobytes()
    matrix.data[:] = 7
    assert bits(stream) == before


def test_a_row_of_scipy_may_be_longer_than_32_bits_count():
    matrix = SparseStream([3, 2**40], [1.0, 0.0], 2**40 + 1).to_scipy()
    assert matrix.shape == (1, 2**40 + 1) and matrix.indices.tolist() == [3, 2**40] and matrix.data.tolist() == [1, 0]
