"""What a stream says to programs that take it for an array: right, or an error that says what to do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparseallreduce as sar
from sparseallreduce import SparseStream

SPARSE = SparseStream([1, 4], [10.0, 40.0], 8)
DENSE = SparseStream.from_dense(np.arange(6.0))
ROWS = SparseStream([2], [[1.0, 2.0]], 5)


@pytest.mark.parametrize("stream", [SPARSE, DENSE, ROWS], ids=["sparse", "dense", "rows"])
def test_numpy_takes_a_stream_for_its_values(stream):
    np.testing.assert_array_equal(np.asarray(stream), stream.to_dense())
    assert np.asarray(stream).shape == stream.shape and stream.ndim == len(stream.shape)
    assert np.array(stream, dtype=np.float32).dtype == np.float32
    assert np.mean(stream) == stream.to_dense().mean()
    own = np.asarray(stream)
    own[0] = 7  # which is the caller's
    assert stream.to_dense().ravel()[0] == 0


def test_without_a_copy_there_is_a_view_or_an_error():
    view = np.asarray(DENSE, copy=False)
    assert np.shares_memory(view, DENSE._stored) and not view.flags.writeable
    for stream, dtype in ((SPARSE, None), (DENSE, np.float32)):
        with pytest.raises(ValueError, match="without a copy"):
            np.asarray(stream, dtype=dtype, copy=False)


def test_a_vector_is_its_own_transpose_and_rows_have_none():
    assert SPARSE.T is SPARSE
    with pytest.raises(AttributeError, match=r"to_scipy\(\)\.T"):
        _ = ROWS.T


def test_iteration_is_refused_with_what_to_do():
    with pytest.raises(TypeError, match=r"zip\(stream.indices, stream.values\)"):
        list(SPARSE)
    with pytest.raises(TypeError, match="not iterated over"):
        dict(SPARSE)


VECTORS = st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=5)


@given(VECTORS, VECTORS)
def test_streams_are_equal_if_their_vectors_are(first, second):
    streams = SparseStream.from_dense(first), SparseStream.from_dense(np.float32(second))
    assert (streams[0] == streams[1]) == (first == second)
    assert (streams[0] != streams[1]) == (first != second)
    if first == second:
        assert hash(streams[0]) == hash(streams[1])


def test_equality_is_of_entries_whatever_their_form():
    assert SparseStream([0, 1, 2], [1.0, 2.0, 3.0], 3) == SparseStream.from_dense([1.0, 2.0, 3.0])
    assert SparseStream([1], [0.0], 3) != SparseStream([], np.empty(0), 3)  # an entry that is zero is one
    assert SparseStream([1], [np.nan], 3) != SparseStream([1], [np.nan], 3)
    assert SparseStream([1, 4], [10.0, 40.0], 9) != SPARSE and SPARSE != ROWS
    assert SPARSE != [10.0, 40.0] and (SPARSE == 3) is False
    assert SPARSE in {SPARSE: 1} and SPARSE.copy() in [SPARSE]


def test_what_is_no_stream_is_told_how_to_become_one():
    from scipy.sparse import csr_array

    for given_, way in ((csr_array(np.eye(3)), "from_scipy"), (np.ones(3), "from_dense"), ({1: 2.0}, "from_coo")):
        with pytest.raises(sar.StreamTypeError, match=f"make one, as with SparseStream.{way}"):
            sar.allreduce(given_, sar.SERIAL)
    with pytest.raises(sar.StreamTypeError, match="element 1 of the list"):
        sar.allreduce([SPARSE, csr_array(np.eye(3))], sar.SERIAL)


def test_a_misspelt_option_is_guessed():
    for option, meant in (("timout", "timeout"), ("switch_densty", "switch_density"), ("codec_index", None)):
        with pytest.raises(sar.AlgorithmError) as error:
            sar.allreduce(SPARSE, sar.SERIAL, **{option: 1})
        assert ("did you mean" in str(error.value)) == (meant is not None) and (meant or "it takes none") in str(error.value)


def test_objects_say_what_they_are():
    reducer = sar.OkTopk(100, 10)
    assert repr(reducer) == "OkTopk(size=100, k=10, steps=0)"
    assert repr(sar.TopkA(4, 1, hosts=True)) == "TopkA(size=4, k=1, hosts=True, steps=0)"
    assert repr(sar.ErrorFeedback(reducer)) == "ErrorFeedback(OkTopk(size=100, k=10, steps=0), dtype=float32, gradients=0)"
    plan = sar.allreduce_init(SPARSE, sar.SERIAL, fixed_indices=True)
    assert repr(plan) == "Plan(ranks=1, fixed_indices=True, ready)"
    plan.start([1.0, 2.0])
    assert repr(plan) == "Plan(ranks=1, fixed_indices=True, started)"
    plan.wait()
    plan.free()
    assert repr(plan) == "Plan(ranks=1, fixed_indices=True, freed)"
    assert repr(sar.iallreduce(SPARSE, sar.SERIAL)) == "Request(done)"
    assert repr(sar.iallreduce(SPARSE, sar.SERIAL, foo=1)) == "Request(failed: AlgorithmError)"


def test_a_cache_says_where_it_is(tmp_path):
    from sparseallreduce.data_cache import DataCache

    assert repr(DataCache(tmp_path, disk_bytes=5)) == f"DataCache({str(tmp_path)!r}, disk_bytes=5, memory_bytes=0)"


def test_versions_are_shown_without_starting_mpi(capsys):
    sar.show_versions()
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["sparseallreduce"] == sar.__version__ and shown["numpy"] == np.__version__
    assert "mpi4py" in shown and "MPI" in shown
