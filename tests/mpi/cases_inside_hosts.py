"""Hierarchical sums and HiTopK on hosts of several ranks that share memory, all on one machine: a duplicate whose ranks are told so.

Whatever way the ranks of a host take, each by itself, the result is that of messages to the bit.
"""

import gc
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
from cases_faults import outcome_of
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import DTYPES, Inputs, check_usable, raise_what_may_be_owed, same_everywhere, simulated_once

import sparseallreduce as sar
from sparseallreduce.runtime import inside_hosts, setup
from sparseallreduce.runtime.communicators import channel_of
from sparseallreduce.runtime.hosts import this_place
from sparseallreduce.runtime.memory import host
from sparseallreduce.runtime.memory.host import HostMemory
from sparseallreduce.runtime.memory.mapping import Mapping, SharedFile
from sparseallreduce.runtime.memory.parts import PartsLayout

RANKS = (2, 3, 4, 5, 8)
LAYOUTS = {  # the host of a rank
    "one": lambda rank: 0,
    "blocks": lambda rank: rank // 2,
    "round-robin": lambda rank: rank % 2,
    "uneven": lambda rank: int(rank >= 3),
}
HIERARCHICAL = {"algorithm": "hierarchical", "inner": "split", "outer": "ssar_recursive_doubling"}  # whatever is measured


@contextmanager
def on_hosts(comm, layout="blocks", shared=True, least=1):
    """A duplicate whose ranks take themselves to be on hosts, and take memory from ``least`` bytes on."""
    name = bytes([LAYOUTS[layout](comm.rank)]) * 8
    no_memory = nullcontext() if shared else mock.patch.object(setup, "HostMemory", side_effect=OSError)
    with mock.patch.object(setup, "this_place", return_value=this_place()._replace(memory=name)), no_memory:
        own = comm.Dup()
        check_usable(own)
    with mock.patch.object(inside_hosts, "_LEAST", least):
        yield own
        own.Barrier()
    own.Free()


def counted(owner, name):
    return mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))


def has_neighbours(comm):
    return channel_of(comm).host_memory is not None


def has_parts_for_others(comm):
    """Whether another rank of the host adds up something of this one's."""
    memory, lanes = channel_of(comm).host_memory, channel_of(comm).hosts.lanes
    return memory is not None and (lanes > 1 or memory.place > 0)


@on_ranks(2, 3, 5, 8)
@limit(120)
@each(layout=LAYOUTS, blocking=[True, False])
def case_result_is_that_of_messages_to_the_bit(comm, layout, blocking):
    call = sar.allreduce if blocking else lambda *args, **options: sar.iallreduce(*args, **options).wait()
    kinds = [Inputs(comm.size, 500, dtype) for dtype in DTYPES[blocking :: 2 if comm.size < 4 else 4]]
    kinds += [Inputs(comm.size, 0), Inputs(comm.size, 3), Inputs(comm.size, 400, "float32", width=3, seed=1)]
    kinds += [Inputs(comm.size, 9000, "float32", seed=2, entries=300), Inputs(comm.size, 2000, seed=3)]
    spies = counted(inside_hosts, "write_parts"), counted(PartsLayout, "stream")
    with on_hosts(comm, layout) as shared, on_hosts(comm, layout, shared=False) as messages, spies[0] as written, spies[1] as laid:
        assert not has_neighbours(messages)
        for inputs in kinds:
            for op in ("sum", "max", "mean") if inputs.dtype.startswith("float") else ("sum", "prod"):
                for stream in (inputs.stream(comm.rank), inputs.dense_form(comm.rank)):
                    results = [call(stream, each, op, **HIERARCHICAL) for each in (shared, messages)]
                    ours = same_everywhere(comm, *results)
                    assert ours[0] == ours[1]
                    inputs.check(results[0], op) if op != "mean" else None
        assert laid.called == has_neighbours(shared)
        assert comm.allreduce(written.called) == comm.allreduce(has_parts_for_others(shared))


