"""Explain which algorithm "auto" selects for given streams, and why: ``explain``."""

from __future__ import annotations

import json
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Unpack

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.allreduce import Call, make_call
from sparseallreduce.algorithms.choose import choose, problem_of
from sparseallreduce.algorithms.choose import predicted_times as predicted_times_of_allreduce
from sparseallreduce.algorithms.collectives.allgather import DISJOINT, RANGES
from sparseallreduce.algorithms.collectives.call import Collective, CollectiveCall, collective_problem, make_collective_call
from sparseallreduce.algorithms.collectives.cost import MODELS, arriving_bytes, predicted_times
from sparseallreduce.algorithms.collectives.cost import choose as choose_collective
from sparseallreduce.algorithms.cost import Machine, Problem, copy_time, sent_bytes
from sparseallreduce.algorithms.overlap import Overlap, estimated, sample_bytes, sample_of, share_records
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.runtime.communicators import channel_of, over_mpi, resolve, size_of
from sparseallreduce.runtime.launching import ErrorReporter, launch
from sparseallreduce.runtime.options import OperationOptions
from sparseallreduce.runtime.predictions import beginning_times, collective_beginning, expected_beginning, uneven_beginning
from sparseallreduce.streams.operator import Operator
from sparseallreduce.streams.packed import packed_bytes
from sparseallreduce.streams.reduction import Reduction

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator
    from sparseallreduce.streams.stream import SparseStream

__all__ = ["Explanation", "explain"]

_ALONE = "alone"
_SHORTCUTS = {"packed", "sparse_shared", "dense"}
_OF_COLLECTIVE = struct.Struct("<qqqq16s")  # entries announced, those of the stream, its size and packed bytes, and what would begin
_TIMES = 1024  # bytes of predicted times as text
_RECORD = struct.Struct("<q16s")  # entries, and what this rank would start with; a sample follows


@dataclass(frozen=True)
class Explanation:
    """The choice of "auto", and the predictions that it is based on.

    Attributes
    ----------
    choice : str
        An algorithm, or a shortcut that needs none: "packed" (streams are sent inside the agreement messages), "sparse_shared" (streams are
        added in memory shared by the ranks of one host), or "alone" (one rank). If the numbers of entries differ so much that ranks would
        choose differently, it is the choice from the second such reduction on.
    predicted : dict of float
        Expected time of each algorithm or shortcut, in seconds.
    bytes : dict of float
        Expected bytes received by a rank in messages, for each of them.
    union : float
        Expected number of entries in the sum.
    entries : list of int
        Number of entries in each rank's stream.
    size : int
        Dimension of the vector.
    copies : dict of float
        Part of the expected seconds that is spent on copies between GPU and host; empty if streams are on the host.
    largest_part : float
        Expected number of entries, over all ranks, in the fullest of the P parts into which a split cuts the index space; the mean part has
        the mean of ``entries``. Zero if the ranks do not exchange samples: inside one host, and on a GPU.
    """

    choice: str
    predicted: dict[str, float]
    bytes: dict[str, float]
    union: float
    entries: list[int]
    size: int
    copies: dict[str, float] = field(default_factory=dict)
    largest_part: float = 0.0

    def __str__(self) -> str:
        share = self.union / self.size if self.size else 0.0
        lines = [
            f"auto takes {self.choice}: N = {self.size:,}, {sum(self.entries):,} entries on {len(self.entries)} ranks, "
            f"about {self.union:,.0f} in their sum ({share:.3%})",
            *self._parts(),
            f"{'way':<26}{'expected':>12}{'      copies' if self.copies else ''}{'bytes in':>16}",
        ]
        for name, seconds in sorted(self.predicted.items(), key=lambda item: item[1]):
            mark = "*" if name == self.choice else " "
            copied = f"{1e3 * self.copies[name]:>9.3f} ms" if self.copies else ""
            lines.append(f"{mark} {name:<24}{1e3 * seconds:>9.3f} ms{copied}{self.bytes[name]:>16,.0f}")
        return "\n".join(lines)

    def _parts(self) -> list[str]:
        if not self.largest_part:
            return []
        mean = sum(self.entries) / len(self.entries)
        return [f"a split has {self.largest_part:,.0f} entries of all ranks in its largest part, {mean:,.0f} in the mean one"]


