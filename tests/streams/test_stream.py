"""The sparse stream: what it takes, what it refuses and how it says so, when it goes dense, and that neither form shows."""

import copy
import pickle

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from oracle import Entries, assert_reduction, bits, comparable
from strategies import DTYPES, SPECIAL, cases

import sparseallreduce as sar
from sparseallreduce import SparseStream, StreamError, StreamTypeError
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.stream import switch_point

ONE = np.ones(1, np.float32)


def ones(count, dtype="float32"):
    return np.ones(count, dtype)


REFUSED = {
    "unsorted": (
        lambda: SparseStream([1, 5, 3], ones(3), 8),
        StreamError,
        "indices must be increasing, but 3 follows 5 at position 2: from_coo sorts them",
    ),
    "repeated": (
        lambda: SparseStream([1, 5, 5], ones(3), 8),
        StreamError,
        "index 5 occurs twice, at positions 1 and 2: from_coo adds up duplicates",
    ),
    "out of range": (lambda: SparseStream([1, 8], ones(2), 8), StreamError, "index 8 at position 1 is out of range for size 8"),
    "negative": (lambda: SparseStream([-1, 3], ones(2), 8), StreamError, "index -1 at position 0 is out of range for size 8"),
    "negative behind": (lambda: SparseStream([3, -1], ones(2), 8), StreamError, "index -1 at position 1 is out of range for size 8"),
    "negative in 8 bits": (
        lambda: SparseStream(np.array([-3], np.int8), ONE, 2**40),
        StreamError,
        f"index -3 at position 0 is out of range for size {2**40}",
    ),
    "beyond 32 bits": (
        lambda: SparseStream([2**32 + 1], ONE, 8),
        StreamError,
        "index 4294967297 at position 0 is out of range for size 8",
    ),
    "beyond 63 bits": (
        lambda: SparseStream(np.array([2**64 - 1], np.uint64), ONE, 2**40),
        StreamError,
        f"index {2**64 - 1} at position 0 is out of range for size {2**40}",
    ),
    "in nothing": (lambda: SparseStream([0], ONE, 0), StreamError, "index 0 at position 0 is out of range for size 0"),
    "too few values": (
        lambda: SparseStream([1, 5], ONE, 8),
        StreamError,
        "2 indices but 1 values: there must be one value, or one row, an index",
    ),
    "too few rows": (
        lambda: SparseStream([1, 5, 6], ones((2, 3)), 8),
        StreamError,
        "3 indices but 2 values: there must be one value, or one row, an index",
    ),
    "indices of two dimensions": (
        lambda: SparseStream([[1, 5]], ones(2), 8),
        StreamError,
        "indices must have one dimension, not shape (1, 2)",
    ),
    "an index alone": (lambda: SparseStream(1, ONE, 8), StreamError, "indices must have one dimension, not shape ()"),
    "a value alone": (lambda: SparseStream([1], np.float32(1), 8), StreamError, "values must have shape (nnz,) or (nnz, width), not ()"),
    "values of three dimensions": (
        lambda: SparseStream([1], ones((1, 1, 1)), 8),
        StreamError,
        "values must have shape (nnz,) or (nnz, width), not (1, 1, 1)",
    ),
    "rows of nothing": (
        lambda: SparseStream([1], ones((1, 0)), 8),
        StreamError,
        "rows of width 0 hold no value: give at least one column",
    ),
    "float indices": (
        lambda: SparseStream([1.0, 5.0], ones(2), 8),
        StreamTypeError,
        "indices of dtype float64 are no integers: convert them, for example to np.uint32",
    ),
    "bool indices": (
        lambda: SparseStream([True], ONE, 8),
        StreamTypeError,
        "indices of dtype bool are no integers: convert them, for example to np.uint32",
    ),
    "size of a float": (lambda: SparseStream([1], ONE, 8.0), StreamTypeError, "size must be an integer, not 8.0"),
    "size of a text": (lambda: SparseStream([1], ONE, "8"), StreamTypeError, "size must be an integer, not '8'"),
    "size of nothing": (lambda: SparseStream([1], ONE, None), StreamTypeError, "size must be an integer, not None"),
    "negative size": (lambda: SparseStream([], [], -1), StreamError, "size must be from 0 to 2**63 - 1, not -1"),
    "too large a size": (lambda: SparseStream([], [], 2**63), StreamError, f"size must be from 0 to 2**63 - 1, not {2**63}"),
    "switch density above one": (
        lambda: SparseStream([1], ONE, 8, switch_density=1.5),
        StreamError,
        "switch_density is a fraction of the size, from 0 to 1, not 1.5",
    ),
    "switch density that is no number": (
        lambda: SparseStream.from_dense(ONE, switch_density=float("nan")),
        StreamError,
        "switch_density is a fraction of the size, from 0 to 1, not nan",
    ),
    "scalar made sparse": (
        lambda: SparseStream.from_dense(np.float32(1)),
        StreamError,
        "values must have shape (nnz,) or (nnz, width), not ()",
    ),
    "coo out of range": (
        lambda: SparseStream.from_coo([7, 8, 2], ones(3), 8),
        StreamError,
        "index 8 at position 1 is out of range for size 8",
    ),
    "coo negative": (
        lambda: SparseStream.from_coo([7, 2, -4], ones(3), 8),
        StreamError,
        "index -4 at position 2 is out of range for size 8",
    ),
    "coo lengths": (
        lambda: SparseStream.from_coo([7], ones(3), 8),
        StreamError,
        "1 indices but 3 values: there must be one value, or one row, an index",
    ),
    "array as scipy": (
        lambda: SparseStream.from_scipy(ones(3)),
        StreamTypeError,
        "from_scipy takes a scipy.sparse matrix or array, not ndarray: use from_dense or from_coo",
    ),
    "matrix of rows": (
        lambda: SparseStream.from_scipy(scipy.sparse.eye_array(3)),
        StreamError,
        "from_scipy takes a single row or column, not shape (3, 3): take one, as in matrix[i:i+1]",
    ),
}


