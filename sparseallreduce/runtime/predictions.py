"""What an operation by "auto" begins with: the shortcut that is expected to take less time than every other way, if there is one.

:mod:`~sparseallreduce.algorithms.choose` chooses; here are the times of the shortcuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sparseallreduce.algorithms.choose import choose_shortcut, problem_of
from sparseallreduce.algorithms.cost import Machine, Problem, predicted_time, shared_split_time
from sparseallreduce.algorithms.hierarchical import Hosts
from sparseallreduce.runtime.handshake.base import payload_capacity
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import Encoding

__all__ = ["beginning_times", "byte_limits", "dense_share", "expected_beginning", "uneven_beginning"]

# Bytes of a rank's stream up to which it always travels with the record, by messages and in shared memory. The MPI libraries send messages
# of 4 KiB at once, longer ones in part only when the receiver has answered.
_ALWAYS_PACKED, _ALWAYS_PACKED_SHARED = 4000, 1 << 13
# Of the time for a byte of MPI's own dense sum, which is measured at 4 MiB, that of one in shared memory where ranks share cores, for
# vectors of so many bytes at most, and for others. By the former, 20 % of 1 MiB took 539 microseconds so at P = 4, and 20 % of 4 MiB
# 2,919, where splits take 390 and 1,040; by the latter, 30 % of 256 KiB would take 214 by a split, and take 187 so.
_SHORT, _SHARES = 1 << 18, (0.35, 0.7)
_ANY = 1 << 62  # more bytes than there are
# Bytes of a dense vector above which a dense sum takes so many times as long as is measured, at 4 MiB: 1.6 to 2.5 at 16 and 64 MiB, P = 2,
# 4 and 8 on 2 cores, by Open MPI and MPICH. An entry takes a split in shared memory up to 1.6 times as long there.
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
    """"packed", "sparse_shared" or "dense" for a shortcut, or the name of an algorithm; "" where a stream that is dense is no sum.

    Parameters
    ----------
    stream : SparseStream
        All ranks are taken to have one like it.
    ranks : int
    reduction : Reduction
    machine : Machine
    shares_memory : bool
        Whether handshakes are in memory that all ranks share.
    capacity : int
        Bytes of a stream that the ranks can add up there, 0 for none.
    share : float
        Of the time for a byte of MPI's own dense sum, that of the dense sum which ranks would wait for; of :func:`dense_share`.
    encoding : Encoding
        How messages are written.
    hosts : Hosts, optional
        Ranks next to each other that are on one host.
    """
    summed, nbytes = reduction.op.is_sum, packed.packed_bytes(stream)
    always, room, capacity = byte_limits(ranks, shares_memory, capacity)
    if stream.is_dense and not summed:
        return ""
    if nbytes <= always:
        return "packed"
    fits, writes = nbytes <= room and not stream.is_dense, summed and nbytes <= capacity
    return _fastest(problem_of(stream, stream.stored, ranks, reduction, encoding, hosts=hosts), machine, fits, writes, share)


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
    """Return the fastest way for sums of streams of which ranks have so different numbers of entries that each would choose another.

    The mean number stands for the model's k, and the longest stream has to fit. Parameters are those of :func:`expected_beginning`, and
    ``entries``, of each rank; ``stream`` is one of its kind.

    Returns
    -------
    str
        As of :func:`expected_beginning`, of a sum.
    int
        Bytes of a stream for which that way has room.
    """
    ranks, most = len(entries), max(entries)
    problem = problem_of(stream, sum(entries) / ranks, ranks, reduction, encoding, hosts=hosts)
    longest = most * (problem.value_bytes if most == stream.size else problem.value_bytes + problem.index_bytes)
    _, room, capacity = byte_limits(ranks, shares_memory, capacity)
    name = _fastest(problem, machine, longest <= room and most < stream.size, longest <= capacity, share)
    return name, {"packed": room, "sparse_shared": capacity}.get(name, _ANY)


def byte_limits(ranks: int, shares_memory: bool, capacity: int) -> tuple[int, int, int]:
    """The most bytes of a stream that is packed in any case, that can be packed, and that is written to shared memory.

    Beside them, :func:`expected_beginning` of sparse streams of one kind knows of their entries what
    :func:`~sparseallreduce.algorithms.choose.rounded` leaves.
    """
    room = payload_capacity(ranks)
    return min(_ALWAYS_PACKED_SHARED if shares_memory else _ALWAYS_PACKED, room), room, capacity


def dense_share(nbytes: int, oversubscribed: bool) -> float:
    """The share for vectors of so many bytes in shared memory."""
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
    """Seconds that each shortcut takes for streams like this one with so many entries; parameters as for :func:`expected_beginning`."""
    nbytes, room = packed.packed_bytes(stream), payload_capacity(ranks)
    fits = nbytes <= room and not stream.is_dense
    writes = reduction.op.is_sum and nbytes <= capacity
    return _times(problem_of(stream, entries, ranks, reduction, encoding, hosts=hosts), machine, fits, writes, 1.0)


@lru_cache(maxsize=4096)
def _fastest(problem: Problem, machine: Machine, fits: bool, writes: bool, share: float) -> str:
    return choose_shortcut(problem, machine, _times(problem, machine, fits, writes, share))


def _times(problem: Problem, machine: Machine, fits: bool, writes: bool, share: float) -> dict[str, float]:
    """Of what can be packed, or written to shared memory."""
    beta = machine.beta_dense if machine.beta_blocking is None else machine.beta_blocking
    dense = predicted_time("dense", problem, machine._replace(beta_dense=share * beta))
    if writes and problem.size * problem.value_bytes > _CACHED:
        dense *= _BEYOND
    predicted = {"dense": dense}
    if fits:
        latency = (problem.ranks - 1).bit_length() * machine.alpha  # which is that of the handshake
        plain = problem._replace(index_codec="plain", sent_bytes=None)
        predicted["packed"] = predicted_time("allgather", plain, machine._replace(overlap=0.0)) - latency
    if writes:
        predicted["sparse_shared"] = shared_split_time(problem, machine)
    return predicted
