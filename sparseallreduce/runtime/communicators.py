"""Find the channel of a user's communicator, and answer queries about communicators.

mpi4py is imported when a communicator of more than one process is first used, so that a single process needs no MPI library.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.errors import StreamTypeError
from sparseallreduce.runtime import children, launchers
from sparseallreduce.runtime.serial import SERIAL, SerialCommunicator
from sparseallreduce.streams.stream import index_dtype

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI

    from sparseallreduce.runtime.channel import Channel

__all__ = [
    "channel_of",
    "check_owner",
    "has_threads",
    "known_channel",
    "measured",
    "over_mpi",
    "resolve",
    "shared_capacity",
    "shares_memory",
    "size_of",
    "warm_up",
    "world",
]

_latest: tuple[Any, Any] = (), None  # the communicator argument of the last call and its channel, until it is freed
_making = threading.RLock()  # serialises threads that create channels
_keyval: Any = None  # key of the attribute that holds the channel; None until the first is created


class _OverMPI(NamedTuple):
    MPI: Any
    channel: Any
    collective_work: Any
    deadline: Any
    fast: Any
    freeing: Any
    operation: Any
    progress: Any
    signature: Any


@lru_cache(maxsize=1)
def over_mpi() -> _OverMPI:
    """Import MPI, and the modules that need it, on first use."""
    from mpi4py import MPI

    from sparseallreduce.runtime import channel, collective_work, deadline, fast, freeing, operation, progress, signature

    return _OverMPI(MPI, channel, collective_work, deadline, fast, freeing, operation, progress, signature)


def world() -> MPI.Intracomm | SerialCommunicator:
    """Return ``MPI.COMM_WORLD``, or ``SERIAL`` in a single process without MPI and in a process that a rank has started.

    Raises
    ------
    LauncherError
        If a launcher has started several processes, and MPI does not connect them.
    MPIUnavailableError
        If a launcher has started several processes, and mpi4py or its MPI library is missing.
    """
    if children.is_child():
        launchers.check(None, child=True)
        return SERIAL
    try:
        MPI = launchers.initialised_mpi()
    except (ImportError, RuntimeError) as error:
        launchers.check_missing(error)
        return SERIAL
    if not MPI.Is_initialized() or MPI.Is_finalized():
        launchers.check_running(MPI)
        launchers.check(MPI)
        return SERIAL
    comm: Any = MPI.COMM_WORLD
    if comm.size == 1:
        launchers.check(MPI)
    children.mark()
    return comm  # type: ignore[no-any-return]


def resolve(comm: Any) -> Any:
    """Return the checked communicator, or the one of all ranks for None.

    Raises
    ------
    ForkError
        If it belongs to the rank from which this process was forked.
    LauncherError, MPIUnavailableError
        As :func:`world`.
    """
    if comm is None:
        return world()
    check_owner(comm)
    return comm


def check_owner(comm: Any) -> None:
    """Check that a communicator belongs to this process.

    Raises
    ------
    ForkError
        If it belongs to the rank from which this process was forked.
    """
    if children.generation:
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is not None and isinstance(comm, mpi.Comm):
            children.check_generation(0, "this communicator")


def size_of(comm: Any) -> int:
    """Return the number of ranks of a communicator.

    Raises
    ------
    StreamTypeError
        If it is not an intracommunicator.
    ForkError
        If it belongs to the rank from which this process was forked.
    """
    if isinstance(comm, SerialCommunicator):
        return 1
    if not hasattr(comm, "Get_size") or not hasattr(comm, "Idup"):
        raise StreamTypeError(f"comm must be an mpi4py intracommunicator or sparseallreduce.SERIAL, not {type(comm).__name__}")
    check_owner(comm)
    if not comm:
        raise StreamTypeError("comm must be an intracommunicator, not MPI.COMM_NULL: it was freed, or this rank is not part of it")
    if comm.is_inter:
        raise StreamTypeError("comm must be an intracommunicator: merge the intercommunicator first")
    children.mark()
    return int(comm.size)


def has_threads() -> bool:
    """Return True if any thread may call MPI at any time (MPI_THREAD_MULTIPLE)."""
    MPI = over_mpi().MPI
    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def known_channel(comm: Any) -> Channel | None:
    """Return the channel of a communicator (COMM_WORLD for None), or None if it has none yet."""
    global _latest
    latest, channel = _latest
    if comm is not latest or not (comm is None or comm):  # it may have been freed
        if _keyval is None:
            return None
        MPI = over_mpi().MPI
        found = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(found, MPI.Intracomm) or not found:
            return None
        channel = found.Get_attr(_keyval)
        if channel is None:
            return None
        _latest = comm, channel
    return channel  # type: ignore[no-any-return]


def channel_of(comm: MPI.Intracomm) -> Channel:
    """Return the channel of a communicator, which is one of its attributes. Create it in the first operation."""
    global _keyval
    check_owner(comm)
    over = over_mpi()
    with _making:
        if _keyval is None:
            _keyval = over.freeing.keyval(over.freeing.channel_given_back, _note_freed)
        channel: Any = comm.Get_attr(_keyval)
        if channel is None:
            over.progress.recall_freed()
            over.progress.give_back_freed()
            channel = over.channel.Channel(comm)
            comm.Set_attr(_keyval, channel)  # before the duplication: a rank that failed in between would duplicate it again
        found: Channel = channel
        if found.messages is None:  # also true if the first operation was interrupted before this
            try:
                found.begin(comm)
            except BaseException as error:
                found.give_up(comm, error)
                raise
    return found


def measured(comm: MPI.Intracomm) -> Machine | None:
    """Return the measured constants of the machine and network that connect the ranks of ``comm``. Collective."""
    return _ready_channel(comm).machine


def shares_memory(comm: MPI.Intracomm) -> bool:
    """Return True if the ranks of ``comm`` agree on their operations in shared memory. Collective."""
    return _ready_channel(comm).shares_memory


def shared_capacity(comm: MPI.Intracomm) -> int:
    """Return the largest stream, in bytes, that the ranks of ``comm`` add in shared memory; 0 if they share none. Collective."""
    memory = _ready_channel(comm).sparse_memory
    return 0 if memory is None else memory.capacity


def warm_up(comm: MPI.Intracomm | SerialCommunicator, size: int, dtype: np.dtype[Any]) -> None:
    """Compile or load the kernels that the ranks of ``comm`` need to add such streams in shared memory. Collective."""
    if size_of(comm) > 1 and shared_capacity(cast("MPI.Intracomm", comm)):
        from sparseallreduce.runtime.memory.sum_parts import sum_parts_kernel

        sum_parts_kernel(index_dtype(size), dtype)


def _ready_channel(comm: MPI.Intracomm) -> Channel:
    channel = channel_of(comm)
    over_mpi().channel.prepare(channel)
    return channel


def _note_freed(channel: Channel) -> None:
    global _latest
    _latest = (), None
    over_mpi().freeing.note_channel(channel)


def _after_fork() -> None:
    """Discard the parent's channels in a forked process."""
    global _latest, _keyval, _making
    if children.after_fork():
        _latest, _keyval, _making = ((), None), None, threading.RLock()
        if over_mpi.cache_info().currsize:
            over_mpi().progress.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
if "mpi4py.MPI" in sys.modules and sys.modules["mpi4py.MPI"].Is_initialized():
    children.mark()