@pytest.mark.parametrize("make, kind, text", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_says_what_is_wrong_and_what_to_do(make, kind, text):
    with pytest.raises(kind) as raised:
        make()
    assert type(raised.value) is kind
    assert str(raised.value) == text


@pytest.mark.parametrize(
    "dtype", ["clongdouble", "bool", "object", "uint8", "int8", "int16", "uint32", "uint64", "longdouble", "U3", "M8[s]"]
)
def test_other_dtypes_are_refused_by_name(dtype):
    values = np.zeros(2).astype(dtype)
    text = f"values of dtype {values.dtype} are not supported: convert them to one of {', '.join(DTYPES)}"
    for make in (SparseStream, SparseStream.from_coo, lambda _indices, values, _size: SparseStream.from_dense(values)):
        with pytest.raises(StreamTypeError) as raised:
            make([1, 2], values, 8)
        assert str(raised.value) == text


def test_errors_are_the_built_in_ones_too():
    assert issubclass(StreamError, ValueError) and issubclass(StreamTypeError, TypeError)
    assert issubclass(StreamError, sar.SparseAllreduceError) and issubclass(StreamTypeError, sar.SparseAllreduceError)


@given(case=cases())
def test_a_stream_is_what_it_was_made_of(case):
    for stream, entries in zip(case.streams, case.entries):
        assert (stream.size, stream.dtype, stream.width) == (case.size, np.dtype(case.dtype), case.width)
        assert stream.nnz == len(entries.indices)
        assert stream.indices.dtype == np.uint32
        np.testing.assert_array_equal(stream.indices, entries.indices)
        assert stream.values.tobytes() == entries.values.tobytes()
        assert stream.density == (len(entries.indices) / case.size if case.size else 0.0)
        assert_reduction(stream, [entries], case.size, SUM)


@given(case=cases(), density=st.sampled_from([None, 0.0, 0.0625, 0.3, 1.0]))
def test_neither_form_shows(case, density):
    for entries in case.entries[:4]:
        plain = SparseStream(entries.indices, entries.values, case.size)
        early = SparseStream(entries.indices, entries.values, case.size, switch_density=density)
        assert early.nnz == plain.nnz
        assert early.indices.tobytes() == plain.indices.tobytes()
        assert early.values.tobytes() == plain.values.tobytes()
        assert early.to_dense().tobytes() == plain.to_dense().tobytes()


@pytest.mark.parametrize(
    "dtype, size, phi", [("float32", 100, 50), ("float64", 100, 66), ("float16", 100, 33), ("int64", 7, 4), ("int32", 1, 0)]
)
def test_a_stream_goes_dense_exactly_above_phi(dtype, size, phi):
    isize, c = np.dtype(dtype).itemsize, 4
    assert switch_point(size, dtype, size) == size * isize // (c + isize) == phi
    for nnz in range(size + 1):
        stream = SparseStream(np.arange(nnz), ones(nnz, dtype), size)
        assert stream.switch_point == phi
        assert stream.is_dense == (nnz > phi)
        assert stream.nbytes <= size * isize
        assert SparseStream.from_dense(stream.to_dense()).is_dense == (nnz > phi)


@pytest.mark.parametrize("density, limit", [(0.0, 0), (0.0625, 6), (0.3, 30), (0.5, 50), (0.9, 50), (1.0, 50)])
def test_the_switch_point_can_be_set_lower_but_not_higher(density, limit):
    for nnz in (limit, limit + 1):
        made = SparseStream(np.arange(nnz), ones(nnz), 100, switch_density=density)
        assert made.switch_point == limit
        assert made.is_dense == SparseStream.from_dense(made.to_dense(), switch_density=density).is_dense == (nnz > limit)


def test_a_row_counts_as_one_value_of_its_width():
    assert switch_point(100, "float32", 100, width=3) == 100 * 12 // 16
    assert not SparseStream(np.arange(75), ones((75, 3)), 100).is_dense
    assert SparseStream(np.arange(76), ones((76, 3)), 100).is_dense


def test_an_index_of_64_bits_counts_as_such():
    assert switch_point(2**32, "float32", 2**32) == 2**31
    assert switch_point(2**32 + 1, "float32", 2**32 + 1) == (2**32 + 1) // 3


@given(case=cases())
def test_a_stream_takes_no_more_bytes_than_its_dense_form(case):
    for stream, entries in zip(case.streams, case.entries):
        dense = case.size * np.dtype(case.dtype).itemsize * (case.width or 1)
        zero = bool((~entries.values.reshape(len(entries.values), case.width or 1).any(axis=1)).any())
        mask = case.size if stream.is_dense and zero else 0  # entries that are zero are told from absent ones by a byte each
        assert stream.nbytes <= dense + mask


@pytest.mark.parametrize(
    "size, dtype", [(2**31, "uint32"), (2**32, "uint32"), (2**32 + 1, "uint64"), (2**40, "uint64"), (2**63 - 1, "uint64")]
)
def test_large_dimensions_are_ordinary(size, dtype):
    indices = [0, 1, size // 2, size - 2, size - 1]
    stream = SparseStream(np.array(indices, np.uint64), np.arange(5, dtype=np.float32), size)
    assert stream.indices.dtype == dtype
    assert stream.indices.tolist() == indices
    assert not stream.is_dense
    total = stream + SparseStream([size - 1], np.float32([10]), size)
    assert total.indices.tolist() == indices
    assert total.values.tolist() == [0, 1, 2, 3, 14]
    with pytest.raises(StreamError, match=f"index {size} at position 0 is out of range"):
        SparseStream(np.array([size], np.uint64), ONE, size)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "int32", "uint32", "int64", "uint64", ">u4", ">i8"])