@each(inner=["split", "ssar_recursive_doubling"], outer=["ssar_ring", "dsar_split_allgather", "dense"], layout=["blocks", "uneven"])
def case_any_algorithm_goes_with_it(comm, inner, outer, layout):
    inputs = Inputs(comm.size, 3000, "float32", seed=4, entries=400)
    with on_hosts(comm, layout) as shared, on_hosts(comm, layout, shared=False) as messages:
        options = {"algorithm": "hierarchical", "inner": inner, "outer": outer}
        results = [sar.allreduce(inputs.stream(comm.rank), each, **options) for each in (shared, messages)]
    inputs.check(results[0])
    ours = same_everywhere(comm, *results)
    assert ours[0] == ours[1]


@each(layout=LAYOUTS, codec=["float16", "qsgd8"])
def case_values_are_exact_inside_a_host(comm, layout, codec):
    inputs = Inputs(comm.size, 3000, "float32", seed=5, entries=400)
    options = {"value_codec": codec, "seed": 3, **HIERARCHICAL}
    with on_hosts(comm, layout) as shared, on_hosts(comm, layout, shared=False) as messages:
        ours = same_everywhere(comm, *[sar.allreduce(inputs.stream(comm.rank), each, **options) for each in (shared, messages)])
    assert ours[0] == ours[1]


@each(layout=["blocks", "round-robin", "uneven"], operations=[4, 11])
def case_operations_in_flight_keep_apart(comm, layout, operations):
    """Completed in another order on each rank, sparse and dense, small and large, more than there are slots."""
    kinds = [Inputs(comm.size, 4000, "float32", seed=n, entries=(20, 700, 3000)[n % 3]) for n in range(operations)]
    with on_hosts(comm, layout) as own:
        started = [sar.iallreduce(inputs.stream(comm.rank), own, **HIERARCHICAL) for inputs in kinds]
        results = {number: started[number].wait() for number in np.random.default_rng(comm.rank).permutation(operations)}
        for number, inputs in enumerate(kinds):
            inputs.check(results[number])
            same_everywhere(comm, results[number])
        check_usable(own, "hierarchical")


def case_a_test_does_not_wait(comm):
    """A rank that looks for a result goes on at once while its neighbour has not come."""
    with on_hosts(comm, "one") as own:
        inputs = Inputs(comm.size, 4000, "float32", entries=700)
        if comm.rank:
            comm.Barrier()
        request = sar.iallreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
        if not comm.rank:
            assert not any(request.test()[0] for _ in range(50))
            comm.Barrier()
        inputs.check(request.wait())


def case_a_list_takes_the_memory_for_each_of_its_groups(comm):
    kinds = [Inputs(comm.size, 4000, dtype, seed=6, entries=900) for dtype in ("float32", "float64", "int64")]
    with on_hosts(comm) as own, counted(inside_hosts, "write_parts") as written:
        for _ in range(3):
            results = sar.allreduce([inputs.stream(comm.rank) for inputs in kinds], own, **HIERARCHICAL)
            for inputs, result in zip(kinds, results, strict=True):
                inputs.check(result)
            same_everywhere(comm, *results)
        assert written.called == has_parts_for_others(own)


def case_communicators_have_memory_of_their_own(comm):
    """Parts of the ranks, each across hosts, at the same time as all."""
    inputs = Inputs(comm.size, 4000, "float32", seed=7, entries=900)
    parts = [rank for rank in range(comm.size) if rank * 2 // comm.size == comm.rank * 2 // comm.size]
    few = Inputs(len(parts), 4000, "float32", seed=8, entries=900)
    with on_hosts(comm, "round-robin") as own:
        name = bytes([comm.rank % 2]) * 8
        with mock.patch.object(setup, "this_place", return_value=this_place()._replace(memory=name)):
            part = own.Split(comm.rank * 2 // comm.size, comm.rank)
            check_usable(part)
        for _ in range(6):
            requests = [sar.iallreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)]
            requests.append(sar.iallreduce(few.stream(part.rank), part, **HIERARCHICAL))
            whole, ours = [request.wait() for request in requests[:: 1 if comm.rank % 2 else -1]][:: 1 if comm.rank % 2 else -1]
            inputs.check(whole)
            few.check(ours)
        part.Free()


@each(entries=[60, 3000])
def case_results_that_are_kept_stay_as_they_are(comm, entries):
    """Also more of them than there are blocks; nobody can write to them; and they outlive the communicator."""
    kept = []
    with on_hosts(comm) as own:
        for seed in range(2 * host.KEPT + 3):
            inputs = Inputs(comm.size, 4000, "float32", seed=seed, entries=entries)
            kept.append((inputs, sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)))
            if seed % 5 == comm.rank % 5:
                kept.pop(comm.rank % len(kept))
        for inputs, result in kept:
            inputs.check(result)
        assert any(lies_in_memory_of_all(result._stored) for _, result in kept) == has_neighbours(own)
    for inputs, result in kept:
        inputs.check(result)
        assert not result.values.flags.writeable
        if lies_in_memory_of_all(result._stored):
            with np.testing.assert_raises(ValueError):
                result._stored.flags.writeable = True


