"""``check_algorithm``: whether a schedule keeps the promises of an allreduce algorithm."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.algorithms import Algorithm
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.registration import as_name
from sparseallreduce.algorithms.steps import Schedule
from sparseallreduce.runtime.simulator import same_bits, simulate
from sparseallreduce.streams.operator import as_operator
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.testing.report import Report, expect

__all__ = ["check_algorithm"]

_RANKS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 33)
_SIZES = (0, 1, 2, 7, 40, 300)
_KINDS = ("empty", "few", "many", "all", "same", "one index", "one rank", "clustered")
_DTYPES = ("float32", "float64", "int64", "complex128")
_OPERATORS = ("sum", "max", "min", "prod", "mean")
_LONG = 2**40


class _Case(NamedTuple):
    """One set of streams, a stream for each rank."""

    ranks: int
    size: int
    kind: str
    dtype: str
    op: str
    width: int | None
    switch_density: float | None
    seed: int

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())

    def streams(self) -> list[SparseStream]:
        rng = np.random.default_rng([self.seed, self.ranks, self.size])
        shared = rng.permutation(min(self.size, 1 << 16))
        return [self._stream(rng, rank, shared) for rank in range(self.ranks)]

    def _stream(self, rng: np.random.Generator, rank: int, shared: NDArray[Any]) -> SparseStream:
        size, room = self.size, len(shared)
        count = {"empty": 0, "few": room // 8 + 1, "many": 2 * room // 3, "all": room, "one index": 1, "same": room // 4 + 1}
        nnz = min(room, count.get(self.kind, room // 4 + 1))
        if self.kind == "one rank" and rank != self.ranks // 2:
            nnz = 0
        if self.kind in ("same", "one index"):
            chosen = shared[:nnz]
        elif self.kind == "clustered":
            chosen = np.arange(nnz) + (room - nnz) // 2
        else:
            chosen = rng.permutation(room)[:nnz]
        indices = np.sort(chosen).astype(np.uint64)
        if size > room:  # spread over the whole dimension, its last index included
            indices = (size - 1) - (np.uint64(room - 1) - indices) * np.uint64(size // room)
        shape = (nnz,) if self.width is None else (nnz, self.width)
        values: NDArray[Any] = rng.integers(-3, 4, shape)
        if self.seed % 2 and self.dtype != "int64":  # sums round, and show in which order a rank has added
            values = rng.normal(0, 1, shape)
        return SparseStream(indices, values.astype(self.dtype), size)


def check_algorithm(
    algorithm: str | Callable[..., Any] | Algorithm,
    *,
    options: Mapping[str, Any] | None = None,
    largest: int = 2**40,
    examples: int = 400,
    seed: int = 0,
) -> Report:
    """Check that an algorithm reduces any streams to the right result, bitwise identical on every rank.

    Tries numbers of ranks from 1 to 33, dimensions from 0 to 2**40, empty, dense, equal, disjoint and uneven index sets, rows, dtypes,
    operators, densities at which streams become dense, random orders of delivery, encoded messages, and schedules that are closed at each
    step, as an operation that fails closes them.

    Parameters
    ----------
    algorithm : str, callable or Algorithm
        As for :func:`~sparseallreduce.allreduce`.
    options : mapping, optional
        Passed to the algorithm.
    largest : int
        The largest dimension to try. Choose a small one, such as 300, for an algorithm that makes vectors of the whole dimension.
    examples : int
        Sets of streams to try.
    seed : int
        Seed of the examples.

    Returns
    -------
    Report

    Raises
    ------
    CheckFailure
        For the first promise that does not hold. Examples with few ranks and short vectors come first.

    Examples
    --------
    >>> from sparseallreduce.algorithms.ssar_ring import ssar_ring
    >>> check_algorithm(ssar_ring, examples=20).counts["the result is the dense reduction, the same bits on every rank"]
    20
    """
    given = dict(options or {})
    if isinstance(algorithm, Algorithm):
        algorithm = algorithm.run
    report = Report(str(as_name(algorithm)))
    for case in _cases(examples, seed, largest):
        streams = case.streams()
        arguments: dict[str, Any] = given if case.switch_density is None else given | {"switch_density": case.switch_density}
        _check_result(report, algorithm, case, streams, arguments)
        if case.ranks > 1 and case.ranks <= 9:
            _check_closing(report, algorithm, case, streams, given)
    return report


def _cases(examples: int, seed: int, largest: int) -> Iterator[_Case]:
    """Yield examples, those of few ranks and short vectors first."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(examples):
        dtype = str(rng.choice(_DTYPES))
        unfit = {"int64": ("mean",), "complex128": ("max", "min")}.get(dtype, ())
        operators = [op for op in _OPERATORS if op not in unfit]
        size = int(rng.choice([each for each in (*_SIZES, _LONG) if each <= largest]))
        drawn.append(
            _Case(
                int(rng.choice(_RANKS)),
                size,
                str(rng.choice(_KINDS)) if size < _LONG else "few",
                dtype,
                str(rng.choice(operators)),
                3 if rng.random() < 0.2 else None,
                (None, 0.0, 0.1, 1.0)[rng.integers(4)] if size < _LONG else None,
                int(rng.integers(1 << 31)),
            )
        )
    yield from sorted(drawn, key=lambda case: (case.ranks, case.size, case.kind))


