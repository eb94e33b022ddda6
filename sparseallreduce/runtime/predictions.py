"""Predict the time of the shortcuts, and choose the one that "auto" starts with, if it is expected to beat every algorithm.

:mod:`~sparseallreduce.algorithms.choose` makes the choice; this module provides the times of the shortcuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from sparseallreduce.algorithms.choose import choose_shortcut, problem_of
from sparseallreduce.algorithms.collectives.cost import predicted_times
from sparseallreduce.algorithms.cost import Machine, Problem, predicted_time, shared_split_time
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.runtime.handshake.base import payload_capacity
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import Encoding

__all__ = ["beginning_times", "byte_limits", "collective_beginning", "dense_share", "expected_beginning", "uneven_beginning"]

# Streams up to these sizes, in bytes, are always packed into the record, in messages and in shared memory. MPI libraries send messages of
# 4 KiB immediately, but parts of longer ones only after the receiver has answered.
_ALWAYS_PACKED, _ALWAYS_PACKED_SHARED = 4000, 1 << 13
# If ranks share cores: ratio of the time per byte of a dense sum in shared memory to that of MPI's own (measured at 4 MiB), for vectors up
# to _SHORT bytes and for longer ones. With the first ratio for all, "auto" chose the dense sum for a density of 20 % at P = 4, which took
# 539 microseconds for 1 MiB and 2,919 for 4 MiB, where splits take 390 and 1,040. With the second for all, 30 % of 256 KiB would take 214
# by a split, and takes 187 by the dense sum.
_SHORT, _SHARES = 1 << 18, (0.35, 0.7)
_ANY = 1 << 62  # no limit
# Above _CACHED bytes, a dense sum takes _BEYOND times as long per byte as measured at 4 MiB: 1.6 to 2.5 times at 16 and 64 MiB, P = 2, 4
# and 8 on 2 cores, with Open MPI and MPICH. A split in shared memory takes up to 1.6 times as long per entry there.
_CACHED, _BEYOND = 1 << 23, 2.0


def expected_beginning(
    stream: SparseStream,
    ranks: int,
    reduction: Reduction,
    machine: Machine,
    *,
    shares_memory: bool = False,
    capacity: int = 0,
    share: float = 1.0,
    encoding: Encoding = Encoding(),  # noqa: B008 - a constant
    hosts: Hosts | None = None,
) -> str:
    """Return the shortcut, or the name of the algorithm, that is expected to be fastest.

    A shortcut is "packed", "sparse_shared" or "dense". The result is "" for a dense stream whose operator is not a sum.

    Parameters
    ----------
    stream : SparseStream
        This rank's stream; all ranks are assumed to have one like it.
    ranks : int
    reduction : Reduction
    machine : Machine
    shares_memory : bool
        Whether handshakes are in memory that all ranks share.
    capacity : int
        Largest stream, in bytes, that the ranks can add in shared memory; 0 for none.
    share : float
        Ratio of the time per byte of the dense sum that would be used to that of MPI's own; see :func:`dense_share`.
    encoding : Encoding
        How messages are encoded.
    hosts : Hosts, optional
        The ranks of each host.
    """
    limits = byte_limits(ranks, shares_memory, capacity)
    problem = problem_of(stream, stream.stored, ranks, reduction, encoding, hosts=hosts)
    return _beginning(stream, reduction, limits, lambda fits, writes: _fastest(problem, machine, fits, writes, share))


def collective_beginning(
    collective: str,
    considered: Problem,
    stream: SparseStream,
    ranks: int,
    reduction: Reduction,
    machine: Machine,
    *,
    shares_memory: bool = False,
    capacity: int = 0,
    share: float = 1.0,
    encoding: Encoding = Encoding(),  # noqa: B008 - a constant
    hosts: Hosts | None = None,
) -> str:
    """Return the same as :func:`expected_beginning` for a collective with its own algorithms, if a shortcut computes more than needed.

    ``considered`` is what :func:`~sparseallreduce.algorithms.collectives.cost.choose` is asked.
    """
    limits = byte_limits(ranks, shares_memory, capacity)
    problem = problem_of(stream, stream.stored, ranks, reduction, encoding, hosts=hosts)

    def fastest(fits: bool, writes: bool) -> str:
        return _fastest_of(collective, considered, problem, machine, fits, writes, share)

    return _beginning(stream, reduction, limits, fastest)


def _beginning(stream: SparseStream, reduction: Reduction, limits: tuple[int, int, int], fastest: Callable[[bool, bool], str]) -> str:
    """Return the choice that size and operator determine, or else that of ``fastest``.

    ``fastest(fits, writes)`` is called with whether the stream can be packed, and written to shared memory.
    """
    summed, nbytes = reduction.op.is_sum, packed.packed_bytes(stream)
    always, room, capacity = limits
    if stream.is_dense and not summed:
        return ""
    if nbytes <= always:
        return "packed"
    return fastest(nbytes <= room and not stream.is_dense, summed and nbytes <= capacity)


def uneven_beginning(
    stream: SparseStream,
    entries: Sequence[int],
    reduction: Reduction,
    machine: Machine,
    *,
    shares_memory: bool = False,
    capacity: int = 0,
    share: float = 1.0,
    encoding: Encoding = Encoding(),  # noqa: B008 - a constant
    hosts: Hosts | None = None,
) -> tuple[str, int]:
    """Return the fastest shortcut or algorithm if the ranks' numbers of entries differ so much that each would choose another.

    The mean number of entries is used as the model's k, and the longest stream must fit. Parameters are those of
    :func:`expected_beginning`; ``entries`` holds the number of each rank, and ``stream`` is an example.

    Returns
    -------
    str
        As of :func:`expected_beginning`, for a sum.
    int
        Largest stream, in bytes, for which that choice has room.
    """
    ranks, most = len(entries), max(entries)
    problem = problem_of(stream, sum(entries) / ranks, ranks, reduction, encoding, hosts=hosts)
    longest = most * (problem.value_bytes if most == stream.size else problem.value_bytes + problem.index_bytes)
    _, room, capacity = byte_limits(ranks, shares_memory, capacity)
    name = _fastest(problem, machine, longest <= room and most < stream.size, longest <= capacity, share)
    return name, {"packed": room, "sparse_shared": capacity}.get(name, _ANY)


def byte_limits(ranks: int, shares_memory: bool, capacity: int) -> tuple[int, int, int]:
    """Return three limits in bytes: up to which a stream is always packed, can be packed, and can be added in shared memory.

    Apart from these limits, :func:`expected_beginning` of sparse streams of one kind depends on the number of entries only through
    :func:`~sparseallreduce.algorithms.choose.rounded`.
    """
    room = payload_capacity(ranks)
    return min(_ALWAYS_PACKED_SHARED if shares_memory else _ALWAYS_PACKED, room), room, capacity


def dense_share(nbytes: int, oversubscribed: bool) -> float:
    """Return the ratio of the times per byte of a dense sum in shared memory and of MPI's own, for vectors of ``nbytes`` bytes."""
    return _SHARES[nbytes > _SHORT] if oversubscribed else 1.0