def explain(
    stream: SparseStream,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    op: str | Operator | MPI.Op = "sum",
    *,
    collective: str = "allreduce",
    root: int = 0,
    bounds: Sequence[int] | None = None,
    join: str | Operator | MPI.Op = "ranges",
    **options: Unpack[OperationOptions],
) -> Explanation:
    """Return the algorithm that "auto" selects for a blocking ``allreduce(stream, comm, op)``, and the predictions. Collective.

    Parameters
    ----------
    stream, comm, op
        As for :func:`~sparseallreduce.allreduce`. The reduction itself is not executed.
    collective, root, bounds, join
        Another collective, "reduce", "reduce_scatter", "allgather" or "bcast", and its arguments.
    **options
        As for :func:`~sparseallreduce.allreduce`.

    Returns
    -------
    Explanation
        The same on all ranks. ``print`` shows it as a table.

    Raises
    ------
    SparseAllreduceError
        As :func:`~sparseallreduce.allreduce`.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.explain(sar.SparseStream([3], [2.0], 8), comm=sar.SERIAL).choice
    'alone'
    """
    comm = resolve(comm)
    other = Collective.named(collective, root, bounds, join)
    with ErrorReporter(comm):
        made: Any
        if other is not None:
            made, intent = make_collective_call(other, stream, op, "auto", options, comm.rank, size_of(comm))
        else:
            made, intent = make_call(stream, op, "auto", options)
        if intent.error is None:
            intent = intent._replace(terms=(*intent.terms, ("call", "explain")))
        explained = _explained if other is None else _explained_collective
        return launch(comm, intent, lambda rank, ranks: explained(made, comm, ranks), blocking=True).wait()  # type: ignore[no-any-return]


def _explained_collective(made: CollectiveCall, comm: Any, ranks: int) -> Generator[Step, Any, Explanation]:
    """Return the explanation of a collective other than allreduce."""
    name, call = made.collective.name, made.call
    stream = call.stream
    if ranks == 1:
        return Explanation(_ALONE, {_ALONE: 0.0}, {_ALONE: 0.0}, float(stream.nnz), [stream.nnz], stream.size)
    channel = channel_of(comm)
    is_moved, machine = _only_moves(made.collective), call.machine or channel.machine or Machine()
    announced, is_sender = made.collective.entries(stream, channel.rank), name != "bcast" or channel.rank == made.collective.root
    ours, shortcuts = _shortcuts(made, channel, announced, machine)
    known = (announced, stream.stored, stream.size, packed_bytes(stream)) if is_sender else (0, 0, 0, 0)
    records = yield from share_records(_OF_COLLECTIVE.pack(*known, ours.encode()[:16]), _OF_COLLECTIVE.size)
    rows = [_OF_COLLECTIVE.unpack(record) for record in records]
    entries, sizes, begins = [row[1] for row in rows], [row[2] for row in rows], {row[4].rstrip(b"\0").decode() for row in rows}
    problem = collective_problem(made, [row[0] for row in rows], channel.hosts)
    predicted = {**predicted_times(name, problem, machine), **(shortcuts if channel.rank == 0 else {})}
    if is_moved and begins == {"packed"}:  # the handshake takes the latency
        predicted["packed"] = max(0.0, min(predicted.values()) - (ranks - 1).bit_length() * machine.alpha)
    times: list[bytes] = yield Share(json.dumps(predicted).encode().ljust(_TIMES))
    predicted = json.loads(times[0])  # those of the shortcuts are by the stream of rank 0
    choice = _shortcut(begins) or choose_collective(name, problem, machine)
    packed = max(row[3] for row in rows)
    nbytes = {
        way: arriving_bytes(name, way, problem, machine) if way in MODELS[name] else _bytes_in(way, problem, machine, packed)
        for way in predicted
    }
    union = float(sum(entries)) if is_moved else problem.held(ranks)
    return Explanation(choice, predicted, nbytes, union, entries, sum(sizes) if made.collective.join == RANGES else max(sizes))


