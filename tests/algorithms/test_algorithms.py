"""Every algorithm, in the simulator: the right result, the same bits on all ranks in any order of delivery, nothing touched."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Entries, assert_reduction, bits
from strategies import SMALL, cases, deliveries

import sparseallreduce as sar
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.wire import HEADER_BYTES

every_algorithm = pytest.mark.parametrize("algorithm", sar.algorithms())
sparse_algorithms = pytest.mark.parametrize("algorithm", ["auto", "allgather", *(name for name in sar.algorithms() if "ssar" in name)])

DENSITIES = st.sampled_from([None, None, 0.0, 0.0625, 1.0])


def options(algorithm):
    """The options of ``algorithm``, drawn."""
    chosen = {"switch_density": DENSITIES}
    if algorithm == "dsar_early_switch":
        chosen["group_size"] = st.sampled_from([1, 2, 3, 4, 8, 64])
    return st.fixed_dictionaries({}, optional=chosen)


@every_algorithm
@given(data=st.data(), case=cases(), delivery=deliveries(), through_wire=st.booleans())
def test_every_rank_gets_the_dense_reduction(algorithm, data, case, delivery, through_wire):
    chosen = data.draw(options(algorithm))
    out = sar.simulate(case.streams, algorithm, op=case.operator, delivery=delivery, through_wire=through_wire, **chosen)
    assert len(out.outputs) == case.ranks
    assert_reduction(out.outputs[0], case.entries, case.size, case.operator, case.exact)
    assert all(bits(result) == bits(out.outputs[0]) for result in out.outputs)


@every_algorithm
@given(case=cases(), delivery=deliveries(), density=DENSITIES)
def test_the_mean_is_the_sum_divided_by_the_number_of_ranks(algorithm, case, delivery, density):
    chosen = {"switch_density": density}
    if np.dtype(case.dtype).kind == "i":
        with pytest.raises(sar.StreamTypeError, match="convert them to floats, or divide the result of op='sum'"):
            sar.simulate(case.streams, algorithm, op="mean", **chosen)
        return
    before = [bits(stream) for stream in case.streams]
    total = sar.simulate(case.streams, algorithm, op="sum", delivery=delivery, **chosen)
    mean = sar.simulate(case.streams, algorithm, op="mean", delivery=delivery, **chosen)
    for ours, theirs in zip(mean.outputs, total.outputs):
        with np.errstate(all="ignore"):
            expected = theirs.to_dense() / theirs.dtype.type(case.ranks)
        assert ours.to_dense().tobytes() == expected.tobytes()
        assert (ours.is_dense, ours.dtype, ours.switch_density) == (theirs.is_dense, theirs.dtype, theirs.switch_density)
        assert not ours.values.flags.writeable
        assert not any(ours.overlaps(stream) for stream in case.streams)
    assert [bits(stream) for stream in case.streams] == before
    assert mean.bytes_sent.tolist() == total.bytes_sent.tolist() and mean.messages.tolist() == total.messages.tolist()
    assert len({id(output) for output in mean.outputs}) <= len({id(output) for output in total.outputs})


@every_algorithm
@given(data=st.data(), case=cases(), delivery=deliveries())
def test_the_order_of_delivery_changes_no_bit(algorithm, data, case, delivery):
    chosen = data.draw(options(algorithm))
    by_time = sar.simulate(case.streams, algorithm, op=case.operator, **chosen)
    otherwise = sar.simulate(case.streams, algorithm, op=case.operator, delivery=delivery, through_wire=True, **chosen)
    assert {bits(result) for result in by_time.outputs} == {bits(result) for result in otherwise.outputs}
    np.testing.assert_array_equal(by_time.bytes_sent, otherwise.bytes_sent)
    np.testing.assert_array_equal(by_time.messages, otherwise.messages)


@every_algorithm
@given(case=cases(), delivery=deliveries())
def test_inputs_are_left_as_they_were(algorithm, case, delivery):
    before = [bits(stream) for stream in case.streams]
    arrays = [(entries.indices.copy(), entries.values.copy()) for entries in case.entries]
    sar.simulate(case.streams, algorithm, op=case.operator, delivery=delivery)
    assert [bits(stream) for stream in case.streams] == before
    for entries, (indices, values) in zip(case.entries, arrays):
        assert entries.values.flags.writeable
        assert (entries.indices.tobytes(), entries.values.tobytes()) == (indices.tobytes(), values.tobytes())


@every_algorithm
@pytest.mark.parametrize("op", ["sum", "max", "mean"])
def test_no_result_shares_memory_with_the_input_of_any_rank(algorithm, op):
    for ranks in (1, 2, 3, 4):
        for holder in range(ranks):  # all others have nothing to add to its entries
            streams = [sar.SparseStream([], [], 40) for _ in range(ranks)]
            streams[holder] = sar.SparseStream([1, 2], [1.0, 2.0], 40)
            for output in sar.simulate(streams, algorithm, op=op).outputs:
                assert not any(output.overlaps(stream) for stream in streams)


@every_algorithm
def test_a_result_does_not_change_with_what_is_computed_from_it(algorithm):
    streams = [sar.SparseStream.from_dense(np.arange(rank, rank + 40.0)) for rank in range(4)]
    out = sar.simulate(streams, algorithm)
    before = [bits(result) for result in out.outputs]
    sar.simulate(out.outputs, algorithm)
    assert (out.outputs[0] + out.outputs[1]).to_dense()[1] == 4 * 1 + 6 + 10
    assert [bits(result) for result in out.outputs] == before


@sparse_algorithms
@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize("size", [2**32, 2**32 + 1, 2**40])
def test_dimensions_beyond_32_bits(algorithm, ranks, size):
    rng = np.random.default_rng(size)
    ends = [0, 1, 2**31, 2**32 - 1, size // ranks - 1, size // ranks, size - 2, size - 1]
    places = np.unique(np.concatenate([np.array(ends, np.uint64), rng.integers(0, size, 20, np.uint64)]))
    parts = [Entries(np.flatnonzero(rng.random(len(places)) < 0.5).astype(np.uint64), None) for _ in range(ranks)]
    parts = [part._replace(values=rng.integers(-9, 10, len(part.indices)).astype(np.float32)) for part in parts]
    streams = [sar.SparseStream(places[part.indices], part.values, size) for part in parts]
    for through_wire in (False, True):
        out = sar.simulate(streams, algorithm, through_wire=through_wire)
        assert len({bits(result) for result in out.outputs}) == 1
        result = out.outputs[0]
        assert result.indices.dtype == (np.uint32 if size == 2**32 else np.uint64)
        # The oracle works on the places that occur: position i of its vector is index places[i] of ours.
        occurring = sar.SparseStream(np.searchsorted(places, result.indices), result.values, len(places))
        assert_reduction(occurring, parts, len(places), SUM)


@every_algorithm
@given(case=cases(contents=(SMALL,)))
def test_no_message_is_larger_than_the_dense_form(algorithm, case):
    out = sar.simulate(case.streams, algorithm, op=case.operator)
    # The dense form, the mask of what is present in it, and the rounding up of both to 8 bytes.
    most = case.size * (np.dtype(case.dtype).itemsize * (case.width or 1) + 1 / 8) + 16
    payload = out.bytes_sent - out.header_bytes
    assert (payload <= out.header_bytes / HEADER_BYTES * most).all()
