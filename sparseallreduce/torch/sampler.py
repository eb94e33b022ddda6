"""A sampler that always gives a host the same samples, so that each host caches its part of a data set (CommLib section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sparseallreduce.errors import MismatchError
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.hosts import same_host, this_place
from sparseallreduce.runtime.launching import ErrorReporter
from sparseallreduce.runtime.objects import gather

__all__ = ["HostSampler"]


class HostSampler(torch.utils.data.Sampler[Any]):
    """A replacement for ``DistributedSampler`` in which the ranks of a host share the same samples in every epoch, in a new order.

    All hosts together then cache the data set once, and each host's part is proportional to its number of ranks. The order is less random
    than with ``DistributedSampler``, because a host never gets the samples of another host. Construction is collective.

    Parameters
    ----------
    dataset : sized
        The data set, of which only the length is used.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    seed : int
        The seed of the order, the same on all ranks.
    hosts : sequence of int, optional
        The host of each rank. By default the actual hosts are used.

    Raises
    ------
    MismatchError
        On all ranks, if the ranks give different lengths, seeds or hosts.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sampler = HostSampler(range(5), sar.SERIAL)
    >>> sampler.set_epoch(1)
    >>> len(sampler), sorted(sampler)
    (5, [0, 1, 2, 3, 4])
    """

    def __init__(self, dataset: Any, comm: Any = None, *, seed: int = 0, hosts: Sequence[int] | None = None) -> None:
        comm = resolve(comm)
        with ErrorReporter(comm):
            given = len(dataset), seed, None if hosts is None else tuple(hosts)
            gathered = gather(comm, (given, this_place()))
            if any(other != given for other, _ in gathered) or (hosts is not None and len(hosts) != comm.size):
                raise MismatchError(f"the ranks of a sampler give one length, seed and host of each: {[other for other, _ in gathered]}")
            places = [place for _, place in gathered]
            first = [min(same_host(places, rank)) for rank in range(comm.size)] if hosts is None else list(hosts)
            mine = [rank for rank in range(comm.size) if first[rank] == first[comm.rank]]
            before = sum(1 for host in first if host < first[comm.rank])
            self._each: int = -(-len(dataset) // comm.size)  # some samples occur twice, so that all ranks have as many
            order = np.resize(np.random.default_rng(seed).permutation(len(dataset)), self._each * comm.size)
            self._samples = order[before * self._each : (before + len(mine)) * self._each]
            self._place, self._seed, self._epoch = mine.index(comm.rank), [seed, before], 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch. Call it before each epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._each

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([*self._seed, self._epoch]).permutation(self._samples)
        return iter(order[self._place * self._each : (self._place + 1) * self._each].tolist())
