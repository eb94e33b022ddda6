"""Plans: sums over index sets that stay, in the simulator and of one rank; what goes wrong over MPI is in `cases_plans.py`."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import Entries, assert_reduction, bits
from strategies import SMALL, cases, deliveries

import sparseallreduce as sar
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.fixed import FIXED
from sparseallreduce.runtime import fixed_plan
from sparseallreduce.runtime.simulator import machine_of, run

NETWORK = sar.Network(1e-5, 1e8, local_latency=1e-6, local_bandwidth=1e10)


def hosts(ranks):
    return st.one_of(st.integers(1, 8), st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))


class Simulated:
    """A plan of every rank, in the simulator."""

    def __init__(self, streams, op, algorithm, network=NETWORK, delivery=None, **options):
        self.network, self.ranks = network, len(streams)
        self.delivery = delivery
        shared = [SimpleNamespace(call=make_call(stream, op, algorithm, options)[0], channel=None) for stream in streams]
        arguments = zip(shared, streams, range(self.ranks), strict=True)
        machine = machine_of(network)
        layouts = [fixed_plan.lay_out(each, stream, rank, self.ranks, machine) for each, stream, rank in arguments]
        self.groups = [groups[0] for _, groups in run(layouts, network, delivery=delivery).outputs]
        self.results = [group.lay_out_results(self.ranks)[0] for group in self.groups]

    def sum(self, given, through_wire=False):
        """The results of all ranks; valid until the next sum."""
        for group, values in zip(self.groups, given, strict=True):
            group.take(0, values)
        schedules = [group.fixed.run(group.values) for group in self.groups]
        self.out = run(schedules, self.network, delivery=self.delivery, through_wire=through_wire)
        for group, sums in zip(self.groups, self.out.outputs, strict=True):
            group.finish(sums)
        return self.results


def reversed_values(case):
    """Other values at the same positions."""
    return [Entries(entries.indices, entries.values[::-1].copy()) for entries in case.entries]


@given(data=st.data(), case=cases(), algorithm=st.sampled_from([*FIXED, "auto"]), delivery=deliveries(), through_wire=st.booleans())
def test_every_sum_is_the_dense_reduction(data, case, algorithm, delivery, through_wire):
    network = NETWORK._replace(hosts=data.draw(hosts(case.ranks)))
    plan = Simulated(case.streams, case.operator, algorithm, network, delivery)
    for parts in (case.entries, reversed_values(case), case.entries):
        results = plan.sum([part.values for part in parts], through_wire)
        assert_reduction(results[0], parts, case.size, case.operator, case.exact)
        assert all(bits(result) == bits(results[0]) for result in results)
        assert results[0].stored <= max(results[0].switch_point, case.size)


@given(data=st.data(), case=cases(), algorithm=st.sampled_from(FIXED), delivery=deliveries())
def test_the_order_of_delivery_changes_no_bit(data, case, algorithm, delivery):
    network = NETWORK._replace(hosts=data.draw(hosts(case.ranks)))
    values = [part.values for part in case.entries]
    by_time = Simulated(case.streams, case.operator, algorithm, network).sum(values)
    otherwise = Simulated(case.streams, case.operator, algorithm, network, delivery).sum(values, through_wire=True)
    assert bits(by_time[0]) == bits(otherwise[0])


@pytest.mark.parametrize("algorithm", FIXED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_values_alone_travel(algorithm, ranks):
    rng, size, k = np.random.default_rng(ranks), 2**16, 1000
    streams = [sar.SparseStream(np.sort(rng.choice(size, k, replace=False)), np.ones(k, np.float32), size) for _ in range(ranks)]
    network = sar.Network(hosts=1 if algorithm != "hierarchical" else -(-ranks // 2))
    plan = Simulated(streams, "sum", algorithm, network)
    plan.sum([stream.values for stream in streams])
    general = sar.simulate(streams, algorithm, network, index_codec="plain")
    plain = (general.bytes_sent - general.header_bytes).max() / 2  # four bytes of eight
    assert plan.out.bytes_sent.max() - plan.out.header_bytes.max() <= plain
    assert plan.out.messages.max() <= general.messages.max()


def test_a_mean_is_divided_and_rows_and_wide_indices_are_summed():
    streams = [sar.SparseStream([rank, 2**33], np.float32([[1, rank], [2, 4]]), 2**33 + 1) for rank in range(3)]
    result = Simulated(streams, "mean", "ssar_recursive_doubling").sum([stream.values for stream in streams])[1]
    np.testing.assert_array_equal(result.indices, [0, 1, 2, 2**33])
    np.testing.assert_allclose(result.values, np.float32([[1, 0], [1, 1], [1, 2], [6, 12]]) / np.float32(3))


@given(case=cases(contents=(SMALL,)), codec=st.sampled_from(["float16", "qsgd8"]))
def test_values_that_are_sent_with_loss_are_the_same_on_all_ranks(case, codec):
    case = replace(case, dtype="float32", op="sum")
    encoding = fixed_plan.Encoding("plain", codec)
    for algorithm in FIXED:
        plan = Simulated(case.streams, "sum", algorithm, NETWORK._replace(hosts=2))
        for group, part in zip(plan.groups, case.entries, strict=True):
            group.take(0, part.values)
        out = run([group.fixed.run(group.values) for group in plan.groups], plan.network, through_wire=True, encoding=encoding)
        assert all(array.tobytes() == out.outputs[0].tobytes() for array in out.outputs)


def serial(stream, **options):
    return sar.allreduce_init(stream, sar.SERIAL, **options)


def test_a_plan_of_one_rank_takes_values_streams_and_lists():
    plan = serial(sar.SparseStream([1, 4], [1.0, 2.0], 8), fixed_indices=True)
    plan.start([3, 4])
    done, result = plan.test()
    assert done and result.to_dense().tolist() == [0, 3, 0, 0, 4, 0, 0, 0]
    plan.start(sar.SparseStream([1, 4], [5.0, 6.0], 8))
    assert plan.wait() is result  # the same stream, with other values
    assert result.values.tolist() == plan.wait().values.tolist() == [5, 6]
    assert not result.values.flags.writeable and not result.indices.flags.writeable
    several = serial([sar.SparseStream([1], [1.0], 8), sar.SparseStream([0, 2], np.int32([[1, 2], [3, 4]]), 3)], fixed_indices=True)
    several.start([[7.0], np.int32([[5, 6], [7, 8]])])
    first, second = several.wait()
    assert first.values.tolist() == [7] and second.to_dense().tolist() == [[5, 6], [0, 0], [7, 8]]
    free = serial(sar.SparseStream([1, 4], [1.0, 2.0], 8))
    free.start(sar.SparseStream([0], [1.0], 8))
    assert free.wait().indices.tolist() == [0]
    assert serial([], fixed_indices=True).start([]) is None


def test_a_dense_sum_has_the_dense_form_and_its_zeros_each_time():
    stream = sar.SparseStream.from_dense(np.arange(8.0))
    plan = serial(stream, fixed_indices=True)
    plan.start(sar.SparseStream.from_dense(2 * np.arange(8.0)))
    result = plan.wait()
    assert result.is_dense and result.to_dense().tolist() == (2 * np.arange(8.0)).tolist()
    plan.start(np.ones(7))
    assert plan.wait().to_dense().tolist() == [0, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    "given,error,text",
    [
        ([1.0], sar.StreamError, "takes values of shape"),
        ([1j, 2], sar.StreamTypeError, "for values of float64, not complex128"),
        (sar.SparseStream([1, 5], [1.0, 2.0], 8), sar.StreamError, "the 2 indices of the stream differ from the 2 of the plan"),
        (sar.SparseStream([1], [1.0], 8), sar.StreamError, "the 1 indices"),
        (sar.SparseStream([1, 4], [1.0, 2.0], 9), sar.StreamError, "are not those of the plan"),
        (sar.SparseStream.from_dense([0, 1.0, 1, 0, 2, 1, 1, 1]), sar.StreamError, "the 6 indices"),
    ],
)
def test_what_does_not_go_with_the_plan_is_refused_and_the_plan_goes_on(given, error, text):
    plan = serial(sar.SparseStream([1, 4], [1.0, 2.0], 8), fixed_indices=True)
    plan.start(given)
    with pytest.raises(error, match=text):
        plan.wait()
    plan.start([1, 2])
    assert plan.wait().values.tolist() == [1, 2]


def test_a_plan_is_waited_for_before_it_is_started_again():
    plan = serial(sar.SparseStream([1], [1.0], 8), fixed_indices=True)
    for call in (plan.test, plan.wait):
        with pytest.raises(sar.AlgorithmError, match="has not been started"):
            call()
    plan.start([1])
    with pytest.raises(sar.AlgorithmError, match="not waited for"):
        plan.start([1])
    plan.wait()
    plan.start([2])
    plan.free()
    with pytest.raises(sar.AlgorithmError, match="has been freed"):
        plan.wait()
    with pytest.raises(sar.AlgorithmError, match="has been freed"):
        plan.start([1])


@pytest.mark.parametrize(
    "arguments,text",
    [
        ({"algorithm": "ssar_ring"}, "fixed_indices goes with algorithm 'auto' or one of"),
        ({"algorithm": "hierarchical", "outer": "dense"}, "leave out outer"),
        ({"index_codec": "gaps"}, "leave out index_codec"),
        ({"timeout": 3}, "unknown option 'timeout'"),
        ({"progress": "often"}, "progress is 'manual' or 'thread'"),
    ],
)
def test_what_means_nothing_to_fixed_indices_is_refused(arguments, text):
    with pytest.raises(sar.AlgorithmError, match=text):
        serial(sar.SparseStream([1], [1.0], 8), fixed_indices=True, **arguments)


def test_a_plan_of_any_indices_is_of_one_kind_of_streams():
    plan = serial(sar.SparseStream([1], [1.0], 8))
    for strange in (sar.SparseStream([1], [1.0], 9), sar.SparseStream([1], np.float32([1]), 8)):
        plan.start(strange)
        with pytest.raises(sar.StreamError, match="are not those of the plan"):
            plan.wait()
    plan.start(np.ones(3))
    with pytest.raises(sar.StreamTypeError):
        plan.wait()
