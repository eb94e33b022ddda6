"""Every algorithm with every codec of positions and of values, in the simulator: what is exact stays so, and what is lost is bounded."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_reduction, bits
from strategies import REAL, SMALL, cases, deliveries
from thoroughness import examples

import sparseallreduce as sar
from sparseallreduce.streams.wire import CodedStream

ALGORITHMS = [name for name in sar.algorithms() if name != "auto"]
VALUE_CODECS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "qsgd8": 1 / 127, "qsgd4": 1 / 7}  # what one rounding loses, of the largest value
SLOW = sar.Network(latency=1e-6, bandwidth=1e7)  # on which a byte is worth a codec's time

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_value_codec = pytest.mark.parametrize("codec", VALUE_CODECS)
DENSITIES = st.sampled_from([None, 0.0, 1.0])
few = st.integers(1, 9)
index_codecs = st.sampled_from(["plain", "bitmap", "gaps", "auto"])


@every_algorithm
@given(case=cases(ranks=few), delivery=deliveries(), through_wire=st.booleans(), codec=index_codecs, density=DENSITIES)
def test_codecs_of_positions_change_no_bit(algorithm, case, delivery, through_wire, codec, density):
    by_name = {"outer": "ssar_split_allgather"} if algorithm == "hierarchical" else {}  # as "auto" goes by the network
    plain = sar.simulate(case.streams, algorithm, op=case.operator, switch_density=density, **by_name)
    options = by_name | {"index_codec": codec, "delivery": delivery, "through_wire": through_wire, "switch_density": density}
    out = sar.simulate(case.streams, algorithm, SLOW, case.operator, **options)
    assert {bits(result) for result in out.outputs} == {bits(result) for result in plain.outputs}


@given(case=cases(ranks=few), delivery=deliveries(), through_wire=st.booleans(), codec=index_codecs)
def test_auto_gives_the_reduction_with_every_codec(case, delivery, through_wire, codec):
    out = sar.simulate(case.streams, "auto", SLOW, case.operator, index_codec=codec, delivery=delivery, through_wire=through_wire)
    assert_reduction(out.outputs[0], case.entries, case.size, case.operator, case.exact)
    assert len({bits(result) for result in out.outputs}) == 1


def lossy_cases():
    drawn = cases(ranks=few, contents=(SMALL, REAL))
    return st.builds(lambda case, dtype: replace(case, op="sum", dtype=dtype), drawn, st.sampled_from(["float32", "float64"]))


@every_algorithm
@every_value_codec
@settings(max_examples=examples(20))
@given(case=lossy_cases(), delivery=deliveries(), through_wire=st.booleans(), index_codec=index_codecs, seed=st.integers(0, 2**64 - 1))
def test_what_is_lost_is_bounded_and_the_same_on_all_ranks_in_any_order(algorithm, codec, case, delivery, through_wire, index_codec, seed):
    options = {"value_codec": codec, "index_codec": index_codec, "seed": seed}
    out = sar.simulate(case.streams, algorithm, SLOW, delivery=delivery, through_wire=through_wire, **options)
    result = out.outputs[0]
    assert {bits(other) for other in out.outputs} == {bits(result)}
    again = sar.simulate(case.streams, algorithm, SLOW, **options)
    assert bits(again.outputs[0]) == bits(result)
    assert not isinstance(result, CodedStream)
    dense = [stream.to_dense().astype(np.float64) for stream in case.streams]
    off = np.abs(result.to_dense() - sum(dense))
    # A value is rounded on each rank, and so is each sum of several: less than 2 P roundings of what has grown by those before.
    largest, step = np.max(sum(map(np.abs, dense)), initial=0.0), VALUE_CODECS[codec] + 1e-6
    assert np.all(off <= (2 * case.ranks + 1) * (step * largest * (1 + step) ** (case.ranks + 2) + 2.0**-25))
    assert result.dtype == case.streams[0].dtype


@every_algorithm
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_sum_of_floats_of_16_bits_is_exact_where_they_hold_it(algorithm, op):
    for ranks in (2, 3, 4, 5, 8):
        rng = np.random.default_rng(ranks)
        arrays = [rng.integers(-20, 20, 3000) * (rng.random(3000) < 0.3) for _ in range(ranks)]
        streams = [sar.SparseStream.from_dense(array.astype(np.float32)) for array in arrays]
        for codec in ("float16", "bfloat16"):
            out = sar.simulate(streams, algorithm, SLOW, op, value_codec=codec, through_wire=True)
            expected = sum(arrays).astype(np.float32) / (np.float32(ranks) if op == "mean" else 1)
            for result in out.outputs:
                np.testing.assert_array_equal(result.to_dense(), expected)


@every_algorithm
@every_value_codec
def test_coded_values_take_fewer_bytes(algorithm, codec):
    rng = np.random.default_rng(0)
    streams = [sar.SparseStream.from_dense(rng.standard_normal(20_000) * (rng.random(20_000) < 0.3)) for _ in range(4)]
    exact = sar.simulate(streams, algorithm, SLOW)
    coded = sar.simulate(streams, algorithm, SLOW, value_codec=codec)
    assert coded.bytes_sent.sum() < exact.bytes_sent.sum() * 0.55


@every_algorithm
@pytest.mark.parametrize("network", [None, SLOW], ids=["fast", "slow"])
def test_what_is_counted_does_not_depend_on_whether_messages_are_made(algorithm, network):
    rng = np.random.default_rng(0)
    streams = [sar.SparseStream.from_dense(rng.standard_normal(30_000) * (rng.random(30_000) < 0.3)) for _ in range(3)]
    for codec in ("exact", "float16"):
        counted, made = (sar.simulate(streams, algorithm, network, value_codec=codec, through_wire=through) for through in (False, True))
        for name in ("bytes_sent", "bytes_received", "messages", "header_bytes", "times"):
            np.testing.assert_array_equal(getattr(counted, name), getattr(made, name))


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@every_algorithm
def test_a_value_beyond_the_codec_is_an_error_that_names_it(algorithm, ranks):
    streams = [sar.SparseStream([3, 60], [1.0, 2.0], 100) for _ in range(ranks)]
    for culprit in range(ranks):
        given = [*streams[:culprit], sar.SparseStream([3, 60], [1.0, 1e5], 100), *streams[culprit + 1 :]]
        for delivery in (None, 0, 1):
            with pytest.raises(sar.StreamError, match=r"at index 60 is beyond what value_codec='float16' can hold: scale the values"):
                sar.simulate(given, algorithm, value_codec="float16", delivery=delivery, through_wire=True)
            sar.simulate(given, algorithm, value_codec="bfloat16", delivery=delivery, through_wire=True)
    for bad in (np.nan, np.inf, -np.inf):
        given = [sar.SparseStream([3, 60], [1.0, bad], 100), *streams[1:]]
        for codec in ("qsgd8", "qsgd4"):
            with pytest.raises(sar.StreamError, match=rf"at index 60 is beyond what value_codec='{codec}' can hold"):
                sar.simulate(given, algorithm, value_codec=codec)
        for codec in ("float16", "bfloat16"):
            np.testing.assert_equal(sar.simulate(given, algorithm, value_codec=codec).outputs[0].to_dense()[60], bad)


def drawn(streams, algorithm, codec, seeds):
    """The sums for these seeds, one a row."""
    return np.array([sar.simulate(streams, algorithm, value_codec=codec, seed=seed).outputs[0].to_dense() for seed in seeds])


@pytest.mark.parametrize("codec, algorithm", [("qsgd8", "ssar_recursive_doubling"), ("qsgd4", "ssar_split_allgather")])
def test_the_mean_over_many_seeds_is_the_sum(codec, algorithm):
    seeds = examples(10_000)
    rng = np.random.default_rng(0)
    streams = [sar.SparseStream.from_dense(rng.standard_normal(12)) for _ in range(3)]
    exact = sum(stream.to_dense() for stream in streams)
    off = drawn(streams, algorithm, codec, range(seeds)) - exact
    error = off.std(axis=0) / np.sqrt(seeds)
    assert (np.abs(off.mean(axis=0)) < 4.5 * error + 1e-6).all()


@every_algorithm
def test_each_algorithm_is_unbiased_and_the_ranks_draw_apart(algorithm):
    """Of the same stream on all ranks: were their draws the same, the error of the sum would be P times theirs instead of its root."""
    stream = sar.SparseStream.from_dense(np.random.default_rng(0).standard_normal(64))
    off = drawn([stream] * 4, algorithm, "qsgd4", range(300)) - 4 * stream.to_dense()
    assert (np.abs(off.mean(axis=0)) < 6 * np.sqrt((off**2).mean() / 300)).all()
    one = np.abs(stream.values).max() / 7 / 2  # the most that the standard deviation of one rounding can be
    # Four roundings of ours, and of sums of two and of four, whose scale is as much larger.
    assert np.sqrt((off**2).mean()) < one * np.sqrt(4 * 1 + 3 * 4 + 2 * 16)


def test_seeds_draw_apart_and_one_seed_draws_the_same():
    stream = sar.SparseStream.from_dense(np.random.default_rng(0).standard_normal(2000))
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    results = {seed: sar.simulate([stream] * 3, "ssar_ring", value_codec="qsgd8", seed=seed).outputs[0] for seed in seeds}
    assert len({bits(result) for result in results.values()}) == len(seeds)
    for seed, result in results.items():
        again = sar.simulate([stream] * 3, "ssar_ring", value_codec="qsgd8", seed=np.uint64(seed))
        assert bits(again.outputs[0]) == bits(result)


REFUSED = [
    ({"value_codec": "qsgd8", "op": "max"}, "float32", sar.AlgorithmError, "value_codec='qsgd8' is for sums and means, not for 'max'"),
    ({"value_codec": "float16", "op": "prod"}, "float32", sar.AlgorithmError, "is for sums and means, not for 'prod'"),
    ({"value_codec": "float16"}, "int32", sar.StreamTypeError, "is for values of float32 and float64, not of int32: leave them exact"),
    ({"value_codec": "qsgd4"}, "float16", sar.StreamTypeError, "not of float16: leave them exact"),
    ({"value_codec": "float8"}, "float32", sar.AlgorithmError, "unknown value_codec 'float8': use one of exact, float16, bfloat16, qs"),
    ({"value_codec": None}, "float32", sar.AlgorithmError, "unknown value_codec None"),
    ({"index_codec": "rice"}, "float32", sar.AlgorithmError, "unknown index_codec 'rice': use one of plain, bitmap, gaps, auto"),
    ({"index_codec": ["gaps"]}, "float32", sar.AlgorithmError, r"unknown index_codec \['gaps'\]"),
    ({"seed": -1}, "float32", sar.AlgorithmError, r"seed is an integer from 0 to 2\*\*64 - 1, not -1"),
    ({"seed": 2**64}, "float32", sar.AlgorithmError, "not 18446744073709551616"),
    ({"seed": 1.0}, "float32", sar.AlgorithmError, "not 1.0"),
    ({"seed": "1"}, "float32", sar.AlgorithmError, "not '1'"),
    ({"seed": None}, "float32", sar.AlgorithmError, "not None"),
]


@pytest.mark.parametrize("options, dtype, error, text", REFUSED, ids=[str(options) for options, *_ in REFUSED])
def test_options_that_make_no_sense_are_refused(options, dtype, error, text):
    streams = [sar.SparseStream([1, 4], np.ones(2, dtype), 9)] * 2
    for algorithm in sar.algorithms():
        with pytest.raises(error, match=text):
            sar.simulate(streams, algorithm, **options)
    with pytest.raises(error, match=text):
        sar.allreduce(streams[0], sar.SERIAL, **options)
