"""What test_launched.py runs: a program that torchrun starts, and ranks whose DataLoader has workers."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from nets import ALL
from torch import nn

import sparseallreduce as sar
from sparseallreduce import torch as ours

SAMPLES = 6


def try_every_way_in():
    """Under torchrun every way in without ``comm`` raises; with one, a process computes alone."""
    model = nn.Linear(4, 2)
    calls = {
        **{kind.__name__: partial(kind, model.parameters(), 0.1) for kind in ALL},
        "distributed": lambda: ours.distributed(torch.optim.SGD)(model.parameters(), lr=0.1),
        "comm_hook": ours.comm_hook,
        "HostSampler": lambda: ours.HostSampler(range(SAMPLES)),
        "parallel_map": lambda: ours.parallel_map(torch.square, [torch.ones(3)]),
        "parallel_operator": lambda: ours.parallel_operator(torch.square, torch.ones(3)),
        "allreduce": lambda: sar.allreduce(sar.SparseStream([1], [1.0], 4)),
    }
    for name, call in calls.items():
        print(name, flush=True)  # in case it does not raise
        with pytest.raises(sar.LauncherError, match="torchrun has started 2 processes"):
            call()
    optimizer = ours.OkTopkSGD(model.parameters(), 0.1, comm=sar.SERIAL)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.check_replicas()
    print("raised by all", flush=True)


class Samples(torch.utils.data.Dataset):
    """Samples that a sum makes of which only the worker knows."""

    def __init__(self, method):
        self.method = method

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        worker = torch.utils.data.get_worker_info()
        assert worker is not None
        summed = sar.allreduce(sar.SparseStream([number], [1.0], SAMPLES)).to_dense()
        assert (self.method == "fork") == ("mpi4py.MPI" in sys.modules)
        if self.method == "fork":
            from mpi4py import MPI

            try:
                sar.allreduce(sar.SparseStream([number], [1.0], SAMPLES), MPI.COMM_WORLD)
            except sar.ForkError:
                return torch.from_numpy(summed)
            raise AssertionError("the communicator of the rank has been taken")
        return torch.from_numpy(summed)


def load_by_workers():
    """Workers of a DataLoader compute alone, while the ranks train on what they load."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.manual_seed(0)
    model = nn.Linear(SAMPLES, 1)
    optimizer = ours.TopKSGD(model.parameters(), 0.1, density=0.5)
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Samples(method), batch_size=3, num_workers=1, multiprocessing_context=method)
        found = []
        for batch in loader:
            found.append(batch)
            optimizer.zero_grad()
            model(batch.float()).sum().backward()
            optimizer.step()
        assert np.array_equal(torch.cat(found).numpy(), np.eye(SAMPLES)), found
        optimizer.check_replicas()
        assert sar.allreduce(sar.SparseStream([0], [1.0], 1)).to_dense()[0] == comm.size
    print("loaded", flush=True)


if __name__ == "__main__":
    try_every_way_in()
