"""CachedDataset by the ranks of a host: each sample is asked for once, in whichever order they want them, and shared out when filling."""

from collections import Counter

import pytest
from mpi_cases import each, shared_folder
from slow_store import SlowStore, check, decoded, doubled
from torch.utils.data import DataLoader, DistributedSampler

from sparseallreduce.data_cache import DataCache
from sparseallreduce.errors import MismatchError
from sparseallreduce.torch import CachedDataset, HostSampler


@each(workers=[0, 1], levels=["disk", "memory", "both"])
def case_ranks_ask_for_each_sample_once(comm, workers, levels):
    bounds = {"disk_bytes": (1 << 20) * (levels != "memory"), "memory_bytes": (1 << 20) * (levels != "disk")}
    with shared_folder(comm) as folder, DataCache(folder / "cache", **bounds) as cache:
        store = SlowStore(folder)
        cached = CachedDataset(store, cache, name="store", decode=decoded, transform=doubled)
        cache.get("kept", lambda: 0)  # memory is there as long as one uses it, and workers come and go
        comm.Barrier()
        sampler = DistributedSampler(cached, comm.size, comm.rank)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(cached, 4, sampler=sampler, num_workers=workers):
                check(images, labels)
        comm.Barrier()
        assert store.asked == list(range(24))


@each(length=[0, 1, 7, 24], several=[False, True])
def case_a_host_has_the_same_samples_in_every_epoch(comm, length, several):
    hosts = [rank % 2 if several else 0 for rank in range(comm.size)]
    sampler = HostSampler(range(length), comm, seed=3, hosts=hosts if several else None)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler) == -(-length // comm.size)
        epochs.append(comm.allgather(list(sampler)))
        every = [index for each in epochs[-1] for index in each]
        assert set(every) == set(range(length)) and max(Counter(every).values(), default=0) <= comm.size
        for host in (0, 1):
            kept = [sorted(index for own, place in zip(each, hosts) if place == host for index in own) for each in epochs]
            assert all(each == kept[0] for each in kept)
    assert length < 7 or epochs[0] != epochs[1]
    with pytest.raises(MismatchError, match="one length"):
        HostSampler(range(length + comm.rank), comm)


def case_ranks_share_out_what_is_to_be_fetched(comm):
    with shared_folder(comm) as folder:
        store = SlowStore(folder)
        cached = CachedDataset(store, DataCache(folder / "cache"), name="store")
        fetched = cached.fill()
        assert len(store.asked) == len(set(store.asked)) == 24  # all are there when it returns
        assert sum(comm.allgather(fetched)) == 24 and cached.fill() == 0
