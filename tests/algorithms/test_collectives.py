"""reduce, reduce_scatter, allgather and bcast in the simulator: right results, the same bits in any order of delivery, inputs untouched."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Entries, assert_reduction, bits
from strategies import SMALL, cases, deliveries

import sparseallreduce as sar
from sparseallreduce.streams.operator import SUM

COLLECTIVES = ("reduce", "reduce_scatter", "allgather", "bcast")
NAMES = [(collective, algorithm) for collective in COLLECTIVES for algorithm in sar.algorithms(collective)]
every_algorithm = pytest.mark.parametrize(("collective", "algorithm"), NAMES)
some, few = settings(max_examples=30), settings(max_examples=12)  # of a hundred: the steps are those of allreduces, which get as many
DENSITIES = st.sampled_from([None, None, 0.0, 0.0625, 1.0])
HOSTS = st.sampled_from([None, 2, 3])


def of(collective):
    return pytest.mark.parametrize("algorithm", sar.algorithms(collective))


def bounds_of(draw, size, ranks):
    """Bounds of ranges, some of which may be empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1))), size]


def part_of(entries, lo, hi):
    inside = (entries.indices >= lo) & (entries.indices < hi)
    return Entries(entries.indices[inside] - np.uint64(lo), entries.values[inside])


@of("reduce")
@some
@given(data=st.data(), case=cases(), delivery=deliveries(), through_wire=st.booleans(), density=DENSITIES, hosts=HOSTS)
def test_the_root_alone_gets_the_dense_reduction(algorithm, data, case, delivery, through_wire, density, hosts):
    root = data.draw(st.integers(0, case.ranks - 1))
    out = sar.simulate(
        case.streams, algorithm, sar.Network(hosts=hosts), case.operator, collective="reduce", root=root, delivery=delivery,
        through_wire=through_wire, switch_density=density,
    )
    assert [rank for rank, output in enumerate(out.outputs) if output is not None] == [root]
    assert_reduction(out.outputs[root], case.entries, case.size, case.operator, case.exact)


