"""Algorithms of others: registered by name, passed as functions, selected by "auto", and checked."""

import re

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.ssar_recursive_doubling import ssar_recursive_doubling
from sparseallreduce.algorithms.steps import Recv, RecvAny, Send
from sparseallreduce.testing import CheckFailure, check_algorithm


def star(stream, rank, ranks, reduction, *, hub=0):
    """Reduce on one rank, which sends the result to all."""
    if rank != hub:
        yield Send(hub, stream)
        return (yield Recv(hub))
    total = stream
    for other in range(ranks):
        if other != hub:
            total = reduction.pair(total, (yield Recv(other)))
    for other in range(ranks):
        if other != hub:
            yield Send(other, total)
    return total


def streams(ranks=4):
    return [sar.SparseStream([rank, 9], [1.0, 2.0], size=10) for rank in range(ranks)]


def result(algorithm, **options):
    return sar.simulate(streams(), algorithm, **options).outputs[3].to_dense().tolist()


SUM = [1.0] * 4 + [0.0] * 5 + [8.0]


def test_a_registered_algorithm_has_a_name_and_options():
    sar.register_algorithm("star", star)
    assert "star" in sar.algorithms() and sar.algorithms()[-1] == "auto"
    assert result("star") == result("star", hub=np.int64(2)) == SUM
    with pytest.raises(sar.AlgorithmError, match="unknown option 'hubb' of algorithm 'star': it takes hub"):
        result("star", hubb=1)
    assert sar.allreduce(streams()[0], sar.SERIAL, algorithm="star") == streams()[0]
    assert result("hierarchical", outer="star", inner="star") == SUM


def test_options_can_be_checked():
    sar.register_algorithm("star", star, options={"hub": lambda value: value == 0})
    with pytest.raises(sar.AlgorithmError, match="out of range"):
        result("star", hub=1)


def test_a_function_is_an_algorithm_without_registration():
    assert result(star) == result(star, hub=3) == SUM
    assert sar.allreduce(streams()[0], sar.SERIAL, algorithm=star) == streams()[0]
    plan = sar.allreduce_init(streams()[0], sar.SERIAL, algorithm=star)
    plan.start(streams()[0])
    assert plan.wait() == streams()[0]
    assert "star" not in sar.algorithms()


def test_auto_selects_an_algorithm_by_its_cost():
    def priced(seconds):
        sar.register_algorithm("star", star, lambda problem, machine: seconds)
        return sar.simulate(streams(), "auto").messages.tolist()

    alone = sar.simulate(streams(), "auto").messages.tolist()
    assert priced(0.0) == [3, 1, 1, 1] != alone
    assert priced(1.0) == alone  # registered again, with a cost that is too high
    sar.register_algorithm("star", star)
    assert sar.simulate(streams(), "auto").messages.tolist() == alone
    with pytest.raises(sar.AlgorithmError, match=re.escape("the cost of algorithm 'star' is a number of seconds, 0 or more, not nan")):
        priced(float("nan"))


def test_ranks_compare_where_an_algorithm_is_defined():
    def terms(algorithm):
        return dict(make_call(streams()[0], "sum", algorithm, {})[1].terms)["algorithm"]

    sar.register_algorithm("star", star, lambda problem, machine: 1.0)
    ours = f"{__name__}.star"
    assert terms("star") == f"star, {ours}" and terms(star) == ours
    assert terms("auto") == f"auto with star, {ours}"
    sar.register_algorithm("star", ssar_recursive_doubling)
    assert terms("star") != f"star, {ours}" and terms("auto") == "auto"


@pytest.mark.parametrize(
    "name,schedule,cost,message",
    [
        ("dense", star, None, "'dense' is an algorithm of the library"),
        ("auto", star, None, "'auto' is an algorithm of the library"),
        ("two words", star, None, "a Python identifier, not 'two words'"),
        ("two", lambda stream, rank: None, None, "a generator function of"),
        ("two", int, None, "a generator function of"),
        ("two", None, None, "a generator function of"),
        ("two", star, 1.0, "cost is a function of a problem and a machine, not float"),
    ],
)
def test_what_cannot_be_registered(name, schedule, cost, message):
    before = sar.algorithms()
    with pytest.raises(sar.AlgorithmError, match=re.escape(message)):
        sar.register_algorithm(name, schedule, cost)
    assert sar.algorithms() == before


def test_a_function_that_takes_other_arguments_is_an_error_of_the_call():
    with pytest.raises(sar.AlgorithmError, match="a generator function of"):
        sar.allreduce(streams()[0], sar.SERIAL, algorithm=lambda stream: None)


# Algorithms that break a promise each, and what the check says of them.


def loses_the_last_rank(stream, rank, ranks, reduction):
    total = yield from ssar_recursive_doubling(stream, rank, ranks, reduction)
    return total if ranks < 3 else reduction.pair(stream, stream)


def adds_as_messages_arrive(stream, rank, ranks, reduction):
    others = frozenset(range(ranks)) - {rank}
    for other in sorted(others):
        yield Send(other, stream)
    total, waiting = stream, set(others)
    while waiting:
        source, theirs = yield RecvAny(frozenset(waiting))
        waiting.remove(source)
        total = reduction.pair(total, theirs)
    return total


def returns_its_own_stream(stream, rank, ranks, reduction):
    return stream
    yield


def waits_for_ever(stream, rank, ranks, reduction):
    return (yield Recv((rank + 1) % ranks)) if ranks > 1 else stream


def goes_on_when_closed(stream, rank, ranks, reduction):
    try:
        return (yield from star(stream, rank, ranks, reduction))
    finally:
        yield Send((rank + 1) % ranks, stream)


def goes_on_when_closed_late(stream, rank, ranks, reduction):
    if rank != 0:
        yield Send(0, stream)
        return (yield Recv(0))
    total = stream
    for other in range(1, ranks):
        total = reduction.pair(total, (yield Recv(other)))
    try:
        for other in range(1, ranks):
            yield Send(other, total)
    except GeneratorExit:
        yield Send(1, total)
    return total


def returns_no_generator(stream, rank, ranks, reduction):
    return stream


@pytest.mark.parametrize(
    "algorithm,message",
    [
        (loses_the_last_rank, "has other bits than rank 0|the result lacks entries"),
        (adds_as_messages_arrive, "has other bits"),
        (returns_its_own_stream, "has other bits than rank 0|the result lacks entries"),
        (waits_for_ever, "DeadlockError"),
        (goes_on_when_closed, "a schedule ends where it is closed|generator ignored GeneratorExit|DeadlockError|wait"),
        (goes_on_when_closed_late, "a schedule ends where it is closed: RuntimeError: generator ignored GeneratorExit"),
        (returns_no_generator, "generator|iterable"),
    ],
)
def test_the_check_finds_what_is_wrong(algorithm, message):
    with pytest.raises(CheckFailure, match=message) as caught:
        check_algorithm(algorithm, examples=60, largest=40)
    assert "example: ranks=" in str(caught.value) and algorithm.__name__ in str(caught.value)


def test_the_check_passes_what_is_right():
    report = check_algorithm(star, options={"hub": 0}, examples=12, largest=40)
    assert set(report.counts.values()) >= {12} and "all promises hold" in str(report)