def _explained(call: Call | None, comm: Any, ranks: int) -> Generator[Step, Any, Explanation]:
    assert call is not None, "all ranks have been told of the error"
    on_device, stream, reduction = call.stream.on_device, call.stream.to_host(), Reduction(call.op, call.switch_density)
    if ranks == 1:
        return Explanation(_ALONE, {_ALONE: 0.0}, {_ALONE: 0.0}, float(stream.nnz), [stream.nnz], stream.size)
    channel = channel_of(comm)
    machine, shared = call.machine or channel.machine or Machine(), _shared(call, channel)
    ours = "" if on_device else expected_beginning(stream, ranks, reduction, machine, **shared)  # it takes host streams only
    record = _RECORD.pack(stream.stored, ours.encode()[:16]) + sample_of(stream, channel.rank, ranks)
    records = yield from share_records(record, _RECORD.size + sample_bytes(stream.size))
    known = [_RECORD.unpack_from(record) for record in records]
    entries = [count for count, _ in known]
    overlap = estimated([record[_RECORD.size :] for record in records], stream.size)
    problem = problem_of(stream, sum(entries) / ranks, ranks, reduction, call.encoding, overlap, channel.hosts)
    problem = problem._replace(on_device=on_device)
    predicted = predicted_times_of_allreduce(problem, machine)
    if not on_device:
        predicted |= beginning_times(stream, sum(entries) / ranks, ranks, reduction, machine, **shared)
    begins = {name.rstrip(b"\0").decode() for _, name in known}
    begins = {uneven_beginning(stream, entries, reduction, machine, **shared)[0]} if len(begins) > 1 and call.op.is_sum else begins
    # "auto" samples positions only between hosts; inside a host and on a GPU it assumes random positions.
    is_sampled = len(channel.near) < channel.ranks and not on_device
    assumed = problem_of(stream, sum(entries) / ranks, ranks, reduction, call.encoding, None, channel.hosts)
    considered = problem if is_sampled else assumed._replace(on_device=on_device)
    choice = _shortcut(begins) or choose(considered, machine)
    predicted.setdefault(choice, min(predicted.values()))
    return Explanation(
        choice,
        predicted,
        {name: _bytes_in(name, problem, machine, packed_bytes(stream)) for name in predicted},
        problem.held(ranks),
        entries,
        stream.size,
        {name: copy_time(name, problem, machine) for name in predicted} if on_device else {},
        _largest_part(overlap, stream.size, ranks) * sum(entries) / ranks if is_sampled else 0.0,
    )


def _only_moves(collective: Collective) -> bool:
    """Return True if no values are combined."""
    return collective.name == "bcast" or collective.join in (RANGES, DISJOINT)


def _shortcut(begins: set[str]) -> str | None:
    """Return the shortcut with which all ranks would begin, None if they would not."""
    return next(iter(begins)) if len(begins) == 1 and begins <= _SHORTCUTS else None


def _shortcuts(made: CollectiveCall, channel: Any, announced: int, machine: Machine) -> tuple[str, dict[str, float]]:
    """Return what this rank would begin with, and the predicted times of the shortcuts of sums."""
    call, ranks = made.call, channel.ranks
    if _only_moves(made.collective):
        work = over_mpi().collective_work.Gathering(made, Intent((), announced), channel)
        return "packed" if work.sends_with_record(call.stream) else "", {}
    if call.stream.on_device:
        return "", {}
    shared, reduction = _shared(call, channel), Reduction(call.op, call.switch_density)
    considered = collective_problem(made, [announced] * ranks, channel.hosts)
    ours = collective_beginning(made.collective.name, considered, call.stream, ranks, reduction, machine, **shared)
    return ours, beginning_times(call.stream, call.stream.stored, ranks, reduction, machine, **shared)


def _shared(call: Any, channel: Any) -> dict[str, Any]:
    """Return what the models of shortcuts take from a call and its channel."""
    return {
        "shares_memory": channel.shares_memory,
        "capacity": 0 if channel.sparse_memory is None else channel.sparse_memory.capacity,
        "encoding": call.encoding,
        "hosts": channel.hosts,
    }


def _largest_part(overlap: Overlap | None, size: int, ranks: int) -> float:
    """Return the largest share of a rank's entries in one part, 0 if it is not known how they are spread."""
    return 0.0 if overlap is None or overlap.spread is None else overlap.spread.parts(0, size, ranks).figures.entries


def _bytes_in(name: str, problem: Problem, machine: Machine, packed: int) -> float:
    if name == "packed":
        return float((problem.ranks - 1) * packed)
    return 0.0 if name == "sparse_shared" else sent_bytes(name, problem, machine)