def _check_result(report: Report, algorithm: Any, case: _Case, streams: list[SparseStream], arguments: Mapping[str, Any]) -> None:
    before = [(stream.indices.tobytes(), stream.values.tobytes()) for stream in streams]
    with report.promise("the result is the dense reduction, the same bits on every rank", lambda: str(case)):
        by_time = simulate(streams, algorithm, op=case.op, **arguments).outputs
        expect(len(by_time) == case.ranks, "some ranks return no result")
        for rank, output in enumerate(by_time):
            expect(same_bits(output, by_time[0]), f"rank {rank} has other bits than rank 0: {output!r} and {by_time[0]!r}")
        _expect_reduction(by_time[0], streams, case)
    with report.promise("the order of delivery and the encoding of messages change no bit", lambda: str(case)):
        otherwise = simulate(streams, algorithm, op=case.op, delivery=case.seed, through_wire=True, **arguments).outputs
        for rank, output in enumerate(otherwise):
            expect(same_bits(output, by_time[0]), f"rank {rank} has other bits if messages arrive in another order")
    with report.promise("contributions are left as they are, and share no memory with results", lambda: str(case)):
        after = [(stream.indices.tobytes(), stream.values.tobytes()) for stream in streams]
        changed = [rank for rank, (new, old) in enumerate(zip(after, before)) if new != old]
        expect(not changed, f"ranks {changed} have changed their streams")
        expect(not any(out.overlaps(stream) for out in by_time for stream in streams), "a result shares memory with a contribution")


def _expect_reduction(result: SparseStream, streams: Sequence[SparseStream], case: _Case) -> None:
    """Compare a result with the reduction by NumPy, at the positions where any rank has an entry."""
    op = as_operator(case.op)
    places = np.unique(np.concatenate([stream.indices.astype(np.uint64) for stream in streams]))
    shape = (len(places),) if case.width is None else (len(places), case.width)
    total = np.full(shape, op.neutral_of(np.dtype(case.dtype)), case.dtype)
    for stream in streams:
        at = np.searchsorted(places, stream.indices)
        total[at] = op.ufunc(total[at], stream.values)
    if op.is_mean:
        total = total / np.dtype(case.dtype).type(case.ranks)
    expect(result.size == case.size, f"the result has size {result.size}, not {case.size}")
    expect(result.dtype == np.dtype(case.dtype), f"the result has dtype {result.dtype}, not {case.dtype}")
    found = result.indices.astype(np.uint64)
    held, known = np.isin(places, found), np.isin(found, places)
    lacking = ~held & _any(total != 0)  # a dense result may leave out entries that are zero
    expect(not lacking.any(), f"the result lacks entries, such as that at {_first(places[lacking])}")
    extra = ~known & _any(result.values != 0)
    expect(not extra.any(), f"the result has a value that no rank has, at {_first(found[extra])}")
    ours, theirs, at = result.values[known], total[held], places[held]
    wrong = _any(~np.isclose(ours, theirs, rtol=1e-4, atol=1e-5))
    expect(not wrong.any(), f"at {_first(at[wrong])} the result is {_first(ours[wrong])}, and not {_first(theirs[wrong])}")


def _any(true: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where any value of an entry is true."""
    return true if true.ndim == 1 else np.any(true, axis=1)


def _first(array: NDArray[Any]) -> Any:
    return array[0] if len(array) else None


def _check_closing(report: Report, algorithm: Any, case: _Case, streams: Sequence[SparseStream], options: Mapping[str, Any]) -> None:
    """Close the schedule of the first rank after each of its steps, as an operation that fails does, and check that it ends there."""
    call, _ = make_call(streams[0], case.op, algorithm, options)
    if call is None or not hasattr(call.algorithm, "algorithm"):  # a name, whose schedule is tested where it is defined
        return
    run, results = call.algorithm.algorithm.run, list[Any]()

    def recorded(stream: SparseStream, rank: int, ranks: int, reduction: Reduction) -> Schedule:
        schedule, value = run(stream, rank, ranks, reduction, **call.options), None
        while True:
            try:
                step = schedule.send(value)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            value = yield step
            if rank == 0:
                results.append(value)

    with report.promise("a schedule ends where it is closed", lambda: str(case)):
        simulate(streams, recorded, op=case.op)
        for taken in range(len(results)):
            reduction = Reduction(call.op, call.switch_density)
            schedule: Generator[Any, Any, Any] = run(reduction.enter(call.stream), 0, case.ranks, reduction, **call.options)
            next(schedule)
            for result in results[:taken]:
                schedule.send(result)
            schedule.close()
