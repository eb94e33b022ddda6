"""The sparse allreduce algorithms, each a generator that performs no I/O, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Integral
from typing import Any, NamedTuple

from sparseallreduce.algorithms.allgather import allgather
from sparseallreduce.algorithms.collectives import COLLECTIVES
from sparseallreduce.algorithms.dense import dense
from sparseallreduce.algorithms.dsar_early_switch import dsar_early_switch
from sparseallreduce.algorithms.dsar_split_allgather import dsar_split_allgather
from sparseallreduce.algorithms.hierarchical import SPLIT, Hosts, dense_torus, hierarchical
from sparseallreduce.algorithms.ssar_recursive_doubling import ssar_recursive_doubling
from sparseallreduce.algorithms.ssar_ring import ssar_ring
from sparseallreduce.algorithms.ssar_split_allgather import ssar_split_allgather
from sparseallreduce.algorithms.steps import DenseAllgather, DenseAllreduce, Schedule
from sparseallreduce.errors import AlgorithmError

__all__ = [
    "ALGORITHMS",
    "ALLREDUCE",
    "AUTO",
    "FLAT",
    "Algorithm",
    "GivenAlgorithm",
    "Hosts",
    "algorithm_of",
    "algorithms",
    "checked_options",
]

AUTO, ALLREDUCE = "auto", "allreduce"


class Algorithm(NamedTuple):
    """An algorithm and its properties."""

    run: Callable[..., Schedule]  # generator function of (stream, rank, ranks, reduction, **options)
    dense_steps: tuple[type, ...] = ()  # the dense steps that it uses: DenseAllreduce, DenseAllgather
    options: Mapping[str, Callable[[Any], bool]] = {}  # for each option, a function that checks its value
    by_hosts: bool = False  # whether it takes the layout of hosts and the other algorithms
    cuts: str = ""  # how it gathers parts, "sparse" or "dense", if it accepts a cut of the index space
    cost: Callable[..., float] | None = None  # for registration: expected seconds for (problem, machine)
    term: str = ""  # where a registered algorithm is defined, which ranks compare with its name


class GivenAlgorithm(str):
    """The name of a schedule function that was passed as ``algorithm=``, together with the function."""

    algorithm: Algorithm


#: Algorithms that do not distinguish between ranks of one host and of others.
FLAT: dict[str, Algorithm] = {
    "dense": Algorithm(dense, (DenseAllreduce,)),
    "allgather": Algorithm(allgather),
    "ssar_recursive_doubling": Algorithm(ssar_recursive_doubling),
    "ssar_split_allgather": Algorithm(ssar_split_allgather, cuts="sparse"),
    "ssar_ring": Algorithm(ssar_ring, cuts="sparse"),
    "dsar_split_allgather": Algorithm(dsar_split_allgather, (DenseAllgather,), cuts="dense"),
    "dsar_early_switch": Algorithm(
        dsar_early_switch,
        (DenseAllgather,),
        {"group_size": lambda value: isinstance(value, Integral) and int(value) >= 1},
        cuts="dense",
    ),
}


ALGORITHMS: dict[str, Algorithm] = {
    **FLAT,
    "hierarchical": Algorithm(
        hierarchical,
        options={"inner": lambda value: value in (AUTO, SPLIT, *FLAT), "outer": lambda value: value in (AUTO, *FLAT)},
        by_hosts=True,
        cuts="sparse",
    ),
    "dense_torus": Algorithm(dense_torus, by_hosts=True),
}


#: Options of every operation, independent of the algorithm.
COMMON_OPTIONS = ("switch_density", "timeout", "machine", "index_codec", "value_codec", "seed", "progress")


def algorithms(collective: str = "allreduce") -> list[str]:
    """Return the names that ``algorithm=`` accepts for a collective.

    Parameters
    ----------
    collective : str
        "allreduce", "reduce", "reduce_scatter", "allgather" or "bcast".

    Raises
    ------
    AlgorithmError
        If there is no such collective.

    Examples
    --------
    >>> "ssar_split_allgather" in algorithms(), algorithms("reduce")
    (True, ['tree', 'split', 'auto'])
    """
    known: dict[str, Iterable[str]] = {ALLREDUCE: ALGORITHMS, **COLLECTIVES}
    if collective not in known:
        raise AlgorithmError(f"unknown collective {collective!r}: use one of {', '.join(known)}")
    return [*known[collective], AUTO]


def algorithm_of(name: str) -> Algorithm:
    """Return the algorithm with this name.

    Parameters
    ----------
    name : str
        A name of :func:`algorithms` other than "auto", or one that :func:`~sparseallreduce.register_algorithm` has added.

    Returns
    -------
    Algorithm
    """
    return name.algorithm if isinstance(name, GivenAlgorithm) else ALGORITHMS[name]


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` sorted by name, if algorithm ``name`` accepts them.

    Parameters
    ----------
    name : str
        A name of :func:`algorithms`.
    options : mapping of str to object
        Options by name.

    Returns
    -------
    dict
        The options, with NumPy's integers converted to Python's.

    Raises
    ------
    AlgorithmError
        If the algorithm is unknown, or an option is unknown or out of range.
    """
    if not isinstance(name, str) or (name not in ALGORITHMS and name != AUTO and not isinstance(name, GivenAlgorithm)):
        raise AlgorithmError(f"unknown algorithm {name!r}: use one of {', '.join(algorithms())}, or a schedule function")
    if not options:
        return {}
    known = {} if name == AUTO else algorithm_of(name).options
    for option, value in options.items():
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes none"
            meant = [each for each in get_close_matches(option, [*known, *COMMON_OPTIONS], 1) if each not in known]
            hint = f"; did you mean {meant[0]!r}?" if meant else ""
            raise AlgorithmError(f"unknown option {option!r} of algorithm {name!r}: it {takes}{hint}")
        if not known[option](value):
            raise AlgorithmError(f"option {option}={value!r} of algorithm {name!r} is out of range: see its docstring")
    # NumPy's integers become Python's, so that all ranks name the same value alike when they compare their arguments.
    return {option: int(value) if isinstance(value, Integral) else value for option, value in sorted(options.items())}
