"""Two ranks whose tensors, or those of one of them, are taken for a GPU's; run under mpiexec and numba's simulator."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "cuda")]

import pytest
import torch
from fake_gpu import simulated
from mpi4py import MPI
from torch import nn

import sparseallreduce as sar
from sparseallreduce.streams.kernels.cuda import ranking
from sparseallreduce.torch import LAMB, DenseSGD, OkTopkSGD, TopKSGD, distributed
from sparseallreduce.torch.buckets import Member

comm = MPI.COMM_WORLD


def trained(kind, **options):
    torch.manual_seed(1)
    table, layer = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 4)
    optimizer = kind([*table.parameters(), *layer.parameters()], density=0.4, comm=comm, **options)
    for step in range(1 if "parallel" in options else 2):
        optimizer.zero_grad()
        layer(table(torch.tensor([comm.rank, 2 + step]))).square().mean().backward()
        optimizer.step()
    optimizer.check_replicas()
    return torch.cat([parameter.detach().reshape(-1) for parameter in (*table.parameters(), *layer.parameters())])


def refused(kind):
    """What a step raises of parameters that are on a GPU on rank 0 alone."""
    torch.manual_seed(1)
    table, layer = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 4)
    optimizer = kind([*table.parameters(), *layer.parameters()], lr=0.1, comm=comm)
    before = layer.weight.detach().clone()
    layer(table(torch.tensor([comm.rank, 2]))).square().mean().backward()
    with pytest.raises(sar.MismatchError, match="a GPU's on rank 0; the host's on rank 1"):
        optimizer.step()
    assert torch.equal(layer.weight.detach(), before)
    with (
        mock.patch.object(Member, "kind", "torch.float32 on a cuda") if comm.rank == 0 else nullcontext(),
        pytest.raises(sar.MismatchError, match=r"torch.float32 on a cuda.* on rank 0"),
    ):
        kind(layer.parameters(), lr=0.1, comm=comm)


def main():
    ranking.DIGIT, ranking.DIGITS = 5, 2**5
    for kind, options in ((OkTopkSGD, {"lr": 0.1, "overlap": True}), (distributed(LAMB, "gtopk"), {"lr": 0.1, "parallel": True})):
        host = trained(kind, **options)
        with simulated():
            assert torch.equal(trained(kind, **options), host)
    for kind in (OkTopkSGD, partial(TopKSGD, overlap=True), DenseSGD):
        with simulated() if comm.rank == 0 else nullcontext():
            refused(kind)
    print(f"rank {comm.rank} is done")


if __name__ == "__main__":
    main()
