"""Samples dealt to hosts for good, so that a host caches its own part of a data set (CommLib section 4.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sparseallreduce.errors import MismatchError
from sparseallreduce.runtime.communicators import resolve
from sparseallreduce.runtime.hosts import same_host, this_place
from sparseallreduce.runtime.launching import Telling
from sparseallreduce.runtime.objects import gather

__all__ = ["HostSampler"]


class HostSampler(torch.utils.data.Sampler):
    """In the place of ``DistributedSampler``: the ranks of a host share out the same samples in every epoch, in a new order each time.

    All hosts together then keep one copy of the data set, each as much of it as it has ranks. The order is less random than one over all
    samples, as a host never has those of another. Collective where it is constructed.

    Parameters
    ----------
    dataset : sized
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    seed : int
        The same on all ranks.
    hosts : sequence of int, optional
        The host of each rank; by default as they are.

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
        with Telling(comm):
            given = len(dataset), seed, None if hosts is None else tuple(hosts)
            told = gather(comm, (given, this_place()))
            if any(other != given for other, _ in told) or (hosts is not None and len(hosts) != comm.size):
                raise MismatchError(f"the ranks of a sampler give one length, seed and host of each: {[other for other, _ in told]}")
            places = [place for _, place in told]
            first = [min(same_host(places, rank)) for rank in range(comm.size)] if hosts is None else list(hosts)
            mine = [rank for rank in range(comm.size) if first[rank] == first[comm.rank]]
            before = sum(1 for host in first if host < first[comm.rank])
            self._each: int = -(-len(dataset) // comm.size)  # samples of a rank in an epoch; some come twice, so that all have as many
            order = np.resize(np.random.default_rng(seed).permutation(len(dataset)), self._each * comm.size)
            self._samples = order[before * self._each : (before + len(mine)) * self._each]
            self._place, self._seed, self._epoch = mine.index(comm.rank), [seed, before], 0

    def set_epoch(self, epoch: int) -> None:
        """Before each epoch: the order of the next one."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._each

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng([*self._seed, self._epoch]).permutation(self._samples)
        return iter(order[self._place * self._each : (self._place + 1) * self._each].tolist())
