"""Plans over MPI: many sums with the same indices, several in flight, and whatever goes wrong on one rank is everyone's."""

import time

import numpy as np
from cases_far import between_hosts
from cases_faults import failing, needs_two, outcome_of
from cases_promises import interrupted, outcome_of_call, same_text, the_next_work
from mpi_cases import each, limit, on_ranks, skip
from mpi_inputs import DTYPES, Inputs, check_usable, hear_from, raise_what_is_owed, same_everywhere, tell_the_others

import sparseallreduce as sar
from sparseallreduce.algorithms import fixed
from sparseallreduce.algorithms.fixed import FIXED
from sparseallreduce.streams import wire

RANKS = (2, 3)  # of faults


def all_inputs(ranks):
    yield from (Inputs(ranks, 500, dtype) for dtype in DTYPES)
    yield Inputs(ranks, 0)
    yield Inputs(ranks, 3)
    yield Inputs(ranks, 400, "float32", width=3, seed=1)
    yield Inputs(ranks, 200_000, "float32", seed=2, entries=30_000)


def planned(inputs, comm, **options):
    return sar.allreduce_init(inputs.stream(comm.rank), comm, fixed_indices=True, **options)


def completed(plan, how):
    if how == "wait":
        return plan.wait()
    while not (told := plan.test())[0]:
        time.sleep(0)
    return told[1]


@limit(60)
@each(algorithm=[*FIXED, "auto"], how=["wait", "test"])
def case_every_sum_of_a_plan_is_right(comm, algorithm, how):
    for inputs in all_inputs(comm.size):
        for op in ("sum", "max") if inputs.size == 500 else ("sum",):
            plan = planned(inputs, comm, op=op, algorithm=algorithm)
            ours = inputs.parts[comm.rank].values
            for factor in (1, 2, 1):
                plan.start(ours * ours.dtype.type(factor) if op == "sum" else ours)
                result = completed(plan, how)
            inputs.check(result, op)
            same_everywhere(comm, result)
            assert not result.values.flags.writeable
            plan.free()
    check_usable(comm)


@each(algorithm=FIXED, ranks_a_host=[1, 2])
def case_a_plan_between_hosts_is_that_of_one_host_to_the_bit(comm, algorithm, ranks_a_host):
    if comm.size == 1:
        skip("there is one host")
    for inputs in (Inputs(comm.size, 6000, "float32", seed=2, entries=300), Inputs(comm.size, 400, width=3)):
        results = []
        near = planned(inputs, comm, algorithm=algorithm)
        near.start(inputs.parts[comm.rank].values)
        results.append(near.wait())
        with between_hosts(comm, ranks_a_host):
            plan = planned(inputs, comm, algorithm=algorithm)
            for _ in range(2):
                plan.start(inputs.stream(comm.rank))
                results.append(plan.wait())
                inputs.check(results[-1])
        assert len(set(map(bytes, (result.values for result in results)))) == 1
        same_everywhere(comm, *results)