def test_indices_of_any_integer_dtype(dtype):
    assert SparseStream(np.array([1, 100], dtype), [1.0, 2.0], 128).indices.tolist() == [1, 100]
    assert SparseStream.from_coo(np.array([100, 1], dtype), [2.0, 1.0], 128).indices.tolist() == [1, 100]


def test_arrays_of_another_byte_order_or_with_gaps_are_converted():
    values = np.arange(10, dtype=">f4")[::3]
    stream = SparseStream(np.arange(20)[::5], values, 32)
    assert stream.dtype == np.dtype("float32") and stream.dtype.isnative
    assert stream.to_dense()[[0, 5, 10, 15]].tolist() == [0, 3, 6, 9]


def test_empty_and_full_streams_are_ordinary():
    nothing = SparseStream([], [], 0)
    assert (nothing.size, nothing.nnz, nothing.density, nothing.to_dense().shape) == (0, 0, 0.0, (0,))
    assert (nothing + nothing).nnz == 0
    empty = SparseStream([], np.empty((0, 3), np.float32), 5)
    assert (empty.nnz, empty.width, empty.to_dense().shape) == (0, 3, (5, 3))
    full = SparseStream(np.arange(5), ones(5), 5)
    assert full.is_dense and (full + full).to_dense().tolist() == [2] * 5
    assert SparseStream.from_dense([]).size == 0
    assert SparseStream.from_coo([], [], 3).nnz == 0