def beginning_times(
    stream: SparseStream,
    entries: float,
    ranks: int,
    reduction: Reduction,
    machine: Machine,
    *,
    shares_memory: bool = False,
    capacity: int = 0,
    encoding: Encoding = Encoding(),  # noqa: B008 - a constant
    hosts: Hosts | None = None,
) -> dict[str, float]:
    """Return the seconds that each shortcut takes for streams like this one with ``entries`` entries.

    Parameters are those of :func:`expected_beginning`.
    """
    nbytes, room = packed.packed_bytes(stream), payload_capacity(ranks)
    fits = nbytes <= room and not stream.is_dense
    writes = reduction.op.is_sum and nbytes <= capacity
    return _times(problem_of(stream, entries, ranks, reduction, encoding, hosts=hosts), machine, fits, writes, 1.0)


@lru_cache(maxsize=4096)
def _fastest(problem: Problem, machine: Machine, fits: bool, writes: bool, share: float) -> str:
    return choose_shortcut(problem, machine, _times(problem, machine, fits, writes, share))


@lru_cache(maxsize=4096)
def _fastest_of(collective: str, considered: Problem, problem: Problem, machine: Machine, fits: bool, writes: bool, share: float) -> str:
    times = {name: time + 2 * machine.alpha for name, time in predicted_times(collective, considered, machine).items()}
    times |= _times(problem, machine, fits, writes, share)
    return min(times, key=times.__getitem__)


def _times(problem: Problem, machine: Machine, fits: bool, writes: bool, share: float) -> dict[str, float]:
    """Return the predicted seconds of the dense sum, and of the other shortcuts if the stream ``fits`` in a record or ``writes`` apply."""
    beta = machine.beta_dense if machine.beta_blocking is None else machine.beta_blocking
    dense = predicted_time("dense", problem, machine._replace(beta_dense=share * beta))
    if writes and problem.size * problem.value_bytes > _CACHED:
        dense *= _BEYOND
    predicted = {"dense": dense}
    if fits:
        latency = (problem.ranks - 1).bit_length() * machine.alpha  # this part is the handshake's
        plain = problem._replace(index_codec="plain", sent_bytes=None)
        predicted["packed"] = predicted_time("allgather", plain, machine._replace(overlap=0.0)) - latency
    if writes:
        predicted["sparse_shared"] = shared_split_time(problem, machine)
    return predicted