@each(way=["fixed", "any"])
def case_several_plans_are_in_flight_and_waited_for_in_any_order(comm, way):
    kinds = enumerate([(900, "float32"), (70_000, "float64"), (40, "int64")])
    several = [Inputs(comm.size, size, dtype, seed=seed, entries=size // 9) for seed, (size, dtype) in kinds]
    plans = [sar.allreduce_init(inputs.stream(comm.rank), comm, fixed_indices=way == "fixed") for inputs in several]
    for turn in range(3):
        for plan, inputs in zip(plans, several, strict=True):
            plan.start(inputs.stream(comm.rank))
        request = sar.iallreduce(several[0].stream(comm.rank), comm)
        for number in np.random.default_rng([turn, comm.rank]).permutation(len(plans)):  # another order on every rank
            several[number].check(plans[number].wait())
        several[0].check(request.wait())


def case_a_plan_of_a_list_is_one_operation(comm):
    kinds = [(300, "float32", None), (70, "float32", None), (40, "float64", 2), (0, "float32", None), (5000, "float32", None)]
    inputs = [Inputs(comm.size, size, dtype, width, seed, entries=size // 6) for seed, (size, dtype, width) in enumerate(kinds)]
    plan = sar.allreduce_init([each.stream(comm.rank) for each in inputs], comm, "mean", fixed_indices=True)
    for _ in range(2):
        with sar.trace() as counts:
            plan.start([each.parts[comm.rank].values for each in inputs])
            results = plan.wait()
        assert counts.operations == (1 if comm.size > 1 else counts.operations)
        for given, result in zip(inputs, results, strict=True):
            total = sar.SparseStream(result.indices, result.values * result.dtype.type(comm.size), result.size)
            given.check(total)
        same_everywhere(comm, *results)


FAULTS = {
    "other indices": lambda inputs, rank: sar.SparseStream([0], np.ones(1, inputs.dtype), inputs.size),
    "another length": lambda inputs, rank: np.ones(1, inputs.dtype),
    "another dtype": lambda inputs, rank: inputs.parts[rank].values.astype(complex),
    "no array": lambda inputs, rank: object(),
}


@on_ranks(*RANKS)
@each(fault=FAULTS)
def case_what_does_not_go_with_a_plan_is_an_error_on_all_ranks(comm, fault):
    inputs, culprit = needs_two(comm, 2000)
    plan = planned(inputs, comm)
    for _ in range(2):
        plan.start(FAULTS[fault](inputs, comm.rank) if comm.rank == culprit else inputs.stream(comm.rank))
        outcome = outcome_of(plan)
        assert isinstance(outcome, sar.SparseAllreduceError)
        assert f"on rank {culprit}: " in str(outcome), outcome
        same_text(comm, outcome)
        plan.start(inputs.stream(comm.rank))
        inputs.check(plan.wait())


@on_ranks(*RANKS)
def case_ranks_that_start_different_plans_disagree(comm):
    inputs, culprit = needs_two(comm, 2000)
    plans = [planned(inputs, comm) for _ in range(2)]
    mine = plans[comm.rank == culprit]
    mine.start(inputs.stream(comm.rank))
    outcome = outcome_of(mine)
    assert isinstance(outcome, sar.MismatchError) and "number of the plan" in str(outcome)
    same_text(comm, outcome)
    for plan in plans:
        plan.start(inputs.stream(comm.rank))
        inputs.check(plan.wait())


@on_ranks(*RANKS)
def case_a_plan_that_is_started_twice_or_freed_is_an_error_on_all_ranks(comm):
    inputs, culprit = needs_two(comm, 2000)
    first, second = planned(inputs, comm), planned(inputs, comm)
    first.start(inputs.stream(comm.rank))
    for plan in (first, second):
        if comm.rank == culprit:
            plan._active, plan._freed = plan is first, plan is second
            outcome = outcome_of_call(lambda plan=plan: plan.start(inputs.stream(comm.rank)))
        elif plan is first:
            request = sar.iallreduce(inputs.stream(comm.rank), comm)
            outcome = outcome_of(request)
        else:
            plan.start(inputs.stream(comm.rank))
            outcome = outcome_of(plan)
        assert isinstance(outcome, sar.AlgorithmError) and "this plan has been" in str(outcome), outcome
    inputs.check(first.wait())
    check_usable(comm)


@on_ranks(*RANKS)
@each(algorithm=FIXED, when=["laying out", "first sum", "third sum"])
def case_an_exception_amid_a_plan_is_everyones_and_the_plan_goes_on(comm, algorithm, when):
    inputs, culprit = needs_two(comm, 40_000)
    name = "united" if when == "laying out" else "add"
    if when != "laying out":
        plan = planned(inputs, comm, algorithm=algorithm)
        if when == "third sum":
            for _ in range(2):
                plan.start(inputs.stream(comm.rank))
                plan.wait()
    here = comm.rank == (0 if algorithm == "hierarchical" else culprit)
    with failing(fixed, name, MemoryError("no room"), here) as struck:
        if when == "laying out":
            outcome = outcome_of_call(lambda: planned(inputs, comm, algorithm=algorithm))
        else:
            plan.start(inputs.stream(comm.rank))
            outcome = outcome_of_call(plan.wait)
        assert not struck or struck[0].called
    assert isinstance(outcome, Exception) or not here, outcome
    raise_what_is_owed(comm, outcome)
    the_next_work(comm)
    if when != "laying out":
        plan.start(inputs.stream(comm.rank))
        inputs.check(plan.wait())


@on_ranks(*RANKS)
@limit(30)
@each(algorithm=FIXED)
def case_a_wait_for_a_plan_that_is_interrupted_ends_the_sum_on_all_ranks(comm, algorithm):
    inputs, culprit = needs_two(comm, 40_000)
    plan = planned(inputs, comm, algorithm=algorithm)
    comm.Barrier()
    if comm.rank == culprit:
        plan.start(inputs.stream(comm.rank))
        outcome = interrupted(plan.wait)
        assert isinstance(outcome, KeyboardInterrupt)
        tell_the_others(comm)
    else:
        hear_from(comm, culprit)
        plan.start(inputs.stream(comm.rank))
        outcome = outcome_of_call(plan.wait)
        assert isinstance(outcome, sar.SparseStream) or "KeyboardInterrupt" in str(outcome), outcome
    the_next_work(comm)
    plan.start(inputs.stream(comm.rank))
    inputs.check(plan.wait())


@on_ranks(*RANKS)
@each(algorithm=FIXED[:2])
def case_a_message_of_a_plan_that_cannot_leave_is_everyones(comm, algorithm):
    inputs, culprit = needs_two(comm, 4000)
    plan = planned(inputs, comm, algorithm=algorithm)
    with failing(wire, "enclose", OSError("the wire is cut"), comm.rank == culprit):
        plan.start(inputs.stream(comm.rank))
        outcome = outcome_of(plan)
    assert str(outcome) == f"OSError: rank {culprit} gave up: the wire is cut"
    plan.start(inputs.stream(comm.rank))
    inputs.check(plan.wait())
