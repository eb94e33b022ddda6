"""How the ranks of a communicator prepare its channel together: who is where, what the network is like, what they share."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from mpi4py import MPI

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.measuring import exchange_seconds, measure, pack_machine, unpack_machine
from sparseallreduce.algorithms.steps import Share, Step
from sparseallreduce.runtime.calibration import Calibration
from sparseallreduce.runtime.handshake import shared
from sparseallreduce.runtime.handshake.base import payload_capacity
from sparseallreduce.runtime.handshake.shared import SharedHandshake
from sparseallreduce.runtime.hosts import Place, same_host, this_place
from sparseallreduce.runtime.memory import dense
from sparseallreduce.runtime.memory.dense import Area
from sparseallreduce.runtime.memory.host import HostMemory
from sparseallreduce.runtime.memory.mapping import SharedFile, page_multiple, shared_file
from sparseallreduce.runtime.memory.sparse import SparseMemory
from sparseallreduce.runtime.operation import Operation
from sparseallreduce.runtime.processes import started_at
from sparseallreduce.runtime.trace import Trace
from sparseallreduce.runtime.work import Preparing
from sparseallreduce.streams.kernels.backend import module_in_use

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = [
    "Group",
    "calibrated",
    "exchange_times",
    "group_of_ranks",
    "made_host_memory",
    "made_slots_and_areas",
    "made_sparse_memory",
    "own_operation",
    "settled",
]

_CAREFUL = 3  # measurements of a machine that is not known yet, of which the fastest of each constant counts
_NO_TRACES: list[Trace] = []
_UNKNOWN = Machine(*[0.0] * len(Machine._fields))
_PROCESS = struct.Struct("<qq")  # a rank's process, and when that started
_SETTLED = struct.Struct("<q?")  # the last operation that failed with an earlier preparation, and whether this host has memory
_GPU = 8  # bytes of what tells GPUs apart
_GROUPS = 256  # most of which constants are remembered

_remembered: dict[bytes, Machine] = {}  # by the digest of a group, as `group_of_ranks` gives it, and this rank's GPU, if it uses one


class Group(NamedTuple):
    """Who the ranks of a communicator are."""

    places: list[Place]
    processes: list[tuple[int, int]]  # and when they started
    digest: bytes  # the same for the same processes in the same order and places


def group_of_ranks() -> Generator[Step, Any, Group]:
    """Which process each rank is, and where it runs."""
    process = os.getpid()
    records: list[bytes] = yield Share(this_place().pack() + _PROCESS.pack(process, started_at(process)))
    places = [Place.unpack(record[: -_PROCESS.size]) for record in records]
    processes = [_PROCESS.unpack(record[-_PROCESS.size :]) for record in records]
    return Group(places, processes, hashlib.blake2b(b"".join(records), digest_size=16).digest())


def calibrated(channel: Channel, group: Group) -> Generator[Step, Any, Machine]:
    """The constants of the network between these processes, the same on all ranks; they are measured once, not for each communicator.

    Those of GPUs are measured where all ranks have met arrays on one by now.
    """
    xp = module_in_use()
    ours = _gpu_of(xp, group.places[channel.rank].memory)
    known = _remembered.get(group.digest + ours)
    offers: list[bytes] = yield Share(ours.ljust(_GPU, b"\0") + pack_machine(known or _UNKNOWN))
    if known is not None and len({offer[_GPU:] for offer in offers}) == 1:
        return known
    gpus = [offer[:_GPU] for offer in offers]
    xp = xp if all(map(any, gpus)) else None
    machine = yield from _measured(channel, [place.memory for place in group.places], len(same_host(group.places, channel.rank)), xp, gpus)
    while len(_remembered) >= _GROUPS:
        _remembered.pop(next(iter(_remembered)), None)
    _remembered[group.digest + ours] = machine
    return machine


def _gpu_of(xp: Any, host: bytes) -> bytes:
    """What ranks that use one GPU have in common, and no others; nothing without one."""
    if xp is None:
        return b""
    return hashlib.blake2b(host + xp.cuda.Device().pci_bus_id.encode(), digest_size=_GPU).digest()


def _measured(channel: Channel, hosts: list[bytes], here: int, xp: Any, gpus: list[bytes]) -> Generator[Step, Any, Machine]:
    """The constants of this network, the same on all ranks: those that rank 0 keeps of it, if they are like what is measured."""
    rank, ranks, sharing = channel.rank, channel.ranks, max(1.0, here / channel.cores)
    library = MPI.Get_library_version().splitlines()[0]
    faster_blocking = not library.startswith("MPICH")
    near = sorted(channel.near)
    place, pieces = near.index(rank), len(near) < ranks
    where: dict[str, Any] = {"neighbours": (near[(place + 1) % len(near)], near[place - 1]) if pieces and len(near) > 1 else None}
    if xp is not None:
        where["gpu"] = xp, float(gpus.count(gpus[rank]))

    def attempt() -> Generator[Step, Any, tuple[Machine, tuple[float, float]]]:
        machine = yield from measure(rank, ranks, sharing, faster_blocking, pieces=pieces, **where)
        return machine, ((yield from exchange_times(channel)) if pieces else (math.inf, 0.0))

    measured, exchanges = yield from attempt()
    kind = library if xp is None else f"{library}, {_kind_of_gpu(xp)} {[gpus.index(gpu) for gpu in gpus]}"
    calibration = Calibration(kind, hosts, channel.cores) if rank == 0 else None
    known = yield from _kept(calibration, _encoding(measured, *exchanges))
    if known is not None:
        return known
    for _ in range(_CAREFUL - 1):  # what is to last had better not be of a moment at which the machine had much else to do
        again, seconds = yield from attempt()
        constants: Any = zip(measured, again, strict=True)  # all numbers, as measured
        measured, exchanges = Machine(*map(min, constants)), (min(exchanges[0], seconds[0]), min(exchanges[1], seconds[1]))
    machine = _encoding(measured, *exchanges)
    known = yield from _kept(calibration, machine)
    if known is None and calibration is not None:
        calibration.keep(machine)
    return known or machine


def _kept(calibration: Calibration | None, measured: Machine) -> Generator[Step, Any, Machine | None]:
    """What rank 0, which alone has a calibration, keeps of a machine like this one; the same on all ranks."""
    return (yield from _of_rank_0(None if calibration is None else calibration.like(measured)))


def _encoding(machine: Machine, whole: float, pieces: float) -> Machine:
    """The same machine, on which messages are encoded unless a sum takes longer in pieces than in whole messages."""
    return machine if pieces < whole else machine._replace(codec=0.0, overlap=0.0)


def _kind_of_gpu(xp: Any) -> str:
    name: bytes = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"]
    return name.decode(errors="replace")


def exchange_times(channel: Channel) -> Generator[Step, Any, tuple[float, float]]:
    """Return the seconds of a sum in messages as they lie in memory, and in encoded pieces: no less on a link as fast as the codec."""
    seconds = []
    try:
        for channel.in_pieces in (False, True):
            channel.assumed = 1.0  # a byte, so that positions are written in few
            seconds.append((yield from exchange_seconds(channel.rank, channel.ranks)))
    finally:
        channel.in_pieces, channel.assumed = True, 0.0
    whole, pieces = seconds
    return whole, pieces


def made_slots_and_areas(channel: Channel) -> Generator[Step, Any, tuple[list[SharedHandshake], list[Area]] | None]:
    """Memory for the handshakes of the ranks of a host, and for sums of dense vectors, if they can share it."""
    rank, ranks, cores, capacity = channel.rank, channel.ranks, channel.cores, payload_capacity(channel.ranks)
    end = page_multiple(shared.nbytes(ranks, capacity))

    def make(file: SharedFile) -> tuple[list[SharedHandshake], list[Area]]:
        memory = file.map([0], end + dense.nbytes(ranks, cores))[0]

        def reserve(place: int, nbytes: int) -> bool:
            return file.reserve([(end + place, nbytes)])

        slots = shared.slots_in(memory[: shared.nbytes(ranks, capacity)], rank, ranks, capacity, cores)
        return slots, dense.areas_in(memory[end:], rank, ranks, cores, reserve)

    pieces = [(0, end), *((end + place, nbytes) for place, nbytes in dense.reserved(ranks, cores))]
    made = yield from shared_file(rank, end + dense.nbytes(ranks, cores), pieces, make)
    return made


def made_sparse_memory(channel: Channel) -> Generator[Step, Any, SparseMemory | None]:
    """Memory in which the ranks of a host add up sparse streams, if they can share it."""

    def make(file: SharedFile) -> SparseMemory:
        return SparseMemory(file, channel.rank, channel.ranks, channel.oversubscribed, channel.cores)

    ranks = channel.ranks
    memory: SparseMemory | None = yield from shared_file(
        channel.rank, SparseMemory.nbytes(ranks), SparseMemory.reserved(ranks), make
    )
    return memory


def made_host_memory(channel: Channel) -> Generator[Step, Any, HostMemory | None]:
    """Memory by which the ranks of each host hand each other parts of streams, on the hosts where they can share it."""
    host, place = channel.hosts.place_of(channel.rank)
    members = channel.hosts.members[host]
    ranks = len(members)
    steps = shared_file(place, HostMemory.nbytes(ranks), HostMemory.reserved(ranks), lambda file: HostMemory(file, members, place))
    records: list[bytes] | None = None
    while True:
        try:
            step = steps.send(records)
        except StopIteration as stop:
            memory: HostMemory | None = stop.value
            return memory if ranks > 1 else None
        assert isinstance(step, Share)
        everyone: list[bytes] = yield step
        records = [everyone[rank] for rank in members]


def settled(failed_through: int, has_memory: bool) -> Generator[Step, Any, tuple[int, bool]]:
    """At the end: the last operation that failed with an earlier preparation on any rank, and whether all have memory."""
    records: list[bytes] = yield Share(_SETTLED.pack(failed_through, has_memory))
    failed, memory = zip(*map(_SETTLED.unpack, records), strict=True)
    return max(failed), all(memory)


def own_operation(channel: Channel, work: Preparing) -> Operation:
    """An operation of the preparation of a channel, begun; no trace counts it."""
    operation = Operation(channel, work, None, channel.next_own())
    operation.own, operation.traces = True, _NO_TRACES
    operation.enlist()
    operation.advance()
    return operation


def _of_rank_0(machine: Machine | None) -> Generator[Step, Any, Machine | None]:
    """What rank 0 knows, on all ranks."""
    records: list[bytes] = yield Share(pack_machine(machine or _UNKNOWN))
    given = unpack_machine(records[0])
    return None if given == _UNKNOWN else given