def test_nan_infinities_and_zeros_are_kept():
    values = np.array([np.nan, -np.inf, 0.0, -0.0], np.float32)
    for size in (4, 100):
        stream = SparseStream([0, 1, 2, 3], values, size)
        assert stream.is_dense == (size == 4)
        assert stream.nnz == 4
        assert stream.values.tobytes() == values.tobytes()


def test_from_dense_keeps_the_non_zeros_and_rows_with_any():
    stream = SparseStream.from_dense(np.array([0, np.nan, -0.0, 2, 0, 0, 0, 0], np.float32))
    assert stream.indices.tolist() == [1, 3]
    rows = np.zeros((9, 2), np.int64)
    rows[4, 1] = 7
    assert SparseStream.from_dense(rows).indices.tolist() == [4]
    assert SparseStream.from_dense(rows).values.tolist() == [[0, 7]]


@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_from_coo_adds_up_duplicates_in_any_order(case, seed):
    parts = case.entries
    indices, values = np.concatenate([part.indices for part in parts]), np.concatenate([part.values for part in parts])
    order = np.random.default_rng(seed).permutation(len(indices))
    stream = SparseStream.from_coo(indices[order], values[order], case.size)
    assert_reduction(stream, parts, case.size, SUM, case.exact)


@pytest.mark.parametrize("form", ["csr_array", "csc_array", "coo_array", "csr_matrix", "coo_matrix", "dok_array", "lil_matrix"])
def test_from_scipy_takes_rows_and_columns_of_every_format(form):
    dense = np.array([[0, 0, 3, 0, 0, 0, 7, 0, 0]], np.float32)
    for matrix in (dense, dense.T):
        stream = SparseStream.from_scipy(getattr(scipy.sparse, form)(matrix))
        assert stream.indices.tolist() == [2, 6]
        assert stream.values.tolist() == [3, 7]
        assert stream.size == 9


def test_from_scipy_adds_up_duplicates_and_keeps_stored_zeros():
    row = scipy.sparse.coo_array((np.array([1.0, 2, 0]), ([0, 0, 0], [4, 4, 8])), (1, 40))
    assert SparseStream.from_scipy(row).values.tolist() == [3, 0]
    assert SparseStream.from_scipy(scipy.sparse.coo_array(np.array([0.0, 5, 0, 0, 0]))).indices.tolist() == [1]
    assert SparseStream.from_scipy(scipy.sparse.csr_array((1, 0), dtype="float32")).size == 0


@given(case=cases())
def test_add_to_adds_the_dense_form(case):
    rng = np.random.default_rng(case.seed)
    start = rng.integers(-9, 10, (case.size, *case.entries[0].values.shape[1:])).astype(case.dtype)
    for stream in case.streams[:3]:
        array = start.copy()
        stream.add_to(array)
        strided = np.repeat(start, 2, axis=0)[::2]
        stream.add_to(strided)
        with np.errstate(all="ignore"):
            expected = start + stream.to_dense()
        np.testing.assert_array_equal(comparable(array), comparable(expected))
        np.testing.assert_array_equal(comparable(strided), comparable(expected))


def test_add_to_refuses_another_shape_or_dtype():
    stream = SparseStream([1], ONE, 8)
    for array in (np.zeros(7, np.float32), np.zeros((8, 1), np.float32), np.zeros(8)):
        with pytest.raises(StreamError) as raised:
            stream.add_to(array)
        assert str(raised.value) == (
            f"cannot add a stream of size 8 and dtype float32 to an array of shape {array.shape} and dtype {array.dtype}: both must agree"
        )


@given(case=cases(ranks=st.just(2)))
def test_plus_is_the_sum_and_leaves_its_operands(case):
    first, second = case.streams
    before = bits(first), bits(second)
    assert_reduction(first + second, case.entries, case.size, SUM, case.exact)
    assert (bits(first), bits(second)) == before
    assert (first + second).switch_density == first.switch_density


def test_plus_refuses_streams_that_do_not_fit():
    stream = SparseStream([1], ONE, 8)
    other = {
        "size": SparseStream([1], ONE, 9),
        "dtype": SparseStream([1], ones(1, "float64"), 8),
        "width": SparseStream([1], ones((1, 2)), 8),
    }
    for name, second in other.items():
        with pytest.raises(StreamError) as raised:
            stream + second
        ours, theirs = getattr(stream, name), getattr(second, name)
        assert str(raised.value) == f"streams of {name} {ours} and {theirs} cannot be reduced: convert one of them"
    with pytest.raises(TypeError, match="unsupported operand"):
        stream + 1