def lies_in_memory_of_all(array):
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return isinstance(array, Mapping)


@each(entries=[60, 3000])
def case_a_loop_takes_memory_once(comm, entries):
    with on_hosts(comm) as own, counted(SharedFile, "reserve") as reserve:
        for seed in range(12):
            inputs = Inputs(comm.size, 4000, "float32", seed=seed % 3, entries=entries)
            result = sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
            if seed == 5:
                reserve.reset_mock()
        assert not reserve.called
        inputs.check(result)
        del result


@each(what=["reserve", "map", "both"], where=["first", "last", "all"])
def case_a_rank_that_has_no_memory_gets_the_same(comm, what, where):
    """Neither for its row or the result, nor address space for what others have written."""
    inputs = Inputs(comm.size, 4000, "float32", seed=9, entries=900)
    here = {"first": comm.rank == 0, "last": comm.rank == comm.size - 1, "all": True}[where]
    with on_hosts(comm) as own, on_hosts(comm, shared=False) as messages:
        wanted = sar.allreduce(inputs.stream(comm.rank), messages, **HIERARCHICAL)
        refuse = mock.patch.object(SharedFile, "reserve", return_value=False) if what != "map" else nullcontext()
        lost = mock.patch.object(SharedFile, "map", side_effect=OSError("no address space")) if what != "reserve" else nullcontext()
        with refuse if here else nullcontext(), lost if here else nullcontext():
            results = [sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL) for _ in range(3)]
        ours = same_everywhere(comm, wanted, *results)
        assert len({str(each) for each in ours}) == 1
        assert [each.to_dense().tobytes() for each in results] == [wanted.to_dense().tobytes()] * 3


@each(where=[0, 1])
def case_hosts_without_such_memory_send_messages(comm, where):
    """One of the hosts, whose ranks all know."""
    name, here = bytes([comm.rank // 2]) * 8, comm.rank // 2 == where
    refused = mock.patch.object(setup, "HostMemory", wraps=HostMemory, side_effect=OSError) if here else nullcontext()
    with mock.patch.object(setup, "this_place", return_value=this_place()._replace(memory=name)):
        own = comm.Dup()
        patched = mock.patch.object(HostMemory, "__init__", side_effect=OSError) if here else nullcontext()
        with patched:
            check_usable(own)
    assert refused is not None
    assert not (here and has_neighbours(own))
    inputs = Inputs(comm.size, 4000, "float32", seed=10, entries=900)
    result = sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
    inputs.check(result)
    same_everywhere(comm, result)
    own.Free()


@on_ranks(2, 5)
@limit(40)
@each(where=["write_parts", "read_part", "write", "stream"], error=[MemoryError, KeyboardInterrupt], culprit=[0, 1], blocking=[True, False])
def case_failure_inside_a_host_is_everyones(comm, where, error, culprit, blocking):
    """In one of several operations, on one rank; those before and behind it are right, and nothing is left in use."""
    if comm.size < 2:
        skip("needs two ranks")
    kinds = [Inputs(comm.size, 4000, "float32", seed=n, entries=900) for n in range(3)]
    with on_hosts(comm, "round-robin" if comm.size > 3 else "one") as own:
        owner = PartsLayout if where in ("write", "stream") else inside_hosts
        original, calls = getattr(owner, where), []

        def struck(*args, **options):
            calls.append(None)
            if comm.rank == culprit and len(calls) == 2:
                raise error("struck")
            return original(*args, **options)

        with mock.patch.object(owner, where, struck):
            outcomes = []
            if blocking:
                for inputs in kinds:
                    outcomes.append(outcome_of_call(lambda inputs=inputs: sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)))
            else:
                requests = [start(lambda inputs=inputs: sar.iallreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)) for inputs in kinds]
                outcomes = [outcome_of_call(request.wait) for request in requests]
        for inputs, outcome in zip(kinds, outcomes, strict=True):
            if isinstance(outcome, sar.SparseStream):
                inputs.check(outcome)
        told = comm.allgather([None if isinstance(outcome, sar.SparseStream) else str(outcome) for outcome in outcomes])
        for texts in zip(*told, strict=True):
            assert len({text for text in texts if text not in (None, "struck")}) <= 1, told
        struck_at = [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, sar.SparseStream)]
        if len(calls) > 1 and comm.rank == culprit:
            assert struck_at
        raise_what_may_be_owed(comm, outcomes, own)
        for seed in range(10):
            inputs = Inputs(comm.size, 4000, "float32", seed=seed, entries=900)
            inputs.check(sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL))
        requests = outcomes = outcome = None
        gc.collect()
        comm.Barrier()
        sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
        if has_neighbours(own):
            assert channel_of(own).host_memory._leases.held() == 0


