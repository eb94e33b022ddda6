"""Algorithms from outside the library: ``register_algorithm``, and schedule functions passed as ``algorithm=``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from sparseallreduce.algorithms import ALGORITHMS, AUTO, FLAT, Algorithm, GivenAlgorithm
from sparseallreduce.algorithms.choose import CANDIDATES, forget_choices
from sparseallreduce.algorithms.cost import Machine, Problem, set_model
from sparseallreduce.errors import AlgorithmError

__all__ = ["as_name", "register_algorithm", "registered", "term_of", "unregister_algorithm"]

_OWN = frozenset([*ALGORITHMS, AUTO])  # names that are the library's
_OPERANDS = ("stream", "rank", "ranks", "reduction")
_terms: dict[str, str] = {}  # what ranks compare, by name, where it is not the name


def register_algorithm(
    name: str,
    schedule: Callable[..., Any] | Algorithm,
    cost: Callable[[Problem, Machine], float] | None = None,
    *,
    options: Mapping[str, Callable[[Any], bool]] | None = None,
    dense_steps: tuple[type, ...] = (),
) -> None:
    """Add an algorithm by a name, which ``algorithm=`` of every operation then takes.

    Call it on all ranks, before the first operation that uses the algorithm; ranks whose registrations differ raise MismatchError in an
    operation that depends on them. A package can register its algorithms without a call, by entry points of the group
    ``sparseallreduce.algorithms``.

    Parameters
    ----------
    name : str
        A Python identifier. A name that has been registered before gets the new algorithm; those of the library cannot be replaced.
    schedule : callable or Algorithm
        A generator function of ``(stream, rank, ranks, reduction, **options)`` that yields steps
        (:mod:`sparseallreduce.algorithms.steps`) and returns the reduced stream, bitwise identical on all ranks;
        :func:`sparseallreduce.testing.check_algorithm` tests it. An :class:`~sparseallreduce.algorithms.Algorithm`, which an entry
        point may name, has ``cost``, ``options`` and ``dense_steps`` with it.
    cost : callable, optional
        Returns the expected seconds for a :class:`~sparseallreduce.algorithms.cost.Problem` on a
        :class:`~sparseallreduce.Machine`. With it, "auto" can select the algorithm, and :func:`~sparseallreduce.explain` lists it.
    options : mapping of str to callable, optional
        Keyword arguments of ``schedule`` that users may pass, each with a function that returns True for values in range. By default
        all keyword parameters of ``schedule``, unchecked.
    dense_steps : tuple of types
        ``DenseAllreduce`` or ``DenseAllgather``, if the schedule yields these steps, which may use MPI's own collectives.

    Raises
    ------
    AlgorithmError
        If the name is no identifier or belongs to the library, or the schedule does not take the four arguments.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> from sparseallreduce.algorithms.steps import Recv, Send
    >>> def star(stream, rank, ranks, reduction):
    ...     if rank:
    ...         yield Send(0, stream)
    ...         return (yield Recv(0))
    ...     total = stream
    ...     for other in range(1, ranks):
    ...         total = reduction.pair(total, (yield Recv(other)))
    ...     for other in range(1, ranks):
    ...         yield Send(other, total)
    ...     return total
    >>> sar.register_algorithm("star", star)
    >>> streams = [sar.SparseStream([rank], [1.0], size=4) for rank in range(3)]
    >>> sar.simulate(streams, "star").outputs[2].to_dense()
    array([1., 1., 1., 0.])
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise AlgorithmError(f"the name of an algorithm is a Python identifier, not {name!r}")
    if name in _OWN:
        raise AlgorithmError(f"{name!r} is an algorithm of the library, which cannot be replaced: choose another name")
    if isinstance(schedule, Algorithm):
        given: Algorithm = schedule
        options, cost = options or given.options or None, cost or given.cost
        schedule, dense_steps = given.run, dense_steps or given.dense_steps
    if cost is not None and not callable(cost):
        raise AlgorithmError(f"cost is a function of a problem and a machine, not {type(cost).__name__}")
    algorithm = _described(schedule, options, tuple(dense_steps))
    unregister_algorithm(name)
    ALGORITHMS[name] = FLAT[name] = algorithm
    _terms[name] = f"{name}, {algorithm.term}"
    if cost is not None:
        set_model(name, _checked(name, cost))
        CANDIDATES.append(name)
        _compare_candidates()


def unregister_algorithm(name: str) -> None:
    """Remove a registered algorithm; nothing happens if there is none of this name."""
    if name in _OWN or name not in ALGORITHMS:
        return
    del ALGORITHMS[name], FLAT[name], _terms[name]
    set_model(name, None)
    if name in CANDIDATES:
        CANDIDATES.remove(name)
        _compare_candidates()


def registered() -> list[str]:
    """Return the names of registered algorithms."""
    return [name for name in ALGORITHMS if name not in _OWN]


def _compare_candidates() -> None:
    """Have the ranks compare which registered algorithms "auto" may select, and forget what it has selected so far."""
    chosen = [_terms[each] for each in CANDIDATES if each not in _OWN]
    _terms[AUTO] = f"{AUTO} with {'; '.join(sorted(chosen))}" if chosen else AUTO
    forget_choices()


def as_name(algorithm: Any) -> Any:
    """Return the name of an algorithm, to be used in a call. For a schedule function, the name has the function as an attribute."""
    if isinstance(algorithm, str) or not callable(algorithm):
        return algorithm
    described = _described(algorithm, None, ())
    given = GivenAlgorithm(described.term)
    given.algorithm = described
    return given


def term_of(name: str) -> str:
    """Return what the ranks compare of an algorithm: its name, and where it is defined if it is not the library's."""
    return _terms.get(name, name)


def _described(schedule: Any, options: Mapping[str, Callable[[Any], bool]] | None, dense_steps: tuple[type, ...]) -> Algorithm:
    """Return the algorithm of a schedule function.

    Raises
    ------
    AlgorithmError
        If it does not take the four arguments.
    """
    if not callable(schedule) or isinstance(schedule, type):
        raise AlgorithmError(f"an algorithm is a generator function of ({', '.join(_OPERANDS)}), not {schedule!r}")
    try:
        signature = inspect.signature(schedule)
        signature.bind(*_OPERANDS)
    except (TypeError, ValueError) as error:
        raise AlgorithmError(f"an algorithm is a generator function of ({', '.join(_OPERANDS)}): {schedule!r} is not: {error}") from None
    if options is None:
        parameters = list(signature.parameters.values())
        taken = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
        taken += [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][len(_OPERANDS) :]
        options = {each.name: _anything for each in taken}
    where = getattr(schedule, "__module__", None), getattr(schedule, "__qualname__", type(schedule).__qualname__)
    return Algorithm(schedule, dense_steps, dict(options), term=".".join(part for part in where if part))


def _anything(_value: Any) -> bool:
    return True


def _checked(name: str, cost: Callable[[Problem, Machine], float]) -> Callable[[Problem, Machine], float]:
    """Return a cost function that raises AlgorithmError where the given one returns no time."""

    def checked(problem: Problem, machine: Machine) -> float:
        seconds = cost(problem, machine)
        if not isinstance(seconds, Real) or math.isnan(seconds) or seconds < 0:
            raise AlgorithmError(f"the cost of algorithm {name!r} is a number of seconds, 0 or more, not {seconds!r}")
        return float(seconds)

    return checked