def test_what_a_stream_shows_cannot_be_written_to():
    for stream in (SparseStream([1], ONE, 8), SparseStream.from_dense(ones(8))):
        with pytest.raises(ValueError, match="read-only"):
            stream.indices[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            stream.values[0] = 0


def test_a_dense_copy_belongs_to_the_caller():
    for stream in (SparseStream([1], ONE.copy(), 8), SparseStream.from_dense(ones(8))):
        before = bits(stream)
        stream.to_dense()[:] = 5
        assert bits(stream) == before


def test_arrays_of_the_right_dtype_are_not_copied_and_stay_writeable():
    indices, values = np.array([1, 5], np.uint32), ones(2)
    stream = SparseStream(indices, values, 40)
    assert np.shares_memory(stream.indices, indices) and np.shares_memory(stream.values, values)
    assert indices.flags.writeable and values.flags.writeable
    array = ones(8)
    doubled = SparseStream.from_dense(array) + SparseStream.from_dense(array)
    assert array.flags.writeable and array.tolist() == [1] * 8
    assert doubled.values.tolist() == [2] * 8


@given(case=cases())
def test_pickling_and_copying_change_no_bit(case):
    for stream in case.streams[:3]:
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert bits(pickle.loads(pickle.dumps(stream, protocol))) == bits(stream)
        assert bits(copy.copy(stream)) == bits(copy.deepcopy(stream)) == bits(stream)


@pytest.mark.parametrize(
    "stream, text",
    [
        (lambda: SparseStream([1, 4], [10.0, 40.0], 8), "SparseStream(size=8, nnz=2, dtype=float64, sparse)"),
        (lambda: SparseStream.from_dense(np.arange(8)), "SparseStream(size=8, nnz=7, dtype=int64, dense)"),
        (lambda: SparseStream([4], ones((1, 3)), 8), "SparseStream(size=8, nnz=1, width=3, dtype=float32, sparse)"),
        (lambda: SparseStream([], [], 0), "SparseStream(size=0, nnz=0, dtype=float64, sparse)"),
    ],
)
def test_a_stream_describes_itself(stream, text):
    assert repr(stream()) == text


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_survives_the_sum(dtype):
    stream = SparseStream([0, 2], np.array([1, 2], dtype), 40)
    assert (stream + stream).dtype == dtype
    assert (stream + stream).values.tolist() == [2, 4]


@given(case=cases(ranks=st.just(1), contents=(SPECIAL,)))
def test_special_values_travel_bit_by_bit(case):
    empty = SparseStream([], np.empty((0, *case.entries[0].values.shape[1:]), case.dtype), case.size)
    stream = SparseStream(case.entries[0].indices, case.entries[0].values, case.size)
    if not stream.is_dense:
        assert bits(stream + empty) == bits(empty + stream) == bits(stream)
    assert_reduction(empty + stream, [Entries(*case.entries[0])], case.size, SUM)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [0xFFFFFFF0, 64])
@pytest.mark.parametrize("rows", [(), (2,)])
def test_indices_that_are_changed_after_the_check_are_an_error(dtype, wrong, rows):
    indices, values, array = np.array([1, 2, 3], np.uint32), ones((3, *rows), dtype), np.zeros((64, *rows), dtype)
    stream = SparseStream(indices, values, 64)
    indices[1] = wrong
    for use in (
        stream.to_dense,
        lambda: stream.add_to(array),
        lambda: stream.add_to(np.repeat(array, 2, axis=0)[::2]),
        lambda: stream + SparseStream.from_dense(ones((64, *rows), dtype)),
    ):
        with pytest.raises(StreamError):
            use()


def test_an_index_of_64_bits_is_no_place_counted_from_the_end():
    indices, array = np.array([1, 2, 3], np.uint64), np.zeros(2**17)
    stream = SparseStream._sparse_form(indices, np.ones(3), 2**17)
    indices[1] = 2**64 - 5
    for target in (array, np.zeros(2**18)[::2]):
        with pytest.raises(StreamError):
            stream.add_to(target)
        assert not target[4:].any()


STREAMS = {"sparse": SparseStream([1], [2.0], 16), "dense": SparseStream.from_dense(np.full(16, 2.0))}


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_is_not_added_to_what_must_not_be_written(form):
    memory = bytes(128)
    locked = np.zeros((16, 2))
    locked.flags.writeable = False
    for array in (np.frombuffer(memory), locked[:, 0]):
        with pytest.raises(StreamError, match="read-only: pass a copy"):
            STREAMS[form].add_to(array)
    assert memory == bytes(128) and not locked.any()


