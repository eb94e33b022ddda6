"""Set up a channel together with the other ranks: locate ranks, measure the network, and create shared memory."""

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
from sparseallreduce.runtime.processes import started_at
from sparseallreduce.streams.kernels.backend import module_in_use

if TYPE_CHECKING:
    from sparseallreduce.runtime.interfaces import Ranks

__all__ = [
    "Group",
    "calibrated",
    "exchange_times",
    "group_of_ranks",
    "made_host_memory",
    "made_slots_and_areas",
    "made_sparse_memory",
    "settled",
]

_CAREFUL = 3  # measurements of an unknown machine; the smallest of each constant is used
_UNKNOWN = Machine(*[0.0] * len(Machine._fields))
_PROCESS = struct.Struct("<qq")  # process id of a rank and its start time
_SETTLED = struct.Struct("<q?")  # last operation that failed with an earlier preparation; whether this host has shared memory
_GPU = 8  # bytes of a GPU's identifier
_GROUPS = 256  # largest number of groups whose constants are remembered

_remembered: dict[bytes, Machine] = {}  # by the digest of a group and the identifier of this rank's GPU


class Group(NamedTuple):
    """The processes that are the ranks of a communicator, and where they run."""

    places: list[Place]
    processes: list[tuple[int, int]]  # process ids and start times
    digest: bytes  # equal for the same processes in the same order and places


def group_of_ranks() -> Generator[Step, Any, Group]:
    """Return which process each rank is, and where it runs."""
    process = os.getpid()
    records: list[bytes] = yield Share(this_place().pack() + _PROCESS.pack(process, started_at(process)))
    places = [Place.unpack(record[: -_PROCESS.size]) for record in records]
    processes = [_PROCESS.unpack(record[-_PROCESS.size :]) for record in records]
    return Group(places, processes, hashlib.blake2b(b"".join(records), digest_size=16).digest())


def calibrated(channel: Ranks, group: Group) -> Generator[Step, Any, Machine]:
    """Return the machine constants for these processes, the same on all ranks. They are measured once, not for each communicator.

    GPU constants are measured if all ranks have used arrays on a GPU by now.
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
    """Return an identifier that only ranks on the same GPU share; empty without a GPU."""
    if xp is None:
        return b""
    return hashlib.blake2b(host + xp.cuda.Device().pci_bus_id.encode(), digest_size=_GPU).digest()


def _measured(channel: Ranks, hosts: list[bytes], here: int, xp: Any, gpus: list[bytes]) -> Generator[Step, Any, Machine]:
    """Return the constants of this network, the same on all ranks: rank 0's stored ones if they are close to new measurements."""
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
    for _ in range(_CAREFUL - 1):  # constants that are stored should not come from a moment of high load
        again, seconds = yield from attempt()
        constants: Any = zip(measured, again, strict=True)  # all numbers, as measured
        measured, exchanges = Machine(*map(min, constants)), (min(exchanges[0], seconds[0]), min(exchanges[1], seconds[1]))
    machine = _encoding(measured, *exchanges)
    known = yield from _kept(calibration, machine)
    if known is None and calibration is not None:
        calibration.keep(machine)
    return known or machine


def _kept(calibration: Calibration | None, measured: Machine) -> Generator[Step, Any, Machine | None]:
    """Return what rank 0, which alone has a calibration, has stored that is close to ``measured``; the same on all ranks."""
    return (yield from _of_rank_0(None if calibration is None else calibration.like(measured)))


def _encoding(machine: Machine, whole: float, pieces: float) -> Machine:
    """Return the machine with encoding between hosts disabled if a sum in pieces takes longer than in whole messages."""
    return machine if pieces < whole else machine._replace(codec=0.0, overlap=0.0)


def _kind_of_gpu(xp: Any) -> str:
    name: bytes = xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"]
    return name.decode(errors="replace")


def exchange_times(channel: Ranks) -> Generator[Step, Any, tuple[float, float]]:
    """Return the seconds of a sum in uncompressed messages, and in encoded pieces.

    The latter take no less time on a link that is as fast as the codec.
    """
    seconds = []
    try:
        for channel.in_pieces in (False, True):
            channel.assumed = 1.0  # per byte, a slow link, so that positions are compressed
            seconds.append((yield from exchange_seconds(channel.rank, channel.ranks)))
    finally:
        channel.in_pieces, channel.assumed = True, 0.0
    whole, pieces = seconds
    return whole, pieces


def made_slots_and_areas(channel: Ranks) -> Generator[Step, Any, tuple[list[SharedHandshake], list[Area]] | None]:
    """Create memory for the handshakes and the dense sums of the ranks of a host; None if they cannot share memory."""
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


def made_sparse_memory(channel: Ranks) -> Generator[Step, Any, SparseMemory | None]:
    """Create memory in which the ranks of a host add sparse streams; None if they cannot share memory."""

    def make(file: SharedFile) -> SparseMemory:
        return SparseMemory(file, channel.rank, channel.ranks, channel.oversubscribed, channel.cores)

    ranks = channel.ranks
    memory: SparseMemory | None = yield from shared_file(channel.rank, SparseMemory.nbytes(ranks), SparseMemory.reserved(ranks), make)
    return memory


def made_host_memory(channel: Ranks) -> Generator[Step, Any, HostMemory | None]:
    """Create memory through which the ranks of each host exchange parts of streams; None on hosts without shared memory."""
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
        all_records: list[bytes] = yield step
        records = [all_records[rank] for rank in members]


def settled(failed_through: int, has_memory: bool) -> Generator[Step, Any, tuple[int, bool]]:
    """Return the last operation that failed with an earlier preparation on any rank, and whether all ranks have host memory."""
    records: list[bytes] = yield Share(_SETTLED.pack(failed_through, has_memory))
    failed, memory = zip(*map(_SETTLED.unpack, records), strict=True)
    return max(failed), all(memory)


def _of_rank_0(machine: Machine | None) -> Generator[Step, Any, Machine | None]:
    """Return rank 0's machine on all ranks."""
    records: list[bytes] = yield Share(pack_machine(machine or _UNKNOWN))
    given = unpack_machine(records[0])
    return None if given == _UNKNOWN else given