@of("reduce_scatter")
@some
@given(data=st.data(), case=cases(), delivery=deliveries(), through_wire=st.booleans(), density=DENSITIES, hosts=HOSTS)
def test_every_rank_gets_its_range_of_the_dense_reduction(algorithm, data, case, delivery, through_wire, density, hosts):
    bounds = data.draw(st.one_of(st.none(), st.composite(bounds_of)(case.size, case.ranks)))
    out = sar.simulate(
        case.streams, algorithm, sar.Network(hosts=hosts), case.operator, collective="reduce_scatter", bounds=bounds, delivery=delivery,
        through_wire=through_wire, switch_density=density,
    )
    even = [case.size * rank // case.ranks for rank in range(case.ranks + 1)]
    for output, (lo, hi) in zip(out.outputs, pairwise(even if bounds is None else bounds), strict=True):
        assert output.size == output.extent == hi - lo
        assert_reduction(output, [part_of(entries, lo, hi) for entries in case.entries], hi - lo, case.operator, case.exact)
        assert output.stored <= output.switch_point or output.is_dense


@of("allgather")
@few
@given(case=cases(), delivery=deliveries(), through_wire=st.booleans(), density=DENSITIES)
def test_ranges_are_joined_in_the_order_of_the_ranks(algorithm, case, delivery, through_wire, density):
    streams = [
        sar.SparseStream(entries.indices[: rank + 1], entries.values[: rank + 1], case.size + rank)
        for rank, entries in enumerate(case.entries)
    ]
    out = sar.simulate(
        streams, algorithm, collective="allgather", delivery=delivery, through_wire=through_wire, switch_density=density
    )
    offsets = np.cumsum([0, *(stream.size for stream in streams)])
    moved = [Entries(stream.indices + np.uint64(at), stream.values) for stream, at in zip(streams, offsets)]
    assert_reduction(out.outputs[0], moved, int(offsets[-1]), SUM)
    assert all(bits(output) == bits(out.outputs[0]) for output in out.outputs)


@of("allgather")
@few
@given(case=cases(), delivery=deliveries(), through_wire=st.booleans(), density=DENSITIES)
def test_streams_are_joined_by_an_operator(algorithm, case, delivery, through_wire, density):
    out = sar.simulate(
        case.streams, algorithm, collective="allgather", join=case.operator, delivery=delivery, through_wire=through_wire,
        switch_density=density,
    )
    assert_reduction(out.outputs[0], case.entries, case.size, case.operator, case.exact)
    assert all(bits(output) == bits(out.outputs[0]) for output in out.outputs)


@of("allgather")
@few
@given(case=cases(contents=(SMALL,)), density=DENSITIES)
def test_disjoint_streams_are_joined_and_others_are_an_error(algorithm, case, density):
    nonzero = [entries._replace(values=np.where(entries.values == 0, 1, entries.values).astype(case.dtype)) for entries in case.entries]
    streams = [sar.SparseStream(*entries, case.size) for entries in nonzero]  # zeros would be no entries in a dense form
    taken = [index for entries in nonzero for index in entries.indices.tolist()]
    options = {"collective": "allgather", "join": "disjoint", "switch_density": density}
    if len(set(taken)) == len(taken):
        for output in sar.simulate(streams, algorithm, **options).outputs:
            assert_reduction(output, nonzero, case.size, SUM)
        return
    position = min(index for index in taken if taken.count(index) > 1)
    first, second = [rank for rank, entries in enumerate(nonzero) if position in entries.indices][:2]
    with pytest.raises(sar.MismatchError, match=f"ranks {first} and {second} both have an entry at position {position}"):
        sar.simulate(streams, algorithm, **options)


@of("bcast")
@few
@given(data=st.data(), case=cases(), delivery=deliveries(), through_wire=st.booleans(), hosts=HOSTS)
def test_every_rank_gets_the_stream_of_the_root(algorithm, data, case, delivery, through_wire, hosts):
    root = data.draw(st.integers(0, case.ranks - 1))
    others = data.draw(st.sampled_from([None, sar.SparseStream([3], [1], 7)]))
    streams = [case.streams[root] if rank == root else others for rank in range(case.ranks)]
    out = sar.simulate(
        streams, algorithm, sar.Network(hosts=hosts), collective="bcast", root=root, delivery=delivery, through_wire=through_wire
    )
    given = case.streams[root]
    for output in out.outputs:
        assert bits(output) == bits(out.outputs[0])
        assert (output.size, output.dtype, output.width, output.is_dense) == (given.size, given.dtype, given.width, given.is_dense)
        assert output.indices.tobytes() == given.indices.tobytes() and output.values.tobytes() == given.values.tobytes()


def inputs(collective, case):
    return [case.streams[0], *[None] * (case.ranks - 1)] if collective == "bcast" else case.streams


@every_algorithm
@few
@given(case=cases(), delivery=deliveries())
def test_the_order_of_delivery_changes_no_bit_and_no_input(collective, algorithm, case, delivery):
    given, before = inputs(collective, case), [bits(stream) for stream in case.streams]
    flags = [stream._stored.flags.writeable for stream in case.streams]
    how = {"op": case.operator, "collective": collective, "join": case.operator}
    by_time = sar.simulate(given, algorithm, **how)
    otherwise = sar.simulate(given, algorithm, delivery=delivery, through_wire=True, **how)
    for ours, theirs in zip(by_time.outputs, otherwise.outputs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert bits(ours) == bits(theirs)
            assert not ours.values.flags.writeable
            assert not any(ours.overlaps(stream) for stream in case.streams)
    np.testing.assert_array_equal(by_time.bytes_sent, otherwise.bytes_sent)
    np.testing.assert_array_equal(by_time.messages, otherwise.messages)
    assert [bits(stream) for stream in case.streams] == before
    assert [stream._stored.flags.writeable for stream in case.streams] == flags


@every_algorithm
@few
@given(case=cases(contents=(SMALL,)), delivery=deliveries())
def test_a_mean_is_the_sum_divided_by_the_number_of_ranks(collective, algorithm, case, delivery):
    if np.dtype(case.dtype).kind == "i" or collective == "bcast":
        return
    how = {"collective": collective, "delivery": delivery}
    sums, means = (sar.simulate(case.streams, algorithm, op=op, join=op, **how).outputs for op in ("sum", "mean"))
    for total, mean in zip(sums, means, strict=True):
        if total is not None:
            with np.errstate(all="ignore"):
                expected = (total.to_dense() / total.dtype.type(case.ranks)).astype(total.dtype)
            assert mean.to_dense().tobytes() == expected.tobytes()


@every_algorithm
@pytest.mark.parametrize("codec", ["float16", "qsgd8"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_values_that_lose_digits_are_the_same_on_all_ranks_and_near(collective, algorithm, codec, ranks):
    rng = np.random.default_rng(ranks)
    streams = [sar.SparseStream(np.sort(rng.choice(900, 60, replace=False)), rng.standard_normal(60), 900) for _ in range(ranks)]
    given = [streams[0], *[None] * (ranks - 1)] if collective == "bcast" else streams
    how = {"collective": collective, "join": "sum", "value_codec": codec}
    out = sar.simulate(given, algorithm, sar.Network(hosts=1), through_wire=True, **how)
    exact = sar.simulate(given, algorithm, collective=collective, join="sum")
    for ours, theirs in zip(out.outputs, exact.outputs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_allclose(ours.to_dense(), theirs.to_dense(), atol=0.01 * ranks if codec == "float16" else 0.5 * ranks)
    if collective in ("allgather", "bcast"):
        assert len({bits(output) for output in out.outputs}) == 1
    if ranks > 1 and codec == "float16":
        assert out.bytes_sent.sum() < sar.simulate(given, algorithm, through_wire=True, collective=collective, join="sum").bytes_sent.sum()


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("size", [2**32, 2**40])
def test_dimensions_beyond_32_bits(ranks, size):
    streams = [sar.SparseStream([rank, size // 2, size - 1 - rank], [1.0, 2.0, 3.0], size) for rank in range(ranks)]
    total = sar.simulate(streams).outputs[0]
    for algorithm in sar.algorithms("reduce"):
        assert sar.simulate(streams, algorithm, collective="reduce").outputs[0] == total
    for algorithm in sar.algorithms("reduce_scatter"):
        parts = sar.simulate(streams, algorithm, collective="reduce_scatter", through_wire=True).outputs
        assert {part.indices.dtype.name for part in parts} == {"uint64" if size // ranks > 2**32 else "uint32"}
        for gather in sar.algorithms("allgather"):
            assert sar.simulate(parts, gather, collective="allgather").outputs[ranks - 1] == total


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_what_is_scattered_and_gathered_is_the_allreduce(ranks):
    rng = np.random.default_rng(ranks)
    streams = [sar.SparseStream(np.sort(rng.choice(100, 30, replace=False)), rng.integers(1, 9, 30), 100) for _ in range(ranks)]
    parts = sar.simulate(streams, collective="reduce_scatter").outputs
    assert sar.simulate(parts, collective="allgather").outputs[0] == sar.simulate(streams).outputs[0]


BAD = [
    ("reduce", {"root": 3}, "root is a rank, from 0 to 2, not 3"),
    ("reduce", {"root": -1}, "root is a rank"),
    ("bcast", {"root": True}, "root is a rank"),
    ("bcast", {"root": "0"}, "root is a rank"),
    ("reduce_scatter", {"bounds": [0, 4, 8]}, "bounds are 4 integers for 3 ranks"),
    ("reduce_scatter", {"bounds": 8}, "bounds are 4 integers"),
    ("reduce_scatter", {"bounds": [0, 1.5, 4, 8]}, "bounds are 4 integers"),
    ("reduce_scatter", {"bounds": [0, 5, 4, 8]}, "bounds increase from 0 to the size of the stream, 8"),
    ("reduce_scatter", {"bounds": [1, 4, 5, 8]}, "bounds increase"),
    ("reduce_scatter", {"bounds": [0, 4, 5, 9]}, "bounds increase"),
    ("allgather", {"join": "side by side"}, "join is 'ranges', 'disjoint', or an operator such as 'sum', not 'side by side'"),
    ("reduce", {"algorithm": "ssar_ring"}, "'ssar_ring' of reduce: use one of tree, split, auto .that is an algorithm of allreduce"),
    ("bcast", {"algorithm": "scater"}, "did you mean 'scatter'"),
    ("reduce", {"op": "avg"}, "unknown operator"),
    ("reduce_scatter", {"group_size": 2}, "unknown option 'group_size'"),
    ("gather", {}, "unknown collective 'gather': use one of allreduce, reduce, reduce_scatter, allgather, bcast"),
]


@pytest.mark.parametrize(("collective", "options", "text"), BAD, ids=lambda value: str(value)[:30])
def test_wrong_arguments_are_errors(collective, options, text):
    with pytest.raises(sar.AlgorithmError, match=text):
        sar.simulate([sar.SparseStream([1], [1.0], 8)] * 3, collective=collective, **options)


@pytest.mark.parametrize("given", [[1.0], None, [sar.SparseStream([1], [1.0], 8)]], ids=["array", "None", "list"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_no_stream_is_an_error(collective, given):
    with pytest.raises(sar.StreamTypeError, match=f"{collective} takes (a|one) SparseStream"):
        sar.simulate([given, sar.SparseStream([1], [1.0], 8)], collective=collective)


@pytest.mark.parametrize(
    ("collective", "other", "term"),
    [
        ("reduce", sar.SparseStream([1], [1.0], 9), "size"),
        ("reduce_scatter", sar.SparseStream([1], [1], 8), "dtype"),
        ("allgather", sar.SparseStream([1], [[1.0]], 8), "row width"),
    ],
)
def test_ranks_that_differ_are_an_error(collective, other, term):
    with pytest.raises(sar.MismatchError, match=f"disagree on the {term}"):
        sar.simulate([sar.SparseStream([1], [1.0], 8), other], collective=collective)