@pytest.mark.parametrize("form", STREAMS)
def test_a_stream_is_added_to_no_array_of_another_kind(form):
    stream = STREAMS[form]
    for shape, dtype in ((16, ">f8"), (16, "f4"), (16, "i8"), ((16, 1), "f8"), ((4, 2, 2), "f8"), ((), "f8"), (15, "f8")):
        array = np.zeros(shape, dtype)
        with pytest.raises(StreamError, match="both must agree"):
            stream.add_to(array)
        assert not array.any()
    for other in ([0.0] * 16, np.ma.zeros(16), None):
        with pytest.raises(StreamTypeError):
            stream.add_to(other)
    odd = np.zeros(129, np.uint8)[1:].view(np.float64)
    stream.add_to(odd)
    assert odd[1] == 2


def test_masked_arrays_are_refused_rather_than_read_behind_their_mask():
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    for make in (
        lambda: SparseStream([1, 2], masked, 8),
        lambda: SparseStream(np.ma.masked_array([1, 2], [False, True]), [1.0, 2.0], 8),
        lambda: SparseStream.from_dense(masked),
        lambda: SparseStream.from_coo([1, 2], masked, 8),
    ):
        with pytest.raises(StreamTypeError, match="fill them first"):
            make()


@pytest.mark.filterwarnings("error")
def test_a_signalling_nan_turns_dense_without_a_warning():
    values = np.array([0x7FA00000, 0], np.uint32).view(np.float32)
    stream = SparseStream([0, 1], values, 2, switch_density=0.0)
    assert stream.is_dense and stream.indices.tolist() == [0, 1]


@given(case=cases())
def test_a_copy_can_be_written_to_and_nothing_else_changes(case):
    originals = [case.streams[0], case.streams[0] + case.streams[-1]]
    for original in originals:
        before, made = bits(original), original.copy()
        assert bits(made) == before
        made.values = np.ones_like(made.values)
        assert made.values.tolist() == np.ones_like(original.values).tolist()
        assert made.indices.tolist() == original.indices.tolist()
        if not made.is_dense:
            made.values[...] = 0
            assert not made.values.any() and made.nnz == original.nnz
        made.values = np.zeros_like(made.values)
        assert (made.nnz, made.to_dense().any()) == (original.nnz, False)  # entries stay entries
        with pytest.raises(ValueError, match="read-only"):
            made.indices[...] = 0
        assert bits(original) == before
        with pytest.raises(StreamError, match="write to those of its copy"):
            original.values = np.zeros_like(original.values)
        assert bits(original) == before


def test_a_copy_takes_values_that_fit_and_no_others():
    for stream in (SparseStream([1, 2], [1.0, 2.0], 40), SparseStream.from_dense([0.0, 1.0, 2.0])):
        made = stream.copy()
        made.values = 5
        assert made.values.tolist() == [5, 5]
        for wrong in (np.ones(3), [1.0, 1j], "a", np.ma.ones(2)):
            with pytest.raises((StreamError, StreamTypeError)):
                made.values = wrong
        assert made.values.tolist() == [5, 5]
        assert copy.copy(made).values.tolist() == [5, 5]
        copy.copy(made).values = 6
        assert made.values.tolist() == [5, 5]


def test_results_do_not_change_with_a_copy_that_went_into_them():
    for other in (SparseStream([], [], 40), SparseStream([7], [1.0], 40), SparseStream.from_dense(np.ones(40))):
        for stream in (SparseStream([1, 2], [1.0, 2.0], 40), SparseStream.from_dense(np.ones(40))):
            made = stream.copy()
            results = [made + other, other + made, sar.allreduce(made, sar.SERIAL), sar.allreduce(made, sar.SERIAL, "mean")]
            for op, algorithm in (("sum", "allgather"), ("mean", "ssar_ring"), ("max", "dense")):
                results += sar.simulate([other.copy(), made, other.copy()], algorithm, op=op).outputs
            before = [bits(result) for result in results]
            made.values = 9
            assert [bits(result) for result in results] == before
            made.values = made.values + 1  # and is not frozen either
            assert not any(result.overlaps(made) for result in results)
            for result in results:
                with pytest.raises(StreamError, match="copy"):
                    result.values = 3
                with pytest.raises(ValueError, match="read-only"):
                    result.values[...] = 3
