"""Initialisation of PyTorch's process group between the ranks of MPI, without ``torchrun``.

The ranks find out through MPI which of them share a host, and at which address they can reach rank 0. Rank 0 runs the store through which
PyTorch's backends find each other, as the agent of ``torchrun`` does. It opens the port before it sends its number to the other ranks, so
that no other process can take the port.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from typing import Any

import torch
from torch import distributed

from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.hosts import Place, count_cores, same_host, this_place
from sparseallreduce.runtime.launchers import OWN_RUN
from sparseallreduce.runtime.objects import agreed, collective, gather, gather_results

__all__ = ["init_process_group", "set_environment"]

_LOOPBACK = "127.0.0.1"
_SECONDS = 3.0  # the longest wait for an address to answer
_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface
_REQUEST = struct.Struct("256s")

_groups = 0  # the number of process groups that have used the store
_store: Any = None  # the store of rank 0, kept for the lifetime of the process


def init_process_group(backend: str | None = None, comm: Any = None, **options: Any) -> None:
    """Initialise ``torch.distributed`` between the ranks of an MPI communicator. Collective.

    Call it in place of ``torch.distributed.init_process_group`` in a script that ``mpiexec`` or ``srun`` starts.

    Parameters
    ----------
    backend : str, optional
        "gloo", "nccl", or another backend of PyTorch. By default PyTorch uses gloo for CPU tensors and nccl for GPU tensors.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    **options
        Options of ``torch.distributed.init_process_group``, except ``init_method``, ``store``, ``rank`` and ``world_size``.

    Raises
    ------
    SparseAllreduceError
        On every rank, if an option is not accepted, or if a rank cannot reach rank 0.
    LauncherError
        If several processes were started without a connection through MPI, as ``torchrun`` does.
    ValueError
        If a process group is initialised already.

    Notes
    -----
    It sets the variables of :func:`set_environment`, so that a script finds ``LOCAL_RANK`` in its environment.

    Examples
    --------
    >>> import torch, sparseallreduce as sar
    >>> from sparseallreduce.torch import init_process_group
    >>> init_process_group("gloo", sar.SERIAL)          # under mpiexec without the communicator
    >>> torch.distributed.get_world_size()
    1
    >>> torch.distributed.destroy_process_group()
    """
    global _groups
    refused = {"init_method", "store", "rank", "world_size"} & options.keys()
    comm = resolve(comm)
    agreed(comm, lambda: _check(refused))
    found = set_environment(comm)
    own = distributed.TCPStore(found["MASTER_ADDR"], int(found["MASTER_PORT"]), comm.size, is_master=False)
    _groups += comm.rank == 0
    store = distributed.PrefixStore(f"group {gather(comm, _groups)[0]}", own)  # with keys that no later group uses
    distributed.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, **options)


@collective
def set_environment(comm: Any) -> dict[str, str]:
    """Set the environment variables that ``torchrun`` sets, for ``torch.distributed`` to use. Collective.

    These are RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE, ROLE_NAME,
    MASTER_ADDR, MASTER_PORT and those that begin with TORCHELASTIC. Between hosts it also sets GLOO_SOCKET_IFNAME, unless that is set: gloo
    would take the address of the host's name, which is often that of the loopback interface. If OMP_NUM_THREADS is not set, it is set to
    divide the cores of a machine among its ranks, and the number of PyTorch's threads is set as well.

    LOCAL_RANK numbers the ranks of a host, as NCCL knows hosts: by the variable NCCL_HOSTID, or else by host name and boot id. A container
    with a host name of its own is therefore a host of its own, as it is to ``torchrun``.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or SERIAL
        The communicator. If MASTER_ADDR and MASTER_PORT are set in the environment of its rank 0, they are used.

    Returns
    -------
    dict
        The variables and their values.

    Raises
    ------
    SparseAllreduceError
        On every rank, if the store cannot be opened, or if a rank cannot reach it at any address of rank 0.
    """
    gathered = gather(comm, (this_place(), _network(), _host()))
    found = _positions([host for _, _, host in gathered], comm.rank)
    threads = _threads([place for place, _, _ in gathered], comm.rank)
    port = gather_results(comm, lambda: _open_store(comm.size) if comm.rank == 0 else 0)[0]
    one_host = all(network == gathered[0][1] for _, network, _ in gathered)
    found |= {"MASTER_ADDR": _reachable(comm, port, one_host), "MASTER_PORT": str(port)}
    if not one_host and "GLOO_SOCKET_IFNAME" not in os.environ and (interface := _interface_towards(found["MASTER_ADDR"], port)):
        found["GLOO_SOCKET_IFNAME"] = interface
    found |= {"TORCHELASTIC_RUN_ID": OWN_RUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    if "OMP_NUM_THREADS" not in os.environ:
        found["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)  # PyTorch has read the variable already
    os.environ.update(found)
    return found


def _check(refused: Iterable[str]) -> None:
    for name in sorted(refused):
        raise SparseAllreduceError(f"init_process_group has no option {name}: rank, size and store follow from the communicator")
    if distributed.is_initialized():
        raise ValueError("the process group of torch.distributed is initialised already")


def _positions(hosts: list[str], rank: int) -> dict[str, str]:
    """Return the variables for the number of this rank, among all ranks and on its host."""
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    groups = list(dict.fromkeys(hosts))
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": len(hosts),
        "LOCAL_RANK": neighbours.index(rank),
        "LOCAL_WORLD_SIZE": len(neighbours),
        "GROUP_RANK": groups.index(hosts[rank]),
        "GROUP_WORLD_SIZE": len(groups),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": len(hosts),
    }
    return {name: str(number) for name, number in numbers.items()} | {"ROLE_NAME": "default"}


def _threads(places: list[Place], rank: int) -> int:
    """Return the number of threads of a rank if the ranks of its host share the cores equally."""
    neighbours = same_host(places, rank)
    return max(1, count_cores(places[other] for other in neighbours) // len(neighbours))


def _open_store(ranks: int) -> int:
    """Open the store on rank 0, unless it is open, and return its port."""
    global _store
    if _store is None:
        given = os.environ.get("MASTER_PORT", "0")
        try:
            _store = distributed.TCPStore("localhost", int(given), ranks, is_master=True, wait_for_workers=False)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SparseAllreduceError(f"MASTER_PORT={given} cannot be opened: leave it unset, or name a free port") from error
    return int(_store.port)


def _reachable(comm: Any, port: int, one_host: bool) -> str:
    """Return the first address of rank 0 at which every rank reaches the port. Collective."""
    addresses: list[str] = gather_results(comm, lambda: _addresses(one_host) if comm.rank == 0 else [])[0]
    answers = gather(comm, [_answers(address, port) for address in addresses])
    for number, address in enumerate(addresses):
        if all(each[number] for each in answers):
            return address
    deaf = next(rank for rank, each in enumerate(answers) if not any(each)) if not all(map(any, answers)) else None
    who = "no address is reached by all ranks" if deaf is None else f"rank {deaf} reaches none"
    raise SparseAllreduceError(
        f"PyTorch's ranks meet at rank 0, at one of {', '.join(addresses)}, port {port}, but {who}: set MASTER_ADDR to an address of the "
        "host of rank 0, and MASTER_PORT to a port that is open between the hosts"
    )


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_SECONDS).close()
    except OSError:
        return False
    return True


def _addresses(one_host: bool) -> list[str]:
    """Return the addresses of this host, beginning with the one most likely to be reachable."""
    given = os.environ.get("MASTER_ADDR")
    if given:
        return [given]
    if one_host:
        return [_LOOPBACK]
    found = []
    for name in (socket.gethostname(), socket.getfqdn()):
        try:
            found += [str(each[4][0]) for each in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
        except OSError:
            continue
    found += [address for _, name in socket.if_nameindex() if (address := _address_of(name))]
    return [each for each in dict.fromkeys(found) if not each.startswith("127.")] or [_LOOPBACK]


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, or an empty string if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, _REQUEST.pack(interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _interface_towards(address: str, port: int) -> str:
    """Return the network interface by which an address is reached, empty if that is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((address, port))  # which sends nothing
        except OSError:
            return ""
        own = asked.getsockname()[0]
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == own), "")


def _host() -> str:
    """Return what identifies the host of this rank to NCCL, and therefore to PyTorch: NCCL_HOSTID, or host name and boot id.

    Containers of one machine have names of their own, and each numbers its devices from 0.
    """
    return os.environ.get("NCCL_HOSTID") or f"{socket.gethostname()} {this_place().host.hex()}"


def _network() -> tuple[bytes, str]:
    """Return an identifier of the loopback network: processes with the same identifier can reach each other through it."""
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    return this_place().host, namespace
