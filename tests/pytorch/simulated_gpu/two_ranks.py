"""Two ranks whose tensors are taken for a GPU's; run under mpiexec and numba's simulator."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2] / "cuda")]

import torch
from fake_gpu import simulated
from mpi4py import MPI
from torch import nn

from sparseallreduce.streams.kernels.cuda import ranking
from sparseallreduce.torch import LAMB, OkTopkSGD, distributed

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


def main():
    ranking.DIGIT, ranking.DIGITS = 5, 2**5
    for kind, options in ((OkTopkSGD, {"lr": 0.1, "overlap": True}), (distributed(LAMB, "gtopk"), {"lr": 0.1, "parallel": True})):
        host = trained(kind, **options)
        with simulated():
            assert torch.equal(trained(kind, **options), host)
    print(f"rank {comm.rank} is done")


if __name__ == "__main__":
    main()