def start(call):
    """The request; an interrupt strikes whoever starts it, too."""
    try:
        return call()
    except KeyboardInterrupt as error:
        return mock.Mock(wait=mock.Mock(side_effect=error))


def outcome_of_call(call):
    try:
        return call()
    except (sar.SparseAllreduceError, MemoryError, KeyboardInterrupt) as error:
        return error


@on_ranks(2, 4)
def case_who_is_missing_is_named(comm):
    """A rank that waits in vain for a neighbour says for whom."""
    inputs = Inputs(comm.size, 4000, "float32", seed=11, entries=900)
    with on_hosts(comm, "one") as own:
        sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
        original = inside_hosts._reduce_scatter

        def never(*args):
            yield from original(*args) if comm.rank != 1 else inside_hosts._until(lambda: False)

        with mock.patch.object(inside_hosts, "_reduce_scatter", never):
            request = sar.iallreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
            outcome = outcome_of(request) if comm.rank == 1 else outcome_of_call(lambda: request.wait(timeout=0.5))
        assert isinstance(outcome, sar.WaitTimeoutError) and "rank 1 has not sent an expected message" in str(outcome), outcome
        check_usable(own, "hierarchical")


@each(layout=LAYOUTS, blocking=[True, False])
def case_hitopk_is_as_simulated(comm, layout, blocking):
    size, k = 3000, 60
    gradients = [np.random.default_rng([3, rank]).standard_normal((3, size)) for rank in range(comm.size)]
    network = sar.Network(hosts=[LAYOUTS[layout](rank) for rank in range(comm.size)])
    simulated = [sar.ErrorFeedback(sar.HiTopK(size, k), dtype=np.float64) for _ in range(comm.size)] if comm.rank == 0 else []
    with on_hosts(comm, layout) as own, counted(inside_hosts, "write_parts") as written:
        feedback = sar.ErrorFeedback(sar.HiTopK(size, k), dtype=np.float64)
        for step in range(3):
            update = feedback.step(gradients[comm.rank][step], own)
            wanted = simulated_once(
                comm, lambda step=step: sar.simulate([each[step] for each in gradients], simulated, network).outputs
            )
            assert update.to_dense().tobytes() == wanted.to_dense().tobytes()
        assert written.called == has_parts_for_others(own)


def case_bytes_are_counted_as_by_messages(comm):
    inputs = Inputs(comm.size, 4000, "float32", seed=12, entries=900)
    found = []
    for shared in (True, False):
        with on_hosts(comm, "one", shared) as own:
            with sar.trace() as trace:
                sar.allreduce(inputs.stream(comm.rank), own, **HIERARCHICAL)
            found.append((trace.bytes_sent - trace.header_bytes, trace.messages))
    assert found[0] == found[1]
